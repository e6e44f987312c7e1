/* generation.c: from the engine's tokens to samples with text. The engine's thread copies the
 * events of a step into one message and posts it; all else happens on the loop's thread, so nothing
 * here is locked.
 *
 * A stop string is looked for after every token, which is what makes tokens and text end together;
 * the sample is then cancelled in the engine, and tokens that it still sends are dropped. A sample
 * counts as ended when the engine says so, never before: its telemetry comes with that event. */
// SPDX-License-Identifier: Apache-2.0
#include "infer-server/http/generation.h"

#include <stdlib.h>
#include <string.h>

// ---- the engine's thread -----------------------------------------------------------------------

struct event_batch { // a step's events, one behind another: one message
    struct inbox_message message;
    struct bytes records;
};
// Behind it lie what its event points to: tokens, their likeliest ones, telemetry, the sentence;
// each begins at a multiple of 8 bytes.
struct event_record {
    size_t bytes; // with all of that
    struct prompt_run *run;
    struct engine_event event; // `prompt`, with prompt_top behind it, is owned until delivered
};

static void deliver(struct inbox_message *message);

static void put(struct bytes *to, const void *data, size_t n)
{
    static const char zeros[8];
    bytes_append(to, data, n);
    bytes_append(to, zeros, -n % sizeof zeros);
}

// In one piece of memory, apart from the message: it stays.
static bool take_prompt(const struct prompt_run *run, struct engine_event *event)
{
    const size_t n = (size_t)run->n_prompt, n_top = n * (size_t)run->n_prompt_top;
    if (!event->prompt) return true;
    struct prompt_token *prompt =
        malloc(n * sizeof *event->prompt + n_top * sizeof *event->prompt_top);
    if (!prompt) return false;
    struct top_logprob *top = (struct top_logprob *)(prompt + n);
    memcpy(prompt, event->prompt, n * sizeof *prompt);
    if (n_top) memcpy(top, event->prompt_top, n_top * sizeof *top);
    event->prompt = prompt;
    event->prompt_top = top;
    return true;
}

static bool append_event(struct bytes *to, const struct engine_event *event)
{
    struct event_record record = {.run = request_tag(event->request), .event = *event};
    const size_t start = to->len, n = (size_t)event->n_tokens;
    if (!take_prompt(record.run, &record.event)) return false;
    put(to, &record, sizeof record);
    if (n) put(to, event->tokens, n * sizeof *event->tokens);
    if (event->top) put(to, event->top, n * (size_t)record.run->n_top * sizeof *event->top);
    if (event->telemetry) put(to, event->telemetry, sizeof *event->telemetry);
    if (event->error) put(to, event->error, strlen(event->error) + 1);
    if (to->failed) {
        to->len = start;
        free((void *)record.event.prompt);
        return false;
    }
    record.bytes = to->len - start;
    memcpy(to->data + start, &record.bytes, sizeof record.bytes);
    return true;
}

void generation_on_event(void *host_, const struct engine_event *event)
{
    struct generation_host *host = host_;
    struct event_batch *b = host->batch;
    if (!b) b = host->batch = calloc(1, sizeof *b);
    if (!b || !append_event(&b->records, event))
        __atomic_store_n(&host->lost_event, true, __ATOMIC_RELAXED);
    if (!b || event->more) return;
    b->message.deliver = deliver;
    host->batch = NULL;
    inbox_post(&host->inbox, &b->message);
}

// ---- the loop's thread -------------------------------------------------------------------------

void generation_sample_clear(struct generation_sample *s)
{
    free(s->tokens);
    free(s->top);
    free(s->text_at);
    bytes_release(&s->text);
    if (s->tools) tool_calls_free(s->tools);
    s->tools = NULL;
    s->tokens = NULL;
    s->top = NULL;
    s->text_at = NULL;
    s->n = s->cap = 0;
    s->safe = 0;
}

static void generation_free(struct generation *g)
{
    if (!g) return;
    LIST_REMOVE(g->host->first, g);
    for (int i = 0; g->runs && i < g->request->n_prompts; i++) {
        request_free(g->runs[i].request);
        free(g->runs[i].report.tokens);
        if (g->request->echo) echo_release(&g->runs[i].report.echo);
    }
    for (int i = 0; g->samples && i < g->request->n_samples; i++) {
        generation_sample_clear(&g->samples[i]);
        detokenizer_free(g->samples[i].detokenizer);
        free(g->samples[i].error);
    }
    api_request_free(g->request);
    free(g->runs);
    free(g->samples);
    free(g->first_sample);
    free(g);
}

