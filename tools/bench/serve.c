/* serve.c: the serving benchmark: requests to the real cw-infer-server, over its socket, all sent
 * at once (or --batch of them in flight at a time). What it takes beyond `decode` is what the
 * server adds to a step: scheduling, events, HTTP, JSON.
 *
 * With --schemas every answer is JSON of a schema, which says when it ends. Behind it come the same
 * requests for as many tokens each without their schemas: what the constraints cost a step. And
 * before, what the first token of a new schema waits for it.
 *
 * With --shortest 100 --longest 1024 it is nano-vllm's benchmark: that many random tokens in, and
 * out, of each request. Limit: every step reads the weights once, every token the keys and values
 * before it, and every prompt is multiplied through, at the rates measured in the same run. */
// SPDX-License-Identifier: Apache-2.0
#include "common/base/clock.h"
#include "common/base/file.h"
#include "common/base/json.h"
#include "common/base/rng.h"
#include "common/http/http_client.h"
#include "tools/bench/bench.h"
#include <stdlib.h>
#include <string.h>

#define SERVING_MS 3600000

struct load {
    int prompt_tokens, tokens; // in, out at most
    json_t *body;
    struct http_transfer *request; // in flight
    int64_t sent_ns;
    double ms;
    int given; // tokens
};

struct serve_bench {
    struct bench b;
    struct programs programs;
    struct http_client *http;
    int n, in_flight;
    struct load *loads;             // (n)
    double flops, limit_ms, tokens; // flops: of a large matmul, a second
    json_t *schemas;                // of the answers, in turns; NULL: none
};

static int between(struct rng *r, int64_t min, int64_t max)
{
    return (int)min + (int)rng_below(r, (uint32_t)(max - min + 1));
}

static json_t *format_of(const struct serve_bench *s, int i)
{
    return json_pack("{s:s, s:{s:s, s:O}}", "type", "json_schema", "json_schema", "name", "answer",
                     "schema", json_array_get(s->schemas, (size_t)i % json_array_size(s->schemas)));
}

static json_t *random_request(const struct serve_bench *s, struct rng *r, int i,
                              const struct load *load)
{
    json_t *prompt = json_array();
    for (int k = 0; k < load->prompt_tokens; k++)
        json_array_append_new(prompt,
                              json_integer(rng_below(r, (uint32_t)s->b.config->vocab_size)));
    return json_pack("{s:o, s:i, s:f, s:b, s:I, s:o*}", "prompt", prompt, "max_tokens",
                     load->tokens, "temperature", s->b.o.temperature, "ignore_eos", !s->schemas,
                     "seed", (json_int_t)s->b.o.seed + i, "response_format",
                     s->schemas ? format_of(s, i) : NULL);
}

// A schema a line.
static enum status read_schemas(const char *path, json_t **ret)
{
    struct bytes text = BYTES_INIT;
    json_t *schemas = json_array(), *one;
    char *rest = NULL;
    enum status st;
    CHECK(file_read(path, 64 << 20, &text));
    for (char *line = strtok_r(text.data, "\n", &rest); line; line = strtok_r(NULL, "\n", &rest)) {
        CHECK(json_parse(path, line, strlen(line), &one));
        json_array_append_new(schemas, one);
    }
    if (json_array_size(schemas) == 0) FAIL(ST_INVALID, "%s holds no schema", path);
    *ret = TAKE_PTR(schemas);
out:
    json_decref(schemas);
    bytes_release(&text);
    return st;
}

static enum status make_loads(struct serve_bench *s)
{
    const struct bench_options *o = &s->b.o;
    struct rng r;
    rng_init(&r, (uint64_t)o->seed, 5);
    s->loads = calloc((size_t)s->n, sizeof *s->loads);
    if (!s->loads) return status_fail(ST_NO_MEMORY, "no memory for %d requests", s->n);
    for (int i = 0; i < s->n; i++) {
        struct load *load = &s->loads[i];
        load->prompt_tokens = between(&r, o->shortest, o->longest);
        load->tokens = between(&r, o->shortest, o->longest);
        load->body = random_request(s, &r, i, load);
        if (!load->body) return status_fail(ST_NO_MEMORY, "no memory for %d requests", s->n);
        s->tokens += load->tokens;
    }
    return ST_OK;
}

static enum status measure_limit(struct serve_bench *s)
{
    const enum status st = limits_bandwidth(&s->b);
    return st == ST_OK ? limits_matmul(&s->b, &s->flops) : st;
}

