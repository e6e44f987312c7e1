/* model_folder.c: looks at what was given as a model folder before anything in it is read. A file
 * that may be missing is read where it is there, so one that is there but cannot be read (a link of
 * the Hub's cache whose content was not fetched) must not pass for missing. No state; any thread.
 */
// SPDX-License-Identifier: Apache-2.0
#include "common/model/model_folder.h"
#include "common/base/file.h"
#include "common/base/json.h"
#include "common/model/gguf.h"

#include <errno.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

const char *const model_folder_files[] = {
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
    NULL,
};

#define FOLDER_WORDS                                                                               \
    "a folder with config.json, model.safetensors and tokenizer.json, or a GGUF file"

// What a GGUF file says in place of a folder's file; *ret NULL: nothing.
static enum status read_gguf(const char *path, const char *name, json_t **ret)
{
    struct gguf *g = NULL;
    enum status st = gguf_open(path, &g);
    if (st == ST_OK) st = gguf_folder_file(g, name, ret);
    gguf_free(g);
    return st;
}

bool model_file_exists(const char *folder, const char *name)
{
    struct gguf *g = NULL;
    if (!gguf_is_file(folder)) return file_exists_in(folder, name);
    const bool is = gguf_open(folder, &g) != ST_OK || gguf_has_file(g, name); // its reader says why
    gguf_free(g);
    return is;
}

enum status model_file_read(const char *folder, const char *name, size_t max, struct bytes *ret)
{
    json_t *json = NULL;
    char path[PATH_ROOM];
    enum status st;
    if (!gguf_is_file(folder)) {
        CHECK(path_put(path, folder, "%s", name));
        return file_read(path, max, ret);
    }
    CHECK(read_gguf(folder, name, &json));
    if (!json) FAIL(ST_NOT_FOUND, "%s: holds nothing for %s", folder, name);
    char *text = json_dumps(json, JSON_INDENT(2));
    bytes_clear(ret);
    if (text) bytes_puts(ret, text);
    free(text);
    st = text ? bytes_status(ret) : status_fail(ST_NO_MEMORY, "%s: no memory", folder);
out:
    json_decref(json);
    return st;
}

enum status model_file_read_json(const char *folder, const char *name, size_t max, json_t **ret)
{
    char path[PATH_ROOM];
    if (gguf_is_file(folder)) return read_gguf(folder, name, ret);
    enum status st = path_put(path, folder, "%s", name);
    *ret = NULL;
    return st == ST_OK && file_exists(path) ? json_read_file(path, max, ret) : st;
}

