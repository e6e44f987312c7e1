/* slices.c: cuts ranges into slices, and slices into parts. No state; any thread. */
#include "trainer/learn/slices.h"
#include "kernels/moments.h"

#include <stdlib.h>

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

static void add_stretch(struct slices *s, int64_t n, bool shared, bool low)
{
    if (s->stretches)
        s->stretches[s->n_stretches] = (struct stretch){s->n, shared, n, s->n_state, s->n_low};
    s->n_stretches++;
    s->n_state += n;
    if (low) s->n_low += n;
}

static void add_slice(struct slices *s, const struct param_range *r, struct slice slice)
{
    const bool low = r->weights->dt == DT_BF16;
    slice.part = slice.n / MOMENT_BLOCK / s->n_ranks * MOMENT_BLOCK;
    const int64_t rest = slice.n - slice.part * s->n_ranks;
    if (s->list) s->list[s->n] = slice;
    if (slice.part > 0) add_stretch(s, slice.part, false, low);
    if (rest > 0) add_stretch(s, rest, true, low);
    s->n++;
}

// Into the lists, where there are any.
static void cut(const struct param_ranges *ranges, struct slices *s)
{
    for (int i = 0; i < ranges->n; i++) {
        const struct param_range *r = &ranges->list[i];
        for (int64_t at = 0, end; at < r->n; at = end) {
            end = s->n_ranks > 1 ? slice_end(r, at) : r->n;
            add_slice(s, r, (struct slice){.range = i, .first = at, .n = end - at});
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
    struct slices s = {
        .n_ranks = n_ranks,
        .list = calloc((size_t)count.n, sizeof *s.list),
        .stretches = calloc((size_t)count.n_stretches, sizeof *s.stretches),
    };
    if (!s.list || !s.stretches) {
        slices_release(&s);
        return status_fail(ST_NO_MEMORY, "no memory to divide what is trained among ranks");
    }
    cut(ranges, &s);
    *ret = s;
    return ST_OK;
}

void slices_release(struct slices *s)
{
    free(s->list);
    free(s->stretches);
    *s = (struct slices){0};
}

int64_t stretch_first(const struct slices *s, const struct stretch *t, int rank)
{
    const struct slice *slice = &s->list[t->slice];
    return slice->first + slice->part * (t->shared ? s->n_ranks : rank);
}
