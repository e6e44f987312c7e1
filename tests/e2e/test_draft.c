/* test_draft.c: a daemon that drafts with a second model, and a trainer that trains it along with
 * the policy: what that does to acceptance, resuming, torn updates, and bridges without a draft. */
// SPDX-License-Identifier: Apache-2.0
#include "bridge/attach.h"
#include "common/base/rng.h"
#include "tests/support/tiny_model.h"
#include "tests/support/tiny_tokenizer.h"
#include "tests/support/torn.h"

#define LETTERS "24" // of a completion

static const char *draft; // beside a scene's policy

static const char *write_model(const struct scene *s, const char *name, int hidden, int layers,
                               int intermediate, uint64_t seed)
{
    const char *folder = test_path(s->folder, name);
    struct tiny_model shape = {.hidden = hidden,
                               .layers = layers,
                               .intermediate = intermediate,
                               .vocab = 300,
                               .eos_id = -1,
                               .seed = seed};
    assert_ok(tiny_model_write_as(folder, &shape));
    assert_ok(tiny_tokenizer_write(folder));
    return folder;
}

// Completions are letters drawn at random: a model of any size can learn their distribution, and
// nothing more.
static const char *write_data(const struct scene *s)
{
    static const char *const letters[] = {"a", "\u00e9", "\u00fc"};
    const char *path = test_path(s->folder, "data.jsonl");
    SCOPED(bytes_release) struct bytes lines = BYTES_INIT;
    struct rng r;
    rng_init(&r, 3, 0);
    for (int i = 0; i < 200; i++) {
        bytes_printf(&lines, "{\"prompt\": \"%d:\", \"completion\": \"", i % 10);
        for (int t = 0; t < atoi(LETTERS); t++) bytes_puts(&lines, letters[rng_below(&r, 3)]);
        bytes_puts(&lines, "\"}\n");
    }
    test_write(path, lines.data, lines.len);
    return path;
}

static void open_drafted(struct scene *s, int hidden, int layers, int intermediate)
{
    *s = (struct scene){.folder = test_folder()};
    s->model = write_model(s, "policy", hidden, layers, intermediate, 11);
    draft = write_model(s, "draft", 32, 1, 0, 12);
    s->data = write_data(s);
}

static const char *taught(struct scene *s, const char *model, const char *name,
                          const char *learning_rate)
{
    const char *out = test_path(s->folder, name);
    assert_trainer(s, 0,
                   "sft --model %s --data %s --out %s --device %s --dtype f32 --learning-rate %s "
                   "--max-steps 60 --examples-per-step 16 --token-budget 800",
                   model, s->data, out, test_device(), learning_rate);
    return out;
}

// cw-trainer train: the longer in characters, the better, at a fixed number of tokens: away with
// the letters that take two.
static int train_letters(struct scene *s, const char *run, const char *const more[])
{
    return scene_run(s, daemon_trainer(&s->daemon, s->data, test_path(s->folder, run),
                                       args("--reward length --length-target 30 --prompts-per-step "
                                            "4 --num-generations 8 --max-completion-length " LETTERS
                                            " --ignore-eos --lr-scheduler-type constant"),
                                       more));
}

// ---- acceptance ---------------------------------------------------------------------------------

struct run { // what metrics.jsonl says of steps first..last
    double drafted, accepted, reward, overlap, loss, grad_norm, learning_rate;
    int steps;
};

static struct run read_run(const struct scene *s, const char *name, int first, int last)
{
    const json_t *lines = metrics_of(s, name);
    struct run r = {.steps = last + 1 - first};
    for (int step = first; step <= last; step++) {
        const json_t *m = json_array_get(lines, (size_t)step - 1);
        assert_int_equal(int_of(m, "step"), step);
        r.drafted += json_number_value(json_object_get(m, "spec_decode/num_draft_tokens"));
        r.accepted += json_number_value(json_object_get(m, "spec_decode/num_accepted_tokens"));
        r.reward += json_number_value(json_object_get(m, "reward"));
        r.overlap += json_number_value(json_object_get(m, "draft_overlap"));
        r.loss += json_number_value(json_object_get(m, "draft_loss"));
        r.grad_norm += json_number_value(json_object_get(m, "draft_grad_norm"));
        r.learning_rate += json_number_value(json_object_get(m, "draft_learning_rate"));
    }
    r.reward /= r.steps;
    r.overlap /= r.steps;
    r.loss /= r.steps;
    r.grad_norm /= r.steps;
    r.learning_rate /= r.steps;
    return r;
}

static double acceptance(const struct run *r)
{
    return r->drafted > 0 ? r->accepted / r->drafted : 0;
}

