/* chat_template.c: families of chat templates: how each is recognised, and how it is rendered.
 *
 * Recognition works on the template without its white space, its "\n" escapes and the difference
 * between the two quotes, so that reformatted copies are found. What varies within a family is
 * taken from the template itself: ChatML's default system message, whether contents are trimmed,
 * whether there is a generation prompt. */
#include "common/model/chat_template.h"
#include "common/base/file.h"
#include "common/base/json.h"
#include "common/model/unicode.h"
#include <stdlib.h>
#include <string.h>
#include <time.h>

struct text {
    const char *data;
    size_t len;
};

struct message {
    const char *role;
    struct text content, reasoning; // reasoning.data NULL: none given
};

struct chat {
    struct message *messages;
    size_t n;
    char **joined; // contents that came in parts, n of them or NULL
};

struct family;
struct chat_template {
    const struct family *family;
    char *bos, *eos;
    struct bytes default_system; // ChatML: for chats that start without one; empty: none
    bool has_default_system;
    bool trim;   // contents lose the white space around them
    bool prompt; // add_generation_prompt is heeded
};

typedef enum status (*render_function)(const struct chat_template *t, const struct chat *chat,
                                       bool add_generation_prompt, struct bytes *ret);

static enum status render_chatml(const struct chat_template *t, const struct chat *chat,
                                 bool prompt, struct bytes *ret);
static enum status render_llama2(const struct chat_template *t, const struct chat *chat,
                                 bool prompt, struct bytes *ret);
static enum status render_llama3(const struct chat_template *t, const struct chat *chat,
                                 bool prompt, struct bytes *ret);
static enum status render_phi(const struct chat_template *t, const struct chat *chat, bool prompt,
                              struct bytes *ret);
static enum status render_phi_medium(const struct chat_template *t, const struct chat *chat,
                                     bool prompt, struct bytes *ret);

enum thinking { NO_THINKING, THINKING_AFTER_LAST_QUERY, THINKING_ALWAYS };
enum date { NO_DATE, FIXED_DATE, TODAY };

struct family {
    const char *name;
    render_function render;
    const char *has[4];         // all of these are in the squeezed template,
    const char *has_not[4];     // and none of these
    const char *bos, *eos;      // where the folder names none
    const char *default_system; // when picked by name
    bool tool_role;
    enum thinking thinking;
    enum date date;
    bool trim;              // when picked by name
    bool skip_empty_system; // Phi-3.5
    const char *newline;    // Phi: behind a role and an <|end|>
};

#define QWEN25_SYSTEM "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."

