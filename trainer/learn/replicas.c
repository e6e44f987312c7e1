/* replicas.c: see replicas.h. Which tensors, and how many ranks hold them, stands in the weights
 * table: nothing here knows a layer's shape. */
#include "trainer/learn/replicas.h"

#include "common/base/bytes.h"
#include "kernels/ops.h"

#include <stdlib.h>

struct replica { // a run of a tensor's rows that several ranks hold
    float *gradient;
    int64_t n;
    int holders;
    struct comm *among; // ranks over which it is summed; NULL: it is the same on all holders
};

struct piece { // of a replica, that this rank keeps
    struct gradient_run run;
    int holders;
};

struct replicas {
    struct device *dev;
    struct comm *comm, *neighbours; // all ranks; those that share key-value heads, NULL: none do
    int sharing;                    // of neighbours
    struct replica *list;
    int n;
    struct piece *pieces;
    int n_pieces;
    double *squares; // (n_pieces) device
};

// Ranks add their heads' parts of these gradients.
static bool is_of_heads(enum tensor_role role)
{
    return role == ROLE_Q_NORM || role == ROLE_K_NORM || role == ROLE_QKV ||
           role == ROLE_QKV_BIAS || role == ROLE_Q_A || role == ROLE_Q_A_NORM ||
           role == ROLE_KV_A || role == ROLE_KV_A_NORM;
}

// The communicator of `holders` ranks that are neighbours.
static enum status ranks_among(struct replicas *r, int holders, struct comm **ret)
{
    enum status st = ST_OK;
    if (holders < comm_size(r->comm) && !r->neighbours) {
        CHECK(comm_split(r->comm, comm_rank(r->comm) / holders, &r->neighbours));
        r->sharing = holders;
    }
    if (holders < comm_size(r->comm) && holders != r->sharing)
        FAIL(ST_UNSUPPORTED,
             "key-value heads are shared by %d ranks in one layer and by %d in another", r->sharing,
             holders);
    *ret = holders < comm_size(r->comm) ? r->neighbours : r->comm;
out:
    return st;
}

static enum status add_tensor(struct replicas *r, const struct weight_tensor *t, float *gradient)
{
    enum status st = ST_OK;
    const int64_t cols = t->n_dims == 2 ? t->shape[1] : 1;
    for (int i = 0; i < t->slice.n_runs; i++) {
        const struct row_run *run = &t->slice.runs[i];
        struct replica one = {gradient, run->n * cols, run->holders, NULL};
        gradient += one.n;
        if (run->holders == 1) continue;
        if (is_of_heads(t->role)) CHECK(ranks_among(r, run->holders, &one.among));
        r->list[r->n++] = one;
    }
out:
    return st;
}

// What is both the replica's and the run's.
static struct gradient_run overlap(const struct replica *one, const struct gradient_run *run)
{
    float *first = one->gradient > run->at ? one->gradient : run->at;
    float *end =
        one->gradient + one->n < run->at + run->n ? one->gradient + one->n : run->at + run->n;
    return (struct gradient_run){first, end > first ? end - first : 0, run->shared};
}

static enum status list_pieces(struct replicas *r, const struct gradient_run *kept, int n_kept)
{
    for (int i = 0; i < r->n; i++)
        for (int k = 0; k < n_kept; k++) {
            const struct gradient_run run = overlap(&r->list[i], &kept[k]);
            if (run.n == 0) continue;
            struct piece *room = array_room(r->pieces, (size_t)r->n_pieces, sizeof *room);
            if (!room) return status_fail(ST_NO_MEMORY, "no memory for what ranks hold alike");
            r->pieces = room;
            r->pieces[r->n_pieces++] = (struct piece){run, r->list[i].holders};
        }
    return ST_OK;
}

enum status replicas_new(struct device *dev, struct comm *comm, const struct param_ranges *trained,
                         float *gradients, const struct gradient_run *kept, int n_kept,
                         struct replicas **ret)
{
    struct replicas *r = NULL;
    enum status st = ST_OK;
    int room = 0;
    if (!comm) {
        *ret = NULL;
        return ST_OK;
    }
    for (int i = 0; i < trained->n; i++) room += trained->list[i].weights->n_tensors;
    r = calloc(1, sizeof *r);
    if (r) r->list = calloc((size_t)room * MAX_ROW_RUNS, sizeof *r->list);
    if (!r || !r->list) FAIL(ST_NO_MEMORY, "no memory for the list of what ranks hold alike");
    r->dev = dev;
    r->comm = comm;
    for (int i = 0; i < trained->n; i++) {
        const struct param_range *range = &trained->list[i];
        const struct weights *w = range->weights;
        for (int t = 0; t < w->n_tensors; t++)
            if (param_range_holds(range, t))
                CHECK(add_tensor(r, &w->tensors[t],
                                 gradients + (w->tensors[t].offset - range->first)));
        gradients += range->n;
    }
    CHECK(list_pieces(r, kept, n_kept));
    CHECK(device_alloc(dev, (size_t)(r->n_pieces + 1) * sizeof *r->squares, (void **)&r->squares));
    *ret = r;
    r = NULL;
out:
    replicas_free(r);
    return st;
}

void replicas_free(struct replicas *r)
{
    if (!r) return;
    device_release(r->dev, r->squares);
    comm_free(r->neighbours);
    free(r->pieces);
    free(r->list);
    free(r);
}

void replicas_sum(struct replicas *r)
{
    for (int i = 0; r && i < r->n; i++)
        comm_all_reduce(r->list[i].among, r->list[i].gradient, (size_t)r->list[i].n, DT_F32);
}

enum status replicas_discount(struct replicas *r, double *alone, double *shared)
{
    if (!r) return ST_OK;
    const struct ops *ops = device_ops(r->dev);
    double *squares = calloc((size_t)r->n_pieces + 1, sizeof *squares);
    if (!squares) return status_fail(ST_NO_MEMORY, "no memory for the gradients' norm");
    for (int i = 0; i < r->n_pieces; i++)
        ops->sum_squares(r->dev, r->squares + i, r->pieces[i].run.at, r->pieces[i].run.n);
    device_copy_out(r->dev, squares, r->squares, (size_t)r->n_pieces * sizeof *squares);
    enum status st = device_sync(r->dev);
    for (int i = 0; i < r->n_pieces; i++) { // each holder counts its share
        const struct piece *p = &r->pieces[i];
        *(p->run.shared ? shared : alone) -= squares[i] * (p->holders - 1) / p->holders;
    }
    free(squares);
    return st;
}

enum status replicas_add_shards(struct replicas *r, double *sum)
{
    return r ? comm_sum_host(r->comm, sum, 1) : ST_OK;
}
