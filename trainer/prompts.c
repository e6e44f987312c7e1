/* prompts.c: joins data set, tokenizer and chat template. The two latter are needed only here:
 * later on tokens travel as ids. The trainer's thread. */
#include "trainer/prompts.h"
#include "common/model/chat_template.h"

enum status prompts_load(const char *path, const char *model_folder, int vocab_size,
                         const struct prompt_options *options, struct dataset **ret,
                         int *ret_left_out)
{
    enum status st;
    struct dataset *data = NULL;
    struct tokenizer *tokenizer = NULL;
    struct chat_template *chat = NULL;
    int left_out = 0;
    CHECK(dataset_load(path, &data));
    CHECK(tokenizer_load(model_folder, &tokenizer));
    if (options->chat || options->chat_template || dataset_has_messages(data))
        CHECK(chat_template_find(model_folder, options->chat_template, &chat));
    struct prompt_format format = {
        .tokenizer = tokenizer,
        .chat = chat,
        .wrap = options->chat,
        .system = options->system_prompt,
        .vocab_size = vocab_size,
    };
    CHECK(dataset_tokenize(data, &format, options->max_prompt_length, &left_out));
    if (options->completions) {
        int end = options->end_id >= 0 ? options->end_id : tokenizer_eos(tokenizer);
        CHECK(dataset_tokenize_completions(data, &format, end));
    }
    *ret = data;
    *ret_left_out = left_out;
out:
    chat_template_free(chat);
    tokenizer_free(tokenizer);
    if (st != ST_OK) dataset_free(data);
    return st;
}
