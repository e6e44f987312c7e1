/* test_tandem.c: samples that two models write together, in the engine on the CPU with tiny random
 * models: each token is the one that its author alone samples behind the same text, to the bit,
 * whatever else is in the batch; authors are drawn as the request says; the scheduler computes what
 * each model has missed and nothing twice. */
// SPDX-License-Identifier: Apache-2.0
#include "infer-server/engine/executor.h"
#include "infer-server/engine/scheduler.h"
#include "tests/support/engine_bench.h"
#include "tests/support/loaded.h"
#include "tests/support/tiny_model.h"

static uint8_t token_ends[VOCAB]; // as if of a tokenizer

static struct engine_options tandem_options(void)
{
    struct engine_options options = plain_options();
    for (int id = 0; id < VOCAB; id++)
        token_ends[id] = (uint8_t)((id % 7 == 0 ? TOKEN_ENDS_SENTENCE : 0) |
                                   (id % 3 == 0 ? TOKEN_ENDS_WORD : 0));
    options.frozen_folder = model_b;
    options.token_ends = token_ends;
    options.n_token_ends = VOCAB;
    return options;
}

static struct sampling tandem_sampling(int max_tokens, uint64_t seed, enum tandem_selector selector,
                                       double p)
{
    struct sampling s = random_sampling(max_tokens, seed);
    s.tandem = (struct tandem_choice){.on = true, .selector = selector, .p = p, .chunk = 3};
    return s;
}

static int count_frozen(const struct take *t, int sample)
{
    int n = 0;
    for (int i = 0; i < t->sample[sample].n; i++) n += t->sample[sample].tokens[i].frozen;
    return n;
}

static void assert_same_authors(const struct take *a, int i, const struct take *b, int k)
{
    for (int t = 0; t < a->sample[i].n; t++)
        assert_int_equal(a->sample[i].tokens[t].frozen, b->sample[k].tokens[t].frozen);
}

// ---- each token is its author's ----------------------------------------------------------------

// The engine of a model alone samples token t behind the same text: `which` of the tokens.
static void assert_written_by(struct bench *alone, bool frozen, const struct take *take, int sample,
                              const int32_t *prompt, int n_prompt, uint64_t seed)
{
    int32_t text[512];
    memcpy(text, prompt, (size_t)n_prompt * sizeof *text);
    for (int t = 0; t < take->sample[sample].n; t++) {
        const struct token_record *token = &take->sample[sample].tokens[t];
        if (token->frozen == frozen && token->weight_version == 2) {
            struct sampling s = random_sampling(1, seed);
            s.n = sample + 1;
            struct take *one = run_ids(alone, text, n_prompt + t, &s);
            const struct token_record *same = &one->sample[sample].tokens[0];
            assert_int_equal(token->token, same->token);
            assert_memory_equal(&token->logprob, &same->logprob, sizeof token->logprob);
        }
        text[n_prompt + t] = token->token;
    }
}

// Where an author may have changed: only there was there a draw.
static void assert_changes(enum tandem_selector selector, const struct take *take, int sample)
{
    const struct token_record *tokens = take->sample[sample].tokens;
    for (int t = 1; t < take->sample[sample].n; t++) {
        if (tokens[t].frozen == tokens[t - 1].frozen) continue;
        const uint8_t ended = token_ends[tokens[t - 1].token];
        if (selector == TANDEM_CHUNK) assert_int_equal(t % 3, 0);
        if (selector == TANDEM_SENTENCE) assert_true(ended & TOKEN_ENDS_SENTENCE);
        if (selector == TANDEM_WORD) assert_true(ended & TOKEN_ENDS_WORD);
    }
    for (int t = 0; selector == TANDEM_ALTERNATING && t < take->sample[sample].n; t++)
        assert_int_equal(tokens[t].frozen, t % 2);
}

