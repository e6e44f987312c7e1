/* test_offline_reference.c: cw-trainer sft and dpo against TRL's SFTTrainer and DPOTrainer: metrics
 * of three AdamW steps, an evaluation after them, and how far each tensor has moved
 * (tests/golden/trl/make_trl.py). */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/offline.h"
#include "tests/support/reference.h"
#include "tests/support/tiny_tokenizer.h"

// Of figures, both in f32; and of distances, to whose first step a gradient's sign is all.
#define FIGURE 2e-5
#define MOVED  1e-3

struct reference_run {
    struct scene scene;
    struct reference before, after;
    char kind[32]; // of the run that is open; "": none
    int figures, tensors;
};

static const char *golden(const char *name)
{
    return test_path(test_path(test_root(), "tests/golden/trl"), name);
}

static void train_as(struct reference_run *r, const char *kind)
{
    char loss[32] = "", *with_sft;
    const bool pairs = sscanf(kind, "dpo:%31s", loss) == 1;
    if ((with_sft = strstr(loss, "+sft"))) *with_sft = '\0';
    r->scene.data = golden(pairs ? "pairs.jsonl" : "sft.jsonl");
    const char *words[32] = {"--tokenizer",
                             test_path(r->scene.folder, "bytes"),
                             "--eval-data",
                             golden(pairs ? "pairs_heldout.jsonl" : "sft_heldout.jsonl"),
                             "--examples-per-step",
                             pairs ? "5" : "6",
                             "--max-steps",
                             "3",
                             "--weight-decay",
                             "0.01",
                             "--weight-decay-matrices",
                             "--overwrite"};
    int n = 12;
    if (pairs) words[n++] = "--loss-type", words[n++] = loss;
    if (pairs) words[n++] = "--beta", words[n++] = "0.3";
    if (with_sft) words[n++] = "--sft-weight", words[n++] = "0.5";
    if (offline_train(&r->scene, pairs ? "dpo" : "sft", "run", words) != 0)
        fail_msg("%s:\n%s", kind, test_read(test_path(r->scene.folder, "trainer.log")));
}

static void open_run(struct reference_run *r, const char *kind)
{
    if (strcmp(kind, r->kind) == 0) return;
    if (r->kind[0]) reference_close(&r->after);
    snprintf(r->kind, sizeof r->kind, "%s", kind);
    train_as(r, kind);
    reference_open(latest(&r->scene, "run"), "cpu", &r->after);
}

// "NAME VALUE NAME VALUE ...", of the line of a step; of the evaluation's its names have a prefix.
static void check_figures(struct reference_run *r, int step, const char *prefix, char *remaining)
{
    double have[4];
    for (char *name; (name = strsep(&remaining, " "));) {
        const double want = strtod(strsep(&remaining, " "), NULL);
        if (*prefix && strcmp(name, "num_tokens") == 0) continue;
        const char *key = test_text("%s%s", prefix, name);
        assert_int_equal(column(&r->scene, "run", key, have, 4), 4); // that of step 0 too
        if (fabs(have[step] - want) > FIGURE * (1 + fabs(want)))
            fail_msg("%s, step %d, %s: %.9g, not %.9g", r->kind, step, key, have[step], want);
        r->figures++;
    }
}

static void read_tensor(struct reference *r, const char *name, double *ret_n, float **ret)
{
    const struct weight_tensor *t = weights_find(r->weights, name);
    if (!t) fail_msg("no tensor %s", name);
    *ret = malloc((size_t)t->n * sizeof **ret);
    *ret_n = (double)t->n;
    assert_ok(weights_read(r->weights, r->dev, (int)(t - r->weights->tensors), *ret));
}

static void check_moved(struct reference_run *r, const char *name, double want)
{
    float *a, *b;
    double n, sum = 0;
    read_tensor(&r->before, name, &n, &a);
    read_tensor(&r->after, name, &n, &b);
    for (int i = 0; i < (int)n; i++) sum += ((double)b[i] - a[i]) * ((double)b[i] - a[i]);
    if (fabs(sqrt(sum) - want) > MOVED * want)
        fail_msg("%s: %s has moved by %.9g, not %.9g", r->kind, name, sqrt(sum), want);
    free(a);
    free(b);
    r->tensors++;
}

static void check_line(struct reference_run *r, char *line)
{
    if (line[0] == '#') return;
    open_run(r, strsep(&line, " "));
    const char *what = strsep(&line, " "), *which = strsep(&line, " ");
    if (strcmp(what, "moved") == 0)
        check_moved(r, which, strtod(line, NULL));
    else
        check_figures(r, (int)strtol(which, NULL, 10), strcmp(what, "eval") == 0 ? "eval/" : "",
                      line);
}

TEST(as_trl)
{
    struct reference_run r = {.scene.folder = test_folder(), .scene.model = test_golden("llama3")};
    const char *bytes = test_path(r.scene.folder, "bytes");
    assert_ok(file_make_folders(bytes));
    assert_ok(tiny_tokenizer_write_bytes(bytes));
    reference_open(r.scene.model, "cpu", &r.before);
    char *text = test_read(golden("trl.txt")), *next = text;
    for (char *line; (line = strsep(&next, "\n")) && *line;) check_line(&r, line);
    reference_close(&r.after);
    reference_close(&r.before);
    assert_int_equal(r.figures, 3 * 6 + 3 + 5 * (3 * 12 + 9));
    assert_int_equal(r.tensors, 6 * 30);
}
