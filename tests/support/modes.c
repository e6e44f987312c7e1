/* modes.c: see modes.h. Stateless. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/modes.h"
#include "common/base/rng.h"
#include "tests/support/support.h"
#include "trainer/run/config.h"

#define TRIES 60 // runs that one is chosen of

const struct mode_row modes[N_MODES] = {
    [ASYNC] = {"async", {"--async"}},
    [BUDGET] = {"rollout-budget", {"--async", "--max-staleness", "2", "--rollout-budget", "0.5"}},
    [LORA] = {"LoRA", {"--lora-r", "4"}},
    [DRAFT] = {"draft trained along", {"--train-draft"}},
    [TANDEM] = {"tandem", {"--tandem", "--no-tandem-shared"}},
    [ENVIRONMENT] = {"environment", {"--rollouts", "command:{environment}"}},
    [ATROPOS] = {"Atropos", {"--atropos", "http://{atropos}", "--max-steps", "3"}},
    [WORKERS] = {"workers", {"--workers", "{worker}"}},
    [CHECKPOINT] = {"checkpoint",
                    {"--sync", "checkpoint", "--model", "{model}", "--draft", "{draft}",
                     "--server-args", "{server-args}"}},
    [CURRICULUM] = {"curriculum", {"--curriculum", "kde"}},
    [COST] = {"cost",
              {"--cost", "--cost-latency", "0", "--cost-kv", "0", "--gain-cache", "0",
               "--gain-acceptance", "0"}},
    [FILTER] = {"filter-groups", {"--filter-groups", "2"}},
    [BETA] = {"beta", {"--beta", "0.04"}},
    [EIGHT_BIT] = {"8-bit moments", {"--optim-moments", "8bit"}},
    [TEACHER] = {"teacher", {"--teacher", "{draft}"}},
};

enum status modes_check(mode_set set, bool several_ranks)
{
    char *argv[N_MODES * MODE_WORDS + 3] = {"train"};
    int argc = 1;
    struct train_config config = {0};
    struct train_resolved resolved;
    struct option_set *options = NULL;
    for (int m = 0; m < N_MODES; m++)
        for (int i = 0; set & MODE(m) && i < MODE_WORDS && modes[m].words[i]; i++)
            argv[argc++] = (char *)modes[m].words[i];
    if (!(set & MODE(ATROPOS))) argv[argc++] = "--data=prompts.jsonl";
    assert_int_equal(
        options_parse(train_options, "train", "", argc, argv, 0, &config, NULL, &options),
        OPTIONS_OK);
    config.several_ranks = several_ranks;
    const enum status st = train_config_resolve(&config, options, &resolved);
    options_free(options);
    return st;
}

// ---- the array ----------------------------------------------------------------------------------

// What is to be seen: [a][b]: both on one rank (bit 0), both on two (bit 1), a without b (bit 2).
typedef uint8_t pairs[N_MODES][N_MODES];

static int add_pairs(pairs seen, const struct mode_run *run, const pairs wanted, bool mark)
{
    int n = 0;
    for (int a = 0; a < N_MODES; a++)
        for (int b = 0; b < N_MODES; b++) {
            if (a == b || !(run->set & MODE(a))) continue;
            const int bit = run->set & MODE(b) ? 1 << (run->ranks - 1) : 4;
            n += (wanted[a][b] & bit) && !(seen[a][b] & bit);
            if (mark) seen[a][b] |= (uint8_t)bit;
        }
    return n;
}

static mode_set partners(const pairs wanted, int mode)
{
    mode_set set = MODE(mode);
    for (int b = 0; b < N_MODES; b++)
        if (wanted[mode][b] & 3) set |= MODE(b);
    return set;
}

// Modes in the order of chance, each taken where that shows more than to leave it.
static struct mode_run try_run(struct rng *r, pairs seen, const pairs wanted)
{
    int order[N_MODES];
    struct mode_run run = {.ranks = 1 + (int)rng_below(r, 2)};
    mode_set open = MODE(N_MODES) - 1;
    for (int i = 0; i < N_MODES; i++) {
        const int k = (int)rng_below(r, (uint32_t)i + 1);
        order[i] = order[k];
        order[k] = i;
    }
    for (int i = 0; i < N_MODES; i++) {
        struct mode_run with = {run.set | MODE(order[i]), run.ranks};
        if (!(open & MODE(order[i]))) continue;
        if (add_pairs(seen, &with, wanted, false) < add_pairs(seen, &run, wanted, false)) continue;
        run = with;
        open &= partners(wanted, order[i]);
    }
    return run;
}

int modes_cover(struct mode_run ret[MODE_RUNS])
{
    pairs wanted = {{0}}, seen = {{0}};
    struct rng r;
    rng_init(&r, 1, 0);
    for (int a = 0; a < N_MODES; a++)
        for (int b = 0; b < N_MODES; b++)
            for (int k = 0; k < 2 && a != b; k++)
                if (modes_check(MODE(a) | MODE(b), k) == ST_OK)
                    wanted[a][b] |= (uint8_t)(1 << k | 4);
    for (int n = 0; n < MODE_RUNS; n++) {
        int max = 0;
        for (int i = 0; i < TRIES; i++) {
            const struct mode_run run = try_run(&r, seen, wanted);
            const int shows = add_pairs(seen, &run, wanted, false);
            if (shows > max) ret[n] = run;
            if (shows > max) max = shows;
        }
        if (max == 0) return n;
        add_pairs(seen, &ret[n], wanted, true);
    }
    fail_msg("the array takes more than %d runs", MODE_RUNS);
    return 0;
}
