/* rollout.h: asks the daemon for samples of a list of prompts and takes them in. One POST for all
 * the groups of a step; every line of the answer is checked before it is believed. One thread. */
#ifndef TRAINER_ROLLOUT_H
#define TRAINER_ROLLOUT_H

#include "bridge/control.h"
#include "common/http/http_client.h"
#include "trainer/rollout/data.h"

struct completion {
    int n;              // completion tokens; 0 is possible
    int32_t *ids;       // (n)
    float *logprobs;    // (n) of the daemon's temperature-scaled distribution
    uint64_t *versions; // (n) of the weights that drew each token
    bool truncated;     // ended at the token limit
    char *text;         // as the daemon decoded it, U+0000 as U+2400; "" where it has no tokenizer
    uint8_t *accepted; // (n) place among its step's accepted drafts, 0: none; NULL: nothing drafted
    int32_t *text_offset; // (n) characters of text before each token; NULL: not told
    json_t *telemetry;    // docs/protocol.md, POST /v1/rollouts; may be NULL
};
struct rollout {
    int n_groups, n_per_group;
    const struct example **examples; // (n_groups) borrowed
    struct completion *samples;      // (n_groups, n_per_group)
    long n_tokens;                   // of the completions
    double seconds;                  // request to last line
};

struct sampling_options {
    double temperature, top_p, min_p; // temperature 0: greedy
    int top_k, max_tokens;
    uint64_t seed;
    bool ignore_eos;
    const char *stop; // NULL: none
};

struct rollout_source { // borrowed parts, filled by the caller
    struct http_client *http;
    struct control *control;
    int vocab_size;
    int timeout_ms, idle_timeout_ms;
};

// Pulls n samples for each of n_groups examples. A daemon that is busy (429, 503) is asked again
// until the time-out; one that died is ST_PEER_GONE within a second; an answer that is not what was
// asked for is ST_FORMAT or ST_MISMATCH, naming the group and the field.
enum status rollout_pull(const struct rollout_source *source, const struct example *const *examples,
                         int n_groups, int n_per_group, const struct sampling_options *sampling,
                         struct rollout **ret);
void rollout_free(struct rollout *r);

// ST_INVALID where a prompt with that many new tokens is over the context that the daemon serves
// (its --max-context), which may be less than the model's. limit > 0: of the first `limit` prompts.
enum status rollout_check_context(const struct rollout_source *source, const struct dataset *data,
                                  int64_t limit, int64_t max_completion_length);

#endif
