/* prompts.h: a data set read and tokenised for a model folder: what train, eval and sft begin with.
 * One thread. */
#ifndef TRAINER_PROMPTS_H
#define TRAINER_PROMPTS_H

#include "common/base/bytes.h"
#include "common/model/chat_template.h"
#include <jansson.h>

struct dataset;

#define PROMPT_PLACE "{prompt}"

struct prompt_options { // borrowed strings; the first block is PROMPT_OPTIONS (options_shared.h)
    const char *prompt_field, *answer_field; // NULL: those of data.h
    bool chat;                               // put text prompts into the chat template
    struct chat_template_choice chat_template;
    const char *system_prompt; // NULL: none
    // Around a text prompt, PROMPT_PLACE in its midst; "none"; "auto" or NULL: question_template.
    const char *prompt_template;
    int64_t max_prompt_length; // 0: any

    // What the reward asks of an instruct model (reward_info); NULL: nothing. Where the
    // folder has a chat template, questions (example.question) go into it with this around them.
    const char *question_template;
    int64_t max_samples; // the first lines of the file; 0: all
    bool completions;    // tokenise them too; they end with end_id
    int end_id;          // -1: the tokenizer's own end of text
    bool all_turns; // of completions: every turn of the assistant is learnt, not the last alone
    // Of pairs, "chosen" or "rejected": the field that is the completion; or, in lines without a
    // prompt, a conversation that ends with it. NULL: as above.
    const char *side;
};

// ST_INVALID: a prompt template without PROMPT_PLACE. To be asked before the rest is opened.
enum status prompts_check(const struct prompt_options *options);

// ret_left_out: examples left out for their length. vocab_size is the model's.
enum status prompts_load(const char *path, const char *model_folder, int vocab_size,
                         const struct prompt_options *options, struct dataset **ret,
                         int *ret_left_out);

// ---- which stretches of a conversation's text its assistant wrote (any thread) ------------------

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

// messages end on the assistant's. `all`: every assistant's message,
// else the last. A turn is what the conversation up to and with it has beyond the conversation
// before it with the opening of a turn. Templates may render a turn otherwise once others follow
// (they leave out its reasoning): such a turn is none that the model would ever write, and is left
// out. The last must be one: ST_UNSUPPORTED.
enum status turns_find(const json_t *messages, bool all, turns_render_fn render, void *context,
                       struct turns *ret);
void turns_release(struct turns *t);

#endif
