/* rollout.h: asks the servers for completions of a list of prompts and takes them in. One thread at
 * a time for a source. */
// SPDX-License-Identifier: Apache-2.0
#ifndef TRAINER_ROLLOUT_H
#define TRAINER_ROLLOUT_H

#include "bridge/control.h"
#include "common/http/http_client.h"
#include "kernels/comm.h"
#include "trainer/rollout/completion.h"
#include "trainer/data/data.h"
#include "common/model/tandem_selector.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

struct sampling_options {             // what sampling is asked for
    double temperature, top_p, min_p; // temperature 0: greedy
    int64_t top_k, max_tokens;
    uint64_t seed;
    bool ignore_eos;
    bool text_offset; // the places of tokens in the text are wanted, too
    const char *stop; // NULL: none
    struct tandem_options {
        bool on;      // the server's frozen model writes with the policy
        int selector; // enum tandem_selector
        double p;
        int64_t chunk;
        bool shared; // all samples have the same authors at the same places
    } tandem;
};

struct learner_info;
struct rollout {
    int n_groups, n_per_group;
    const struct example **examples; // (n_groups) borrowed
    struct example *owned;           // (n_owned) what is this rollout's own; NULL: none
    int n_owned;
    // (n_groups) what the completions stand behind, where environments made it; empty: the
    // example's
    struct token_list *prompts;
    bool *exchanged; // (n_groups) which all ranks have
    // (n_groups) all completions of it that this rank pulls are there: whoever pulls touches it no
    // more, and another thread may take them
    _Atomic bool *whole;
    bool *gathered; // (n_groups) its completions were taken into another rollout: asked for no more
    struct completion *completions; // (n_groups, n_per_group)
    long n_tokens;                  // of the completions
    double seconds;                 // request to last line
};

struct rollout_worker { // a server that samples by a copy of the weights
    const char *name;
    // The model's name for POST /v1/completions, one group a request; NULL: POST /v1/rollouts.
    const char *completions_of;
    uint64_t version; // of its weights, all through a pull
    uint64_t copy_of; // version of the weights here that they are; its tokens are given that one
    // set by a pull, of which several may be under way
    _Atomic bool down; // it failed: it is given nothing more until the caller says that it is back
    _Atomic int n_samples, n_failures; // taken of it; times that it failed: both added up
};

struct rollout_server {            // one that samples
    const char *address;           // as http_client_new() takes it; NULL: the client's own
    const struct control *control; // of the weights that learn
    struct rollout_worker *worker; // NULL: it samples by those weights themselves
};
#define ROLLOUT_MAX_SERVERS 16

struct rollout_servers { // who samples; borrowed parts, filled by the caller
    struct http_client *http;
    // (n_servers, at least 1) the groups are divided among
    struct rollout_server servers[ROLLOUT_MAX_SERVERS];
    int n_servers;
    // Of the ranks that train together: each pulls its own groups of its own server, and has those
    // of all by rollout_exchange(). NULL: this one alone.
    struct comm *comm;
    const char *adapter; // that samples; NULL: the model itself
    int vocab_size;
    int timeout_ms, idle_timeout_ms;
    const _Atomic bool *cancelled; // set by another thread: a pull ends within 0.3 s; NULL: never
};

// Of one server, the client's own.
struct rollout_servers rollout_servers_of(struct http_client *http, const struct control *control,
                                          int vocab_size, double timeout_s);
// Without completions yet; the caller fills in its examples.
enum status rollout_new(int n_groups, int n_per_group, struct rollout **ret);
// Pulls the completions of all this rank's groups that have none. A server that is busy (429, 503)
// is asked again until the time-out; one that died is ST_PEER_GONE within a second; a response that
// is not what was asked for is ST_FORMAT or ST_MISMATCH, naming the group and the field. What is
// sampled does not depend on the number of servers. A worker that fails is down, which a warning
// says, and its groups are asked of the others; where none is left, its failure is the pull's, and
// what came whole stays: the rollout may be pulled again. After any other failure it is good for
// rollout_free() only.
enum status rollout_pull(const struct rollout_servers *source,
                         const struct sampling_options *sampling, struct rollout *r);
