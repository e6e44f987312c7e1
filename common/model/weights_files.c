/* weights_files.c: the arena's values out of a model folder and into one, in the names and forms
 * that its family is published in. Every tensor is checked before one is written, so a bad folder
 * leaves the arena as it was. A shard takes its part of them; of several ranks rank 0 writes what
 * all hold. The thread of the device. */
// SPDX-License-Identifier: Apache-2.0
#include "common/model/weights.h"
#include "common/base/e4m3.h"
#include "common/base/file.h"
#include "common/base/mxfp4.h"
#include "common/model/fp8_folder.h"
#include "kernels/comm.h"
#include "kernels/moments.h"
#include "kernels/ops.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// ---- mxfp4 --------------------------------------------------------------------------------------
// Matrices of gpt-oss's published folders (common/base/mxfp4.h): NAME_blocks (matrices, rows,
// columns / 32, 16) U8 and NAME_scales (matrices, rows, columns / 32) U8. Reading only.

#define NAN_SCALE 255

static const struct safetensors_entry *find_half(const struct safetensors *set, const char *name,
                                                 const char *end)
{
    char whole[200];
    snprintf(whole, sizeof whole, "%s%s", name, end);
    return safetensors_find(set, whole);
}

static void read_mxfp4_row(const struct safetensors_entry *e, int64_t row, int64_t first, int64_t n,
                           void *ret)
{
    const int64_t runs = e->shape[2]; // with a scale each
    const uint8_t *blocks = (const uint8_t *)e->data + row * runs * (MXFP4_BLOCK / 2),
                  *scales = (const uint8_t *)e->more + row * runs;
    for (int64_t i = 0; i < n; i++) {
        const int64_t c = first + i;
        ((uint16_t *)ret)[i] =
            bf16_from_f32(mxfp4_code(blocks, c) * mxfp4_factor(scales[c / MXFP4_BLOCK]));
    }
}

// Whether the set has a tensor as these two; *ret, which may be NULL, is then one whose rows are
// counted over all matrices.
static bool mxfp4_find(const struct safetensors *set, const char *name,
                       struct safetensors_entry *ret)
{
    const struct safetensors_entry *blocks = find_half(set, name, "_blocks"),
                                   *scales = find_half(set, name, "_scales");
    if (!blocks || !scales) return false;
    if (!ret) return true;
    *ret = *blocks;
    ret->dt = DT_BF16;
    ret->read = read_mxfp4_row;
    ret->more = scales->data;
    return true;
}

static enum status check_half(const struct safetensors_entry *e, int n_dims, const int64_t shape[3])
{
    const int64_t want[4] = {shape[0], shape[2], shape[1] / MXFP4_BLOCK, MXFP4_BLOCK / 2};
    bool same = e->n_dims == n_dims && shape[1] % MXFP4_BLOCK == 0;
    for (int d = 0; same && d < n_dims; d++) same = e->shape[d] == want[d];
    if (same && e->dt == DT_U8) return ST_OK;
    return status_fail(ST_MISMATCH,
                       "%s: tensor %s must be U8 of shape (%lld, %lld, %lld%s), as MXFP4 of what "
                       "config.json calls for",
                       e->file, e->name, (long long)want[0], (long long)want[1], (long long)want[2],
                       n_dims == 4 ? ", 16" : "");
}

// Whether they are (shape[0], shape[2], shape[1]): what is stored as (experts, columns, rows) where
// it is not quantised.
static enum status mxfp4_check(const struct safetensors *set, const char *name,
                               const int64_t shape[3])
{
    const struct safetensors_entry *scales = find_half(set, name, "_scales");
    enum status st = check_half(find_half(set, name, "_blocks"), 4, shape);
    if (st == ST_OK) st = check_half(scales, 3, shape);
    if (st == ST_OK && memchr(scales->data, NAN_SCALE, scales->bytes))
        st = status_fail(ST_FORMAT,
                         "%s: tensor %s has a scale of %d, which stands for no number: the folder "
                         "is broken, or was converted wrongly; take it from where it was published",
                         scales->file, scales->name, NAN_SCALE);
    return st;
}

// Whether `tensor` is one of the two of `name`.
static bool mxfp4_names(const char *name, const char *tensor)
{
    const size_t len = strlen(name);
    return strncmp(name, tensor, len) == 0 &&
           (strcmp(tensor + len, "_blocks") == 0 || strcmp(tensor + len, "_scales") == 0);
}

// ---- names and checks ---------------------------------------------------------------------------

static bool begins(const char *name, const char *with)
{
    return strncmp(name, with, strlen(with)) == 0;
}

// What names begin with in the table, and in a folder. A family may have a word of its own for
// "model."; of a folder of more than a text model published ones have that below "language_model.",
// those that transformers 5 writes below "model.language_model.".
struct prefix {
    const char *table, *folder;
};
enum { N_PREFIXES = 3 };

static void list_prefixes(const struct weights *w, struct prefix ret[N_PREFIXES])
{
    const char *own = w->config->family->folder_prefix;
    const bool part = w->config->is_text_part;
    ret[0] = (struct prefix){"model.", own};
    ret[1] = (struct prefix){"", part ? "language_model." : NULL};
    ret[2] = (struct prefix){"model.", part ? "model.language_model." : NULL};
}

// `name` with `to` in place of `from`, with which it begins, in `room`.
static const char *with_prefix(const char *name, const char *from, const char *to, char room[200])
{
    snprintf(room, 200, "%s%s", to, name + strlen(from));
    return room;
}

