/* chat_template.c: finds a folder's chat templates and renders them. Any thread, once found. */
// SPDX-License-Identifier: Apache-2.0
#include "common/text/chat_template.h"
#include "common/base/file.h"
#include "common/base/json.h"
#include "common/text/jinja/jinja.h"
#include "common/model/model_folder.h"
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_TEMPLATE_BYTES ((size_t)16 << 20)
#define MAX_CONFIG_BYTES   ((size_t)64 << 20)
#define SUFFIX             ".jinja"

struct named_template {
    char *name;
    struct jinja *program;
};

struct chat_template {
    struct named_template *list;
    int n;
    int chosen; // by name; -1: default, or with tools tool_use
    json_t *special_tokens;
    char *source;
};

void chat_template_free(struct chat_template *t)
{
    if (!t) return;
    for (int i = 0; i < t->n; i++) {
        jinja_free(t->list[i].program);
        free(t->list[i].name);
    }
    json_decref(t->special_tokens);
    free(t->list);
    free(t->source);
    free(t);
}

const char *chat_template_source(const struct chat_template *t)
{
    return t->source;
}

const json_t *chat_template_tokens(const struct chat_template *t)
{
    return t->special_tokens;
}

static int find_named(const struct chat_template *t, const char *name)
{
    for (int i = 0; i < t->n; i++)
        if (strcmp(t->list[i].name, name) == 0) return i;
    return -1;
}

static enum status add_template(struct chat_template *t, const char *where, const char *name,
                                const char *text, size_t len)
{
    struct named_template *larger = realloc(t->list, (size_t)(t->n + 1) * sizeof *larger);
    if (!larger) return status_fail(ST_NO_MEMORY, "%s: out of memory", where);
    t->list = larger;
    struct named_template *added = &t->list[t->n];
    *added = (struct named_template){strdup(name), NULL};
    if (!added->name) return status_fail(ST_NO_MEMORY, "%s: out of memory", where);
    t->n++;
    return jinja_parse(where, text, len, &added->program);
}

static enum status add_file(struct chat_template *t, const char *path, const char *name)
{
    struct bytes text = BYTES_INIT;
    enum status st = file_read(path, MAX_TEMPLATE_BYTES, &text);
    if (st == ST_OK) st = add_template(t, path, name, bytes_text(&text), text.len);
    bytes_release(&text);
    return st;
}

// ---- where templates stand ----------------------------------------------------------------------

static int is_template(const struct dirent *entry)
{
    size_t n = strlen(entry->d_name), suffix = strlen(SUFFIX);
    return n > suffix && strcmp(entry->d_name + n - suffix, SUFFIX) == 0;
}

// additional_chat_templates/NAME.jinja
static enum status add_folder(struct chat_template *t, const char *folder)
{
    struct dirent **entries = NULL;
    enum status st = ST_OK;
    int n = scandir(folder, &entries, is_template, alphasort);
    for (int i = 0; i < n; i++) {
        char path[PATH_ROOM], *name = entries[i]->d_name;
        if (st == ST_OK) st = path_put(path, folder, "%s", name);
        name[strlen(name) - strlen(SUFFIX)] = '\0';
        if (st == ST_OK) st = add_file(t, path, name);
        free(entries[i]);
    }
    free(entries);
    return st;
}

// A text, or [{"name": ..., "template": ...}, ...].
static enum status add_from_config(struct chat_template *t, const char *path, const json_t *config)
{
    const json_t *value = json_object_get(config, "chat_template"), *entry;
    char where[PATH_ROOM + 200];
    size_t i;
    snprintf(where, sizeof where, "%s, chat_template", path);
    if (!value || json_is_null(value)) return ST_OK;
    if (json_is_string(value))
        return add_template(t, where, "default", json_string_value(value),
                            json_string_length(value));
    if (!json_is_array(value))
        return status_fail(ST_FORMAT, "%s is neither a text nor a list of named templates", where);
    json_array_foreach (value, i, entry) {
        const char *name = json_string_value(json_object_get(entry, "name"));
        const json_t *text = json_object_get(entry, "template");
        if (!name || !json_is_string(text))
            return status_fail(ST_FORMAT, "%s: entry %zu is not {\"name\": ..., \"template\": ...}",
                               where, i);
        snprintf(where, sizeof where, "%s, chat_template \"%s\"", path, CUT(name, 80));
        enum status st =
            add_template(t, where, name, json_string_value(text), json_string_length(text));
        if (st != ST_OK) return st;
    }
    return ST_OK;
}

