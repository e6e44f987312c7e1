/* test_metrics.c: GET /metrics: vLLM's histograms with its buckets and the numbers that known
 * requests must give, the text as Prometheus' own parser reads it, and
 * what tools/grafana-dashboard prints, whose queries must name what is there. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/served.h"

#include <ctype.h>

static const char *page; // of /metrics, after the requests below

static void load_page(void)
{
    struct wire_answer a;
    daemon_request(served.socket, "GET", "/metrics", "", NULL, &a);
    assert_int_equal(a.status, 200);
    page = bytes_text(&a.body);
}

// 3 prompts of 4 tokens with 2 samples of 10 tokens each, one of which begins with cached blocks.
static void start(void)
{
    daemon_start(&served, daemon_model(test_folder(), true, 7),
                 args("--listen 127.0.0.1:0 --block-size 2 --speculative ngram:2"));
    const char *body = "{\"prompt\":[1,2,3,4],\"n\":2,\"max_tokens\":10,\"ignore_eos\":true}";
    for (int i = 0; i < 3; i++) ask("/v1/completions", body);
    load_page();
}

// The value of the line that begins with `series`, labels included.
static double value_of(const char *series)
{
    const char *line = page;
    size_t n = strlen(series);
    while (line && strncmp(line, series, n) != 0) {
        line = strchr(line, '\n');
        if (line) line++;
    }
    if (!line) fail_msg("no series %s", series);
    return atof(line + n);
}

static double total(const char *name, const char *what)
{
    return value_of(test_text("%s_%s{model_name=\"model\"}", name, what));
}

static double bucket(const char *name, const char *le)
{
    return value_of(test_text("%s_bucket{model_name=\"model\",le=\"%s\"}", name, le));
}

// ---- what known requests give ------------------------------------------------------------------

TEST(test_tokens)
{
    const char *prompt = "vllm:request_prompt_tokens",
               *generated = "vllm:request_generation_tokens";
    assert_true(total(prompt, "count") == 6 && total(prompt, "sum") == 24);
    assert_true(bucket(prompt, "2") == 0 && bucket(prompt, "5") == 6);
    assert_true(total(generated, "count") == 6 && total(generated, "sum") == 60);
    assert_true(bucket(generated, "5") == 0 && bucket(generated, "10") == 6);
    assert_true(total("vllm:request_params_n", "sum") == 6);
    assert_true(total("vllm:request_params_max_tokens", "sum") == 30);
    // the later two prompts found their first block
    assert_true(total("vllm:request_prefill_kv_computed_tokens", "sum") == 8 + 4 + 4);
}

// A prompt is computed once for its samples, but for what was cached.
TEST(test_steps)
{
    const char *name = "vllm:iteration_tokens_total";
    assert_true(total(name, "sum") == 4 + 2 + 2 + 60);
    assert_true(total(name, "count") == value_of("commonweight:steps_total{model_name=\"model\"}"));
}

TEST(test_times)
{
    const double queue = total("vllm:request_queue_time_seconds", "sum");
    const double prefill = total("vllm:request_prefill_time_seconds", "sum");
    const double decode = total("vllm:request_decode_time_seconds", "sum");
    const double inference = total("vllm:request_inference_time_seconds", "sum");
    const double whole = total("vllm:e2e_request_latency_seconds", "sum");
    assert_true(queue >= 0 && prefill > 0 && decode > 0);
    assert_true(fabs(prefill + decode - inference) < 1e-6);
    assert_true(fabs(queue + inference - whole) < 1e-6);
    assert_true(fabs(total("vllm:request_time_per_output_token_seconds", "sum") - decode / 9) <
                1e-6);
    assert_true(total("vllm:request_inference_time_seconds", "count") == 6);
}

// The bounds of vLLM 0.24; a bucket that an alert names must be there.
TEST(test_buckets)
{
    const json_t *cases = test_rows("metrics", "buckets"), *row, *bound;
    size_t i, k;
    json_array_foreach (cases, i, row)
        json_array_foreach (json_at(row, "bounds"), k, bound)
            bucket(text_of(row, "series"), json_string_value(bound));
    assert_null(
        strstr(page, "vllm:request_prompt_tokens_bucket{model_name=\"model\",le=\"1000\"}"));
}

TEST(test_cache_config)
{
    const char *line = strstr(page, "\nvllm:cache_config_info{");
    assert_non_null(line);
    const char *end = strchr(line + 1, '\n');
    const char *text = test_text("%.*s", (int)(end - line), line);
    assert_contains(text, "block_size=\"2\"");
    assert_contains(text, "enable_prefix_caching=\"True\"");
    assert_contains(text, "cache_dtype=\"f32\"");
    assert_contains(text, "} 1");
    const char *blocks = test_text("num_gpu_blocks=\"%.0f\"",
                                   value_of("commonweight:kv_blocks{model_name=\"model\"}"));
    assert_contains(text, blocks);
}

// ---- the text ----------------------------------------------------------------------------------

TEST(test_prometheus_parser)
{
    const char *python = test_python("prometheus_client");
    const char *url = test_text("http://127.0.0.1:%d", daemon_tcp_port(&served));
    test_output(0, OPTIONS(python, test_path(test_root(), "tests/clients/parse_metrics.py"), url));
}

// ---- the dashboard -----------------------------------------------------------------------------

// A series of that name.
static bool is_served(const char *name, size_t len)
{
    for (const char *at = page; (at = strstr(at, name)); at++)
        if ((at == page || at[-1] == '\n') && at[len] == '{') return true;
    return false;
}

static int check_query(const char *query)
{
    static const char *const prefixes[] = {"vllm:", "commonweight:"};
    int n = 0;
    for (size_t i = 0; i < 2; i++)
        for (const char *at = query; (at = strstr(at, prefixes[i])); n++) {
            size_t len = strlen(prefixes[i]);
            while (isalnum((unsigned char)at[len]) || at[len] == '_') len++;
            const char *name = test_text("%.*s", (int)len, at);
            if (!is_served(name, len)) fail_msg("%s: the server has no %s", query, name);
            at += len;
        }
    return n;
}

TEST(test_dashboard)
{
    json_t *panel, *target;
    size_t i, k;
    int queries = 0;
    const json_t *board = json_of(test_shell("%s/tools/grafana-dashboard", test_root()));
    json_array_foreach (json_object_get(board, "panels"), i, panel)
        json_array_foreach (json_object_get(panel, "targets"), k, target) {
            const char *query = text_of(target, "expr");
            if (check_query(query) == 0) fail_msg("%s names no metric", query);
            assert_contains(query, "model_name=\"$model\"");
            queries++;
        }
    assert_true(queries > 30);
    check_query(text_of(board, "templating.list.1.query"));
}

TESTS_BETWEEN(start, served_stop)
