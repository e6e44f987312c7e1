/* tokenizer_load.c: loads a Hugging Face tokenizer. tokenizer.json is followed as it stands, with
 * one exception that tokenizer_config.json calls for (see prefix_once). Nothing is written
 * afterwards. */
// SPDX-License-Identifier: Apache-2.0
#include "common/text/tokenizer.h"
#include "common/base/file.h"
#include "common/base/json.h"
#include "common/model/model_folder.h"
#include "common/text/tokenizer_parts.h"
#include <stdlib.h>
#include <string.h>

#define MAX_FILE_BYTES ((size_t)256 << 20)

// ---- added tokens -------------------------------------------------------------------------------

// The JSON of one folder while it is taken in; config and map may be NULL.
struct source {
    const char *where; // tokenizer.json
    const json_t *json, *config, *map;
    char class[64];         // tokenizer_class without "Fast", "" if none
    const char *model_type; // NULL: unknown
};

static const char *const file_names[TOKENIZER_FILES] = {"tokenizer.json", "tokenizer_config.json",
                                                        "special_tokens_map.json", "config.json"};

static enum status put_added(struct tokenizer *t, const char *where, const json_t *token,
                             int64_t id)
{
    const json_t *content = json_object_get(token, "content");
    struct added_token flags = {.id = (int)id};
    enum status st;
    if (!json_is_string(content))
        return status_fail(ST_FORMAT, "%s: added token %lld: content is not a string", where,
                           (long long)id);
    const char *text = json_string_value(content);
    size_t len = json_string_length(content);
    if (len == 0) return ST_OK; // would match everywhere; the tokenizers library skips it too
    const struct token_map *vocab = bpe_vocab(t->bpe);
    if (id < 0 || id > 2 * (int64_t)vocab->n_tokens + 65536)
        return status_fail(ST_FORMAT, "%s: added token \"%s\": id %lld is out of range", where,
                           text, (long long)id);
    int in_vocab = token_map_id(vocab, text, len);
    const char *other = token_map_text(vocab, (int)id, NULL);
    if (in_vocab >= 0 && in_vocab != id)
        return status_fail(ST_FORMAT,
                           "%s: token \"%s\" has the ids %d in model.vocab and %lld in "
                           "added_tokens",
                           where, text, in_vocab, (long long)id);
    if (in_vocab < 0 && other)
        return status_fail(ST_FORMAT,
                           "%s: id %lld is \"%s\" in model.vocab and \"%s\" in added_tokens", where,
                           (long long)id, other, text);
    CHECK(json_get_bool(where, token, "special", &flags.special));
    flags.normalized = !flags.special;
    CHECK(json_get_bool(where, token, "normalized", &flags.normalized));
    CHECK(json_get_bool(where, token, "lstrip", &flags.lstrip));
    CHECK(json_get_bool(where, token, "rstrip", &flags.rstrip));
    CHECK(json_get_bool(where, token, "single_word", &flags.single_word));
    st = added_tokens_put(&t->added, text, len, &flags);
    if (st != ST_OK) return status_context(st, "%s: added_tokens", where);
out:
    return st;
}

// tokenizer.json's added_tokens, then tokenizer_config.json's added_tokens_decoder, which beats it.
static enum status load_added(struct tokenizer *t, const struct source *s)
{
    const json_t *list = json_object_get(s->json, "added_tokens");
    if (json_has(s->json, "added_tokens") && !json_is_array(list))
        return status_fail(ST_FORMAT, "%s: added_tokens is not an array", s->where);
    for (size_t i = 0; i < json_array_size(list); i++) {
        const json_t *token = json_array_get(list, i);
        int64_t id = -1;
        enum status st = json_get_int(s->where, token, "id", 0, INT32_MAX, &id);
        if (st == ST_OK) st = put_added(t, s->where, token, id);
        if (st != ST_OK) return st;
    }
    const char *key;
    json_t *token;
    json_object_foreach (json_object_get(s->config, "added_tokens_decoder"), key, token) {
        char *end;
        long id = strtol(key, &end, 10);
        if (end == key || *end)
            return status_fail(ST_FORMAT,
                               "tokenizer_config.json: added_tokens_decoder: \"%s\" is not "
                               "an id",
                               key);
        enum status st = put_added(t, "tokenizer_config.json", token, id);
        if (st != ST_OK) return st;
    }
    return ST_OK;
}

