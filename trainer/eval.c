/* eval.c: `cw-trainer eval`: opens a server by its bridge file, evaluates (run/evaluate.h), prints.
 * The main thread. It runs beside a training run. */
#include "trainer/run/options_shared.h"
#include "trainer/eval.h"
#include "bridge/bridge_file.h"
#include "common/base/file.h"
#include "common/base/json.h"
#include "common/base/log.h"
#include "common/base/options.h"
#include "common/model/config.h"
#include "trainer/rollout/prompts.h"
#include "trainer/run/evaluate.h"
#include "trainer/run/notices.h"
#include "trainer/run/runlog.h"
#include "trainer/rollout/scoring.h"

#include <errno.h>
#include <inttypes.h>
#include <libgen.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

struct eval_config {
    const char *bridge, *data, *config, *stop, *output;
    enum log_level log_level;
    struct prompt_options prompts;
    struct reward_options reward;
    bool json;
    double temperature, rollout_timeout;
    int64_t max_completion_length, limit, seed;
};

#define OPTIONS_OF struct eval_config
static const struct option_spec eval_options[] = {
    OPT_TEXT("bridge", bridge, NULL, "PATH", "the daemon's bridge file (default: searched)"),
    OPT_TEXT("data", data, NULL, "FILE", "prompts with answers, JSONL"),
    OPT_CONFIG,
    REWARD_OPTIONS,
    PROMPT_OPTIONS,
    OPT_INT("max-completion-length", max_completion_length, "512", "TOKENS", 1, 1e7,
            "of one answer"),
    OPT_DOUBLE("temperature", temperature, "0", "T", 0, 100, "0: greedy"),
    OPT_TEXT("stop", stop, NULL, "TEXT", "text that ends an answer"),
    OPT_INT("seed", seed, "42", "N", 0, 1e15, "of sampling, where it is not greedy"),
    OPT_INT("limit", limit, "0", "N", 0, 1e9, "first N prompts; 0: all"),
    OPT_DOUBLE("rollout-timeout", rollout_timeout, "1800", "SECONDS", 0.1, 1e6,
               "longest wait for one request"),
    LOG_LEVEL_OPTION,
    OPT_TEXT(
        "output", output, NULL, "FILE",
        "JSONL, a line for each sample: prompt, completion, reward and its terms, finish reason"),
    OPT_FLAG("json", json, NULL, "print the result as a JSON object"),
    OPT_END,
};

static void print_result(const struct eval_config *config, const struct eval_result *r)
{
    if (config->json) {
        json_t *json =
            json_pack("{s:i, s:f, s:f, s:f, s:f, s:f, s:I}", "n", r->n, "reward", r->reward,
                      "reward_standard_error", r->reward_standard_error, "mean_length",
                      r->mean_length, "truncated", r->truncated, "seconds", r->seconds,
                      "weight_version", (json_int_t)r->weight_version);
        if (json && r->accuracy >= 0) {
            json_object_set_new(json, "accuracy", json_real(r->accuracy));
            json_object_set_new(json, "standard_error", json_real(r->standard_error));
        }
        if (json && r->spec.num_draft_tokens > 0) {
            metrics_put(json, "acceptance_rate", spec_acceptance_rate(&r->spec));
            metrics_put(json, "acceptance_length", spec_acceptance_length(&r->spec));
        }
        char *text = json ? json_dumps(json, JSON_REAL_PRECISION(9)) : NULL;
        if (text) puts(text);
        free(text);
        json_decref(json);
        return;
    }
    if (r->accuracy >= 0)
        printf("accuracy %.2f%% +- %.2f%% (standard error), ", 100 * r->accuracy,
               100 * r->standard_error);
    printf("reward %.4f +- %.4f, %d prompts, %.1f tokens each, %.1f%% cut off, ", r->reward,
           r->reward_standard_error, r->n, r->mean_length, 100 * r->truncated);
    if (r->spec.num_draft_tokens > 0)
        printf("%.1f%% of drafts accepted, ", 100 * spec_acceptance_rate(&r->spec));
    printf("%.1f s, weight version %" PRIu64 "\n", r->seconds, r->weight_version);
}