// A tensor of the table.
static const struct safetensors_entry *find_tensor(const struct weights *w,
                                                   const struct safetensors *set, const char *name)
{
    struct prefix all[N_PREFIXES];
    char other[200];
    const struct safetensors_entry *e = safetensors_find(set, name);
    list_prefixes(w, all);
    for (const struct prefix *p = all; !e && p < all + N_PREFIXES; p++)
        if (p->folder && begins(name, p->table))
            e = safetensors_find(set, with_prefix(name, p->table, p->folder, other));
    return e;
}

// What the table would call a tensor of the folder: its name, or one in `room`.
static const char *name_in_table(const struct weights *w, const char *name, char room[200])
{
    struct prefix all[N_PREFIXES];
    list_prefixes(w, all);
    for (const struct prefix *p = all; p < all + N_PREFIXES; p++)
        if (p->folder && begins(name, p->folder))
            return with_prefix(name, p->folder, p->table, room);
    return name;
}

// Of such a folder: what reads images, and what predicts further tokens.
static bool is_beside_text(const struct weights *w, const char *name)
{
    static const char *const parts[] = {"vision_tower.", "multi_modal_projector.", "visual.",
                                        "audio_tower.",  "embed_vision.",          "embed_audio.",
                                        "mtp."};
    bool beside = false;
    if (begins(name, "model.")) name += strlen("model.");
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) beside |= begins(name, parts[i]);
    if (w->config->n_mtp_layers > 0 && begins(name, "mtp.")) return true;
    return w->config->is_text_part && beside;
}

// Keys and values of a layer that attends to another's.
static bool is_unused_kv(const struct model_config *c, const char *name)
{
    static const char *const modules[] = {"k_proj.", "v_proj.", "k_norm.", "v_norm."};
    int layer, at = 0;
    bool found = false;
    sscanf(name, "model.layers.%d.self_attn.%n", &layer, &at);
    if (at == 0 || layer < 0 || layer >= c->n_layers || c->layers[layer].kv_from < 0) return false;
    for (int i = 0; i < 4; i++) found |= begins(name + at, modules[i]);
    return found;
}

// Tensors of published folders that carry no weights of ours.
static bool ignorable(const struct weights *w, const struct safetensors *set,
                      const struct safetensors_entry *e)
{
    char room[200];
    const char *of_folder = e->name, *name = name_in_table(w, of_folder, room);
    for (int d = 0; d < e->n_dims; d++) // n_shared_experts may be 0
        if (e->shape[d] == 0) return true;
    if (w->config->mtp || is_beside_text(w, name)) return true; // mtp: the rest is the model
    size_t len = strlen(name);
    const char *buffer = "rotary_emb.inv_freq"; // a constant that old exports stored
    if (w->config->stored == STORED_FP8 && fp8_is_scale(set, of_folder)) return true;
    if (is_unused_kv(w->config, name)) return true;
    int layer;
    if (w->config->tie_embeddings && w->config->family->names[ROLE_HEAD] &&
        strcmp(name, w->config->family->names[ROLE_HEAD]) == 0)
        return true;
    if (sscanf(name, "model.layers.%d.", &layer) == 1 && layer >= w->config->n_layers &&
        layer < w->config->n_layers + w->config->n_mtp_layers)
        return true;
    return len >= strlen(buffer) && strcmp(name + len - strlen(buffer), buffer) == 0;
}

// A tensor's dimensions in a folder: a convolution's have its one input channel in the middle.
static int file_shape(const struct weight_tensor *t, int64_t ret[3])
{
    const bool conv = t->role == ROLE_DELTA_CONV;
    memcpy(ret, t->stored.shape, sizeof t->stored.shape);
    if (t->stored.n_dims > 0) return t->stored.n_dims;
    ret[0] = t->slice.whole[0];
    ret[1] = conv ? 1 : t->slice.whole[1];
    ret[2] = t->slice.whole[1];
    return t->n_dims + conv;
}

// "1024, 64": no two shapes have the same words.
static void shape_words(const int64_t *shape, int n_dims, char ret[96])
{
    ret[0] = '\0';
    for (int d = 0; d < n_dims && d < 4; d++)
        snprintf(ret + strlen(ret), 96 - strlen(ret), "%s%lld", d ? ", " : "", (long long)shape[d]);
}

// What the folder calls the tensor, or the one that holds it.
static const char *folder_name(const struct weight_tensor *t)
{
    return t->stored.n_dims ? t->stored.name : t->name;
}

// Whether it is the first of the table that is in that tensor of the folder.
static bool is_first_stored(const struct weight_tensor *t)
{
    return t->stored.first == 0;
}

static bool is_fp8(const struct weights *w, const struct weight_tensor *t,
                   const struct safetensors_entry *e)
{
    return e->dt == DT_E4M3 && w->config->stored == STORED_FP8 && t->n_dims == 2 &&
           t->stored.n_dims == 0;
}

