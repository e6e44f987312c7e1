/* response_foreign.c: the answers of /v1/responses and /v1/messages, whole or as events. Both are a
 * list of parts, texts and calls in the order in which the model wrote them; a stream's parts, put
 * together, are the whole response's. Loop's thread. */
// SPDX-License-Identifier: Apache-2.0
#include "infer-server/http/response.h"

#include <string.h>

struct part {
    const struct tool_call *call; // NULL: a text
    const char *text;             // or arguments, as far as they are there
    size_t len;
};

// Part i of what is there of the sample; false: there is none yet.
static bool find_part(const struct response *a, const struct generation_sample *s, int i,
                      struct part *ret)
{
    const struct tool_calls *calls = s->tools;
    const struct bytes *content = calls ? &calls->content : &s->text;
    const size_t len = calls ? content->len : s->safe;
    const int n = !calls ? 0 : !a->request->several_calls && calls->n > 1 ? 1 : calls->n;
    size_t from = 0;
    for (int k = 0; k <= n; k++) {
        const struct tool_call *call = k < n ? &calls->list[k] : NULL;
        const size_t to = call ? call->content_at : len;
        *ret = (struct part){NULL, bytes_text(content) + from, to - from};
        if (to > from && i-- == 0) return true;
        from = to;
        if (!call) break;
        *ret = (struct part){call, bytes_text(&call->arguments), call->arguments.len};
        if (i-- == 0) return true;
    }
    return false;
}

static const char *model_name(const struct response *a)
{
    return a->request->adapter[0] ? a->request->adapter : a->model->name;
}

// What differs between the two.
struct event_form {
    void (*begin)(struct response *a, struct bytes *to);
    void (*part_begin)(struct response *a, const struct part *p, struct bytes *to);
    void (*part_delta)(struct response *a, const struct part *p, size_t from, struct bytes *to);
    void (*part_end)(struct response *a, const struct part *p, struct bytes *to);
    void (*end)(struct response *a, struct bytes *to);
};

static enum stream_state stream_events(struct response *a, const struct event_form *form,
                                       bool overdue, struct bytes *to)
{
    struct generation_sample *s;
    struct event_state *e = &a->events;
    struct part p, next;
    enum stream_state state = stream_next(a, overdue, "event: error\ndata: ", "\n\n", to, &s);
    if (state != STREAM_MORE) return state;
    if (!e->begun) form->begin(a, to);
    e->begun = true;
    while (find_part(a, s, e->part, &p)) {
        const bool over = s->finish != FINISH_NONE || find_part(a, s, e->part + 1, &next);
        if (!e->open) form->part_begin(a, &p, to);
        if (p.len > e->sent) form->part_delta(a, &p, e->sent, to);
        e->open = true;
        e->sent = p.len;
        if (!over) break;
        form->part_end(a, &p, to);
        e->open = false;
        e->sent = 0;
        e->part++;
    }
    if (s->finish == FINISH_NONE) return STREAM_MORE;
    form->end(a, to);
    return STREAM_END;
}

static void open_event(struct json_out *o, struct response *a, const char *type)
{
    bytes_printf(o->to, "event: %s\ndata: ", type);
    o->comma = false;
    json_out_open(o, NULL, '{');
    json_out_text(o, "type", type);
    if (a->request->kind == API_RESPONSES) json_out_int(o, "sequence_number", a->events.sequence++);
}

static void close_event(struct json_out *o)
{
    json_out_close(o, '}');
    bytes_puts(o->to, "\n\n");
}

// ---- /v1/responses ------------------------------------------------------------------------------

static void put_id(struct json_out *o, const char *key, const char *prefix, const char *id, int i)
{
    char text[REQUEST_ID_BYTES + 16];
    snprintf(text, sizeof text, i < 0 ? "%s%s" : "%s%s_%d", prefix, id, i);
    json_out_text(o, key, text);
}

static void put_output_text(struct json_out *o, const char *key, const struct part *p)
{
    json_out_open(o, key, '{');
    json_out_text(o, "type", "output_text");
    json_out_string(o, "text", p ? p->text : "", p ? p->len : 0);
    JSON_OUT_LIST(o, "annotations", i, 0, 0, (void)i);
    JSON_OUT_LIST(o, "logprobs", i, 0, 0, (void)i);
    json_out_close(o, '}');
}