// Before anything is generated: --output can be written.
static enum status check_output(const char *path)
{
    enum status st;
    char *copy = strdup(path);
    if (!copy) return status_fail(ST_NO_MEMORY, "no memory for --output");
    const char *folder = dirname(copy);
    struct stat info;
    CHECK(file_make_folders(folder));
    if (access(folder, W_OK | X_OK) != 0)
        st = status_fail(ST_IO, "--output %s: folder %s: %s", path, folder, strerror(errno));
    else if (stat(path, &info) == 0 && !S_ISREG(info.st_mode))
        st = status_fail(ST_INVALID, "--output %s: is no file", path);
out:
    free(copy);
    return st;
}

static enum status eval_on(const struct eval_config *config, struct reward *reward,
                           const struct rollout_source *source, const struct dataset *data)
{
    enum status st;
    struct bytes lines = BYTES_INIT;
    struct eval_result result;
    struct sampling_options sampling = {
        .temperature = config->temperature,
        .top_p = 1,
        .max_tokens = (int)config->max_completion_length,
        .seed = (uint64_t)config->seed,
        .stop = config->stop,
    };
    CHECK(rollout_check_context(source, data, config->limit, config->max_completion_length));
    CHECK(evaluate(source, data, (int)config->limit, reward, &sampling,
                   config->output ? &lines : NULL, &result));
    if (config->output) {
        CHECK(file_write_atomic(config->output, 0644, bytes_text(&lines), lines.len));
        log_info("%s: %d samples", config->output, result.n);
    }
    print_result(config, &result);
out:
    bytes_release(&lines);
    return st;
}

static enum status run_eval(const struct eval_config *config, struct reward *reward)
{
    enum status st;
    char path[512];
    int left_out;
    struct bridge_file *file = NULL;
    const struct bridge_role *policy;
    struct control *control = NULL;
    struct http_client *http = NULL;
    struct model_config *model = NULL;
    struct dataset *data = NULL;
    if (config->output) CHECK(check_output(config->output));
    CHECK(bridge_find(config->bridge, path, sizeof path));
    CHECK(bridge_file_read(path, &file));
    CHECK(bridge_file_check(file));
    notice_roles(file);
    policy = bridge_file_role(file, "policy");
    if (!policy) FAIL(ST_NOT_FOUND, "%s: shares no tensors of role \"policy\"", path);
    CHECK(control_open(file->control_page, file->roles[0].layout_hash, &control));
    CHECK(http_client_new(file->socket, &http));
    CHECK(model_config_load(policy->model, &model));
    struct prompt_options options = config->prompts;
    options.question_template = reward_prompt_template(reward);
    CHECK(prompts_load(config->data, policy->model, model->vocab_size, &options, &data, &left_out));
    notice_data(data, left_out);
    CHECK(scoring_check(reward, data));
    struct rollout_source source = {
        .http = http,
        .servers = {{.control = control}},
        .n_servers = 1,
        .vocab_size = model->vocab_size,
        .timeout_ms = (int)(config->rollout_timeout * 1e3),
        .idle_timeout_ms = (int)(config->rollout_timeout * 1e3),
    };
    CHECK(eval_on(config, reward, &source, data));
out:
    dataset_free(data);
    model_config_free(model);
    http_client_free(http);
    control_free(control);
    bridge_file_free(file);
    return st;
}

int eval_main(int argc, char **argv)
{
    struct eval_config config = {0};
    struct option_set *set = NULL;
    struct reward *reward = NULL;
    struct bytes usage = BYTES_INIT;
    log_open("cw-trainer", LOG_INFO);
    bytes_puts(&usage, "--data FILE.jsonl --reward NAME [options]\n\n"
                       "Answers held-out prompts through the daemon and scores them.\n\nRewards:");
    reward_describe_all(&usage);
    enum option_result parsed = options_parse(eval_options, "cw-trainer eval", bytes_text(&usage),
                                              argc, argv, 0, &config, NULL, &set);
    bytes_release(&usage);
    switch (parsed) {
    case OPTIONS_DONE:
        return 0;
    case OPTIONS_BAD:
        log_error("%s", status_message());
        return 2;
    case OPTIONS_OK:
        break;
    }
    int exit_status = 0;
    log_open("cw-trainer", config.log_level);
    if (!config.data) {
        log_error("--data is missing: a JSONL file of prompts");
        exit_status = 2;
    } else if (prompts_check(&config.prompts) != ST_OK ||
               reward_new(&config.reward, &reward) != ST_OK) {
        log_error("%s", status_message());
        exit_status = 2;
    } else if (run_eval(&config, reward) != ST_OK) {
        log_error("%s", status_message());
        exit_status = 1;
    }
    reward_free(reward);
    options_free(set);
    return exit_status;
}
