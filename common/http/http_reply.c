/* http_reply.c: how a request is answered: whole, with an error object, or as a stream that is
 * asked for more whenever the socket takes more. Loop's thread. */
// SPDX-License-Identifier: Apache-2.0
#include "common/http/http_impl.h"
#include "common/base/clock.h"
#include "common/base/json.h"

#include <stdlib.h>
#include <string.h>

bool http_replied(const struct http_request *q)
{
    return q->state >= REPLY_READY;
}

void http_header(struct http_request *q, const char *name, const char *value)
{
    if (q->n_headers == HEADERS_MAX) return;
    snprintf(q->headers[q->n_headers].name, sizeof q->headers[0].name, "%s", name);
    snprintf(q->headers[q->n_headers++].value, sizeof q->headers[0].value, "%s", value);
}

void http_reply(struct http_request *q, unsigned code, const char *content_type, struct bytes *body)
{
    if (http_replied(q)) {
        bytes_release(body);
        return;
    }
    q->state = REPLY_READY;
    q->code = body->failed ? 500 : code;
    q->content_type = content_type;
    q->reply = *body;
    *body = (struct bytes)BYTES_INIT;
    http_drop_body(q);
    http_resume(q);
}

void http_reply_json(struct http_request *q, unsigned code, json_t *value)
{
    struct bytes body = BYTES_INIT;
    char *text = value ? json_dumps(value, JSON_COMPACT | JSON_REAL_PRECISION(12)) : NULL;
    json_decref(value);
    if (text) {
        bytes_puts(&body, text);
        bytes_puts(&body, "\n");
        free(text);
        http_reply(q, code, "application/json", &body);
    } else {
        http_fail(q, 500, "out of memory while writing the answer");
    }
}

// The field an error sentence is about: its first word in double quotes, or where it stands first.
static json_t *quoted_word(const char *sentence)
{
    const char *open = strchr(sentence, '"'), *close = open ? strchr(open + 1, '"') : NULL;
    if (!open && strncmp(sentence, "request: ", strlen("request: ")) == 0) {
        open = sentence + strlen("request:"); // a sentence without any: "request: FIELD has ..."
        close = strchr(open + 1, ' ');
        if (close && strncmp(close, " has ", 5) != 0 && strncmp(close, " is ", 4) != 0)
            close = NULL;
    }
    // What "is" or a bracket stands before is a value, of a file's key for one, or JSON's; what an
    // apostrophe does is the place where JSON breaks off.
    const bool value = close && ((open > sentence && strchr("[{'", open[-1])) ||
                                 (open - sentence > 4 && strncmp(open - 4, " is ", 4) == 0));
    if (!close || value || close - open > 64) return json_null();
    json_t *word = json_stringn(open + 1, (size_t)(close - open - 1));
    return word ? word : json_null();
}

void http_error_object(struct bytes *to, unsigned code, const char *name, const char *type,
                       const char *sentence)
{
    json_t *param = code == 400 || code == 404 ? quoted_word(sentence) : json_null();
    json_t *object = json_pack("{s:s, s:{s:o, s:s, s:o, s:o}}", "type", "error", "error", "message",
                               json_clean_string(sentence), "type", type, "param", param, "code",
                               name ? json_string(name) : json_integer(code));
    char *text = object ? json_dumps(object, JSON_COMPACT) : NULL;
    bytes_puts(to, text ? text : "{\"error\":{\"message\":\"out of memory\"}}");
    free(text);
    json_decref(object);
}

static const char *error_type(unsigned code)
{
    static const struct {
        unsigned code;
        const char *type;
    } types[] = {{401, "authentication_error"}, {403, "permission_error"},
                 {404, "not_found_error"},      {409, "conflict_error"},
                 {429, "rate_limit_error"},     {501, "not_supported_error"},
                 {503, "unavailable_error"},    {504, "timeout_error"}};
    for (size_t i = 0; i < sizeof types / sizeof *types; i++)
        if (types[i].code == code) return types[i].type;
    return code < 500 ? "invalid_request_error" : "server_error";
}

