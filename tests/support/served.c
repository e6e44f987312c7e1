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

const char *text_of(const json_t *object, const char *key)
{
    const json_t *value = json_object_get(object, key);
    if (!json_is_string(value)) fail_msg("\"%s\" is not a string", key);
    return json_string_value(value);
}

json_int_t int_of(const json_t *object, const char *key)
{
    const json_t *value = json_object_get(object, key);
    if (!json_is_integer(value)) fail_msg("\"%s\" is not a whole number", key);
    return json_integer_value(value);
}

json_t *choice_of(const json_t *answer, size_t i)
{
    json_t *choice = json_array_get(json_object_get(answer, "choices"), i);
    if (!choice) fail_msg("there is no choice %zu", i);
    return choice;
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

json_int_t cached_of(const json_t *usage)
{
    return int_of(json_object_get(usage, "prompt_tokens_details"), "cached_tokens");
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
