/* test_constraint.c: common/constraint: which texts a constraint takes, that its masks are what
 * following each token says, bounds of numbers against arithmetic, what is refused, the JSON Schema
 * test suite where it is at hand (COMMONWEIGHT_JSON_SCHEMA_SUITE: its folder of a draft), and
 * against jsonschema, XGrammar and llguidance, where a Python has them (COMMONWEIGHT_TEST_PYTHON),
 * samples of a random model, as many as COMMONWEIGHT_CONSTRAINT_SAMPLES says (200). */
// SPDX-License-Identifier: Apache-2.0
#include "common/constraint/constraint.h"
#include "tests/support/support.h"
#include "tests/support/tiny_tokenizer.h"

#include <dirent.h>

enum { END = 300, VOCAB = 320 };

static struct tokenizer *bytes_alone, *merged;
static struct constraints *of_bytes, *of_merged;

static void load(enum status (*write)(const char *folder), struct tokenizer **ret,
                 struct constraints **ret_all)
{
    static const int ends[] = {END, END + 1};
    const char *folder = test_folder();
    assert_ok(write(folder));
    assert_ok(tokenizer_load(folder, ret));
    assert_ok(constraints_new(*ret, VOCAB, ends, 2, ret_all));
}

static void set_up(void)
{
    load(tiny_tokenizer_write_bytes, &bytes_alone, &of_bytes);
    load(tiny_tokenizer_write, &merged, &of_merged);
}

static void tear_down(void)
{
    constraints_free(of_bytes);
    constraints_free(of_merged);
    tokenizer_free(bytes_alone);
    tokenizer_free(merged);
}
TESTS_BETWEEN(set_up, tear_down)

static int next(struct constraint *c, int state, int token)
{
    int ret;
    assert_ok(constraint_next(c, state, token, &ret));
    return ret;
}

static bool may_end(struct constraint *c, int state)
{
    return state >= 0 && next(c, state, END) >= 0;
}

static bool takes(struct constraint *c, const char *text, size_t len)
{
    int state = CONSTRAINT_START;
    for (size_t i = 0; i < len && state >= 0; i++) state = next(c, state, (uint8_t)text[i]);
    return may_end(c, state);
}

// Of every token: its bit says whether it leads on.
static void check_mask(struct constraint *c, int state)
{
    uint32_t mask[VOCAB / 32];
    assert_int_equal(constraint_words(c), VOCAB / 32);
    assert_ok(constraint_mask(c, state, mask));
    for (int token = 0; token < VOCAB; token++)
        if ((mask[token / 32] >> token % 32 & 1) != (next(c, state, token) >= 0))
            fail_msg("state %d, token %d: the mask has %u", state, token,
                     mask[token / 32] >> token % 32 & 1);
}

static void check_masks(const json_t *spec, const char *text)
{
    SCOPED(token_list_release) struct token_list ids = TOKEN_LIST_INIT;
    struct constraint *c;
    int state = CONSTRAINT_START;
    assert_ok(constraints_get(of_merged, spec, &c));
    assert_ok(tokenizer_encode(merged, text, strlen(text), false, &ids));
    for (int i = 0; i < ids.n; i++) {
        check_mask(c, state);
        state = next(c, state, ids.ids[i]);
    }
    check_mask(c, state);
    assert_true(may_end(c, state));
    constraint_release(c);
}

static void check_texts(struct constraint *c, const json_t *spec, const json_t *texts, bool yes)
{
    size_t i;
    json_t *text;
    json_array_foreach (texts, i, text) {
        if (takes(c, json_string_value(text), json_string_length(text)) != yes)
            fail_msg("%s: %s %s", json_dumps(spec, 0), yes ? "does not take" : "takes",
                     json_string_value(text));
        if (yes) check_masks(spec, json_string_value(text));
    }
}

// A row's constraint: its "spec", or its "format" as one, which *spec is then.
static enum status of_row(const json_t *row, const json_t **spec, struct constraint **ret)
{
    json_t *made = NULL;
    *spec = json_object_get(row, "spec");
    if (!*spec) {
        const enum status st = constraint_of_format(json_object_get(row, "format"), &made);
        if (st != ST_OK) return st;
        *spec = test_keep(made);
    }
    return constraints_get(of_bytes, *spec, ret);
}

