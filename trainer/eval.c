/* eval.c: `cw-trainer eval`: opens a server by its bridge file, which it does beside a training
 * run, or starts one of a model folder for itself; evaluates (run/evaluate.h), prints. The main
 * thread.
 */
// SPDX-License-Identifier: Apache-2.0
#include "trainer/run/options_shared.h"
#include "common/model/model.h"
#include "trainer/commands.h"
#include "bridge/bridge_file.h"
#include "common/base/clock.h"
#include "common/base/file.h"
#include "common/base/log.h"
#include "common/base/options.h"
#include "common/model/adapter.h"
#include "common/model/config.h"
#include "trainer/data/data.h"
#include "common/model/model_folder.h"
#include "trainer/launch/server_process.h"
#include "trainer/run/evaluate.h"
#include "trainer/run/mapped.h"
#include "trainer/run/warnings.h"
#include "trainer/run/stop.h"
#include "trainer/rollout/scoring.h"

#include <errno.h>
#include <inttypes.h>
#include <libgen.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define OWN_ADAPTER "adapter" // as which a server of its own serves --adapter
#define REMOVALS    100       // of its folder, tried

struct eval_config {
    const char *bridge, *data, *config, *output, *lora_name, *adapter;
    const char *model, *device, *server_args; // of a server of its own
    double server_timeout;
    enum log_level log_level;
    struct prompt_options prompts;
    struct reward_options reward;
    bool json;
    struct sampling_options sampling; // without its seed
    double rollout_timeout;
    int64_t seed, num_generations;
};

// Of an evaluation within a run, and those that these options had once.
static const char *const foreign_names[] = {
    "num-generations-eval num-samples: --num-generations",
    "eval-limit limit: --max-samples",
    "eval-data: --data",
    "eval-temperature: --temperature",
    "lora: --lora-name of an adapter that the server holds, with --model --adapter of a folder",
    "out: --output",
    NULL,
};

#define OPTIONS_OF struct eval_config
const struct option_spec eval_options[] = {
    OPT_TEXT("bridge", bridge, NULL, "PATH", "the server's bridge file (default: searched)"),
    OPT_TEXT(
        "model", model, NULL, "DIR",
        "or: a model folder, a checkpoint say, of which a server is started for this alone",
        EXCLUDES("bridge", "that names a server that runs, this a folder of which one is started")),
    OPT_TEXT("device", device, "auto", "auto|cpu|cuda:N", "where that server runs",
             WITHIN("model")),
    OPT_TEXT("server-args", server_args, NULL, "\"--OPTION ...\"", "further options of that server",
             WITHIN("model")),
    OPT_DOUBLE("server-timeout", server_timeout, "600", "SECONDS", 0.1, 1e6,
               "longest wait for its start", WITHIN("model")),
    OPT_TEXT("data", data, NULL, "FILE", "prompts with answers, JSONL"),
    MAX_SAMPLES_OPTION,
    OPT_TEXT("lora-name", lora_name, NULL, "NAME",
             "of an adapter that the server holds (default: the model itself)",
             EXCLUDES("model", "its server is started here, on the folder of --adapter")),
    OPT_TEXT("adapter", adapter, NULL, "DIR", "PEFT folder of a LoRA adapter of --model",
             NEEDS("model", "its base; an adapter that a server holds is --lora-name")),
    OPT_CONFIG,
    REWARD_OPTIONS,
    PROMPT_OPTIONS,
    ANSWER_FIELD_OPTION,
    OPT_INT("max-completion-length", sampling.max_tokens, "512", "TOKENS", 1, 1e7, "of one answer"),
    OPT_DOUBLE("temperature", sampling.temperature, "0", "T", 0, 100, "0: greedy"),
    OPT_INT("num-generations", num_generations, "1", "N", 1, 2048,
            "samples of each prompt, for pass@k and maj@N",
            NEEDS_WHEN(">1", "temperature",
                       "greedy samples of a prompt are all the same; give a temperature")),
    OPT_TEXT("stop", sampling.stop, NULL, "TEXT", "text that ends an answer"),
    OPT_INT("seed", seed, "42", "N", 0, 1e15, "of sampling, where it is not greedy"),
    OPT_DOUBLE("rollout-timeout", rollout_timeout, "1800", "SECONDS", 0.1, 1e6,
               "longest wait for one request"),
    LOG_LEVEL_OPTION,
    OPT_TEXT(
        "output", output, NULL, "FILE",
        "JSONL, a line for each sample: prompt, completion, reward and its terms, finish reason"),
    OPT_FLAG("json", json, NULL, "print the result as a JSON object"),
    OPT_FOREIGN(foreign_names),
    OPT_END,
};

