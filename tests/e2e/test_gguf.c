/* test_gguf.c: a GGUF file as --model: it is served and trained as the folder that it was written
 * from, what is saved is an ordinary folder, and transformers' reader of GGUF files computes the
 * same. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/served.h"
#include "tests/support/gguf_write.h"

#define QUESTION "{\"prompt\": \"27+35=\", \"max_tokens\": 5, \"temperature\": 0, \"logprobs\": 1}"
static const char lines[] = "{\"prompt\": \"27+35=\", \"answer\": \"62\"}\n"
                            "{\"prompt\": \"48+16=\", \"answer\": \"64\"}\n";

// What a server of the model answers, after two steps of training that write `run_dir`, and a
// greedy evaluation.
static json_t *serve_and_train(const char *model, const char *run_dir)
{
    const char *data = test_path(test_folder(), "data.jsonl");
    test_write(data, lines, strlen(lines));
    daemon_start(&served, model, args("--max-context 64 --dtype %s", daemon_exact_dtype()));
    const char *const *more = args("--reward exact --max-steps 2 --prompts-per-step 2 "
                                   "--num-generations 8 --max-completion-length 5 --seed 3 "
                                   "--learning-rate 1e-4");
    test_output(0, daemon_trainer(&served, data, run_dir, more, NULL));
    daemon_holds(&served, "policy", test_path(run_dir, "checkpoints/latest"));
    json_t *answer = ask("/v1/completions", QUESTION);
    served_stop();
    return answer;
}

static void assert_same_choice(json_t *a, json_t *b)
{
    json_t *x = json_at(a, "choices.0"), *y = json_at(b, "choices.0");
    assert_true(json_equal(json_object_get(x, "text"), json_object_get(y, "text")));
    assert_true(json_equal(json_object_get(x, "logprobs"), json_object_get(y, "logprobs")));
}

TEST(a_file_is_its_folder)
{
    const char *folder = test_folder(), *model = test_path(test_root(), "tools/demo-model");
    const char *file = test_path(folder, "demo.gguf");
    const char *by_file = test_path(folder, "by-file"), *by_folder = test_path(folder, "by-folder");
    gguf_write_folder(model, "qwen2", file);
    json_t *a = serve_and_train(file, by_file), *b = serve_and_train(model, by_folder);
    assert_same_choice(a, b);
    // the checkpoint is a folder like any other
    const char *saved = test_path(by_file, "checkpoints/latest");
    test_same_file(saved, test_path(by_folder, "checkpoints/latest"), "model.safetensors");
    static const char *const files[] = {"config.json", "tokenizer.json", "tokenizer_config.json"};
    for (int i = 0; i < 3; i++) assert_true(file_exists_in(saved, files[i]));
    daemon_start(&served, saved, args("--max-context 64 --dtype %s", daemon_exact_dtype()));
    assert_same_choice(a, ask("/v1/completions", QUESTION));
    daemon_get(served.socket, "/health", 200);
    served_stop();
}

TEST(a_file_is_learnt_from)
{
    const char *folder = test_folder(), *data = test_path(folder, "data.jsonl");
    const char *file = test_path(folder, "demo.gguf"), *out = test_path(folder, "out");
    test_write(data, lines, strlen(lines));
    gguf_write_folder(test_path(test_root(), "tools/demo-model"), "qwen2", file);
    test_output(0, args("%s sft --model %s --data %s --out %s --device %s --max-steps 2",
                        test_binary("cw-trainer"), file, data, out, test_device()));
    assert_true(file_exists_in(out, "model.safetensors") && file_exists_in(out, "tokenizer.json"));
    test_output(
        0, args("%s eval --model %s --data %s --reward exact --max-completion-length 5 --device %s",
                test_binary("cw-trainer"), file, data, test_device()));
}

TEST(files_are_transformers)
{
    static const char *const archs[] = {"llama", "qwen2", "qwen3", "gemma2", "gemma3"};
    const char *python = test_python("torch, transformers, gguf"), *folder = test_folder();
    const char *script = test_path(test_root(), "tests/clients/gguf_transformers.py");
    const char *data = test_path(folder, "data.jsonl");
    const char *tokens = test_path(test_root(), "tools/demo-model/tokenizer.json");
    test_write(data, lines, strlen(lines));
    test_output(0, OPTIONS(python, script, "make", folder, tokens));
    char *ids = test_read(test_path(folder, "ids.json"));
    const char *request =
        test_text("{\"prompt\": %s, \"max_tokens\": 1, \"prompt_logprobs\": 0}", ids);
    for (size_t i = 0; i < sizeof archs / sizeof *archs; i++) {
        const char *file = test_text("%s/%s.gguf", folder, archs[i]);
        daemon_start(&served, file, args("--max-context 64 --dtype f32"));
        json_t *answer = ask("/v1/completions", request);
        assert_int_equal(json_dump_file(answer, test_text("%s/%s.json", folder, archs[i]), 0), 0);
        served_stop();
        // a step of nothing: what is saved is what was read
        test_output(0, args("%s sft --model %s --data %s --out %s --device %s --max-steps 1 "
                            "--learning-rate 1e-30 --dtype f32",
                            test_binary("cw-trainer"), file, data, test_path(folder, archs[i]),
                            test_device()));
    }
    print_message("%s\n", test_output(0, OPTIONS(python, script, "check", folder)));
}
