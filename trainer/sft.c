/* sft.c: `cw-trainer sft`: learns completions by cross-entropy. The main thread.
 *
 * The same learner as GRPO's, on weights of its own instead of a server's: an example is a group of
 * one completion, and the loss is the mean over the step's completion tokens of -log p. Examples of
 * similar length need not meet, since nothing is padded.
 */
#include "trainer/sft.h"
#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/base/program.h"
#include "trainer/learn/memory.h"
#include "trainer/run/model_folder_write.h"
#include "trainer/run/runlog.h"
#include "trainer/run/sft_run.h"
#include "trainer/run/stop.h"

#include <inttypes.h>

struct cross_entropy {
    const struct example *const *examples; // of the step
    long n_tokens;                         // that are learnt
    double loss;
};

static void cross_entropy(void *context, const struct learner_rows *rows, float *ret_dlogprobs)
{
    struct cross_entropy *ce = context;
    const struct micro_batch *mb = rows->mb;
    for (int seq = 0; seq < mb->n_seqs; seq++) {
        const uint8_t *learnt = ce->examples[mb->sample[seq]]->learnt;
        for (int i = mb->first[seq]; i < mb->first[seq + 1]; i++) {
            ret_dlogprobs[i] = 0;
            if (learnt && !learnt[i - mb->first[seq]]) continue;
            ce->loss -= rows->logprobs[i] / (double)ce->n_tokens;
            ret_dlogprobs[i] = (float)(-1.0 / (double)ce->n_tokens);
        }
    }
}

// ret_skipped: the gradient was not finite, nothing was changed.
static enum status sft_step(struct sft *s, int64_t step, double *ret_loss, long *ret_tokens,
                            bool *ret_skipped)
{
    enum status st;
    int n = (int)s->config->examples_per_step;
    struct cross_entropy ce = {.examples = s->examples};
    double norm;
    for (int i = 0; i < n; i++) {
        const struct example *e = &s->data->examples[data_order_at(&s->order, step * n + i)];
        s->examples[i] = e;
        s->completions[i] =
            (struct pack_completion){.ids = e->completion_ids.ids, .n = e->completion_ids.n};
        s->groups[i] =
            (struct pack_group){e->prompt_ids.ids, e->prompt_ids.n, &s->completions[i], 1};
        for (int t = 0; t < e->completion_ids.n; t++) ce.n_tokens += !e->learnt || e->learnt[t];
    }
    CHECK(learner_gradients(s->learner, s->groups, n, cross_entropy, &ce));
    st = learner_clip(s->learner, &norm);
    *ret_skipped = st == ST_INVALID;
    if (*ret_skipped) return ST_OK;
    if (st != ST_OK) goto out;
    CHECK(learner_apply(s->learner, schedule_at(&s->schedule, step)));
    CHECK(device_sync(s->dev));
    *ret_loss = ce.loss;
    *ret_tokens = ce.n_tokens;
out:
    return st;
}

static enum status train_steps_all(struct sft *s)
{
    int64_t total = s->schedule.total_steps, start = clock_now_ns();
    int skipped = 0;
    double recent = 0; // loss, over the last logging_steps
    long tokens = 0;
    int64_t n_recent = 0, step = 0;
    char left[DURATION_ROOM];
    for (; step < total && !stop_requested(); step++) {
        double loss;
        long step_tokens;
        bool skip;
        enum status st = sft_step(s, step, &loss, &step_tokens, &skip);
        if (st != ST_OK) return st;
        if (step == 0) memory_say_taken(s->learner);
        if (skip) log_warn("step %" PRId64 ": %s", step + 1, status_message());
        st = learning_skipped(&skipped, skip, "the", "lower --learning-rate");
        if (st != ST_OK) return st;
        if (skip) continue;
        recent += loss;
        n_recent++;
        tokens += step_tokens;
        if ((step + 1) % s->config->logging_steps == 0 || step + 1 == total) {
            double seconds = clock_ms_since(start) / 1e3;
            double left_s = seconds / (double)(step + 1) * (double)(total - step - 1);
            log_progress("step %" PRId64 "/%" PRId64 "  loss %.4f  %.0f tokens/s  %s left",
                         step + 1, total, recent / (double)n_recent, (double)tokens / seconds,
                         duration_text(left_s, left));
            recent = 0;
            n_recent = 0;
        }
    }
    log_progress_end();
    if (step < total) log_warn("stopped at step %" PRId64 " of %" PRId64, step, total);
    return ST_OK;
}

static enum status check(void *context, struct option_set *set)
{
    const struct sft *s = context;
    (void)set;
    return sft_check(s->config);
}

static enum status run(void *context)
{
    struct sft *s = context;
    enum status st;
    const struct sft_config *c = s->config;
    stop_catch_signals();
    CHECK(sft_open(s));
    CHECK(train_steps_all(s));
    enum dtype as = c->dtype ? (enum dtype)(c->dtype - 1) : s->weights->dt;
    CHECK(model_folder_write(c->out, s->dev, s->weights, as, sft_tokenizer_folder(c), NULL, NULL));
    log_info("wrote %s", c->out);
out:
    sft_release(s);
    return st;
}

int sft_main(int argc, char **argv)
{
    struct sft_config config = {0};
    struct sft sft = {.config = &config};
    const struct program program = {
        .name = "cw-trainer",
        .command = "sft",
        .usage = "--model DIR | --init CONFIG.json --tokenizer DIR  --data FILE.jsonl --out DIR\n\n"
                 "Trains a model folder on prompts and completions, without a server.",
        .options = sft_options,
        .config = &config,
        .check = check,
        .run = run,
        .context = &sft,
    };
    return program_main(&program, argc, argv);
}
