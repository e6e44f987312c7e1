/* prompts.h: a data set read and tokenised for a model folder: what train, eval and sft begin with.
 * One thread. */
#ifndef TRAINER_PROMPTS_H
#define TRAINER_PROMPTS_H

#include "trainer/data.h"

struct prompt_options {        // borrowed strings
    bool chat;                 // put text prompts into the chat template
    const char *chat_template; // NULL: the folder's own
    const char *system_prompt; // NULL: none
    int max_prompt_length;     // 0: any
    bool completions;          // tokenise them too; they end with end_id
    int end_id;                // -1: the tokenizer's own end of text
};

// ret_left_out: examples left out for their length. vocab_size is the model's.
enum status prompts_load(const char *path, const char *model_folder, int vocab_size,
                         const struct prompt_options *options, struct dataset **ret,
                         int *ret_left_out);

#endif
