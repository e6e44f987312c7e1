/* serve.c: the serving benchmark: requests to the real cw-infer-server, over its socket, all sent
 * at once (or --batch of them in flight at a time). What it takes beyond `decode` is what the
 * server adds to a step: scheduling, events, HTTP, JSON.
 *
 * With --shortest 100 --longest 1024 it is nano-vllm's benchmark: that many random tokens in, and
 * out, of each request. Limit: every step reads the weights once, every token the keys and values
 * before it, and every prompt is multiplied through, at the rates measured in the same run. */
// SPDX-License-Identifier: Apache-2.0
#include "common/base/clock.h"
#include "common/base/json.h"
#include "common/base/rng.h"
#include "common/http/http_client.h"
#include "tools/bench/bench.h"
#include <stdlib.h>

#define SERVING_MS 3600000

struct load {
    int prompt_tokens, tokens; // in, out
    json_t *body;
    struct http_transfer *request; // in flight
    int64_t sent_ns;
    double ms;
};

struct serve_bench {
    struct bench b;
    struct programs programs;
    struct http_client *http;
    int n, in_flight;
    struct load *loads; // (n)
    double limit_ms, tokens;
};

static int between(struct rng *r, int64_t min, int64_t max)
{
    return (int)min + (int)rng_below(r, (uint32_t)(max - min + 1));
}

static json_t *random_request(const struct serve_bench *s, struct rng *r, const struct load *load)
{
    json_t *prompt = json_array();
    for (int i = 0; i < load->prompt_tokens; i++)
        json_array_append_new(prompt,
                              json_integer(rng_below(r, (uint32_t)s->b.config->vocab_size)));
    return json_pack("{s:o, s:i, s:f, s:b, s:I}", "prompt", prompt, "max_tokens", load->tokens,
                     "temperature", s->b.o.temperature, "ignore_eos", true, "seed",
                     (json_int_t)s->b.o.seed);
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
        load->body = random_request(s, &r, load);
        if (!load->body) return status_fail(ST_NO_MEMORY, "no memory for %d requests", s->n);
        s->tokens += load->tokens;
    }
    return ST_OK;
}

static enum status measure_limit(struct serve_bench *s)
{
    struct bench *b = &s->b;
    double flops = 0, prompts = 0, positions = 0, steps = 0;
    enum status st = limits_bandwidth(b);
    if (st == ST_OK) st = limits_matmul(b, &flops);
    if (st != ST_OK) return st;
    for (int i = 0; i < s->n; i++) {
        const double in = s->loads[i].prompt_tokens, out = s->loads[i].tokens;
        prompts += in;
        positions += out * (in + out / 2);
        steps = out > steps ? out : steps;
    }
    if (s->tokens / s->in_flight > steps) steps = s->tokens / s->in_flight;
    const double element = (double)dtype_size(b->dt);
    const double read = steps * limits_read_bytes(b, s->in_flight) +
                        positions * (double)config_kv_elements(b->config) * element;
    s->limit_ms = 1e3 * (read / b->read_bandwidth + 2 * prompts * limits_row_parameters(b) / flops);
    return ST_OK;
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

static enum status take_response(struct load *load)
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
    if (n != load->tokens)
        st = status_fail(ST_FORMAT, "/v1/completions: %d tokens instead of %d", n, load->tokens);
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
            CHECK(take_response(&s->loads[i]));
            done++;
        }
    }
out:
    return st;
}

static enum status report_serving(struct serve_bench *s)
{
    const struct bench_options *o = &s->b.o;
    double *each = calloc((size_t)s->n, sizeof *each), ms;
    enum status st = ST_OK;
    if (!each) return status_fail(ST_NO_MEMORY, "no memory for %d times", s->n);
    CHECK(bench_time(o->warmup_rounds, o->repeats, round_of_requests, s, &ms));
    for (int i = 0; i < s->n; i++) each[i] = s->loads[i].ms / s->loads[i].tokens;
    const double token_ms = median(each, s->n);
    bench_print(&s->b, "serve",
                json_pack("{s:i, s:i, s:I, s:I, s:f, s:f, s:f, s:f, s:f, s:f}", "requests", s->n,
                          "in_flight", s->in_flight, "shortest", (json_int_t)o->shortest, "longest",
                          (json_int_t)o->longest, "tokens", s->tokens, "ms", ms, "tokens_per_s",
                          s->tokens * 1e3 / ms, "ms_per_token_of_request", token_ms, "limit_ms",
                          s->limit_ms, "ratio_to_limit", s->limit_ms / ms),
                "serve, %d requests of %lld to %lld tokens in and out, %d in flight: %.0f ms, %.0f "
                "tokens/s, %.3f ms for a token of a request; limit %.0f ms, reached %.0f%%\n",
                s->n, (long long)o->shortest, (long long)o->longest, s->in_flight, ms,
                s->tokens * 1e3 / ms, token_ms, s->limit_ms, 100 * s->limit_ms / ms);
out:
    free(each);
    return st;
}

enum status bench_serve(const struct bench_options *o)
{
    struct serve_bench s = {0};
    enum status st;
    if (o->shortest > o->longest)
        return status_fail(ST_INVALID, "--shortest %lld is above --longest %lld",
                           (long long)o->shortest, (long long)o->longest);
    CHECK(bench_open(&s.b, o, NULL));
    const bool cuda = device_kind(s.b.dev) == DEVICE_CUDA;
    s.n = o->requests ? (int)o->requests : cuda ? 256 : 8;
    s.in_flight = o->batch ? (int)o->batch : s.n;
    CHECK(make_loads(&s));
    CHECK(measure_limit(&s));
    CHECK(programs_open(&s.programs));
    CHECK(programs_take_model(&s.programs, &s.b));
    CHECK(programs_serve(&s.programs, o, s.in_flight, ""));
    CHECK(http_client_new(s.programs.socket, &s.http));
    CHECK(report_serving(&s));
out:
    http_client_free(s.http);
    programs_close(&s.programs);
    for (int i = 0; s.loads && i < s.n; i++) json_decref(s.loads[i].body);
    free(s.loads);
    bench_close(&s.b);
    return st;
}