// "Qwen/Qwen2.5-1.5B": two words of the Hub's letters.
static bool is_hub_name(const char *name)
{
    static const char letters[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
                                  "-_.";
    size_t owner = strspn(name, letters);
    if (owner == 0 || name[0] == '.' || name[owner] != '/') return false;
    size_t model = strspn(name + owner + 1, letters);
    return model > 0 && name[owner + 1 + model] == '\0';
}

#define HUB_PREFIX "models--"
#define SNAPSHOTS  "/snapshots/"

// The Hub's cache, as its own programs look for it.
static enum status hub_cache(char ret[PATH_ROOM])
{
    const char *cache = getenv("HF_HUB_CACHE"), *own = getenv("HF_HOME"), *home = getenv("HOME");
    if (cache && *cache) return path_put(ret, "", "%s", cache);
    if (own && *own) return path_put(ret, own, "hub");
    return path_put(ret, home ? home : "", ".cache/huggingface/hub");
}

// ORG/NAME there: models--ORG--NAME/snapshots/REVISION, of which refs/main has the name.
enum status model_folder_find(const char *given, char ret[PATH_ROOM])
{
    struct bytes revision = BYTES_INIT;
    char cache[PATH_ROOM], path[PATH_ROOM];
    const char *slash = strchr(given, '/');
    enum status st;
    if (!is_hub_name(given) || file_exists(given)) return path_put(ret, "", "%s", given);
    CHECK(hub_cache(cache));
    CHECK(path_put(path, cache, HUB_PREFIX "%.*s--%s", (int)(slash - given), given, slash + 1));
    CHECK(path_put(ret, path, "refs/main"));
    if (!file_exists(ret))
        FAIL(ST_NOT_FOUND,
             "%s: there is no such folder, and no %s in the Hub's local cache; nothing is fetched: "
             "fetch it first (hf download %s), or give a folder",
             given, ret, given);
    CHECK(file_read(ret, 128, &revision));
    CHECK(path_put(ret, path, "snapshots/%.*s", (int)strcspn(bytes_text(&revision), "\r\n"),
                   bytes_text(&revision)));
    if (!file_exists(ret))
        FAIL(ST_NOT_FOUND,
             "%s: %s, which refs/main names, is not in the Hub's local cache; fetch it "
             "again (hf download %s)",
             given, ret, given);
out:
    bytes_release(&revision);
    return st;
}

void model_folder_name(const char *folder, char *ret, size_t size)
{
    char path[PATH_ROOM];
    size_t len = strlen(folder);
    while (len > 1 && folder[len - 1] == '/') len--;
    snprintf(path, sizeof path, "%.*s", (int)len, folder);
    const char *slash = strrchr(path, '/'), *last = slash ? slash + 1 : path, *dashes;
    snprintf(ret, size, "%s", last);
    const size_t end = (size_t)(last - path), n = strlen(SNAPSHOTS);
    if (end < n || strncmp(path + end - n, SNAPSHOTS, n) != 0) return;
    path[end - n] = '\0';
    const char *repo = (slash = strrchr(path, '/')) ? slash + 1 : path;
    const char *owner = repo + strlen(HUB_PREFIX);
    if (strncmp(repo, HUB_PREFIX, strlen(HUB_PREFIX)) == 0 && (dashes = strstr(owner, "--")))
        snprintf(ret, size, "%.*s/%s", (int)(dashes - owner), owner, dashes + 2);
}

static enum status no_such_folder(const char *folder)
{
    enum status st = file_check_link(folder);
    if (st != ST_OK) return st;
    if (is_hub_name(folder))
        return status_fail(ST_NOT_FOUND,
                           "%s: there is no such folder, and nothing is fetched from the Hub by "
                           "name; fetch it first (hf download %s --local-dir DIR) and give DIR",
                           folder, folder);
    return status_fail(ST_NOT_FOUND, "%s: no such folder; a model is " FOLDER_WORDS, folder);
}

// The folder is there and does not hold the needed file.
static enum status incomplete(const char *folder, const char *needed)
{
    static const struct {
        const char *name, *words;
    } signs[] = {
        {"snapshots", "it is the Hub's cache of a model: give the folder of a revision in its "
                      "snapshots/"},
        {"adapter_config.json", "it holds an adapter, not a model: give the model that it belongs "
                                "to, or both as one folder (cw-trainer merge)"},
        {"latest", "it holds a run's checkpoints: give one of them, as latest in it"},
        {"tokenizer.model", "a SentencePiece file alone is not read: save it once with "
                            "transformers' AutoTokenizer, which writes tokenizer.json"},
    };
    const char *words = NULL;
    for (size_t i = 0; i < sizeof signs / sizeof signs[0] && !words; i++)
        if (file_exists_in(folder, signs[i].name)) words = signs[i].words;
    if (!words) words = "a model is " FOLDER_WORDS;
    return status_fail(ST_NOT_FOUND, "%s: no %s in it; %s", folder, needed, words);
}

static enum status check_files(const char *folder)
{
    enum status st = ST_OK;
    char path[PATH_ROOM];
    for (const char *const *name = model_folder_files; *name && st == ST_OK; name++) {
        st = path_put(path, folder, "%s", *name);
        if (st == ST_OK) st = file_check_link(path);
    }
    return st;
}

enum status model_folder_check(const char *folder, const char *needed)
{
    struct stat info;
    if (stat(folder, &info) != 0) {
        if (errno == ENOENT) return no_such_folder(folder);
        return status_fail(errno == ENOTDIR || errno == ENAMETOOLONG ? ST_NOT_FOUND : ST_IO,
                           "%s: %s", folder, strerror(errno));
    }
    json_t *name = json_string(folder); // as the bridge file and others hold it
    json_decref(name);
    if (!name)
        return status_fail(ST_INVALID,
                           "%s: this name is not UTF-8, and cannot stand in JSON; rename the "
                           "folder, or give a link to it that has another",
                           folder);
    if (gguf_is_file(folder))
        return model_file_exists(folder, needed)
                   ? ST_OK
                   : status_fail(ST_NOT_FOUND, "%s: holds nothing for %s", folder, needed);
    if (!S_ISDIR(info.st_mode))
        return status_fail(ST_INVALID,
                           "%s is a file; a model is " FOLDER_WORDS
                           " (other formats must be converted first)",
                           folder);
    if (file_exists_in(folder, "run.json"))
        return status_fail(ST_INVALID,
                           "%s is the folder of a run, whose config.json is no model's; give a "
                           "checkpoint in it, as %s/checkpoints/latest",
                           folder, folder);
    return file_exists_in(folder, needed) ? check_files(folder) : incomplete(folder, needed);
}

enum status model_config_path_check(const char *path)
{
    struct stat info;
    if (stat(path, &info) == 0 && S_ISDIR(info.st_mode))
        return status_fail(ST_INVALID, "%s is a folder; name the config.json in it", path);
    return file_exists(path) || !is_hub_name(path) || strstr(path, ".json") ? ST_OK
                                                                            : no_such_folder(path);
}

// Whether a model or an adapter that is written here may have that.
static bool is_written(const char *name)
{
    static const char *const own[] = {"config.json",          "model.safetensors",
                                      "adapter_config.json",  "adapter_model.safetensors",
                                      MODEL_TEMPLATES_FOLDER, "trainer"};
    for (size_t i = 0; i < sizeof own / sizeof *own; i++)
        if (strcmp(own[i], name) == 0) return true;
    for (const char *const *n = model_folder_files; *n; n++)
        if (strcmp(*n, name) == 0) return true;
    return false;
}

enum status model_folder_check_out(const char *out, bool overwrite, const char *const *read, int n)
{
    enum status st = ST_OK;
    json_t *names = json_folder(out), *name;
    size_t i;
    if (!file_exists(out) || (names && json_array_size(names) == 0)) goto out;
    for (int k = 0; k < n; k++)
        if (read[k] && file_is_within(read[k], out))
            FAIL(ST_INVALID, "--out %s would replace %s, which is read here; take another folder",
                 out, read[k]);
    json_array_foreach (names, i, name)
        if (!is_written(json_string_value(name)))
            FAIL(ST_INVALID,
                 "--out %s holds %s, which is none of a model's files as they are written here; "
                 "take another folder",
                 out, json_string_value(name));
    if (!names || !overwrite)
        FAIL(ST_INVALID, "--out %s is there already; take another folder%s", out,
             names ? ", or say --overwrite to replace it whole" : "");
out:
    json_decref(names);
    return st;
}