static enum status check_tensor(const struct weights *w, const struct weight_tensor *t,
                                const struct safetensors *set, const char *folder)
{
    const bool stored = t->stored.n_dims > 0;
    const char *name = folder_name(t);
    const struct safetensors_entry *e = find_tensor(w, set, name);
    const char *config = t->role == ROLE_COUNT ? "adapter_config.json" : "config.json";
    if (e && t->in_twin && w->config->quantization == QUANTIZATION_MXFP4)
        return status_fail(ST_MISMATCH,
                           "%s: tensor %s is not in MXFP4, which --quantization mxfp4 takes as it "
                           "is: leave that away, or give the folder as it was published",
                           e->file, name);
    if (!e && w->config->stored == STORED_MXFP4 && stored && t->n_dims == 2 &&
        mxfp4_find(set, name, NULL))
        return mxfp4_check(set, name, t->stored.shape);
    if (!e)
        return status_fail(ST_NOT_FOUND, "%s: tensor %s is missing; %s calls for it%s", folder,
                           name, config,
                           t->role == ROLE_HEAD ? " (tie_word_embeddings is not true)" : "");
    char have[96], want[96];
    int64_t shape[3];
    const int n_dims = file_shape(t, shape);
    shape_words(e->shape, e->n_dims, have);
    shape_words(shape, n_dims, want);
    if (strcmp(have, want) != 0)
        return status_fail(ST_MISMATCH, "%s: tensor %s has shape (%s); %s calls for (%s)", e->file,
                           name, have, config, want);
    struct safetensors_entry quantised;
    if (is_fp8(w, t, e)) return fp8_find(set, e, w->config->fp8_block, &quantised);
    if (e->dt != DT_F32 && e->dt != DT_BF16 && e->dt != DT_F16)
        return status_fail(
            ST_UNSUPPORTED,
            "%s: tensor %s is %s; weights must be F32, BF16 or F16, and matrices "
            "F8_E4M3 where config.json has the quantization_config of such a folder; "
            "with /reload and --start-from that of the model's own folder counts: "
            "such a folder is taken there where --model is one of its form",
            e->file, name, dtype_safetensors_name(e->dt));
    return ST_OK;
}

static bool is_expected(const struct weights *w, const char *of_folder)
{
    char room[200];
    const char *name = name_in_table(w, of_folder, room);
    for (int i = 0; i < w->n_tensors; i++) {
        const char *of_table = folder_name(&w->tensors[i]);
        if (strcmp(of_table, name) == 0 || mxfp4_names(of_table, name)) return true;
    }
    return false;
}

// The table's tensors are all there: only where the folder has more is one of them none of ours.
static enum status check_extra(const struct weights *w, const struct safetensors *set)
{
    const int n = safetensors_count(set);
    int more = n; // than those that hold the table's
    for (const struct weight_tensor *t = w->tensors; t < w->tensors + w->n_tensors; t++)
        if (is_first_stored(t)) more -= find_tensor(w, set, folder_name(t)) ? 1 : 2; // 2: MXFP4
    for (int i = 0; i < n; i++) more -= ignorable(w, set, safetensors_at(set, i));
    for (int i = 0; more > 0 && i < n; i++) {
        const struct safetensors_entry *e = safetensors_at(set, i);
        if (!ignorable(w, set, e) && !is_expected(w, e->name))
            return status_fail(
                ST_MISMATCH, "%s: tensor %s is not part of a %s model as config.json describes it",
                e->file, e->name, w->config->architecture);
    }
    return ST_OK;
}

// A folder whose head is the embeddings may have it beside them, if it is the same.
static enum status check_tied_head(const struct weights *w, const struct safetensors *set)
{
    const char *const *names = w->config->family->names;
    if (!w->config->tie_embeddings) return ST_OK;
    const struct safetensors_entry *head = find_tensor(w, set, names[ROLE_HEAD]),
                                   *embed = find_tensor(w, set, names[ROLE_EMBED]);
    if (!head || (head->dt == embed->dt && head->bytes == embed->bytes &&
                  memcmp(head->data, embed->data, embed->bytes) == 0))
        return ST_OK;
    return status_fail(ST_MISMATCH,
                       "%s: tie_word_embeddings is true, but %s is not %s; say false in "
                       "config.json to take that head, or leave it out of the folder",
                       head->file, names[ROLE_HEAD], names[ROLE_EMBED]);
}

enum status weights_check_set(const struct weights *w, const struct safetensors *set,
                              const char *where)
{
    enum status st = ST_OK;
    for (int i = 0; i < w->n_tensors; i++) CHECK(check_tensor(w, &w->tensors[i], set, where));
out:
    return st;
}

// The folder's tensors, which are those of the table.
static enum status open_tensors(const struct weights *w, const char *folder,
                                struct safetensors **ret)
{
    struct safetensors *set = NULL;
    enum status st;
    CHECK(safetensors_open(folder, &set));
    CHECK(weights_check_set(w, set, folder));
    CHECK(check_extra(w, set));
    CHECK(check_tied_head(w, set));
    *ret = TAKE_PTR(set);
out:
    safetensors_free(set);
    return st;
}

enum status weights_check(const struct weights *w, const char *folder)
{
    struct safetensors *set = NULL;
    enum status st = open_tensors(w, folder, &set);
    safetensors_free(set);
    return st;
}