// A token named in a config, as "text" or {"content": "text", ...}, is a special added token.
static enum status make_special(struct tokenizer *t, const json_t *value, int *ret_id)
{
    const json_t *content = json_is_object(value) ? json_object_get(value, "content") : value;
    if (!json_is_string(content) || json_string_length(content) == 0) return ST_OK;
    const char *text = json_string_value(content);
    size_t len = json_string_length(content);
    const struct token_map *added = &t->added.map, *vocab = bpe_vocab(t->bpe);
    struct added_token flags = {.special = true};
    flags.id = tokenizer_id_of(t, text, len);
    if (flags.id < 0) flags.id = added->n_ids > vocab->n_ids ? added->n_ids : vocab->n_ids;
    const struct added_token *there = NULL;
    if (token_map_id(added, text, len) >= 0) there = added_tokens_find(&t->added, flags.id);
    if (there) {
        flags = *there;
        flags.special = true;
    } else if (json_is_object(value)) {
        enum status st = json_get_bool("tokenizer_config.json", value, "lstrip", &flags.lstrip);
        if (st == ST_OK)
            st = json_get_bool("tokenizer_config.json", value, "rstrip", &flags.rstrip);
        if (st != ST_OK) return st;
    }
    if (ret_id) *ret_id = flags.id;
    return added_tokens_put(&t->added, text, len, &flags);
}

// tokenizer_config.json's field, else special_tokens_map.json's.
static const json_t *named(const struct source *s, const char *key)
{
    const json_t *value = json_object_get(s->config, key);
    return value ? value : json_object_get(s->map, key);
}

static enum status load_named(struct tokenizer *t, const struct source *s)
{
    struct {
        const char *key;
        int *ret_id;
    } fields[] = {{"bos_token", &t->bos}, {"eos_token", &t->eos}, {"unk_token", NULL},
                  {"sep_token", NULL},    {"pad_token", NULL},    {"cls_token", NULL},
                  {"mask_token", NULL}};
    const char *const lists[] = {"additional_special_tokens", "extra_special_tokens"};
    for (size_t i = 0; i < sizeof(fields) / sizeof(fields[0]); i++) {
        enum status st = make_special(t, named(s, fields[i].key), fields[i].ret_id);
        if (st != ST_OK) return st;
    }
    for (size_t i = 0; i < sizeof(lists) / sizeof(lists[0]); i++) {
        const json_t *list = named(s, lists[i]);
        for (size_t k = 0; k < json_array_size(list); k++) {
            enum status st = make_special(t, json_array_get(list, k), NULL);
            if (st != ST_OK) return st;
        }
    }
    // the classes' own defaults, where the files name none
    static const struct {
        const char *class, *bos, *eos;
    } defaults[] = {{"LlamaTokenizer", "<s>", "</s>"}, {"Qwen2Tokenizer", NULL, "<|endoftext|>"}};
    for (size_t i = 0; i < sizeof(defaults) / sizeof(defaults[0]); i++) {
        if (strcmp(s->class, defaults[i].class) != 0) continue;
        if (!named(s, "bos_token") && defaults[i].bos) t->bos = tokenizer_id(t, defaults[i].bos);
        if (!named(s, "eos_token") && defaults[i].eos) t->eos = tokenizer_id(t, defaults[i].eos);
    }
    return ST_OK;
}

// ---- the post-processor -------------------------------------------------------------------------

static enum status add_template_token(const char *where, const json_t *processor,
                                      const json_t *name, struct token_list *list)
{
    const json_t *entry = NULL;
    if (json_is_string(name))
        entry =
            json_object_get(json_object_get(processor, "special_tokens"), json_string_value(name));
    const json_t *ids = json_object_get(entry, "ids");
    if (!json_is_array(ids))
        return status_fail(ST_FORMAT, "%s: post_processor.special_tokens has no ids for \"%s\"",
                           where, json_is_string(name) ? json_string_value(name) : "?");
    for (size_t i = 0; i < json_array_size(ids); i++) {
        const json_t *id = json_array_get(ids, i);
        if (!json_is_integer(id) || json_integer_value(id) < 0 ||
            json_integer_value(id) > INT32_MAX)
            return status_fail(ST_FORMAT,
                               "%s: post_processor.special_tokens.ids is not a list of ids", where);
        enum status st = token_list_push(list, (int32_t)json_integer_value(id));
        if (st != ST_OK) return st;
    }
    return ST_OK;
}

