/* test_bench_step.c: cw-bench step, which drives the real server and trainer, of a whole model and
 * of an adapter: the form of its report, that an adapter takes less memory, and what a checkpoint
 * costs. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/daemon.h"

static json_t *report_of(const char *model, const char *option, const char *value)
{
    return json_of(
        test_output(0, args("%s step --model %s --device %s --batch 4 --group 2 --tokens 6 "
                            "--steps 2 --warmup 1 --prompt-tokens 5 %s %s --json",
                            test_binary("cw-bench"), model, test_device(), option, value)));
}

static double number(const json_t *report, const char *key)
{
    assert_true(json_is_number(json_object_get(report, key)));
    return json_number_value(json_object_get(report, key));
}

TEST(an_adapter_takes_less)
{
    const char *model = daemon_model(test_folder(), true, 5);
    json_t *whole = report_of(model, "--lora-r", "0"), *adapter = report_of(model, "--lora-r", "2");
    assert_true(number(whole, "lora_r") == 0 && number(adapter, "lora_r") == 2);
    assert_true(number(adapter, "ms_per_step") > 0 && number(adapter, "limit_ms") > 0);
    assert_true(number(adapter, "trainer_mib") > 0);
    assert_true(number(adapter, "trainer_mib") < number(whole, "trainer_mib"));
}

TEST(a_checkpoint_goes_over_the_disk)
{
    const char *model = daemon_model(test_folder(), true, 5);
    json_t *shared = report_of(model, "--sync", "shared"),
           *checkpoint = report_of(model, "--sync", "checkpoint");
    assert_true(number(shared, "written_mb") == 0 && number(checkpoint, "written_mb") > 0);
    assert_true(number(shared, "sync_ms") > 0 && number(checkpoint, "sync_ms") > 0);
    assert_true(number(checkpoint, "trainer_mib") > number(shared, "trainer_mib"));
}
