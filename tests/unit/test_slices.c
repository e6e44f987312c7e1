/* test_slices.c: what ranks divide among them: every element is one rank's or all ranks', parts are
 * equal and whole blocks; what the backward pass says is complete stays as it is; and an optimizer
 * of several ranks gives the bits of one. The last runs under mpirun: the program starts itself. */
// SPDX-License-Identifier: Apache-2.0
#include "kernels/moments.h"
#include "tests/support/mpirun.h"
#include "tests/support/reference.h"
#include "tests/support/support.h"
#include "tests/support/tiny_model.h"
#include "trainer/learn/backward.h"
#include "trainer/learn/optimizer.h"
#include "trainer/learn/param_range.h"

#define STEPS 3

// Large enough for several slices.
static const struct tiny_model shape = {
    .hidden = 128, .layers = 3, .intermediate = 512, .vocab = 300, .eos_id = -1, .seed = 4};

// ---- the parts ---------------------------------------------------------------------------------

static void check_slices(const struct param_ranges *ranges, int n_ranks, const int64_t *starts)
{
    struct slices s;
    uint8_t *owners = test_keep(calloc((size_t)starts[ranges->n], 1));
    assert_ok(slices_new(ranges, n_ranks, &s));
    assert_true(n_ranks == 1 ? s.n == ranges->n : s.n > ranges->n);
    const struct slices count = slices_count(ranges, n_ranks);
    assert_int_equal(count.n_state, s.n_state);
    assert_int_equal(count.n, s.n);
    int n_shared = 0;
    for (int i = 0; i < s.n; i++) {
        const struct slice *t = &s.list[i];
        assert_int_equal(t->state_at % MOMENT_BLOCK, 0);
        n_shared += t->shared;
        for (int r = 0; r < (t->shared ? 1 : n_ranks); r++) {
            const int64_t first = slice_first(t, r);
            assert_int_equal(first % MOMENT_BLOCK, 0);
            for (int64_t k = 0; k < t->n; k++) owners[starts[t->range] + first + k]++;
        }
    }
    for (int64_t k = 0; k < starts[ranges->n]; k++)
        if (owners[k] != 1)
            fail_msg("element %d of %d ranks has %d owners", (int)k, n_ranks, owners[k]);
    // a rank's share, and what every one holds beside it
    assert_true(s.n_state * n_ranks <=
                starts[ranges->n] + n_shared * n_ranks * n_ranks * MOMENT_BLOCK);
    slices_release(&s);
}

TEST(every_element_is_updated_once)
{
    const char *folder = test_folder();
    static const char *const freezes[] = {"", "*embed*,*.1.mlp*"};
    assert_ok(tiny_model_write_as(folder, &shape));
    struct reference *r = reference_of(folder);
    for (size_t f = 0; f < 2; f++) {
        struct param_ranges ranges = {0};
        int64_t starts[64] = {0};
        assert_ok(param_ranges_of(r->weights, freezes[f], &ranges));
        for (int i = 0; i < ranges.n; i++) starts[i + 1] = starts[i] + ranges.list[i].n;
        for (int n = 1; n <= 7; n++) check_slices(&ranges, n, starts);
        param_ranges_release(&ranges);
    }
}

// ---- what is complete --------------------------------------------------------------------------

struct watched {
    const float *grads;
    float *seen; // (n) as they were when they were said to be complete
    int64_t n, from;
    int calls;
};

static void complete(void *context, int64_t first)
{
    struct watched *w = context;
    assert_true(first < w->from);
    memcpy(w->seen + first, w->grads + first, (size_t)(w->from - first) * sizeof *w->seen);
    w->from = first;
    w->calls++;
}

TEST(gradients_that_are_complete_stay)
{
    struct optimizer *o;
    struct backward *b;
    struct tape *tape;
    struct batch *batch;
    enum { ROWS = 12 };
    const struct optimizer_config config = {.eps = 1e-8};
    const char *folder = test_folder();
    int32_t ids[ROWS], targets[ROWS];
    float logprobs[ROWS], back[ROWS];
    void *x;
    assert_ok(tiny_model_write_as(folder, &shape));
    struct reference *r = reference_of(folder);
    assert_ok(optimizer_new_whole(r->dev, r->weights, &config, &o));
    optimizer_clear_grads(o);
    assert_ok(backward_new(r->model, optimizer_grads(o, 0), ROWS, ROWS, ROWS, &b));
    assert_ok(tape_new(r->model, ROWS, RECOMPUTE_NONE, &tape));
    assert_ok(batch_new(r->dev, ROWS, 1, 0, ROWS, &batch));
    for (int i = 0; i < ROWS; i++) {
        ids[i] = (i * 29 + 3) % shape.vocab;
        targets[i] = (i * 71 + 5) % shape.vocab;
        back[i] = 0.1f;
    }
    assert_ok(batch_add_packed(batch, ids, ROWS, -1, -1, NULL));
    for (int i = 0; i < ROWS; i++) assert_ok(batch_want_row(batch, i));
    assert_ok(batch_commit(batch, 0, 0));
    model_forward(r->model, batch_view(batch), NULL, tape, &x);
    assert_ok(backward_logprobs(b, NULL, batch, x, targets, 1, logprobs, NULL));
    struct watched w = {.grads = optimizer_grads(o, 0)->base, .n = r->weights->n_elements};
    w.from = w.n;
    w.seen = malloc((size_t)w.n * sizeof *w.seen);
    const struct backward_loss loss = {
        .temperature = 1, .dlogprobs = back, .done = complete, .context = &w};
    assert_ok(backward_run(b, batch, tape, &loss));
    assert_int_equal(w.calls, shape.layers);
    assert_true(w.from > 0 && w.from < w.n / 4); // but for the embeddings
    assert_memory_equal(w.seen + w.from, w.grads + w.from, (size_t)(w.n - w.from) * sizeof *w.seen);
    free(w.seen);
    batch_free(batch);
    tape_free(r->dev, tape);
    backward_free(b);
    optimizer_free(o);
}

