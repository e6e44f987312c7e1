/* test_latent.c: a model with latent attention, served and trained by the real processes: the
 * trainer's log-probabilities are the sampler's to the bit in every step, while prompts are
 * prefilled in small chunks and found in the prefix cache, samples are preempted, and drafts are
 * verified. */
#include "common/base/json.h"
#include "common/model/weights.h"
#include "tests/support/tiny_tokenizer.h"
#include "tests/support/training.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { STEPS = 6 };

// Rounded heads, a bias for the pick, two groups of which one may be picked from.
static const char config[] =
    "{\"architectures\":[\"DeepseekV3ForCausalLM\"],\"model_type\":\"deepseek_v3\","
    "\"vocab_size\":300,\"hidden_size\":64,\"intermediate_size\":96,\"num_hidden_layers\":2,"
    "\"num_attention_heads\":4,\"num_key_value_heads\":4,\"max_position_embeddings\":512,"
    "\"q_lora_rank\":32,\"kv_lora_rank\":32,\"qk_nope_head_dim\":16,\"qk_rope_head_dim\":16,"
    "\"v_head_dim\":16,\"first_k_dense_replace\":1,\"moe_intermediate_size\":32,"
    "\"n_routed_experts\":8,\"num_experts_per_tok\":2,\"n_shared_experts\":1,\"n_group\":2,"
    "\"topk_group\":1,\"num_nextn_predict_layers\":1,\"torch_dtype\":\"float32\"}";

// Matrices large enough that greedy text wanders, and biases that decide between experts.
static void fill(struct weights *w, struct device *dev)
{
    assert_ok(weights_init_random(w, dev, 3));
    for (int t = 0; t < w->n_tensors; t++) {
        float *x = malloc((size_t)w->tensors[t].n * sizeof *x);
        assert_non_null(x);
        assert_ok(weights_read(w, dev, t, x));
        for (int64_t i = 0; i < w->tensors[t].n; i++)
            x[i] = w->tensors[t].is_buffer ? 0.1f * (float)(i % 3 - 1) : 6 * x[i];
        if (w->tensors[t].n_dims == 2 || w->tensors[t].is_buffer)
            assert_ok(weights_write(w, dev, t, x));
        free(x);
    }
}

static const char *write_model(void)
{
    const char *folder = test_folder(), *path = test_path(folder, "config.json");
    struct device *dev;
    struct model_config *c;
    struct weights *w;
    void *arena;
    test_write(path, config, strlen(config));
    assert_ok(tiny_tokenizer_write(folder));
    assert_ok(device_open("cpu", &dev));
    assert_ok(model_config_load(folder, &c));
    assert_ok(weights_plan(c, DT_F32, &w));
    assert_ok(device_alloc(dev, w->bytes, &arena));
    weights_bind(w, arena);
    fill(w, dev);
    assert_ok(weights_save(w, dev, folder, DT_F32));
    device_release(dev, arena);
    weights_free(w);
    model_config_free(c);
    device_free(dev);
    return folder;
}

static double counter(const struct scene *s, const char *series)
{
    struct wire_answer a;
    daemon_request(s->daemon.socket, "GET", "/metrics", "", NULL, &a);
    const char *line = strstr(bytes_text(&a.body), series);
    while (line && line > bytes_text(&a.body) && line[-1] != '\n') line = strstr(line + 1, series);
    if (!line) fail_msg("no series %s", series);
    double value = atof(strchr(line, ' '));
    wire_answer_release(&a);
    return value;
}

static void learn(struct scene *s, const char *run, const char *const more[])
{
    const char *options[32] = {"--exact", "--max-steps",   "6",  "--max-completion-length",
                               "24",      "--temperature", "0.7"};
    double mismatch[STEPS + 1], mean[STEPS + 1];
    int n = 7;
    while (*more) options[n++] = *more++;
    options[n] = NULL;
    assert_int_equal(train(s, run, options), 0);
    assert_int_equal(column(s, run, "sampler_mismatch/max", mismatch, STEPS + 1), STEPS);
    assert_int_equal(column(s, run, "entropy", mean, STEPS + 1), STEPS);
    for (int i = 0; i < STEPS; i++)
        if (mismatch[i] != 0 || !(mean[i] > 0))
            fail_msg("%s: step %d on %s: mismatch %g, entropy %g", run, i + 1, test_device(),
                     mismatch[i], mean[i]);
}

static void sampler_is_the_trainer(void **state)
{
    struct scene s;
    struct bytes lines = BYTES_INIT;
    (void)state;
    scene_open_model(&s, write_model(),
                     OPTIONS("--exact", "--dtype", daemon_exact_dtype(), "--block-size", "4",
                             "--prefill-chunk", "5", "--max-batch", "8", "--max-context", "48",
                             "--kv-memory", strcmp(test_device(), "cpu") == 0 ? "24K" : "12K",
                             "--speculative", "ngram:4"));
    char *log = test_read(s.daemon.log);
    assert_contains(log, "model.layers.2, which predicts further tokens, is not loaded");
    free(log);
    for (int a = 0; a < 20; a++) // with a beginning to be found in the prefix cache
        bytes_printf(&lines, "{\"prompt\": \"the sum %d+3=\", \"answer\": \"%d\"}\n", a, a + 3);
    test_write(s.data, lines.data, lines.len);
    bytes_release(&lines);
    learn(&s, "run", OPTIONS("--save-steps", "0"));
    assert_true(counter(&s, "vllm:num_preemptions_total") > 0);
    assert_true(counter(&s, "vllm:prefix_cache_hits_total") > 0);
    assert_true(counter(&s, "vllm:spec_decode_num_accepted_tokens_total") > 0);
    daemon_holds(&s.daemon, "policy", latest(&s, "run")); // biases too, as they were loaded
    assert_int_equal(daemon_stop(&s.daemon), 0);
    scene_close(&s);
}

// With a frozen model beside it, an adapter is trained, and then the model through tandem.
static void adapters_and_tandem(void **state)
{
    struct scene s;
    const char *model = write_model();
    (void)state;
    scene_open_model(&s, model,
                     OPTIONS("--exact", "--dtype", daemon_exact_dtype(), "--tandem-model", model,
                             "--max-adapters", "1"));
    learn(&s, "adapter",
          OPTIONS("--lora-r", "4", "--lora-target", "q_a_proj,q_b_proj,kv_a_proj_with_mqa,o_proj",
                  "--recompute", "layer"));
    daemon_holds(&s.daemon, "policy", model);
    daemon_holds_adapter(&s.daemon, "policy", latest(&s, "adapter"));
    assert_int_equal(train_alone(&s, "no", OPTIONS("--lora-r", "4", "--lora-target", "kv_b_proj")),
                     1);
    assert_said(&s, "adapters of kv_b_proj");
    learn(&s, "tandem", OPTIONS("--tandem", "--tandem-p", "0.5", "--save-steps", "0"));
    assert_int_equal(daemon_stop(&s.daemon), 0);
    scene_close(&s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(sampler_is_the_trainer),
        cmocka_unit_test(adapters_and_tandem),
    };
    return cmocka_run_group_tests_name("latent", tests, NULL, NULL);
}
