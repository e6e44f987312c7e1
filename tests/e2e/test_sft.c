/* test_sft.c: cw-trainer sft as a program: what it writes over, which tokenizer a new model may
 * have, what of a conversation it learns, and by which context it chooses rope factors. */
// SPDX-License-Identifier: Apache-2.0
#include "common/text/chat_template.h"
#include "common/text/tokenizer.h"
#include "tests/support/offline.h"
#include "tests/support/reference.h"
#include "tests/support/tiny_model.h"
#include "tests/support/tiny_tokenizer.h"
#include "trainer/data/data.h"

static const char chats[] =
    "{\"messages\": [{\"role\": \"user\", \"content\": \"one\"}, {\"role\": \"assistant\", "
    "\"content\": \"two\"}, {\"role\": \"user\", \"content\": \"three\"}, {\"role\": "
    "\"assistant\", \"content\": \"four\"}]}\n";
static const char pairs[] = "{\"prompt\": \"ab\", \"completion\": \"cdef\"}\n"
                            "{\"prompt\": \"abc\", \"completion\": \"d\"}\n";

static void open_with(struct scene *s, const char *data)
{
    offline_scene_open(s);
    test_write(s->data, data, strlen(data));
}

// One step at learning rate 0 unless the words say otherwise.
static int sft(struct scene *s, const char *run, const char *const words[])
{
    return trainer_alone(s, run,
                         JOIN(args("sft --data %s --max-steps 1 --examples-per-step 1 "
                                   "--learning-rate 0 --device cpu",
                                   s->data),
                              words));
}

TEST(writes_over_on_request)
{
    struct scene s;
    open_with(&s, pairs);
    // an empty folder is fine; one that is no model's is never replaced
    assert_ok(file_make_folders(test_path(s.folder, "empty")));
    assert_ok(file_make_folders(test_path(s.folder, "other")));
    test_write(test_path(s.folder, "other/thesis.txt"), "x", 1);
    train_rows(&s, "offline_runs", "writes_over_on_request", sft);
}

// With --quantization the loss is that of a model which has the numbers that are multiplied; what
// is trained and written is the model itself.
#define STEPS "--max-steps 2 --learning-rate 1e-3"
TEST(what_is_multiplied)
{
    struct scene s;
    double quantised[3], widened[3], plain[3];
    offline_scene_open(&s);
    offline_sums(&s, false, 16);
    const char *fp8 = test_path(s.folder, "fp8");
    assert_offline(&s, 0, "sft", "plain", STEPS);
    assert_offline(&s, 0, "sft", "quantised", STEPS " --quantization fp8-weights");
    assert_trainer(&s, 0, "merge --model %s --to fp8-weights --dtype f32 --out %s", s.model, fp8);
    s.model = fp8;
    assert_offline(&s, 0, "sft", "widened", STEPS);
    assert_int_equal(column(&s, "plain", "loss", plain, 3), 2);
    assert_int_equal(column(&s, "quantised", "loss", quantised, 3), 2);
    assert_int_equal(column(&s, "widened", "loss", widened, 3), 2);
    assert_true(quantised[0] == widened[0] && quantised[0] != plain[0]);
    assert_true(quantised[1] != widened[1]); // whose master began at the rounded numbers
    scene_end(&s);
}

// A config.json for --init in this folder of the scene's.
static void write_init(const struct scene *s, const char *name, int vocab, int eos_id)
{
    const char *folder = test_path(s->folder, name);
    const struct tiny_model shape = {
        .hidden = 32, .layers = 1, .vocab = vocab, .eos_id = eos_id, .seed = 1};
    assert_ok(file_make_folders(folder));
    assert_ok(tiny_model_write_as(folder, &shape));
}

TEST(tokenizer_of_a_new_model)
{
    struct scene s;
    open_with(&s, pairs);
    write_init(&s, "few", 255, -1); // enough for the data, not for the tokenizer
    write_init(&s, "padded", 280, TINY_TOKENIZER_IM_END);
    write_init(&s, "ends", 263, 5);
    train_rows(&s, "offline_runs", "tokenizer_of_a_new_model", sft);
}

