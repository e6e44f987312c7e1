/* test_hosts.c: which Host and Origin headers a server without a key takes. */
// SPDX-License-Identifier: Apache-2.0
#include "common/http/http_impl.h"
#include "tests/support/support.h"

#include <sys/resource.h>

static const char *const allowed[] = {"gpu-box.lan", "192.168.1.7", NULL};

TEST_EACH(test_hosts, "hosts")
{
    const char *host = row_text(cases, i, "host");
    if (host_is_allowed(host, allowed) != row_flag(cases, i, "taken")) fail_msg("%s", host);
}

TEST(test_none_allowed)
{
    assert_true(host_is_allowed("localhost", NULL));
    assert_false(host_is_allowed("gpu-box.lan", NULL));
    assert_true(origin_is_allowed("http://localhost:3000", NULL));
}

TEST_EACH(test_origins, "hosts")
{
    const char *origin = row_text(cases, i, "origin");
    if (origin_is_allowed(origin, allowed) != row_flag(cases, i, "taken")) fail_msg("%s", origin);
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