// n rows of the whole tensor from `row` on, from the slice's first column on, one after the other:
// out of a file's tensor that holds them apart, or by columns, or more of each.
static void pack_rows(const struct weight_tensor *t, const struct safetensors_entry *e, int64_t row,
                      int64_t n, int64_t cols, char *to)
{
    enum { TOGETHER = 64 }; // rows whose elements lie near each other
    const struct stored_in *s = &t->stored;
    const size_t element = dtype_size(e->dt);
    const int64_t row_step = s->n_dims ? s->row_step : tensor_whole_columns(t);
    const int64_t col_step = s->n_dims ? s->col_step : 1;
    const int64_t at = s->first + row * row_step + t->slice.first_col * col_step;
    const char *from = (const char *)e->data + (size_t)at * element;
    if (col_step == 1) {
        for (int64_t i = 0; i < n; i++)
            memcpy(to + (size_t)(i * cols) * element, from + (size_t)(i * row_step) * element,
                   (size_t)cols * element);
        return;
    }
#pragma omp parallel for
    for (int64_t begin = 0; begin < n; begin += TOGETHER)
        for (int64_t c = 0; c < cols; c++)
            for (int64_t i = begin; i < n && i < begin + TOGETHER; i++)
                memcpy(to + (size_t)(i * cols + c) * element,
                       from + (size_t)(i * row_step + c * col_step) * element, element);
}

// n rows of those that a file's tensor does not hold as they are.
static void read_rows(const struct weight_tensor *t, const struct safetensors_entry *e, int64_t row,
                      int64_t n, int64_t cols, char *to)
{
    const struct stored_in *s = &t->stored;
    const size_t row_bytes = (size_t)cols * dtype_size(e->dt);
#pragma omp parallel for
    for (int64_t i = row; i < row + n; i++)
        e->read(e, s->n_dims ? s->first_row + i * s->row_step : i, t->slice.first_col, cols,
                to + (size_t)(i - row) * row_bytes);
}

// What the table holds of a file's tensor. Rows are read as they lie; where they are parts of the
// file's, or made of what it has, a few at a time through `packed`, like `staging` of
// STAGING_ELEMENTS.
static void copy_in_slice(const struct weights *w, struct device *dev,
                          const struct weight_tensor *t, const struct safetensors_entry *e,
                          void *staging, void *packed)
{
    const struct tensor_slice *s = &t->slice;
    const int64_t cols = tensor_columns(t);
    const bool as_it_lies = !e->read && cols == tensor_whole_columns(t) && t->stored.n_dims == 0;
    const int64_t max = as_it_lies ? INT64_MAX : STAGING_ELEMENTS / cols;
    int64_t at = 0;
    for (int r = 0; r < s->n_runs; r++)
        for (int64_t row = 0, n; row < s->runs[r].n; row += n, at += n * cols) {
            const int64_t first = s->runs[r].first + row;
            n = s->runs[r].n - row < max ? s->runs[r].n - row : max;
            const void *from = packed;
            if (as_it_lies)
                from = (const char *)e->data + (size_t)(first * cols) * dtype_size(e->dt);
            else
                (e->read ? read_rows : pack_rows)(t, e, first, n, cols, packed);
            weights_copy_in(w, dev, t, at, from, e->dt, n * cols, staging);
        }
}

// A tensor that the twin alone has, some rows at a time through the room behind it. Of a row of
// which other ranks have columns, too, the scale is that of all of them, which the folder has.
static void code_slice(const struct weights *w, struct device *dev, const struct weight_tensor *t,
                       const struct safetensors_entry *e, void *staging, void *packed)
{
    const struct tensor_slice *s = &t->slice;
    const int64_t cols = t->shape[1], all = s->whole[1], max = w->room_n / all;
    struct weights through = *w; // whose arena is the room
    struct weight_tensor rows = *t, whole;
    const uint8_t *codes;
    const int8_t *scales;
    through.base = (char *)w->base + w->room_offset;
    rows.offset = 0;
    rows.slice.n_runs = 1;
    whole = rows;
    whole.shape[1] = (int)all;
    whole.slice.first_col = 0;
    weights_twin_tensor(w->twin, t->in_twin - 1, &codes, &scales);
    for (int r = 0; r < s->n_runs; r++)
        for (int64_t row = 0, n; row < s->runs[r].n; row += n, codes += n * cols, scales += n) {
            n = s->runs[r].n - row < max ? s->runs[r].n - row : max;
            rows.slice.runs[0] = whole.slice.runs[0] =
                (struct row_run){.first = s->runs[r].first + row, .n = n};
            if (cols < all) {
                copy_in_slice(&through, dev, &whole, e, staging, packed);
                device_ops(dev)->quantise(dev, NULL, (int8_t *)scales, through.base, n, (int)all,
                                          w->dt, NULL, 0);
            }
            copy_in_slice(&through, dev, &rows, e, staging, packed);
            device_ops(dev)->quantise(dev, (uint8_t *)codes, (int8_t *)scales, through.base, n,
                                      (int)cols, w->dt, cols < all ? scales : NULL, cols < all);
        }
}

// A tensor that stays as it is stored: its rows' codes, and their scales, as they lie in the
// folder.
static void copy_codes(const struct weights *w, struct device *dev, const struct weight_tensor *t,
                       const struct safetensors_entry *e, void *packed)
{
    const struct stored_in *s = &t->stored;
    const uint8_t *codes;
    const int8_t *scales;
    weights_twin_tensor(w->twin, t->in_twin - 1, &codes, &scales);
    const struct {
        void *to;
        const void *from;
        size_t row; // bytes
    } parts[] = {{(void *)codes, e->data, (size_t)t->shape[1] / 2},
                 {(void *)scales, e->more, (size_t)t->shape[1] / MXFP4_BLOCK}};
    for (int p = 0; p < 2; p++) {
        const size_t bytes = parts[p].row;
        const int64_t max = (int64_t)((size_t)STAGING_ELEMENTS * sizeof(float) / bytes);
        for (int64_t row = 0, n; row < t->shape[0]; row += n) {
            n = t->shape[0] - row < max ? t->shape[0] - row : max;
            for (int64_t i = 0; i < n; i++)
                memcpy((char *)packed + (size_t)i * bytes,
                       (const char *)parts[p].from +
                           (size_t)(s->first_row + (row + i) * s->row_step) * bytes,
                       bytes);
            device_copy_in(dev, (char *)parts[p].to + (size_t)row * bytes, packed,
                           (size_t)n * bytes);
        }
    }
}