TEST(each_token_is_its_authors)
{
    enum { PROMPT = 15, TOKENS = 30, SAMPLES = 3 }; // the last block is copied
    int32_t prompt[PROMPT];
    struct engine_options options = tandem_options(), plain_a = plain_options(),
                          plain_b = plain_options();
    plain_b.model_folder = model_b;
    struct bench *tandem = bench_of(&options);
    struct bench *a = bench_of(&plain_a);
    struct bench *b = bench_of(&plain_b);
    for (int selector = TANDEM_BERNOULLI; selector <= TANDEM_WORD; selector++) {
        make_prompt(prompt, PROMPT, (uint64_t)selector);
        struct sampling s =
            tandem_sampling(TOKENS, 5 + (uint64_t)selector, (enum tandem_selector)selector, 0.5);
        s.n = SAMPLES;
        struct take *take = run_ids(tandem, prompt, PROMPT, &s);
        int n_frozen = 0;
        for (int i = 0; i < SAMPLES; i++) {
            assert_int_equal(take->sample[i].n, TOKENS);
            assert_written_by(a, false, take, i, prompt, PROMPT, s.seed);
            assert_written_by(b, true, take, i, prompt, PROMPT, s.seed);
            assert_changes((enum tandem_selector)selector, take, i);
            n_frozen += count_frozen(take, i);
        }
        assert_in_range(n_frozen, 1, SAMPLES * TOKENS - 1);
    }
}

// p 1 is the policy's own rollout, p 0 the frozen model's.
TEST(the_ends_are_plain)
{
    for (int p = 0; p <= 1; p++) {
        struct engine_options alone = plain_options(), options = tandem_options();
        alone.model_folder = p ? model_a : model_b;
        struct bench *plain = bench_of(&alone);
        struct bench *tandem = bench_of(&options);
        for (int selector = TANDEM_BERNOULLI; selector <= TANDEM_WORD; selector++) {
            struct sampling s = tandem_sampling(40, 3, (enum tandem_selector)selector, p);
            s.n = 4;
            s.top_k = 50;
            struct take *by_two = submit(tandem, 21, 9, &s);
            s.tandem.on = false;
            struct take *by_one = submit(plain, 21, 9, &s);
            await_done(tandem, by_two);
            await_done(plain, by_one);
            for (int i = 0; i < s.n; i++) {
                assert_same_records(by_two, i, by_one, i);
                assert_int_equal(count_frozen(by_two, i), p ? 0 : 40);
            }
        }
    }
}

// ---- many samples -------------------------------------------------------------------------------

enum { FEW = 16, CELLS = 2 * 2 * (FEW + 1) }; // tokens; authors x places x what stands before

struct tally { // of a completion's first two tokens, by author and by what stands before
    struct take wait;
    int32_t first[4096];
    long seen[CELLS][FEW];
    double p[CELLS][FEW]; // as told with each token
    bool done;
    struct bench *bench;
};

static void on_sampled(void *context, const struct engine_event *event)
{
    struct tally *t = context;
    for (int i = 0; i < event->n_tokens; i++) {
        const struct token_record *token = &event->tokens[i];
        int32_t *first = &t->first[event->sample];
        const int before = *first < 0 ? FEW : *first;
        const int cell = (token->frozen * 2 + (*first >= 0)) * (FEW + 1) + before;
        t->seen[cell][token->token]++;
        t->p[cell][token->token] = exp(token->logprob);
        *first = *first < 0 ? token->token : -1;
    }
    if (!event->request_done) return;
    pthread_mutex_lock(&t->bench->lock);
    t->done = true;
    pthread_cond_broadcast(&t->bench->changed);
    pthread_mutex_unlock(&t->bench->lock);
}

// Standard deviations that a sum of squares is off what it is on average.
static double off_by(const struct tally *t, int cell, double *ret_n)
{
    double n = 0, chi2 = 0, sum = 0;
    int degrees = -1;
    for (int v = 0; v < FEW; v++) n += (double)t->seen[cell][v];
    for (int v = 0; v < FEW; v++) {
        const double expected = n * t->p[cell][v];
        sum += t->p[cell][v];
        if (expected == 0) continue; // never seen: what is missing in the sum
        chi2 += pow((double)t->seen[cell][v] - expected, 2) / expected;
        degrees++;
    }
    *ret_n = n;
    if (degrees < FEW - 1 || fabs(sum - 1) > 1e-4) return 0; // too few to see all tokens
    return (chi2 - degrees) / sqrt(2.0 * degrees);
}