static void print_result(const struct eval_config *config, const struct eval_result *r)
{
    if (config->json) {
        json_t *json =
            json_pack("{s:i, s:f, s:f, s:I}", "n", r->n, "truncated", r->truncated, "seconds",
                      r->seconds, "weight_version", (json_int_t)r->weight_version);
        eval_result_put(r, "", json);
        json_dumpf(json, stdout, JSON_REAL_PRECISION(9));
        putchar('\n');
        json_decref(json);
        return;
    }
    if (r->accuracy >= 0)
        printf("accuracy %.2f%% +- %.2f%% (standard error), ", 100 * r->accuracy,
               100 * eval_error(&r->correct));
    printf("reward %.4f +- %.4f, %d prompts, %.1f tokens each, %.1f%% cut off, ", r->reward.mean,
           eval_error(&r->reward), r->n, r->mean_length, 100 * r->truncated);
    for (int i = 0; i < EVAL_MAX_PASS && r->pass[i].n > 0; i++)
        printf("pass@%d %.2f%% +- %.2f%%, ", 1 << i, 100 * r->pass[i].mean,
               100 * eval_error(&r->pass[i]));
    if (r->majority.n > 0)
        printf("maj@%d %.2f%% +- %.2f%%, ", r->n_samples, 100 * r->majority.mean,
               100 * eval_error(&r->majority));
    if (r->spec.num_draft_tokens > 0)
        printf("%.1f%% of drafts accepted, ", 100 * spec_acceptance_rate(&r->spec));
    printf("%.1f s, weight version %" PRIu64 "\n", r->seconds, r->weight_version);
}

// Before anything is generated: --output can be written.
static enum status check_output(const char *path)
{
    enum status st;
    char copy[PATH_ROOM];
    struct stat info;
    CHECK(path_put(copy, "", "%s", path));
    const char *folder = dirname(copy);
    CHECK(file_make_folders(folder));
    file_sweep_temporaries(path);
    if (access(folder, W_OK | X_OK) != 0)
        FAIL(ST_IO, "--output %s: folder %s: %s", path, folder, strerror(errno));
    if (stat(path, &info) == 0 && !S_ISREG(info.st_mode))
        FAIL(ST_INVALID, "--output %s: is no file", path);
out:
    return st;
}

struct eval {
    struct eval_config config;
    struct reward *reward;
    // a server of its own, with --model
    struct server_process *process;
    struct bytes arguments; // its further ones
    char folder[PATH_ROOM]; // of its socket, bridge file and log
    bool has_folder;        // which goes with it
    struct stop *stop;
    struct bridge_file *file;
    const struct bridge_role *policy;
    struct control *control;
    struct http_client *http;
};

// bridge: path of its file; NULL: it is looked for.
static enum status open_server(struct eval *e, const char *bridge)
{
    enum status st;
    CHECK(bridge_file_open(bridge, &e->file));
    CHECK(warn_roles(e->file, &e->policy));
    CHECK(control_open(e->file->control_page, e->file->roles[0].layout_hash, &e->control));
    if (!e->http) st = http_client_new(e->file->socket, &e->http);
out:
    return st;
}

// ---- a server of its own ------------------------------------------------------------------------

