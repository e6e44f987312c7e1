/* prompts.c: joins data set, tokenizer and chat template. The two latter are needed only here:
 * later on tokens travel as ids. The trainer's thread.
 *
 * A data set of questions, as GSM8K ships it, says nothing about how a model is asked. Left to
 * itself (--prompt-template auto), a model with a chat template gets each as a user's message that
 * ends on the form of answer which the reward reads; a model without one, which nobody taught to
 * follow an instruction, gets the question as it is.
 */
#include "trainer/data/prompts.h"
#include "common/base/log.h"
#include "trainer/data/data.h"

#include <stdlib.h>
#include <string.h>

static bool is_auto(const struct prompt_options *options)
{
    return !options->prompt_template || strcmp(options->prompt_template, "auto") == 0;
}

// The template that was given; NULL: none.
static const char *given_template(const struct prompt_options *options)
{
    return is_auto(options) || strcmp(options->prompt_template, "none") == 0
               ? NULL
               : options->prompt_template;
}

enum status prompts_check(const struct prompt_options *options)
{
    const char *around = given_template(options);
    if (!around || strstr(around, PROMPT_PLACE)) return ST_OK;
    return status_fail(ST_INVALID,
                       "--prompt-template \"%.80s\" has no " PROMPT_PLACE " where the prompt is to "
                       "stand; put it in, or say none or auto",
                       around);
}

enum status prompts_load(const char *path, const char *model_folder, int vocab_size,
                         const struct prompt_options *options, struct dataset **ret,
                         int *ret_left_out)
{
    enum status st;
    struct dataset *data = NULL;
    struct tokenizer *tokenizer = NULL;
    struct chat_template *chat = NULL;
    int left_out = 0;
    CHECK(prompts_check(options));
    CHECK(dataset_load(path, options, &data));
    if (data->byte_order_mark) log_info("%s begins with a byte order mark, which is skipped", path);
    CHECK(tokenizer_load(model_folder, &tokenizer));
    bool ask = is_auto(options) && options->question_template && dataset_has_questions(data);
    const struct chat_template_choice *choice = &options->chat_template;
    bool needed = options->chat || choice->name || choice->file || dataset_has_messages(data);
    if (needed || ask) {
        st = chat_template_find(model_folder, choice, &chat);
        if (st != ST_OK && !(st == ST_NOT_FOUND && !needed)) goto out;
    }
    struct prompt_format format = {
        .tokenizer = tokenizer,
        .chat = chat,
        .wrap = options->chat,
        .wrap_questions = ask && chat,
        .around = given_template(options),
        .around_questions = ask && chat ? options->question_template : NULL,
        .system = options->system_prompt,
        .vocab_size = vocab_size,
        .all_turns = options->all_turns,
    };
    CHECK(dataset_tokenize(data, &format, (int)options->max_prompt_length, &left_out));
    if (options->completions) {
        int end = options->end_id >= 0 ? options->end_id : tokenizer_eos(tokenizer);
        CHECK(dataset_tokenize_completions(data, &format, end));
    }
    data->asks = format.wrap_questions;
    bool used = chat && (options->chat || data->asks || dataset_has_messages(data));
    if (used && !(data->chat_source = strdup(chat_template_source(chat))))
        FAIL(ST_NO_MEMORY, "%s: no memory", path);
    *ret = data;
    *ret_left_out = left_out;
out:
    chat_template_free(chat);
    tokenizer_free(tokenizer);
    if (st != ST_OK) dataset_free(data);
    return st;
}
