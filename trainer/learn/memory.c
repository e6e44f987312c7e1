/* memory.c: two log lines of cw-trainer train and sft. No state. */
#include "trainer/learn/learner.h"
#include "common/base/log.h"
#include "trainer/learn/param_range.h"

#include <inttypes.h>

static double mib(size_t bytes)
{
    return (double)bytes / (1024 * 1024);
}

void memory_say(const struct learner *l, const char *weights, const char *freeze)
{
    struct memory_plan p;
    const struct param_ranges *trained = learner_trained(l);
    learner_memory(l, &p);
    if (trained->list[0].weights != learner_policy(l))
        log_info("the adapter's %" PRId64 " parameters are trained, beside %" PRId64
                 " of the model",
                 param_ranges_parameters(trained), learner_policy(l)->n_parameters);
    if (freeze && freeze[0])
        log_info("--freeze %s: %" PRId64 " of %" PRId64 " parameters are trained", freeze,
                 param_ranges_parameters(trained), trained->list[0].weights->n_parameters);
    log_info("memory on %s (MiB): weights %.1f %s, residual %.1f, moments %.1f, gradients "
             "%.1f, activations %.1f, workspace %.1f, reference %.1f, draft %.1f; total %.1f of "
             "%.1f free",
             device_spec(learner_device(l)), mib(p.weights_shared), weights, mib(p.residual),
             mib(p.moments), mib(p.gradients), mib(p.activations), mib(p.workspace),
             mib(p.reference), mib(p.draft), mib(p.total), mib(p.free));
}

void memory_say_taken(const struct learner *l)
{
    struct memory_plan p;
    size_t left, total;
    learner_memory(l, &p);
    bool known = device_kind(learner_device(l)) == DEVICE_CUDA &&
                 device_memory(learner_device(l), &left, &total) == ST_OK;
    if (known)
        log_info("memory after the first step (MiB): %.1f taken, %.1f planned; %s has %.1f less "
                 "free",
                 mib(learner_memory_taken(l)), mib(p.total), device_spec(learner_device(l)),
                 ((double)p.free - (double)left) / (1024 * 1024));
    else
        log_info("memory after the first step (MiB): %.1f taken, %.1f planned",
                 mib(learner_memory_taken(l)), mib(p.total));
}
