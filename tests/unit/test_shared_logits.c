/* test_shared_logits.c: the logits of a shard's model, which other ranks may have mapped: why they
 * do not is known, and what they have mapped is not released. With a communicator of the test's
 * own, since the CPU's ranks map nothing. */
// SPDX-License-Identifier: Apache-2.0
#include "kernels/comm_backend.h"
#include "tests/support/reference.h"
#include "tests/support/support.h"
#include "tests/support/tiny_model.h"

enum { ROWS = 4, VOCAB = 64 };

static const void *mapped; // by other ranks; NULL: nothing

static enum status share(struct comm *comm, void *memory, size_t bytes, char *why, size_t why_size)
{
    (void)comm;
    assert_true(bytes >= ROWS * VOCAB * sizeof(float));
    if (mapped)
        snprintf(why, why_size, "other memory is mapped already");
    else
        mapped = memory;
    return ST_OK;
}

static bool shares(const struct comm *comm, const void *memory)
{
    (void)comm;
    return memory == mapped;
}

static const struct comm_backend backend = {.share = share, .shares = shares};

static struct model *model_of(const struct reference *r, struct comm *comm)
{
    struct model *m = NULL;
    assert_ok(model_new(r->dev, r->config, r->weights, ROWS, ROWS, ROWS, &m));
    m->comm = comm;
    return m;
}

TEST(stay_while_they_are_mapped)
{
    struct reference *r = reference_of(tiny_folder(32, 2, VOCAB, 3));
    struct comm comm = {.backend = &backend, .size = 2};
    char why[100] = "not written";
    struct model *first = model_of(r, &comm), *second = model_of(r, &comm);
    float *logits = first->logits;
    for (int i = 0; i < ROWS * VOCAB; i++) logits[i] = 7;
    assert_ok(model_share_logits(first, why, sizeof why));
    assert_string_equal(why, "");
    assert_ok(model_share_logits(second, why, sizeof why));
    assert_string_equal(why, "other memory is mapped already");
    model_free(first);
    model_free(second);
    for (int i = 0; i < ROWS * VOCAB; i++) assert_true(logits[i] == 7); // another rank may read it
    device_release(r->dev, logits);
    mapped = NULL;
}

TEST(go_otherwise)
{
    struct comm comm = {.backend = &comm_mpi, .size = 2};
    char why[100] = "not written";
    assert_ok(comm_share(&comm, &comm, sizeof comm, why, sizeof why));
    assert_string_equal(why, "");
    assert_false(comm_shares(&comm, &comm));
    assert_false(comm_shares(NULL, &comm));
    assert_ok(comm_share(NULL, &comm, sizeof comm, why, sizeof why));
}
