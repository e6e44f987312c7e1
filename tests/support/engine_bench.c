/* engine_bench.c: see engine_bench.h. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/engine_bench.h"
#include "bridge/attach.h"
#include "common/base/file.h"
#include "common/base/rng.h"
#include "common/model/weights.h"
#include "tests/support/tiny_model.h"
#include <dirent.h>
#include <jansson.h>
#include <unistd.h>

const char *folder, *model_a, *model_b, *bridge_path;

void engine_bench_set_up(void)
{
    folder = test_folder();
    model_a = test_path(folder, "a");
    model_b = test_path(folder, "b");
    assert_ok(tiny_model_write(model_a, 32, 2, VOCAB, 1));
    assert_ok(tiny_model_write(model_b, 32, 2, VOCAB, 2));
}

void on_command(void *context, enum status st, const char *message, uint64_t version)
{
    struct bench *b = context;
    pthread_mutex_lock(&b->lock);
    b->commanded = true;
    b->command_status = st;
    b->version = version;
    snprintf(b->message, sizeof b->message, "%s", message);
    pthread_cond_broadcast(&b->changed);
    pthread_mutex_unlock(&b->lock);
}

void on_event(void *context, const struct engine_event *event)
{
    struct bench *b = context;
    struct take *take = request_tag(event->request);
    pthread_mutex_lock(&b->lock);
    for (int i = 0; i < event->n_tokens; i++) {
        int at = take->sample[event->sample].n++;
        take->sample[event->sample].tokens[at] = event->tokens[i];
        if (event->top)
            memcpy(take->sample[event->sample].top[at], event->top,
                   (size_t)take->n_top * sizeof *event->top);
    }
    for (int i = 0; event->prompt && i < take->n_prompt; i++) {
        take->prompt[i] = event->prompt[i];
        memcpy(take->prompt_top[i], event->prompt_top + i * take->n_prompt_top,
               (size_t)take->n_prompt_top * sizeof *event->prompt_top);
    }
    take->times_told += event->prompt != NULL;
    if (event->finish != FINISH_NONE) {
        take->sample[event->sample].finish = event->finish;
        take->sample[event->sample].telemetry = *event->telemetry;
        snprintf(take->sample[event->sample].error, sizeof take->sample[0].error, "%s",
                 event->error ? event->error : "");
    }
    if (event->request_done) take->done = true;
    const bool reload = take->reload_at > 0 && take->sample[0].n == take->reload_at;
    pthread_cond_broadcast(&b->changed);
    pthread_mutex_unlock(&b->lock);
    if (reload) engine_reload(b->engine, model_b, NULL, on_command, b);
    if (b->slow_ms) clock_sleep_ms(b->slow_ms);
}

bool wait_changed(struct bench *b, int64_t deadline_ns) // under the lock; false: too late
{
    struct timespec until;
    if (clock_now_ns() > deadline_ns) return false;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_nsec += 50 * NS_PER_MS;
    if (until.tv_nsec >= NS_PER_S) {
        until.tv_sec++;
        until.tv_nsec -= NS_PER_S;
    }
    pthread_cond_timedwait(&b->changed, &b->lock, &until);
    return true;
}

void await_done(struct bench *b, struct take *take)
{
    const int64_t deadline = clock_deadline_ns(WAIT_MS);
    pthread_mutex_lock(&b->lock);
    while (!take->done && wait_changed(b, deadline)) {
    }
    bool done = take->done;
    pthread_mutex_unlock(&b->lock);
    assert_true(done);
    request_free(take->request);
    take->request = NULL;
}

void await_command(struct bench *b)
{
    const int64_t deadline = clock_deadline_ns(WAIT_MS);
    pthread_mutex_lock(&b->lock);
    while (!b->commanded && wait_changed(b, deadline)) {
    }
    bool commanded = b->commanded;
    b->commanded = false;
    pthread_mutex_unlock(&b->lock);
    assert_true(commanded);
}

void await_tokens(struct bench *b, struct take *take, int sample, int n)
{
    const int64_t deadline = clock_deadline_ns(WAIT_MS);
    pthread_mutex_lock(&b->lock);
    while (take->sample[sample].n < n && wait_changed(b, deadline)) {
    }
    bool enough = take->sample[sample].n >= n;
    pthread_mutex_unlock(&b->lock);
    assert_true(enough);
}

int tokens_of(struct bench *b, const struct take *take, int sample)
{
    pthread_mutex_lock(&b->lock);
    int n = take->sample[sample].n;
    pthread_mutex_unlock(&b->lock);
    return n;
}

void await_state(struct bench *b, enum engine_state state)
{
    struct engine_stats stats;
    for (int i = 0; i < WAIT_MS; i++) {
        engine_stats(b->engine, &stats);
        if (stats.state == state) return;
        if (stats.state == ENGINE_FAILED) fail_msg("the engine failed: %s", stats.state_detail);
        clock_sleep_ms(1);
    }
    fail_msg("the engine is in state %d (%s), not %d", stats.state, stats.state_detail, state);
}

struct engine_stats stats_of(struct bench *b)
{
    struct engine_stats stats;
    engine_stats(b->engine, &stats);
    return stats;
}

// The statistics of a step become visible after its events: waits for those of an idle engine.
struct engine_stats idle_stats(struct bench *b)
{
    for (int i = 0; i < WAIT_MS; i++) {
        struct engine_stats stats = stats_of(b);
        if (stats.running + stats.waiting == 0) return stats;
        clock_sleep_ms(1);
    }
    fail_msg("the engine still holds %d samples", stats_of(b).running);
    return stats_of(b);
}

// ---- engines -----------------------------------------------------------------------------------

struct engine_options plain_options(void)
{
    static int count;
    char name[32];
    snprintf(name, sizeof name, "bridge-%d.json", count++);
    bridge_path = test_path(folder, name);
    return (struct engine_options){.model_folder = model_a,
                                   .device = "cpu",
                                   .dtype = -1,
                                   .max_batch = 16,
                                   .kv_bytes = 8 << 20,
                                   .block_size = 4,
                                   .prefill_chunk = 64,
                                   .max_queue = 64,
                                   .bridge_path = bridge_path,
                                   .socket_path = test_path(folder, "engine.sock"),
                                   .kv_policy = KV_KEEP};
}

void bench_start_as(struct bench *b, const struct engine_options *options, engine_event_fn callback)
{
    memset(b, 0, sizeof *b);
    pthread_mutex_init(&b->lock, NULL);
    pthread_cond_init(&b->changed, NULL);
    assert_ok(engine_new(options, callback, b, &b->engine));
    await_state(b, ENGINE_OK);
}

void bench_start(struct bench *b, const struct engine_options *options)
{
    bench_start_as(b, options, on_event);
}

void bench_end(struct bench *b)
{
    engine_free(b->engine, 0);
    pthread_cond_destroy(&b->changed);
    pthread_mutex_destroy(&b->lock);
}

void bench_submitted(struct bench *b)
{
    pthread_mutex_lock(&b->lock);
    b->open++;
    pthread_mutex_unlock(&b->lock);
}

void bench_ended(struct bench *b)
{
    pthread_mutex_lock(&b->lock);
    b->open--;
    pthread_cond_broadcast(&b->changed);
    pthread_mutex_unlock(&b->lock);
}

void bench_await(struct bench *b)
{
    pthread_mutex_lock(&b->lock);
    while (b->open) pthread_cond_wait(&b->changed, &b->lock);
    pthread_mutex_unlock(&b->lock);
}

LATER(bench_end)

struct bench *bench_of(const struct engine_options *options)
{
    struct bench *b = test_keep(calloc(1, sizeof *b));
    bench_start(b, options);
    return test_later(b, bench_end_later);
}

struct bench *bench_plain(void)
{
    const struct engine_options options = plain_options();
    return bench_of(&options);
}

struct sampling greedy(int max_tokens)
{
    return (struct sampling){
        .n = 1, .max_tokens = max_tokens, .top_p = 1, .logprobs = -1, .ignore_eos = true};
}

struct sampling random_sampling(int max_tokens, uint64_t seed)
{
    struct sampling s = greedy(max_tokens);
    s.temperature = 1;
    s.seed = seed;
    return s;
}

void make_prompt(int32_t *prompt, int n, uint64_t seed)
{
    struct rng r;
    rng_init(&r, seed, 99);
    for (int i = 0; i < n; i++) prompt[i] = (int32_t)rng_below(&r, VOCAB);
}

struct take *submit_ids(struct bench *b, const int32_t *prompt, int n_prompt,
                        const struct sampling *sampling)
{
    static struct take *all;
    struct take *take = calloc(1, sizeof *take);
    assert_non_null(take);
    take->next = all;
    all = take;
    take->n_prompt = n_prompt;
    take->n_top = sampling->logprobs;
    take->n_prompt_top = sampling->prompt_top;
    assert_ok(request_new(prompt, n_prompt, sampling, take, &take->request));
    assert_ok(engine_submit(b->engine, take->request));
    return take;
}

struct take *submit(struct bench *b, int n_prompt, uint64_t prompt_seed, const struct sampling *s)
{
    int32_t prompt[512];
    make_prompt(prompt, n_prompt, prompt_seed);
    return submit_ids(b, prompt, n_prompt, s);
}

struct take *run_ids(struct bench *b, const int32_t *prompt, int n_prompt,
                     const struct sampling *sampling)
{
    struct take *take = submit_ids(b, prompt, n_prompt, sampling);
    await_done(b, take);
    return take;
}

struct take *run(struct bench *b, int n_prompt, uint64_t prompt_seed, const struct sampling *s)
{
    struct take *take = submit(b, n_prompt, prompt_seed, s);
    await_done(b, take);
    return take;
}

void assert_refused(struct bench *b, const int32_t *prompt, int n_prompt, const struct sampling *s,
                    enum status st, const char *part)
{
    struct request *r = NULL;
    assert_ok(request_new(prompt, n_prompt, s, NULL, &r));
    assert_status(engine_submit(b->engine, r), st);
    assert_message(part);
    request_free(r);
}

void assert_same_tokens(const struct take *a, int i, const struct take *b, int k)
{
    assert_int_equal(a->sample[i].n, b->sample[k].n);
    for (int t = 0; t < a->sample[i].n; t++)
        assert_int_equal(a->sample[i].tokens[t].token, b->sample[k].tokens[t].token);
}

// Tokens, and every figure of them but the version, to the bit.
void assert_same_records(const struct take *a, int i, const struct take *b, int k)
{
    assert_same_tokens(a, i, b, k);
    for (int t = 0; t < a->sample[i].n; t++) {
        const struct token_record *x = &a->sample[i].tokens[t], *y = &b->sample[k].tokens[t];
        assert_memory_equal(&x->logprob, &y->logprob, sizeof x->logprob);
        assert_memory_equal(&x->processed_logprob, &y->processed_logprob,
                            sizeof x->processed_logprob);
        assert_memory_equal(&x->retained_mass, &y->retained_mass, sizeof x->retained_mass);
    }
}

void assert_same_logprob(const struct token_record *token, float packed, int i)
{
    if (memcmp(&packed, &token->logprob, sizeof packed) != 0)
        fail_msg("token %d: %.9g served, %.9g packed", i, (double)token->logprob, (double)packed);
}

void for_each_golden(void (*serve)(const char *model))
{
    const char *root = test_golden("");
    struct dirent **list;
    const int n = scandir(root, &list, NULL, alphasort);
    int served = 0;
    for (int i = 0; i < n; i++) {
        const char *model = test_path(root, list[i]->d_name);
        if (file_exists(test_path(model, "config.json"))) {
            printf("%s\n", list[i]->d_name);
            serve(model);
            served++;
        }
        free(list[i]);
    }
    free(list);
    assert_true(served > 10);
}

void packed_logprobs(struct reference *r, const int32_t *prompt, int n_prompt,
                     const struct take *take, int sample, float ret[MAX_TOKENS])
{
    const int n = take->sample[sample].n;
    int32_t *ids = malloc((size_t)(n_prompt + n) * sizeof *ids);
    assert_non_null(ids);
    memcpy(ids, prompt, (size_t)n_prompt * sizeof *ids);
    for (int i = 0; i < n; i++) ids[n_prompt + i] = take->sample[sample].tokens[i].token;
    reference_token_logprobs(r, ids, n_prompt + n, n_prompt, ret);
    free(ids);
}

void assert_as_packed(struct reference *r, const int32_t *prompt, int n_prompt,
                      const struct take *take, int sample)
{
    float packed[MAX_TOKENS];
    packed_logprobs(r, prompt, n_prompt, take, sample, packed);
    for (int i = 0; i < take->sample[sample].n; i++)
        assert_same_logprob(&take->sample[sample].tokens[i], packed[i], i);
}

struct take *greedy_of(struct bench *b, const int32_t *prompt, int n_prompt, int max_tokens)
{
    struct sampling s = greedy(max_tokens);
    return run_ids(b, prompt, n_prompt, &s);
}

// ---- another process writes --------------------------------------------------------------------

struct writer {
    struct bridge *bridge;
    struct model_config *config;
    struct weights *weights;
    const char *folder;
    bool die;
};

static enum status write_weights(void *context)
{
    struct writer *w = context;
    if (w->die) {
        memset(w->weights->base, 0xff, w->weights->bytes / 2); // NaN
        raise(SIGKILL);
    }
    return weights_load(w->weights, bridge_device(w->bridge), w->folder);
}

// --writer BRIDGE FOLDER N [die]: N updates to the folder's weights, which is then the snapshot to
// restore from, and one more that kills this process half way. Exits 0 if all went well.
int writer_main(int argc, char **argv)
{
    struct writer w = {.folder = argv[3]};
    enum status st = ST_OK;
    CHECK(model_config_load(w.folder, &w.config));
    CHECK(weights_plan(w.config, DT_F32, &w.weights));
    CHECK(bridge_attach(argv[2], NULL, &w.bridge));
    weights_bind(w.weights, bridge_base(w.bridge, "policy"));
    CHECK(bridge_become_writer(w.bridge));
    // a canary for facts: the word, whose complement the engine stores beside it
    memcpy((char *)w.weights->base + w.weights->canary_offset, "commonwt", 8);
    for (int i = 0; i < atoi(argv[4]); i++)
        CHECK(bridge_publish(w.bridge, 20000, write_weights, &w, NULL));
    if (atoi(argv[4]) > 0) CHECK(control_set_snapshot(bridge_control(w.bridge), w.folder));
    w.die = argc > 5;
    if (w.die) CHECK(bridge_publish(w.bridge, 20000, write_weights, &w, NULL));
out:
    if (st != ST_OK) fprintf(stderr, "writer: %s\n", status_message());
    bridge_detach(w.bridge);
    weights_free(w.weights);
    model_config_free(w.config);
    return st != ST_OK;
}

void start_self(struct test_child *child, const char *role, const char *model, const char *times,
                bool die)
{
    static char self[PATH_MAX];
    ssize_t n = readlink("/proc/self/exe", self, sizeof self - 1);
    assert_true(n > 0);
    self[n] = 0;
    const char *argv[] = {self, role, bridge_path, model, times, die ? "die" : NULL, NULL};
    memset(child, 0, sizeof *child);
    test_spawn(child, test_path(folder, "child.log"), argv);
}

void start_writer(struct test_child *child, const char *model, const char *times, bool die)
{
    start_self(child, "--writer", model, times, die);
}

void run_writer(const char *model, const char *times, bool dies)
{
    struct test_child child;
    start_writer(&child, model, times, dies);
    assert_int_equal(test_wait(&child, WAIT_MS), dies ? 128 + SIGKILL : 0);
}

const char *lasting_model(const char *model)
{
    const char *lasting = test_folder();
    struct bytes weights = BYTES_INIT;
    uint64_t header;
    const char *name;
    json_t *tensor;
    assert_ok(file_read(test_path(model, "model.safetensors"), SIZE_MAX, &weights));
    memcpy(&header, weights.data, sizeof header);
    json_t *tensors = json_loadb(weights.data + sizeof header, header, 0, NULL);
    json_object_foreach (tensors, name, tensor) {
        const json_t *span = json_object_get(tensor, "data_offsets");
        if (!strstr(name, "A_log")) continue;
        assert_string_equal(json_string_value(json_object_get(tensor, "dtype")), "F32");
        for (json_int_t at = json_integer_value(json_array_get(span, 0));
             at < json_integer_value(json_array_get(span, 1)); at += (json_int_t)sizeof(float))
            memcpy(weights.data + sizeof header + header + at, &(float){-6}, sizeof(float));
    }
    json_decref(tensors);
    test_put(lasting, "config.json", test_read(test_path(model, "config.json")));
    assert_ok(file_write_atomic(test_path(lasting, "model.safetensors"), 0644, weights.data,
                                weights.len));
    bytes_release(&weights);
    return lasting;
}

const char *longer_model(const char *model)
{
    static const char field[] = "\"max_position_embeddings\":";
    const char *longer = test_folder(), *config = test_read(test_path(model, "config.json"));
    const char *at = strstr(config, field), *rest = at + strcspn(at, ",}");
    struct bytes text = BYTES_INIT;
    bytes_printf(&text, "%.*s%s 4096%s", (int)(at - config), config, field, rest);
    test_put(longer, "config.json", test_keep(text.data));
    const char *weights = "model.safetensors";
    assert_int_equal(symlink(test_path(model, weights), test_path(longer, weights)), 0);
    return longer;
}
