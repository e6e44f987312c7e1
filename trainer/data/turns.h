/* turns.h: which stretches of a conversation's text its assistant wrote. Stateless; any thread. */
#ifndef TRAINER_TURNS_H
#define TRAINER_TURNS_H

#include "common/base/bytes.h"
#include <jansson.h>

// Renders messages (a list), with the beginning of an assistant's turn at the end where
// generation_prompt is set; the text replaces what ret_text held.
typedef enum status (*turns_render_fn)(void *context, const json_t *messages,
                                       bool generation_prompt, struct bytes *ret_text);

bool message_by_assistant(const json_t *message);

struct turn { // bytes of the text: from behind the turn's opening to its end, that included
    size_t start, end;
};
struct turns {
    struct bytes text;  // of the whole conversation
    struct turn *turns; // (n) in order, apart from each other; the last reaches to the text's end
    int n, left_out;    // left_out: assistant's messages that are not among them
};
#define TURNS_INIT                                                                                 \
    {                                                                                              \
        BYTES_INIT, NULL, 0, 0                                                                     \
    }

// messages end on the assistant's; `where` names them in errors. `all`: every assistant's message,
// else the last. A turn is what the conversation up to and with it has beyond the conversation
// before it with the opening of a turn. Templates may render a turn otherwise once others follow
// (they leave out its reasoning): such a turn is none that the model would ever write, and is left
// out. The last must be one: ST_UNSUPPORTED.
enum status turns_find(const char *where, const json_t *messages, bool all, turns_render_fn render,
                       void *context, struct turns *ret);
void turns_release(struct turns *t);

#endif
