/* spec_metrics.c: what a run writes and logs of speculative decoding. Stateless; the main thread.
 * The wording of the log line is vLLM's, so that what reads its logs reads these. */
#include "trainer/run/spec_metrics.h"
#include "trainer/run/runlog.h"

#include <stdio.h>

void spec_counters_put(const struct spec_counters *c, json_t *metrics)
{
    if (!c->present) return;
    metrics_put(metrics, "spec_decode/num_drafts", c->num_drafts);
    metrics_put(metrics, "spec_decode/num_draft_tokens", c->num_draft_tokens);
    metrics_put(metrics, "spec_decode/num_accepted_tokens", c->num_accepted_tokens);
    metrics_put(metrics, "spec_decode/acceptance_rate", spec_acceptance_rate(c));
    metrics_put(metrics, "spec_decode/acceptance_length", spec_acceptance_length(c));
    for (int i = 0; i < c->n_positions; i++) {
        metrics_putf(metrics, spec_acceptance_at(c, i), "spec_decode/acceptance_rate_pos_%d", i);
    }
}

void spec_counters_say(const struct spec_counters *c, double seconds, struct bytes *ret)
{
    bytes_printf(ret,
                 "SpecDecoding metrics: Mean acceptance length: %.2f, Accepted throughput: %.2f "
                 "tokens/s, Drafted throughput: %.2f tokens/s, Accepted: %.0f tokens, Drafted: "
                 "%.0f tokens, Per-position acceptance rate: ",
                 spec_acceptance_length(c), c->num_accepted_tokens / seconds,
                 c->num_draft_tokens / seconds, c->num_accepted_tokens, c->num_draft_tokens);
    for (int i = 0; i < c->n_positions; i++)
        bytes_printf(ret, "%s%.3f", i ? ", " : "", spec_acceptance_at(c, i));
    bytes_printf(ret, ", Avg Draft acceptance rate: %.1f%%", 100 * spec_acceptance_rate(c));
}