static void put_item_id(struct json_out *o, const char *key, const struct response *a,
                        const struct part *p, int i)
{
    if (p->call)
        put_id(o, key, "fc_", p->call->id, -1);
    else
        put_id(o, key, "msg_", a->request->name, i);
}

static void put_item(struct json_out *o, const char *key, const struct response *a,
                     const struct part *p, int i, bool over)
{
    json_out_open(o, key, '{');
    put_item_id(o, "id", a, p, i);
    json_out_text(o, "type", p->call ? "function_call" : "message");
    json_out_text(o, "status", over ? "completed" : "in_progress");
    if (p->call) {
        json_out_text(o, "call_id", p->call->id);
        json_out_text(o, "name", p->call->name);
        json_out_string(o, "arguments", p->text, over ? p->len : 0);
    } else {
        json_out_text(o, "role", "assistant");
        json_out_open(o, "content", '[');
        if (over) put_output_text(o, NULL, p);
        json_out_close(o, ']');
    }
    json_out_close(o, '}');
}

static void put_input_usage(struct json_out *o, const struct response *a)
{
    const struct generation_sample *s = &a->samples[0];
    const int64_t prompt = a->request->prompts[0].n_ids;
    json_out_open(o, "usage", '{');
    json_out_int(o, "input_tokens", prompt);
    json_out_open(o, "input_tokens_details", '{');
    json_out_int(o, "cached_tokens", s->telemetry.cached_prompt_tokens);
    json_out_close(o, '}');
    json_out_int(o, "output_tokens", s->n);
    json_out_open(o, "output_tokens_details", '{');
    json_out_int(o, "reasoning_tokens", 0);
    json_out_close(o, '}');
    json_out_int(o, "total_tokens", prompt + s->n);
    json_out_close(o, '}');
}

// What the request said, or what holds where it said nothing.
static void put_given(struct json_out *o, const struct response *a)
{
    static const char *const fields[][2] = {{"instructions", "null"},
                                            {"metadata", "{}"},
                                            {"tool_choice", "\"auto\""},
                                            {"tools", "[]"},
                                            {"text", "{\"format\":{\"type\":\"text\"}}"},
                                            {"reasoning", "{\"effort\":null,\"summary\":null}"},
                                            {"max_output_tokens", "null"},
                                            {"previous_response_id", "null"},
                                            {"user", "null"},
                                            {"service_tier", "\"default\""},
                                            {"truncation", "\"disabled\""}};
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++) {
        const json_t *given = json_object_get(a->request->body, fields[i][0]);
        json_t *usual = json_loads(fields[i][1], JSON_DECODE_ANY, NULL);
        json_out_value(o, fields[i][0], given && !json_is_null(given) ? given : usual);
        json_decref(usual);
    }
    json_out_bool(o, "parallel_tool_calls", a->request->several_calls);
    json_out_float(o, "temperature", a->request->sampling.temperature);
    json_out_float(o, "top_p", a->request->sampling.top_p);
    json_out_bool(o, "background", false);
    json_out_bool(o, "store", false);
}

static bool is_cut(const struct response *a)
{
    return a->samples[0].finish == FINISH_LENGTH;
}

static void put_response(struct json_out *o, const char *key, const struct response *a, bool over)
{
    const bool cut = over && is_cut(a);
    struct part p;
    json_out_open(o, key, '{');
    json_out_text(o, "id", a->request->id);
    json_out_text(o, "object", "response");
    json_out_int(o, "created_at", a->created);
    json_out_text(o, "status", !over ? "in_progress" : cut ? "incomplete" : "completed");
    json_out_null(o, "error");
    json_out_text(o, "model", model_name(a));
    if (cut) {
        json_out_open(o, "incomplete_details", '{');
        json_out_text(o, "reason", "max_output_tokens");
        json_out_close(o, '}');
    } else {
        json_out_null(o, "incomplete_details");
    }
    json_out_open(o, "output", '[');
    for (int i = 0; over && find_part(a, &a->samples[0], i, &p); i++)
        put_item(o, NULL, a, &p, i, true);
    json_out_close(o, ']');
    put_given(o, a);
    if (over)
        put_input_usage(o, a);
    else
        json_out_null(o, "usage");
    if (over) put_extras(o, a);
    json_out_close(o, '}');
}