void http_fail_as(struct http_request *q, unsigned code, const char *name, const char *type,
                  const char *sentence)
{
    struct bytes body = BYTES_INIT;
    http_error_object(&body, code, name, type, sentence);
    bytes_puts(&body, "\n");
    if (code == 429 || code == 503) http_header(q, "Retry-After", "1");
    http_reply(q, code, "application/json", &body);
}

void http_fail(struct http_request *q, unsigned code, const char *format, ...)
{
    char sentence[2048];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(sentence, sizeof sentence, format, arguments);
    va_end(arguments);
    http_fail_as(q, code, NULL, error_type(code), sentence);
}

void http_fail_status(struct http_request *q, enum status st)
{
    static const unsigned codes[] = {
        [ST_INVALID] = 400,   [ST_FORMAT] = 400, [ST_UNSUPPORTED] = 400, [ST_MISMATCH] = 400,
        [ST_TOO_LONG] = 400,  [ST_BUSY] = 429,   [ST_NOT_FOUND] = 404,   [ST_TORN] = 503,
        [ST_CANCELLED] = 503, [ST_TIMEOUT] = 504};
    const unsigned code = st < sizeof codes / sizeof *codes && codes[st] ? codes[st] : 500;
    http_fail_as(q, code, st == ST_TOO_LONG ? "context_length_exceeded" : NULL, error_type(code),
                 status_message());
}

void http_stream(struct http_request *q, const char *content_type, int64_t n_bytes,
                 stream_producer produce)
{
    if (n_bytes > 0) q->deadline_ns += n_bytes / BODY_RATE * NS_PER_S;
    q->state = REPLY_READY;
    q->stream_bytes = n_bytes < 0 ? MHD_SIZE_UNKNOWN : (uint64_t)n_bytes;
    q->code = 200;
    q->content_type = content_type;
    q->streaming = true;
    q->produce = produce;
    http_drop_body(q);
    http_resume(q);
}

void http_wake(struct http_request *q)
{
    if (q->streaming) http_resume(q);
}

// ---- to libmicrohttpd --------------------------------------------------------------------------

static ssize_t read_stream(void *context, uint64_t position, char *buffer, size_t max)
{
    struct http_request *q = context;
    (void)position;
    while (q->sent == q->body.len && !q->stream_ended && !q->gone) {
        bytes_clear(&q->body);
        q->sent = 0;
        enum stream_state state = q->produce(q->attached, q, &q->body);
        if (q->body.failed || state == STREAM_FAIL) return MHD_CONTENT_READER_END_WITH_ERROR;
        q->stream_ended = state == STREAM_END;
        if (state != STREAM_MORE) break;
    }
    if (q->gone) return MHD_CONTENT_READER_END_WITH_ERROR;
    size_t n = q->body.len - q->sent;
    if (n == 0 && q->stream_ended) return MHD_CONTENT_READER_END_OF_STREAM;
    if (n == 0) {
        q->suspended = true;
        MHD_suspend_connection(q->connection);
        return 0;
    }
    if (n > max) n = max;
    memcpy(buffer, q->body.data + q->sent, n);
    q->sent += n;
    return (ssize_t)n;
}

enum MHD_Result http_queue_reply(struct http_request *q)
{
    struct MHD_Response *response;
    if (q->streaming) {
        response =
            MHD_create_response_from_callback(q->stream_bytes, 32 << 10, read_stream, q, NULL);
    } else {
        response = MHD_create_response_from_buffer(q->reply.len, (void *)bytes_text(&q->reply),
                                                   q->reply.len ? MHD_RESPMEM_MUST_FREE
                                                                : MHD_RESPMEM_PERSISTENT);
        if (response && q->reply.len) q->reply = (struct bytes)BYTES_INIT;
    }
    if (!response) return MHD_NO;
    MHD_add_response_header(response, "Content-Type", q->content_type);
    if (q->streaming) MHD_add_response_header(response, "Cache-Control", "no-cache");
    MHD_add_response_header(response, "X-Request-Id", q->request_id);
    if (q->close_after) MHD_add_response_header(response, "Connection", "close");
    for (int i = 0; i < q->n_headers; i++)
        MHD_add_response_header(response, q->headers[i].name, q->headers[i].value);
    enum MHD_Result result = MHD_queue_response(q->connection, q->code, response);
    MHD_destroy_response(response);
    q->state = SENDING;
    return result;
}