// Of the tokens that were given: answers of a schema end when they do.
static void count_limit(struct serve_bench *s)
{
    struct bench *b = &s->b;
    double prompts = 0, positions = 0, steps = 0;
    for (int i = 0; i < s->n; i++) {
        const double in = s->loads[i].prompt_tokens, out = s->loads[i].given;
        prompts += in;
        positions += out * (in + out / 2);
        steps = out > steps ? out : steps;
    }
    if (s->tokens / s->in_flight > steps) steps = s->tokens / s->in_flight;
    const double read = steps * limits_read_bytes(b, s->in_flight) +
                        positions * (double)config_kv_bytes(b->config, b->dt);
    s->limit_ms =
        1e3 * (read / b->read_bandwidth + 2 * prompts * limits_row_parameters(b) / s->flops);
}

static enum status send_load(struct serve_bench *s, struct load *load)
{
    load->sent_ns = clock_now_ns();
    return http_submit(
        s->http,
        &(struct http_call){
            .path = "/v1/completions", .post = true, .body = load->body, .timeout_ms = SERVING_MS},
        &load->request);
}

static enum status take_response(const struct serve_bench *s, struct load *load)
{
    struct bytes body = BYTES_INIT;
    json_t *json = NULL;
    struct http_transfer *request = load->request;
    enum status st;
    load->request = NULL;
    load->ms = clock_ms_since(load->sent_ns);
    CHECK(http_finish(request, &body));
    CHECK(json_parse("/v1/completions", bytes_text(&body), body.len, &json));
    const json_t *usage = json_object_get(json, "usage");
    const int n = (int)json_integer_value(json_object_get(usage, "completion_tokens"));
    if (n != load->tokens && !s->schemas)
        FAIL(ST_FORMAT, "/v1/completions: %d tokens instead of %d", n, load->tokens);
    load->given = n;
out:
    json_decref(json);
    bytes_release(&body);
    return st;
}

// All of them once.
static enum status round_of_requests(void *context)
{
    struct serve_bench *s = context;
    int sent = 0, done = 0;
    enum status st = ST_OK;
    while (done < s->n) {
        for (; sent < s->n && sent - done < s->in_flight; sent++)
            CHECK(send_load(s, &s->loads[sent]));
        http_poll(s->http, 1000);
        for (int i = 0; i < sent; i++) {
            if (!s->loads[i].request || !http_ended(s->loads[i].request)) continue;
            CHECK(take_response(s, &s->loads[i]));
            done++;
        }
    }
out:
    return st;
}

// The milliseconds of a request for one token.
static enum status time_first(struct serve_bench *s, int schema, double *ret_ms)
{
    struct load load = {.prompt_tokens = s->loads[0].prompt_tokens, .tokens = 1};
    struct rng r;
    enum status st = ST_OK;
    rng_init(&r, (uint64_t)s->b.o.seed, 6);
    load.body = random_request(s, &r, schema, &load);
    CHECK(send_load(s, &load));
    while (!http_ended(load.request)) http_poll(s->http, 1000);
    CHECK(take_response(s, &load));
    *ret_ms = load.ms;
out:
    json_decref(load.body);
    return st;
}

// Of each schema the first request beside the second, whose constraint is there.
static enum status report_first_tokens(struct serve_bench *s)
{
    const int n = (int)json_array_size(s->schemas);
    double *each = calloc((size_t)n, sizeof *each), known, new;
    enum status st = each ? ST_OK : status_fail(ST_NO_MEMORY, "no memory for %d times", n);
    for (int i = -1; i < n && st == ST_OK; i++) { // the one before them warms up
        CHECK(time_first(s, i < 0 ? 0 : i, &new));
        CHECK(time_first(s, i < 0 ? 0 : i, &known));
        if (i >= 0) each[i] = new - known;
    }
    const double middle = median(each, n), late = each[(n - 1) * 99 / 100];
    bench_print(
        &s->b, "serve first tokens",
        json_pack("{s:i, s:f, s:f}", "schemas", n, "median_ms", middle, "p99_ms", late),
        "the first token of a new schema, of %d, comes %.1f ms later at the median, %.1f at "
        "the 99th percentile\n",
        n, middle, late);
out:
    free(each);
    return st;
}

// Steps of the server so far, and the seconds that it was busy.
static enum status read_steps(struct serve_bench *s, double ret[2])
{
    static const char *const names[] = {"\ncommonweight:steps_total",
                                        "\ncommonweight:engine_busy_seconds_total"};
    struct bytes body = BYTES_INIT;
    enum status st = http_get(s->http, "/metrics", 10000, &body);
    for (int i = 0; i < 2 && st == ST_OK; i++) {
        const char *line = strstr(bytes_text(&body), names[i]);
        const char *value = line ? strchr(line + 1, ' ') : NULL;
        if (!value) st = status_fail(ST_FORMAT, "/metrics: no %s", names[i] + 1);
        ret[i] = value ? atof(value) : 0;
    }
    bytes_release(&body);
    return st;
}

