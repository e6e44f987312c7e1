/* test_sampling.c: the thread that samples for cw-trainer serve ends when it is told to. */
#include "common/base/clock.h"
#include "tests/support/support.h"
#include "trainer/serve/sampling.h"

// It sleeps when there is nothing to do, and is woken: it does not sleep once more.
static void test_ends_at_once(void **state)
{
    (void)state;
    double least_ms = 1e9; // of some, should the machine be busy
    for (int i = 0; i < 3; i++) {
        struct sampling *s;
        assert_ok(sampling_new("nobody.sock", 60, NULL, &s));
        clock_sleep_ms(50);
        const int64_t since = clock_now_ns();
        sampling_free(s);
        if (clock_ms_since(since) < least_ms) least_ms = clock_ms_since(since);
    }
    assert_true(least_ms < 500);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_ends_at_once)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