// Each author's tokens follow the distribution that it tells of, at the first place and, given the
// first token, at the second; and the policy writes as often as p says. 10^5 tokens, or so many as
// COMMONWEIGHT_TANDEM_DRAWS says.
TEST(draws_follow_their_author)
{
    static struct tally t;
    struct bench b = {0};
    struct engine_options options = tandem_options();
    const char *asked = getenv("COMMONWEIGHT_TANDEM_DRAWS");
    const long samples = asked ? atol(asked) : 100000;
    const struct tiny_model shape = {
        .hidden = 32, .layers = 1, .vocab = FEW, .max_positions = 16, .eos_id = -1, .seed = 1};
    struct tiny_model other = shape;
    other.seed = 2;
    options.model_folder = test_path(folder, "few-a");
    options.frozen_folder = test_path(folder, "few-b");
    options.token_ends = NULL;
    options.max_batch = 1024;
    options.max_queue = 4096;
    options.max_context = 16;
    assert_ok(tiny_model_write_as(options.model_folder, &shape));
    assert_ok(tiny_model_write_as(options.frozen_folder, &other));
    pthread_mutex_init(&b.lock, NULL);
    pthread_cond_init(&b.changed, NULL);
    t.bench = &b;
    assert_ok(engine_new(&options, on_sampled, &t, &b.engine));
    await_state(&b, ENGINE_OK);
    for (long n = 0, seed = 1; n < samples; n += 2 * 4096, seed++) {
        static const int32_t prompt[] = {3, 1, 4, 1, 5};
        struct sampling s = tandem_sampling(2, (uint64_t)seed, TANDEM_BERNOULLI, 0.3);
        s.n = 4096;
        for (int i = 0; i < s.n; i++) t.first[i] = -1;
        t.done = false;
        assert_ok(request_new(prompt, 5, &s, NULL, &t.wait.request));
        assert_ok(engine_submit(b.engine, t.wait.request));
        pthread_mutex_lock(&b.lock);
        while (!t.done && wait_changed(&b, clock_deadline_ns(WAIT_MS))) {
        }
        pthread_mutex_unlock(&b.lock);
        assert_true(t.done);
        request_free(t.wait.request);
    }
    engine_free(b.engine, 0);
    double by[2] = {0}, worst = 0;
    for (int cell = 0; cell < CELLS; cell++) {
        double n;
        worst = fmax(worst, fabs(off_by(&t, cell, &n)));
        by[cell / (CELLS / 2)] += n;
    }
    const double all = by[0] + by[1], share = by[0] / all;
    const double off = (share - 0.3) / sqrt(0.3 * 0.7 / all);
    printf("%.0f tokens, %.4f of them the policy's (%.2f standard deviations off); chi-square of "
           "each author's tokens at most %.2f standard deviations off\n",
           all, share, off, worst);
    // 68 cells: beyond 5.5 once in 10^5 runs (the upper tail of chi-square is longer than a normal
    // one's); seeds are fixed.
    assert_true(fabs(off) < 4 && worst < 5.5);
}

// ---- nothing else in the batch matters ---------------------------------------------------------

enum { REQUESTS = 10 };

static struct take *submit_mixed(struct bench *b, int i)
{
    struct sampling s =
        tandem_sampling(30 + i, (uint64_t)i, (enum tandem_selector)(i % (TANDEM_WORD + 1)), 0.5);
    s.n = 1 + i % 3;
    s.tandem.on = i % 4 != 3; // others are plain
    if (i % 5 == 4) s.frequency_penalty = 1;
    return submit(b, 3 + 7 * (i % 4), (uint64_t)(i % 4), &s); // some share a prompt
}

TEST(batches_and_preemption_change_nothing)
{
    struct engine_options options = tandem_options(), tight = tandem_options();
    tight.max_batch = 6;
    tight.prefill_chunk = 7;
    tight.max_context = 72;
    tight.kv_bytes = 64 << 10;
    tight.speculative.k[SPECULATIVE_NGRAM] = 3;
    tight.speculative_fixed = 1;
    struct take *together[REQUESTS];
    struct bench *roomy = bench_of(&options);
    struct bench *crowded = bench_of(&tight);
    for (int i = 0; i < REQUESTS; i++) together[i] = submit_mixed(crowded, i);
    for (int i = 0; i < REQUESTS; i++) await_done(crowded, together[i]);
    for (int i = 0; i < REQUESTS; i++) {
        struct take *alone = submit_mixed(roomy, i);
        await_done(roomy, alone);
        for (int k = 0; k < 1 + i % 3; k++) {
            assert_same_records(alone, k, together[i], k);
            assert_same_authors(alone, k, together[i], k);
        }
    }
    assert_true(idle_stats(crowded).preemptions > 0);
}

