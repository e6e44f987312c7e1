/* rank_group.c: forked ranks and the files by which they say how it ended. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/rank_group.h"
#include "common/base/spawn.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/prctl.h>
#include <sys/socket.h>

#define LIMIT_MS 60000

static void run_rank(const struct rendezvous_options *options, rank_fn fn, void *context,
                     const char *outcome)
{
    char text[2100];
    const enum status st = fn(options, context);
    const int n = snprintf(text, sizeof text, "%d\n%s", st, st == ST_OK ? "" : status_message());
    file_write_atomic(outcome, 0600, text, (size_t)n);
    _exit(0);
}

int rank_group_add(struct rank_group *g, const struct rendezvous_options *options, int rank,
                   rank_fn fn, void *context)
{
    char name[32];
    const pid_t parent = getpid();
    struct rendezvous_options own = *options;
    assert_true(g->n < RANK_GROUP_MAX);
    struct rank_process *p = &g->list[g->n];
    own.who.rank = rank;
    snprintf(name, sizeof name, "outcome-%d", g->n);
    p->outcome = test_path(test_folder(), name);
    p->pid = fork();
    assert_true(p->pid >= 0);
    if (p->pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (getppid() == parent) run_rank(&own, fn, context, p->outcome);
        _exit(1);
    }
    setpgid(p->pid, p->pid); // spawn_end() kills a group
    return g->n++;
}

enum status rank_group_outcome(struct rank_group *g, int i, char ret_sentence[2048])
{
    struct rank_process *p = &g->list[i];
    int code = ST_CANCELLED;
    if (ret_sentence) *ret_sentence = '\0';
    if (!spawn_exited(p->pid, LIMIT_MS, NULL)) fail_msg("rank process %d does not end", i);
    spawn_end(p->pid);
    p->pid = 0;
    if (!file_exists(p->outcome)) return ST_CANCELLED;
    char *text = test_read(p->outcome), *line = strchr(text, '\n');
    sscanf(text, "%d", &code);
    if (ret_sentence && line) snprintf(ret_sentence, 2048, "%s", line + 1);
    return (enum status)code;
}

void rank_group_end(struct rank_group *g)
{
    for (int i = 0; i < g->n; i++)
        if (g->list[i].pid) spawn_end(g->list[i].pid);
    g->n = 0;
}

int test_free_port(void)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t len = sizeof address;
    const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_true(fd >= 0 && bind(fd, (struct sockaddr *)&address, sizeof address) == 0 &&
                getsockname(fd, (struct sockaddr *)&address, &len) == 0);
    close(fd);
    return ntohs(address.sin_port);
}
