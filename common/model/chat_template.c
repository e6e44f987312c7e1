/* chat_template.c: families of chat templates and how each is recognised; chat_render.c has what
 * each gives.
 *
 * Recognition works on two forms of the template. Squeezed: without its white space, its "\n"
 * escapes and the difference between the two quotes, so that reformatted copies are found.
 * Tightened: the same within tags, but string literals keep every character (escapes resolved) and
 * so does the text between tags, so that families that differ in a space are told apart. What
 * varies within a family is taken from the template itself: the default system message, whether
 * contents are trimmed, whether there is a bos token and a generation prompt. Any thread. */
#include "common/model/chat_template_impl.h"
#include "common/base/file.h"
#include "common/base/json.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define QWEN25_SYSTEM "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
#define DEEPSEEK_CODER_SYSTEM                                                                      \
    "You are an AI programming assistant, utilizing the Deepseek Coder model, developed by "       \
    "Deepseek Company, and you only answer questions related to computer science. For "            \
    "politically sensitive questions, security and privacy issues, and other non-computer "        \
    "science questions, you will refuse to answer\n"
#define STARCODER2_INTRO                                                                           \
    "You are an exceptionally intelligent coding assistant that consistently delivers accurate "   \
    "and reliable responses to user instructions.\n\n"
#define ONLY_TWO_ROLES "'Only user and assistant roles are supported!'"
#define AND_SYSTEM                                                                                 \
    "Only user and assistant roles are supported, with the exception of an initial optional "      \
    "system message!"