// A prompt that was seen before begins with what both models computed of it.
TEST(prompts_are_found)
{
    const struct engine_options options = tandem_options();
    const struct sampling s = tandem_sampling(20, 4, TANDEM_BERNOULLI, 0.5);
    struct sampling plain = s;
    plain.tandem.on = false;
    struct bench *b = bench_of(&options);
    run(b, 33, 1, &plain); // what the policy alone computed is of no use to two; what two did is
    const struct take *first = run(b, 33, 1, &s), *second = run(b, 33, 1, &s);
    assert_int_equal(first->sample[0].telemetry.cached_prompt_tokens, 0);
    assert_int_equal(second->sample[0].telemetry.cached_prompt_tokens, 32);
    assert_same_records(first, 0, second, 0);
}

// Updates in the middle of a sample: the frozen model goes on as it was.
TEST(updates_leave_the_frozen_model)
{
    enum { PROMPT = 9 };
    int32_t prompt[PROMPT];
    struct engine_options plain_a = plain_options(), plain_b = plain_options(),
                          options = tandem_options(); // bridge_path: the writer's
    struct sampling s = tandem_sampling(200, 8, TANDEM_BERNOULLI, 0.5);
    plain_b.model_folder = model_b;
    struct bench *tandem = bench_of(&options);
    struct bench *a = bench_of(&plain_a);
    struct bench *b = bench_of(&plain_b);
    make_prompt(prompt, PROMPT, 2);
    tandem->slow_ms = 5;
    struct take *take = submit_ids(tandem, prompt, PROMPT, &s);
    await_tokens(tandem, take, 0, 10);
    tandem->slow_ms = 100; // however long a loaded machine takes to write
    run_writer(model_b, "3", false);
    tandem->slow_ms = 0;
    await_done(tandem, take);
    const struct token_record *last = &take->sample[0].tokens[199];
    assert_true(last->weight_version > 2);
    assert_written_by(a, false, take, 0, prompt, PROMPT, s.seed);
    for (int t = 0; t < 200; t++) // the frozen model has one version
        if (take->sample[0].tokens[t].frozen) take->sample[0].tokens[t].weight_version = 2;
    assert_written_by(b, true, take, 0, prompt, PROMPT, s.seed);
}

// ---- rows apart --------------------------------------------------------------------------------

struct recorded { // the first sample's tokens of a request; its tag
    struct token_record tokens[MAX_TOKENS];
    int n;
    bool done;
};

static void on_recorded(void *context, const struct engine_event *event)
{
    struct recorded *d = request_tag(event->request);
    (void)context;
    if (event->sample == 0 && event->n_tokens == 1) d->tokens[d->n++] = event->tokens[0];
    d->done |= event->request_done;
}

static struct request *add_request(struct executor *x, int i, struct recorded *drawn)
{
    int32_t prompt[12];
    struct request *r;
    struct sampling s =
        tandem_sampling(40, (uint64_t)i, i % 2 ? TANDEM_CHUNK : TANDEM_BERNOULLI, 0.5);
    s.n = 2;
    s.tandem.on = i != 2;
    make_prompt(prompt, 12, (uint64_t)i);
    *drawn = (struct recorded){.n = 0};
    assert_ok(request_new(prompt, 12, &s, drawn, &r));
    assert_ok(request_prepare(r, 4, 0));
    executor_add(x, r);
    return r;
}

// How a captured step has its rows, on CUDA, gives what the plain one gives.
TEST(rows_apart_change_nothing)
{
    enum { N = 4 };
    static struct recorded drawn[2][N];
    struct weights *frozen;
    struct loaded *m = loaded_of(model_a, DT_F32);
    assert_ok(weights_plan(m->config, DT_F32, &frozen));
    assert_ok(weights_alloc(frozen, m->dev));
    assert_ok(weights_load(frozen, m->dev, model_b));
    for (int apart = 0; apart < 2; apart++) {
        const struct weights *const models[RUNNERS] = {m->weights, NULL, frozen};
        struct engine_options options = tandem_options();
        struct engine_stats stats = {.state = ENGINE_OK};
        struct executor *x;
        struct request *requests[N];
        bool stepped = true;
        assert_ok(executor_new(m->dev, models, NULL, &options, on_recorded, NULL, &stats, &x));
        scheduler_update(x->scheduler, 2, false);
        for (int i = 0; i < RUNNERS; i++)
            if (x->runners[i]) x->runners[i]->rows_apart = apart;
        for (int i = 0; i < N; i++) requests[i] = add_request(x, i, &drawn[apart][i]);
        while (stepped) assert_ok(executor_step(x, 2, ADMIT_ALL, &stepped));
        for (int i = 0; i < N; i++) request_free(requests[i]);
        executor_free(x);
    }
    for (int i = 0; i < N; i++) {
        assert_true(drawn[0][i].done && drawn[1][i].done && drawn[0][i].n == 40);
        for (int t = 0; t < 40; t++) {
            const struct token_record *x = &drawn[0][i].tokens[t], *y = &drawn[1][i].tokens[t];
            assert_int_equal(x->token, y->token);
            assert_int_equal(x->frozen, y->frozen);
            assert_memory_equal(&x->logprob, &y->logprob, sizeof x->logprob);
        }
    }
    weights_free(frozen);
}