// Name: of the figures. *ret_step_ms: of a step.
static enum status report_serving(struct serve_bench *s, const char *name, double *ret_step_ms)
{
    const struct bench_options *o = &s->b.o;
    double *each = calloc((size_t)s->n, sizeof *each), ms, before[2], after[2];
    enum status st = ST_OK;
    if (!each) return status_fail(ST_NO_MEMORY, "no memory for %d times", s->n);
    for (int64_t i = 0; i < o->warmup_rounds; i++) CHECK(round_of_requests(s));
    CHECK(read_steps(s, before));
    CHECK(bench_time(0, o->repeats, round_of_requests, s, &ms));
    CHECK(read_steps(s, after));
    const double step_ms = 1e3 * (after[1] - before[1]) / (after[0] - before[0]);
    s->tokens = 0;
    for (int i = 0; i < s->n; i++) {
        each[i] = s->loads[i].ms / s->loads[i].given;
        s->tokens += s->loads[i].given;
    }
    count_limit(s);
    const double token_ms = median(each, s->n);
    *ret_step_ms = step_ms;
    bench_print(
        &s->b, name,
        json_pack("{s:i, s:i, s:I, s:I, s:f, s:f, s:f, s:f, s:f, s:f, s:f}", "requests", s->n,
                  "in_flight", s->in_flight, "shortest", (json_int_t)o->shortest, "longest",
                  (json_int_t)o->longest, "tokens", s->tokens, "ms", ms, "tokens_per_s",
                  s->tokens * 1e3 / ms, "ms_per_token_of_request", token_ms, "ms_per_step", step_ms,
                  "limit_ms", s->limit_ms, "ratio_to_limit", s->limit_ms / ms),
        "%s, %d requests of %lld to %lld tokens in and out, %d in flight: %.0f ms, %.0f "
        "tokens/s, %.3f ms for a token of a request, %.3f for a step; limit %.0f ms, reached "
        "%.0f%%\n",
        name, s->n, (long long)o->shortest, (long long)o->longest, s->in_flight, ms,
        s->tokens * 1e3 / ms, token_ms, step_ms, s->limit_ms, 100 * s->limit_ms / ms);
out:
    free(each);
    return st;
}

// What the schemas add to a step, beside the same requests without.
static enum status report_constraints(struct serve_bench *s, double step_ms)
{
    double plain_ms;
    enum status st;
    for (int i = 0; i < s->n; i++) {
        struct load *load = &s->loads[i];
        load->tokens = load->given;
        json_object_del(load->body, "response_format");
        json_object_set_new(load->body, "ignore_eos", json_true());
        json_object_set_new(load->body, "max_tokens", json_integer(load->tokens));
    }
    CHECK(report_serving(s, "serve without schemas", &plain_ms));
    bench_print(&s->b, "serve schemas",
                json_pack("{s:f, s:f, s:f}", "ms_per_step", step_ms, "ms_per_step_without",
                          plain_ms, "more", step_ms / plain_ms - 1),
                "a step under schemas takes %.1f%% more\n", 100 * (step_ms / plain_ms - 1));
out:
    return st;
}

enum status bench_serve(const struct bench_options *o)
{
    struct serve_bench s = {0};
    double step_ms;
    enum status st;
    if (o->shortest > o->longest)
        return status_fail(ST_INVALID, "--shortest %lld is above --longest %lld",
                           (long long)o->shortest, (long long)o->longest);
    CHECK(bench_open(&s.b, o, NULL));
    const bool cuda = device_kind(s.b.dev) == DEVICE_CUDA;
    s.n = o->requests ? (int)o->requests : cuda ? 256 : 8;
    s.in_flight = o->batch ? (int)o->batch : s.n;
    if (o->schemas && !o->model && !o->tokenizer)
        FAIL(ST_INVALID, "--schemas needs a vocabulary: --model DIR, or --tokenizer DIR");
    if (o->schemas) CHECK(read_schemas(o->schemas, &s.schemas));
    CHECK(make_loads(&s));
    CHECK(measure_limit(&s));
    CHECK(programs_open(&s.programs));
    CHECK(programs_take_model(&s.programs, &s.b));
    CHECK(programs_serve(&s.programs, o, s.in_flight, ""));
    CHECK(http_client_new(s.programs.socket, &s.http));
    if (s.schemas) CHECK(report_first_tokens(&s));
    CHECK(report_serving(&s, "serve", &step_ms));
    if (s.schemas) CHECK(report_constraints(&s, step_ms));
out:
    http_client_free(s.http);
    programs_close(&s.programs);
    for (int i = 0; s.loads && i < s.n; i++) json_decref(s.loads[i].body);
    free(s.loads);
    json_decref(s.schemas);
    bench_close(&s.b);
    return st;
}