// ---- the bits of one rank ----------------------------------------------------------------------

// Half of it on each of two ranks, so that the sum is exact.
static float gradient(int64_t i, int step)
{
    const uint32_t u = (uint32_t)(i + 1) * 2654435761u ^ (uint32_t)(step + 1) * 40503u;
    return (float)(u >> 8) / 16777216.0f - 0.5f;
}

// argv: this program, "rank", model folder, "1" or "2" ranks, moments, folder for what comes out,
// state to go on from or "-"
static int rank_main(char **argv)
{
    enum status st;
    struct comm *comm = NULL;
    struct optimizer *o = NULL;
    struct param_ranges ranges;
    const int size = atoi(argv[3]), rank = size > 1 ? atoi(getenv("OMPI_COMM_WORLD_RANK")) : 0;
    const struct optimizer_config config = {
        .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8, .moments = (enum moments_kind)atoi(argv[4])};
    double norm;
    struct reference *r = reference_of(argv[2]);
    CHECK(param_ranges_of(r->weights, NULL, &ranges));
    CHECK(comm_open(r->dev, NULL, rank, size, 20, NULL, NULL, &comm));
    CHECK(optimizer_new(r->dev, &ranges, comm, &config, &o));
    if (strcmp(argv[6], "-") != 0) CHECK(optimizer_load(o, argv[6]));
    for (int step = 0; step < STEPS; step++) {
        float *g = optimizer_grads(o, 0)->base;
        optimizer_clear_grads(o);
        for (int64_t i = 0; i < r->weights->n_elements; i++)
            g[i] = gradient(i, (int)optimizer_steps(o)) / (float)size;
        if (step > 0) optimizer_sum_grads(o, r->weights->n_elements / 2); // as a layer may
        CHECK(optimizer_prepare(o, &norm));
        CHECK(optimizer_apply(o, 1e-2));
        CHECK(device_sync(r->dev));
    }
    CHECK(optimizer_save(o, rank == 0 ? test_path(argv[5], "state") : NULL));
    if (rank == 0) test_write(test_path(argv[5], "weights"), r->weights->base, r->weights->bytes);
    CHECK(comm_barrier(comm));
out:
    if (st != ST_OK) fprintf(stderr, "rank %d: %s\n", rank, status_message());
    optimizer_free(o);
    comm_free(comm);
    param_ranges_release(&ranges);
    return st == ST_OK ? 0 : 1;
}

static const char *program;

// The folder with `state` and `weights` after STEPS more steps.
static const char *steps_of(const char *model, int n_ranks, int moments, const char *from)
{
    const char *folder = test_folder(), *log = test_path(folder, "log");
    const char *const *argv =
        JOIN(n_ranks > 1 ? mpirun_words(n_ranks) : NULL,
             args("%s rank %s %d %d %s", program, model, n_ranks, moments, folder), OPTIONS(from));
    if (test_command(log, 60000, argv) != 0) fail_msg("%s", test_read(log));
    return folder;
}

TEST(two_ranks_give_the_bits_of_one)
{
    const char *model = test_folder();
    assert_ok(tiny_model_write_as(model, &shape));
    for (int moments = MOMENTS_F32; moments <= MOMENTS_8BIT; moments++) {
        const char *one = steps_of(model, 1, moments, "-"), *two = steps_of(model, 2, moments, "-");
        test_same_file(one, two, "state");
        test_same_file(one, two, "weights");
        // and on from each other's state
        const char *from_one = steps_of(model, 2, moments, test_path(one, "state"));
        const char *from_two = steps_of(model, 1, moments, test_path(two, "state"));
        test_same_file(from_one, from_two, "state");
    }
}

int main(int argc, char **argv)
{
    if (argc == 7 && strcmp(argv[1], "rank") == 0) return rank_main(argv);
    program = argv[0];
    return test_main();
}
