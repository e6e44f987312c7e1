/* endpoints_runs.c: training runs and checkpoints that lie on disk. Loop's thread: these are small
 * files and folders. */
#include "trainer/serve/tinker.h"
#include "common/base/json.h"
#include "common/base/log.h"

#include <stdlib.h>
#include <string.h>

// A list under its name, taken, from "offset" on, at most "limit".
static void reply_list(struct http_request *q, const char *name, json_t *all)
{
    const char *offset = http_query(q, "offset"), *limit = http_query(q, "limit");
    const size_t total = json_array_size(all), first = offset ? strtoul(offset, NULL, 10) : 0,
                 most = limit ? strtoul(limit, NULL, 10) : total;
    json_t *page = json_array();
    for (size_t i = first; i < total && i - first < most; i++)
        json_array_append(page, json_array_get(all, i));
    json_decref(all);
    http_reply_json(q, 200,
                    json_pack("{s:o, s:{s:I, s:I, s:I}}", name, page, "cursor", "offset",
                              (json_int_t)first, "limit", (json_int_t)most, "total_count",
                              (json_int_t)total));
}

void handle_training_runs(void *tinker, struct http_request *q)
{
    struct tinker *t = tinker;
    json_t *list = NULL;
    enum status st = runs_training_runs(t->options->runs, t->damaged, &list);
    if (st == ST_OK)
        reply_list(q, "training_runs", list);
    else
        http_fail_status(q, st);
}

void handle_checkpoints(void *tinker, struct http_request *q)
{
    struct tinker *t = tinker;
    json_t *list = NULL;
    enum status st = runs_checkpoints(t->options->runs, NULL, &list);
    if (st == ST_OK)
        reply_list(q, "checkpoints", list);
    else
        http_fail_status(q, st);
}

// "RUN/checkpoints/PART/NAME/action"; ret_action is "" or behind the slash.
static enum status read_checkpoint(struct http_request *q, struct run_path *ret,
                                   const char **ret_action)
{
    const char *tail = http_path_tail(q), *more = "", *const before = "checkpoints/";
    char run[RUN_NAME_ROOM];
    if (!run_split(tail, run, &more) || strncmp(more, before, strlen(before)) != 0)
        return status_fail(ST_NOT_FOUND, "there is no checkpoint \"%.150s\"", tail);
    return run_path_read(run, more + strlen(before), ret, ret_action);
}

// GET .../RUN/checkpoints/PART/NAME/external_weights_urls, or archive, as SDKs before it ask.
static enum status reply_download(struct tinker *t, struct http_request *q)
{
    struct run_path path;
    const char *action;
    enum status st = read_checkpoint(q, &path, &action);
    if (st != ST_OK) return st;
    if (strcmp(action, "external_weights_urls") == 0) return tinker_reply_urls(t, q, &path);
    if (strcmp(action, "archive") == 0) return tinker_reply_archive(t, q, &path);
    return status_fail(ST_NOT_FOUND, "a checkpoint has no \"%.100s\" here", action);
}

// GET /api/v1/training_runs/RUN, .../RUN/checkpoints, and what one of these has
void handle_training_run(void *tinker, struct http_request *q)
{
    struct tinker *t = tinker;
    char run[RUN_NAME_ROOM];
    const char *more;
    json_t *found = NULL, *object = NULL;
    enum status st = ST_OK;
    if (!run_split(http_path_tail(q), run, &more))
        FAIL(ST_NOT_FOUND, "there is no training run \"%.150s\"", http_path_tail(q));
    CHECK(runs_training_run(t->options->runs, run, &object));
    if (strcmp(more, "checkpoints") == 0) {
        CHECK(runs_checkpoints(t->options->runs, run, &found));
        http_reply_json(q, 200, json_pack("{s:o}", "checkpoints", found));
    } else if (*more) {
        st = reply_download(t, q);
    } else {
        http_reply_json(q, 200, json_incref(object));
    }
out:
    json_decref(object);
    if (st != ST_OK) http_fail_status(q, st);
}

// PUT .../RUN/checkpoints/PART/NAME/ttl
void handle_set_ttl(void *tinker, struct http_request *q)
{
    struct tinker *t = tinker;
    struct run_path path;
    const char *action;
    char folder[PATH_ROOM];
    enum status st;
    CHECK(read_checkpoint(q, &path, &action));
    if (strcmp(action, "ttl") != 0)
        FAIL(ST_NOT_FOUND, "a checkpoint has no \"%.100s\" to set here", action);
    CHECK(runs_find(t->options->runs, &path, folder));
    tinker_ttl(t, path.run);
    http_reply_json(q, 200, json_object());
out:
    if (st != ST_OK) http_fail_status(q, st);
}

// What the server would restore must stay.
static enum status check_not_needed(const struct tinker *t, const struct run_path *path)
{
    char folder[PATH_ROOM];
    enum status st = runs_find(t->options->runs, path, folder);
    if (st != ST_OK || !sources_needs(t->sources, folder)) return st;
    return status_fail(ST_INVALID,
                       "%s is what the server restores if a training process dies while it writes: "
                       "save another checkpoint before this one is deleted",
                       path->name);
}

// DELETE /api/v1/training_runs/RUN/checkpoints/weights/NAME
void handle_remove_checkpoint(void *tinker, struct http_request *q)
{
    struct tinker *t = tinker;
    char text[RUN_PATH_ROOM];
    const char *action;
    struct run_path path;
    enum status st;
    CHECK(read_checkpoint(q, &path, &action));
    if (*action) FAIL(ST_NOT_FOUND, "a checkpoint has no \"%.100s\" to delete here", action);
    CHECK(check_not_needed(t, &path));
    CHECK(runs_remove(t->options->runs, &path));
    run_path_put(&path, text);
    sources_forget(t->sources, text);
    log_info("%s: deleted", text);
    http_reply_json(q, 200, json_object());
out:
    if (st != ST_OK) http_fail_status(q, st);
}

// SDKs before 0.33 make a training client of this, and take nothing but an adapter: is_lora is true
// there, and a whole model has rank 0.
void handle_weights_info(void *tinker, struct http_request *q)
{
    struct tinker *t = tinker;
    struct run_path path;
    char folder[PATH_ROOM];
    json_t *body = tinker_body(q), *run = NULL;
    if (!body) return;
    const char *text = tinker_text(q, body, "tinker_path");
    enum status st = ST_OK;
    if (!text) goto out;
    CHECK(run_path_parse(text, &path));
    CHECK(runs_find(t->options->runs, &path, folder));
    CHECK(runs_training_run(t->options->runs, path.run, &run));
    http_reply_json(q, 200,
                    json_pack("{s:O, s:b, s:O, s:O, s:O, s:O}", "base_model",
                              json_object_get(run, "base_model"), "is_lora", 1, "lora_rank",
                              json_object_get(run, "lora_rank"), "train_unembed",
                              json_object_get(run, "train_unembed"), "train_mlp",
                              json_object_get(run, "train_mlp"), "train_attn",
                              json_object_get(run, "train_attn")));
out:
    if (st != ST_OK) http_fail_status(q, st);
    json_decref(run);
    json_decref(body);
}
