/* param_range.c: from names to ranges, and from ranges to what each rank updates, and to what
 * several hold alike. No state; any thread.
 *
 * What can be frozen is a block of the arena (weights.h), because its gradient is one matmul: the
 * q, k and v projections of a layer are one, as are gate and up.
 */
// SPDX-License-Identifier: Apache-2.0
#include "trainer/learn/param_range.h"
#include "common/base/bytes.h"
#include "kernels/moments.h"

#include <fnmatch.h>
#include <stdlib.h>
#include <string.h>

static enum status apply_pattern(const struct weights *w, const char *pattern, bool *frozen)
{
    bool trains = pattern[0] == '!';
    int matches = 0;
    for (int i = 0; i < w->n_tensors; i++) {
        if (fnmatch(pattern + trains, w->tensors[i].name, 0) != 0) continue;
        frozen[i] = !trains;
        matches++;
    }
    if (matches) return ST_OK;
    return status_fail(ST_INVALID,
                       "--freeze: \"%s\" matches no tensor of the model; names are like %s and %s",
                       pattern, w->tensors[0].name, w->tensors[w->n_tensors / 2].name);
}

enum status param_ranges_of(const struct weights *w, const char *freeze, struct param_ranges *ret)
{
    enum status st = ST_OK;
    char *patterns = NULL, *remaining = NULL;
    bool *frozen = calloc((size_t)w->n_tensors, sizeof *frozen);
    struct param_ranges ranges = {calloc((size_t)w->n_tensors, sizeof *ranges.list), 0};
    if (!frozen || !ranges.list) FAIL(ST_NO_MEMORY, "no memory for the list of what is trained");
    if (freeze && !(patterns = strdup(freeze))) FAIL(ST_NO_MEMORY, "no memory for --freeze");
    for (char *p = patterns; p && (p = strtok_r(p, ", ", &remaining)); p = remaining)
        CHECK(apply_pattern(w, p, frozen));
    for (int i = 1; i < w->n_tensors; i++)
        if (!weights_begins_block(w, i) && frozen[i] != frozen[i - 1])
            FAIL(ST_INVALID,
                 "--freeze: %s and %s are one block of memory, whose gradient is computed whole; "
                 "freeze both or neither",
                 w->tensors[i - 1].name, w->tensors[i].name);
    for (int i = 0; i < w->n_tensors; i++) frozen[i] = frozen[i] || w->tensors[i].is_buffer;
    // Ranges of neighbours that are trained; each ends where the next block begins, or the arena
    // ends.
    for (int i = 0; i < w->n_tensors; i++) {
        int next = i;
        if (frozen[i] || (i > 0 && !frozen[i - 1])) continue;
        while (next < w->n_tensors && !frozen[next]) next++;
        const int64_t first = w->tensors[i].offset,
                      end = next < w->n_tensors ? w->tensors[next].offset : w->n_elements;
        ranges.list[ranges.n++] =
            (struct param_range){.weights = w, .first = first, .n = end - first};
    }
    if (ranges.n == 0)
        FAIL(ST_INVALID,
             "--freeze %s leaves nothing to train; '!' before a pattern excepts what it matches",
             freeze);
    *ret = ranges;
out:
    if (st != ST_OK) param_ranges_release(&ranges);
    free(frozen);
    free(patterns);
    return st;
}

void param_ranges_release(struct param_ranges *ranges)
{
    free(ranges->list);
    *ranges = (struct param_ranges){0};
}

bool param_range_holds(const struct param_range *range, int i)
{
    int64_t offset = range->weights->tensors[i].offset;
    return offset >= range->first && offset < range->first + range->n;
}

int64_t param_ranges_parameters(const struct param_ranges *ranges)
{
    int64_t n = 0;
    for (int r = 0; r < ranges->n; r++) {
        const struct weights *w = ranges->list[r].weights;
        for (int i = 0; i < w->n_tensors; i++)
            if (param_range_holds(&ranges->list[r], i)) n += w->tensors[i].n;
    }
    return n;
}

