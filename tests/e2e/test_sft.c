/* test_sft.c: cw-trainer sft as a program: what it writes over, which tokenizer a new model may
 * have, what of a conversation it learns, and by which context it chooses rope factors. */
// SPDX-License-Identifier: Apache-2.0
#include "common/text/chat_template.h"
#include "common/text/tokenizer.h"
#include "tests/support/daemon.h"
#include "tests/support/reference.h"
#include "tests/support/support.h"
#include "tests/support/tiny_model.h"
#include "tests/support/tiny_tokenizer.h"
#include "trainer/data/data.h"

#define LIMIT_MS 60000
#define WORDS    40

static const char chats[] =
    "{\"messages\": [{\"role\": \"user\", \"content\": \"one\"}, {\"role\": \"assistant\", "
    "\"content\": \"two\"}, {\"role\": \"user\", \"content\": \"three\"}, {\"role\": "
    "\"assistant\", \"content\": \"four\"}]}\n";
static const char pairs[] = "{\"prompt\": \"ab\", \"completion\": \"cdef\"}\n"
                            "{\"prompt\": \"abc\", \"completion\": \"d\"}\n";

struct scene {
    const char *folder, *model, *data, *out, *log;
};

static void scene_open(struct scene *s, const char *data)
{
    s->folder = test_folder();
    s->model = daemon_model(s->folder, true, 7);
    s->data = test_path(s->folder, "data.jsonl");
    s->out = test_path(s->folder, "out");
    s->log = test_path(s->folder, "sft.log");
    test_write(s->data, data, strlen(data));
}

// One step at learning rate 0 unless `more` says otherwise; the log is of this run alone.
static int sft(const struct scene *s, const char *const start[], const char *const more[])
{
    const char *const *common = OPTIONS("--max-steps", "1", "--examples-per-step", "1",
                                        "--learning-rate", "0", "--device", "cpu");
    const char *argv[WORDS] = {test_binary("cw-trainer"), "sft", "--data", s->data};
    const char *const *parts[] = {start, common, more};
    int n = 4;
    for (int p = 0; p < 3; p++)
        for (const char *const *word = parts[p]; word && *word; word++) argv[n++] = *word;
    unlink(s->log);
    return test_command(s->log, LIMIT_MS, argv);
}

static void assert_said(const struct scene *s, const char *part, bool said)
{
    char *log = test_read(s->log);
    if ((strstr(log, part) != NULL) != said)
        fail_msg("\"%s\" is %s in:\n%s", part, said ? "not" : "there", log);
}

TEST(writes_over_on_request)
{
    struct scene s;
    scene_open(&s, pairs);
    const char *const to_out[] = {"--model", s.model, "--out", s.out, NULL};
    const char *const to_itself[] = {"--model", s.model, "--out", s.model, NULL};
    assert_int_equal(sft(&s, to_out, NULL), 0);
    assert_int_equal(sft(&s, to_out, NULL), 2);
    assert_said(&s, "is there already; take another folder, or say --overwrite", true);
    assert_int_equal(sft(&s, to_itself, NULL), 2);
    assert_said(&s, "is there already", true);
    assert_int_equal(sft(&s, to_out, OPTIONS("--overwrite")), 0);
    assert_int_equal(sft(&s, to_itself, OPTIONS("--overwrite", "--learning-rate", "1e-3")), 0);
    assert_true(file_exists(test_path(s.model, "tokenizer.json")));
    // an empty folder is fine; one that is no model's is never replaced
    const char *empty = test_folder(), *other = test_folder();
    const char *const to_empty[] = {"--model", s.model, "--out", empty, NULL};
    const char *const to_other[] = {"--model", s.model, "--out", other, "--overwrite", NULL};
    assert_int_equal(sft(&s, to_empty, NULL), 0);
    test_write(test_path(other, "thesis.txt"), "x", 1);
    assert_int_equal(sft(&s, to_other, NULL), 2);
    assert_said(&s, "is no model folder (it has no config.json)", true);
    assert_true(file_exists(test_path(other, "thesis.txt")));
}

// A config.json for --init.
static const char *write_init(int vocab, int eos_id)
{
    const char *folder = test_folder();
    const struct tiny_model shape = {
        .hidden = 32, .layers = 1, .vocab = vocab, .eos_id = eos_id, .seed = 1};
    assert_ok(tiny_model_write_as(folder, &shape));
    return test_path(folder, "config.json");
}