static void count_rounding(struct weights *w, const struct safetensors_entry *matrix)
{
    const double change = fp8_rounding(matrix);
    w->n_rounded += change > 0;
    if (change > w->rounding) w->rounding = change;
}

bool weights_describe_stored(const struct weights *w, char *ret, size_t size)
{
    const char *note = stored_form_notes[w->config->stored];
    if (!note || w->config->quantization == QUANTIZATION_MXFP4) return false;
    snprintf(ret, size, "%s", note);
    if (w->config->stored != STORED_FP8 || !w->twin) return true;
    if (w->n_rounded == 0)
        snprintf(ret, size,
                 "its FP8 matrices are multiplied as they are: all scales are powers "
                 "of two; checkpoints are saved with ordinary ones");
    else
        snprintf(ret, size,
                 "%d of its FP8 matrices have scales that are no powers of two and are rounded "
                 "once more, which changes one by at most %.2g of its root mean square; "
                 "checkpoints are saved with ordinary ones",
                 w->n_rounded, w->rounding);
    return true;
}

enum status weights_load_set(struct weights *w, struct device *dev, const struct safetensors *set,
                             const char *where)
{
    enum status st = ST_OK;
    const size_t bytes = (size_t)STAGING_ELEMENTS * sizeof(float);
    void *staging = malloc(bytes), *packed = malloc(bytes);
    if (!staging || !packed) FAIL(ST_NO_MEMORY, "%s: no memory to load through", where);
    w->n_rounded = 0;
    w->rounding = 0;
    for (int i = 0; i < w->n_tensors; i++) {
        const struct weight_tensor *t = &w->tensors[i];
        const struct safetensors_entry *e = find_tensor(w, set, folder_name(t));
        struct safetensors_entry quantised;
        if (!e && mxfp4_find(set, folder_name(t), &quantised)) e = &quantised;
        if (is_fp8(w, t, e)) {
            CHECK(fp8_find(set, e, w->config->fp8_block, &quantised));
            e = &quantised;
            if (w->twin) count_rounding(w, e);
        }
        if (t->in_twin && w->config->quantization == QUANTIZATION_MXFP4)
            copy_codes(w, dev, t, e, packed);
        else
            (t->in_twin ? code_slice : copy_in_slice)(w, dev, t, e, staging, packed);
    }
    if (w->room_n)
        device_fill(dev, (char *)w->base + w->room_offset, 0, w->canary_offset - w->room_offset);
    st = device_sync(dev);
out:
    free(staging);
    free(packed);
    return st;
}

enum status weights_load_tensors(struct weights *w, struct device *dev, const char *folder)
{
    struct safetensors *set = NULL;
    enum status st = open_tensors(w, folder, &set);
    if (st == ST_OK) st = weights_load_set(w, dev, set, folder);
    safetensors_free(set);
    return st;
}

// What came of it on all ranks, each of which has its own sentence.
static enum status load_together(struct comm *comm, enum status here)
{
    struct status_kept kept;
    enum status all[COMM_MAX_RANKS];
    status_keep(&kept, here);
    enum status st = comm_gather_host(comm, &here, all, sizeof here);
    if (here != ST_OK) return status_recall(&kept);
    for (int r = 0; st == ST_OK && r < comm_size(comm); r++)
        if (all[r] != ST_OK)
            st = status_fail(all[r], "rank %d could not load its shard of the weights", r);
    return st;
}

enum status weights_load(struct weights *w, struct device *dev, const char *folder)
{
    enum status st = weights_load_tensors(w, dev, folder);
    if (!w->twin) return st;
    st = load_together(w->comm, st);
    if (st != ST_OK) return st;
    weights_quantise(w, dev);
    return device_sync(dev);
}

// ---- shards -------------------------------------------------------------------------------------
// Slices travel through a small buffer on the device, because that is what communicators carry;
// where each belongs is said by the rank that sends it.

#define PIECE_BYTES ((size_t)16 << 20)

struct shard_join {
    const struct weights *own;
    struct device *dev;
    struct comm *comm;
    struct weight_tensor *all; // (ranks) what each has of a tensor
    void *piece;               // (PIECE_BYTES) device
    void *slice;               // of the largest tensor, f32; host
};

// The entry of the whole tensor where a row of the slice begins.
static int64_t place_of(const struct weight_tensor *t, int64_t row)
{
    const struct tensor_slice *s = &t->slice;
    int run = 0;
    for (; row >= s->runs[run].n; run++) row -= s->runs[run].n;
    return (s->runs[run].first + row) * tensor_whole_columns(t) + s->first_col;
}

void shard_take(const struct weight_tensor *t, const void *whole, size_t element, void *ret_own)
{
    const size_t bytes = (size_t)tensor_columns(t) * element;
    for (int64_t row = 0; row < t->shape[0]; row++)
        memcpy((char *)ret_own + (size_t)row * bytes,
               (const char *)whole + (size_t)place_of(t, row) * element, bytes);
}