// ---- special tokens -----------------------------------------------------------------------------

// "text" or {"content": "text"}; those that are there already stay.
static enum status add_token(json_t *to, const char *name, const json_t *value)
{
    const json_t *text = json_is_object(value) ? json_object_get(value, "content") : value;
    if (!json_is_string(text) || json_object_get(to, name)) return ST_OK;
    if (json_object_set(to, name, (json_t *)text) != 0) // one more reference to it
        return status_fail(ST_NO_MEMORY, "out of memory");
    return ST_OK;
}

// bos_token and the other keys of that form, and the named ones of extra_special_tokens.
static enum status add_tokens(json_t *to, const json_t *from)
{
    const char *key;
    json_t *value;
    enum status st = ST_OK;
    json_object_foreach ((json_t *)from, key, value) { // only read
        size_t n = strlen(key);
        if (n > 6 && strcmp(key + n - 6, "_token") == 0) CHECK(add_token(to, key, value));
    }
    json_object_foreach (json_object_get(from, "extra_special_tokens"), key, value)
        CHECK(add_token(to, key, value));
out:
    return st;
}

// ---- finding ------------------------------------------------------------------------------------

// The names in one text, ", " between.
static void put_names(const struct chat_template *t, struct bytes *to)
{
    for (int i = 0; i < t->n; i++) bytes_printf(to, "%s%s", i ? ", " : "", t->list[i].name);
}

static enum status choose(struct chat_template *t, const char *folder, const char *name)
{
    struct bytes names = BYTES_INIT;
    enum status st = ST_OK;
    put_names(t, &names);
    t->chosen = name ? find_named(t, name) : -1;
    if (name && t->chosen < 0)
        st = status_fail(ST_INVALID,
                         "--chat-template %s: %s has no chat template of that name, but %s", name,
                         folder, t->n ? bytes_text(&names) : "none at all");
    else if (t->n == 0)
        st =
            status_fail(ST_NOT_FOUND,
                        "%s has no chat template, neither chat_template.jinja nor chat_template in "
                        "tokenizer_config.json; give one with --chat-template-file FILE",
                        folder);
    else if (!name && find_named(t, "default") < 0)
        st = status_fail(ST_INVALID,
                         "%s has several chat templates and none called default; name one with "
                         "--chat-template (%s)",
                         folder, bytes_text(&names));
    bytes_release(&names);
    return st;
}

static enum status set_source(struct chat_template *t, const char *path)
{
    struct bytes text = BYTES_INIT;
    bytes_puts(&text, path);
    if (t->chosen >= 0) {
        bytes_printf(&text, ", %s", t->list[t->chosen].name);
    } else if (t->n > 1) {
        bytes_puts(&text, " (");
        put_names(t, &text);
        bytes_puts(&text, ")");
    }
    enum status st = bytes_status(&text);
    if (st == ST_OK) t->source = text.data;
    return st;
}

// All templates there are, and which of them is meant.
static enum status read_templates(struct chat_template *t, const char *folder,
                                  const struct chat_template_choice *choice,
                                  const char *config_path, const json_t *config)
{
    char jinja[PATH_ROOM], more[PATH_ROOM];
    enum status st;
    CHECK(path_put(jinja, folder, "chat_template.jinja"));
    CHECK(path_put(more, folder, "additional_chat_templates"));
    const char *file = choice->file ? choice->file : file_exists(jinja) ? jinja : NULL;
    if (file)
        CHECK(add_file(t, file, "default"));
    else
        CHECK(add_from_config(t, config_path, config));
    if (!choice->file) CHECK(add_folder(t, more));
    CHECK(choose(t, folder, choice->name));
    st = set_source(t, file ? file : config_path);
out:
    return st;
}