static enum status load_template(struct tokenizer *t, const char *where, const json_t *processor)
{
    const json_t *single = json_object_get(processor, "single");
    struct token_list *list = &t->prefix;
    if (!json_is_array(single))
        return status_fail(ST_FORMAT, "%s: post_processor.single is not an array", where);
    for (size_t i = 0; i < json_array_size(single); i++) {
        const json_t *item = json_array_get(single, i);
        const json_t *token = json_object_get(item, "SpecialToken");
        if (json_is_object(json_object_get(item, "Sequence"))) {
            list = &t->suffix;
        } else if (json_is_object(token)) {
            enum status st =
                add_template_token(where, processor, json_object_get(token, "id"), list);
            if (st != ST_OK) return st;
        } else {
            return status_fail(ST_FORMAT,
                               "%s: post_processor.single[%zu] is neither a SpecialToken nor "
                               "a Sequence",
                               where, i);
        }
    }
    return ST_OK;
}

// Without a post-processor the config's flags say what stands around a text.
static enum status load_surroundings(struct tokenizer *t, const struct source *s)
{
    enum { OFFSETS, TEMPLATE };
    static const struct step_type types[] = {{"ByteLevel", OFFSETS, 0, NULL},
                                             {"TemplateProcessing", TEMPLATE, 0, NULL},
                                             {NULL, 0, 0, NULL}};
    bool add_bos = false, add_eos = false;
    struct step_list steps = {0};
    enum status st = ST_OK;
    CHECK(step_list_parse(s->where, "post_processor", "processors",
                          json_object_get(s->json, "post_processor"), types, &steps));
    for (size_t i = 0; i < steps.n; i++)
        if (steps.items[i].type->kind == TEMPLATE)
            CHECK(load_template(t, s->where, steps.items[i].json));
    if (json_has(s->json, "post_processor")) goto out;
    CHECK(json_get_bool("tokenizer_config.json", s->config, "add_bos_token", &add_bos));
    CHECK(json_get_bool("tokenizer_config.json", s->config, "add_eos_token", &add_eos));
    if (add_bos && t->bos >= 0) CHECK(token_list_push(&t->prefix, t->bos));
    if (add_eos && t->eos >= 0) CHECK(token_list_push(&t->suffix, t->eos));
out:
    step_list_release(&steps);
    return st;
}

// ---- text processing ----------------------------------------------------------------------------

// Must the prefix of SentencePiece-style files (a Prepend normalizer) go before the whole text
// only? The file puts it before every stretch between added tokens. SentencePiece itself, and
// LlamaTokenizer unless it is told to be "legacy", put it at the start of the text alone, so that
// "<|user|>Hi" holds "Hi" and not "_Hi". Model types known to name that class wrongly keep what the
// file says.
static enum status prefix_once(const struct source *s, bool *ret_once)
{
    static const char *const misnamed[] = {
        "phi3",     "phi3_v", "phimoe",     "internlm2", "internlm3", "minicpm3",
        "minicpmv", "llava",  "llava_next", "vipllava",  "nemotron",  "ernie4_5",
        "jamba",    "arctic", "molmo",      "mistral",   "mixtral"};
    bool legacy = false;
    enum status st = json_get_bool("tokenizer_config.json", s->config, "legacy", &legacy);
    if (st != ST_OK) return st;
    *ret_once = strcmp(s->class, "LlamaTokenizer") == 0 && !legacy;
    for (size_t i = 0; s->model_type && i < sizeof(misnamed) / sizeof(misnamed[0]); i++)
        if (strcmp(s->model_type, misnamed[i]) == 0) *ret_once = false;
    return ST_OK;
}

static enum status load_text_processing(struct tokenizer *t, const struct source *s)
{
    enum status st;
    CHECK(prefix_once(s, &t->prefix_once));
    CHECK(normalizer_parse(s->where, json_object_get(s->json, "normalizer"), &t->normalizer));
    CHECK(
        pretokenizer_parse(s->where, json_object_get(s->json, "pre_tokenizer"), &t->pretokenizer));
    CHECK(decoder_parse(s->where, json_object_get(s->json, "decoder"), &t->decoder));
out:
    return st;
}

// The longest token's text; normal forms make of a text a quarter at least (U+1D400, four bytes, is
// "A" in NFKC).
static size_t max_token_bytes(const struct tokenizer *t, bool normalizes)
{
    size_t longest = 1, len;
    for (int id = 0; id < t->n_ids; id++) {
        if (token_map_text(bpe_vocab(t->bpe), id, &len) && len > longest) longest = len;
        if (token_map_text(&t->added.map, id, &len) && len > longest) longest = len;
    }
    return normalizes ? 4 * longest : longest;
}