static void put(const struct weight_tensor *t, const void *own, size_t element, void *ret_whole)
{
    const size_t bytes = (size_t)tensor_columns(t) * element;
    for (int64_t row = 0; row < t->shape[0]; row++)
        memcpy((char *)ret_whole + (size_t)place_of(t, row) * element,
               (const char *)own + (size_t)row * bytes, bytes);
}

enum status shard_join_new(const struct weights *w, struct device *dev, struct comm *comm,
                           struct shard_join **ret)
{
    enum status st = ST_OK;
    struct shard_join *j = NULL;
    if (!comm) {
        *ret = NULL;
        return ST_OK;
    }
    j = calloc(1, sizeof *j);
    if (!j) FAIL(ST_NO_MEMORY, "no memory to put shards together");
    j->own = w;
    j->dev = dev;
    j->comm = comm;
    j->slice = malloc((size_t)weights_largest(w) * sizeof(float));
    j->all = calloc((size_t)comm_size(comm), sizeof *j->all);
    if (!j->slice || !j->all) FAIL(ST_NO_MEMORY, "no memory to put shards together");
    CHECK(device_alloc(dev, PIECE_BYTES, &j->piece));
    *ret = TAKE_PTR(j);
out:
    shard_join_free(j);
    return st;
}

void shard_join_free(struct shard_join *j)
{
    if (!j) return;
    free(j->all);
    free(j->slice);
    device_release(j->dev, j->piece);
    free(j);
}

// A slice from another rank, or on any other to rank 0.
static enum status carry_slice(struct shard_join *j, int rank, char *slice, size_t bytes)
{
    const bool sends = comm_rank(j->comm) > 0;
    enum status st = ST_OK;
    for (size_t at = 0, n; at < bytes && st == ST_OK; at += n) {
        n = bytes - at < PIECE_BYTES ? bytes - at : PIECE_BYTES;
        if (sends) {
            device_copy_in(j->dev, j->piece, slice + at, n);
            comm_send(j->comm, j->piece, n, 0);
        } else {
            comm_recv(j->comm, j->piece, n, rank);
            device_copy_out(j->dev, slice + at, j->piece, n);
        }
        st = device_sync(j->dev);
    }
    return st;
}

enum status shard_join_tensor(struct shard_join *j, int i, const void *own, size_t element,
                              void *whole)
{
    const struct weight_tensor *t = &j->own->tensors[i];
    enum status st = comm_gather_host(j->comm, t, j->all, sizeof *t);
    if (st != ST_OK) return st;
    if (comm_rank(j->comm) > 0) return carry_slice(j, 0, (char *)own, (size_t)t->n * element);
    put(t, own, element, whole);
    for (int r = 1; r < comm_size(j->comm) && st == ST_OK; r++) {
        t = &j->all[r];
        st = carry_slice(j, r, j->slice, (size_t)t->n * element);
        if (st == ST_OK) put(t, j->slice, element, whole);
    }
    return st;
}

// Elements of the whole model before tensor i in its block of memory.
static int64_t whole_before(const struct weights *w, int i)
{
    int64_t n = 0;
    while (!weights_begins_block(w, i)) n += tensor_whole_elements(&w->tensors[--i]);
    return n;
}

int64_t shard_whole_blocks(const struct weights *w, int i, int64_t block)
{
    return (whole_before(w, i) % block + tensor_whole_elements(&w->tensors[i]) - 1) / block + 1;
}

bool shard_cuts_between(const struct weights *w, int i, int64_t block)
{
    const struct weight_tensor *t = &w->tensors[i];
    bool all = t->offset % block == 0 && whole_before(w, i) % block == 0 &&
               tensor_whole_elements(t) % block == 0;
    if (t->n_dims == 2 && t->shape[1] < t->slice.whole[1]) all = all && t->shape[1] % block == 0;
    for (int r = 0; r < t->slice.n_runs; r++)
        all = all && t->slice.runs[r].n * tensor_columns(t) % block == 0;
    return all;
}

enum status shard_join_blocks(struct shard_join *j, int i, int64_t block, float *own, float *whole)
{
    const struct weight_tensor *t = &j->own->tensors[i];
    const bool shrinks = comm_rank(j->comm) == 0 && shard_cuts_between(j->own, i, block);
    const int64_t n = tensor_whole_elements(t), before = t->offset % block;
    float *each = shrinks ? malloc((size_t)n * sizeof *each) : whole;
    if (shrinks && !each) return status_fail(ST_NO_MEMORY, "no memory to put shards together");
    for (int64_t k = t->n - 1; k >= 0; k--) own[k] = own[(before + k) / block];
    const enum status st = shard_join_tensor(j, i, own, sizeof *own, each);
    for (int64_t b = 0; shrinks && st == ST_OK && b < n / block; b++) whole[b] = each[b * block];
    if (shrinks) free(each);
    return st;
}