// Whether a group is this rank's to pull, as every size-th is, and has no completions yet.
bool rollout_wants(const struct rollout *r, const struct comm *comm, int group);
// What group's completions stand behind.
const struct token_list *rollout_prompt(const struct rollout *r, int group);
// The oldest weights that sampled a token of a group; UINT64_MAX: it has no token, or no versions.
uint64_t rollout_oldest(const struct rollout *r, int group);
// A completion of the group just came in: the group is whole where none is missing.
void rollout_group_came(struct rollout *r, int group);
// A group, which is whole where this rank pulled it, goes to another rollout of as many a group.
void rollout_gather(struct rollout *to, int group, struct rollout *from, int from_group);
// Takes the completions of groups with a token of weights before `oldest` away. How many groups.
int rollout_drop_older(struct rollout *r, uint64_t oldest);
struct rollout_learning {
    const float *advantages; // one a completion
    bool processed;          // the sampler's log-probabilities are those of what it sampled from
    bool mask_truncated;     // samples that hit the token limit do not count
    bool given;              // examples' completions follow, each behind its group
    const struct learner_info *learner; // parts that have no room there are taken away
    struct constraints *constraints; // the loss is of what they leave, of an example that has one;
                                     // NULL: of the whole distribution
};
// As the learner takes it; a warning says where parts were taken away. ret: begun; it borrows the
// rollout.
enum status rollout_samples(struct rollout *rollout, const struct rollout_learning *how,
                            struct samples **ret);
void rollout_free(struct rollout *r);

// ---- what is asked of servers -------------------------------------------------------------------

// What all that is asked for one rollout has in common. Who asks drives the client itself, and
// looks whether rollout_check() still is well.
struct rollout_pull {
    const struct rollout_servers *servers;
    const struct sampling_options *sampling;
    uint64_t oldest; // version of the weights when it began
    int64_t deadline;
    int n_asks; // that there are, of one size, of which a server has some at a time; 0: all at once
    int in_flight;
    int next; // the server whose turn it is, modulo their number
    struct {
        int in_flight;
        int64_t again_ns; // it was busy, and is asked again from then on
    } of[ROLLOUT_MAX_SERVERS];
};
struct rollout_ask {                // asked of one server, and of another where that one fails
    int server;                     // -1: of none yet
    struct http_transfer *transfer; // NULL: not in flight
};
struct rollout_pull rollout_pull_begin(const struct rollout_servers *servers,
                                       const struct sampling_options *sampling);
// ST_CANCELLED; or whose end it is without which nothing can be sampled.
enum status rollout_check(const struct rollout_servers *servers);
// Whether it can be asked now: of the server that it has, or of the one that has the fewest
// under way; of several such, each in its turn.
bool rollout_choose(struct rollout_pull *p, struct rollout_ask *a);
// Of the chosen one, whatever server the call names.
enum status rollout_ask(struct rollout_pull *p, struct rollout_ask *a,
                        const struct http_call *call);
void rollout_cancel(struct rollout_pull *p, struct rollout_ask *a); // where it is in flight
// False while it is under way. Its result is that of http_finish(); or ST_PEER_GONE where its
// server is down since another ask failed.
bool rollout_finish(struct rollout_pull *p, struct rollout_ask *a, struct bytes *ret_body,
                    enum status *ret_result);
// What is to be done where it failed by status_message(). ST_OK: it is to be asked again, since its
// server is busy; or is a worker, which is then down, as a warning says, and there are others.
// begun: some of it came.
enum status rollout_again(struct rollout_pull *p, struct rollout_ask *a, bool begun,
                          enum status st);
// Body of POST /v1/rollouts for a list of groups; takes their reference over (NULL: no memory, and
// so is the result).
json_t *rollout_request(const struct rollout_pull *p, json_t *groups);
// A group of such a list; NULL: no memory. format: a "response_format"; NULL: none.
json_t *rollout_group(const struct token_list *prompt, int id, int n, uint64_t seed,
                      const json_t *format);
// A line that is there in place of a sample, {"error"}, is ST_IO.
enum status rollout_check_line(const char *where, const json_t *line);
// One sample, as a line of /v1/rollouts has it; its tokens are then of versions of the weights
// here.
enum status rollout_read(const struct rollout_pull *p, const struct rollout_ask *a,
                         const char *where, const json_t *line, struct completion *ret);

// completion.c: each rank has pulled its own groups (rollout_wants()); then each has those of all.
// What was exchanged before is not sent again, unless it was dropped (rollout_drop_older()) and
// pulled anew. Of one rank nothing. ST_MISMATCH where another gives what is no group of its own.
// The thread that owns the communicator.
enum status rollout_exchange(struct comm *comm, struct rollout *r);
// Nothing of it is to be sent: all ranks have it already.
void rollout_is_everywhere(struct rollout *r);
// What that rank has in it, on all of them.
enum status rollout_broadcast(struct comm *comm, int rank, struct bytes *text);

// Tokens of context that the server serves (its --max-context); INT64_MAX, and a warning, where it
// does not say so.
enum status rollout_context(const struct rollout_servers *source, int64_t *ret);
// ST_INVALID where a prompt with that many new tokens is over the context that the server serves
// (its --max-context), which may be less than the model's. limit > 0: of the first `limit` prompts.
enum status rollout_check_context(const struct rollout_servers *source, const struct dataset *data,
                                  int64_t limit, int64_t max_completion_length);

#endif