void responses_response(struct response *a, struct bytes *to)
{
    struct json_out out = {to, false};
    put_response(&out, NULL, a, true);
    bytes_puts(to, "\n");
}

static void response_event(struct response *a, const char *type, bool over, struct bytes *to)
{
    struct json_out out = {to, false};
    open_event(&out, a, type);
    put_response(&out, "response", a, over);
    close_event(&out);
}

static void responses_begin(struct response *a, struct bytes *to)
{
    response_event(a, "response.created", false, to);
    response_event(a, "response.in_progress", false, to);
}

// An event of the part that is open.
static void open_part_event(struct json_out *o, struct response *a, const struct part *p,
                            const char *type)
{
    open_event(o, a, type);
    put_item_id(o, "item_id", a, p, a->events.part);
    json_out_int(o, "output_index", a->events.part);
    if (!p->call) json_out_int(o, "content_index", 0);
}

static void item_event(struct response *a, const struct part *p, bool over, struct bytes *to)
{
    struct json_out out = {to, false};
    open_event(&out, a, over ? "response.output_item.done" : "response.output_item.added");
    json_out_int(&out, "output_index", a->events.part);
    put_item(&out, "item", a, p, a->events.part, over);
    close_event(&out);
}

static void responses_part_begin(struct response *a, const struct part *p, struct bytes *to)
{
    struct json_out out = {to, false};
    item_event(a, p, false, to);
    if (p->call) return;
    open_part_event(&out, a, p, "response.content_part.added");
    put_output_text(&out, "part", NULL);
    close_event(&out);
}

static void responses_part_delta(struct response *a, const struct part *p, size_t from,
                                 struct bytes *to)
{
    struct json_out out = {to, false};
    open_part_event(&out, a, p,
                    p->call ? "response.function_call_arguments.delta"
                            : "response.output_text.delta");
    json_out_string(&out, "delta", p->text + from, p->len - from);
    if (!p->call) JSON_OUT_LIST(&out, "logprobs", i, 0, 0, (void)i);
    close_event(&out);
}

static void responses_part_end(struct response *a, const struct part *p, struct bytes *to)
{
    struct json_out out = {to, false};
    open_part_event(&out, a, p,
                    p->call ? "response.function_call_arguments.done"
                            : "response.output_text.done");
    if (p->call) json_out_text(&out, "name", p->call->name);
    json_out_string(&out, p->call ? "arguments" : "text", p->text, p->len);
    if (!p->call) JSON_OUT_LIST(&out, "logprobs", i, 0, 0, (void)i);
    close_event(&out);
    if (!p->call) {
        open_part_event(&out, a, p, "response.content_part.done");
        put_output_text(&out, "part", p);
        close_event(&out);
    }
    item_event(a, p, true, to);
}

static void responses_end(struct response *a, struct bytes *to)
{
    response_event(a, is_cut(a) ? "response.incomplete" : "response.completed", true, to);
}

enum stream_state responses_stream(struct response *a, bool overdue, struct bytes *to)
{
    static const struct event_form form = {responses_begin, responses_part_begin,
                                           responses_part_delta, responses_part_end, responses_end};
    return stream_events(a, &form, overdue, to);
}

// ---- /v1/messages -------------------------------------------------------------------------------

static void put_block(struct json_out *o, const char *key, const struct part *p, bool over)
{
    json_t *input = NULL;
    json_out_open(o, key, '{');
    json_out_text(o, "type", p->call ? "tool_use" : "text");
    if (p->call) {
        json_out_text(o, "id", p->call->id);
        json_out_text(o, "name", p->call->name);
        if (!over || json_parse("input", p->text, p->len, &input) != ST_OK) input = json_object();
        json_out_value(o, "input", input);
        json_decref(input);
    } else {
        json_out_string(o, "text", p->text, over ? p->len : 0);
    }
    json_out_close(o, '}');
}