TEST(texts)
{
    const json_t *rows = test_rows("constraint", "texts");
    size_t i;
    json_t *row;
    json_array_foreach (rows, i, row) {
        const json_t *spec;
        struct constraint *c;
        if (of_row(row, &spec, &c) != ST_OK)
            fail_msg("%s: %s", json_dumps(row, 0), status_message());
        check_texts(c, spec, json_object_get(row, "yes"), true);
        check_texts(c, spec, json_object_get(row, "no"), false);
        constraint_release(c);
    }
}

TEST(refused)
{
    const json_t *rows = test_rows("constraint", "refused");
    for (size_t i = 0; i < json_array_size(rows); i++) {
        const json_t *row = json_array_get(rows, i), *spec;
        struct constraint *c;
        if (of_row(row, &spec, &c) == ST_OK) fail_msg("%s", json_dumps(row, 0));
        assert_contains(status_message(), row_text(rows, i, "says"));
    }
}

// What takes more nodes than there may be.
TEST(a_long_text)
{
    const size_t n = 300000;
    char *text = malloc(n + 1);
    struct constraint *c;
    memset(text, 'a', n);
    text[n] = '\0';
    json_t *spec = test_keep(json_pack("{s:{s:s}}", "json_schema", "const", text));
    assert_int_equal(constraints_get(of_bytes, spec, &c), ST_TOO_LONG);
    assert_contains(status_message(), "more than 262144 nodes");
    free(text);
}

// A special token comes for its name in the spec's own texts, and for nothing else.
TEST(special_tokens)
{
    const int special = TINY_TOKENIZER_IM_START;
    json_t *spec = test_keep(json_pack("{s:[s, {s:[s, s]}, {s:s}]}", "sequence", "a<|im_start|>",
                                       "until", "<|im_start|>", "!", "regex", "[^b]*"));
    struct constraint *c;
    assert_ok(constraints_get(of_merged, spec, &c));
    int at = next(c, CONSTRAINT_START, 'a');
    assert_true(next(c, CONSTRAINT_START, special) < 0);
    check_mask(c, at);
    assert_true(next(c, at, '<') < 0);
    at = next(c, at, special);
    assert_true(next(c, next(c, at, '<'), '!') >= 0);
    at = next(c, at, special); // which ends the free text
    check_mask(c, at);
    assert_true(next(c, at, special) < 0);
    assert_true(may_end(c, next(c, at, '<')));
    constraint_release(c);
}

// A state whose mask takes more work than a bound: nothing may come there, and that is said.
TEST(a_mask_beyond_its_bound)
{
    struct bytes pattern = BYTES_INIT;
    uint32_t mask[VOCAB / 32];
    struct constraint *c;
    int behind, after;
    bytes_puts(&pattern, "x(");
    for (int i = 0; i < 36; i++) bytes_printf(&pattern, "%c?", i < 26 ? 'a' + i : '0' + i - 26);
    bytes_puts(&pattern, "){450}");
    json_t *spec = json_pack("{s:s}", "regex", bytes_text(&pattern));
    assert_ok(constraints_get(of_bytes, spec, &c));
    behind = next(c, CONSTRAINT_START, 'x');
    for (int i = 0; i < 2; i++) assert_int_equal(constraint_mask(c, behind, mask), ST_TOO_LONG);
    memset(mask, 1, sizeof mask);
    const struct constraint_row row = {c, behind, -1};
    assert_int_equal(constraint_masks(&row, 1, mask), ST_TOO_LONG);
    for (int i = 0; i < VOCAB / 32; i++) assert_int_equal(mask[i], 0);
    for (int token = 'a'; token <= END; token += END - 'a')
        assert_int_equal(constraint_next(c, behind, token, &after), ST_TOO_LONG);
    assert_contains(status_message(), "follows more than");
    assert_true(next(c, -1, 'a') < 0);
    constraint_release(c);
    json_decref(spec);
    bytes_release(&pattern);
}

