/* test_draft_methods.c: the methods of drafting by themselves: their names, what they propose, and
 * the bound on what they remember. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/support.h"
#include "common/base/rng.h"
#include "infer-server/speculative/speculative.h"
#include "infer-server/speculative/method.h"

TEST(names_of_methods)
{
    struct speculative_choice c = {0};
    char text[64];
    assert_ok(speculative_parse("off", &c));
    assert_true(c.chosen && speculative_max(c) == 0);
    assert_ok(speculative_parse("ngram", &c));
    assert_int_equal(c.k[SPECULATIVE_NGRAM], 5);
    assert_ok(speculative_parse("suffix", &c));
    assert_int_equal(c.k[SPECULATIVE_SUFFIX], 8);
    assert_ok(speculative_parse("draft_model", &c));
    assert_true(c.k[SPECULATIVE_DRAFT_MODEL] == 5 && c.k[SPECULATIVE_SUFFIX] == 0);
    assert_ok(speculative_parse("draft_model:3,suffix:16", &c));
    assert_true(c.k[SPECULATIVE_DRAFT_MODEL] == 3 && speculative_max(c) == 16);
    speculative_write(c, text);
    assert_string_equal(text, "suffix:16,draft_model:3");
    static const char *const bad[] = {"",         "on",          "ngram:",    "ngram:0",
                                      "ngram:17", "ngram:x",     "ngram:3x",  "suffix:-1",
                                      "off:3",    "ngramm:3",    "off,ngram", "ngram,",
                                      ",ngram",   "ngram,ngram", "ngram: 3"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        assert_int_equal(speculative_parse(bad[i], &c), ST_INVALID);
    assert_int_equal(speculative_max(c), 16); // untouched
    assert_ok(speculative_parse("off", &c));
    speculative_write(c, text);
    assert_string_equal(text, "off");
}

static struct speculative_choice only(enum speculative_method method, int k)
{
    struct speculative_choice choice = {.chosen = true};
    choice.k[method] = k;
    return choice;
}

static struct draft propose(struct speculative *s, enum speculative_method method, int k, int room,
                            const int32_t *prompt, int n_prompt, const int32_t *generated, int n)
{
    struct draft d = {0};
    const struct history h = {.prompt = prompt,
                              .n_prompt = n_prompt,
                              .generated = generated,
                              .n_generated = n,
                              .prompt_key = speculative_prompt_key(prompt, n_prompt)};
    speculative_propose(s, only(method, k), &h, room, &d);
    return d;
}

static void assert_draft(const struct draft *d, const int32_t *tokens, int n)
{
    assert_int_equal(d->n, n);
    assert_memory_equal(d->tokens, tokens, (size_t)n * sizeof *tokens);
}

TEST(prompt_look_up)
{
    struct speculative *s = NULL;
    assert_ok(speculative_new(false, 64, &s));
    const int32_t prompt[] = {1, 2, 3, 4, 5, 9, 3, 7}, tail[] = {2, 3};
    // 2 3 stands at the front (a match of two), 3 alone stands later: the longer one counts
    struct draft d = propose(s, SPECULATIVE_NGRAM, 3, 100, prompt, 8, tail, 2);
    assert_draft(&d, (const int32_t[]){4, 5, 9}, 3);
    d = propose(s, SPECULATIVE_NGRAM, 3, 2, prompt, 8, tail, 2);
    assert_int_equal(d.n, 2); // room
    d = propose(s, SPECULATIVE_NGRAM, 3, 0, prompt, 8, tail, 2);
    assert_int_equal(d.n, 0);
    d = propose(s, SPECULATIVE_NGRAM, 3, 9, prompt, 8, (const int32_t[]){8}, 1);
    assert_int_equal(d.n, 0); // never seen
    const int32_t again[] = {6, 8, 6, 8, 6};
    d = propose(s, SPECULATIVE_NGRAM, 5, 9, prompt, 8, again, 5);
    assert_draft(&d, (const int32_t[]){8, 6, 8, 6, 8}, 5); // goes on into itself
    speculative_free(s);
}

static void learn_all(struct speculative *s, const int32_t *prompt, int n_prompt,
                      const int32_t *generated, int n)
{
    for (int i = 1; i <= n; i++) {
        const struct history h = {.prompt = prompt,
                                  .n_prompt = n_prompt,
                                  .generated = generated,
                                  .n_generated = i,
                                  .prompt_key = speculative_prompt_key(prompt, n_prompt)};
        speculative_learn(s, only(SPECULATIVE_SUFFIX, 8), &h);
    }
}

TEST(siblings_are_remembered)
{
    struct speculative *s = NULL;
    assert_ok(speculative_new(false, 64, &s));
    const int32_t prompt[] = {1, 2, 3}, other[] = {1, 2, 4};
    const int32_t a[] = {10, 11, 12, 13}, b[] = {10, 11, 15, 16};
    learn_all(s, prompt, 3, a, 4);
    learn_all(s, prompt, 3, b, 4);
    learn_all(s, prompt, 3, b, 4);
    struct draft d = propose(s, SPECULATIVE_SUFFIX, 4, 100, prompt, 3, a, 1);
    assert_draft(&d, (const int32_t[]){11, 15, 16}, 3); // twice against once; ends where b ended
    d = propose(s, SPECULATIVE_SUFFIX, 4, 100, prompt, 3, a, 3);
    assert_draft(&d, (const int32_t[]){13}, 1);
    d = propose(s, SPECULATIVE_SUFFIX, 4, 100, other, 3, a, 1);
    assert_int_equal(d.n, 0); // another prompt's
    const int32_t own[] = {5, 6, 5};
    d = propose(s, SPECULATIVE_SUFFIX, 2, 100, other, 3, own, 3);
    assert_draft(&d, (const int32_t[]){6, 5}, 2); // its own history
    speculative_free(s);
}

TEST(memory_is_bounded)
{
    const size_t max = 1 << 20;
    struct suffix_memory *m = NULL;
    struct rng r;
    int32_t tail[SUFFIX_DEPTH], next = -1;
    rng_init(&r, 3, 1);
    assert_ok(suffix_memory_new(max, &m));
    for (uint64_t prompt = 1; prompt <= 400; prompt++)
        for (int i = 0; i < 200; i++) {
            for (int k = 0; k < SUFFIX_DEPTH; k++) tail[k] = (int32_t)rng_below(&r, 1000);
            suffix_memory_add(m, prompt, tail, SUFFIX_DEPTH, (int32_t)rng_below(&r, 1000));
            assert_true(suffix_memory_bytes(m) <= max);
        }
    assert_true(suffix_memory_prompts(m) < 100 && suffix_memory_prompts(m) > 2);
    suffix_memory_add(m, 400, tail, SUFFIX_DEPTH, 7);
    suffix_memory_add(m, 400, tail, SUFFIX_DEPTH, 7);
    assert_int_equal(suffix_memory_next(m, 400, tail, SUFFIX_DEPTH, &next), SUFFIX_DEPTH);
    assert_int_equal(next, 7);
    assert_int_equal(suffix_memory_next(m, 1, tail, SUFFIX_DEPTH, &next),
                     0); // the first is forgotten
    suffix_memory_free(m);
}
