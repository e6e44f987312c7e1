/* decode.h: a decoding batch as the engine has it: upload, model step, sampling, read-back. One
 * thread. */
#ifndef TOOLS_BENCH_DECODE_H
#define TOOLS_BENCH_DECODE_H

#include "infer-server/engine/runner.h"
#include "tools/bench/bench.h"

struct decoder {
    struct bench *b;
    struct runner *runner;
    int n, blocks_each;
    int32_t *tokens; // (n) last token of each sequence
    int32_t *blocks; // (n, blocks_each)
};

// b->o.batch sequences with b->o.context tokens behind each. Close whatever became of it.
enum status decoder_open(struct decoder *d, struct bench *b);
void decoder_close(struct decoder *d);
// One step of the whole batch at position `context`; the same position every time, so that every
// step does the same work. Waits.
enum status decoder_step(void *decoder);

#endif
