/* dataset_examples.c: the examples of a supervised run or of one by preferences: read, and put into
 * the learner's groups. The main thread; logs what is left out.
 *
 * A pair is one file read twice, each time with another completion behind the same prompt. Its two
 * completions are one group, so that the prompt is computed once, and stay in one micro-batch,
 * since the loss compares them. */
#include "trainer/learn/step.h"
#include "trainer/run/notices.h"
#include "common/model/config.h"
#include "trainer/data/data.h"
#include "trainer/run/dataset_run.h"
#include "trainer/run/stop.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

static void say_turns(const struct dataset *d, const struct train_config *c)
{
    if (d->turns.several == 0) return;
    if (!c->all_turns)
        log_info("%s: %" PRId64 " conversations have several turns of the assistant, of which the "
                 "last alone is learnt; --train-on all learns every one",
                 d->path, d->turns.several);
    else
        log_info("%s: of %" PRId64 " conversations every turn of the assistant is learnt", d->path,
                 d->turns.several);
    if (c->all_turns && d->turns.learnt < d->turns.earlier)
        log_warn("%s: but for %" PRId64 " of %" PRId64 " turns before the last, which the chat "
                 "template renders otherwise once others follow; they are not learnt",
                 d->path, d->turns.earlier - d->turns.learnt, d->turns.earlier);
}

static enum status load_side(const struct run *run, const char *path, int64_t limit,
                             const char *side, struct dataset **ret)
{
    const struct train_config *c = run->config;
    int left_out;
    struct prompt_options options = c->prompts;
    options.max_samples = limit;
    options.completions = true;
    options.all_turns = c->all_turns;
    options.side = side;
    options.end_id = run->mapped.model->n_eos ? run->mapped.model->eos_ids[0] : -1;
    enum status st = prompts_load(path, dataset_tokenizer_folder(c), run->mapped.model->vocab_size,
                                  &options, ret, &left_out);
    if (st != ST_OK) return st;
    if (side && strcmp(side, run->task->side_fields[0]) != 0) return ST_OK; // it has been said
    notice_data(*ret, left_out);
    if (!side) say_turns(*ret, c);
    return ST_OK;
}

static bool same_ids(const struct token_list *a, const struct token_list *b)
{
    return a->n == b->n && memcmp(a->ids, b->ids, (size_t)a->n * sizeof *a->ids) == 0;
}

static enum status check_pairs(const struct dataset *a, const struct dataset *b)
{
    for (int i = 0; i < a->n && i < b->n; i++)
        if (!same_ids(&a->examples[i].prompt_ids, &b->examples[i].prompt_ids))
            return status_fail(ST_FORMAT,
                               "%s, line %d: the conversations \"chosen\" and \"rejected\" differ "
                               "before their last message; give a \"prompt\" that both follow",
                               a->path, a->examples[i].line);
    return a->n == b->n ? ST_OK
                        : status_fail(ST_FORMAT,
                                      "%s: prompts of one length are left out of one "
                                      "side alone",
                                      a->path);
}

static void note_lengths(struct run *run, const struct dataset_examples *data)
{
    struct dataset_run *given = run->given;
    for (int i = 0; i < data->n; i++) {
        int64_t all = data->sides[0]->examples[i].prompt_ids.n;
        const int64_t prompt = all;
        for (int k = 0; k < run->task->sides; k++) {
            const int64_t n = data->sides[k]->examples[i].completion_ids.n;
            all += n;
            if (prompt + n > given->longest) given->longest = prompt + n;
        }
        if (all > given->widest) given->widest = all;
    }
}

enum status dataset_examples_load(struct run *run, const char *path, int64_t limit,
                                  struct dataset_examples *ret)
{
    enum status st = ST_OK;
    struct dataset_examples data = {0};
    for (int k = 0; k < run->task->sides; k++)
        CHECK(load_side(run, path, limit, run->task->side_fields[k], &data.sides[k]));
    if (run->task->sides > 1) CHECK(check_pairs(data.sides[0], data.sides[1]));
    data.n = data.sides[0]->n;
    note_lengths(run, &data);
    *ret = data;
out:
    if (st != ST_OK) dataset_examples_release(&data);
    return st;
}

void dataset_examples_release(struct dataset_examples *data)
{
    for (int k = 0; k < TASK_SIDES; k++) dataset_free(data->sides[k]);
    free(data->reference);
    *data = (struct dataset_examples){0};
}

enum status dataset_samples(const struct run *run, const struct dataset_examples *data,
                            const int *items, int n, struct samples **ret)
{
    const int sides = run->task->sides;
    struct samples *samples = NULL;
    enum status st = samples_new(n, sides, &samples);
    if (st != ST_OK) return st;
    for (int i = 0; i < n; i++) {
        const int item = items ? items[i] : i;
        const struct token_list *prompt = &data->sides[0]->examples[item].prompt_ids;
        samples->groups[i].prompt = prompt->ids;
        samples->groups[i].n_prompt = prompt->n;
        samples->groups[i].whole = sides > 1;
        for (int k = 0; k < sides; k++) {
            const struct example *e = &data->sides[k]->examples[item];
            samples->completions[i * sides + k] = (struct pack_completion){
                .ids = e->completion_ids.ids,
                .n = e->completion_ids.n,
                .advantage = 1,
                .authors = e->learnt,
                .reference = data->reference ? data->reference[item * sides + k] : 0,
            };
        }
    }
    return samples_begin(samples, ret);
}

#define MEASURED_SAID 1000 // passes between two lines of progress

enum status dataset_measure(struct run *run, struct dataset_examples *data)
{
    const int each = (int)run->config->curriculum.prompts_per_step;
    struct samples *samples = NULL;
    enum status st;
    CHECK(dataset_samples(run, data, NULL, data->n, &samples));
    data->reference = calloc((size_t)samples->n, sizeof *data->reference);
    if (!data->reference) FAIL(ST_NO_MEMORY, "no memory for the reference");
    for (int at = 0; at < data->n; at += each) {
        const int n = data->n - at < each ? data->n - at : each;
        bool stop = stop_requested();
        CHECK(learner_pass(run->learner, PASS_NOTE, samples, at, n, NULL, NULL));
        CHECK(train_ranks_any(&run->ranks, &stop));
        if (stop) {
            log_progress_end();
            log_warn("a signal: the reference was not finished");
            FAIL(ST_CANCELLED, "told to end while the reference was computed");
        }
        if (at / each % MEASURED_SAID == MEASURED_SAID - 1)
            log_progress("reference: %d of %d pairs", at + n, data->n);
    }
    for (int i = 0; i < samples->n; i++)
        for (long t = samples->first[i]; t < samples->first[i + 1]; t++)
            data->reference[i] += samples->logprobs[t]; // 0 where another rank has it
    CHECK(comm_sum_host(learner_info(run->learner)->comm, data->reference, samples->n));
    log_progress_end();
out:
    samples_free(samples);
    return st;
}
