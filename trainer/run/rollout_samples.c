/* rollout_samples.c: from the transport's structs to the learner's. No state. */
#include "trainer/run/rollout_samples.h"

enum status rollout_samples(const struct rollout *r, const float *advantages, bool processed,
                            bool mask_truncated, struct samples **ret)
{
    struct samples *s = NULL;
    enum status st = samples_new(r->n_groups, r->n_per_group, &s);
    if (st != ST_OK) return st;
    for (int g = 0; g < r->n_groups; g++) {
        s->groups[g].prompt = rollout_prompt(r, g)->ids;
        s->groups[g].n_prompt = rollout_prompt(r, g)->n;
    }
    for (int i = 0; i < s->n; i++) {
        const struct completion *c = &r->completions[i];
        s->completions[i] = (struct pack_completion){
            .ids = c->ids,
            .n = c->n,
            .masked = mask_truncated && c->truncated,
            .advantage = advantages[i],
            .inputs = {[INPUT_ADVANTAGES] = c->advantages,
                       [INPUT_LOGPROBS] = processed && c->processed ? c->processed : c->logprobs},
            .authors = c->authors,
            .server_logprobs = c->logprobs,
            .versions = c->versions,
            .line = r->examples[i / r->n_per_group]->line,
            .number = i % r->n_per_group,
        };
    }
    return samples_begin(s, ret);
}
