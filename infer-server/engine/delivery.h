/* delivery.h: tells submitters what became of their samples, and keeps each sample's times and
 * telemetry. The last event of a sample takes it out of the scheduler; after its request's last
 * event neither may be touched. The engine's thread. */
#ifndef INFER_SERVER_DELIVERY_H
#define INFER_SERVER_DELIVERY_H

#include "infer-server/engine/scheduler.h"

struct delivery {
    engine_event_fn on_event;
    void *context;
    struct scheduler *scheduler;
    struct engine_stats *stats; // where tokens and ends are counted
    int64_t block_bytes;        // in all runners' pools
};

void delivery_started(const struct step *step, int64_t now_ns);
// The sample's last token, or one before it where several came at once: the n-th it has.
void deliver_token(const struct delivery *d, struct sample *sample, int n,
                   const struct token_record *token, const struct top_logprob *top,
                   enum finish_reason finish, int64_t now_ns);
// A sample of max_tokens 0 ends with its prompt; what was sampled behind it is dropped.
void deliver_prompt(const struct delivery *d, struct sample *sample, uint64_t version,
                    int64_t now_ns);
void deliver_end(const struct delivery *d, struct sample *sample, enum finish_reason finish,
                 const char *error);

#endif
