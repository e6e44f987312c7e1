/* test_planner.c: how much is drafted (speculative.h): the table of what steps take, the waits
 * after failures, and whole servers in miniature, whose costs and acceptance are made up: where
 * drafts do not pay, at most 3% is lost, whatever the plan believes; where they do, the gain is
 * there. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/support.h"
#include "common/base/rng.h"
#include "infer-server/speculative/backoff.h"
#include "infer-server/speculative/speculative.h"
#include "infer-server/speculative/step_cost.h"

TEST(cost_of_steps)
{
    struct step_cost c = {0};
    assert_true(step_cost_ms(&c, 4, 0) == 0);
    step_cost_learn(&c, 1, 0, 1.0);
    assert_true(step_cost_ms(&c, 4, 0) == 1.0); // looks as cheap as what is known
    for (int i = 0; i < 100; i++) {
        step_cost_learn(&c, 1, 0, 1.0);
        step_cost_learn(&c, 4, 0, 2.0);
        step_cost_learn(&c, 8, 0, 4.0);
    }
    assert_float_equal(step_cost_ms(&c, 1, 0), 1.0, 1e-9);
    assert_float_equal(step_cost_ms(&c, 2, 0), 1.0 + 1.0 / 3, 1e-9);
    assert_float_equal(step_cost_ms(&c, 6, 0), 3.0, 1e-9);
    assert_float_equal(step_cost_ms(&c, 16, 0), 4.0, 1e-9);
    step_cost_learn(&c, 8, 0, 4000.0); // a spike
    assert_true(step_cost_ms(&c, 8, 0) < 5);
    // A slower machine: one size alone shows it, and the others are known to have followed.
    for (int i = 0; i < 100; i++) step_cost_learn(&c, 1, 0, 3.0);
    assert_float_equal(step_cost_ms(&c, 1, 0), 3.0, 0.1);
    assert_float_equal(step_cost_ms(&c, 4, 0), 5.5, 1.0);
    // What was overrated once is not, when a larger size shows it.
    for (int i = 0; i < 3; i++) step_cost_learn(&c, 6, 0, 500.0);
    step_cost_learn(&c, 8, 0, 12.0);
    assert_true(step_cost_ms(&c, 6, 0) <= step_cost_ms(&c, 8, 0));
    for (int rows = 1; rows < 9000; rows++) { // every size has its place
        struct step_cost one = {0};
        step_cost_learn(&one, rows, 0, 1.0);
        assert_true(step_cost_ms(&one, rows, 0) == 1.0);
    }
    struct step_cost captured = {.padded = true}; // at 4, 8 and 16 rows alone
    for (int rows = 4; rows <= 16; rows *= 2) step_cost_learn(&captured, rows, 0, rows);
    assert_true(step_cost_ms(&captured, 3, 0) == 4.0 && step_cost_ms(&captured, 9, 0) == 16.0);
    for (int i = 0; i < 3; i++) step_cost_learn(&captured, 9, 0, 15.0); // ran at 16
    assert_true(step_cost_ms(&captured, 16, 0) == 15.0 && step_cost_ms(&captured, 8, 0) == 8.0);
    struct step_cost long_ones = {.token_ms = 0.01};
    for (int i = 0; i < 100; i++) step_cost_learn(&long_ones, 2, 100, 3.0);
    assert_float_equal(step_cost_ms(&long_ones, 2, 100), 3.0, 1e-9);
    assert_float_equal(step_cost_ms(&long_ones, 2, 300), 5.0, 1e-9);
}

// ---- back-off ----------------------------------------------------------------------------------

// Steps of 1 ms, each gaining so much, up to the end of a window that is judged.
static void use(struct backoff *b, double gained_ms)
{
    for (int i = 0; i < 32; i++) backoff_use(b, gained_ms, 1);
}

TEST(waits_double)
{
    struct backoff b = {0};
    assert_true(!backoff_waits(&b) && !backoff_on(&b));
    use(&b, -BACKOFF_SHARE / 2); // too little to matter
    assert_false(backoff_waits(&b));
    double before = 0;
    for (int failure = 0; failure < 6; failure++) {
        use(&b, -0.1);
        // The loss is amortised, and from then on twice as slowly each time, up to 8 times.
        const double wait = 32 * 0.1 / BACKOFF_SHARE * (1 << (failure < 3 ? failure : 3));
        assert_float_equal(b.wait_ms, wait, 1e-6 * wait);
        assert_true(wait >= before);
        before = wait;
        backoff_wait(&b, b.wait_ms);
        assert_false(backoff_waits(&b));
    }
    use(&b, 0.1);
    assert_false(backoff_on(&b)); // once may be luck
    use(&b, -0.1);
    assert_true(b.wait_ms > before / 2); // and is not forgiven for
    backoff_wait(&b, b.wait_ms);
    use(&b, 0.1);
    use(&b, 0.1);
    assert_true(backoff_on(&b));
    use(&b, -0.1);
    assert_false(backoff_on(&b));
    assert_float_equal(b.wait_ms, 32 * 0.1 / BACKOFF_SHARE, 1e-6);
}

// ---- servers in miniature ----------------------------------------------------------------------

enum { K = 8, PROMPT_EVERY = 64, STEPS = 20000 };

struct world { // how things are, whatever is believed of them; a plain step takes 1 ms
    const char *what;
    enum speculative_method method;
    int n_seqs;
    double acceptance, then; // of a draft; from half of the steps on
    double row_ms, pass_ms;  // of each draft's row; of the draft model's passes
    double prompt_ms; // of a sample's prompt in the draft model, one every PROMPT_EVERY steps
    double look_ms;
    double known_row_ms; // what the table holds at first
    bool noisy;          // one step in a hundred takes fifty times as long
};

struct run {
    const struct world *w;
    struct speculative *s;
    struct rng rng;
    int lag; // tokens of a prompt that the draft model has yet to compute
};

static double noise(struct run *r)
{
    return r->w->noisy && rng_below(&r->rng, 100) == 0 ? 50 : 1;
}

// Every sample's last tokens stand earlier, so that all methods have proposals.
static void propose_all(struct run *r, struct speculative_choice choice, struct draft *drafts,
                        struct draft **list)
{
    static const int32_t prompt[] = {1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4, 5, 6, 7, 8};
    const struct history h = {.prompt = prompt, .n_prompt = 16, .prompt_key = 1};
    for (int i = 0; i < r->w->n_seqs; i++) {
        speculative_propose(r->s, choice, &h, 100, &drafts[i]);
        list[i] = &drafts[i];
        if (i == 0) drafts[i].lag = r->lag;
    }
}

static void verify(struct run *r, const struct draft *draft, double acceptance, int *ret_tokens)
{
    int accepted = 0;
    const int looked_at = draft->n_verify > 0 ? draft->n_verify : draft->n > 0;
    while (accepted < looked_at && rng_uniform(&r->rng) < acceptance) accepted++;
    const int saved = draft->n_verify > 0 ? accepted : 0;
    if (draft->n > 0) speculative_verified(r->s, draft, draft->n_verify, accepted, saved);
    *ret_tokens += 1 + saved;
}

static void draft_all(struct run *r, const struct draft *drafts, struct step_report *report)
{
    int depth = 0;
    for (int i = 0; i < r->w->n_seqs; i++) {
        report->n_rows += drafts[i].n_verify;
        if (drafts[i].n_verify > depth) depth = drafts[i].n_verify;
    }
    if (draft_methods[r->w->method]->propose || depth == 0) return;
    report->draft_ms = depth * r->w->pass_ms;
    if (r->lag == 0 || drafts[0].n_verify == 0) return;
    report->n_caught_up = r->lag;
    report->catch_up_ms = r->w->prompt_ms;
    r->lag = 0;
}

// Milliseconds that it takes beside the report's; *ret_tokens grows.
static double step(struct run *r, int number, int *ret_tokens)
{
    const struct world *w = r->w;
    struct draft drafts[64] = {0}, *list[64];
    struct step_report report = {
        .decodes = true, .warm = true, .n_seqs = w->n_seqs, .n_rows = w->n_seqs};
    double prompts_ms = 0;
    if (w->prompt_ms > 0 && number % PROMPT_EVERY == 0) {
        r->lag = 100;
        if (speculative_model_pays(r->s, SPECULATIVE_DRAFT_MODEL)) {
            speculative_prompts_took(r->s, r->lag, prompts_ms = w->prompt_ms);
            r->lag = 0;
        }
    }
    struct speculative_choice choice = {.chosen = true};
    choice.k[w->method] = K;
    if (speculative_wants_drafts(r->s, choice)) {
        propose_all(r, choice, drafts, list);
        speculative_plan(r->s, list, w->n_seqs, w->n_seqs, 0);
        draft_all(r, drafts, &report);
        report.look_ms = w->look_ms;
    }
    const double acceptance = number < STEPS / 2 ? w->acceptance : w->then;
    for (int i = 0; i < w->n_seqs; i++) verify(r, &drafts[i], acceptance, ret_tokens);
    const double even_ms = 1 + w->row_ms * (report.n_rows - w->n_seqs);
    report.step_ms = even_ms * noise(r);
    speculative_step_over(r->s, &report);
    return even_ms + report.look_ms + report.draft_ms + report.catch_up_ms + prompts_ms;
}

// Milliseconds a token of each sequence, outliers left aside, in the steps from `from` on.
static double run_world(const struct world *w, int from)
{
    struct run r = {.w = w};
    double ms = 0;
    int tokens = 0;
    rng_init(&r.rng, 11, 0);
    assert_ok(speculative_new(false, 512, &r.s));
    // Sizes as a server times them when it starts.
    for (int rows = w->n_seqs; rows <= w->n_seqs * (K + 1); rows += 1 + rows / 8)
        step_cost_learn(speculative_step_cost(r.s), rows, 0,
                        1 + w->known_row_ms * (rows - w->n_seqs));
    for (int rows = 1; rows <= 2 * w->n_seqs; rows++)
        step_cost_learn(speculative_pass_cost(r.s), rows, 0, w->pass_ms);
    for (int i = 0; i < STEPS; i++) {
        int brought = 0;
        const double took_ms = step(&r, i, &brought);
        if (i < from) continue;
        ms += took_ms;
        tokens += brought;
    }
    speculative_free(r.s);
    printf("%s: %.4f ms a token\n", w->what, ms / tokens * w->n_seqs);
    return ms / tokens * w->n_seqs;
}

TEST(never_slower_than_off)
{
    const enum speculative_method ngram = SPECULATIVE_NGRAM, model = SPECULATIVE_DRAFT_MODEL,
                                  mtp = SPECULATIVE_MTP;
    const struct world worlds[] = {
        // sequences, acceptance before and after, a row, a pass, a prompt, a look, a row as told
        {"nothing accepted", ngram, 1, 0, 0, 0.01, 0, 0, 0.001, 0.01, false},
        {"nothing accepted, noisy", ngram, 1, 0, 0, 0.01, 0, 0, 0.001, 0.01, true},
        {"rows are dear", ngram, 1, 0.3, 0.3, 0.3, 0, 0, 0.001, 0.3, false},
        {"rows are dear, batch 64", ngram, 64, 0.5, 0.5, 0.015, 0, 0, 0.01, 0.015, false},
        {"rows are dearer than told, batch 16", ngram, 16, 0.6, 0.6, 0.06, 0, 0, 0.01, 0.03, true},
        {"looking is dear", ngram, 1, 0, 0, 0.01, 0, 0, 0.2, 0.01, false},
        {"looking eats up the gain", ngram, 1, 0.1, 0.1, 0.01, 0, 0, 0.2, 0.01, false},
        {"a bad draft model", model, 1, 0.02, 0.02, 0.01, 0.1, 2, 0.001, 0.01, false},
        {"a bad draft model, batch 16", model, 16, 0.02, 0.02, 0.01, 0.5, 9, 0.01, 0.01, true},
        {"a draft model as slow", model, 1, 0.9, 0.9, 0.01, 1, 2, 0.001, 0.01, false},
        {"its prompts eat up the gain", model, 1, 0.6, 0.6, 0.01, 0.1, 120, 0.001, 0.01, false},
        {"a layer that is refused", mtp, 1, 0, 0, 0.1, 0.07, 0, 0.001, 0.1, false},
        {"a layer that is refused, batch 64", mtp, 64, 0.02, 0.02, 0.01, 0.05, 0, 0.01, 0.01, true},
        {"a layer that becomes bad, batch 64", mtp, 64, 0.9, 0, 0.01, 0.05, 0, 0.01, 0.01, false},
    };
    for (size_t i = 0; i < sizeof worlds / sizeof *worlds; i++)
        assert_true(run_world(&worlds[i], 0) < 1.03);
}

// What K drafts in every step would take.
static double all_drafts_ms(const struct world *w, double acceptance)
{
    const double passes_ms = w->method == SPECULATIVE_DRAFT_MODEL ? K * w->pass_ms : 0;
    const double tokens = (1 - pow(acceptance, K + 1)) / (1 - acceptance);
    return (1 + K * w->n_seqs * w->row_ms + passes_ms + w->look_ms + w->prompt_ms / PROMPT_EVERY) /
           tokens;
}

TEST(as_fast_as_drafts_allow)
{
    const enum speculative_method ngram = SPECULATIVE_NGRAM, model = SPECULATIVE_DRAFT_MODEL;
    const struct world worlds[] = {
        {"ngram", ngram, 1, 0.8, 0.8, 0.02, 0, 0, 0.001, 0.02, false},
        {"ngram, noisy", ngram, 4, 0.8, 0.8, 0.005, 0, 0, 0.01, 0.005, true},
        {"rows are cheaper than told", ngram, 1, 0.8, 0.8, 0.02, 0, 0, 0.001, 0.06, false},
        {"a draft model", model, 1, 0.9, 0.9, 0.01, 0.05, 2, 0.001, 0.01, false},
        {"a draft model, batch 64", model, 64, 0.9, 0.9, 0.001, 0.05, 2, 0.01, 0.001, true},
        {"a draft model that becomes good", model, 8, 0, 0.9, 0.005, 0.05, 2, 0.01, 0.005, false},
    };
    for (size_t i = 0; i < sizeof worlds / sizeof *worlds; i++)
        assert_true(run_world(&worlds[i], STEPS - 4000) <
                    1.05 * all_drafts_ms(&worlds[i], worlds[i].then));
}

// Some drafts pay where all K of them would not, whatever the table held at first.
TEST(length_follows_cost_and_acceptance)
{
    const struct world worlds[] = {
        {"cheap rows", SPECULATIVE_NGRAM, 1, 0.95, 0.95, 0.001, 0, 0, 0.001, 0.001, false},
        {"dear rows", SPECULATIVE_NGRAM, 1, 0.6, 0.6, 0.15, 0, 0, 0.001, 0.15, false},
        {"rows dearer than told", SPECULATIVE_NGRAM, 1, 0.6, 0.6, 0.3, 0, 0, 0.001, 0.1, false},
        {"a layer, batch 64", SPECULATIVE_MTP, 64, 0.8, 0.8, 0.005, 0.05, 0, 0.001, 0.005, false},
    };
    const double one_dear = 1.15 / 1.6, two_dear = 1.3 / 1.96; // milliseconds over tokens
    assert_true(run_world(&worlds[0], 2000) < 1.03 * all_drafts_ms(&worlds[0], 0.95));
    assert_true(run_world(&worlds[1], 2000) < 1.03 * (one_dear < two_dear ? one_dear : two_dear));
    assert_true(run_world(&worlds[2], 2000) < 1.03 * 1.3 / 1.6);   // one draft
    assert_true(run_world(&worlds[3], 2000) < 1.03 * 1.74 / 2.44); // two
}
