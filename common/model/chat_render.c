/* chat_render.c: the text of a chat, for each kind of template that chat_template.c recognises.
 * Each function gives what the family's Jinja programs give, their refusals included. Nothing is
 * kept between calls; any thread. */
#include "common/model/chat_template_impl.h"
#include "common/model/unicode.h"
#include <stdio.h>
#include <string.h>
#include <time.h>

// ---- text, with the meaning of Python's methods ------------------------------------------------

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

struct text text_strip(struct text s)
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
    return t->trim ? text_strip(m->content) : m->content;
}

// ---- ChatML: Qwen, minimind and others ----------------------------------------------------------

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

enum status render_chatml(const struct chat_template *t, const struct chat *chat, bool prompt,
                          struct bytes *ret)
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

// ---- Llama --------------------------------------------------------------------------------------

enum status render_llama2(const struct chat_template *t, const struct chat *chat, bool prompt,
                          struct bytes *ret)
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
            put(ret, text_strip(m->content));
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
        put(ret, text_strip((struct text){bytes_text(&content), content.len}));
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

enum status render_llama3(const struct chat_template *t, const struct chat *chat, bool prompt,
                          struct bytes *ret)
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

// ---- Phi ----------------------------------------------------------------------------------------

enum status render_phi(const struct chat_template *t, const struct chat *chat, bool prompt,
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

enum status render_phi_medium(const struct chat_template *t, const struct chat *chat, bool prompt,
                              struct bytes *ret)
{
    (void)prompt; // stands behind every user message
    if (t->puts_bos) bytes_puts(ret, t->bos);
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

// ---- turns in fixed texts: Gemma, Mistral, zephyr and others -----------------------------------

static void put_fixed(const struct chat_template *t, const char *text, struct bytes *ret)
{
    for (; *text; text++) {
        if (*text == EOS[0])
            bytes_puts(ret, t->eos);
        else
            bytes_append(ret, text, 1);
    }
}

static enum status check_turns(const struct chat_template *t, const struct chat *chat, size_t start)
{
    const struct turns *turns = &t->family->turns;
    for (size_t i = start; i < chat->n; i++) {
        const struct message *m = &chat->messages[i];
        if (is(m, "system") && turns->system_place == SYSTEM_REFUSED)
            return status_fail(
                ST_INVALID,
                "messages[%zu].role is \"system\"; the chat template %s has no system "
                "role (put its text into the first user message)",
                i, t->family->name);
        if (turns->alternate && (is(m, "system") || is(m, "user") != ((i - start) % 2 == 0)))
            return status_fail(
                ST_INVALID,
                "messages[%zu].role is \"%s\"; in the chat template %s roles must "
                "alternate user, assistant, user, ...%s",
                i, m->role, t->family->name,
                turns->system_place == SYSTEM_REFUSED ? "" : " after an optional system message");
    }
    return ST_OK;
}

static bool has_system(const struct chat *chat)
{
    for (size_t i = 0; i < chat->n; i++)
        if (is(&chat->messages[i], "system")) return true;
    return false;
}

enum status render_turns(const struct chat_template *t, const struct chat *chat, bool prompt,
                         struct bytes *ret)
{
    const struct turns *turns = &t->family->turns;
    const struct message *first = chat->messages;
    bool within_user =
        turns->system_place == SYSTEM_IN_FIRST_USER || turns->system_place == SYSTEM_IN_LAST_USER;
    size_t start = within_user && is(first, "system") ? 1 : 0;
    size_t with_system = turns->system_place == SYSTEM_IN_FIRST_USER ? start : chat->n - 1;
    enum status st = check_turns(t, chat, start);
    if (st != ST_OK) return st;

    if (t->puts_bos) bytes_puts(ret, t->bos);
    if (t->has_default_system && (turns->always_intro || !has_system(chat)))
        bytes_append(ret, bytes_text(&t->default_system), t->default_system.len);
    for (size_t i = start; i < chat->n; i++) {
        const struct message *m = &chat->messages[i];
        bool system = is(m, "system"), user = is(m, "user");
        if (system && i > 0 && turns->system_place == SYSTEM_FIRST_MESSAGE) continue;
        const char *const *around = system ? turns->system : user ? turns->user : turns->assistant;
        put_fixed(t, around[0], ret);
        if (start == 1 && user && i == with_system) {
            put(ret, first->content);
            bytes_puts(ret, "\n\n");
        }
        bool stripped = t->trim || (turns->trim_assistant && !system && !user);
        put(ret, stripped ? text_strip(m->content) : m->content);
        put_fixed(t, around[1], ret);
    }
    if (turns->prompt && (turns->always_prompt || (prompt && t->prompt)))
        put_fixed(t, turns->prompt, ret);
    return ST_OK;
}