// Policy and draft are taught the same; then the policy moves away, alone or with its draft.
TEST(acceptance_falls_or_holds)
{
    enum { STEPS = 14, WINDOW = 4, FIRST = 2 };
    struct scene s;
    struct run first[2], last[2];
    open_drafted(&s, 64, 3, 256);
    s.model = taught(&s, s.model, "taught-policy", "2e-3");
    draft = taught(&s, draft, "taught-draft", "5e-3");
    static const char *const names[] = {"alone", "together"};
    for (int together = 0; together < 2; together++) {
        // fixed: always four drafts, so that no measured time decides what is counted
        daemon_start(&s.daemon, s.model,
                     args("--draft %s --speculative draft_model:4 --draft-length fixed", draft));
        scene_ended(
            &s,
            train_letters(&s, names[together],
                          args("--max-steps 14 --learning-rate 3e-4 %s --draft-learning-rate 3e-3",
                               together ? "--train-draft" : "--ignore-eos")),
            0);
        assert_int_equal(daemon_stop(&s.daemon), 0);
        first[together] = read_run(&s, names[together], 1, FIRST);
        last[together] = read_run(&s, names[together], STEPS - WINDOW + 1, STEPS);
        printf("%s: reward %.3f to %.3f, acceptance %.3f to %.3f (of %.0f and %.0f drafts)\n",
               names[together], first[together].reward, last[together].reward,
               acceptance(&first[together]), acceptance(&last[together]), first[together].drafted,
               last[together].drafted);
        assert_true(last[together].reward > first[together].reward + 0.1); // it did move
    }
    printf("together: KL divergence %.4f to %.4f, overlap %.3f to %.3f\n", first[1].loss,
           last[1].loss, first[1].overlap, last[1].overlap);
    // What is to be expected needs no drafts.
    assert_true(first[1].overlap > 0.85 && last[1].overlap > 0.85);
    // Where both set out from, measured over both.
    struct run start = {.drafted = first[0].drafted + first[1].drafted,
                        .accepted = first[0].accepted + first[1].accepted};
    assert_true(start.drafted > 1000 && last[0].drafted > 1000 && last[1].drafted > 1000);
    assert_true(acceptance(&start) > 0.7);
    assert_true(acceptance(&last[0]) < acceptance(&start) - 0.3);
    assert_true(acceptance(&last[1]) > acceptance(&start) - 0.05);
}

// ---- its state ----------------------------------------------------------------------------------

// Four steps, or two and two with another daemon between: the same bits, of both models. Without
// drafts: when those are made is a matter of time, and a draft's sample is another draw.
TEST(resumes_to_the_bit)
{
    if (!on_cpu()) test_skip("on a GPU a row's last bit depends on the batch around it");
    struct scene s;
    open_drafted(&s, 64, 2, 0);
    const char *const daemon[] = {"--draft", draft, NULL};
    daemon_start(&s.daemon, s.model, daemon);
    scene_ended(
        &s,
        train_letters(
            &s, "whole",
            args("--train-draft --draft-learning-rate 1e-3 --learning-rate 1e-3 --max-steps 4")),
        0);
    daemon_holds(&s.daemon, "policy", latest(&s, "whole"));
    daemon_holds(&s.daemon, "draft", test_path(latest(&s, "whole"), "draft"));
    struct run r = read_run(&s, "whole", 1, 4);
    assert_true(r.loss > 0 && r.overlap > 0 && r.overlap < 1 && r.grad_norm > 0);
    assert_true(fabs(r.learning_rate - 1e-3) < 1e-9);
    for (int half = 1; half <= 2; half++) {
        daemon_start(&s.daemon, s.model, daemon);
        scene_ended(&s,
                    train_letters(&s, "halves",
                                  args("--train-draft --draft-learning-rate 1e-3 --learning-rate "
                                       "1e-3 --resume --max-steps %s",
                                       half == 1 ? "2" : "4")),
                    0);
    }
    static const char *const files[] = {"model.safetensors", "trainer/optimizer.safetensors",
                                        "draft/model.safetensors",
                                        "draft/trainer/optimizer.safetensors"};
    for (int i = 0; i < 4; i++) test_same_file(latest(&s, "whole"), latest(&s, "halves"), files[i]);
    // without weight its loss teaches it nothing
    daemon_start(&s.daemon, s.model, daemon);
    scene_ended(
        &s,
        train_letters(&s, "weightless", args("--train-draft --draft-loss-weight 0 --max-steps 2")),
        0);
    r = read_run(&s, "weightless", 1, 2);
    assert_true(r.loss > 0 && r.grad_norm == 0);
    daemon_holds(&s.daemon, "draft", draft);
    // and it is another draft than the one that was loaded
    SCOPED(file_map_release) struct file_map before, after;
    assert_ok(file_map_open(test_path(draft, "model.safetensors"), &before));
    assert_ok(file_map_open(test_path(latest(&s, "whole"), "draft/model.safetensors"), &after));
    assert_true(before.len != after.len || memcmp(before.data, after.data, before.len) != 0);

    // Without the option the draft is left alone, and the user told.
    daemon_start(&s.daemon, s.model, daemon);
    scene_ended(&s, train_letters(&s, "halves", args("--resume --no-train-draft --max-steps 5")),
                0);
    assert_said(&s, "--train-draft goes on with it");
    daemon_holds(&s.daemon, "draft", draft);
    assert_false(file_exists(test_path(latest(&s, "halves"), "draft")));
    // With it again, there is none to go on from.
    scene_ended(&s, train_letters(&s, "halves", args("--resume --train-draft --max-steps 6")), 0);
    assert_said(&s, "it starts as the server serves it");
    assert_true(file_exists(test_path(latest(&s, "halves"), "draft/config.json")));
}

