/* adjust.c: penalties and biases on single logits, before a token is sampled, and their way back.
 * Only the tokens that a row lists are touched, so that a vocabulary costs nothing. */
#include "kernels/cpu/cpu.h"

static float adjusted(float z, const struct logit_row *row, const struct logit_entry *entry)
{
    z += entry->bias;
    if (entry->seen) z = z > 0 ? z / row->repetition : z * row->repetition;
    z -= row->frequency * (float)entry->count;
    if (entry->count > 0) z -= row->presence;
    return z;
}

void cpu_adjust_logits(struct device *dev, float *logits, float *saved,
                       const struct logit_row *rows, const struct logit_entry *entries, int n,
                       int vocab, bool undo)
{
    for (int i = 0; i < n; i++) {
        float *row = logits + (int64_t)rows[i].row * vocab;
        for (int e = rows[i].first; e < rows[i].first + rows[i].n; e++) {
            const int32_t token = entries[e].token;
            if (token < 0 || token >= vocab) {
                device_fail(dev, "adjust_logits: token %d is outside the vocabulary of %d", token,
                            vocab);
                return;
            }
            if (undo) {
                row[token] = saved[e];
            } else {
                saved[e] = row[token];
                row[token] = adjusted(row[token], &rows[i], &entries[e]);
            }
        }
    }
}
