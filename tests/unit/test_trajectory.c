/* test_trajectory.c: what an environment returns, against what was sampled for it: masks, rewards,
 * groups; advantages of turns; and the journal of its tools. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/support.h"
#include "trainer/rollout/scoring.h"
#include "trainer/rollout/trajectory.h"

static const struct trajectory_bounds bounds = {.vocab_size = 50, .max_tokens = 8, .version = 4};

// Sampled behind the n_prompt first of `ids`: the others, each with log-probability -id.
static void add_turn(struct sampled_turns *turns, const char *ids, int n_prompt, uint64_t version)
{
    struct token_list all = {0}, prompt = {0};
    json_t *object = test_keep(json_pack("{s:O}", "ids", json_of(ids)));
    assert_ok(trajectory_read_ids(object, "ids", 50, &all));
    struct completion c = {.n = all.n - n_prompt, .text = strdup("text")};
    c.ids = calloc((size_t)c.n, sizeof *c.ids);
    c.logprobs = calloc((size_t)c.n, sizeof *c.logprobs);
    c.processed = calloc((size_t)c.n, sizeof *c.processed);
    c.versions = calloc((size_t)c.n, sizeof *c.versions);
    c.telemetry =
        json_pack("{s:i, s:i, s:i, s:i, s:i}", "prompt_tokens", n_prompt, "generated_tokens", c.n,
                  "kv_bytes_peak", 10 * all.n, "num_draft_tokens", 4, "num_accepted_tokens", 1);
    for (int t = 0; t < all.n; t++) {
        if (t < n_prompt) assert_ok(token_list_push(&prompt, all.ids[t]));
        if (t < n_prompt) continue;
        c.ids[t - n_prompt] = all.ids[t];
        c.logprobs[t - n_prompt] = -(float)all.ids[t];
        c.processed[t - n_prompt] = -(float)all.ids[t] / 2;
        c.versions[t - n_prompt] = version;
    }
    token_list_release(&all);
    assert_ok(sampled_turns_add(turns, &prompt, &c));
}

LATER(sampled_turns_release)
LATER(completion_release)

static struct sampled_turns *no_turns(void)
{
    return test_later(test_keep(calloc(1, sizeof(struct sampled_turns))),
                      sampled_turns_release_later);
}

// Those of most tests.
static struct sampled_turns *two_turns(void)
{
    struct sampled_turns *turns = no_turns();
    add_turn(turns, "[1, 2, 11, 12]", 2, 6);
    add_turn(turns, "[1, 2, 11, 12, 3, 13]", 5, 8);
    return turns;
}

// Of text with ' for "; released with the test.
static struct completion *read_text(const struct sampled_turns *turns, const char *text)
{
    struct completion *c = test_keep(calloc(1, sizeof *c));
    assert_ok(trajectory_read(json_quoted(text), turns, &bounds, c));
    return test_later(c, completion_release_later);
}

#define IDS "'token_ids': [1, 2, 11, 12, 3, 13]"

TEST(turns_tell_what_was_sampled)
{
    const struct sampled_turns *turns = two_turns();
    struct completion *c = read_text(turns, "{" IDS ", 'mask': [0, 0, 1, 1, 0, 1], 'reward': 2}");
    assert_true(c->processed[2] == -5.5f && c->processed[4] == 0);
    assert_true(c->n == 6 && c->logprobs[2] == -11 && c->logprobs[5] == -13 && c->logprobs[4] == 0);
    assert_true(c->versions[0] == 6 && c->versions[4] == 6 && c->versions[5] == 8);
    assert_true(c->n_rewards == 1 && completion_reward(c) == 2 && c->rewards[0].after == 6);
    assert_string_equal(c->text, "text\ntext");
    assert_json(c->telemetry, "{'prompt_tokens': 7, 'kv_bytes_peak': 60, 'accept_rate': 0.25}");
    SCOPED(token_list_release) struct token_list prompt = {0};
    assert_ok(trajectory_cut(c, 1, &prompt));
    assert_true(prompt.n == 2 && c->n == 4 && c->ids[0] == 11 && c->authors[2] == AUTHOR_OTHER);
    assert_true(c->authors[3] == AUTHOR_POLICY);
    assert_true(c->logprobs[3] == -13 && c->processed[3] == -6.5f && c->versions[3] == 8 &&
                c->rewards[0].after == 4);
    // a turn may be left out of what is learnt, and rewards may be its own
    c = read_text(turns, "{" IDS ", 'mask': [0,0,0,0,0,1], 'rewards': [1, 3]}");
    assert_true(c->n_rewards == 2 && c->rewards[0].after == 4 && completion_reward(c) == 4);
    assert_true(c->logprobs[2] == 0 && c->versions[0] == 8);
}

static void write_authors(struct completion *c, enum token_author first, enum token_author then)
{
    c->authors = malloc((size_t)c->n);
    for (int t = 0; t < c->n; t++) c->authors[t] = (uint8_t)(t ? then : first);
}

// Who of a tandem wrote a token the turn says; what the environment's mask leaves out is nobody's.
TEST(a_tandems_turns_tell_who_wrote)
{
    static const uint8_t want[] = {AUTHOR_FROZEN, AUTHOR_POLICY, AUTHOR_OTHER, AUTHOR_OTHER};
    struct sampled_turns *turns = two_turns();
    SCOPED(token_list_release) struct token_list prompt = {0};
    for (int i = 0; i < 2; i++)
        write_authors(&turns->items[i].sampled, AUTHOR_FROZEN, AUTHOR_POLICY);
    struct completion *c = read_text(turns, "{" IDS ", 'mask': [0, 0, 1, 1, 0, 0], 'reward': 2}");
    assert_true(c->logprobs[2] == -11 && c->versions[0] == 6);
    assert_ok(trajectory_cut(c, 1, &prompt));
    assert_true(prompt.n == 2 && c->n == 4); // up to the frozen model's token
    assert_memory_equal(c->authors, want, sizeof want);
}

TEST_EACH(trajectories_that_were_not_sampled, "rollout")
{
    struct completion c;
    assert_true(trajectory_read(json_at(cases, "%zu.trajectory", i), two_turns(), &bounds, &c) !=
                ST_OK);
    assert_message(row_text(cases, i, "says"));
}

TEST(a_prompt_repeats_or_not)
{
    struct sampled_turns *turns = no_turns();
    int32_t ids[] = {1, 2, 11, 12, 5};
    struct token_list prompt = {ids, 5, 0};
    int at = -1;
    assert_true(sampled_turns_repeat(turns, &prompt, &at));
    add_turn(turns, "[1, 2, 11, 12]", 2, 6);
    assert_true(sampled_turns_repeat(turns, &prompt, &at));
    prompt.n = 3; // shorter than what was there
    assert_false(sampled_turns_repeat(turns, &prompt, &at));
    assert_int_equal(at, 3);
    prompt.n = 5;
    ids[2] = 10;
    assert_false(sampled_turns_repeat(turns, &prompt, &at));
    assert_int_equal(at, 2);
}

// A turn whose prompt goes on behind the one before stands behind it; any other begins a part.
TEST(turns_stand_in_their_own_contexts)
{
    struct sampled_turns *turns = no_turns();
    SCOPED(token_list_release) struct token_list prompt = {0};
    add_turn(turns, "[1, 2, 11, 12]", 2, 6);
    add_turn(turns, "[1, 2, 12, 3, 13]", 4, 8);        // without the 11
    add_turn(turns, "[1, 2, 12, 3, 13, 4, 14]", 6, 8); // goes on
    add_turn(turns, "[1, 2, 9, 15]", 3, 8);            // is not learned from
    add_turn(turns, "[1, 2, 13, 16, 17]", 3, 10);
    struct completion *c = read_text(turns, "{'turns': [1,1,1,0,1], 'rewards': [1,2,3,4,5]}");
    static const int32_t ids[] = {11, 12, 13, 4, 14, 16, 17},
                         sequences[] = {11, 12, 12, 3, 13, 4, 14, 13, 16, 17};
    static const uint8_t authors[] = {1, 1, 1, 0, 1, 1, 1};
    static const struct pack_part parts[] = {{0, 0, 0}, {2, 2, 2}, {5, 7, 1}};
    assert_true(c->n == 7 && c->n_parts == 3);
    assert_ok(trajectory_cut(c, 1, &prompt));
    assert_true(prompt.n == 2 && prompt.ids[1] == 2 && c->n_sequences == 10);
    assert_memory_equal(c->ids, ids, sizeof ids);
    assert_memory_equal(c->authors, authors, sizeof authors);
    assert_memory_equal(c->sequences, sequences, sizeof sequences);
    assert_memory_equal(c->parts, parts, sizeof parts);
    for (int t = 0; t < c->n; t++) assert_true(c->logprobs[t] == (authors[t] ? -(float)ids[t] : 0));
    assert_true(c->versions[1] == 6 && c->versions[3] == 8 && c->versions[6] == 10);
    const int after[] = {2, 3, 5, 5, 7};
    for (int k = 0; k < 5; k++) assert_int_equal(c->rewards[k].after, after[k]);
    completion_keep_parts(c, 2);
    assert_true(c->n == 5 && c->n_parts == 2);
    // nothing is learned from: the group's prompt is that of the others
    struct completion *none = read_text(turns, "{'turns': [0,0,0,0,0], 'reward': 1}");
    token_list_release(&prompt);
    assert_ok(trajectory_cut(none, 1, &prompt));
    assert_true(none->n == 0 && prompt.n == 0);
}

TEST(a_group_shares_what_it_begins_with)
{
    struct sampled_turns *a = no_turns(), *b = no_turns();
    struct token_list prompt = {0};
    add_turn(a, "[1, 2, 3, 11]", 3, 6);
    add_turn(b, "[1, 2, 4, 3, 12]", 4, 6);
    struct completion group[] = {
        *read_text(a, "{'token_ids': [1,2,3,11], 'mask': [0,0,0,1], 'reward': 1}"),
        *read_text(b, "{'token_ids': [1,2,4,3,12], 'mask': [0,0,0,0,1], 'reward': 0}")};
    assert_ok(trajectory_cut(group, 2, &prompt));
    assert_true(prompt.n == 2 && group[0].n == 2 && group[1].n == 3);
    assert_true(group[0].ids[0] == 3 && group[0].authors[0] == AUTHOR_OTHER);
    assert_true(group[1].authors[2] == AUTHOR_POLICY);
    token_list_release(&prompt);
    group[1].ids[0] = 9;
    group[1].authors[0] = 0;
    assert_fails(trajectory_cut(group, 2, &prompt), ST_MISMATCH, "begin with different tokens");
}

// Of two samples with rewards of two turns and one of one: {0, 1}, {0, 0}, {1}.
TEST(rewards_of_turns_are_of_what_comes_before)
{
    struct completion_reward first[] = {{0, 2}, {1, 4}}, second[] = {{0, 2}, {0, 4}},
                             third[] = {{1, 4}};
    struct completion samples[3] = {{.n = 4, .rewards = first, .n_rewards = 2},
                                    {.n = 4, .rewards = second, .n_rewards = 2},
                                    {.n = 4, .rewards = third, .n_rewards = 1}};
    struct rollout r = {.n_groups = 1, .n_per_group = 3, .completions = samples};
    double rewards[] = {1, 0, 1};
    float advantages[3];
    struct scores s = {.n = 3, .rewards = rewards, .advantages = advantages};
    const struct scoring how = {.advantage = {.scale = SCALE_NONE}};
    assert_ok(scoring_turns(&how, &r, &s));
    const double mean = 2.0 / 5; // of all five rewards
    assert_near(samples[0].advantages[0], (1 - 2 * mean), 1e-6);
    assert_near(samples[0].advantages[3], (1 - mean), 1e-6);
    assert_near(samples[1].advantages[1], -2 * mean, 1e-6);
    assert_near(samples[1].advantages[2], -mean, 1e-6);
    assert_near(samples[2].advantages[0], (1 - mean), 1e-6);
    assert_near(advantages[0], (1 - 2 * mean), 1e-6);
    for (int i = 0; i < 3; i++) {
        free(samples[i].advantages);
        samples[i].advantages = NULL;
        samples[i].n_rewards = 1;
    }
    assert_ok(scoring_turns(&how, &r, &s)); // one each: those of the samples stay
    assert_null(samples[0].advantages);
    samples[0].n_rewards = 2;
    assert_status(scoring_turns(&(struct scoring){.normalise_terms = true}, &r, &s),
                  ST_UNSUPPORTED);
}

// ---- the journal --------------------------------------------------------------------------------

static const char *found(const struct journal *j, int line, int number, const char *call)
{
    return json_string_value(
        journal_find(j, &(struct journal_place){line, 0, 1, number}, test_keep(json_string(call))));
}

static void keep(struct journal *j, int number, const char *call, const char *result)
{
    assert_ok(journal_keep(j, &(struct journal_place){7, 0, 1, number},
                           test_keep(json_string(call)), test_keep(json_string(result))));
}

TEST(calls_are_found_again)
{
    const char *folder = test_folder(), *path = test_path(folder, "journal/step-3.jsonl");
    struct journal *j;
    assert_ok(journal_open(folder, 3, 0, &j));
    assert_false(file_exists(test_path(folder, "journal"))); // made with its first line
    assert_false(file_exists(path));                         // nothing was called yet
    keep(j, 0, "a", "A");
    keep(j, 1, "b", "B");
    keep(j, 2, "c", "C");
    journal_close(j);
    // a write that was cut off, after which the file goes on
    char *text = test_read(path);
    SCOPED(bytes_release) struct bytes torn = BYTES_INIT;
    bytes_printf(&torn, "%s{\"line\": 7, \"gro", text);
    test_write(path, torn.data, torn.len);
    assert_ok(journal_open(folder, 3, 0, &j));
    assert_string_equal(found(j, 7, 0, "a"), "A");
    assert_null(found(j, 7, 0, "b")); // another call
    assert_null(found(j, 8, 0, "a")); // of another line of the data
    assert_string_equal(found(j, 7, 2, "c"), "C");
    keep(j, 1, "x", "X"); // another course: what came behind is of none
    assert_null(found(j, 7, 2, "c"));
    journal_close(j);
    assert_ok(journal_open(folder, 3, 0, &j));
    assert_string_equal(found(j, 7, 1, "x"), "X");
    assert_null(found(j, 7, 2, "c"));
    journal_close(j);
    assert_ok(journal_forget(folder, 2));
    assert_true(file_exists(path));
    assert_ok(journal_forget(folder, 3));
    assert_false(file_exists(path));
    assert_ok(journal_forget(test_path(folder, "nowhere"), 3));
}

// Each rank has a file, and finds what any of them kept, but in what one is just writing anew.
TEST(ranks_find_each_others_calls)
{
    const char *folder = test_folder(), *path = test_path(folder, "journal/step-3.jsonl");
    struct journal *zero, *one;
    assert_ok(journal_open(folder, 3, 0, &zero));
    keep(zero, 0, "a", "A");
    const char *temporary = test_path(folder, "journal/step-3.jsonl.tmp.0a1b2c");
    test_write(temporary, "no JSON\n", 8);
    assert_ok(journal_open(folder, 3, 1, &one));
    assert_string_equal(found(one, 7, 0, "a"), "A");
    keep(one, 1, "b", "B");
    assert_true(file_exists(test_path(folder, "journal/step-3.rank-1.jsonl")));
    journal_close(one);
    journal_close(zero);
    assert_ok(journal_open(folder, 3, 0, &zero)); // of another number of ranks, say
    assert_string_equal(found(zero, 7, 0, "a"), "A");
    assert_string_equal(found(zero, 7, 1, "b"), "B");
    journal_close(zero);
    assert_ok(journal_forget(folder, 3));
    assert_false(file_exists(path));
    assert_false(file_exists(test_path(folder, "journal/step-3.rank-1.jsonl")));
}