// The first that fits is taken.
static const struct chat_family families[] = {
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
    {.name = "yi-1.5",
     .render = render_turns,
     .eos = "<|im_end|>",
     .exact = {"{{system_message}}",
               "{{'<|im_start|>user\n'+content+'<|im_end|>\n<|im_start|>assistant\n'}}",
               "{{content+'<|im_end|>'+'\n'}}"},
     .turns = {.system = {"", ""},
               .user = {"<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"},
               .assistant = {"", "<|im_end|>\n"},
               .system_place = SYSTEM_FIRST_MESSAGE}},
    {.name = "chatml",
     .render = render_chatml,
     .has = {"<|im_start|>", "<|im_end|>"},
     .has_not = {"<think>", "<|im_sep|>", "tool", "<|im_end|><|im_start|>assistant"}},
    {.name = "phi4",
     .render = render_turns,
     .eos = "<|im_end|>",
     .exact = {"{{'<|im_start|>system<|im_sep|>'+message['content']+'<|im_end|>'}}",
               "{{'<|im_start|>user<|im_sep|>'+message['content']+'<|im_end|>'}}",
               "{{'<|im_start|>assistant<|im_sep|>'+message['content']+'<|im_end|>'}}",
               "{{'<|im_start|>assistant<|im_sep|>'}}"},
     .turns = {.system = {"<|im_start|>system<|im_sep|>", "<|im_end|>"},
               .user = {"<|im_start|>user<|im_sep|>", "<|im_end|>"},
               .assistant = {"<|im_start|>assistant<|im_sep|>", "<|im_end|>"},
               .prompt = "<|im_start|>assistant<|im_sep|>",
               .system_place = SYSTEM_TURN}},
    {.name = "phi4-first", // as first published: the prompt stands behind every user message
     .render = render_turns,
     .eos = "<|im_end|>",
     .exact = {"{{'<|im_start|>system<|im_sep|>'+message['content']+'<|im_end|>'}}",
               "'<|im_start|>user<|im_sep|>'+message['content']+'<|im_end|><|im_start|>assistant<|"
               "im_sep|>'}}",
               "{{message['content']+'<|im_end|>'}}"},
     .turns = {.system = {"<|im_start|>system<|im_sep|>", "<|im_end|>"},
               .user = {"<|im_start|>user<|im_sep|>", "<|im_end|><|im_start|>assistant<|im_sep|>"},
               .assistant = {"", "<|im_end|>"},
               .system_place = SYSTEM_TURN}},
    {.name = "gemma", // Gemma and Gemma 2
     .render = render_turns,
     .bos = "<bos>",
     .eos = "<eos>",
     .puts_bos = true,
     .trim = true,
     .exact = {"{{'<start_of_turn>'+role+'\n'+message['content']|trim+'<end_of_turn>\n'}}",
               "'System role not supported'", "{{'<start_of_turn>model\n'}}"},
     .turns = {.user = {"<start_of_turn>user\n", "<end_of_turn>\n"},
               .assistant = {"<start_of_turn>model\n", "<end_of_turn>\n"},
               .prompt = "<start_of_turn>model\n",
               .alternate = true}},
    {.name = "mistral-v0.1", // Mistral-7B-Instruct-v0.1 as first published
     .render = render_turns,
     .bos = "<s>",
     .eos = "</s>",
     .puts_bos = true,
     .exact = {"'[INST] '+message['content']+' [/INST]'}}", "{{message['content']+eos_token+' '}}",
               ONLY_TWO_ROLES},
     .has_not = {"<<SYS>>", "system_message", "tools"},
     .turns = {.user = {"[INST] ", " [/INST]"}, .assistant = {"", EOS " "}, .alternate = true}},
    {.name = "mistral-v0.2", // v0.2 and v0.3 and Mixtral as first published
     .render = render_turns,
     .bos = "<s>",
     .eos = "</s>",
     .puts_bos = true,
     .exact = {"'[INST] '+message['content']+' [/INST]'}}", "{{message['content']+eos_token}}",
               ONLY_TWO_ROLES},
     .has_not = {"<<SYS>>", "system_message", "tools"},
     .turns = {.user = {"[INST] ", " [/INST]"}, .assistant = {"", EOS}, .alternate = true}},
    {.name = "mistral-v1", // v0.1, v0.2 and Mixtral since they take a system message
     .render = render_turns,
     .bos = "<s>",
     .eos = "</s>",
     .puts_bos = true,
     .exact = {"loop.firstandsystem_messageisdefined",
               "' [INST] '+system_message+'\n\n'+message['content']+' [/INST]'",
               "' [INST] '+message['content']+' [/INST]'}}", "' '+message['content']+eos_token}}",
               AND_SYSTEM},
     .turns = {.user = {" [INST] ", " [/INST]"},
               .assistant = {" ", EOS},
               .alternate = true,
               .system_place = SYSTEM_IN_FIRST_USER}},
    {.name = "mistral-v3", // v0.3, with tools
     .render = render_turns,
     .bos = "<s>",
     .eos = "</s>",
     .puts_bos = true,
     .exact = {"loop.lastandsystem_messageisdefined",
               "'[INST] '+system_message+'\n\n'+message['content']+'[/INST]'",
               "'[INST] '+message['content']+'[/INST]'}}",
               "' '+message['content']|trim+eos_token}}", AND_SYSTEM},
     .turns = {.user = {"[INST] ", "[/INST]"},
               .assistant = {" ", EOS},
               .alternate = true,
               .trim_assistant = true,
               .system_place = SYSTEM_IN_LAST_USER}},
    {.name = "mistral-v3-tekken", // Mistral-Nemo
     .render = render_turns,
     .bos = "<s>",
     .eos = "</s>",
     .puts_bos = true,
     .exact = {"loop.lastandsystem_messageisdefined",
               "'[INST]'+system_message+'\n\n'+message['content']+'[/INST]'",
               "'[INST]'+message['content']+'[/INST]'}}", "{{-message['content']+eos_token}}",
               AND_SYSTEM},
     .turns = {.user = {"[INST]", "[/INST]"},
               .assistant = {"", EOS},
               .alternate = true,
               .system_place = SYSTEM_IN_LAST_USER}},
    {.name = "deepseek-coder",
     .render = render_turns,
     .bos = "<\xef\xbd\x9c"
            "begin\xe2\x96\x81of\xe2\x96\x81sentence\xef\xbd\x9c>",
     .eos = "<|EOT|>",
     .puts_bos = true,
     .default_system = DEEPSEEK_CODER_SYSTEM,
     .intro_mark = "{%-ifnotns.found-%}",
     .exact = {"{%-ifnotns.found-%}", "{{'### Instruction:\n'+message['content']+'\n'}}",
               "{{'### Response:\n'+message['content']+'\n<|EOT|>\n'}}", "{{'### Response:'}}\n"},
     .turns = {.system = {"", ""},
               .user = {"### Instruction:\n", "\n"},
               .assistant = {"### Response:\n", "\n<|EOT|>\n"},
               .prompt = "### Response:\n",
               .system_place = SYSTEM_TURN}},
    {.name = "deepseek",
     .render = render_turns,
     .bos = "<\xef\xbd\x9c"
            "begin\xe2\x96\x81of\xe2\x96\x81sentence\xef\xbd\x9c>",
     .eos = "<\xef\xbd\x9c"
            "end\xe2\x96\x81of\xe2\x96\x81sentence\xef\xbd\x9c>",
     .puts_bos = true,
     .exact = {"{{'User: '+message['content']+'\n\n'}}",
               "{{'Assistant: '+message['content']+eos_token}}", "{{message['content']+'\n\n'}}",
               "{{'Assistant:'}}"},
     .turns = {.system = {"", "\n\n"},
               .user = {"User: ", "\n\n"},
               .assistant = {"Assistant: ", EOS},
               .prompt = "Assistant:",
               .system_place = SYSTEM_TURN}},
    {.name = "starcoder2",
     .render = render_turns,
     .bos = "<|endoftext|>",
     .eos = "<|endoftext|>",
     .puts_bos = true,
     .default_system = STARCODER2_INTRO,
     .intro_mark = "{{bos_token}}",
     .exact = {"{{bos_token}}{{'", "{{'### Instruction\n'+message['content']+'\n\n'}}",
               "{{'### Response\n'+message['content']+eos_token+'\n\n'}}", "{{'### Response\n'}}"},
     .turns = {.user = {"### Instruction\n", "\n\n"},
               .assistant = {"### Response\n", EOS "\n\n"},
               .prompt = "### Response\n",
               .always_intro = true,
               .always_prompt = true}},
    {.name = "zephyr", // zephyr-beta and its copies (TinyLlama-Chat): a line break behind each turn
     .render = render_turns,
     .eos = "</s>",
     .exact = {"{{'<|user|>\n'+message['content']+eos_token}}\n",
               "{{'<|system|>\n'+message['content']+eos_token}}\n",
               "{{'<|assistant|>\n'+message['content']+eos_token}}\n", "{{'<|assistant|>'}}\n"},
     .turns = {.system = {"<|system|>\n", EOS "\n"},
               .user = {"<|user|>\n", EOS "\n"},
               .assistant = {"<|assistant|>\n", EOS "\n"},
               .prompt = "<|assistant|>\n",
               .system_place = SYSTEM_TURN}},
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
     .has = {"<|end|>", "<|assistant|>"},
     .exact = {"'<|'+message['role']+'|>'+message['content']+'<|end|>'"},
     .has_not = {"<think>"}},
};
#define N_FAMILIES (sizeof(families) / sizeof(families[0]))