// ---- slices -------------------------------------------------------------------------------------

// Where the slice that begins at `from` ends: at a block at least SLICE_ELEMENTS further on.
static int64_t slice_end(const struct param_range *r, int64_t from)
{
    const struct weights *w = r->weights;
    for (int i = 0; i < w->n_tensors; i++) {
        const int64_t at = w->tensors[i].offset - r->first;
        if (at >= r->n) break;
        if (at >= from + SLICE_ELEMENTS && weights_begins_block(w, i)) return at;
    }
    return r->n;
}

// Into the list, where there is one.
static void add_slice(struct slices *s, const struct param_range *r, struct slice slice)
{
    if (slice.n == 0) return;
    slice.state_at = s->n_state;
    slice.low_at = s->n_low;
    if (s->list) s->list[s->n] = slice;
    s->n++;
    s->n_state += slice.n;
    if (r->weights->dt == DT_BF16) s->n_low += slice.n;
}

static void cut(const struct param_ranges *ranges, struct slices *s)
{
    for (int i = 0; i < ranges->n; i++) {
        const struct param_range *r = &ranges->list[i];
        for (int64_t at = 0, end; at < r->n; at = end) {
            end = s->n_ranks > 1 ? slice_end(r, at) : r->n;
            const int64_t part = (end - at) / MOMENT_BLOCK / s->n_ranks * MOMENT_BLOCK,
                          shared = end - at - part * s->n_ranks;
            add_slice(s, r, (struct slice){i, false, at, part, 0, 0});
            add_slice(s, r, (struct slice){i, true, end - shared, shared, 0, 0});
        }
    }
}

struct slices slices_count(const struct param_ranges *ranges, int n_ranks)
{
    struct slices s = {.n_ranks = n_ranks};
    cut(ranges, &s);
    return s;
}

enum status slices_new(const struct param_ranges *ranges, int n_ranks, struct slices *ret)
{
    const struct slices count = slices_count(ranges, n_ranks);
    struct slices s = {.n_ranks = n_ranks, .list = calloc((size_t)count.n, sizeof *s.list)};
    if (!s.list)
        return status_fail(ST_NO_MEMORY, "no memory to divide what is trained among ranks");
    cut(ranges, &s);
    *ret = s;
    return ST_OK;
}

void slices_release(struct slices *s)
{
    free(s->list);
    *s = (struct slices){0};
}

int64_t slice_first(const struct slice *slice, int rank)
{
    return slice->first + (slice->shared ? 0 : slice->n * rank);
}

// ---- replicas -----------------------------------------------------------------------------------

enum status replicas_list(const struct param_ranges *ranges, struct replica **ret, int *ret_n,
                          const struct weight_tensor **ret_mixed)
{
    struct replica *list = NULL;
    enum status st = ST_OK;
    int n = 0, before = 0; // holders of what comes before in the same block of memory
    *ret_mixed = NULL;
    for (const struct param_range *r = ranges->list; r < ranges->list + ranges->n; r++)
        for (int i = 0; i < r->weights->n_tensors; i++) {
            const struct weight_tensor *t = &r->weights->tensors[i];
            int64_t at = r->at + t->offset - r->first, elements;
            if (!param_range_holds(r, i)) continue;
            if (weights_begins_block(r->weights, i)) before = 0;
            for (int k = 0; k < t->slice.n_runs; k++, at += elements) {
                const struct row_run *run = &t->slice.runs[k];
                if (before && before != run->replicas && at % MOMENT_BLOCK != 0) *ret_mixed = t;
                before = run->replicas;
                struct replica *room = array_room(list, (size_t)n, sizeof *room);
                if (!room) FAIL(ST_NO_MEMORY, "no memory for what ranks hold alike");
                list = room;
                elements = run->n * tensor_columns(t);
                if (run->replicas > 1)
                    list[n++] = (struct replica){at, elements, run->replicas, t->in_parts};
            }
        }
    *ret = TAKE_PTR(list);
    *ret_n = n;
out:
    free(list);
    return st;
}
