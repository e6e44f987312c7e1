/* generation.h: one request for text while it is being generated: the engine's requests behind it
 * (one a prompt), and for each sample its tokens, its text up to a stop string, and how it ended.
 * Loop's thread, but for generation_on_event(), which the engine calls on its own.
 *
 * A reader takes samples from the ready list when its client has room for more. What a slow client
 * has not read stays here as tokens, so what is held back is bounded by max_tokens. */
// SPDX-License-Identifier: Apache-2.0
#ifndef INFER_SERVER_GENERATION_H
#define INFER_SERVER_GENERATION_H

#include "infer-server/http/api.h"
#include "common/http/http.h"
#include "infer-server/http/metrics.h"

// echo.c: a prompt as an answer gives it back ("echo").
struct echo {
    struct bytes text;
    int *text_at; // (prompt's ids) characters of text before each token
    int chars;    // of text
};

// The text as it was sent; of a prompt sent as ids, that of its tokens. tokenizer NULL: no text.
enum status echo_init(const struct api_prompt *prompt, const struct tokenizer *tokenizer,
                      bool skip_special, struct echo *ret);
void echo_release(struct echo *e);

struct generation;

struct generation_sample {
    int prompt, index;           // of the prompt: 0..n-1
    int choice;                  // over all prompts
    struct token_record *tokens; // (n), up to the one that completed a stop string
    struct top_logprob *top;     // (n, sampling.logprobs)
    int *text_at;                // (n) characters of text before each token
    int n, cap;
    struct bytes text;                 // without the stop string
    size_t safe;                       // bytes of text that no stop string can claim any more
    struct tool_calls *tools;          // what the text is taken apart to; NULL: it is not
    const char *stop_string;           // that ended it, or NULL
    int32_t stop_token;                // that ended it, or -1
    enum finish_reason finish;         // FINISH_NONE: runs
    struct sample_telemetry telemetry; // once it has ended
    char *error;                       // sentence, for FINISH_ERROR
    // how much a streaming reader has given out
    int sent_tokens;
    size_t sent_text; // of the tools' content, where there are tools
    int sent_calls;
    size_t sent_arguments; // of the last of these
    bool sent_head;
    // its own
    struct detokenizer *detokenizer;
    size_t scanned;
    int chars;
    bool queued, stopped;
    struct generation_sample *next_ready;
};

// What answers say of a prompt, beside its ids. The log-probabilities, where they were asked for,
// are there before the first token of any of its samples.
struct generation_prompt {
    struct prompt_token *tokens; // (its ids) [0] holds nothing; NULL: not there
    struct top_logprob *top;     // (its ids, sampling.prompt_top)
    struct echo echo;            // where it is echoed
};

struct prompt_run { // tag of one engine request
    struct generation *generation;
    struct request *request; // NULL once it came back
    int prompt, n_prompt, n_top, n_prompt_top;
    struct generation_prompt report;
};

struct generation_host { // what a generation needs of its server
    struct engine *engine;
    struct inbox inbox;
    struct metrics *metrics;
    const struct tokenizer *tokenizer; // NULL: samples have no text
    struct generation *first;          // of those that are there
    int live;                          // generations that the engine still works for
    bool lost_event;                   // an event could not be kept for want of memory: fatal
    struct event_batch *batch;         // the engine's thread's: events of the present step
};

struct generation {          // written by generation.c (`stopped` of a sample by handle_stop() too)
    struct generation *next; // of the host's
    struct generation_host *host;
    struct api_request *request;
    struct prompt_run *runs;           // (n_prompts)
    struct generation_sample *samples; // (n_samples), those of a prompt together
    int *first_sample;                 // (n_prompts)
    int outstanding;                   // requests the engine holds
    int ended;                         // samples
    struct generation_sample *ready, **ready_last;
    const struct generation_sample *failure; // the first that ended with an error, or was cancelled
                                             // by the engine; NULL: none
    void (*notify)(void *context);
    void *context;
    bool released;
};

// Submits every prompt. Takes the request over, also where it fails. notify() is called on the
// loop's thread when a sample became ready or ended.
enum status generation_start(struct generation_host *host, struct api_request *request,
                             void (*notify)(void *context), void *context, struct generation **ret);
// Nobody waits for it any more: cancels what runs; it goes when the engine has given all back.
void generation_release(struct generation *g);

// Next sample with something new (rollouts: that has ended), or NULL. In order of events.
struct generation_sample *generation_next(struct generation *g);
// Frees what a finished sample holds, once it was given out.
void generation_sample_clear(struct generation_sample *s);

// The engine's callback; context is the struct generation_host.
void generation_on_event(void *host, const struct engine_event *event);

#endif
