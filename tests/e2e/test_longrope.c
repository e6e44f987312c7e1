/* test_longrope.c: server and trainer on a model whose rope factors depend on the context
 * (tests/golden/phi3-longrope: short ones up to 64 tokens, long ones beyond). The server's context
 * chooses them, whatever lengths the trainer has: on the CPU both compute the same log-probability,
 * bit for bit. */
// SPDX-License-Identifier: Apache-2.0
#include "bridge/attach.h"
#include "tests/support/daemon.h"
#include "tests/support/support.h"
#include "tests/support/tiny_tokenizer.h"

#define LIMIT_MS 120000

// The golden folder's model, with a tokenizer of one token a byte.
static const char *longrope_folder(void)
{
    static const char *const copied[] = {"config.json", "generation_config.json",
                                         "model.safetensors"};
    const char *from = test_golden("phi3-longrope"), *to = test_folder();
    for (size_t i = 0; i < sizeof copied / sizeof copied[0]; i++) {
        struct bytes content = BYTES_INIT;
        assert_ok(file_read(test_path(from, copied[i]), 1 << 24, &content));
        test_write(test_path(to, copied[i]), content.data, content.len);
        bytes_release(&content);
    }
    assert_ok(tiny_tokenizer_write_bytes(to));
    return to;
}

static const char *write_data(const char *folder)
{
    static const char lines[] = "{\"prompt\": \"abcdefgh\", \"answer\": \"x\"}\n"
                                "{\"prompt\": \"hgfedcba\", \"answer\": \"y\"}\n";
    const char *path = test_path(folder, "data.jsonl");
    test_write(path, lines, sizeof lines - 1);
    return path;
}

// What each line of metrics.jsonl says of `key`, the largest.
static double largest_metric(const char *run, const char *key, int *ret_lines)
{
    const json_t *lines = json_of_lines_file(test_path(run, "metrics.jsonl")), *json;
    double largest = 0;
    size_t i;
    json_array_foreach (lines, i, json) {
        const json_t *value = json_object_get(json, key);
        assert_true(json_is_number(value));
        largest = fmax(largest, fabs(json_number_value(value)));
    }
    *ret_lines = (int)json_array_size(lines);
    return largest;
}

static int bridge_rope_context(const struct daemon *d, const char *role)
{
    struct bridge_file *file;
    assert_ok(bridge_file_read(d->bridge, &file));
    assert_non_null(bridge_file_role(file, role));
    int context = bridge_file_role(file, role)->rope_context;
    bridge_file_free(file);
    return context;
}

// Sequences of 8 + `length` tokens, under a server whose context is `context`, with a KL reference
// and the same model as its own draft.
static void train_under(const char *context, const char *length, const char *factors)
{
    const char *model = longrope_folder(), *folder = test_folder();
    const char *run = test_path(folder, "run"), *log = test_path(folder, "trainer.log");
    const char *argv[TRAINER_WORDS];
    struct daemon d = {0};
    int lines;
    memset(&d, 0, sizeof d);
    daemon_start(&d, model, OPTIONS("--max-context", context, "--draft", model));
    assert_int_equal(bridge_rope_context(&d, "policy"), atoi(context));
    assert_int_equal(bridge_rope_context(&d, "draft"), atoi(context));
    daemon_trainer(&d, write_data(folder), run,
                   OPTIONS("--reward", "length", "--length-target", "10", "--prompts-per-step", "2",
                           "--num-generations", "4", "--max-completion-length", length,
                           "--learning-rate", "1e-3", "--max-steps", "2", "--beta", "0.1",
                           "--ignore-eos", "--train-draft", "--logging-steps", "1"),
                   NULL, argv);
    if (test_command(log, LIMIT_MS, argv) != 0) fail_msg("%s", test_read(log));
    // bit for bit, though the trainer's own lengths would choose the other factors
    assert_true(largest_metric(run, "sampler_mismatch/max", &lines) == 0);
    assert_int_equal(lines, 2);
    char *text = test_read(log);
    assert_contains(text, factors);
    text = test_read(d.log);
    assert_contains(text, factors);
    daemon_kill(&d);
}

TEST(short_sequences_under_a_long_context)
{
    if (strcmp(test_device(), "cpu") != 0) test_skip("bit for bit on the CPU only");
    train_under("256", "24", "longrope takes its long factors, for contexts of up to 256 tokens");
}

TEST(short_context)
{
    if (strcmp(test_device(), "cpu") != 0) test_skip("bit for bit on the CPU only");
    train_under("64", "24", "longrope takes its short factors, for contexts of up to 64 tokens");
}

// A KL reference of the very weights that are trained: 0 before the first update, exactly.
TEST(reference_rotates_alike)
{
    const char *model = longrope_folder(), *folder = test_folder(), *run = test_path(folder, "run");
    const char *argv[TRAINER_WORDS];
    struct daemon d = {0};
    int lines;
    if (strcmp(test_device(), "cpu") != 0) test_skip("bit for bit on the CPU only");
    memset(&d, 0, sizeof d);
    daemon_start(&d, model, OPTIONS("--max-context", "256"));
    daemon_trainer(&d, write_data(folder), run,
                   OPTIONS("--reward", "length", "--prompts-per-step", "2", "--num-generations",
                           "4", "--max-completion-length", "16", "--learning-rate", "0",
                           "--max-steps", "1", "--beta", "0.1", "--ignore-eos"),
                   NULL, argv);
    assert_int_equal(test_command(test_path(folder, "trainer.log"), LIMIT_MS, argv), 0);
    assert_true(largest_metric(run, "kl", &lines) == 0);
}

// An older daemon's file says nothing of it: refused by who would have to guess.
TEST(bridge_without_the_choice)
{
    const char *model = longrope_folder(), *folder = test_folder();
    const char *argv[TRAINER_WORDS], *log = test_path(folder, "trainer.log");
    struct daemon d = {0};
    json_t *bridge;
    memset(&d, 0, sizeof d);
    daemon_start(&d, model, NULL);
    assert_int_equal(bridge_rope_context(&d, "policy"), 256); // the model's own
    assert_ok(json_read_file(d.bridge, 1 << 24, &bridge));
    json_object_del(json_array_get(json_object_get(bridge, "roles"), 0), "rope_context");
    assert_ok(json_write_file(d.bridge, 0600, bridge));
    json_decref(bridge);
    daemon_trainer(&d, write_data(folder), test_path(folder, "run"),
                   OPTIONS("--reward", "constant"), NULL, argv);
    assert_int_equal(test_command(log, LIMIT_MS, argv), 1);
    assert_contains(test_read(log),
                    "has no \"rope_context\", by which the server chose the factors");
}
