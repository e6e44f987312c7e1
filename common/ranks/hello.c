/* hello.c: hellos as JSON, and their comparison. */
// SPDX-License-Identifier: Apache-2.0
#include "common/ranks/rendezvous.h"
#include "common/base/json.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define WHERE "a rank's hello"

void hello_of_this_process(const struct ranks *who, const char *version, const char *layout,
                           struct hello *ret)
{
    struct hello s = {.rank = who->rank, .size = who->size, .pid = getpid()};
    if (gethostname(s.host, sizeof s.host - 1) != 0) strcpy(s.host, "a host without a name");
    snprintf(s.version, sizeof s.version, "%s", version);
    snprintf(s.run_id, sizeof s.run_id, "%s", who->run_id);
    snprintf(s.layout, sizeof s.layout, "%s", layout ? layout : "");
    *ret = s;
}

json_t *hello_to_json(const struct hello *s)
{
    return json_pack("{s:i, s:i, s:I, s:s, s:s, s:s, s:s}", "rank", s->rank, "size", s->size, "pid",
                     (json_int_t)s->pid, "host", s->host, "version", s->version, "run_id",
                     s->run_id, "layout", s->layout);
}

static enum status get_text(const json_t *object, const char *key, char *ret, size_t size)
{
    const char *text = NULL;
    enum status st;
    CHECK(json_get_string(WHERE, object, key, &text));
    if (!text) FAIL(ST_FORMAT, WHERE " has no %s", key);
    if (strlen(text) >= size)
        FAIL(ST_FORMAT, WHERE ": %s has %zu bytes; %zu are the most", key, strlen(text), size - 1);
    for (const char *c = text; *c; c++) // it ends up in messages
        if ((unsigned char)*c < ' ') FAIL(ST_FORMAT, WHERE ": %s has control characters", key);
    strcpy(ret, text);
out:
    return st;
}

enum status hello_parse(const json_t *object, struct hello *ret)
{
    struct hello s = {.rank = -1};
    enum status st;
    CHECK(json_get_int32(WHERE, object, "rank", 0, RANKS_MAX - 1, &s.rank));
    CHECK(json_get_int32(WHERE, object, "size", 1, RANKS_MAX, &s.size));
    CHECK(json_get_int(WHERE, object, "pid", 1, INT64_MAX, &s.pid));
    if (s.rank < 0 || s.size == 0 || s.pid == 0)
        FAIL(ST_FORMAT, WHERE " lacks its rank, size or pid");
    CHECK(get_text(object, "host", s.host, sizeof s.host));
    CHECK(get_text(object, "version", s.version, sizeof s.version));
    CHECK(get_text(object, "run_id", s.run_id, sizeof s.run_id));
    CHECK(get_text(object, "layout", s.layout, sizeof s.layout));
    *ret = s;
out:
    return st;
}

const char *hello_name(const struct hello *s, char ret[HELLO_NAME])
{
    snprintf(ret, HELLO_NAME, "rank %d (%s, pid %lld)", s->rank, s->host, (long long)s->pid);
    return ret;
}

bool hello_other_run(const struct hello *a, const struct hello *b)
{
    return a->run_id[0] && b->run_id[0] && strcmp(a->run_id, b->run_id) != 0;
}

void hello_compare(const struct hello *zero, const struct hello *s, struct bytes *to)
{
    char name[HELLO_NAME];
    hello_name(s, name);
    const char *between = to->len > 0 ? "; " : "";
    if (s->size != zero->size) {
        bytes_printf(to, "%s%s was started as one of %d ranks, rank 0 as one of %d", between, name,
                     s->size, zero->size);
        between = "; ";
    }
    if (strcmp(s->version, zero->version) != 0) {
        bytes_printf(to, "%s%s is of version %s, rank 0 of %s", between, name, s->version,
                     zero->version);
        between = "; ";
    }
    if (strcmp(s->layout, zero->layout) != 0)
        bytes_printf(to,
                     "%s%s has weights of layout %s, rank 0 of %s: their servers must serve the "
                     "same model in the same dtype",
                     between, name, s->layout[0] ? s->layout : "(none)",
                     zero->layout[0] ? zero->layout : "(none)");
}