enum status chat_template_find(const char *folder, const struct chat_template_choice *choice,
                               struct chat_template **ret)
{
    static const struct chat_template_choice none;
    json_t *config = NULL, *map = NULL;
    char config_path[PATH_ROOM];
    struct chat_template *t = calloc(1, sizeof *t);
    enum status st = ST_OK;
    if (!choice) choice = &none;
    CHECK(path_put(config_path, folder, "tokenizer_config.json"));
    if (!t || !(t->special_tokens = json_object())) FAIL(ST_NO_MEMORY, "%s: out of memory", folder);
    CHECK(model_file_read_json(folder, "tokenizer_config.json", MAX_CONFIG_BYTES, &config));
    CHECK(model_file_read_json(folder, "special_tokens_map.json", MAX_CONFIG_BYTES, &map));
    CHECK(read_templates(t, folder, choice, config_path, config));
    CHECK(add_tokens(t->special_tokens, config));
    CHECK(add_tokens(t->special_tokens, map));
    *ret = TAKE_PTR(t);
out:
    json_decref(config);
    json_decref(map);
    chat_template_free(t);
    return st;
}

enum status chat_template_parse(const char *where, const char *text, size_t len,
                                const json_t *special_tokens, struct chat_template **ret)
{
    enum status st;
    struct chat_template *t = calloc(1, sizeof *t);
    if (!t || !(t->special_tokens = json_object())) FAIL(ST_NO_MEMORY, "%s: out of memory", where);
    CHECK(add_template(t, where, "default", text, len));
    CHECK(choose(t, where, NULL));
    CHECK(add_tokens(t->special_tokens, special_tokens));
    CHECK(set_source(t, where));
    *ret = TAKE_PTR(t);
out:
    chat_template_free(t);
    return st;
}

// ---- rendering ----------------------------------------------------------------------------------

static bool is_given(const json_t *value)
{
    return value && !json_is_null(value);
}

static enum status check_input(const struct chat_input *input)
{
    size_t i;
    const json_t *message;
    if (!json_is_array(input->messages)) return status_fail(ST_INVALID, "messages is not a list");
    json_array_foreach (input->messages, i, message)
        if (!json_is_object(message))
            return status_fail(ST_INVALID, "messages[%zu] is not an object", i);
    if (is_given(input->tools) && !json_is_array(input->tools))
        return status_fail(ST_INVALID, "tools is not a list");
    if (is_given(input->kwargs) && !json_is_object(input->kwargs))
        return status_fail(ST_INVALID, "chat_template_kwargs is not an object");
    if (json_object_get(input->kwargs, "messages") || json_object_get(input->kwargs, "tools"))
        return status_fail(ST_INVALID,
                           "chat_template_kwargs holds messages or tools, which stand beside it");
    return ST_OK;
}

// What the template sees. A new reference.
static enum status make_variables(const struct chat_template *t, const struct chat_input *input,
                                  json_t **ret)
{
    json_t *all = json_copy(t->special_tokens),
           *own =
               json_pack("{s:O,s:O?,s:n,s:b}", "messages", input->messages, "tools", input->tools,
                         "documents", "add_generation_prompt", input->add_generation_prompt);
    bool ok = json_object_update_new(all, own) == 0;
    if (ok && is_given(input->kwargs)) ok = json_object_update(all, (json_t *)input->kwargs) == 0;
    if (!ok) {
        json_decref(all);
        return status_fail(ST_NO_MEMORY, "out of memory for a chat");
    }
    *ret = all;
    return ST_OK;
}

