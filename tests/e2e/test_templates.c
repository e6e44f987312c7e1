/* test_templates.c: chat templates that take as long as they are let: others are served meanwhile,
 * and no more of them wait than the server takes samples. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/served.h"

#include <poll.h>

// "keys" looks up keys of 4 MB, until steps are out; "slow" goes through a tenth of the characters
// that steps allow.
static const char template[] =
    "{%- set what = messages[0].content -%}"
    "{%- if what == 'keys' -%}"
    "{%- set key = 'a' * 4194304 ~ 'b' -%}{%- set d = {'a' * 4194304 ~ 'c': 1} -%}"
    "{%- for i in range(99999) -%}{{ d[key] }}{%- endfor -%}"
    "{%- elif what == 'slow' -%}"
    "{%- set text = 'a' * 1048576 -%}"
    "{%- for i in range(30) -%}{% set x = text.lower() %}{%- endfor -%}"
    "{%- else -%}{{ what }}{%- endif -%}";

static const char slow[] = "{\"messages\":[{\"role\":\"user\",\"content\":\"slow\"}]}";

static void start(void)
{
    const char *file = test_path(test_folder(), "template.jinja");
    test_write(file, template, strlen(template));
    daemon_start(&served, daemon_model(test_folder(), true, 7),
                 args("--max-batch 2 --max-queue 3 --kv-memory 32M --chat-template-file %s", file));
}

static bool has_answer(int fd)
{
    return poll(&(struct pollfd){.fd = fd, .events = POLLIN}, 1, 0) > 0;
}

static void await_answer(int fd, int status, const char *part)
{
    struct wire_answer a;
    assert_true(wire_read(fd, 120000, &a));
    assert_int_equal(a.status, status);
    assert_contains(bytes_text(&a.body), part);
    close(fd);
}

TEST(keys_are_charged_by_their_bytes)
{
    ask("/v1/chat/completions", "{\"messages\":[{\"role\":\"user\",\"content\":\"a\"}],"
                                "\"max_tokens\":1}");
    await_answer(daemon_ask(&served, "/v1/chat/completions",
                            "{\"messages\":[{\"role\":\"user\",\"content\":\"keys\"}]}"),
                 400, "more steps than the limit");
}

TEST(others_are_served_meanwhile)
{
    static const struct {
        const char *path, *body;
    } renders[] = {
        {"/v1/chat/completions", slow},
        {"/tokenize", slow},
        {"/v1/rollouts",
         "{\"groups\":[{\"messages\":[{\"role\":\"user\",\"content\":\"slow\"}]}]}"},
    };
    for (size_t i = 0; i < sizeof renders / sizeof *renders; i++) {
        const int fd = daemon_ask(&served, renders[i].path, renders[i].body);
        for (int k = 0; k < 3; k++) daemon_get(served.socket, "/health", 200);
        ask("/v1/completions", "{\"prompt\":\"a\",\"max_tokens\":1}");
        assert_false(has_answer(fd));
        close(fd); // where it leaves, the next one's turn comes when this one's steps are over
    }
}

// One beyond is told so, also while the pool is full: the last that the server happens to read;
// those whose clients leave are not rendered.
TEST(as_many_wait_as_are_taken)
{
    enum { ASKED = 5 + 1 };
    struct pollfd asked[ASKED];
    int beyond = 0;
    const int64_t give_up_ns = clock_deadline_ns(120000);
    served_stop(); // what the tests before have left is still rendered there
    start();
    for (int i = 0; i < ASKED; i++)
        asked[i] = (struct pollfd){.fd = daemon_ask(&served, "/v1/chat/completions", slow),
                                   .events = POLLIN};
    assert_true(poll(asked, ASKED, 120000) > 0);
    while (!asked[beyond].revents) beyond++;
    await_answer(asked[beyond].fd, 429, "waiting to be read");
    daemon_get(served.socket, "/health", 200);
    for (int i = 0; i < ASKED; i++) {
        if (i == beyond) continue;
        assert_false(has_answer(asked[i].fd));
        close(asked[i].fd);
    }
    for (struct wire_answer a = {.status = 429}; a.status == 429;) {
        daemon_request(served.socket, "POST", "/v1/chat/completions", "",
                       "{\"messages\":[{\"role\":\"user\",\"content\":\"a\"}],\"max_tokens\":1}",
                       &a);
        assert_true(a.status == 200 || a.status == 429);
        clock_sleep_ms(10);
        assert_true(clock_now_ns() < give_up_ns);
    }
}

TESTS_BETWEEN(start, served_stop)
