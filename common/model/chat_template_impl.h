/* chat_template_impl.h: what recognising (chat_template.c) and rendering (chat_render.c) share;
 * nobody else includes it. Immutable once found; any thread. */
#ifndef COMMON_MODEL_CHAT_TEMPLATE_IMPL_H
#define COMMON_MODEL_CHAT_TEMPLATE_IMPL_H

#include "common/model/chat_template.h"

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

struct chat_template {
    const struct chat_family *family;
    char *bos, *eos;
    // ChatML and DeepSeek-Coder: for chats without a system message; StarCoder2: before every chat.
    struct bytes default_system;
    bool has_default_system;
    bool trim;     // contents lose the white space around them
    bool prompt;   // add_generation_prompt is heeded
    bool puts_bos; // the text begins with bos
};

typedef enum status (*render_function)(const struct chat_template *t, const struct chat *chat,
                                       bool add_generation_prompt, struct bytes *ret);
enum status render_chatml(const struct chat_template *t, const struct chat *chat, bool prompt,
                          struct bytes *ret);
enum status render_llama2(const struct chat_template *t, const struct chat *chat, bool prompt,
                          struct bytes *ret);
enum status render_llama3(const struct chat_template *t, const struct chat *chat, bool prompt,
                          struct bytes *ret);
enum status render_phi(const struct chat_template *t, const struct chat *chat, bool prompt,
                       struct bytes *ret);
enum status render_phi_medium(const struct chat_template *t, const struct chat *chat, bool prompt,
                              struct bytes *ret);
enum status render_turns(const struct chat_template *t, const struct chat *chat, bool prompt,
                         struct bytes *ret);

enum thinking { NO_THINKING, THINKING_AFTER_LAST_QUERY, THINKING_ALWAYS };
enum date { NO_DATE, FIXED_DATE, TODAY };

// Where render_turns puts a system message.
enum system_place {
    SYSTEM_REFUSED,
    SYSTEM_TURN,          // anywhere, a turn of its own
    SYSTEM_FIRST_MESSAGE, // a turn of its own if it is the first message; others are left out
    SYSTEM_IN_FIRST_USER, // the first message only: before the first user message's content
    SYSTEM_IN_LAST_USER,  // the same, before the chat's last message, left out if that is no user's
};

#define EOS "\x04" // in the texts of struct turns: the eos token

// Templates that put fixed texts around contents.
struct turns {
    const char *system[2], *user[2], *assistant[2]; // before and behind the content
    const char *prompt;                             // NULL: none
    enum system_place system_place;
    bool alternate;     // user, assistant, user, ... or it is refused
    bool always_intro;  // default_system comes first even where there is a system message
    bool always_prompt; // whatever add_generation_prompt says
    bool trim_assistant;
};

struct chat_family {
    const char *name;
    render_function render;
    const char *has[4];         // all of these are in the squeezed template,
    const char *has_not[4];     // and none of these;
    const char *exact[5];       // all of these are in the tightened one
    const char *bos, *eos;      // where the folder names none
    const char *default_system; // when picked by name
    const char *intro_mark;     // tightened: the next {{'...'}} is the template's default_system
    bool tool_role;
    enum thinking thinking;
    enum date date;
    bool trim, puts_bos;    // when picked by name
    bool skip_empty_system; // Phi-3.5
    const char *newline;    // Phi: behind a role and an <|end|>
    struct turns turns;     // render_turns
};

// Without the white space that Python's str.strip knows.
struct text text_strip(struct text s);

#endif