static const struct jinja *program_for(const struct chat_template *t,
                                       const struct chat_input *input)
{
    int with_tools = is_given(input->tools) ? find_named(t, "tool_use") : -1;
    int which = t->chosen >= 0 ? t->chosen : with_tools;
    return t->list[which >= 0 ? which : find_named(t, "default")].program;
}

enum status chat_template_render(const struct chat_template *t, const struct chat_input *input,
                                 struct bytes *ret)
{
    json_t *variables = NULL;
    enum status st = check_input(input);
    if (st == ST_OK) st = make_variables(t, input, &variables);
    if (st != ST_OK) return st;
    st = jinja_render(program_for(t, input), variables, input->now, NULL, ret);
    json_decref(variables);
    return st;
}

bool chat_template_mentions(const struct chat_template *t, const char *word)
{
    bool any = false;
    for (int i = 0; i < t->n; i++) any |= jinja_mentions(t->list[i].program, word);
    return any;
}

enum status chat_template_check_used(const struct chat_template *t, const struct chat_input *input)
{
    const struct jinja *program = program_for(t, input);
    const char *name;
    json_t *value;
    if (is_given(input->tools) && !jinja_mentions(program, "tools"))
        return status_fail(ST_UNSUPPORTED,
                           "\"tools\" would be ignored: the chat template (%s) does not read them",
                           t->source);
    json_object_foreach ((json_t *)input->kwargs, name, value) // only read
        if (!jinja_mentions(program, name))
            return status_fail(ST_UNSUPPORTED,
                               "\"chat_template_kwargs\": \"%s\" would be ignored: the chat "
                               "template (%s) does not read it",
                               CUT(name, 80), t->source);
    return ST_OK;
}

// ---- parts --------------------------------------------------------------------------------------

static enum status join_parts(const json_t *parts, size_t index, json_t **ret)
{
    struct bytes all = BYTES_INIT;
    const json_t *part;
    size_t i;
    enum status st = ST_OK;
    json_array_foreach (parts, i, part) {
        const json_t *text = json_object_get(part, "text");
        const char *type = json_string_value(json_object_get(part, "type"));
        if (!type || strcmp(type, "text") != 0 || !json_is_string(text))
            FAIL(ST_UNSUPPORTED,
                 "messages[%zu].content[%zu] is not {\"type\":\"text\",\"text\":...}; "
                 "only text is understood",
                 index, i);
        bytes_append(&all, json_string_value(text), json_string_length(text));
    }
    CHECK(bytes_status(&all));
    *ret = json_stringn(bytes_text(&all), all.len);
    if (!*ret) st = status_fail(ST_NO_MEMORY, "out of memory for a message");
out:
    bytes_release(&all);
    return st;
}

enum status chat_messages_join_parts(const struct chat_template *t, const json_t *messages,
                                     json_t **ret)
{
    bool as_is = false;
    const json_t *message;
    size_t i;
    for (int k = 0; k < t->n; k++) as_is |= jinja_loops_over_content(t->list[k].program);
    json_t *joined = as_is ? json_incref((json_t *)messages) : json_copy((json_t *)messages);
    enum status st = joined ? ST_OK : status_fail(ST_NO_MEMORY, "out of memory for the messages");
    json_array_foreach (messages, i, message) {
        const json_t *parts = json_object_get(message, "content");
        json_t *text = NULL, *copy;
        if (st != ST_OK || as_is) break;
        if (!json_is_array(parts)) continue;
        st = join_parts(parts, i, &text);
        copy = st == ST_OK ? json_copy((json_t *)message) : NULL;
        if (st == ST_OK && (!copy || json_object_set(copy, "content", text) != 0 ||
                            json_array_set(joined, i, copy) != 0))
            st = status_fail(ST_NO_MEMORY, "out of memory for a message");
        json_decref(text);
        json_decref(copy);
    }
    if (st == ST_OK)
        *ret = joined;
    else
        json_decref(joined);
    return st;
}
