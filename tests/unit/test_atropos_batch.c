/* test_atropos_batch.c: the groups of Atropos' environments as a rollout with its scores, and what
 * is wrong with a batch, by name. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/support.h"
#include "trainer/rollout/source.h"

static const struct atropos_bounds bounds = {
    .vocab_size = 50, .max_tokens = 8, .temperature = 1, .needs_logprobs = true};

static enum status read_text(const char *text, struct rollout **ret, struct scores *ret_scores)
{
    json_t *batch;
    assert_ok(json_parse("the test", text, strlen(text), &batch));
    enum status st = atropos_read_batch("/batch", batch, &bounds, ret, ret_scores);
    json_decref(batch);
    return st;
}

TEST(groups_of_one_prompt_share_it)
{
    struct rollout *r;
    struct scores s = {0};
    assert_ok(read_text(
        "[{\"tokens\": [[1, 2, 3], [1, 2, 4, 5]], \"masks\": [[-100, -100, 3], [-100, -100, 4, 5]],"
        " \"inference_logprobs\": [[1.0, 1.0, -0.5], [1.0, 1.0, -1, -2]], \"scores\": [1, 0],"
        " \"advantages\": [], \"overrides\": [], \"group_overrides\": {}, \"images\": []},"
        " {\"tokens\": [[7, 8], [7, 9]], \"masks\": [[-100, 8], [-100, 9]],"
        " \"inference_logprobs\": [[1, -3], [1, -4]], \"scores\": [0.5, 0.5],"
        " \"overrides\": null, \"group_overrides\": null, \"images\": null}]",
        &r, &s));
    assert_true(r->n_groups == 2 && r->n_per_group == 2 && r->n_tokens == 5);
    assert_int_equal(r->examples[0]->prompt_ids.n, 2);
    assert_int_equal(r->examples[1]->prompt_ids.ids[0], 7);
    assert_true(r->completions[1].n == 2 && r->completions[1].ids[1] == 5);
    assert_true(r->completions[1].logprobs[1] == -2 && !r->completions[1].authors);
    assert_null(r->completions[0].versions);
    assert_int_equal((int)(rollout_oldest(r, 0) >> 63), 1);
    assert_true(s.n == 4 && s.rewards[0] == 1 && s.advantages[0] > 0.7f);
    assert_true(s.advantages[1] == -s.advantages[0] && s.advantages[2] == 0);
    rollout_free(r);
    scores_release(&s);
}

// Sizes differ, so each sequence is a group of its own here; advantages are of their groups.
TEST(turns_sizes_and_overrides)
{
    static const uint8_t mask[] = {AUTHOR_POLICY, AUTHOR_OTHER, AUTHOR_POLICY, AUTHOR_POLICY};
    struct rollout *r;
    struct scores s = {0};
    assert_ok(read_text(
        "[{\"tokens\": [[1, 2, 3, 4, 5], [1, 2, 6]], \"scores\": [3, 1],"
        " \"masks\": [[-100, 2, -100, 4, 5], [-100, -100, 6]],"
        " \"inference_logprobs\": [[1, -1, 1, -2, -3], [1, 1, -4]],"
        " \"advantages\": [[0, 9, 0, 7, 8], [0, 0, 4]],"
        " \"overrides\": [{\"temperature\": 1},"
        " {\"set_advantage_to_zero\": true, \"temperature\": 1}],"
        " \"generation_params\": {\"temperature\": 0.5, \"top_p\": 0.9}},"
        " {\"tokens\": [[9, 8]], \"masks\": [[-100, -100]], \"inference_logprobs\": [[1, 1]],"
        " \"scores\": [-2]}]",
        &r, &s));
    assert_true(r->n_groups == 3 && r->n_per_group == 1 && r->n_tokens == 5);
    assert_int_equal(r->examples[0]->prompt_ids.n, 1);
    assert_int_equal(r->examples[1]->prompt_ids.n, 2);
    const struct completion *first = &r->completions[0];
    assert_int_equal(first->n, 4);
    assert_memory_equal(first->authors, mask, sizeof mask);
    assert_true(first->advantages[0] == 9 && first->advantages[3] == 8);
    assert_true(first->logprobs[1] == 0 && first->logprobs[2] == -2);
    assert_null(r->completions[1].advantages);
    assert_int_equal(r->completions[2].n, 0);
    assert_true(s.advantages[0] > 0.7f && s.advantages[1] == 0);
    assert_true(s.advantages[2] == -2); // compared with nothing
    assert_true(fabs(s.stats.reward_mean - 2.0 / 3) < 1e-12);
    rollout_free(r);
    scores_release(&s);
}

static void assert_batch(const char *text, enum status status, const char *sentence)
{
    struct rollout *r = NULL;
    struct scores s = {0};
    enum status st = read_text(text, &r, &s);
    if (st != status) fail_msg("%s: status %d, not %d: %s", text, st, status, status_message());
    assert_message(sentence);
    assert_null(r);
}

TEST(what_is_wrong_is_named)
{
    const json_t *faults = test_rows("rollout", "batches_with_faults");
    static const char good[] = "[{\"tokens\": [[1, 2]], \"masks\": [[-100, 2]], \"scores\": [1],"
                               " \"inference_logprobs\": [[1, -1]]}, %s]";
    for (size_t i = 0; i < json_array_size(faults); i++) {
        char text[512], *group = json_dumps(json_object_get(json_array_get(faults, i), "group"),
                                            JSON_ENCODE_ANY);
        snprintf(text, sizeof text, good, group);
        free(group);
        assert_batch(text, row_status(faults, i, "status"), row_text(faults, i, "says"));
    }
    assert_batch("[]", ST_FORMAT, "/batch: no list of groups");
    assert_batch("{}", ST_FORMAT, "/batch: no list of groups");
}
