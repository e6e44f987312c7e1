/* test_longrope.c: server and trainer on a model whose rope factors depend on the context
 * (tests/golden/phi3-longrope: short ones up to 64 tokens, long ones beyond). The server's context
 * chooses them, whatever lengths the trainer has: on the CPU both compute the same log-probability,
 * bit for bit. */
// SPDX-License-Identifier: Apache-2.0
#include "bridge/attach.h"
#include "tests/support/tiny_tokenizer.h"
#include "tests/support/training.h"

// The golden folder's model, with a tokenizer of one token a byte.
static const char *longrope_folder(void)
{
    static const char *const copied[] = {"config.json", "generation_config.json",
                                         "model.safetensors"};
    const char *from = test_golden("phi3-longrope"), *to = test_folder();
    for (size_t i = 0; i < sizeof copied / sizeof copied[0]; i++) {
        SCOPED(bytes_release) struct bytes content = BYTES_INIT;
        assert_ok(file_read(test_path(from, copied[i]), 1 << 24, &content));
        test_write(test_path(to, copied[i]), content.data, content.len);
    }
    assert_ok(tiny_tokenizer_write_bytes(to));
    return to;
}

// A server of it with these options, and two prompts.
static void open_longrope(struct scene *s, const char *const options[])
{
    static const char lines[] = "{\"prompt\": \"abcdefgh\", \"answer\": \"x\"}\n"
                                "{\"prompt\": \"hgfedcba\", \"answer\": \"y\"}\n";
    if (!on_cpu()) test_skip("bit for bit on the CPU only");
    scene_open_model(s, longrope_folder(), options);
    test_write(s->data, lines, strlen(lines));
}

static int train_on_it(struct scene *s, const char *const options[])
{
    return scene_run(
        s, daemon_trainer(&s->daemon, s->data, test_path(s->folder, "run"), options, NULL));
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
    struct scene s;
    open_longrope(&s, args("--max-context %s --draft %s", context, longrope_folder()));
    assert_int_equal(bridge_rope_context(&s.daemon, "policy"), atoi(context));
    assert_int_equal(bridge_rope_context(&s.daemon, "draft"), atoi(context));
    const char *const *more =
        args("--reward length --length-target 10 --prompts-per-step 2 --num-generations 4 "
             "--max-completion-length %s --learning-rate 1e-3 --max-steps 2 --beta 0.1 "
             "--ignore-eos --train-draft --logging-steps 1",
             length);
    scene_ended(&s, train_on_it(&s, more), 0);
    // bit for bit, though the trainer's own lengths would choose the other factors
    each_within(&s, "run", "sampler_mismatch/max", 2, 0, 0);
    assert_said(&s, factors);
    assert_contains(test_read(s.daemon.log), factors);
}

TEST(short_sequences_under_a_long_context)
{
    train_under("256", "24", "longrope takes its long factors, for contexts of up to 256 tokens");
}

TEST(short_context)
{
    train_under("64", "24", "longrope takes its short factors, for contexts of up to 64 tokens");
}

// A KL reference of the very weights that are trained: 0 before the first update, exactly.
TEST(reference_rotates_alike)
{
    struct scene s;
    open_longrope(&s, args("--max-context 256"));
    const char *const *more = args("--reward length --prompts-per-step 2 --num-generations 4 "
                                   "--max-completion-length 16 --learning-rate 0 --max-steps 1 "
                                   "--beta 0.1 --ignore-eos");
    scene_ended(&s, train_on_it(&s, more), 0);
    each_within(&s, "run", "kl", 1, 0, 0);
}

// An older daemon's file says nothing of it: refused by who would have to guess.
TEST(bridge_without_the_choice)
{
    struct scene s;
    open_longrope(&s, NULL);
    assert_int_equal(bridge_rope_context(&s.daemon, "policy"), 256); // the model's own
    json_t *bridge = json_of_file(s.daemon.bridge);
    json_object_del(json_at(bridge, "roles.0"), "rope_context");
    assert_ok(json_write_file(s.daemon.bridge, 0600, bridge));
    scene_ended(&s, train_on_it(&s, args("--reward constant")), 1);
    assert_said(&s, "has no \"rope_context\", by which the server chose the factors");
}
