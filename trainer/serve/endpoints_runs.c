/* endpoints_runs.c: training runs and checkpoints that lie on disk. Loop's thread: these are small
 * files and folders. */
#include "trainer/serve/tinker.h"
#include "common/base/log.h"

#include <stdlib.h>
#include <string.h>

// GET /api/v1/training_runs and /api/v1/checkpoints, from "offset" on, at most "limit".
enum { TRAINING_RUNS, CHECKPOINTS };
static enum status list(const struct call *c)
{
    static const char *const names[] = {"training_runs", "checkpoints"};
    const char *runs = c->tinker->model->runs, *offset = http_query(c->q, "offset"),
               *limit = http_query(c->q, "limit");
    json_t *all = NULL, *page = json_array();
    enum status st;
    CHECK(c->which == CHECKPOINTS ? runs_checkpoints(runs, NULL, &all)
                                  : runs_training_runs(runs, c->tinker->damaged, &all));
    const size_t total = json_array_size(all), first = offset ? strtoul(offset, NULL, 10) : 0,
                 max = limit ? strtoul(limit, NULL, 10) : total;
    for (size_t i = first; i < total && i - first < max; i++)
        json_array_append(page, json_array_get(all, i));
    st = tinker_reply(c, json_pack("{s:O, s:{s:I, s:I, s:I}}", names[c->which], page, "cursor",
                                   "offset", (json_int_t)first, "limit", (json_int_t)max,
                                   "total_count", (json_int_t)total));
out:
    json_decref(page);
    json_decref(all);
    return st;
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

// GET /api/v1/training_runs/RUN, .../RUN/checkpoints, and .../RUN/checkpoints/PART/NAME/
// external_weights_urls, or archive, as SDKs before it ask.
static enum status training_run(const struct call *c)
{
    struct tinker *t = c->tinker;
    char run[RUN_NAME_ROOM];
    const char *more, *action;
    struct run_path path;
    json_t *found = NULL, *object = NULL;
    enum status st = ST_OK;
    if (!run_split(http_path_tail(c->q), run, &more))
        FAIL(ST_NOT_FOUND, "there is no training run \"%.150s\"", http_path_tail(c->q));
    CHECK(runs_training_run(t->model->runs, run, &object));
    if (strcmp(more, "checkpoints") == 0) {
        CHECK(runs_checkpoints(t->model->runs, run, &found));
        st = tinker_reply(c, json_pack("{s:o}", "checkpoints", found));
    } else if (*more) {
        CHECK(read_checkpoint(c->q, &path, &action));
        const bool archive = strcmp(action, "archive") == 0;
        if (!archive && strcmp(action, "external_weights_urls") != 0)
            FAIL(ST_NOT_FOUND, "a checkpoint has no \"%.100s\" here", action);
        st = tinker_reply_urls(c, &path, archive);
    } else {
        st = tinker_reply(c, json_incref(object));
    }
out:
    json_decref(object);
    return st;
}

// PUT .../RUN/checkpoints/PART/NAME/ttl
static enum status set_ttl(const struct call *c)
{
    struct tinker *t = c->tinker;
    struct run_path path;
    const char *action;
    char folder[PATH_ROOM];
    enum status st;
    CHECK(read_checkpoint(c->q, &path, &action));
    if (strcmp(action, "ttl") != 0)
        FAIL(ST_NOT_FOUND, "a checkpoint has no \"%.100s\" to set here", action);
    CHECK(runs_find(t->model->runs, &path, folder));
    tinker_warn_ttl(t, path.run);
    st = tinker_reply(c, json_object());
out:
    return st;
}

// DELETE /api/v1/training_runs/RUN/checkpoints/weights/NAME. What the server would restore stays.
static enum status remove_checkpoint(const struct call *c)
{
    struct tinker *t = c->tinker;
    char text[RUN_PATH_ROOM], folder[PATH_ROOM];
    const char *action;
    struct run_path path;
    enum status st;
    CHECK(read_checkpoint(c->q, &path, &action));
    if (*action) FAIL(ST_NOT_FOUND, "a checkpoint has no \"%.100s\" to delete here", action);
    CHECK(runs_find(t->model->runs, &path, folder));
    if (snapshots_need(t->model->snapshots, folder))
        FAIL(ST_INVALID,
             "%s is what the server restores if a training process dies while it writes: save "
             "another checkpoint before this one is deleted",
             path.name);
    CHECK(file_remove_tree(folder));
    run_path_text(&path, text);
    snapshots_forget(t->model->snapshots, text);
    log_info("%s: deleted", text);
    st = tinker_reply(c, json_object());
out:
    return st;
}

// SDKs before 0.33 make a training client of this, and take nothing but an adapter: is_lora is true
// there, and a whole model has rank 0.
static enum status weights_info(const struct call *c)
{
    struct tinker *t = c->tinker;
    struct run_path path;
    char folder[PATH_ROOM];
    json_t *run = NULL;
    enum status st;
    CHECK(runs_find_path(t->model->runs, c->tinker_path, &path, folder));
    CHECK(runs_training_run(t->model->runs, path.run, &run));
    st = tinker_reply(c, json_pack("{s:O, s:b, s:O, s:O, s:O, s:O}", "base_model",
                                   json_object_get(run, "base_model"), "is_lora", 1, "lora_rank",
                                   json_object_get(run, "lora_rank"), run_trains[2],
                                   json_object_get(run, run_trains[2]), run_trains[1],
                                   json_object_get(run, run_trains[1]), run_trains[0],
                                   json_object_get(run, run_trains[0])));
out:
    json_decref(run);
    return st;
}

const struct endpoint run_endpoints[] = {
    {"POST", "/api/v1/weights_info", weights_info, "tinker_path", HTTP_NEEDS_KEY, 0},
    {"GET", "/api/v1/training_runs", list, NULL, HTTP_NEEDS_KEY, TRAINING_RUNS},
    {"GET", "/api/v1/training_runs/*", training_run, NULL, HTTP_NEEDS_KEY, 0},
    {"DELETE", "/api/v1/training_runs/*", remove_checkpoint, NULL, HTTP_NEEDS_KEY, 0},
    {"PUT", "/api/v1/training_runs/*", set_ttl, NULL, HTTP_NEEDS_KEY, 0},
    {"GET", "/api/v1/checkpoints", list, NULL, HTTP_NEEDS_KEY, CHECKPOINTS},
    {0},
};
