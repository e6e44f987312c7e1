/* data.h: a data set: JSONL, one example a line, held whole in memory. One thread.
 *
 * Each line is an object with
 *
 *   "prompt": text or a list of chat messages; else "messages", such a list; else "question", text
 *   "answer": text or number; else "completion", text or a list of one message of the assistant
 *   "tools", "chat_template_kwargs": of a chat, for the template
 *   "response_format": what is sampled is to be, as of a request (OpenAI's)
 *   "teacher_prompt": text or a list of chat messages, what a teacher reads in the prompt's place
 *
 * of which all but the first may be missing, so that GSM8K's files are read as they are: a
 * "question", and an "answer" that is worked out and ends on "#### N". Other keys are kept (`row`).
 * In `sft`, messages that end on one of the assistant are prompt and completion in one. Every error
 * names the file and the line. */
// SPDX-License-Identifier: Apache-2.0
#ifndef TRAINER_DATA_H
#define TRAINER_DATA_H

#include "common/base/bytes.h"
#include "common/text/chat_template.h"
#include "common/text/tokenizer.h"
#include <jansson.h>

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
    bool teacher;        // there is one: read and tokenise what it reads, too
    bool given;          // tokenise the completions beside what is sampled
    bool all_turns; // of completions: every turn of the assistant is learnt, not the last alone
    // Of pairs, "chosen" or "rejected": the field that is the completion; or, in lines without a
    // prompt, a conversation that ends with it. NULL: as above.
    const char *side;
};

struct example {
    json_t *row;               // owns the strings below
    int line;                  // 1-based
    const json_t *prompt_json; // the prompt as it stands in the row
    bool question;             // text from "question", or the field named for prompts
    const char *prompt;        // NULL where it is a list of messages
    size_t prompt_len;         // bytes; a prompt may hold U+0000
    const json_t *messages;    // NULL where it is text
    const json_t *taught;      // "teacher_prompt", with options.teacher; NULL: none
    // After dataset_tokenize(): as the model sees it; NULL: as it stands in the row.
    json_t *prompt_text;
    const char *answer;     // NULL: none
    const char *completion; // of "completion", or else "answer"; NULL: none
    const json_t *reply;    // the completion as a message; NULL: it is text
    char *number;           // an answer given as a number, as text
    json_t *constraint;     // of "response_format" (constraint.h); owned; NULL: none
    struct token_list prompt_ids, completion_ids; // after dataset_tokenize()
    struct token_list teacher_ids;                // likewise, of `taught`
    struct token_list answer_ids;                 // likewise, of the first example's answer alone
    uint8_t *learnt; // (completion_ids.n) 0: between turns of a conversation; NULL: all is learnt
};
struct dataset {
    char *path;
    struct example *examples;
    int n;
    int max_prompt, max_completion; // tokens of the longest, after tokenising
    int max_read;                   // likewise of prompts and of what a teacher reads
    bool messages, questions;       // at least one prompt is a chat; is a question
    int n_taught;                   // lines with a "teacher_prompt", read or not
    int n_constrained;              // examples with a constraint
    uint64_t digest;                // of what was read, to notice on resume that it changed
    char *ignored; // a sentence: what of the rows the chat template does not read; NULL: nothing
    char *chat_source; // the chat template that prompts are in; NULL: none
    // Of conversations, after dataset_tokenize(): those with several turns of the
    // assistant; the turns before the last of each, and how many of them are learnt.
    struct {
        int64_t several, earlier, learnt;
    } turns;
    bool byte_order_mark; // the file began with one, which was skipped
    bool asks;            // questions are in the chat template, with what the reward asks for
    bool plain; // nothing is, though the model has one, and nobody said that it is meant so
};

void example_release(struct example *e);

// options: of these the names of fields, max_samples and side; NULL: none.
enum status dataset_load(const char *path, const struct prompt_options *options,
                         struct dataset **ret);
// The same from a file's bytes; `where` names it in errors.
enum status dataset_parse(const char *where, const char *text, size_t len,
                          const struct prompt_options *options, struct dataset **ret);
void dataset_free(struct dataset *d);

struct prompt_format { // what examples are tokenised for
    const struct prompt_options *options;
    const struct tokenizer *tokenizer;
    const struct chat_template *chat; // NULL: the model has none; messages are then refused
    int vocab_size;                   // of the model: an id beyond it is refused
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

// ST_INVALID: a prompt template without PROMPT_PLACE. To be asked before the rest is opened.
enum status prompts_check(const struct prompt_options *options);

// ret_left_out: examples left out for their length. vocab_size is the model's.
enum status prompts_load(const char *path, const char *model_folder, int vocab_size,
                         const struct prompt_options *options, struct dataset **ret,
                         int *ret_left_out);

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
    int n;
};
#define TURNS_INIT                                                                                 \
    {                                                                                              \
        BYTES_INIT, NULL, 0                                                                        \
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