static bool grow(struct generation_sample *s, int n_top)
{
    if (s->n < s->cap) return true;
    int cap = s->cap ? s->cap * 2 : 32;
    struct token_record *tokens = realloc(s->tokens, (size_t)cap * sizeof *tokens);
    if (tokens) s->tokens = tokens;
    int *text_at = realloc(s->text_at, (size_t)cap * sizeof *text_at);
    if (text_at) s->text_at = text_at;
    struct top_logprob *top = s->top;
    if (n_top > 0) top = realloc(s->top, (size_t)cap * (size_t)n_top * sizeof *top);
    if (top) s->top = top;
    if (!tokens || !text_at || (n_top > 0 && !top)) return false;
    s->cap = cap;
    return true;
}

// New text stands at the end of s->text: looks for stop strings in it.
static void scan_text(struct generation *g, struct generation_sample *s)
{
    const struct stop_set *stop = &g->request->stop;
    int which;
    size_t at;
    if (stop->n == 0 || s->n < g->request->sampling.min_tokens) {
        s->scanned = s->safe = s->text.len;
        return;
    }
    if (stop_find(stop, bytes_text(&s->text), s->text.len, s->scanned, &which, &at)) {
        size_t end = at + stop->lengths[which];
        s->stop_string = stop->strings[which];
        if (at < s->safe) at = s->safe; // it began before min_tokens, in text that may be out
        s->text.len = g->request->include_stop ? end : at;
        s->text.data[s->text.len] = 0;
        s->scanned = s->safe = s->text.len;
        s->stopped = true;
        return;
    }
    s->scanned = s->text.len;
    s->safe = s->text.len - stop_hold(stop, bytes_text(&s->text), s->text.len);
}

static enum status add_token(struct generation *g, struct generation_sample *s,
                             const struct token_record *token, const struct top_logprob *top,
                             bool has_text)
{
    int n_top = g->runs[s->prompt].n_top;
    if (!grow(s, n_top)) return status_fail(ST_NO_MEMORY, "out of memory");
    s->tokens[s->n] = *token;
    s->text_at[s->n] = s->chars;
    if (n_top > 0 && top)
        memcpy(s->top + (size_t)s->n * (size_t)n_top, top, (size_t)n_top * sizeof *top);
    s->n++;
    if (!s->detokenizer || !has_text) return ST_OK;
    const struct tokenizer *t = g->host->tokenizer;
    if (s->tools && g->request->skip_special && tokenizer_is_special(t, token->token) &&
        !tool_form_mentions(s->tools->form, tokenizer_token(t, token->token)))
        return ST_OK; // those that mark calls stay in a text that is searched for them
    size_t before = s->text.len;
    enum status st = detokenizer_push(s->detokenizer, token->token, &s->text);
    if (st == ST_OK) st = bytes_status(&s->text);
    if (st != ST_OK || s->text.len == before) return st;
    s->chars += (int)utf8_count(s->text.data + before, s->text.len - before);
    scan_text(g, s);
    return s->tools ? tool_calls_read(s->tools, s->text.data, s->safe, false) : ST_OK;
}

static void fail_sample(struct generation_sample *s, const char *sentence)
{
    s->finish = FINISH_ERROR;
    free(s->error);
    s->error = strdup(sentence);
}

// Times are cut as vLLM cuts them: queue, prefill up to the first token, decode up to the last.
static void count_times(struct metrics *m, const struct sample_telemetry *t)
{
    const double prefill = (t->first_token_ms - t->queue_ms) / 1e3;
    const double decode = (t->latency_ms - t->first_token_ms) / 1e3;
    const int n = t->generated_tokens;
    histogram_add(&m->queue, &bounds_request, t->queue_ms / 1e3);
    histogram_add(&m->whole, &bounds_request, t->latency_ms / 1e3);
    histogram_add(&m->prefill, &bounds_request, prefill);
    histogram_add(&m->decode, &bounds_request, decode);
    histogram_add(&m->inference, &bounds_request, prefill + decode);
    histogram_add(&m->per_token, &bounds_next_token, n > 1 ? decode / (n - 1) : 0);
}

