/* prompts.h: a data set read and tokenised for a model folder: what train, eval and sft begin with.
 * One thread. */
#ifndef TRAINER_PROMPTS_H
#define TRAINER_PROMPTS_H

#include "common/model/chat_template.h"

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

#endif