static void put_stop(struct json_out *o, const struct generation_sample *s)
{
    const bool over = s->finish != FINISH_NONE;
    json_out_text(o, "stop_reason",
                  !over                         ? NULL
                  : s->finish == FINISH_LENGTH  ? "max_tokens"
                  : s->stop_string              ? "stop_sequence"
                  : s->tools && s->tools->n > 0 ? "tool_use"
                                                : "end_turn");
    json_out_text(o, "stop_sequence", over ? s->stop_string : NULL);
}

static void put_message_usage(struct json_out *o, const struct response *a)
{
    const struct generation_sample *s = &a->samples[0];
    const int64_t cached = s->telemetry.cached_prompt_tokens;
    json_out_open(o, "usage", '{');
    json_out_int(o, "input_tokens", a->request->prompts[0].n_ids - cached);
    json_out_int(o, "cache_creation_input_tokens", 0);
    json_out_int(o, "cache_read_input_tokens", cached);
    json_out_int(o, "output_tokens", s->n);
    json_out_close(o, '}');
}

static void put_foreign_message(struct json_out *o, const char *key, const struct response *a,
                                bool over)
{
    struct part p;
    json_out_open(o, key, '{');
    json_out_text(o, "id", a->request->id);
    json_out_text(o, "type", "message");
    json_out_text(o, "role", "assistant");
    json_out_text(o, "model", model_name(a));
    json_out_open(o, "content", '[');
    for (int i = 0; over && find_part(a, &a->samples[0], i, &p); i++) put_block(o, NULL, &p, true);
    json_out_close(o, ']');
    if (over) {
        put_stop(o, &a->samples[0]);
        put_extras(o, a);
    } else {
        json_out_null(o, "stop_reason");
        json_out_null(o, "stop_sequence");
    }
    put_message_usage(o, a);
    json_out_close(o, '}');
}

void messages_response(struct response *a, struct bytes *to)
{
    struct json_out out = {to, false};
    put_foreign_message(&out, NULL, a, true);
    bytes_puts(to, "\n");
}

static void messages_begin(struct response *a, struct bytes *to)
{
    struct json_out out = {to, false};
    open_event(&out, a, "message_start");
    put_foreign_message(&out, "message", a, false);
    close_event(&out);
}

static void messages_part_begin(struct response *a, const struct part *p, struct bytes *to)
{
    struct json_out out = {to, false};
    open_event(&out, a, "content_block_start");
    json_out_int(&out, "index", a->events.part);
    put_block(&out, "content_block", p, false);
    close_event(&out);
}

static void messages_part_delta(struct response *a, const struct part *p, size_t from,
                                struct bytes *to)
{
    struct json_out out = {to, false};
    open_event(&out, a, "content_block_delta");
    json_out_int(&out, "index", a->events.part);
    json_out_open(&out, "delta", '{');
    json_out_text(&out, "type", p->call ? "input_json_delta" : "text_delta");
    json_out_string(&out, p->call ? "partial_json" : "text", p->text + from, p->len - from);
    json_out_close(&out, '}');
    close_event(&out);
}

static void messages_part_end(struct response *a, const struct part *p, struct bytes *to)
{
    struct json_out out = {to, false};
    (void)p;
    open_event(&out, a, "content_block_stop");
    json_out_int(&out, "index", a->events.part);
    close_event(&out);
}

static void messages_end(struct response *a, struct bytes *to)
{
    struct json_out out = {to, false};
    open_event(&out, a, "message_delta");
    json_out_open(&out, "delta", '{');
    put_stop(&out, &a->samples[0]);
    json_out_close(&out, '}');
    put_message_usage(&out, a);
    close_event(&out);
    open_event(&out, a, "message_stop");
    close_event(&out);
}

enum stream_state messages_stream(struct response *a, bool overdue, struct bytes *to)
{
    static const struct event_form form = {messages_begin, messages_part_begin, messages_part_delta,
                                           messages_part_end, messages_end};
    return stream_events(a, &form, overdue, to);
}
