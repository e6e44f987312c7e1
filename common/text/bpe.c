/* bpe.c: byte-pair encoding (Sennrich et al., "Neural machine translation of rare words with
 * subword units", ACL 2016), as the tokenizers library does it.
 *
 * A word becomes a linked list of symbols, one a character; the pair with the lowest rank (leftmost
 * among equals) is merged until none is left. Candidate pairs wait in a binary heap; one whose
 * symbols have changed since is dropped when it comes up. So a word of n characters costs
 * O(n log n), which matters where there is no pre-tokenizer and the whole text is one word. */
// SPDX-License-Identifier: Apache-2.0
#include "common/text/tokenizer_parts.h"
#include "common/base/hash.h"
#include "common/base/json.h"
#include <stdlib.h>
#include <string.h>

struct merge {
    uint64_t pair; // left id << 32 | right id
    int32_t rank;  // -1: empty slot
    int32_t id;    // of the merged token
};

struct bpe {
    struct token_map vocab;
    struct merge *merges; // open addressing, n_slots a power of two
    int n_slots;
    int byte_ids[256]; // of "<0xNN>"; -1
    int unk_id;        // -1: no unk_token, or it has no id
    char *unk_token;   // NULL: characters that are not in the vocabulary are dropped
    bool fuse_unk, byte_fallback, ignore_merges;
    char *where;
};

struct bpe_symbol {
    int32_t id; // -1: merged into the one before
    int32_t prev, next;
};
struct bpe_candidate {
    int32_t rank, pos; // pos: the left symbol
    int32_t left, right, id;
};

// ---- loading -----------------------------------------------------------------------------------

void bpe_free(struct bpe *b)
{
    if (!b) return;
    token_map_release(&b->vocab);
    free(b->merges);
    free(b->unk_token);
    free(b->where);
    free(b);
}

const struct token_map *bpe_vocab(const struct bpe *b)
{
    return &b->vocab;
}

static struct merge *merge_slot(const struct bpe *b, uint64_t pair)
{
    uint64_t h = pair * HASH_SPREAD;
    int mask = b->n_slots - 1;
    int slot = (int)(h >> 33) & mask;
    while (b->merges[slot].rank >= 0 && b->merges[slot].pair != pair) slot = (slot + 1) & mask;
    return &b->merges[slot];
}

static enum status load_vocab(struct bpe *b, const char *where, const json_t *model)
{
    json_t *vocab = json_object_get(model, "vocab");
    if (!json_is_object(vocab))
        return status_fail(ST_FORMAT, "%s: model.vocab is not an object", where);
    // A hole or two is normal; ids far beyond the number of tokens are a damaged file.
    json_int_t limit = 2 * (json_int_t)json_object_size(vocab) + 65536;
    const char *token;
    json_t *id;
    json_object_foreach (vocab, token, id) {
        if (!json_is_integer(id) || json_integer_value(id) < 0 || json_integer_value(id) > limit)
            return status_fail(ST_FORMAT,
                               "%s: model.vocab: the id of \"%s\" is not a whole number "
                               "from 0 to %lld",
                               where, token, (long long)limit);
        enum status st =
            token_map_add(&b->vocab, token, strlen(token), (int)json_integer_value(id));
        if (st != ST_OK) return status_context(st, "%s: model.vocab", where);
    }
    return ST_OK;
}

// "left right" or ["left", "right"], the two halves of merge number `rank`.
static bool split_merge(const json_t *merge, const char *half[2], size_t len[2])
{
    if (json_is_array(merge) && json_array_size(merge) == 2) {
        for (int i = 0; i < 2; i++) {
            const json_t *text = json_array_get(merge, (size_t)i);
            if (!json_is_string(text)) return false;
            half[i] = json_string_value(text);
            len[i] = json_string_length(text);
        }
        return true;
    }
    if (!json_is_string(merge)) return false;
    const char *text = json_string_value(merge), *space = strchr(text, ' ');
    if (!space || strchr(space + 1, ' ')) return false;
    half[0] = text;
    len[0] = (size_t)(space - text);
    half[1] = space + 1;
    len[1] = strlen(space + 1);
    return true;
}

static enum status load_merges(struct bpe *b, const char *where, const json_t *model)
{
    const json_t *merges = json_object_get(model, "merges");
    if (!json_is_array(merges))
        return status_fail(ST_FORMAT, "%s: model.merges is not an array", where);
    size_t n = json_array_size(merges);
    for (b->n_slots = 16; (size_t)b->n_slots < 2 * n; b->n_slots *= 2) continue;
    b->merges = malloc((size_t)b->n_slots * sizeof(*b->merges));
    if (!b->merges) return status_fail(ST_NO_MEMORY, "%s: out of memory for merges", where);
    for (int i = 0; i < b->n_slots; i++) b->merges[i] = (struct merge){.rank = -1};

