/* merge.c: `cw-trainer merge`: adds a LoRA adapter to its base and writes the sum as a model
 * folder, in FP8 or not. The sum is made in f32 on the CPU, and rounded once, to what is written.
 * The main thread. */
// SPDX-License-Identifier: Apache-2.0
#include "trainer/commands.h"
#include "common/model/model.h"
#include "common/model/model_folder.h"
#include "common/base/log.h"
#include "common/base/options.h"
#include "common/model/adapter.h"
#include "trainer/run/checkpoint.h"
#include "trainer/run/options_shared.h"

struct merge_config {
    const char *model, *adapter, *out;
    int dtype; // dtype_option_names
    int to;    // quantization_names
    bool overwrite;
    enum log_level log_level;
};

#define OPTIONS_OF struct merge_config
const struct option_spec merge_options[] = {
    OPT_TEXT("model", model, NULL, "DIR", "Hugging Face model folder: the base (needed)"),
    OPT_TEXT("adapter", adapter, NULL, "DIR",
             "PEFT folder of a LoRA adapter (needed, but with --to)"),
    OPT_TEXT("out", out, NULL, "DIR", "model folder to write (needed)"),
    OPT_FLAG("overwrite", overwrite, NULL, "replace --out where it is there"),
    OPT_CHOICE(
        "dtype", dtype, "auto", dtype_option_names,
        "of the weights written; auto: bf16 where the model's config.json says so, else f32"),
    OPT_CHOICE("to", to, "none", quantization_names,
               "write the layers' matrices in FP8, as a server with --quantization multiplies them "
               "(compressed-tensors, a scale a row, which vLLM loads); fp8: loaders round what is "
               "multiplied by them too, a token at a time"),
    LOG_LEVEL_OPTION,
    OPT_END,
};

static enum status add_adapter(const struct merge_config *c, struct device *dev,
                               struct weights *base)
{
    struct adapter_config *config;
    struct adapter *adapter = NULL;
    enum status st;
    CHECK(adapter_config_load(c->adapter, &config));
    CHECK(adapter_new(config, base, DT_F32, &adapter));
    CHECK(weights_alloc(adapter->weights, dev));
    CHECK(adapter_load(adapter, dev, c->adapter));
    CHECK(adapter_merge(adapter, base, dev));
    weights_quantise(base, dev);
    log_info("%d matrices of %s changed by %s", adapter->n, c->model, c->adapter);
out:
    adapter_free(adapter);
    return st;
}

static enum status merge(void *context)
{
    const struct merge_config *c = context;
    enum status st;
    struct device *dev = NULL;
    struct model_config *config = NULL;
    struct weights *base = NULL;
    char words[256];
    CHECK(device_open("cpu", &dev));
    CHECK(model_config_load(c->model, &config));
    if (c->to == QUANTIZATION_MXFP4)
        FAIL(ST_UNSUPPORTED, "--to mxfp4: no folder is written in four bits; fp8-weights is");
    CHECK(model_config_quantise(config, (enum quantization)c->to, false));
    CHECK(weights_plan(config, DT_F32, &base));
    CHECK(weights_alloc(base, dev));
    CHECK(weights_load(base, dev, c->model));
    if (weights_describe_stored(base, words, sizeof words)) log_info("%s: %s", c->model, words);
    if (c->adapter) CHECK(add_adapter(c, dev, base));
    enum dtype as = config->file_dtype == DT_BF16 ? DT_BF16 : DT_F32;
    if (c->dtype) as = (enum dtype)(c->dtype - 1);
    CHECK(model_folder_write(
        c->out, dev,
        &(struct model_folder){
            .weights = base, .as = as, .to = config->quantization, .source_folder = c->model}));
    if (left_out_describe(config, words, sizeof words)) log_info("%s: %s", c->model, words);
    log_info("wrote %s, in %s%s", c->out, dtype_name(as),
             base->twin ? " and the layers' matrices in FP8" : "");
out:
    weights_free(base);
    model_config_free(config);
    device_free(dev);
    return st;
}

static enum status check(void *context, struct option_set *set)
{
    const struct merge_config *c = context;
    (void)set;
    log_open("cw-trainer", c->log_level);
    if (c->model && c->out && (c->adapter || c->to))
        return model_folder_check_out(c->out, c->overwrite, OPTION_WORDS(c->model, c->adapter), 2);
    return status_fail(
        ST_INVALID, "--model DIR, --adapter DIR and --out DIR are needed; with --to no adapter is");
}

int merge_main(int argc, char **argv)
{
    struct merge_config config = {0};
    const struct program program = {
        .name = "cw-trainer",
        .command = "merge",
        .usage = "--model DIR --adapter DIR --out DIR [--to fp8]\n\n"
                 "Adds a LoRA adapter to its base and writes a model folder that any loader opens, "
                 "in FP8\nor not; with --to also of a model as it is.",
        .options = merge_options,
        .config = &config,
        .check = check,
        .run = merge,
        .context = &config,
    };
    return program_main(&program, argc, argv);
}