void shard_take_moments(const struct weights *w, int i, const void *codes, const void *scales,
                        bool each, bool squares, struct moment_block *last, uint8_t *ret_codes,
                        float *ret_scales)
{
    enum { BLOCK = sizeof last->codes };
    const struct weight_tensor *t = &w->tensors[i];
    const int64_t before = t->offset % BLOCK, whole = whole_before(w, i) % BLOCK;
    memcpy(ret_codes, last->codes, (size_t)before);
    for (int64_t k = 0; k < before; k++) ret_scales[k] = last->scale;
    shard_take(t, codes, 1, ret_codes + before);
    for (int64_t k = 0; k < t->n; k++) {
        const int64_t at = place_of(t, k / tensor_columns(t)) + k % tensor_columns(t),
                      entry = each ? at : (whole + at) / BLOCK;
        memcpy(&ret_scales[before + k], (const char *)scales + (size_t)entry * sizeof *ret_scales,
               sizeof *ret_scales);
    }
    for (int64_t b = 0; b * BLOCK < before + t->n; b++) {
        uint8_t *own = ret_codes + b * BLOCK;
        memcpy(last->codes, own, BLOCK);
        last->scale = moments_join(own, ret_scales + b * BLOCK, squares);
        last->rounded = last->rounded || memcmp(last->codes, own, BLOCK) != 0;
        memcpy(last->codes, own, BLOCK);
        ret_scales[b] = last->scale;
    }
}

// ---- saving -------------------------------------------------------------------------------------

struct save {
    const struct weights *w;
    struct device *dev;
    struct shard_join *join;
    void *own, *whole; // one tensor in its dtype of the arena: what is held, and all of it
    void *converted;   // the same as it is saved, on its way into one that holds several
};

static enum status save_open(const struct weights *w, struct device *dev, struct save *ret)
{
    enum status st;
    int64_t own = 0, whole = 0, stored = 0;
    *ret = (struct save){.w = w, .dev = dev};
    for (int i = 0; i < w->n_tensors; i++) {
        const struct weight_tensor *t = &w->tensors[i];
        if (t->n > own) own = t->n;
        if (tensor_whole_elements(t) > whole) whole = tensor_whole_elements(t);
        if (t->stored.n_dims) stored = whole;
    }
    if (w->config->shard.size > 1 && !w->comm)
        FAIL(ST_UNSUPPORTED, "a folder's tensors are whole, and this is shard %d of %d",
             w->config->shard.rank, w->config->shard.size);
    CHECK(shard_join_new(w, dev, w->comm, &ret->join));
    ret->own = malloc((size_t)own * sizeof(float));
    if (ret->join) ret->whole = malloc((size_t)whole * sizeof(float));
    if (stored) ret->converted = malloc((size_t)stored * sizeof(float));
    if (!ret->own || (stored && !ret->converted) || (ret->join && !ret->whole))
        FAIL(ST_NO_MEMORY, "no memory to save weights");
out:
    return st;
}

static void save_close(struct save *s)
{
    shard_join_free(s->join);
    free(s->own);
    free(s->whole);
    free(s->converted);
}

// A tensor into s->own, and of several ranks into rank 0's s->whole.
static enum status collect_tensor(struct save *s, int i)
{
    const struct weight_tensor *t = &s->w->tensors[i];
    const size_t element = dtype_size(weights_tensor_dtype(s->w, t));
    device_copy_out(s->dev, s->own, weights_address(s->w, t->offset), (size_t)t->n * element);
    enum status st = device_sync(s->dev);
    return st == ST_OK && s->join ? shard_join_tensor(s->join, i, s->own, element, s->whole) : st;
}

static void convert_for_save(struct save *s, const struct weight_tensor *t, enum dtype as, void *to)
{
    const void *from = s->join ? s->whole : s->own;
    const int64_t n = tensor_whole_elements(t);
    const enum dtype own = weights_tensor_dtype(s->w, t);
    if (as == own)
        memcpy(to, from, (size_t)n * dtype_size(as));
    else
        weights_convert(to, as, from, own, n);
}

// Every tensor of the table from t on that the folder has in the same one, each to its places in
// it.
static enum status read_stored(struct save *s, const struct weight_tensor *t, enum dtype as,
                               char *to)
{
    const struct weight_tensor *end = s->w->tensors + s->w->n_tensors, *first = t;
    const size_t element = dtype_size(as);
    enum status st = ST_OK;
    for (; t < end && strcmp(t->stored.name, first->stored.name) == 0; t++) {
        const int64_t cols = tensor_whole_columns(t);
        CHECK(collect_tensor(s, (int)(t - s->w->tensors)));
        convert_for_save(s, t, as, s->converted);
#pragma omp parallel for
        for (int64_t c = 0; c < cols; c++)
            for (int64_t row = 0; row < t->slice.whole[0]; row++)
                memcpy(to + (size_t)(t->stored.first + row * t->stored.row_step +
                                     c * t->stored.col_step) *
                                element,
                       (char *)s->converted + (size_t)(row * cols + c) * element, element);
    }
out:
    return st;
}

// The codes of a tensor of the twin in the order of its columns, or its scales, through s->own.
static enum status read_twin(struct save *s, const struct safetensors_source *source, void *to)
{
    const struct weight_tensor *t = source->tag;
    const bool is_codes = source->dt == DT_E4M3;
    const int64_t rows = t->shape[0], cols = t->shape[1];
    const uint8_t *codes, *own = s->own;
    const int8_t *scales;
    weights_twin_tensor(s->w->twin, (int)(t - s->w->twin->tensors), &codes, &scales);
    device_copy_out(s->dev, s->own, is_codes ? (const void *)codes : scales,
                    (size_t)(is_codes ? t->n : rows));
    enum status st = device_sync(s->dev);
    if (st != ST_OK) return st;
#pragma omp parallel for
    for (int64_t r = 0; r < rows; r++)
        if (!is_codes)
            ((float *)to)[r] = e4m3_factor(((const int8_t *)own)[r]);
        else
            for (int64_t c = 0; c < cols; c++)
                ((uint8_t *)to)[r * cols + c] = own[r * cols + e4m3_place(c, cols)];
    return ST_OK;
}