// A sample has ended, as the client is told.
static void count_sample(struct metrics *m, const char *request_id,
                         const struct generation_sample *s)
{
    const struct sample_telemetry *telemetry = &s->telemetry;
    struct spec_window_entry *e = &m->ended.entries[m->ended.n++ % SPEC_WINDOW_SAMPLES];
    snprintf(e->request_id, sizeof e->request_id, "%s", request_id);
    e->choice = s->choice;
    e->telemetry = *telemetry;
    m->finished[s->finish]++;
    if (s->finish != FINISH_STOP && s->finish != FINISH_LENGTH) return;
    count_times(m, telemetry);
    histogram_add(&m->prompt_tokens, &m->tokens, telemetry->prompt_tokens);
    histogram_add(&m->generated_tokens, &m->tokens, telemetry->generated_tokens);
    histogram_add(&m->computed_tokens, &m->tokens,
                  telemetry->prompt_tokens - telemetry->cached_prompt_tokens);
}

static void end_sample(struct generation *g, struct generation_sample *s,
                       const struct engine_event *event)
{
    if (s->detokenizer && !s->stopped && s->finish == FINISH_NONE) {
        size_t before = s->text.len;
        detokenizer_flush(s->detokenizer, &s->text);
        if (s->text.len > before) scan_text(g, s);
    }
    detokenizer_free(s->detokenizer);
    s->detokenizer = NULL;
    s->safe = s->text.len;
    if (s->tools && s->finish == FINISH_NONE &&
        tool_calls_read(s->tools, bytes_text(&s->text), s->text.len, true) != ST_OK)
        fail_sample(s, status_message());
    if (event->telemetry) s->telemetry = *event->telemetry;
    if (s->finish == FINISH_NONE) s->finish = s->stopped ? FINISH_STOP : event->finish;
    if (s->finish == FINISH_ERROR && !s->error)
        fail_sample(s, event->error ? event->error : "generation failed");
    // the engine may have gone a step or two past a stop string
    if (s->n < s->telemetry.generated_tokens) {
        s->telemetry.generated_tokens = s->n;
        telemetry_count_drafts(&s->telemetry, s->tokens, s->n);
    }
    if (s->n > 0) s->telemetry.weight_version_last = s->tokens[s->n - 1].weight_version;
    if ((s->finish == FINISH_ERROR || s->finish == FINISH_CANCELLED) && !g->failure) g->failure = s;
    g->ended++;
    count_sample(g->host->metrics, g->request->id, s);
}

static void take_tokens(struct generation *g, struct generation_sample *s,
                        const struct engine_event *event)
{
    int n_top = g->runs[s->prompt].n_top;
    for (int i = 0; i < event->n_tokens && !s->stopped && s->finish == FINISH_NONE; i++) {
        // the token that stopped it is no part of the text
        const bool is_last = i == event->n_tokens - 1;
        const bool is_stop = event->finish == FINISH_STOP && is_last && !event->last_is_text;
        const struct top_logprob *top = event->top ? event->top + (size_t)i * (size_t)n_top : NULL;
        if (is_stop) s->stop_token = event->tokens[i].token;
        enum status st = add_token(g, s, &event->tokens[i], top, !is_stop);
        if (st != ST_OK) fail_sample(s, status_message());
    }
    bool over = s->stopped || s->finish != FINISH_NONE;
    if (over && event->finish == FINISH_NONE)
        engine_cancel(g->host->engine, g->runs[s->prompt].request, s->index);
}

static void take_event(struct prompt_run *run, const struct engine_event *event)
{
    struct generation *g = run->generation;
    struct generation_sample *s = &g->samples[g->first_sample[run->prompt] + event->sample];
    bool was_over = s->stopped || s->finish != FINISH_NONE;
    if (event->prompt) {
        run->report.tokens = (struct prompt_token *)event->prompt;
        run->report.top = (struct top_logprob *)event->prompt_top;
    }
    if (!was_over) take_tokens(g, s, event);
    if (event->finish != FINISH_NONE) end_sample(g, s, event);
    bool ended = event->finish != FINISH_NONE;
    const bool ready = ended || (g->request->kind != API_ROLLOUTS && !was_over);
    if (!g->released && ready && !s->queued) {
        s->queued = true;
        s->next_ready = NULL;
        *g->ready_last = s;
        g->ready_last = &s->next_ready;
    }
    if (event->request_done) {
        request_free(run->request);
        run->request = NULL;
        if (--g->outstanding == 0) g->host->live--;
    }
    if (!g->released)
        g->notify(g->context);
    else if (g->outstanding == 0)
        generation_free(g);
}

// The next piece of a record, where there is one: it is moved behind it.
static const void *next_piece(const char **at, bool there, size_t bytes)
{
    const char *piece = *at;
    if (!there) return NULL;
    *at += (bytes + 7) / 8 * 8;
    return piece;
}