TEST(authors_can_be_shared)
{
    struct engine_options options = tandem_options();
    struct sampling s = tandem_sampling(60, 1, TANDEM_BERNOULLI, 0.5), t = s;
    s.n = t.n = 2;
    t.seed = 2;
    struct bench *b = bench_of(&options);
    for (int shared = 0; shared <= 1; shared++) {
        int differ = 0;
        s.tandem.shared = t.tandem.shared = shared;
        struct take *first = submit(b, 10, 1, &s), *second = submit(b, 17, 2, &t);
        await_done(b, first);
        await_done(b, second);
        for (int i = 0; i < 60; i++) {
            const bool frozen = first->sample[0].tokens[i].frozen;
            differ += frozen != first->sample[1].tokens[i].frozen;
            differ += frozen != second->sample[0].tokens[i].frozen;
        }
        if (shared)
            assert_int_equal(differ, 0);
        else
            assert_in_range(differ, 30, 90);
    }
}

// ---- what is refused ---------------------------------------------------------------------------

TEST(impossible_tandems_are_refused)
{
    const struct sampling good = tandem_sampling(4, 1, TANDEM_BERNOULLI, 0.5);
    struct engine_options options = tandem_options();
    options.token_ends = NULL;
    struct bench *plain = bench_plain(), *tandem = bench_of(&options);
    const struct {
        struct bench *engine;
        struct tandem_choice tandem;
        bool prompt_logprobs;
        int n_drafts;
        const char *words;
    } cases[] = {
        {plain, good.tandem, false, 0, "--tandem-model"},
        {tandem, {true, TANDEM_BERNOULLI, .p = 1.5, .chunk = 3}, false, 0, "p is 1.5"},
        {tandem, {true, TANDEM_BERNOULLI, .p = 0.5, .chunk = 0}, false, 0, "chunk is 0"},
        {tandem, {true, TANDEM_WORD, .p = 0.5, .chunk = 3}, false, 0, "word"},
        {tandem, good.tandem, true, 0, "prompt_logprobs"},
        {tandem, good.tandem, false, 2, "speculative"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct sampling s = good;
        s.tandem = cases[i].tandem;
        s.prompt_logprobs = cases[i].prompt_logprobs;
        s.speculative.k[SPECULATIVE_NGRAM] = cases[i].n_drafts;
        assert_refused(cases[i].engine, (const int32_t[]){1, 2, 3}, 3, &s, ST_INVALID,
                       cases[i].words);
    }
}

TEST(other_vocabularies_are_refused)
{
    for (int more = -16; more <= 16; more += 32) {
        const struct tiny_model shape = {
            .hidden = 32, .layers = 1, .vocab = VOCAB + more, .eos_id = -1, .seed = 3};
        struct engine_options options = tandem_options();
        struct engine *engine;
        struct bench b = {0};
        options.frozen_folder = test_path(folder, "other");
        assert_ok(tiny_model_write_as(options.frozen_folder, &shape));
        assert_fails(engine_new(&options, on_event, &b, &engine), ST_MISMATCH, "--tandem-model");
        assert_message(more < 0 ? "smaller" : "larger");
    }
}

// ---- what is computed --------------------------------------------------------------------------

enum { BLOCK = 4, PROMPT = 21, TOKENS = 40, SAMPLES = 5, GROUPS = 4 };

struct played {
    int computed[RUNNERS], steps;
    int next[GROUPS][SAMPLES][RUNNERS]; // token that each model comes to
};

static int play_item(struct played *p, const struct engine_step *step, const struct step_item *item)
{
    int *at =
        &p->next[(intptr_t)request_tag(item->sample->request)][item->sample->index][step->runner];
    if (*at > 0) assert_int_equal(item->first, *at);
    *at = item->first + item->n;
    return item->n;
}

// Plays the engine over a scheduler alone, to the end: every item begins where its model has come
// to, and tokens are sampled by their author's step.
static void play(struct scheduler *scheduler, struct played *p)
{
    for (;; p->steps++) {
        scheduler_choose_runner(scheduler);
        const struct engine_step *step = schedule(scheduler, ADMIT_ALL);
        if (step->n_items == 0) return;
        for (int i = 0; i < step->n_items; i++)
            p->computed[step->runner] += play_item(p, step, &step->items[i]);
        for (int i = 0; i < step->n_sampled; i++) {
            struct sample *sample = step->sampled[i].sample;
            assert_int_equal(sample_author(sample), step->runner);
            sample_append(sample, 7);
            tandem_choose(&sample->request->sampling.tandem, sample->text.stream,
                          sample->text.n_generated, 0, &sample->author);
            if (sample->text.n_generated == TOKENS) scheduler_remove(scheduler, sample);
        }
    }
}

static struct played play_groups(int n_groups, bool shared)
{
    const struct scheduler_limits limits = {.max_batch = 32, .prefill_chunk = 64};
    struct played played = {.steps = 0};
    struct block_manager *manager;
    struct scheduler *scheduler;
    struct request *requests[GROUPS];
    assert_ok(block_manager_new(1024, BLOCK, &manager));
    assert_ok(scheduler_new(&limits, manager, &scheduler));
    scheduler_update(scheduler, 2, false);
    for (int g = 0; g < n_groups; g++) {
        int32_t prompt[PROMPT];
        struct sampling s = tandem_sampling(TOKENS, 6 + (uint64_t)g, TANDEM_BERNOULLI, 0.5);
        s.n = SAMPLES;
        s.tandem.shared = shared;
        make_prompt(prompt, PROMPT, (uint64_t)g);
        assert_ok(request_new(prompt, PROMPT, &s, (void *)(intptr_t)g, &requests[g]));
        assert_ok(request_prepare(requests[g], BLOCK, 0));
        assert_true(scheduler_add(scheduler, requests[g]));
    }
    play(scheduler, &played);
    for (int g = 0; g < n_groups; g++) {
        for (int i = 0; i < SAMPLES; i++)
            assert_int_equal(requests[g]->samples[i].text.n_generated, TOKENS);
        request_free(requests[g]);
    }
    scheduler_free(scheduler);
    block_manager_free(manager);
    return played;
}

TEST(nothing_is_computed_twice)
{
    const struct played p = play_groups(1, false);
    // The prompt once, its last token for each sample; each token but the last at most once.
    for (int runner = 0; runner < RUNNERS; runner++)
        assert_true(p.computed[runner] <= PROMPT - 1 + SAMPLES * (1 + TOKENS - 1));
    assert_true(p.computed[RUNNER_POLICY] > SAMPLES * TOKENS / 2);
    assert_int_equal(p.computed[RUNNER_DRAFT], 0);
    assert_true(p.steps < 2 * TOKENS); // a step is of the samples that wait for its model
}

// Samples of the same authors take a step a token, though their prompts were computed one after
// another; those of other authors wait for one another.
TEST(shared_authors_go_in_step)
{
    const int prompts = 10; // steps that these, and what is caught up with them, take at most
    const int together = play_groups(GROUPS, true).steps, apart = play_groups(GROUPS, false).steps;
    assert_true(together <= TOKENS + prompts);
    assert_true(apart > TOKENS * 13 / 10 + 4);
    assert_true(apart > together);
}

TEST_EACH(texts_end, "tandem")
{
    const char *text = row_text(cases, i, "text");
    const int ends = (row_flag(cases, i, "word") ? TOKEN_ENDS_WORD : 0) |
                     (row_flag(cases, i, "sentence") ? TOKEN_ENDS_SENTENCE : 0);
    assert_int_equal(token_ends_of(text, strlen(text)), ends);
}

TESTS_BETWEEN(engine_bench_set_up, NULL)

int main(int argc, char **argv)
{
    if (argc > 4 && strcmp(argv[1], "--writer") == 0) return writer_main(argc, argv);
    return test_main();
}
