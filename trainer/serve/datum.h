/* datum.h: the one request of the Tinker API that comes as protobuf, and its response: datums (a
 * sequence, for each of its tokens what it is to predict, and what the loss wants of that), and
 * their log-probabilities. Plain data; any thread. */
// SPDX-License-Identifier: Apache-2.0
#ifndef TRAINER_SERVE_DATUM_H
#define TRAINER_SERVE_DATUM_H

#include "common/base/bytes.h"
#include "trainer/learn/loss.h"

struct datum {
    int32_t *tokens; // (n) the model's input
    int n;
    int each;                   // targets of a token: 1, or the K of target_tokens (n, K)
    bool two_d;                 // the latter
    int32_t *targets;           // (n, each)
    float *inputs[LOSS_INPUTS]; // (n, each); NULL: not given
};
#define ID_ROOM 200 // bytes of a session's, model's or sampling session's, with its end
struct forward_backward {
    char model_id[ID_ROOM]; // of the training run
    int64_t seq_id;         // from 1 on
    bool forward_only;      // no gradient; what the loss wants may be missing
    struct loss_config loss;
    bool stands_in;     // for the client's (--loss-for): what it does not know is passed over
    struct datum *data; // (n)
    int n;
};

struct datum_limits {
    int vocab;            // token ids are below
    int longest;          // tokens of a datum
    const char *loss_for; // "NAME=OTHER": OTHER is computed where NAME is asked for; or NULL
};
// ST_INVALID where that is no such pair, or OTHER no loss that is there.
enum status loss_for_check(const char *pair);
// The loss that it has for this name, within the pair; NULL: none.
const char *loss_for(const char *pair, const char *name);
// ST_INVALID, ST_FORMAT and ST_UNSUPPORTED name the datum and the field; ret has the model's id and
// the number, where these are good, all the same. What the message has beyond this (provenance
// spans) is passed over.
enum status forward_backward_parse(const char *body, size_t len, const struct datum_limits *limits,
                                   struct forward_backward *ret);
void forward_backward_release(struct forward_backward *request); // the datums

// The response: the log-probabilities (n, each) of all datums, one after the other, and the loss.
void forward_backward_response(const struct forward_backward *request, const float *logprobs,
                               double loss, struct bytes *to);

#endif
