/* test_lora_options.c: every option of cw-trainer train that says something else beside --lora-r:
 * each works, or is refused in a sentence that names it. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/training.h"

static struct scene s;

static void open_scene(void)
{
    scene_open(&s);
    daemon_kill(&s.daemon);
    daemon_start(&s.daemon, s.model,
                 OPTIONS("--exact", "--dtype", daemon_exact_dtype(), "--max-adapters", "3",
                         "--max-lora-rank", "8", "--tandem-model", s.model, "--draft", s.model));
}

// Where it is there. Its scale and targets are a run's own.
static void unload(const char *name)
{
    char body[64];
    struct wire_answer a;
    snprintf(body, sizeof body, "{\"lora_name\":\"%s\"}", name);
    daemon_request(s.daemon.socket, "POST", "/v1/unload_lora_adapter", "", body, &a);
}

static int with_lora(struct scene *scene, const char *run, const char *const words[])
{
    const char *all[TRAINER_WORDS] = {"--lora-r", "4", "--lora-alpha", "8", "--max-steps", "2"};
    for (int i = 0; words[i]; i++) all[6 + i] = words[i];
    unload("policy");
    return train_alone(scene, run, all);
}

TEST(each_works_or_is_named)
{
    train_rows(&s, "lora_options", "each_works_or_is_named", with_lora);
}

TEST(resuming_wants_the_same_adapter)
{
    unload("two");
    assert_int_equal(with_lora(&s, "resumed", OPTIONS("--save-steps", "1")), 0);
    train_rows(&s, "lora_options", "resuming_wants_the_same_adapter", train_alone);
    daemon_holds_adapter(&s.daemon, "b", latest(&s, "resumed"));
}

TEST(the_best_is_served_at_the_end)
{
    train_rows(&s, "lora_options", "the_best_is_served_at_the_end", with_lora);
    daemon_holds_adapter(&s.daemon, "policy", test_path(s.folder, "best/checkpoints/best"));
}

TESTS_BETWEEN(open_scene, NULL)