// The first that fits is taken.
static const struct family families[] = {
    {.name = "minimind",
     .render = render_chatml,
     .tool_role = true,
     .thinking = THINKING_ALWAYS,
     .has = {"<|im_start|>", "open_thinking", "reasoning_content.strip("}},
    {.name = "qwen3",
     .render = render_chatml,
     .tool_role = true,
     .thinking = THINKING_AFTER_LAST_QUERY,
     .has = {"<|im_start|>", "enable_thinkingisfalse", "ns.last_query_index", "<tool_response>"}},
    {.name = "qwen2.5",
     .render = render_chatml,
     .tool_role = true,
     .default_system = QWEN25_SYSTEM,
     .has = {"<|im_start|>", "<|im_end|>", "<tool_response>", "message.role=='tool'"},
     .has_not = {"<think>", "<|im_sep|>"}},
    {.name = "qwen2",
     .render = render_chatml,
     .default_system = "You are a helpful assistant.",
     .has = {"<|im_start|>systemYouareahelpfulassistant.<|im_end|>", "<|im_end|>"},
     .has_not = {"<think>", "<|im_sep|>", "tool"}},
    {.name = "chatml",
     .render = render_chatml,
     .has = {"<|im_start|>", "<|im_end|>"},
     .has_not = {"<think>", "<|im_sep|>", "tool"}},
    {.name = "llama3.2",
     .render = render_llama3,
     .date = TODAY,
     .trim = true,
     .bos = "<|begin_of_text|>",
     .eos = "<|eot_id|>",
     .has = {"<|start_header_id|>", "CuttingKnowledgeDate:December2023", "strftime_now",
             "<|eot_id|>"}},
    {.name = "llama3.1",
     .render = render_llama3,
     .date = FIXED_DATE,
     .trim = true,
     .bos = "<|begin_of_text|>",
     .eos = "<|eot_id|>",
     .has = {"<|start_header_id|>", "CuttingKnowledgeDate:December2023", "26Jul2024", "<|eot_id|>"},
     .has_not = {"strftime_now"}},
    {.name = "llama3",
     .render = render_llama3,
     .trim = true,
     .bos = "<|begin_of_text|>",
     .eos = "<|eot_id|>",
     .has = {"<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "bos_token"},
     .has_not = {"CuttingKnowledgeDate", "tool", "strftime_now"}},
    {.name = "llama2",
     .render = render_llama2,
     .bos = "<s>",
     .eos = "</s>",
     .has = {"[INST]", "<<SYS>>", "bos_token", "eos_token"},
     .has_not = {"TOOL"}},
    {.name = "phi3-medium",
     .render = render_phi_medium,
     .bos = "<s>",
     .eos = "<|endoftext|>",
     .has = {"<|user|>", "<|end|>'+''+'<|assistant|>'"},
     .has_not = {"<|system|>"}},
    {.name = "phi3.5",
     .render = render_phi,
     .bos = "<s>",
     .eos = "<|endoftext|>",
     .newline = "\n",
     .skip_empty_system = true,
     .has = {"<|user|>", "<|end|>", "<|system|>",
             "message['role']=='system'andmessage['content']"}},
    {.name = "phi3",
     .render = render_phi,
     .bos = "<s>",
     .eos = "<|endoftext|>",
     .newline = "\n",
     .has = {"<|user|>", "<|end|>", "<|system|>", "<|assistant|>"},
     .has_not = {"<think>", "bos_token"}},
    {.name = "phi4-mini",
     .render = render_phi,
     .bos = "<|endoftext|>",
     .eos = "<|endoftext|>",
     .newline = "",
     .has = {"'<|'+message['role']+'|>'", "<|end|>", "<|assistant|>"},
     .has_not = {"<think>"}},
};
#define N_FAMILIES (sizeof(families) / sizeof(families[0]))

// ---- finding
// -------------------------------------------------------------------------------------

const char *chat_template_names(void)
{
    return "minimind, qwen3, qwen2.5, qwen2, chatml, llama3.2, llama3.1, llama3, llama2, "
           "phi3-medium, "
           "phi3.5, phi3, phi4-mini";
}

const char *chat_template_name(const struct chat_template *t)
{
    return t->family->name;
}

void chat_template_free(struct chat_template *t)
{
    if (!t) return;
    free(t->bos);
    free(t->eos);
    bytes_release(&t->default_system);
    free(t);
}

static void squeeze(const char *text, struct bytes *ret)
{
    for (const char *c = text; *c; c++) {
        if (strchr(" \t\r\n", *c)) continue;
        if (c[0] == '\\' && c[1] == 'n')
            c++;
        else
            bytes_append(ret, *c == '"' ? "'" : c, 1);
    }
}

static bool fits(const struct family *f, const char *squeezed)
{
    for (int i = 0; i < 4; i++) {
        if (f->has[i] && !strstr(squeezed, f->has[i])) return false;
        if (f->has_not[i] && strstr(squeezed, f->has_not[i])) return false;
    }
    return true;
}

// The literal in "<|im_start|>system\n" LITERAL "<|im_end|>", if the template has one.
static void take_default_system(struct chat_template *t, const char *text)
{
    static const char start[] = "<|im_start|>system";
    for (const char *at = text; (at = strstr(at, start));) {
        at += sizeof(start) - 1;
        const char *from = at + (at[0] == '\n' ? 1 : at[0] == '\\' && at[1] == 'n' ? 2 : 0);
        const char *end = strstr(from, "<|im_end|>");
        if (from == at || !end || from == end || memchr(from, '\'', (size_t)(end - from)) ||
            memchr(from, '"', (size_t)(end - from)) || memchr(from, '{', (size_t)(end - from)))
            continue;
        for (const char *c = from; c < end; c++) {
            bool newline = c[0] == '\\' && c[1] == 'n';
            bytes_append(&t->default_system, newline ? "\n" : c, 1);
            c += newline;
        }
        t->has_default_system = true;
        return;
    }
}

static const struct family *pick(const char *squeezed, const char *name)
{
    for (size_t i = 0; i < N_FAMILIES; i++)
        if (name ? strcmp(families[i].name, name) == 0 : fits(&families[i], squeezed))
            return &families[i];
    return NULL;
}

static char *copy(const char *given, const char *fallback)
{
    return strdup(given ? given : fallback ? fallback : "");
}

enum status chat_template_parse(const char *where, const char *text, const char *name,
                                const char *bos, const char *eos, struct chat_template **ret)
{
    struct bytes squeezed = BYTES_INIT;
    struct chat_template *t = calloc(1, sizeof(*t));
    enum status st = ST_OK;
    if (text) squeeze(text, &squeezed);
    if (!t || squeezed.failed) {
        st = status_fail(ST_NO_MEMORY, "%s: out of memory", where);
        goto out;
    }
    if (!name && !text) {
        st = status_fail(ST_UNSUPPORTED,
                         "%s has no chat_template; pick one with --chat-template NAME (%s)", where,
                         chat_template_names());
        goto out;
    }
    t->family = pick(bytes_text(&squeezed), name);
    if (!t->family) {
        st = name ? status_fail(ST_INVALID, "--chat-template %s is not known; known are %s", name,
                                chat_template_names())
                  : status_fail(ST_UNSUPPORTED,
                                "%s: its chat_template is of no known family; pick one with "
                                "--chat-template NAME (%s)",
                                where, chat_template_names());
        goto out;
    }
    t->bos = copy(bos, t->family->bos);
    t->eos = copy(eos, t->family->eos);
    if (name) {
        t->trim = t->family->trim;
        t->prompt = true;
        if (t->family->default_system) bytes_puts(&t->default_system, t->family->default_system);
        t->has_default_system = t->family->default_system;
    } else {
        t->trim = strstr(bytes_text(&squeezed), "|trim");
        t->prompt = strstr(text, "add_generation_prompt");
        if (t->family->render == render_chatml) take_default_system(t, text);
    }
    if (!t->bos || !t->eos || t->default_system.failed) {
        st = status_fail(ST_NO_MEMORY, "%s: out of memory", where);
        goto out;
    }
    *ret = t;
    t = NULL;
out:
    chat_template_free(t);
    bytes_release(&squeezed);
    return st;
}

// A token of a config file: "text" or {"content": "text"}.
static const char *token_of(const json_t *file, const char *key)
{
    const json_t *value = json_object_get(file, key);
    return json_string_value(json_is_object(value) ? json_object_get(value, "content") : value);
}

// tokenizer_config.json's template; of a list of named ones, "default".
static const char *template_of(const json_t *config)
{
    const json_t *value = json_object_get(config, "chat_template");
    for (size_t i = 0; i < json_array_size(value); i++) {
        const json_t *entry = json_array_get(value, i);
        const char *name = json_string_value(json_object_get(entry, "name"));
        if (name && strcmp(name, "default") == 0)
            return json_string_value(json_object_get(entry, "template"));
    }
    return json_string_value(value);
}

static enum status read_optional(const char *path, json_t **ret)
{
    return path && file_exists(path) ? json_read_file(path, (size_t)64 << 20, ret) : ST_OK;
}

enum status chat_template_find(const char *folder, const char *name, struct chat_template **ret)
{
    json_t *config = NULL, *map = NULL;
    struct bytes jinja = BYTES_INIT;
    char *config_path = path_join(folder, "tokenizer_config.json");
    char *map_path = path_join(folder, "special_tokens_map.json");
    char *jinja_path = path_join(folder, "chat_template.jinja");
    enum status st = ST_OK;
    if (!config_path || !map_path || !jinja_path) {
        st = status_fail(ST_NO_MEMORY, "out of memory");
        goto out;
    }
    CHECK(read_optional(config_path, &config));
    CHECK(read_optional(map_path, &map));
    const char *text = template_of(config), *where = config_path;
    if (file_exists(jinja_path)) {
        CHECK(file_read(jinja_path, (size_t)16 << 20, &jinja));
        text = bytes_text(&jinja);
        where = jinja_path;
    }
    const char *bos = token_of(config, "bos_token"), *eos = token_of(config, "eos_token");
    st = chat_template_parse(where, text, name, bos ? bos : token_of(map, "bos_token"),
                             eos ? eos : token_of(map, "eos_token"), ret);
out:
    json_decref(config);
    json_decref(map);
    bytes_release(&jinja);
    free(config_path);
    free(map_path);
    free(jinja_path);
    return st;
}

// ---- messages
// ------------------------------------------------------------------------------------

static void chat_release(struct chat *chat)
{
    for (size_t i = 0; chat->joined && i < chat->n; i++) free(chat->joined[i]);
    free(chat->joined);
    free(chat->messages);
}

static struct text text_of(const json_t *string)
{
    return (struct text){json_string_value(string), json_string_length(string)};
}

// [{"type":"text","text":"..."}, ...], as OpenAI's clients may send it
static enum status join_parts(const json_t *parts, size_t index, char **ret_joined,
                              struct text *ret)
{
    struct bytes all = BYTES_INIT;
    for (size_t i = 0; i < json_array_size(parts); i++) {
        const json_t *part = json_array_get(parts, i), *text = json_object_get(part, "text");
        const char *type = json_string_value(json_object_get(part, "type"));
        if (!type || strcmp(type, "text") != 0 || !json_is_string(text)) {
            bytes_release(&all);
            return status_fail(
                ST_INVALID,
                "messages[%zu].content[%zu] is not {\"type\":\"text\",\"text\":...}; "
                "only text is understood",
                index, i);
        }
        bytes_append(&all, json_string_value(text), json_string_length(text));
    }
    enum status st = bytes_status(&all);
    if (st == ST_OK) {
        *ret_joined = all.data;
        *ret = (struct text){bytes_text(&all), all.len};
    } else {
        bytes_release(&all);
    }
    return st;
}

static enum status read_message(const struct chat_template *t, const json_t *item, size_t i,
                                struct chat *chat)
{
    struct message *m = &chat->messages[i];
    if (!json_is_object(item)) return status_fail(ST_INVALID, "messages[%zu] is not an object", i);
    const json_t *role = json_object_get(item, "role"), *content = json_object_get(item, "content");
    const json_t *reasoning = json_object_get(item, "reasoning_content");
    if (!json_is_string(role))
        return status_fail(ST_INVALID, "messages[%zu].role is not a string", i);
    m->role = json_string_value(role);
    bool known = strcmp(m->role, "system") == 0 || strcmp(m->role, "user") == 0 ||
                 strcmp(m->role, "assistant") == 0 ||
                 (t->family->tool_role && strcmp(m->role, "tool") == 0);
    if (!known)
        return status_fail(ST_INVALID,
                           "messages[%zu].role is \"%s\"; the chat template %s knows system, user"
                           "%s",
                           i, m->role, t->family->name,
                           t->family->tool_role ? ", assistant and tool" : " and assistant");
    if (json_has(item, "tool_calls"))
        return status_fail(ST_UNSUPPORTED, "messages[%zu].tool_calls is not supported", i);
    if (json_is_array(content)) {
        enum status st = join_parts(content, i, &chat->joined[i], &m->content);
        if (st != ST_OK) return st;
    } else if (json_is_string(content)) {
        m->content = text_of(content);
    } else {
        return status_fail(ST_INVALID, "messages[%zu].content is not a string", i);
    }
    if (json_is_string(reasoning)) m->reasoning = text_of(reasoning);
    return ST_OK;
}

static enum status read_chat(const struct chat_template *t, const json_t *messages,
                             struct chat *chat)
{
    if (!json_is_array(messages)) return status_fail(ST_INVALID, "messages is not a list");
    size_t n = json_array_size(messages);
    if (n == 0)
        return status_fail(ST_INVALID, "messages is empty; a chat needs at least one message");
    chat->messages = calloc(n, sizeof(*chat->messages));
    chat->joined = calloc(n, sizeof(*chat->joined));
    chat->n = n;
    if (!chat->messages || !chat->joined)
        return status_fail(ST_NO_MEMORY, "out of memory for %zu messages", n);
    for (size_t i = 0; i < n; i++) {
        enum status st = read_message(t, json_array_get(messages, i), i, chat);
        if (st != ST_OK) return st;
    }
    return ST_OK;
}

enum status chat_template_render(const struct chat_template *t, const json_t *messages,
                                 bool add_generation_prompt, struct bytes *ret)
{
    struct chat chat = {NULL, 0, NULL};
    struct bytes text = BYTES_INIT;
    enum status st;
    CHECK(read_chat(t, messages, &chat));
    CHECK(t->family->render(t, &chat, add_generation_prompt, &text));
    CHECK(bytes_status(&text));
    bytes_append(ret, bytes_text(&text), text.len);
    st = bytes_status(ret);
out:
    bytes_release(&text);
    chat_release(&chat);
    return st;
}

// ---- text, with the meaning of Python's methods
// --------------------------------------------------

static bool is(const struct message *m, const char *role)
{
    return strcmp(m->role, role) == 0;
}

static void put(struct bytes *ret, struct text text)
{
    bytes_append(ret, text.data, text.len);
}

static struct text lstrip_newlines(struct text s)
{
    while (s.len > 0 && s.data[0] == '\n') s = (struct text){s.data + 1, s.len - 1};
    return s;
}

static struct text rstrip_newlines(struct text s)
{
    while (s.len > 0 && s.data[s.len - 1] == '\n') s.len--;
    return s;
}

static struct text before_first(struct text s, const char *mark)
{
    const char *at = memmem(s.data, s.len, mark, strlen(mark));
    return at ? (struct text){s.data, (size_t)(at - s.data)} : s;
}

static struct text after_last(struct text s, const char *mark)
{
    size_t n = strlen(mark);
    for (const char *at; (at = memmem(s.data, s.len, mark, n));)
        s = (struct text){at + n, s.len - n - (size_t)(at - s.data)};
    return s;
}

static bool is_python_space(uint32_t c)
{
    return unicode_is_space(c) || (c >= 0x1C && c <= 0x1F);
}

static struct text strip(struct text s)
{
    size_t start = s.len, end = 0;
    for (size_t i = 0; i < s.len;) {
        int n = utf8_sequence(s.data + i, s.len - i);
        if (n < 1) n = 1;
        if (!is_python_space(n == 1 ? (unsigned char)s.data[i] : utf8_decode(s.data + i, n))) {
            if (start == s.len) start = i;
            end = i + (size_t)n;
        }
        i += (size_t)n;
    }
    return start < end ? (struct text){s.data + start, end - start} : (struct text){s.data, 0};
}

static struct text content_of(const struct chat_template *t, const struct message *m)
{
    return t->trim ? strip(m->content) : m->content;
}

// ---- ChatML: Qwen, minimind and others
// -----------------------------------------------------------

static void put_turn(struct bytes *ret, const char *role, struct text content)
{
    bytes_printf(ret, "<|im_start|>%s\n", role);
    put(ret, content);
    bytes_puts(ret, "<|im_end|>\n");
}

// Tool results stand in a user turn; neighbours share one.
static void put_tool_result(const struct chat *chat, size_t i, struct text content,
                            struct bytes *ret)
{
    if (i == 0 || !is(&chat->messages[i - 1], "tool")) bytes_puts(ret, "<|im_start|>user");
    bytes_puts(ret, "\n<tool_response>\n");
    put(ret, content);
    bytes_puts(ret, "\n</tool_response>");
    if (i + 1 == chat->n || !is(&chat->messages[i + 1], "tool")) bytes_puts(ret, "<|im_end|>\n");
}

static bool starts_with(struct text s, const char *mark)
{
    size_t n = strlen(mark);
    return s.len >= n && memcmp(s.data, mark, n) == 0;
}

static bool ends_with(struct text s, const char *mark)
{
    size_t n = strlen(mark);
    return s.len >= n && memcmp(s.data + s.len - n, mark, n) == 0;
}

// The last message in which a person asked something; the last one of all if there is none.
static size_t last_query(const struct chat *chat)
{
    for (size_t i = chat->n; i-- > 0;) {
        const struct message *m = &chat->messages[i];
        if (is(m, "user") && !(starts_with(m->content, "<tool_response>") &&
                               ends_with(m->content, "</tool_response>")))
            return i;
    }
    return chat->n - 1;
}

static void put_thinking_turn(const struct chat_template *t, const struct chat *chat, size_t i,
                              struct bytes *ret)
{
    struct text content = chat->messages[i].content, reasoning = chat->messages[i].reasoning;
    if (!reasoning.data && memmem(content.data, content.len, "</think>", 8)) {
        reasoning = rstrip_newlines(before_first(content, "</think>"));
        reasoning = lstrip_newlines(after_last(reasoning, "<think>"));
        content = lstrip_newlines(after_last(content, "</think>"));
    }
    bool shown = t->family->thinking == THINKING_ALWAYS ||
                 (i > last_query(chat) && (i + 1 == chat->n || reasoning.len > 0));
    bytes_puts(ret, "<|im_start|>assistant\n");
    if (shown) {
        bytes_puts(ret, "<think>\n");
        put(ret, rstrip_newlines(lstrip_newlines(reasoning)));
        bytes_puts(ret, "\n</think>\n\n");
        content = lstrip_newlines(content);
    }
    put(ret, content);
    bytes_puts(ret, "<|im_end|>\n");
}

static enum status render_chatml(const struct chat_template *t, const struct chat *chat,
                                 bool prompt, struct bytes *ret)
{
    if (t->has_default_system && !is(&chat->messages[0], "system"))
        put_turn(ret, "system",
                 (struct text){bytes_text(&t->default_system), t->default_system.len});
    for (size_t i = 0; i < chat->n; i++) {
        const struct message *m = &chat->messages[i];
        if (is(m, "tool"))
            put_tool_result(chat, i, m->content, ret);
        else if (is(m, "assistant") && t->family->thinking != NO_THINKING)
            put_thinking_turn(t, chat, i, ret);
        else
            put_turn(ret, m->role, content_of(t, m));
    }
    if (prompt && t->prompt) {
        bytes_puts(ret, "<|im_start|>assistant\n");
        if (t->family->thinking == THINKING_ALWAYS) bytes_puts(ret, "<think>\n\n</think>\n\n");
    }
    return ST_OK;
}

// ---- Llama
// ---------------------------------------------------------------------------------------

static enum status render_llama2(const struct chat_template *t, const struct chat *chat,
                                 bool prompt, struct bytes *ret)
{
    (void)prompt; // an [INST] is one
    const struct message *first = chat->messages;
    size_t start = is(first, "system") ? 1 : 0;
    for (size_t i = start; i < chat->n; i++) {
        const struct message *m = &chat->messages[i];
        if (is(m, "user") != ((i - start) % 2 == 0) || is(m, "system"))
            return status_fail(ST_INVALID,
                               "messages[%zu].role is \"%s\": after an optional system message, "
                               "roles must alternate user, assistant, user, ...",
                               i, m->role);
        if (is(m, "assistant")) {
            bytes_puts(ret, " ");
            put(ret, strip(m->content));
            bytes_printf(ret, " %s", t->eos);
            continue;
        }
        struct bytes content = BYTES_INIT;
        if (start == 1 && i == 1) {
            bytes_puts(&content, "<<SYS>>\n");
            put(&content, first->content);
            bytes_puts(&content, "\n<</SYS>>\n\n");
        }
        put(&content, m->content);
        bytes_printf(ret, "%s[INST] ", t->bos);
        put(ret, strip((struct text){bytes_text(&content), content.len}));
        bytes_puts(ret, " [/INST]");
        enum status st = bytes_status(&content);
        bytes_release(&content);
        if (st != ST_OK) return st;
    }
    return ST_OK;
}

static void put_header(struct bytes *ret, const char *role)
{
    bytes_printf(ret, "<|start_header_id|>%s<|end_header_id|>\n\n", role);
}

static void put_date(const struct chat_template *t, struct bytes *ret)
{
    char date[32] = "26 Jul 2024";
    if (t->family->date == TODAY) {
        static const char *const months[] = {"Jan", "Feb", "Mar", "Apr", "May", "Jun",
                                             "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"};
        time_t now = time(NULL);
        struct tm tm;
        if (localtime_r(&now, &tm))
            snprintf(date, sizeof(date), "%02d %s %d", tm.tm_mday, months[tm.tm_mon],
                     tm.tm_year + 1900);
    }
    bytes_printf(ret, "Cutting Knowledge Date: December 2023\nToday Date: %s\n\n", date);
}

static enum status render_llama3(const struct chat_template *t, const struct chat *chat,
                                 bool prompt, struct bytes *ret)
{
    size_t start = 0;
    bytes_puts(ret, t->bos);
    if (t->family->date != NO_DATE) { // 3.1 and later always begin with a system turn
        put_header(ret, "system");
        put_date(t, ret);
        if (is(&chat->messages[0], "system")) put(ret, content_of(t, &chat->messages[start++]));
        bytes_puts(ret, "<|eot_id|>");
    }
    for (size_t i = start; i < chat->n; i++) {
        put_header(ret, chat->messages[i].role);
        put(ret, content_of(t, &chat->messages[i]));
        bytes_puts(ret, "<|eot_id|>");
    }
    if (prompt || !t->prompt)
        put_header(ret, "assistant"); // early Llama 3 templates always have it
    return ST_OK;
}

// ---- Phi
// -----------------------------------------------------------------------------------------

static enum status render_phi(const struct chat_template *t, const struct chat *chat, bool prompt,
                              struct bytes *ret)
{
    const char *newline = t->family->newline;
    for (size_t i = 0; i < chat->n; i++) {
        const struct message *m = &chat->messages[i];
        if (t->family->skip_empty_system && is(m, "system") && m->content.len == 0) continue;
        bytes_printf(ret, "<|%s|>%s", m->role, newline);
        put(ret, content_of(t, m));
        bytes_printf(ret, "<|end|>%s", newline);
    }
    if (prompt)
        bytes_printf(ret, "<|assistant|>%s", newline);
    else
        bytes_puts(ret, t->eos);
    return ST_OK;
}

static enum status render_phi_medium(const struct chat_template *t, const struct chat *chat,
                                     bool prompt, struct bytes *ret)
{
    (void)prompt; // stands behind every user message
    (void)t;
    for (size_t i = 0; i < chat->n; i++) {
        const struct message *m = &chat->messages[i];
        if (is(m, "system"))
            return status_fail(ST_INVALID,
                               "messages[%zu].role is \"system\"; the chat template phi3-medium "
                               "knows user and assistant only",
                               i);
        if (is(m, "user")) bytes_puts(ret, "<|user|>\n");
        put(ret, m->content);
        bytes_printf(ret, "<|end|>\n%s", is(m, "user") ? "<|assistant|>\n" : "");
    }
    return ST_OK;
}