TEST(tokenizer_of_a_new_model)
{
    struct scene s;
    scene_open(&s, pairs);
    const char *config = write_init(255, -1); // enough for the data, not for the tokenizer
    const char *const few[] = {"--init", config, "--tokenizer", s.model, "--out", s.out, NULL};
    assert_int_equal(sft(&s, few, NULL), 1);
    assert_said(&s, "vocab_size is 255, and the tokenizer in", true);
    assert_said(&s, "set vocab_size to 263 or more", true);
    assert_false(file_exists(s.out));
    config = write_init(280, TINY_TOKENIZER_IM_END);
    const char *const padded[] = {"--init", config, "--tokenizer", s.model, "--out", s.out, NULL};
    assert_int_equal(sft(&s, padded, NULL), 0);
    assert_said(&s, "vocab_size is 280; 17 of these rows have no token", true);
    assert_said(&s, "which is none of the model's eos_token_id", false);
    config = write_init(263, 5);
    const char *const ends[] = {"--init", config, "--tokenizer", s.model, "--out", s.out, NULL};
    assert_int_equal(sft(&s, ends, OPTIONS("--overwrite")), 0);
    assert_said(&s,
                "ends texts with token 261, which is none of the model's eos_token_id: completions "
                "will end with 5",
                true);
    assert_said(&s, "have no token", false);
}

// Mean of -log p over the tokens of the conversation that are to be learnt, by the plainest means.
static double wanted_loss(const struct scene *s, bool all)
{
    const struct prompt_options options = {.all_turns = all, .completions = true, .end_id = -1};
    struct prompt_format format = {.options = &options};
    struct tokenizer *tokenizer;
    struct chat_template *chat;
    struct dataset *d;
    struct reference r;
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
    int32_t *ids = malloc((size_t)n * sizeof *ids);
    float *logits = malloc((size_t)n * (size_t)vocab * sizeof *logits);
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
    free(ids);
    free(logits);
    dataset_free(d);
    chat_template_free(chat);
    tokenizer_free(tokenizer);
    reference_close(&r);
    return loss / n_learnt;
}

static double said_loss(const struct scene *s)
{
    char *log = test_read(s->log);
    const char *at = strstr(log, "loss ");
    assert_non_null(at);
    double loss = strtod(at + 5, NULL);
    return loss;
}

TEST(turns_of_a_conversation)
{
    struct scene s;
    double losses[2];
    scene_open(&s, chats);
    const char *const start[] = {"--model", s.model, "--out", s.out, "--overwrite", NULL};
    for (int all = 0; all < 2; all++) {
        assert_int_equal(sft(&s, start, OPTIONS("--train-on", all ? "all" : "last")), 0);
        losses[all] = said_loss(&s);
        assert_true(fabs(losses[all] - wanted_loss(&s, all)) < 1e-3);
        assert_said(&s, "of which the last alone is learnt; --train-on all learns every one", !all);
        assert_said(&s, "of 1 conversations every turn of the assistant is learnt", all);
    }
    assert_true(fabs(losses[0] - losses[1]) > 1e-2);
    // the default is the last, and where there is but one turn nothing is said
    assert_int_equal(sft(&s, start, NULL), 0);
    assert_true(said_loss(&s) == losses[0]);
    test_write(s.data, pairs, strlen(pairs));
    assert_int_equal(sft(&s, start, NULL), 0);
    assert_said(&s, "conversations", false);
}

TEST(rope_by_the_longest_or_as_told)
{
    struct scene s;
    double losses[2];
    scene_open(&s, pairs);
    const char *golden = test_golden("phi3-longrope"), *bytes = s.folder;
    assert_ok(tiny_tokenizer_write_bytes(bytes));
    const char *const start[] = {"--model", golden, "--tokenizer", bytes,
                                 "--out",   s.out,  "--overwrite", NULL};
    static const struct {
        const char *context, *said;
    } cases[] = {
        {"0",
         "longrope takes its short factors, for contexts of up to 7 tokens (short: up to 64), as "
         "the longest example says"},
        {"128", "longrope takes its long factors, for contexts of up to 128 tokens"},
    };
    for (int i = 0; i < 2; i++) {
        assert_int_equal(sft(&s, start, OPTIONS("--rope-context", cases[i].context)), 0);
        assert_said(&s, cases[i].said, true);
        losses[i] = said_loss(&s);
    }
    assert_true(losses[0] != losses[1]);
    assert_int_equal(sft(&s, start, OPTIONS("--rope-context", "3")), 1);
    assert_said(&s, "--rope-context 3 is below the longest example (7 tokens)", true);
}
