/* reward_plugin.c: the scorer `plugin:PATH.so`: loads a shared object (reward_plugin.h) and asks it
 * sample by sample. Owns the loaded object. The trainer's thread.
 */
// SPDX-License-Identifier: Apache-2.0
#include "trainer/reward/reward_plugin.h"
#include "trainer/reward/reward_scorer.h"

#include <dlfcn.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define ERROR_SIZE 512

struct plugin {
    char *path;
    void *object;
    const struct reward_plugin *interface;
    void *state;
    bool opened;
};

static void plugin_close(void *state)
{
    struct plugin *p = state;
    if (!p) return;
    if (p->opened && p->interface->close) p->interface->close(p->state);
    if (p->object) dlclose(p->object);
    free(p->path);
    free(p);
}

static enum status plugin_open(const struct reward_options *options, const char *argument,
                               void **ret_state)
{
    static const char letters[] =
        "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-";
    enum status st = ST_OK;
    char error[ERROR_SIZE] = "", *path = NULL;
    struct plugin *p = calloc(1, sizeof *p);
    (void)options;
    if (!p || !(p->path = strdup(argument)))
        FAIL(ST_NO_MEMORY, "no memory for the plug-in %s", argument);
    // A name without a slash would be looked for on the library path: it means the file here.
    if (asprintf(&path, "%s%s", strchr(argument, '/') ? "" : "./", argument) < 0) path = NULL;
    p->object = path ? dlopen(path, RTLD_NOW | RTLD_LOCAL) : NULL;
    if (!p->object) {
        const char *why = path ? dlerror() : NULL;
        FAIL(ST_IO,
             "reward plugin: %s (a plug-in is a shared object, trainer/reward/reward_plugin.h; any "
             "program: command:PROGRAM ARGS)",
             why ? why : "no memory");
    }
    const struct reward_plugin *i = p->interface = dlsym(p->object, REWARD_PLUGIN_SYMBOL);
    if (!i) FAIL(ST_FORMAT, "%s: no symbol " REWARD_PLUGIN_SYMBOL, p->path);
    if (i->version != REWARD_PLUGIN_VERSION)
        FAIL(ST_MISMATCH,
             "%s: made for version %d of the plug-in interface, this is %d; build it against this "
             "trainer/reward/reward_plugin.h",
             p->path, i->version, REWARD_PLUGIN_VERSION);
    const size_t len = i->name ? strlen(i->name) : 0;
    if (len == 0 || len > 40 || strspn(i->name, letters) < len || !i->score)
        FAIL(ST_FORMAT,
             "%s: " REWARD_PLUGIN_SYMBOL " has no score function, or a name other than letters, "
             "digits, \"_\" and \"-\"",
             p->path);
    if (i->open && i->open(&p->state, error, sizeof error) != 0)
        FAIL(ST_INVALID, "%s: %s", p->path, *error ? error : "it gives no reason");
    p->opened = true;
    *ret_state = p;
out:
    free(path);
    if (st != ST_OK) plugin_close(p);
    return st;
}

static const char *plugin_label(const void *state)
{
    const struct plugin *p = state;
    return p->interface->name;
}

// JSON as text, of a string itself; NULL: there is none, or no memory for it, and then *failed.
static char *text_of(const json_t *json, bool *failed)
{
    char *text = json_is_string(json) ? strdup(json_string_value(json))
                 : json               ? json_dumps(json, JSON_COMPACT)
                                      : NULL;
    *failed |= json && !text;
    return text;
}

static enum status plugin_score(void *state, const struct reward_input *input, double *ret_score)
{
    struct plugin *p = state;
    enum status st = ST_OK;
    char error[ERROR_SIZE] = "";
    double score = NAN;
    bool failed = false;
    char *prompt = text_of(input->prompt, &failed), *row = text_of(input->row, &failed);
    char *telemetry = text_of(input->telemetry, &failed);
    if (failed) FAIL(ST_NO_MEMORY, "no memory for a plug-in's sample");
    struct reward_plugin_sample sample = {
        .prompt = prompt ? prompt : "",
        .completion = input->text,
        .answer = input->answer,
        .example = row ? row : "{}",
        .telemetry = telemetry,
        .n_tokens = input->n_tokens,
        .truncated = input->truncated,
    };
    if (p->interface->score(p->state, &sample, &score, error, sizeof error) != 0)
        st = status_fail(ST_INVALID, "%s: %s", p->path, *error ? error : "it gives no reason");
    else if (!isfinite(score))
        st = status_fail(ST_FORMAT, "%s: its score is %g", p->path, score);
    else
        *ret_score = score;
out:
    free(prompt);
    free(row);
    free(telemetry);
    return st;
}

const struct scorer scorer_plugin = {
    .name = "plugin",
    .takes_argument = true,
    .help = "plugin:PATH.so, a shared object (trainer/reward/reward_plugin.h)",
    .open = plugin_open,
    .close = plugin_close,
    .label = plugin_label,
    .score = plugin_score,
};
