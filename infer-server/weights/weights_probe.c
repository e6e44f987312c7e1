/* weights_probe.c: what rank 0 and its followers do alike with an arena of theirs: name its
 * segment, and show clients that it is the memory that they have mapped. No state. The thread that
 * owns the device. */
#include "bridge/process.h"
#include "common/base/hash.h"
#include "infer-server/weights/weights_owner.h"
#include "kernels/ops.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

void segment_name(const char *bridge_path, const char *role, char ret[SEGMENT_BYTES])
{
    char path_hash[17];
    hash_sha256_hex(bridge_path, strlen(bridge_path), 8, path_hash);
    snprintf(ret, SEGMENT_BYTES, "/commonweight-%s-%" PRIu64 ".%d.%" PRIu64 "-%s", path_hash,
             process_namespace(), (int)getpid(), process_start_time(getpid()), role);
}

enum status arena_canary(struct device *dev, const struct weights *w, uint64_t *ret_word)
{
    char *canary = (char *)w->base + w->canary_offset;
    uint64_t word = 0;
    device_copy_out(dev, &word, canary, sizeof word);
    enum status st = device_sync(dev);
    if (st != ST_OK) return st;
    const uint64_t complement = ~word;
    device_copy_in(dev, canary + sizeof word, &complement, sizeof complement);
    st = device_sync(dev);
    if (st == ST_OK) *ret_word = word;
    return st;
}

enum status arena_checksums(struct device *dev, const struct weights *w, uint64_t *sums)
{
    const size_t n = (size_t)w->n_tensors, element = dtype_size(w->dt);
    uint64_t *ranges = malloc(2 * n * sizeof *ranges); // offsets, then lengths
    if (!ranges) return status_fail(ST_NO_MEMORY, "no memory for %zu checksums", n);
    for (size_t i = 0; i < n; i++) {
        const struct weight_tensor *t = &w->tensors[i];
        ranges[i] = (uint64_t)t->offset * element;
        ranges[n + i] = (uint64_t)t->n * dtype_size(weights_tensor_dtype(w, t));
    }
    device_ops(dev)->checksum(dev, sums, w->base, ranges, ranges + n, w->n_tensors);
    free(ranges);
    return device_sync(dev);
}
