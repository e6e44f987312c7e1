/* sample_blocks.h: a sample's block table, and the prefix cache as it meets samples: what a sample
 * begins with, and what it leaves for others. For the scheduler; the engine's thread. */
#ifndef INFER_SERVER_SAMPLE_BLOCKS_H
#define INFER_SERVER_SAMPLE_BLOCKS_H

#include "infer-server/engine/block_manager.h"
#include "infer-server/engine/request.h"

// Blocks for the first n tokens; false, with nothing taken, where too few are free.
bool sample_blocks_grow(struct block_manager *m, struct sample *sample, int n_tokens);
// Begins the table with n blocks of others (which may stand in it already), all computed.
void sample_blocks_share(struct block_manager *m, struct sample *sample, const int32_t *blocks,
                         int n);
// Gives back what lies behind the first n tokens; what others share of the rest stays.
void sample_blocks_trim(struct block_manager *m, struct sample *sample, int n_tokens);
// Gives all back: nothing is computed any more.
void sample_blocks_drop(struct block_manager *m, struct sample *sample);

// Puts its full blocks into the prefix cache, those that weights of this version alone computed.
void sample_blocks_cache(struct block_manager *m, struct sample *sample, uint64_t version);
// The run of blocks from the front that a waiting sample can begin with: into its block table, not
// referenced yet. *ret_free of them nobody references.
int sample_blocks_find(const struct block_manager *m, struct sample *sample, uint64_t version,
                       int *ret_free);

#endif