static void deliver(struct inbox_message *message)
{
    struct event_batch *b = (struct event_batch *)message;
    const char *data = bytes_text(&b->records), *end = data + b->records.len;
    while (data < end) {
        const struct event_record *record = (const void *)data;
        struct engine_event e = record->event;
        const char *at = data + sizeof *record;
        const size_t n = (size_t)e.n_tokens, n_top = n * (size_t)record->run->n_top;
        e.tokens = next_piece(&at, true, n * sizeof *e.tokens);
        e.top = next_piece(&at, e.top != NULL, n_top * sizeof *e.top);
        e.telemetry = next_piece(&at, e.telemetry != NULL, sizeof *e.telemetry);
        e.error = next_piece(&at, e.error != NULL, 0); // the last one
        data += record->bytes;
        take_event(record->run, &e);
    }
    bytes_release(&b->records);
    free(b);
}

static enum status make_samples(struct generation *g, struct api_request *r)
{
    const struct tokenizer *tokenizer = g->host->tokenizer;
    enum status st = ST_OK;
    g->runs = calloc((size_t)r->n_prompts, sizeof *g->runs);
    g->samples = calloc((size_t)r->n_samples, sizeof *g->samples);
    g->first_sample = calloc((size_t)r->n_prompts, sizeof *g->first_sample);
    if (!g->runs || !g->samples || !g->first_sample)
        return status_fail(ST_NO_MEMORY, "out of memory");
    for (int p = 0, choice = 0; p < r->n_prompts; p++) {
        g->runs[p] =
            (struct prompt_run){.generation = g,
                                .prompt = p,
                                .n_prompt = r->prompts[p].n_ids,
                                .n_top = r->sampling.logprobs > 0 ? r->sampling.logprobs : 0,
                                .n_prompt_top = r->sampling.prompt_top};
        if (r->echo)
            CHECK(echo_init(&r->prompts[p], tokenizer, r->skip_special, &g->runs[p].report.echo));
        g->first_sample[p] = choice;
        for (int i = 0; i < r->prompts[p].n; i++, choice++) {
            struct generation_sample *s = &g->samples[choice];
            s->prompt = p;
            s->index = i;
            s->choice = choice;
            s->stop_token = -1;
            if (!tokenizer) continue;
            if (r->tools) CHECK(tool_calls_new(r->tool_form, r->tools, r->stream, &s->tools));
            CHECK(detokenizer_new(tokenizer, r->skip_special && !s->tools, &s->detokenizer));
            CHECK(detokenizer_follow(s->detokenizer, r->prompts[p].ids, r->prompts[p].n_ids));
        }
    }
out:
    return st;
}

enum status generation_start(struct generation_host *host, struct api_request *request,
                             void (*notify)(void *context), void *context, struct generation **ret)
{
    enum status st;
    struct generation *g = calloc(1, sizeof *g);
    if (!g) {
        api_request_free(request);
        return status_fail(ST_NO_MEMORY, "out of memory");
    }
    g->next = host->first;
    host->first = g;
    g->host = host;
    g->request = request;
    g->notify = notify;
    g->context = context;
    g->ready_last = &g->ready;
    CHECK(make_samples(g, request));
    for (int p = 0; p < request->n_prompts; p++) {
        struct sampling sampling = request->sampling;
        sampling.n = request->prompts[p].n;
        sampling.seed = request->prompts[p].seed;
        if (request->prompts[p].constraint) sampling.constraint = request->prompts[p].constraint;
        CHECK(request_new(request->prompts[p].ids, request->prompts[p].n_ids, &sampling,
                          &g->runs[p], &g->runs[p].request));
    }
    for (int p = 0; p < request->n_prompts; p++) {
        CHECK(engine_submit(host->engine, g->runs[p].request));
        if (g->outstanding++ == 0) host->live++;
    }
    *ret = g;
    return ST_OK;
out:
    // prompts already submitted are cancelled, and the memory goes when they have come back
    for (int p = g->outstanding; g->runs && p < request->n_prompts; p++) {
        request_free(g->runs[p].request);
        g->runs[p].request = NULL;
    }
    generation_release(g);
    return st;
}

void generation_release(struct generation *g)
{
    if (!g) return;
    g->released = true;
    if (g->outstanding == 0) {
        generation_free(g);
        return;
    }
    for (int p = 0; p < g->request->n_prompts; p++)
        if (g->runs[p].request) engine_cancel(g->host->engine, g->runs[p].request, -1);
}

struct generation_sample *generation_next(struct generation *g)
{
    struct generation_sample *s = g->ready;
    if (!s) return NULL;
    g->ready = s->next_ready;
    if (!g->ready) g->ready_last = &g->ready;
    s->queued = false;
    return s;
}