    struct bytes joined = BYTES_INIT;
    enum status st = ST_OK;
    for (size_t rank = 0; rank < n; rank++) {
        const char *half[2];
        size_t len[2];
        if (!split_merge(json_array_get(merges, rank), half, len))
            FAIL(ST_FORMAT, "%s: model.merges[%zu] is not a pair of tokens", where, rank);
        bytes_clear(&joined);
        bytes_append(&joined, half[0], len[0]);
        bytes_append(&joined, half[1], len[1]);
        CHECK(bytes_status(&joined));
        int left = token_map_id(&b->vocab, half[0], len[0]);
        int right = token_map_id(&b->vocab, half[1], len[1]);
        int id = token_map_id(&b->vocab, bytes_text(&joined), joined.len);
        if (left < 0 || right < 0 || id < 0)
            FAIL(ST_FORMAT, "%s: model.merges[%zu]: \"%s\" is not in model.vocab", where, rank,
                 left < 0    ? half[0]
                 : right < 0 ? half[1]
                             : bytes_text(&joined));
        uint64_t pair = (uint64_t)(uint32_t)left << 32 | (uint32_t)right;
        *merge_slot(b, pair) = (struct merge){pair, (int32_t)rank, id}; // the last of equals counts
    }
out:
    bytes_release(&joined);
    return st;
}

static enum status refuse_affix(const char *where, const json_t *model, const char *key)
{
    const char *value = "";
    enum status st = json_get_string(where, model, key, &value);
    if (st == ST_OK && value[0])
        st = status_fail(ST_UNSUPPORTED, "%s: model.%s \"%s\" is not supported", where, key, value);
    return st;
}

static enum status load_options(struct bpe *b, const char *where, const json_t *model)
{
    enum status st;
    const char *unk = NULL;
    double dropout = 0;
    CHECK(refuse_affix(where, model, "continuing_subword_prefix"));
    CHECK(refuse_affix(where, model, "end_of_word_suffix"));
    CHECK(json_get_double(where, model, "dropout", 0, 1, &dropout));
    if (dropout != 0)
        return status_fail(ST_UNSUPPORTED, "%s: model.dropout %g is not supported", where, dropout);
    CHECK(json_get_bool(where, model, "fuse_unk", &b->fuse_unk));
    CHECK(json_get_bool(where, model, "byte_fallback", &b->byte_fallback));
    CHECK(json_get_bool(where, model, "ignore_merges", &b->ignore_merges));
    CHECK(json_get_string(where, model, "unk_token", &unk));
    if (unk && !(b->unk_token = strdup(unk)))
        return status_fail(ST_NO_MEMORY, "%s: out of memory", where);
    b->unk_id = unk ? token_map_id(&b->vocab, unk, strlen(unk)) : -1;
    for (int i = 0; i < 256; i++) {
        char name[8];
        snprintf(name, sizeof(name), "<0x%02X>", (unsigned)i);
        b->byte_ids[i] = token_map_id(&b->vocab, name, 6);
    }
out:
    return st;
}

enum status bpe_parse(const char *where, const json_t *model, struct bpe **ret)
{
    enum status st;
    const char *type = "BPE"; // older files leave it out
    struct bpe *b = calloc(1, sizeof(*b));
    if (!b || !(b->where = strdup(where))) FAIL(ST_NO_MEMORY, "%s: out of memory", where);
    if (!json_is_object(model)) FAIL(ST_FORMAT, "%s: model is not an object", where);
    CHECK(json_get_string(where, model, "type", &type));
    if (strcmp(type, "BPE") != 0)
        FAIL(ST_UNSUPPORTED, "%s: model.type \"%s\" is not supported, only BPE is", where, type);
    CHECK(load_vocab(b, where, model));
    CHECK(load_options(b, where, model));
    CHECK(load_merges(b, where, model));
    *ret = TAKE_PTR(b);
out:
    bpe_free(b);
    return st;
}

// ---- encoding ----------------------------------------------------------------------------------

void bpe_scratch_release(struct bpe_scratch *s)
{
    free(s->symbols);
    free(s->heap);
}

// Room for n symbols; each holds at most one candidate at first and each merge adds two.
static enum status scratch_reserve(struct bpe_scratch *s, size_t n)
{
    if ((size_t)s->cap_symbols < n) {
        size_t cap = n < 64 ? 64 : n + n / 2;
        struct bpe_symbol *symbols = realloc(s->symbols, cap * sizeof(*symbols));
        if (symbols) s->symbols = symbols;
        struct bpe_candidate *heap = realloc(s->heap, 3 * cap * sizeof(*heap));
        if (heap) s->heap = heap;
        if (!symbols || !heap)
            return status_fail(ST_NO_MEMORY, "out of memory for a word of %zu bytes", n);
        s->cap_symbols = (int)cap;
    }
    s->n_symbols = s->n_heap = 0;
    return ST_OK;
}

static void add_symbol(struct bpe_scratch *s, int id)
{
    int i = s->n_symbols++;
    s->symbols[i] = (struct bpe_symbol){id, i - 1, i + 1};
}