static enum status read_for_save(void *context, const struct safetensors_source *source,
                                 size_t bytes, void *to)
{
    struct save *s = context;
    const struct weight_tensor *t = source->tag;
    const struct weights *twin = s->w->twin;
    (void)bytes;
    if (twin && t >= twin->tensors && t < twin->tensors + twin->n_tensors)
        return read_twin(s, source, to);
    if (t->stored.n_dims) return read_stored(s, t, source->dt, to);
    enum status st = collect_tensor(s, (int)(t - s->w->tensors));
    if (st == ST_OK) convert_for_save(s, t, source->dt, to);
    return st;
}

enum status weights_save_part(const struct weights *w, struct device *dev)
{
    struct save save;
    enum status st = save_open(w, dev, &save);
    for (int i = 0; st == ST_OK && i < w->n_tensors; i++) st = collect_tensor(&save, i);
    save_close(&save);
    return st;
}

// What the folder's file has of tensor t of the table.
static struct safetensors_source source_of(const struct weights *w, const struct weight_tensor *t,
                                           enum dtype as)
{
    const char *own = w->config->family->folder_prefix, *name = folder_name(t);
    struct safetensors_source source = {.dt = t->is_buffer ? DT_F32 : as, .tag = t};
    const bool other = own && begins(name, "model.");
    snprintf(source.name, sizeof source.name, "%s%s", other ? own : "",
             name + (other ? strlen("model.") : 0));
    source.n_dims = file_shape(t, source.shape);
    return source;
}

static enum status write_sources(const struct weights *w, struct device *dev,
                                 const struct safetensors_source *sources, int n,
                                 const char *folder, const char *name)
{
    struct save save;
    json_t *metadata = json_pack("{s:s}", "format", "pt"); // what Hugging Face's loaders look for
    char path[PATH_ROOM];
    enum status st;
    CHECK(save_open(w, dev, &save));
    CHECK(path_put(path, folder, "%s", name));
    if (!metadata) FAIL(ST_NO_MEMORY, "%s: no memory to save", folder);
    st = safetensors_write(path, sources, n, metadata, read_for_save, &save);
out:
    save_close(&save);
    json_decref(metadata);
    return st;
}

enum status weights_save_as(const struct weights *w, struct device *dev, const char *folder,
                            const char *name, enum dtype as)
{
    struct safetensors_source *sources = calloc((size_t)w->n_tensors, sizeof *sources);
    int n = 0;
    if (!sources) return status_fail(ST_NO_MEMORY, "%s: no memory to save", folder);
    for (int i = 0; i < w->n_tensors; i++)
        if (is_first_stored(&w->tensors[i])) sources[n++] = source_of(w, &w->tensors[i], as);
    enum status st = write_sources(w, dev, sources, n, folder, name);
    free(sources);
    return st;
}

// The widest elements first, so that all lie at multiples of their size.
static int by_element(const void *a, const void *b)
{
    const struct safetensors_source *x = a, *y = b;
    const size_t of_x = dtype_size(x->dt), of_y = dtype_size(y->dt);
    return of_x != of_y ? (of_x < of_y ? 1 : -1) : strcmp(x->name, y->name);
}

enum status weights_save_twin(const struct weights *w, struct device *dev, const char *folder,
                              enum dtype as)
{
    const struct weight_tensor *coded = w->twin->tensors, *end = coded + w->twin->n_tensors;
    struct safetensors_source *sources = calloc((size_t)w->n_tensors * 2, sizeof *sources);
    enum status st = ST_OK;
    int n = 0;
    if (!sources) FAIL(ST_NO_MEMORY, "%s: no memory to save", folder);
    if (w->comm) FAIL(ST_UNSUPPORTED, "%s: a twin is saved by one rank", folder);
    for (const struct weight_tensor *t = w->tensors; t < w->tensors + w->n_tensors; t++) {
        const bool is_coded = coded < end && strcmp(coded->name, t->name) == 0;
        struct safetensors_source *s = &sources[n++];
        if (is_coded && t->stored.n_dims)
            FAIL(ST_UNSUPPORTED,
                 "%s: %s has all experts in one tensor (%s), of which loaders know no FP8; write "
                 "it in bf16",
                 folder, w->config->architecture, t->stored.name);
        *s = source_of(w, t, as);
        if (!is_coded) continue;
        s->dt = DT_E4M3;
        s->tag = coded++;
        sources[n] = *s;
        snprintf(sources[n].name, sizeof s->name, "%.*s_scale", (int)(sizeof s->name - 7), t->name);
        sources[n].dt = DT_F32;
        sources[n++].shape[1] = 1;
    }
    qsort(sources, (size_t)n, sizeof *sources, by_element);
    st = write_sources(w, dev, sources, n, folder, "model.safetensors");
out:
    free(sources);
    return st;
}

enum status weights_save(const struct weights *w, struct device *dev, const char *folder,
                         enum dtype as)
{
    return weights_save_as(w, dev, folder, "model.safetensors", as);
}