// Many rows of two constraints, beside each other: masks and what is behind tokens are what each is
// by itself.
TEST(many_rows)
{
    enum { ROWS = 64, WORDS = VOCAB / 32 };
    static uint32_t masks[ROWS * WORDS], after[ROWS * WORDS];
    struct constraint_row rows[ROWS], before[ROWS];
    struct constraint *c[2];
    uint32_t mask[WORDS];
    int behind;
    json_t *specs[] = {test_keep(json_pack("{s:b}", "json_object", 1)),
                       test_keep(json_pack("{s:s}", "regex", "[^x]*\\d{2,9}y"))};
    for (int i = 0; i < 2; i++) assert_ok(constraints_get(of_merged, specs[i], &c[i]));
    behind = CONSTRAINT_START;
    for (int i = 0; i < ROWS; i++) {
        rows[i] = (struct constraint_row){c[i % 2], i % 2 ? CONSTRAINT_START : behind,
                                          i % 4 < 2   ? '1'
                                          : i % 8 < 4 ? '"'
                                                      : 'x'};
        if (i % 2 == 0) behind = next(c[0], behind, i == 0 ? '{' : i == 2 ? '"' : 'a');
    }
    memcpy(before, rows, sizeof before);
    for (int i = 0; i < ROWS; i++) before[i].token = -1;
    assert_ok(constraint_masks(before, ROWS, masks));
    for (int i = 0; i < ROWS; i++) {
        assert_ok(constraint_mask(rows[i].constraint, rows[i].state, mask));
        assert_memory_equal(mask, masks + (size_t)i * WORDS, sizeof mask);
    }
    constraint_follow(rows, ROWS);
    assert_ok(constraint_masks(rows, ROWS, after));
    for (int i = 0; i < ROWS; i++) {
        const struct constraint_row *r = &rows[i];
        const bool comes = (masks[i * WORDS + r->token / 32] >> r->token % 32 & 1) != 0;
        assert_ok(constraint_next(r->constraint, r->state, r->token, &behind));
        assert_int_equal(behind >= 0, comes);
        memset(mask, 0, sizeof mask); // of nothing, where the token may not come
        if (behind >= 0) assert_ok(constraint_mask(r->constraint, behind, mask));
        assert_memory_equal(mask, after + (size_t)i * WORDS, sizeof mask);
    }
    for (int i = 0; i < 2; i++) constraint_release(c[i]);
}

// Many of them, of which some are held: those that nobody holds make room.
TEST(more_than_are_kept)
{
    struct constraint *held, *c;
    for (int i = 0; i < 600; i++) {
        json_t *spec = test_keep(json_pack("{s:s}", "regex", "a{1,3}"));
        json_object_set_new(spec, "choice", json_pack("[s, o]", "x", json_sprintf("%d", i)));
        assert_ok(constraints_get(of_bytes, spec, i ? &c : &held));
        if (i) constraint_release(c);
    }
    assert_true(takes(held, "0", 1));
    assert_false(takes(held, "7", 1));
    constraint_release(constraint_hold(held));
    constraint_release(held);
}

// ---- numbers ------------------------------------------------------------------------------------

static const struct {
    const char *name;
    int side;
    bool out;
} bounds[] = {{"minimum", 1, false},
              {"exclusiveMinimum", 1, true},
              {"maximum", -1, false},
              {"exclusiveMaximum", -1, true}};

static bool meets(const json_t *schema, double x)
{
    bool met = true;
    for (int i = 0; i < 4; i++) {
        const json_t *bound = json_object_get(schema, bounds[i].name);
        const double d = (x - json_number_value(bound)) * bounds[i].side;
        if (bound) met &= bounds[i].out ? d > 0 : d >= 0;
    }
    return met;
}

// Every number of up to two digits and three decimals, some of them longer, against the bounds.
static void check_range(const json_t *schema, bool whole)
{
    static const char *const decimals[] = {"",     ".0", ".5",  ".49", ".500",
                                           ".501", ".9", ".05", ".999"};
    json_t *spec = test_keep(json_pack("{s:O}", "json_schema", schema));
    struct constraint *c;
    const enum status st = constraints_get(of_bytes, spec, &c);
    for (int i = -120; i <= 120; i++)
        for (int k = 0; k < (whole ? 1 : 9); k++)
            for (int minus = i == 0; minus >= 0; minus--) {
                char text[32];
                snprintf(text, sizeof text, "%s%d%s", minus ? "-" : "", i, decimals[k]);
                const bool met = meets(schema, strtod(text, NULL));
                if (st == ST_OK ? takes(c, text, strlen(text)) != met : met)
                    fail_msg("%s: %s", json_dumps(schema, 0), text);
            }
    if (st == ST_OK) constraint_release(c);
}