// Does `a` come before `b`?
static bool before(const struct bpe_candidate *a, const struct bpe_candidate *b)
{
    return a->rank != b->rank ? a->rank < b->rank : a->pos < b->pos;
}

static void heap_push(struct bpe_scratch *s, struct bpe_candidate c)
{
    int i = s->n_heap++;
    while (i > 0 && before(&c, &s->heap[(i - 1) / 2])) {
        s->heap[i] = s->heap[(i - 1) / 2];
        i = (i - 1) / 2;
    }
    s->heap[i] = c;
}

static struct bpe_candidate heap_pop(struct bpe_scratch *s)
{
    struct bpe_candidate top = s->heap[0], last = s->heap[--s->n_heap];
    int i = 0;
    for (int child; (child = 2 * i + 1) < s->n_heap; i = child) {
        if (child + 1 < s->n_heap && before(&s->heap[child + 1], &s->heap[child])) child++;
        if (!before(&s->heap[child], &last)) break;
        s->heap[i] = s->heap[child];
    }
    s->heap[i] = last;
    return top;
}

static void consider(const struct bpe *b, struct bpe_scratch *s, int pos)
{
    int next = s->symbols[pos].next;
    if (next >= s->n_symbols) return;
    int32_t left = s->symbols[pos].id, right = s->symbols[next].id;
    const struct merge *m = merge_slot(b, (uint64_t)(uint32_t)left << 32 | (uint32_t)right);
    if (m->rank >= 0) heap_push(s, (struct bpe_candidate){m->rank, pos, left, right, m->id});
}

static void merge_all(const struct bpe *b, struct bpe_scratch *s)
{
    struct bpe_symbol *sym = s->symbols;
    for (int i = 0; i + 1 < s->n_symbols; i++) consider(b, s, i);
    while (s->n_heap > 0) {
        struct bpe_candidate c = heap_pop(s);
        int next = sym[c.pos].next;
        if (sym[c.pos].id != c.left || next >= s->n_symbols || sym[next].id != c.right) continue;
        sym[c.pos].id = c.id;
        sym[c.pos].next = sym[next].next;
        if (sym[next].next < s->n_symbols) sym[sym[next].next].prev = c.pos;
        sym[next].id = -1;
        if (sym[c.pos].prev >= 0) consider(b, s, sym[c.pos].prev);
        consider(b, s, c.pos);
    }
}

static bool add_bytes(const struct bpe *b, struct bpe_scratch *s, const char *text, int n)
{
    for (int i = 0; i < n; i++)
        if (b->byte_ids[(unsigned char)text[i]] < 0) return false;
    for (int i = 0; i < n; i++) add_symbol(s, b->byte_ids[(unsigned char)text[i]]);
    return true;
}

static enum status missing(const struct bpe *b, const char *text, int n)
{
    return status_fail(ST_FORMAT,
                       "%s: U+%04X is not in model.vocab, and neither is the unk_token "
                       "\"%s\"",
                       b->where, (unsigned)utf8_decode(text, n), b->unk_token);
}

// One symbol a character; characters outside the vocabulary as bytes, or as unk_token, which is
// held back one step so that a run of them can become one (fuse_unk).
static enum status split_word(const struct bpe *b, struct bpe_scratch *s, const char *word,
                              size_t len)
{
    bool unknown = false;
    for (size_t i = 0; i < len;) {
        int n = utf8_sequence(word + i, len - i);
        if (n <= 0) return status_fail(ST_INVALID, "a word is not UTF-8 at byte %zu", i);
        int id = token_map_id(&b->vocab, word + i, (size_t)n);
        if (id >= 0) {
            if (unknown) add_symbol(s, b->unk_id);
            unknown = false;
            add_symbol(s, id);
        } else if (!(b->byte_fallback && add_bytes(b, s, word + i, n)) && b->unk_token) {
            if (b->unk_id < 0) return missing(b, word + i, n);
            if (unknown && !b->fuse_unk) add_symbol(s, b->unk_id);
            unknown = true;
        }
        i += (size_t)n;
    }
    if (unknown) add_symbol(s, b->unk_id);
    return ST_OK;
}

enum status bpe_encode(const struct bpe *b, struct bpe_scratch *s, const char *word, size_t len,
                       struct token_list *ret)
{
    if (len == 0) return ST_OK;
    if (b->ignore_merges) {
        int id = token_map_id(&b->vocab, word, len);
        if (id >= 0) return token_list_push(ret, id);
    }
    enum status st = scratch_reserve(s, len + 1);
    if (st == ST_OK) st = split_word(b, s, word, len);
    if (st != ST_OK) return st;
    merge_all(b, s);
    for (int i = 0; st == ST_OK && i < s->n_symbols; i = s->symbols[i].next)
        st = token_list_push(ret, s->symbols[i].id);
    return st;
}
