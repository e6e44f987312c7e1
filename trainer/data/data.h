/* data.h: a data set: JSONL, one example a line, held whole in memory. One thread.
 *
 * Each line is an object with
 *   "prompt"   text or a list of chat messages; else "messages", such a list; else "question", text
 *   "answer"   text or number, else "completion", text, or a list with one message of the
 * assistant; may be missing "tools", "chat_template_kwargs"   of a chat: for the template; may be
 * missing so that GSM8K's files are read as they are: a "question", and an "answer" that is worked
 * out and ends on "#### N". Other keys are kept (`row`). In `sft`, messages that end on one of the
 * assistant are prompt and completion in one. Every error names the file and the line. */
#ifndef TRAINER_DATA_H
#define TRAINER_DATA_H

#include "common/model/tokenizer.h"
#include <jansson.h>

struct chat_template;

struct example {
    json_t *row;               // owns the strings below
    int line;                  // 1-based
    const json_t *prompt_json; // the prompt as it stands in the row
    bool question;             // text from "question", or the field named for prompts
    const char *prompt;        // NULL where it is a list of messages
    size_t prompt_len;         // bytes; a prompt may hold U+0000
    const json_t *messages;    // NULL where it is text
    // After dataset_tokenize(): as the model sees it; NULL: as it stands in the row.
    json_t *prompt_text;
    const char *answer;                           // NULL: none
    const char *completion;                       // of "completion", or else "answer"; NULL: none
    const json_t *reply;                          // the completion as a message; NULL: it is text
    char *number;                                 // an answer given as a number, as text
    struct token_list prompt_ids, completion_ids; // after dataset_tokenize()
    struct token_list answer_ids;                 // likewise, of the first example's answer alone
    uint8_t *learnt; // (completion_ids.n) 0: between turns of a conversation; NULL: all is learnt
};
struct dataset {
    char *path;
    struct example *examples;
    int n;
    int max_prompt, max_completion; // tokens of the longest, after tokenising
    uint64_t digest;                // of what was read, to notice on resume that it changed
    char *ignored; // a sentence: what of the rows the chat template does not read; NULL: nothing
    char *chat_source; // the chat template that prompts are in; NULL: none
    // Of conversations, after dataset_tokenize(): those with several turns of the
    // assistant; the turns before the last of each, and how many of them are learnt.
    struct {
        int64_t several, earlier, learnt;
    } turns;
    bool byte_order_mark; // the file began with one, which was skipped
    bool asks;  // questions are in the chat template, with what the reward asks for (prompts.h)
    bool plain; // nothing is, though the model has one, and nobody said that it is meant so
};

void example_release(struct example *e);

struct prompt_options;
// options (prompts.h): of these the names of fields, max_samples and side; NULL: none.
enum status dataset_load(const char *path, const struct prompt_options *options,
                         struct dataset **ret);
// The same from a file's bytes; `where` names it in errors.
enum status dataset_parse(const char *where, const char *text, size_t len,
                          const struct prompt_options *options, struct dataset **ret);
void dataset_free(struct dataset *d);
bool dataset_has_messages(const struct dataset *d);  // at least one prompt is a chat
bool dataset_has_questions(const struct dataset *d); // at least one is a question

struct prompt_format { // what examples are tokenised for
    const struct prompt_options *options;
    const struct tokenizer *tokenizer;
    const struct chat_template *chat; // NULL: the model has none; messages are then refused
    int vocab_size;                   // of the model: an id beyond it is refused
    bool asks; // questions go into the template, with options.question_template around them
};
// Fills prompt_ids; with options.completions completion_ids too (the completion and what ends it:
// options.end_id, or the chat template's end of turn) for supervised training. Of a conversation
// the completion is its last turn; with options.all_turns it begins at the first, and `learnt`
// tells what is the assistant's. Examples with longer prompts than options.max_prompt_length are
// left out; ret_left_out counts them. Leaving out all is an error.
enum status dataset_tokenize(struct dataset *d, const struct prompt_format *format,
                             int *ret_left_out);
// ST_INVALID naming the first example without an answer.
enum status dataset_require_answers(const struct dataset *d);

/* The order in which examples are taken: epoch e is a permutation sampled from (seed, e), and
 * epochs follow each other without a gap, so the i-th example of a run is a function of (seed, i).
 */
struct data_order {
    uint64_t seed;
    int n;
    int64_t epoch; // that `permutation` is of; -1: none yet
    int *permutation;
};
enum status data_order_init(struct data_order *o, uint64_t seed, int n);
void data_order_release(struct data_order *o);
int data_order_at(struct data_order *o, int64_t i);

#endif