static enum status load(struct tokenizer *t, const struct source *s)
{
    enum status st;
    if (!json_is_object(s->json)) return status_fail(ST_FORMAT, "%s: not a JSON object", s->where);
    CHECK(bpe_parse(s->where, json_object_get(s->json, "model"), &t->bpe));
    CHECK(load_text_processing(t, s));
    CHECK(load_added(t, s));
    CHECK(load_named(t, s));
    CHECK(load_surroundings(t, s));
    CHECK(added_tokens_finish(&t->added, &t->normalizer, !t->prefix_once));
    int n_vocab = bpe_vocab(t->bpe)->n_ids, n_added = t->added.map.n_ids;
    t->n_ids = n_vocab > n_added ? n_vocab : n_added;
    t->max_token_bytes = max_token_bytes(t, json_has(s->json, "normalizer"));
    for (int i = 0; i < t->prefix.n + t->suffix.n; i++) {
        int id = i < t->prefix.n ? t->prefix.ids[i] : t->suffix.ids[i - t->prefix.n];
        if (!tokenizer_token(t, id))
            return status_fail(ST_FORMAT, "%s: post_processor: id %d is no token", s->where, id);
    }
out:
    return st;
}

enum status tokenizer_parse(const char *where, const struct tokenizer_text files[TOKENIZER_FILES],
                            struct tokenizer **ret)
{
    json_t *roots[TOKENIZER_FILES] = {NULL};
    const char *class = "";
    struct tokenizer *t = calloc(1, sizeof(*t));
    enum status st = ST_OK;
    if (!t) return status_fail(ST_NO_MEMORY, "%s: out of memory", where);
    t->bos = t->eos = -1;
    for (int i = 0; i < TOKENIZER_FILES; i++)
        if (files[i].data)
            CHECK(
                json_parse(i == 0 ? where : file_names[i], files[i].data, files[i].len, &roots[i]));
    struct source s = {
        where, roots[FILE_TOKENIZER], roots[FILE_CONFIG], roots[FILE_SPECIAL_TOKENS], "", NULL};
    CHECK(json_get_string(file_names[FILE_CONFIG], s.config, "tokenizer_class", &class));
    CHECK(json_get_string(file_names[FILE_MODEL_CONFIG], roots[FILE_MODEL_CONFIG], "model_type",
                          &s.model_type));
    size_t n = strlen(class);
    if (n > 4 && strcmp(class + n - 4, "Fast") == 0) n -= 4;
    snprintf(s.class, sizeof(s.class), "%.*s", (int)(n < 64 ? n : 64), class);
    CHECK(load(t, &s));
    *ret = TAKE_PTR(t);
out:
    if (st == ST_INVALID) st = ST_FORMAT; // a field of the wrong type, in a file
    for (int i = 0; i < TOKENIZER_FILES; i++) json_decref(roots[i]);
    tokenizer_free(t);
    return st;
}

enum status tokenizer_load(const char *folder, struct tokenizer **ret)
{
    struct bytes text[TOKENIZER_FILES] = {BYTES_INIT, BYTES_INIT, BYTES_INIT, BYTES_INIT};
    struct tokenizer_text files[TOKENIZER_FILES] = {{NULL, 0}};
    char path[PATH_ROOM];
    enum status st;
    CHECK(model_folder_check(folder, file_names[FILE_TOKENIZER]));
    CHECK(path_put(path, folder, "%s", file_names[FILE_TOKENIZER]));
    for (int i = 0; i < TOKENIZER_FILES; i++) {
        if (i != FILE_TOKENIZER && !model_file_exists(folder, file_names[i])) continue;
        CHECK(model_file_read(folder, file_names[i], MAX_FILE_BYTES, &text[i]));
        files[i] = (struct tokenizer_text){bytes_text(&text[i]), text[i].len};
    }
    st = tokenizer_parse(path, files, ret);
out:
    for (int i = 0; i < TOKENIZER_FILES; i++) bytes_release(&text[i]);
    return st;
}

enum status tokenizer_check_same(const struct tokenizer *t, const char *own, const char *folder,
                                 const char *what)
{
    struct tokenizer *other;
    enum status st = tokenizer_load(folder, &other);
    if (st != ST_OK) return st;
    for (int id = 0; id < tokenizer_vocab_size(other) && st == ST_OK; id++) {
        const char *theirs = tokenizer_token(other, id), *ours = tokenizer_token(t, id);
        if (theirs && (!ours || strcmp(theirs, ours) != 0))
            st = status_fail(ST_MISMATCH,
                             "token %d is \"%s\" there and \"%s\" in %s; a %s must be of the same "
                             "tokenizer",
                             id, theirs, ours ? ours : "(none)", own, what);
    }
    tokenizer_free(other);
    return st;
}