// Mean of -log p over the tokens of the conversation that are to be learnt, by the plainest means.
static double wanted_loss(const struct scene *s, bool all)
{
    const struct prompt_options options = {.all_turns = all, .completions = true, .end_id = -1};
    struct prompt_format format = {.options = &options};
    struct tokenizer *tokenizer;
    struct chat_template *chat;
    struct dataset *d;
    SCOPED(reference_close) struct reference r;
    int left_out, n_learnt = 0;
    double loss = 0;
    assert_ok(tokenizer_load(s->model, &tokenizer));
    assert_ok(chat_template_find(s->model, NULL, &chat));
    reference_open(s->model, "cpu", &r);
    format.tokenizer = tokenizer;
    format.chat = chat;
    format.vocab_size = r.config->vocab_size;
    assert_ok(dataset_load(s->data, NULL, &d));
    assert_ok(dataset_tokenize(d, &format, &left_out));
    const struct example *e = &d->examples[0];
    const int p = e->prompt_ids.n, n = p + e->completion_ids.n, vocab = r.config->vocab_size;
    int32_t *ids = test_keep(malloc((size_t)n * sizeof *ids));
    float *logits = test_keep(malloc((size_t)n * (size_t)vocab * sizeof *logits));
    memcpy(ids, e->prompt_ids.ids, (size_t)p * sizeof *ids);
    memcpy(ids + p, e->completion_ids.ids, (size_t)(n - p) * sizeof *ids);
    reference_logits(&r, ids, n, logits);
    for (int t = p; t < n; t++) {
        const float *row = logits + (size_t)(t - 1) * (size_t)vocab;
        double sum = 0;
        if (!e->learnt[t - p]) continue;
        for (int v = 0; v < vocab; v++) sum += exp((double)row[v]);
        loss += log(sum) - (double)row[ids[t]];
        n_learnt++;
    }
    dataset_free(d);
    chat_template_free(chat);
    tokenizer_free(tokenizer);
    return loss / n_learnt;
}

static double said_loss(const struct scene *s)
{
    char *log = test_read(test_path(s->folder, "trainer.log"));
    const char *at = strstr(log, "loss ");
    assert_non_null(at);
    double loss = strtod(at + 5, NULL);
    return loss;
}

TEST(turns_of_a_conversation)
{
    struct scene s;
    double losses[2];
    open_with(&s, chats);
    const char *out = test_path(s.folder, "out");
    for (int all = 0; all < 2; all++) {
        assert_int_equal(sft(&s, "",
                             args("--model %s --out %s --overwrite --train-on %s", s.model, out,
                                  all ? "all" : "last")),
                         0);
        losses[all] = said_loss(&s);
        assert_true(fabs(losses[all] - wanted_loss(&s, all)) < 1e-3);
        assert_int_equal(
            said(&s, "of which the last alone is learnt; --train-on all learns every one"), !all);
        assert_int_equal(said(&s, "of 1 conversations every turn of the assistant is learnt"), all);
    }
    assert_true(fabs(losses[0] - losses[1]) > 1e-2);
    // the default is the last, and where there is but one turn nothing is said
    const char *const *plain = args("--model %s --out %s --overwrite", s.model, out);
    assert_int_equal(sft(&s, "", plain), 0);
    assert_true(said_loss(&s) == losses[0]);
    test_write(s.data, pairs, strlen(pairs));
    assert_int_equal(sft(&s, "", plain), 0);
    assert_false(said(&s, "conversations"));
}

TEST(rope_by_the_longest_or_as_told)
{
    struct scene s;
    open_with(&s, pairs);
    s.model = test_golden("phi3-longrope");
    assert_ok(tiny_tokenizer_write_bytes(s.folder));
    train_rows(&s, "offline_runs", "rope_by_the_longest", sft);
    const double short_factors = said_loss(&s);
    train_rows(&s, "offline_runs", "rope_as_told", sft);
    assert_true(said_loss(&s) != short_factors);
    train_rows(&s, "offline_runs", "rope_of_too_little", sft);
}
