/* programs.h: the real cw-infer-server, and other programs of this build, beside a benchmark: in a
 * temporary folder, which also holds the model where its weights are random. One thread. */
#ifndef TOOLS_BENCH_PROGRAMS_H
#define TOOLS_BENCH_PROGRAMS_H

#include "tools/bench/bench.h"
#include <sys/types.h>

struct programs {
    char folder[64]; // temporary
    char model[96];  // inside it: written, or a link to --model
    char bridge[96], socket[96], log[96];
    pid_t server;
};

// Release with programs_close(), whatever became of it: stops the server, removes the folder.
enum status programs_open(struct programs *p);
void programs_close(struct programs *p);
// Writes the model where its weights are random, and gives their memory back: the programs need it.
enum status programs_take_model(struct programs *p, struct bench *b);
// Returns when it serves. max_batch: of the server; more: of its options, "" for none.
enum status programs_serve(struct programs *p, const struct bench_options *o, int max_batch,
                           const char *more);
// Runs another program of this build to its end: words with blanks between them.
enum status programs_run(const struct programs *p, const char *command, int64_t seconds);

#endif
