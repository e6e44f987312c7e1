/* served.c: see served.h. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/served.h"

struct daemon served;

void served_start(void)
{
    const char *const *options = OPTIONS("--max-batch", "8", "--max-queue", "192", "--max-body",
                                         "64K", "--kv-memory", "32M", "--prefill-chunk", "24");
    daemon_start(&served, daemon_model(test_folder(), true, 7), options);
}

void served_stop(void)
{
    daemon_end(&served);
}

double number_in_metrics(const char *name)
{
    struct wire_answer a;
    daemon_request(served.socket, "GET", "/metrics", "", NULL, &a);
    assert_int_equal(a.status, 200);
    const char *line = strstr(bytes_text(&a.body), name);
    while (line && line != a.body.data && line[-1] != '\n') line = strstr(line + 1, name);
    if (!line) fail_msg("no metric %s", name);
    double x = atof(strchr(line, '}') + 1);
    return x;
}

int open_request(const char *path, const char *body)
{
    char text[512];
    int n =
        snprintf(text, sizeof text, "POST %s HTTP/1.0\r\nHost: x\r\nContent-Length: %zu\r\n\r\n%s",
                 path, strlen(body), body);
    int fd = daemon_connect(served.socket);
    assert_true(fd >= 0 && daemon_send(fd, text, (size_t)n));
    return fd;
}