// By its whole path, since the server and its clients may stand elsewhere.
static enum status make_folder(struct eval *e)
{
    const char *given = getenv("TMPDIR");
    char in[PATH_ROOM];
    enum status st;
    if (!given || !*given) given = "/tmp";
    CHECK(path_absolute(given, in, sizeof in));
    if (file_make_temporary_folder(in, "commonweight-eval", e->folder) != ST_OK)
        FAIL(ST_IO,
             "TMPDIR is %s, and a folder for the server's socket cannot be made in it: %s; name "
             "another one",
             given, strerror(errno));
    e->has_folder = true;
out:
    return st;
}

// The server takes memory for adapters by the largest rank of the one that there is.
static enum status put_arguments(struct eval *e, const struct model_config *model)
{
    const struct eval_config *o = &e->config;
    enum status st;
    struct weights *base = NULL;
    struct adapter_config *config;
    struct adapter *adapter = NULL;
    if (o->adapter) {
        CHECK(weights_plan(model, DT_F32, &base));
        CHECK(adapter_config_load(o->adapter, &config));
        CHECK(adapter_new(config, base, DT_F32, &adapter));
        CHECK(adapter_check(adapter, o->adapter));
        bytes_printf(&e->arguments, "--max-adapters 1 --max-lora-rank %d ", adapter->max_rank);
    }
    bytes_puts(&e->arguments, o->server_args ? o->server_args : "");
    st = bytes_status(&e->arguments);
out:
    adapter_free(adapter);
    weights_free(base);
    return st;
}

static enum status still_wanted(void *context)
{
    (void)context;
    return stop_requested() ? status_fail(ST_CANCELLED, "the adapter is no longer wanted") : ST_OK;
}

static enum status load_adapter(struct eval *e)
{
    enum status st;
    json_t *base = NULL;
    const char *folder = e->config.adapter;
    char absolute[PATH_ROOM]; // the server may stand in another folder
    CHECK(path_absolute(folder, absolute, sizeof absolute));
    CHECK(adapter_base_ask(e->http, &base));
    CHECK(warn_adapter_base(folder, base, false));
    st = server_load_adapter(e->http, NULL, OWN_ADAPTER, absolute, still_wanted);
out:
    json_decref(base);
    return st;
}

// On the thread that watches for signals, right before the process ends, with which the server
// does.
static void abandon(void *context)
{
    const struct eval *e = context;
    // the server may be writing there
    for (int i = 0; i < REMOVALS && file_remove_tree(e->folder) != ST_OK; i++) clock_sleep_ms(1);
}

// One of a model folder for this process alone, on a socket and a bridge file in a temporary
// folder, which end with it. Its folder, with its log, stays where it does not come to serve.
static enum status start_server(struct eval *e, const struct model_config *model)
{
    const struct eval_config *c = &e->config;
    const struct stop_options signals = {
        .first = "the evaluation ends, and its server", .leave = abandon, .context = e};
    char bridge[PATH_ROOM];
    enum status st;
    stop_catch_signals(); // so that the server and its folder go
    CHECK(put_arguments(e, model));
    CHECK(make_folder(e));
    const struct server_options options = {.device = c->device,
                                           .arguments = bytes_text(&e->arguments),
                                           .shares = true,
                                           .folder = e->folder,
                                           .timeout_s = c->server_timeout,
                                           .cancelled = stop_flag()};
    CHECK(server_process_new(&options, &e->process));
    st = http_client_new(server_process_address(e->process), &e->http);
    if (st == ST_INVALID)
        FAIL(st, "%s; let TMPDIR name a folder of a shorter path", status_message());
    CHECK(st);
    CHECK(stop_watch_new(&signals, &e->stop));
    log_info("a server of %s is started for this run alone; its log is %s/server.log", c->model,
             e->folder);
    st = server_process_restart(e->process, e->http, c->model, NULL);
    if (st == ST_OK && c->adapter) st = load_adapter(e);
    if (st != ST_OK && st != ST_CANCELLED) e->has_folder = false; // its error names the log
    if (st != ST_OK) goto out;
    CHECK(path_put(bridge, e->folder, "bridge.json"));
    st = open_server(e, bridge);
out:
    return st;
}

