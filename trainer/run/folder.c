/* folder.c: the files of a run's folder that say what the run is. The main thread. */
#include "trainer/run/folder.h"
#include "common/base/file.h"
#include "common/base/json.h"
#include "common/base/log.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <time.h>
#include <unistd.h>

#define MAX_CONFIG ((size_t)1 << 20)
#define MAX_STARTS ((size_t)64 << 20)

// Trainers of other servers are kept out of the folder too. The lock ends with the process; a file
// system without locks has none.
static enum status lock(const char *folder, int *ret)
{
    const int fd = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0) return status_fail(ST_IO, "%s: %s", folder, strerror(errno));
    if (flock(fd, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) {
        close(fd);
        return status_fail(ST_BUSY, "%s: another trainer is writing there; take another --run-dir",
                           folder);
    }
    *ret = fd;
    return ST_OK;
}

// A run's config.json has its options, a model's the shape of its weights: written over, they are
// lost. One that cannot be read is replaced.
static enum status check_no_model(const char *folder)
{
    enum status st;
    char path[PATH_ROOM];
    json_t *there = NULL;
    CHECK(path_put(path, folder, "config.json"));
    if (!file_exists(path) || json_read_file(path, MAX_CONFIG, &there) != ST_OK) goto out;
    if (json_has(there, "model_type") || json_has(there, "architectures"))
        FAIL(ST_INVALID,
             "%s is a model's, and the run's options would replace it; take another --run-dir",
             path);
out:
    json_decref(there);
    return st;
}

enum status folder_open(const char *wanted, char ret_folder[FOLDER_ROOM], int *ret_lock)
{
    enum status st;
    const time_t now = time(NULL);
    struct tm tm;
    if (!wanted)
        strftime(ret_folder, FOLDER_ROOM, "runs/%Y%m%d-%H%M%S", localtime_r(&now, &tm));
    else if (snprintf(ret_folder, FOLDER_ROOM, "%s", wanted) >= FOLDER_ROOM)
        return status_fail(ST_INVALID, "--run-dir is too long");
    CHECK(file_make_folders(ret_folder));
    CHECK(check_no_model(ret_folder));
    st = lock(ret_folder, ret_lock);
out:
    return st;
}

enum status folder_agree(const struct train_ranks *ranks, char folder[FOLDER_ROOM], char **latest)
{
    char path[PATH_MAX] = "";
    enum status st;
    if (*latest) snprintf(path, sizeof path, "%s", *latest);
    CHECK(train_ranks_agree(ranks, folder, FOLDER_ROOM));
    CHECK(train_ranks_agree(ranks, path, sizeof path));
    if (path[0] && !*latest && !(*latest = strdup(path)))
        FAIL(ST_NO_MEMORY, "no memory for a path");
out:
    return st;
}

enum status folder_take_options(struct option_set *set, const char *folder,
                                void (*forget)(const void *config, json_t *recorded), void *config)
{
    enum status st = ST_OK;
    json_t *recorded = NULL;
    struct bytes taken = BYTES_INIT;
    char path[PATH_ROOM];
    if ((st = check_no_model(folder)) != ST_OK) return st;
    CHECK(path_put(path, folder, "config.json"));
    if (!file_exists(path)) goto out;
    CHECK(json_read_file(path, MAX_CONFIG, &recorded));
    if (forget) forget(config, recorded);
    CHECK(options_fill(set, path, recorded, config, &taken));
    if (taken.len) log_info("options as recorded in %s: %s", path, bytes_text(&taken));
out:
    if (st != ST_OK)
        status_fail(st, "%s; mend or remove it to go on with the options given here alone",
                    status_message());
    json_decref(recorded);
    bytes_release(&taken);
    return st;
}

static void put_option(struct bytes *to, const json_t *value)
{
    char *text = json_dumps(value, JSON_ENCODE_ANY | JSON_REAL_PRECISION(9));
    bytes_puts(to, !text || json_is_null(value) ? "none" : text);
    free(text);
}

