/* main.c: cw-word-problems, grade-school word problems of GSM8K's form, as many as asked for. One
 * thread.
 *
 * Problem i is sampled from its own random stream (seed, i) and the training problems come last, so
 * a larger --count begins with the problems of a smaller one. No question is given out twice, over
 * all files.
 */
// SPDX-License-Identifier: Apache-2.0
#include "common/base/hash.h"
#include "common/base/file.h"
#include "common/base/json.h"
#include "common/base/options.h"
#include "tools/word-problems/problem.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

struct config {
    const char *out;
    int64_t count, heldout, sft, seed;
    double careless;
    struct problem_options problem;
};

// ---- questions given out ------------------------------------------------------------------------

struct seen { // hashes of questions; open addressing, 0: free
    uint64_t *slots;
    size_t mask;
};

static bool seen_before(struct seen *s, const struct bytes *text) // and adds it
{
    const uint64_t mixed = hash_mix(hash_fnv1a(text->data, text->len)), hash = mixed ? mixed : 1;
    size_t at = hash & s->mask;
    for (; s->slots[at]; at = (at + 1) & s->mask)
        if (s->slots[at] == hash) return true;
    s->slots[at] = hash;
    return false;
}

// ---- the files ----------------------------------------------------------------------------------

struct source {
    const struct config *config;
    struct seen seen;
    uint64_t next; // problem to sample
    struct problem problem;
};

#define MAX_ATTEMPTS 1000

static enum status next_problem(struct source *s)
{
    struct rng rng;
    rng_init(&rng, (uint64_t)s->config->seed, s->next);
    for (int attempt = 0; attempt < MAX_ATTEMPTS; attempt++) {
        if (!problem_tell(&s->problem, &rng, &s->config->problem)) continue;
        if (s->problem.question.failed || s->problem.answer.failed || s->problem.careless.failed)
            return status_fail(ST_NO_MEMORY, "no memory for a problem");
        if (seen_before(&s->seen, &s->problem.question)) continue;
        s->next++;
        return ST_OK;
    }
    return status_fail(ST_INVALID,
                       "no new problem after %" PRIu64 " of them; lower --count, or raise "
                       "--max-number, --max-steps or --asides",
                       s->next);
}

// A line for training or held out, in GSM8K's form; or, for the warm start, from a teacher who is
// careless in a share of the problems.
static json_t *line_of(const struct source *s, bool warm_start, bool careless)
{
    const struct problem *p = &s->problem;
    if (!warm_start)
        return json_pack("{s:s, s:s, s:i}", "question", p->question.data, "answer", p->answer.data,
                         "steps", p->n_steps);
    return json_pack("{s:s, s:s}", "prompt", p->question.data, "completion",
                     careless ? p->careless.data : p->answer.data);
}

static enum status write_file(struct source *s, const char *name, int64_t count, bool warm_start)
{
    enum status st;
    struct bytes text = BYTES_INIT;
    struct rng teacher;
    char path[PATH_ROOM];
    rng_init(&teacher, (uint64_t)s->config->seed, UINT64_MAX);
    CHECK(path_put(path, s->config->out, "%s", name));
    for (int64_t i = 0; i < count; i++) {
        CHECK(next_problem(s));
        bool careless = rng_uniform(&teacher) < (float)s->config->careless;
        CHECK(json_put_line(&text, line_of(s, warm_start, careless), 0));
    }
    CHECK(file_write_atomic(path, 0644, bytes_text(&text), text.len));
    printf("%s: %" PRId64 " problems\n", path, count);
out:
    bytes_release(&text);
    return st;
}

static enum status write_all(void *context)
{
    const struct config *c = context;
    enum status st;
    struct source s = {.config = c};
    char tokenizer[PATH_ROOM];
    size_t slots = 16;
    while (slots < 2 * (size_t)(c->count + c->heldout + c->sft)) slots *= 2;
    s.seen.mask = slots - 1;
    s.seen.slots = calloc(slots, sizeof *s.seen.slots);
    if (!s.seen.slots) FAIL(ST_NO_MEMORY, "no memory for %zu problems", slots / 2);
    CHECK(path_put(tokenizer, c->out, "tokenizer"));
    CHECK(file_make_folders(tokenizer));
    CHECK(word_tokenizer_write(tokenizer));
    CHECK(write_file(&s, "heldout.jsonl", c->heldout, false));
    if (c->sft) CHECK(write_file(&s, "sft.jsonl", c->sft, true));
    CHECK(write_file(&s, "train.jsonl", c->count, false));
out:
    problem_release(&s.problem);
    free(s.seen.slots);
    return st;
}

// ---- main ---------------------------------------------------------------------------------------

#define OPTIONS_OF struct config
static const struct option_spec options[] = {
    OPT_TEXT("out", out, NULL, "DIR", "folder to write into; made where needed"),
    OPT_INT("count", count, "10000", "N", 1, 1e7, "problems in train.jsonl"),
    OPT_INT("heldout", heldout, "500", "N", 1, 1e6, "problems in heldout.jsonl"),
    OPT_INT("sft", sft, "0", "N", 0, 1e7,
            "problems in sft.jsonl, for a warm start; 0: no such file"),
    OPT_DOUBLE("careless", careless, "0", "SHARE", 0, 1,
               "of the problems of sft.jsonl with several steps: the last one is left out"),
    OPT_INT("min-steps", problem.min_steps, "1", "N", 1, PROBLEM_MAX_STEPS,
            "steps to the answer, at least"),
    OPT_INT("max-steps", problem.max_steps, "4", "N", 1, PROBLEM_MAX_STEPS, "at most"),
    OPT_INT("max-number", problem.max_number, "99", "N", 12, 1e6,
            "largest number in a problem; results go up to five times that"),
    OPT_DOUBLE("asides", problem.asides, "0.2", "SHARE", 0, 1,
               "of the steps that have a sentence before them which does not matter"),
    OPT_INT("seed", seed, "1", "N", 0, 1e15, "of all that is random"),
    OPT_END,
};

static enum status check(void *context, struct option_set *set)
{
    const struct config *c = context;
    (void)set;
    if (!c->out) return status_fail(ST_INVALID, "--out is missing: the folder to write into");
    if (c->problem.min_steps > c->problem.max_steps)
        return status_fail(ST_INVALID, "--min-steps %" PRId64 " is above --max-steps %" PRId64,
                           c->problem.min_steps, c->problem.max_steps);
    return ST_OK;
}

int main(int argc, char **argv)
{
    struct config config = {0};
    const struct program program = {
        .name = "cw-word-problems",
        .usage = "--out DIR [options]\n\n"
                 "Writes word problems: train.jsonl and heldout.jsonl as GSM8K has them "
                 "({\"question\", \"answer\"},\nthe answer worked out and ending on \"#### N\"), "
                 "sft.jsonl for a warm start ({\"prompt\",\n\"completion\"}), no problem in two "
                 "of them, and tokenizer/ for their words.",
        .options = options,
        .config = &config,
        .check = check,
        .run = write_all,
        .context = &config,
    };
    return program_main(&program, argc, argv);
}
