/* test_transformers.c: models of the families with layers of their own, trained by cw-trainer sft
 * and written as folders: transformers opens each with no tensor missing or left over, and its
 * log-probabilities are those that a server of the folder gives. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/daemon.h"

#include <sys/stat.h>

static struct daemon d;

static const char *const families[] = {
    "cohere2",
    "deepseek-v2",
    "deepseek-v2-lite",
    "deepseek-v3",
    "exaone4",
    "gemma3",
    "gemma4",
    "gemma4-shared",
    "gemma4-moe",
    "glm4-moe",
    "glm4-moe-lite",
    "gpt-oss",
    "granite",
    "hunyuan-dense",
    "lfm2",
    "minimax-m2",
    "ministral3",
    "nemotron-h",
    "nemotron-h-latent",
    "nemotron-h-moe",
    "olmo2",
    "olmo3",
    "olmoe",
    "qwen35",
    "qwen35-moe",
    "qwen3-moe-some",
    "qwen3-next",
    "seed-oss",
    "smollm3",
};

#define IDS "[5, 12, 19, 26, 33, 40, 47, 54, 61, 68, 75, 82, 89, 96, 103, 110, 117, 124, 131, 138]"

// A golden folder's config with the demo model's tokens.
static void write_config(const char *family, const char *path)
{
    const char *golden = test_text("tests/golden/%s/config.json", family);
    json_t *json = test_keep(json_load_file(test_path(test_root(), golden), 0, NULL));
    assert_non_null(json);
    json_object_set_new(json, "vocab_size", json_integer(272));
    if (json_object_get(json, "vocab_size_per_layer_input"))
        json_object_set_new(json, "vocab_size_per_layer_input", json_integer(288));
    json_object_set_new(json, "eos_token_id", json_integer(0));
    json_object_set_new(json, "pad_token_id", json_integer(0));
    json_object_del(json, "bos_token_id");
    assert_int_equal(json_dump_file(json, path, 0), 0);
}

// Random weights, trained for some steps, in folder/out.
static void train(const char *family, const char *folder, const char *data)
{
    const char *config = test_path(folder, "config.json");
    write_config(family, config);
    test_output(0,
                args("%s sft --init %s --tokenizer %s --data %s --out %s --device %s --max-steps 3 "
                     "--learning-rate 1e-3",
                     test_binary("cw-trainer"), config, test_path(test_root(), "tools/demo-model"),
                     data, test_path(folder, "out"), test_device()));
}

static void serve(const char *folder)
{
    memset(&d, 0, sizeof d);
    daemon_start(&d, test_path(folder, "out"), args("--max-context 64 --dtype f32"));
    json_t *answer =
        daemon_post(d.socket, "/v1/completions", 200,
                    "{\"prompt\": " IDS ", \"max_tokens\": 1, \"prompt_logprobs\": 0}");
    assert_int_equal(json_dump_file(answer, test_path(folder, "served.json"), 0), 0);
    assert_int_equal(daemon_stop(&d), 0);
}

TEST(folders_are_transformers_own)
{
    const char *python = test_python("torch, transformers"), *root = test_folder();
    const char *data = test_path(root, "data.jsonl");
    static const char lines[] = "{\"prompt\": \"2+3=\", \"answer\": \"5\"}\n"
                                "{\"prompt\": \"4+5=\", \"answer\": \"9\"}\n";
    test_write(data, lines, strlen(lines));
    test_write(test_path(root, "ids.json"), IDS, strlen(IDS));
    for (size_t i = 0; i < sizeof families / sizeof *families; i++) {
        const char *folder = test_path(root, families[i]);
        assert_int_equal(mkdir(folder, 0700), 0);
        train(families[i], folder, data);
        serve(folder);
    }
    const char *script = test_path(test_root(), "tests/clients/transformers_logprobs.py");
    print_message("%s\n", test_output(0, OPTIONS(python, script, root)));
}
