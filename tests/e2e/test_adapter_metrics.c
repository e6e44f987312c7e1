/* test_adapter_metrics.c: what /metrics says of each LoRA adapter: its samples and its tokens, a
 * row for each that is loaded, as vLLM's dashboards and ours read them. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/served.h"
#include "tests/support/tiny_adapter.h"

#define LIMIT_MS 60000

static void assert_metric(const char *line)
{
    struct wire_answer a;
    daemon_request(served.socket, "GET", "/metrics", "", NULL, &a);
    assert_contains(bytes_text(&a.body), line);
}

static void wait_for_metric(const char *line)
{
    const int64_t deadline = clock_deadline_ns(LIMIT_MS);
    for (bool found = false; !found; clock_sleep_ms(5)) {
        struct wire_answer a;
        daemon_request(served.socket, "GET", "/metrics", "", NULL, &a);
        found = strstr(bytes_text(&a.body), line);
        if (!found && clock_now_ns() > deadline)
            fail_msg("no %s in\n%s", line, bytes_text(&a.body));
    }
}

#define ROW(metric, adapter)                                                                       \
    "commonweight:adapter_" metric "{model_name=\"base\",adapter=\"" adapter "\"} "

TEST(adapters_have_rows)
{
    const char *model = daemon_model(test_folder(), true, 11), *folder = test_folder();
    assert_ok(tiny_adapter_write(folder, model, "{\"r\":2,\"target_modules\":\"all-linear\"}", 1));
    daemon_start(&served, model,
                 args("--max-adapters 2 --max-lora-rank 4 --served-model-name base"));
    assert_metric("vllm:lora_requests_info{model_name=\"base\",max_lora=\"2\","
                  "running_lora_adapters=\"\",waiting_lora_adapters=\"\"} ");
    daemon_load_adapter(&served, "a", folder);
    daemon_load_adapter(&served, "b", folder);
    assert_metric(ROW("generation_tokens_total", "a") "0\n");
    ask("/bridge/pause", "{}");
    const int fd = daemon_ask(&served, "/v1/completions",
                              "{\"model\":\"a\",\"prompt\":[1,2],\"n\":2,\"max_tokens\":5,"
                              "\"ignore_eos\":true}");
    wait_for_metric(ROW("requests_waiting", "a") "2\n");
    assert_metric(ROW("requests_waiting", "b") "0\n");
    assert_metric(ROW("requests_running", "a") "0\n");
    assert_metric("running_lora_adapters=\"\",waiting_lora_adapters=\"a\"} ");
    ask("/bridge/resume", "{}");
    struct wire_answer a;
    assert_true(wire_read(fd, LIMIT_MS, &a));
    assert_int_equal(a.status, 200);
    wait_for_metric(ROW("generation_tokens_total", "a") "10\n");
    assert_metric(ROW("generation_tokens_total", "b") "0\n");
    wait_for_metric(ROW("requests_running", "a") "0\n");
    assert_int_equal(daemon_stop(&served), 0);
}
