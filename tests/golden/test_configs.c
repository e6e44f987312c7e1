/* test_configs.c: every field of every family's config.json, changed, against what transformers
 * makes of the same change (tests/golden/configs): the same logits, or an error that names the
 * field. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/generated.h"
#include "tests/support/reference.h"
#include "tests/support/support.h"

enum { ROWS = 24, MAX_EXTRAS = 256, MAX_FOLDERS = 64, MAX_REFUSED = 645 };

// Both are f32, and a sum of so many logits is off by as much as their norm is: about 1e-6.
#define TOLERANCE 2e-5

// What is refused here and computed by transformers, by a part of the sentence; anything else that
// is refused so is an error. Each names a field of the change, or what it makes of the folder's
// tensors.
static const json_t *refusals;

// What is computed here where transformers fails: it takes Mixtral's absent head_dim for a number
// in these ropes, gives DeepSeek-V3 and GLM as many heads of keys as their largest models have,
// takes the factor for a number where scores are scaled by it, and reads ropes of Nemotron-H, which
// has none.
static const char *const fails_there[][2] = {
    {"mixtral", "\"dynamic\",\"factor\""},        {"mixtral", "\"yarn\",\"factor\""},
    {"deepseek-v3", "num_key_value_heads="},      {"glm4-moe-lite", "num_key_value_heads="},
    {"deepseek-", "rope_parameters.factor=null"}, {"nemotron-h", "rope_"},
};

static char *table, *extras[MAX_EXTRAS];
static size_t n_extras;
static int n_changes, n_refused;
static struct reference shared; // its device alone

// What one folder's lines are compared with.
struct folder {
    const char *name;
    char *lines; // behind its first
    double sums[2], norm;
    json_t *config;
    int n_wrong;
};

static char *next_line(char **at)
{
    return strsep(at, "\n");
}

static bool logits_sums(const struct folder *f, json_t *config, double ret[2], double *ret_norm)
{
    struct reference r = {.dev = shared.dev};
    int32_t ids[ROWS];
    if (reference_build(test_golden(f->name), config, ROWS, &r) != ST_OK) return false;
    const int vocab = r.config->vocab_size;
    const size_t n = ROWS * (size_t)vocab;
    float *logits = malloc(n * sizeof *logits);
    struct projection p;
    for (int i = 0; i < ROWS; i++) ids[i] = (i * i * 29 + i * 7 + 3) % vocab;
    reference_logits(&r, ids, ROWS, logits);
    projection_init(&p, "logits");
    for (size_t i = 0; i < n; i++) projection_add(&p, (int64_t)i, logits[i]);
    *ret_norm = sqrt(p.squares);
    memcpy(ret, p.sum, 2 * sizeof *ret);
    free(logits);
    reference_release(&r);
    return true;
}

// Sets KEY (dots lead into objects) to VALUE, or takes it out ("-").
static void set_field(json_t *config, const char *key, const char *value)
{
    const char *dot = strchr(key, '.');
    if (dot) {
        char *first = strndup(key, (size_t)(dot - key));
        set_field(json_object_get(config, first), dot + 1, value);
        free(first);
    } else if (strcmp(value, "-") == 0) {
        json_object_del(config, key);
    } else {
        json_t *json = json_loads(value, JSON_DECODE_ANY, NULL);
        if (!json) fail_msg("%s: %s is not JSON", key, value);
        json_object_set_new(config, key, json);
    }
}

static void wrong(struct folder *f, const char *change, const char *outcome, const char *have)
{
    f->n_wrong++;
    fprintf(stderr, "%s %s: transformers %s, here %s\n", f->name, change, outcome, have);
}

static bool is_known_refusal(void)
{
    for (size_t i = 0; i < json_array_size(refusals); i++)
        if (strstr(status_message(), row_text(refusals, i, "says"))) return true;
    return false;
}

static bool may_compute(const struct folder *f, const char *change)
{
    for (size_t i = 0; i < sizeof fails_there / sizeof *fails_there; i++)
        if (strncmp(f->name, fails_there[i][0], strlen(fails_there[i][0])) == 0 &&
            strstr(change, fails_there[i][1]))
            return true;
    return false;
}

// The change is "KEY=VALUE [KEY=VALUE]". `refused`: transformers refuses it, whatever the outcome.
static void compare(struct folder *f, const char *change, const char *outcome, bool refused)
{
    json_t *config = json_deep_copy(f->config);
    char *words = strdup(change), *remaining = words, *word, have[64];
    double want[2] = {f->sums[0], f->sums[1]}, sums[2], norm;
    n_changes++;
    while ((word = strsep(&remaining, " "))) {
        char *value = strchr(word, '=');
        *value++ = '\0';
        set_field(config, word, value);
    }
    if (!logits_sums(f, config, sums, &norm)) {
        n_refused += !refused;
        if (!refused && getenv("SHOW_REFUSED"))
            printf("%s %s: %s\n", f->name, change, status_message());
        if (!refused && !is_known_refusal()) wrong(f, change, outcome, status_message());
    } else if (*outcome != 'x' || !may_compute(f, change)) {
        bool near = sscanf(outcome, "%lf,%lf", want, want + 1) == 2 || *outcome == '=';
        for (int i = 0; i < 2; i++) near = near && fabs(sums[i] / f->norm - want[i]) < TOLERANCE;
        snprintf(have, sizeof have, "%.6f,%.6f", sums[0] / f->norm, sums[1] / f->norm);
        if (!near) wrong(f, change, outcome, have);
    }
    json_decref(config);
    free(words);
}

static void own_fields(struct folder *f, char *line)
{
    const char *absent = NULL;
    char *key = strsep(&line, " "), *word;
    while ((word = strsep(&line, " "))) {
        char change[400], *end = strrchr(word, ':');
        const char *outcome = end + 1;
        const bool refused = *outcome == 'x';
        *end = '\0';
        if (strcmp(word, "-") == 0) absent = outcome;
        // here null may be as good as absent, where transformers wants another type
        if (strcmp(word, "null") == 0 && refused) outcome = absent;
        snprintf(change, sizeof change, "%s=%s", key, word);
        compare(f, change, outcome, refused);
    }
}

static void one_folder(void **state)
{
    struct folder *f = *state;
    char path[128], *remaining = f->lines, *line;
    double sums[2];
    snprintf(path, sizeof path, "tests/golden/%s/config.json", f->name);
    assert_ok(json_read_file(test_path(test_root(), path), 1 << 20, &f->config));
    if (!logits_sums(f, f->config, sums, &f->norm)) fail_msg("%s", status_message());
    for (int i = 0; i < 2; i++) assert_true(fabs(sums[i] / f->norm - f->sums[i]) < TOLERANCE);
    while ((line = next_line(&remaining)) && *line && *line != '[') {
        if (*line != '+') {
            own_fields(f, line);
            continue;
        }
        char *outcome = strsep(&line, " ");
        for (size_t i = 0; i < n_extras && (outcome = strsep(&line, " ")); i++)
            compare(f, extras[i], outcome, *outcome == 'x');
    }
    json_decref(f->config);
    if (f->n_wrong > 0) fail_msg("%s: %d changes differ from transformers", f->name, f->n_wrong);
}

TEST(no_more_is_refused)
{
    printf("%d changes, %d of them refused here alone\n", n_changes, n_refused);
    if (n_refused > MAX_REFUSED)
        fail_msg(
            "%d changes are refused here alone, %d were: SHOW_REFUSED=1 prints them; where each "
            "is right, raise MAX_REFUSED",
            n_refused, MAX_REFUSED);
}

int main(int argc, char **argv)
{
    static struct folder folders[MAX_FOLDERS];
    static char names[MAX_FOLDERS][32];
    size_t n = 0;
    table = test_read(test_path(test_root(), "tests/golden/configs/configs.txt"));
    refusals = test_rows("configs", "refusals");
    test_only(argc, argv);
    assert_ok(device_open("cpu", &shared.dev));
    for (char *remaining = table, *line; (line = remaining) && *line == '+';) {
        next_line(&remaining);
        extras[n_extras++] = line + 2;
        table = remaining;
    }
    for (char *at = table; at && n + 1 < MAX_FOLDERS; n++) {
        struct folder *f = &folders[n];
        if (sscanf(at, "[%31[^]]] %lf,%lf", names[n], &f->sums[0], &f->sums[1]) != 3) break;
        f->name = names[n];
        at = strchr(at, '\n') + 1;
        char *end = strstr(at, "\n[");
        f->lines = end ? strndup(at, (size_t)(end - at)) : strdup(at);
        test_list(0, (struct CMUnitTest){f->name, one_folder, NULL, NULL, f});
        at = end ? end + 1 : NULL;
    }
    return test_main();
}
