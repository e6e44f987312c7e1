/* test_completion_pack.c: completions as ranks give them to each other come out as they went in,
 * and what is not whole is refused wherever it ends. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/support.h"
#include "trainer/rollout/rollout.h"

static int32_t ids[] = {5, 0, 151935};
static float logprobs[] = {-0.25f, -1e-30f, -87.5f}, processed[] = {-0.125f, 0, -80.5f};
static uint64_t versions[] = {2, 4, UINT64_MAX - 1};
static uint8_t accepted[] = {0, 1, 2};
static int32_t offsets[] = {0, 3, 3};
static float advantages[] = {0.5f, -0.5f, 0};
static struct pack_part parts[] = {{0, 0, 1}, {2, 1, 3}};
static int32_t sequences[] = {7, 8, 9, 10};

static struct completion whole(void)
{
    return (struct completion){
        .n = 3,
        .ids = ids,
        .logprobs = logprobs,
        .processed = processed,
        .versions = versions,
        .truncated = true,
        .text = "one\ntwo \xe2\x90\x80",
        .accepted = accepted,
        .text_offset = offsets,
        .advantages = advantages,
        .parts = parts,
        .n_parts = 2,
        .sequences = sequences,
        .n_sequences = 4,
        .telemetry = json_pack("{s:i, s:f}", "queue_ms", 3, "latency_ms", 0.1),
    };
}

TEST(comes_out_as_it_went_in)
{
    SCOPED(bytes_release) struct bytes packed = BYTES_INIT;
    struct completion c = whole(), empty = {.text = ""}, got;
    assert_status(completion_pack(&c, &packed), ST_OK);
    assert_status(completion_pack(&empty, &packed), ST_OK);
    struct packed from = {packed.data, packed.data + packed.len};

    assert_status(completion_unpack(&from, &got), ST_OK);
    assert_int_equal(got.n, 3);
    assert_true(got.truncated);
    assert_memory_equal(got.ids, ids, sizeof ids);
    assert_memory_equal(got.logprobs, logprobs, sizeof logprobs);
    assert_memory_equal(got.processed, processed, sizeof processed);
    assert_memory_equal(got.versions, versions, sizeof versions);
    assert_memory_equal(got.accepted, accepted, sizeof accepted);
    assert_memory_equal(got.text_offset, offsets, sizeof offsets);
    assert_memory_equal(got.advantages, advantages, sizeof advantages);
    assert_true(got.n_parts == 2 && got.n_sequences == 4);
    assert_memory_equal(got.parts, parts, sizeof parts);
    assert_memory_equal(got.sequences, sequences, sizeof sequences);
    assert_null(got.authors);
    assert_string_equal(got.text, c.text);
    assert_true(json_equal(got.telemetry, c.telemetry));
    completion_release(&got);

    assert_status(completion_unpack(&from, &got), ST_OK);
    assert_int_equal(got.n, 0);
    assert_false(got.truncated);
    assert_null(got.ids);
    assert_null(got.telemetry);
    assert_string_equal(got.text, "");
    assert_ptr_equal(from.at, from.end);
    completion_release(&got);
    json_decref(c.telemetry);
}

TEST(what_is_cut_off_is_refused)
{
    SCOPED(bytes_release) struct bytes packed = BYTES_INIT;
    struct completion c = whole(), got;
    assert_status(completion_pack(&c, &packed), ST_OK);
    for (size_t len = 0; len < packed.len; len++) {
        char *part = malloc(len + 1); // so that a sanitizer sees what is read behind it
        assert_non_null(part);
        memcpy(part, packed.data, len);
        struct packed from = {part, part + len};
        assert_status(completion_unpack(&from, &got), ST_FORMAT);
        assert_ptr_equal(from.at, part);
        free(part);
    }
    json_decref(c.telemetry);
}