static enum status eval_on(const struct eval *e, struct rollout_servers *servers,
                           const struct dataset *data)
{
    const struct eval_config *config = &e->config;
    enum status st;
    struct bytes lines = BYTES_INIT;
    struct eval_result result;
    struct sampling_options sampling = config->sampling;
    struct evaluation evaluation = {.data = data,
                                    .n_samples = (int)config->num_generations,
                                    .reward = e->reward,
                                    .sampling = &sampling};
    sampling.top_p = 1;
    sampling.seed = (uint64_t)config->seed;
    CHECK(rollout_check_context(servers, data, 0, sampling.max_tokens));
    CHECK(servers_new(&(struct copies_options){0}, servers, &evaluation.source));
    CHECK(evaluate(&evaluation, config->output ? &lines : NULL, &result));
    if (config->output) {
        CHECK(file_write_atomic(config->output, 0644, bytes_text(&lines), lines.len));
        log_info("%s: %d samples", config->output, result.n * result.n_samples);
    }
    print_result(config, &result);
out:
    source_close(evaluation.source);
    bytes_release(&lines);
    return st;
}

// The data can be refused before a server is started.
static enum status run_eval(void *context)
{
    struct eval *e = context;
    const struct eval_config *config = &e->config;
    char found[PATH_ROOM];
    enum status st = ST_OK;
    int left_out;
    struct model_config *model = NULL;
    struct dataset *data = NULL;
    struct prompt_options options = config->prompts;
    if (config->model) CHECK(model_folder_find(config->model, found));
    if (config->model) e->config.model = found;
    const char *folder = config->model;
    if (config->output) CHECK(check_output(config->output));
    if (!folder) {
        CHECK(open_server(e, config->bridge));
        folder = e->policy->model;
    }
    CHECK(model_config_load(folder, &model));
    options.question_template = reward_info(e->reward)->prompt_template;
    CHECK(prompts_load(config->data, folder, model->vocab_size, &options, &data, &left_out));
    warn_data(data, left_out);
    CHECK(scoring_check(e->reward, data));
    if (config->model) CHECK(start_server(e, model));
    struct rollout_servers servers =
        rollout_servers_of(e->http, e->control, model->vocab_size, config->rollout_timeout);
    servers.adapter = config->adapter ? OWN_ADAPTER : config->lora_name;
    servers.cancelled = stop_flag();
    st = eval_on(e, &servers, data);
out:
    dataset_free(data);
    model_config_free(model);
    http_client_free(e->http);
    control_free(e->control);
    bridge_file_free(e->file);
    server_process_free(e->process); // a second signal does not wait for it
    if (e->has_folder && file_remove_tree(e->folder) != ST_OK) log_warn("%s", status_message());
    stop_watch_end(e->stop);
    bytes_release(&e->arguments);
    reward_free(e->reward);
    if (st == ST_CANCELLED) log_warn("a signal: the evaluation is given up");
    return st;
}

static enum status check(void *context, struct option_set *set)
{
    struct eval *e = context;
    enum status st;
    log_open("cw-trainer", e->config.log_level);
    CHECK(options_check(set, &e->config));
    if (!e->config.data) FAIL(ST_INVALID, "--data is missing: a JSONL file of prompts");
    CHECK(prompts_check(&e->config.prompts));
    e->config.reward.max_completion_length = e->config.sampling.max_tokens;
    st = reward_new(&e->config.reward, &e->reward);
out:
    return st;
}

int eval_main(int argc, char **argv)
{
    struct eval e = {0};
    struct bytes usage = BYTES_INIT;
    bytes_puts(&usage, "--data FILE.jsonl --reward NAME [options]\n\n"
                       "Answers held-out prompts through the server, or by a model folder "
                       "(--model), and scores them.\n\nRewards:");
    reward_describe_all(&usage);
    const struct program program = {
        .name = "cw-trainer",
        .command = "eval",
        .usage = bytes_text(&usage),
        .options = eval_options,
        .config = &e.config,
        .check = check,
        .run = run_eval,
        .context = &e,
    };
    int exit_status = program_main(&program, argc, argv);
    bytes_release(&usage);
    return exit_status;
}
