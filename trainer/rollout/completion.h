/* completion.h: one finished completion as the server gives it, checked before it is believed.
 * Plain data; any thread. */
// SPDX-License-Identifier: Apache-2.0
#ifndef TRAINER_COMPLETION_H
#define TRAINER_COMPLETION_H

#include "common/base/bytes.h"
#include "trainer/learn/samples.h"
#include <jansson.h>
#include <stdint.h>

struct completion {
    int n;            // tokens; 0 is possible
    int32_t *ids;     // (n)
    float *logprobs;  // (n) of the server's temperature-scaled distribution
    float *processed; // (n) of the filtered one, which was sampled from; NULL: nothing was filtered
    uint64_t *versions; // (n) of the weights that sampled each token; NULL: nobody tells
    uint8_t *authors;   // (n) enum token_author, the log-probability is that of the model which
                        // wrote the token; NULL: the policy wrote all
    bool truncated;     // ended at the token limit
    char *text;         // as the server decoded it, U+0000 as U+2400; "" where it has no tokenizer
    // Where it is of several sequences (samples.h), each of which stands behind the prompt anew.
    struct pack_part *parts; // (n_parts); NULL: one, right behind the prompt
    int32_t *sequences;      // (n_sequences) each part's context and tokens
    int n_parts, n_sequences;
    uint8_t *accepted; // (n) place among its step's accepted drafts, 0: none; NULL: nothing drafted
    int32_t *text_offset; // (n) characters of text before each token; NULL: not given
    json_t *telemetry;    // docs/use/protocol.md, POST /v1/rollouts; may be NULL
    float *advantages;    // (n) of each token, in place of the sample's; NULL: the sample's
    // Of an environment: its rewards in their order, and how many tokens come before each.
    struct completion_reward {
        double reward;
        int after;
    } * rewards;   // (n_rewards)
    int n_rewards; // 0: no environment
};

// Sum of the environment's.
double completion_reward(const struct completion *c);

struct completion_bounds { // of what was asked for
    int vocab_size, max_tokens;
    bool tandem;             // a frozen model writes too: which tokens must be said
    bool filtered;           // by top-k, top-p or min-p: processed log-probabilities must be there
    uint64_t oldest, newest; // versions that the weights had since
};
// Out of a line of the response; `where` names it in errors: ST_FORMAT, ST_MISMATCH with the field.
enum status completion_read(const char *where, const json_t *line,
                            const struct completion_bounds *bounds, struct completion *ret);
void completion_release(struct completion *c);

// The first token that a model wrote; n: there is none.
int completion_first_sampled(const struct completion *c);
// Takes the first tokens of it, or of each part's context, away.
void completion_cut(struct completion *c, int first);
// Takes all but the first parts away.
void completion_keep_parts(struct completion *c, int parts);

// As bytes, for processes of one program on processors of one byte order: blocks, each with its
// length before it.
struct packed { // what has not been read of such bytes
    const char *at, *end;
};
enum status completion_pack(const struct completion *c, struct bytes *to);
// The next one. ST_FORMAT, and nothing is read, where it is not whole.
enum status completion_unpack(struct packed *from, struct completion *ret);

#endif
