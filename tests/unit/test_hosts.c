/* test_hosts.c: which Host and Origin headers a server without a key takes. */
// SPDX-License-Identifier: Apache-2.0
#include "common/http/http_impl.h"
#include "tests/support/support.h"

#include <sys/resource.h>

static const char *const allowed[] = {"gpu-box.lan", "192.168.1.7", NULL};

TEST(test_hosts)
{
    static const char *const taken[] = {"localhost",   "localhost:8000", "LocalHost.",
                                        "127.0.0.1",   "127.0.0.1:1",    "127.8.9.1",
                                        "[::1]",       "[::1]:8000",     "gpu-box.lan:8000",
                                        "GPU-box.lan", "192.168.1.7"};
    static const char *const refused[] = {"",
                                          "evil.example",
                                          "evil.example:8000",
                                          "localhost.evil.example",
                                          "localhost@",
                                          "127.0.0.1.evil.example",
                                          "0.0.0.0",
                                          "[::2]",
                                          "[::1",
                                          "[::1]x",
                                          "192.168.1.8",
                                          "gpu-box.lan.evil.example",
                                          ":8000",
                                          "x"};
    for (size_t i = 0; i < sizeof taken / sizeof *taken; i++)
        if (!host_is_allowed(taken[i], allowed)) fail_msg("%s is refused", taken[i]);
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++)
        if (host_is_allowed(refused[i], allowed)) fail_msg("%s is taken", refused[i]);
    assert_true(host_is_allowed("localhost", NULL));
    assert_false(host_is_allowed("gpu-box.lan", NULL));
    char longest[400];
    for (size_t i = 0; i < sizeof longest; i++) longest[i] = 'a';
    longest[sizeof longest - 1] = 0;
    assert_false(host_is_allowed(longest, allowed));
}

TEST(test_origins)
{
    assert_true(origin_is_allowed("http://localhost:3000", NULL));
    assert_true(origin_is_allowed("https://gpu-box.lan", allowed));
    assert_false(origin_is_allowed("https://evil.example", allowed));
    assert_false(origin_is_allowed("null", allowed));
    assert_false(origin_is_allowed("", allowed));
    assert_false(origin_is_allowed("localhost", allowed));
    assert_false(origin_is_allowed("http://localhost/evil", allowed));
    assert_false(origin_is_allowed("http://evil.example/://localhost", allowed));
}

// Without a descriptor there is no loop, which is an error and no end of the process.
TEST(test_no_loop)
{
    struct rlimit was, none;
    uv_loop_t loop;
    assert_int_equal(getrlimit(RLIMIT_NOFILE, &was), 0);
    none = (struct rlimit){0, was.rlim_max};
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &none), 0);
    const enum status st = http_loop_init(&loop);
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &was), 0);
    assert_int_equal(st, ST_IO);
    assert_message("no event loop: ");
    assert_ok(http_loop_init(&loop));
    http_loop_close(&loop);
}
