/* training_request.h: requests of a training run, in the order of their numbers, on their way to
 * the main thread and back. Loop's thread, but for what performs them. */
#ifndef TRAINER_SERVE_TRAINING_REQUEST_H
#define TRAINER_SERVE_TRAINING_REQUEST_H

#include "trainer/learn/optimizer.h"
#include "trainer/serve/tinker.h"

struct training_request {
    struct request request;
    struct tinker *tinker;
    struct training_run *run;
    // what it is about
    struct forward_backward data;
    double lr;
    struct optimizer_config adamw;
    struct run_path path;
    bool named, with_optimizer, inflight; // path is there...
    char sampler[ID_ROOM];                // that is made of the snapshot then; "": none
    struct beginning beginning;           // of a run, but for its folder
    json_t *description;                  // likewise
    struct snapshot snapshot;             // of the weights, afterwards
};
// Main thread: does it, and sets the response.
typedef enum status (*training_perform)(struct trained_model *m, struct request *r);

// NULL: it was answered, with the promise that it has already or with 410.
enum status training_request_new(const struct call *c, struct training_run *run, int64_t seq_id,
                                 training_perform perform, struct training_request **ret);
// Does the same, of the run and the number that the call names.
enum status training_request_of(const struct call *c, training_perform perform,
                                struct training_request **ret);
// Takes it over. One that is wrong (st is not ST_OK) is one that came: it has its turn, and a
// response that says so.
void training_request_submit(struct training_request *r, const struct call *c, enum status st);

#endif
