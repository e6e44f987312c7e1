/* test_bench_step.c: cw-bench step, which drives the real server and trainer, of a whole model and
 * of an adapter: the form of its report, and that an adapter takes less memory. */
#include "common/base/json.h"
#include "tests/support/daemon.h"

static json_t *report_of(const char *model, const char *rank)
{
    json_t *report = NULL;
    const char *log = test_path(test_folder(), "bench.log");
    assert_int_equal(test_command(log, 120000,
                                  OPTIONS(test_binary("cw-bench"), "step", "--model", model,
                                          "--device", test_device(), "--batch", "4", "--group", "2",
                                          "--tokens", "6", "--steps", "2", "--warmup", "1",
                                          "--prompt-tokens", "5", "--lora-r", rank, "--json")),
                     0);
    assert_ok(json_read_file(log, 1 << 20, &report));
    return report;
}

static double number(const json_t *report, const char *key)
{
    assert_true(json_is_number(json_object_get(report, key)));
    return json_number_value(json_object_get(report, key));
}

static void an_adapter_takes_less(void **state)
{
    (void)state;
    const char *model = daemon_model(test_folder(), true, 5);
    json_t *whole = report_of(model, "0"), *adapter = report_of(model, "2");
    assert_true(number(whole, "lora_r") == 0 && number(adapter, "lora_r") == 2);
    assert_true(number(adapter, "ms_per_step") > 0 && number(adapter, "limit_ms") > 0);
    assert_true(number(adapter, "trainer_mib") > 0);
    assert_true(number(adapter, "trainer_mib") < number(whole, "trainer_mib"));
    json_decref(whole);
    json_decref(adapter);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(an_adapter_takes_less)};
    return cmocka_run_group_tests_name("bench_step", tests, NULL, NULL);
}
