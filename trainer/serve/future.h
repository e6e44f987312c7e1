/* future.h: requests of the Tinker API whose answers are fetched later. Each has a number, by which
 * it is asked for (retrieve_future, held until the answer is there or FUTURE_HOLD_MS have passed),
 * and the name of what it is (a model's or a sampling session's, with the request's own number), by
 * which the same request, sent again, is known. Answers stay for FUTURE_KEEP_MS, and once they were
 * fetched for FUTURE_FETCHED_MS, for clients whose connection broke. Loop's thread. */
#ifndef TRAINER_SERVE_FUTURE_H
#define TRAINER_SERVE_FUTURE_H

#include "common/http/http.h"

#define FUTURE_HOLD_MS    30000
#define FUTURE_KEEP_MS    600000
#define FUTURE_FETCHED_MS 60000
#define FUTURE_ID_ROOM    40
#define FUTURE_KEY_ROOM   256

struct futures; // all that are there
struct future {
    struct futures *of;
    int64_t number;
    char key[FUTURE_KEY_ROOM];   // "MODEL 3"
    char owner[FUTURE_KEY_ROOM]; // the model or session
    int64_t seq_id;
    json_t *promise; // what is answered at once, each time it is sent
    // the answer
    enum { FUTURE_PENDING, FUTURE_DONE, FUTURE_FAILED } state;
    struct bytes answer;
    bool protobuf; // the answer; else JSON
    int64_t keep_until_ns;
    int64_t place;                // among its owner's that are done, from 1; 0: not done
    struct http_request *waiting; // for it; NULL: nobody
    int64_t hold_until_ns;
    struct future *next_done; // of the same owner, in order of place
};

enum status futures_new(struct futures **ret);
void futures_free(struct futures *f); // NULL is fine
// A new one, pending; NULL for want of memory, or (ST_BUSY) where too many are there.
struct future *future_new(struct futures *f, const char *owner, int64_t seq_id);
// The one of that name, where there is one.
struct future *future_of(struct futures *f, const char *owner, int64_t seq_id);
// By its id. NULL: it is gone, or of another process.
struct future *future_find(struct futures *f, const char *id);
// Whether the id is of this process.
bool futures_gave(const struct futures *f, const char *id);
void future_id(const struct future *u, char ret[FUTURE_ID_ROOM]);

// Answers with what the request is known by. `more`: further fields, taken; or NULL.
void future_promise(struct future *u, struct http_request *q, json_t *more);
// Ends it, and answers who waits: with JSON (taken), protobuf (taken), or the last error's
// sentence, which is the client's fault or not.
void future_done_json(struct future *u, json_t *answer);
void future_done_protobuf(struct future *u, struct bytes *answer);
void future_fail(struct future *u, enum status st);
// Answers now, or holds the request.
void future_retrieve(struct future *u, struct http_request *q);
// Ends what was held for long enough, and forgets what was done long ago. About every second.
void futures_sweep(struct futures *f);
// The first that is done of an owner's; `next_done` leads on.
struct future *futures_done_of(struct futures *f, const char *owner);
// Nobody asks for that owner's any more: what is known of it goes with its last future.
void futures_end_owner(struct futures *f, const char *owner);

#endif