// ---- finding ------------------------------------------------------------------------------------

const char *chat_template_names(void)
{
    static _Thread_local char text[512];
    size_t at = 0;
    for (size_t i = 0; i < N_FAMILIES && at < sizeof(text); i++)
        at +=
            (size_t)snprintf(text + at, sizeof(text) - at, "%s%s", i ? ", " : "", families[i].name);
    return text;
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

// The character that an escape in a literal stands for.
static char unescape(char c)
{
    return c == 'n' ? '\n' : c == 't' ? '\t' : c == 'r' ? '\r' : c;
}

static void tighten(const char *text, struct bytes *ret)
{
    bool in_tag = false;
    char quote = '\0'; // of the literal at hand
    for (const char *c = text; *c; c++) {
        if (quote && *c == '\\' && c[1]) {
            char resolved = unescape(*++c);
            bytes_append(ret, &resolved, 1);
        } else if (quote) {
            bytes_append(ret, *c == quote ? "'" : c, 1);
            if (*c == quote) quote = '\0';
        } else if (!in_tag && c[0] == '{' && c[1] == '#') {
            const char *end = strstr(c, "#}");
            if (!end) break;
            c = end + 1;
        } else if (!in_tag || *c == '%' || *c == '}') {
            bool opens = !in_tag && c[0] == '{' && (c[1] == '{' || c[1] == '%');
            bool closes = in_tag && c[1] == '}';
            bytes_append(ret, c, opens || closes ? 2 : 1);
            c += opens || closes;
            in_tag = opens || (in_tag && !closes);
        } else if (*c == '\'' || *c == '"') {
            quote = *c;
            bytes_puts(ret, "'");
        } else if (!strchr(" \t\r\n", *c)) {
            bytes_append(ret, c, 1);
        }
    }
}

static bool fits(const struct chat_family *f, const char *squeezed, const char *tight)
{
    for (int i = 0; i < 4; i++) {
        if (f->has[i] && !strstr(squeezed, f->has[i])) return false;
        if (f->has_not[i] && strstr(squeezed, f->has_not[i])) return false;
    }
    for (int i = 0; i < 5; i++)
        if (f->exact[i] && !strstr(tight, f->exact[i])) return false;
    return true;
}

// The literal of the first {{'...'}} behind the family's mark.
static void take_intro(struct chat_template *t, const char *tight)
{
    const char *mark = strstr(tight, t->family->intro_mark);
    const char *from = mark ? strstr(mark + strlen(t->family->intro_mark), "{{'") : NULL;
    const char *end = from ? strstr(from, "'}}") : NULL;
    if (!end) return;
    bytes_append(&t->default_system, from + 3, (size_t)(end - from) - 3);
    t->has_default_system = true;
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

static const struct chat_family *pick(const char *squeezed, const char *tight, const char *name)
{
    for (size_t i = 0; i < N_FAMILIES; i++)
        if (name ? strcmp(families[i].name, name) == 0 : fits(&families[i], squeezed, tight))
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
    struct bytes squeezed = BYTES_INIT, tight = BYTES_INIT;
    struct chat_template *t = calloc(1, sizeof(*t));
    enum status st = ST_OK;
    if (text) squeeze(text, &squeezed);
    if (text) tighten(text, &tight);
    if (!t || squeezed.failed || tight.failed) {
        st = status_fail(ST_NO_MEMORY, "%s: out of memory", where);
        goto out;
    }
    if (!name && !text) {
        st = status_fail(ST_NOT_FOUND,
                         "%s has no chat_template; pick one with --chat-template NAME (%s)", where,
                         chat_template_names());
        goto out;
    }
    t->family = pick(bytes_text(&squeezed), bytes_text(&tight), name);
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
        t->puts_bos = t->family->puts_bos;
        t->prompt = true;
        if (t->family->default_system) bytes_puts(&t->default_system, t->family->default_system);
        t->has_default_system = t->family->default_system;
    } else {
        t->trim = !t->family->turns.trim_assistant && strstr(bytes_text(&squeezed), "|trim");
        t->puts_bos = strstr(text, "bos_token");
        t->prompt = strstr(text, "add_generation_prompt");
        if (t->family->render == render_chatml) take_default_system(t, text);
        if (t->family->intro_mark) take_intro(t, bytes_text(&tight));
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
    bytes_release(&tight);
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

// ---- messages -----------------------------------------------------------------------------------

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