// The warm-up counts updates for both models: 2 of them are the first rollout of 2.
TEST(schedule_counts_updates)
{
    struct scene s;
    open_drafted(&s, 64, 2, 0);
    daemon_start(&s.daemon, s.model, args("--draft %s", draft));
    scene_ended(
        &s,
        train_letters(
            &s, "run",
            args("--train-draft --draft-learning-rate 1e-3 --num-iterations 2 --count-steps "
                 "updates --warmup-steps 2 --max-steps 4")),
        0);
    assert_true(read_run(&s, "run", 1, 1).learning_rate == 0);
    assert_true(fabs(read_run(&s, "run", 2, 2).learning_rate - 1e-3) < 1e-9);
}

// The server's version once it is above `version` and whole.
static void wait_restored(const struct daemon *d, json_int_t version)
{
    const int64_t deadline = clock_deadline_ns(20000);
    for (json_int_t now = 0; now <= version;) {
        struct wire_answer a;
        daemon_request(d->socket, "GET", "/health", "", NULL, &a);
        if (a.status == 200) now = int_of(a.json, "weight_version");
        if (clock_ms_until(deadline) == 0) fail_msg("not restored: version %d", (int)now);
        clock_sleep_ms(2);
    }
}

// A writer of the role and of the draft dies with both half written.
static void tear(const struct daemon *d, const char *role)
{
    const json_int_t version = daemon_version(d);
    tear_roles(d, test_text("%s draft", role), NULL, NULL);
    wait_restored(d, version);
}

// The daemon takes back both from the checkpoint, be it the policy or an adapter that was trained
// with the draft; a run goes on from it.
TEST(torn_draft_is_restored)
{
    if (!on_cpu()) test_skip("it writes weights from a forked process, which a GPU does not allow");
    for (int adapter = 0; adapter < 2; adapter++) {
        struct scene s;
        open_drafted(&s, 64, 2, 0);
        daemon_start(&s.daemon, s.model,
                     args("--draft %s --speculative draft_model:2 --max-adapters 1", draft));
        const char *const *more =
            args("--train-draft --draft-learning-rate 1e-3 --learning-rate 1e-3 "
                 "--max-steps 2 --lora-r %s --lora-name a",
                 adapter ? "2" : "0");
        scene_ended(&s, train_letters(&s, "run", more), 0);
        const struct run r = read_run(&s, "run", 1, 2);
        assert_true(r.loss > 0 && r.grad_norm > 0 && r.overlap > 0);
        tear(&s.daemon, adapter ? "adapter:a" : "policy");
        if (adapter) daemon_holds_adapter(&s.daemon, "a", latest(&s, "run"));
        daemon_holds(&s.daemon, "policy", adapter ? s.model : latest(&s, "run"));
        daemon_holds(&s.daemon, "draft", test_path(latest(&s, "run"), "draft"));
        scene_ended(&s, train_letters(&s, "run", args("--train-draft --resume --max-steps 3")), 0);
        assert_said(&s, "resumed at step 2");
        daemon_holds(&s.daemon, "draft", test_path(latest(&s, "run"), "draft"));
        daemon_kill(&s.daemon);
    }
}

TEST(no_draft_is_an_error)
{
    struct scene s;
    open_drafted(&s, 64, 2, 0);
    daemon_start(&s.daemon, s.model, NULL);
    scene_ended(&s, train_letters(&s, "run", args("--train-draft --max-steps 1")), 1);
    assert_said(&s, s.daemon.bridge);
    assert_said(&s, "cw-infer-server --draft DIR --speculative draft_model:5");
    assert_false(file_exists(test_path(s.folder, "run")));
}