TEST(numbers)
{
    static const double ends[] = {-100, -12.5, -9, -1, -0.5, 0, 0.05, 0.5, 1, 9.5, 10, 99.49, 110};
    const int n = sizeof ends / sizeof *ends;
    for (int low = 0; low < n; low++)
        for (int high = 0; high < n; high += 2)
            for (int forms = 0; forms < 8; forms++) {
                const bool whole = forms & 4;
                json_t *schema =
                    test_keep(json_pack("{s:s}", "type", whole ? "integer" : "number"));
                json_object_set_new(schema, bounds[forms & 1].name, json_real(ends[low]));
                if (high + low != 2 * n) // one of them without an upper end
                    json_object_set_new(schema, bounds[2 + (forms >> 1 & 1)].name,
                                        json_real(ends[high]));
                check_range(schema, whole);
            }
}

// ---- the suite ----------------------------------------------------------------------------------

// What is right by the suite and ruled out here, on purpose: members come in the schema's order,
// numbers of "const" and "enum" as they are written there, integers without a fraction; formats
// are kept, where a draft has them for annotations.
static bool is_known(const char *file, const json_t *schema, const json_t *test)
{
    char *data =
        json_dumps(json_object_get(test, "data"), JSON_ENCODE_ANY | JSON_REAL_PRECISION(15));
    const bool number = strstr(data, ".0") || strcmp(data, "-2") == 0;
    bool known = strcmp(file, "format.json") == 0 || (number && json_is_object(schema)) ||
                 json_is_object(json_object_get(test, "data"));
    free(data);
    return known;
}

static void check_group(const char *file, const json_t *group, int counts[3])
{
    const json_t *schema = json_object_get(group, "schema"),
                 *tests = json_object_get(group, "tests");
    json_t *spec = json_pack("{s:O}", "json_schema", schema), *test;
    struct constraint *c;
    size_t i;
    const enum status st = constraints_get(of_bytes, spec, &c);
    json_decref(spec);
    if (st != ST_OK) {
        counts[2]++;
        return;
    }
    json_array_foreach (tests, i, test) {
        char *text =
            json_dumps(json_object_get(test, "data"), JSON_ENCODE_ANY | JSON_REAL_PRECISION(15));
        const bool valid = json_is_true(json_object_get(test, "valid"));
        const bool taken = takes(c, text, strlen(text));
        counts[0] += taken == valid;
        if (taken != valid && (taken || !is_known(file, schema, test)))
            fail_msg("%s: %s: %s is %s", file, text_of(test, "description"), text,
                     taken ? "taken" : "ruled out");
        counts[1] += taken != valid;
        free(text);
    }
    constraint_release(c);
}

TEST(the_json_schema_test_suite)
{
    const char *folder = getenv("COMMONWEIGHT_JSON_SCHEMA_SUITE");
    struct dirent **list;
    int counts[3] = {0};
    if (!folder) test_skip("COMMONWEIGHT_JSON_SCHEMA_SUITE names no folder of the suite");
    const int n = scandir(folder, &list, NULL, alphasort);
    assert_true(n > 0);
    for (int i = 0; i < n; i++) {
        const char *path = test_path(folder, list[i]->d_name);
        if (!strstr(list[i]->d_name, ".json")) continue;
        const json_t *groups = json_of_file(path);
        for (size_t g = 0; g < json_array_size(groups); g++)
            check_group(list[i]->d_name, json_array_get(groups, g), counts);
    }
    printf("%d as the suite has it, %d ruled out on purpose, %d schemas refused\n", counts[0],
           counts[1], counts[2]);
    assert_true(counts[0] > 400);
}

// ---- other programs -----------------------------------------------------------------------------

static void check_with(const char *modules, const char *what, int one_in)
{
#ifdef __SANITIZE_ADDRESS__
    test_skip("a Python cannot load a library that is built with AddressSanitizer");
#endif
    const char *count = getenv("COMMONWEIGHT_CONSTRAINT_SAMPLES"), *python = test_python(modules),
               *folder = test_folder();
    assert_ok(tiny_tokenizer_write_bytes(folder));
    printf("%s", test_output(0, OPTIONS(python,
                                        test_path(test_root(), "tests/clients/constraint_check.py"),
                                        test_binary("libcommonweight-tests.so"), folder, what,
                                        test_text("%d", (count ? atoi(count) : 200) / one_in))));
}

TEST(samples_are_valid)
{
    check_with("jsonschema", "samples", 1);
}

TEST(valid_documents_are_taken)
{
    check_with("jsonschema", "documents", 5);
}

TEST(masks_against_xgrammar)
{
    check_with("jsonschema, torch, xgrammar", "xgrammar", 10);
}

TEST(masks_against_llguidance)
{
    check_with("jsonschema, llguidance.numpy", "llguidance", 10);
}