// Says which options a resumed run goes on with that it did not have before. How a run is found and
// how long it takes does not make another run of it.
static void say_changes(const json_t *old, json_t *now)
{
    static const char *const free_to_change[] = {"bridge",    "run_dir",    "resume", "max_steps",
                                                 "log_level", "start_from", "out"};
    struct bytes text = BYTES_INIT;
    const char *key;
    const json_t *value, *before;
    json_object_foreach (now, key, value) {
        bool said = (before = json_object_get(old, key)) && !json_equal(before, value);
        for (size_t i = 0; i < sizeof free_to_change / sizeof *free_to_change; i++)
            said = said && strcmp(key, free_to_change[i]) != 0;
        if (!said) continue;
        bytes_printf(&text, "%s%s ", text.len ? ", " : "", key);
        put_option(&text, value);
        bytes_puts(&text, " (was ");
        put_option(&text, before);
        bytes_puts(&text, ")");
    }
    if (text.len) log_warn("the run goes on with other options: %s", bytes_text(&text));
    bytes_release(&text);
}

enum status folder_write_options(const char *folder, bool resumed, json_t *options)
{
    // How the processes of a start come to be: the next start may have other ranks.
    static const char *const of_a_start[] = {"gpus",
                                             "ranks",
                                             "rank",
                                             "nnodes",
                                             "node_rank",
                                             "rendezvous",
                                             "rendezvous_token_file",
                                             "rendezvous_timeout",
                                             "rank_timeout",
                                             "overwrite"};
    enum status st;
    char path[PATH_ROOM];
    json_t *old = NULL;
    CHECK(path_put(path, folder, "config.json"));
    if (!options) FAIL(ST_NO_MEMORY, "no memory for the run's config.json");
    for (size_t i = 0; i < sizeof of_a_start / sizeof *of_a_start; i++)
        json_object_del(options, of_a_start[i]);
    // One that cannot be read is replaced.
    if (resumed && json_read_file(path, MAX_CONFIG, &old) == ST_OK) say_changes(old, options);
    CHECK(json_write_file(path, 0644, options));
out:
    json_decref(old);
    json_decref(options);
    return st;
}

// A path or name that is not UTF-8 cannot stand in JSON, and is left out.
void folder_put_text(json_t *object, const char *key, const char *text)
{
    if (text) json_object_set_new(object, key, json_string(text));
}

json_t *folder_start(int64_t step, struct device *dev, enum dtype dt)
{
    char when[32], host[256] = "";
    const time_t now = time(NULL);
    struct tm tm;
    strftime(when, sizeof when, "%Y-%m-%dT%H:%M:%S%z", localtime_r(&now, &tm));
    gethostname(host, sizeof host - 1);
    json_t *start = json_pack("{s:s, s:s, s:I, s:s, s:s}", "time", when, "program",
                              "cw-trainer " COMMONWEIGHT_VERSION, "step", (json_int_t)step,
                              "device", device_name(dev), "dtype", dtype_name(dt));
    if (start) folder_put_text(start, "host", host);
    return start;
}

enum status folder_add_start(const char *folder, bool resumed, json_t *start)
{
    enum status st;
    json_t *all = NULL, *starts = NULL;
    char path[PATH_ROOM];
    CHECK(path_put(path, folder, "run.json"));
    if (resumed && file_exists(path) && json_read_file(path, MAX_STARTS, &all) != ST_OK)
        log_warn("%s; it is written anew", status_message());
    starts = json_incref(json_object_get(all, "starts"));
    json_decref(all);
    if (!json_is_array(starts)) {
        json_decref(starts);
        starts = json_array();
    }
    all = json_pack("{s:O}", "starts", starts);
    if (!all || json_array_append(starts, start) != 0)
        FAIL(ST_NO_MEMORY, "no memory for the run's run.json");
    CHECK(json_write_file(path, 0644, all));
out:
    json_decref(all);
    json_decref(starts);
    json_decref(start);
    return st;
}
