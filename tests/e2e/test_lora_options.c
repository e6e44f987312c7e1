/* test_lora_options.c: every option of cw-trainer train that says something else beside --lora-r:
 * each works, or is refused in a sentence that names it. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/training.h"

enum { WORDS = 8 };
#define LORA "--lora-r", "4", "--lora-alpha", "8", "--max-steps", "2"

static struct scene s;

static void open_scene(void)
{
    scene_open(&s);
    daemon_kill(&s.daemon);
    daemon_start(&s.daemon, s.model,
                 OPTIONS("--exact", "--dtype", daemon_exact_dtype(), "--max-adapters", "3",
                         "--max-lora-rank", "8", "--tandem-model", s.model, "--draft", s.model));
}

static void close_scene(void)
{
    scene_close(&s);
}

// Where it is there. Its scale and targets are a run's own.
static void unload(const char *name)
{
    char body[64];
    struct wire_answer a;
    snprintf(body, sizeof body, "{\"lora_name\":\"%s\"}", name);
    daemon_request(s.daemon.socket, "POST", "/v1/unload_lora_adapter", "", body, &a);
}

struct option_case {
    int status; // of the trainer
    const char *words[WORDS];
    const char *said; // NULL: anything
};

// DATA and MODEL stand for the scene's.
static void try_case(const char *run, const struct option_case *c, const char *const first[])
{
    const char *words[WORDS + 8] = {NULL};
    int n = 0;
    for (int i = 0; first[i]; i++) words[n++] = first[i];
    for (int i = 0; i < WORDS && c->words[i]; i++)
        words[n++] = strcmp(c->words[i], "DATA") == 0    ? s.data
                     : strcmp(c->words[i], "MODEL") == 0 ? s.model
                                                         : c->words[i];
    const int status = train_alone(&s, run, words);
    if (status == c->status && (!c->said || said(&s, c->said))) return;
    fputs(test_read(test_path(s.folder, "alone.log")), stderr);
    fail_msg("%s %s: status %d, wanted %d and \"%s\"", c->words[0], c->words[1] ? c->words[1] : "",
             status, c->status, c->said ? c->said : "");
}

TEST(each_works_or_is_named)
{
    static const struct option_case cases[] = {
        {0, {"--async", "--max-staleness", "2"}, NULL},
        {0, {"--async", "--max-staleness", "0", "--exact"}, NULL},
        {0, {"--exact"}, NULL},
        {0, {"--exact", "--recompute", "layer"}, NULL},
        {0, {"--exact", "--lora-dropout", "0.1"}, "--exact does not compare them"},
        {0, {"--use-rslora"}, NULL},
        {0, {"--optim-moments", "bf16"}, NULL},
        {0, {"--optim-moments", "8bit"}, NULL},
        {0, {"--weight-decay", "0.1", "--max-grad-norm", "0"}, NULL},
        {0, {"--curriculum", "kde"}, NULL},
        {0, {"--curriculum", "uniform"}, NULL},
        {0, {"--num-iterations", "2"}, NULL},
        {0, {"--beta", "0.1", "--kl-estimator", "k1"}, NULL},
        {0, {"--loss-type", "cispo"}, NULL},
        {0, {"--importance-sampling-level", "sequence"}, NULL},
        {0, {"--token-budget", "64", "--logits-chunk", "8"}, NULL},
        {0, {"--save-steps", "1", "--save-total-limit", "1"}, NULL},
        {0, {"--start-from", "current"}, "starts new"}, // there is none
        {0, {"--log-completions", "--cost"}, NULL},
        {0, {"--lora-target", "q_proj,down_proj,lm_head", "--lora-name", "two"}, NULL},
        {0, {"--tandem", "--tandem-p", "0.7"}, NULL},
        {0, {"--train-draft"}, NULL},
        {1, {"--workers", "http://127.0.0.1:1"}, "http://127.0.0.1:1 cannot be used"},
        {2, {"--sync", "checkpoint", "--model", "MODEL"}, "--sync checkpoint with --bridge"},
        {2, {"--freeze", "*norm*"}, "--freeze with --lora-r"},
        {2,
         {"--async", "--max-staleness", "1", "--exact"},
         "--exact with samples of older weights"},
        {2, {"--lora-name", ""}, "--lora-name"},
        {2, {"--lora-r", "1025"}, "--lora-r"},
        {2, {"--lora-dropout", "1"}, "--lora-dropout"},
        {1, {"--lora-r", "9", "--lora-name", "nine"}, "--max-lora-rank 9"},
        {1, {"--start-from", "MODEL"}, "adapter_config.json"},
        {1, {"--lora-target", "embed_tokens", "--lora-name", "embeddings"}, "names no matrix"},
    };
    char run[16];
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        snprintf(run, sizeof run, "run-%zu", i);
        unload("policy");
        try_case(run, &cases[i], OPTIONS(LORA));
    }
}

TEST(resuming_wants_the_same_adapter)
{
    static const struct option_case cases[] = {
        {1, {"--lora-r", "8"}, "other targets, ranks or scales"},
        {1, {"--lora-alpha", "9"}, "other targets, ranks or scales"},
        {1, {"--use-rslora"}, "other targets, ranks or scales"},
        {1, {"--lora-target", "q_proj"}, "other targets, ranks or scales"},
        // with a place of its own, it is the checkpoint that differs
        {1, {"--lora-target", "q_proj", "--lora-name", "a"}, "other targets, ranks or scales"},
        {1, {"--lora-r", "0"}, "was made with --lora-r"},
        {1, {"--optim-moments", "8bit"}, "--optim-moments"},
        {0, {"--async", "--max-staleness", "1"}, "resumed at step 2"},
        {0, {"--max-steps", "4", "--lora-name", "b"}, "resumed at step 3"},
    };
    struct option_case first = {0, {"--save-steps", "1"}, NULL};
    unload("policy");
    unload("two");
    try_case("resumed", &first, OPTIONS(LORA));
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        try_case("resumed", &cases[i], OPTIONS("--resume", "--max-steps", "3"));
    daemon_holds_adapter(&s.daemon, "b", latest(&s, "resumed"));
}

TEST(the_best_is_served_at_the_end)
{
    const struct option_case best = {0,
                                     {"--eval-data", "DATA", "--eval-steps", "1",
                                      "--load-best-model-at-end", "--early-stop-patience", "3"},
                                     NULL};
    unload("policy");
    try_case("best", &best, OPTIONS(LORA));
    daemon_holds_adapter(&s.daemon, "policy",
                         test_path(test_path(s.folder, "best"), "checkpoints/best"));
}

TESTS_BETWEEN(open_scene, close_scene)
