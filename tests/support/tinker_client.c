/* tinker_client.c: cw-trainer serve as a child process, and a client of it. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/tinker_client.h"

struct tinker_pair pair;
const char *session;
struct tinker_run trained;

#define START_MS  60000
#define ANSWER_MS 60000

void tinker_server_start(struct tinker_server *s, const struct daemon *d, const char *runs,
                         const char *const more[])
{
    const char *folder = test_folder();
    s->runs = runs ? runs : test_path(folder, "runs");
    s->log = test_path(folder, "serve.log");
    test_spawn(&s->child, s->log,
               JOIN(args("%s serve --bridge %s --listen 127.0.0.1:0 --run-dir %s",
                         test_binary("cw-trainer"), d->bridge, s->runs),
                    more));
    test_wait_for_file(s->log, START_MS, &s->child);
    test_wait_for_text(s->log, ", port ", START_MS, &s->child);
    s->port = atoi(strstr(test_read(s->log), ", port ") + 7);
    const char *file = test_path(s->runs, "api-key");
    char *key = access(file, R_OK) == 0 ? test_read(file) : strdup("");
    snprintf(s->key, sizeof s->key, "%.*s", (int)strcspn(key, "\n"), key);
    free(key);
}

int tinker_server_stop(struct tinker_server *s)
{
    test_kill(&s->child, SIGTERM);
    return test_wait(&s->child, START_MS);
}

void tinker_script(const char *python, const char *script, const char *check)
{
    const char *url = test_text("http://127.0.0.1:%d", pair.server.port);
    if (pair.server.key[0]) setenv("TINKER_API_KEY", pair.server.key, 1);
    test_output(
        0, OPTIONS(python, test_path(test_root(), script), url, "model", pair.server.runs, check));
}

void tinker_each_python(void (*body)(const char *python))
{
    const char *list = getenv("COMMONWEIGHT_TINKER_PYTHONS");
    char *names = strdup(list && *list ? list : test_python("tinker")), *remaining = NULL;
    int n = 0;
    for (char *name = strtok_r(names, ":", &remaining); name;
         name = strtok_r(NULL, ":", &remaining)) {
        if (strchr(name, '/') && access(name, X_OK) != 0) {
            print_message("%s is not there: that version of the SDK is left out\n", name);
            continue;
        }
        body(name);
        n++;
    }
    free(names);
    if (n == 0) test_skip("$COMMONWEIGHT_TINKER_PYTHONS (%s) names no Python that is there", list);
}

void tinker_request(const char *method, const char *path, const char *type,
                    const struct bytes *body, struct wire_answer *ret)
{
    SCOPED(bytes_release) struct bytes text = BYTES_INIT;
    int fd = daemon_connect_tcp(pair.server.port);
    if (fd < 0) fail_msg("port %d: refused", pair.server.port);
    bytes_printf(&text, "%s %s HTTP/1.0\r\nHost: localhost\r\nX-API-Key: %s\r\n", method, path,
                 pair.server.key);
    if (type) bytes_printf(&text, "Content-Type: %s\r\nContent-Length: %zu\r\n", type, body->len);
    bytes_puts(&text, "\r\n");
    if (type) bytes_append(&text, bytes_text(body), body->len);
    daemon_send(fd, text.data, text.len);
    bool ended = wire_read(fd, ANSWER_MS, ret);
    close(fd);
    if (!ended) fail_msg("%s %s: no answer within %d ms", method, path, ANSWER_MS);
}

static json_t *check(struct wire_answer *a, const char *path, int status)
{
    if ((status && a->status != status) || !a->json)
        fail_msg("%s: status %d, not %d: %s", path, a->status, status, bytes_text(&a->body));
    return a->json;
}

json_t *tinker_post(const char *path, int status, const char *format, ...)
{
    const char *whole = test_text("/api/v1/%s", path);
    SCOPED(bytes_release) struct bytes body = BYTES_INIT;
    struct wire_answer a;
    va_list arguments;
    va_start(arguments, format);
    bytes_vprintf(&body, format, arguments);
    va_end(arguments);
    tinker_request("POST", whole, "application/json", &body, &a);
    return check(&a, whole, status);
}

json_t *tinker_get(const char *path, int status)
{
    const char *whole = test_text("/api/v1/%s", path);
    struct wire_answer a;
    tinker_request("GET", whole, NULL, NULL, &a);
    return check(&a, whole, status);
}

static void retrieve(json_t *future, struct wire_answer *ret)
{
    SCOPED(bytes_release) struct bytes body = BYTES_INIT;
    bytes_printf(&body, "{\"request_id\":\"%s\"}", text_of(future, "request_id"));
    tinker_request("POST", "/api/v1/retrieve_future", "application/json", &body, ret);
}

json_t *tinker_retrieve(json_t *future)
{
    struct wire_answer a;
    retrieve(future, &a);
    return check(&a, "retrieve_future", 200);
}

struct proto_span tinker_message(json_t *future)
{
    struct wire_answer a;
    retrieve(future, &a);
    if (a.status != 200 || !strstr(bytes_text(&a.head), "application/x-protobuf"))
        fail_msg("retrieve_future: status %d: %s", a.status, bytes_text(&a.body));
    const void *kept = test_keep(memcpy(malloc(a.body.len + 1), bytes_text(&a.body), a.body.len));
    return (struct proto_span){kept, a.body.len};
}

void tinker_refused(json_t *answer, const char *why)
{
    const json_t *error = json_object_get(answer, "error");
    if (json_is_object(error)) error = json_object_get(error, "message");
    if (!json_is_string(error)) fail_msg("not refused: %s", json_dumps(answer, 0));
    assert_contains(json_string_value(error), why);
}

// ---- protobuf -----------------------------------------------------------------------------------

void tinker_put_tensor(struct bytes *datum, const char *name, int dtype, const void *data,
                       size_t len, int rows, int columns)
{
    struct bytes tensor = BYTES_INIT, entry = BYTES_INIT, shape = BYTES_INIT;
    proto_put_bytes(&tensor, 1, data, len);
    proto_put_varint(&tensor, 3, (uint64_t)dtype);
    bytes_printf(&shape, "%c", (char)rows); // packed, as numbers below 128 are
    if (columns) bytes_printf(&shape, "%c", (char)columns);
    proto_put_message(&tensor, 4, &shape);
    proto_put_text(&entry, 1, name);
    proto_put_message(&entry, 2, &tensor);
    proto_put_message(datum, 2, &entry);
}

void tinker_put_tokens(struct bytes *datum, const int32_t *tokens, int n)
{
    struct bytes text = BYTES_INIT, chunk = BYTES_INIT;
    proto_put_bytes(&text, 1, tokens, (size_t)n * sizeof *tokens);
    proto_put_message(&chunk, 1, &text);
    proto_put_message(datum, 1, &chunk);
}

void tinker_put_learn(struct bytes *to, const char *model, int seq_id, const char *loss,
                      bool forward_only, const struct tinker_datum *data, int n)
{
    proto_put_text(to, 1, model);
    proto_put_varint(to, 2, (uint64_t)seq_id);
    proto_put_text(to, 4, loss);
    proto_put_varint(to, 6, forward_only);
    for (int i = 0; i < n; i++) {
        const struct tinker_datum *d = &data[i];
        struct bytes datum = BYTES_INIT;
        const size_t n_bytes = (size_t)d->n * sizeof(float);
        tinker_put_tokens(&datum, d->tokens, d->n);
        tinker_put_tensor(&datum, "target_tokens", 2, d->targets, 2 * n_bytes, d->n, 0);
        for (int k = 0; k < 4 && d->names[k]; k++)
            tinker_put_tensor(&datum, d->names[k], 1, d->inputs[k], n_bytes, d->n, 0);
        proto_put_message(to, 3, &datum);
    }
}

json_t *tinker_learn(const char *model, int seq_id, const char *loss, bool forward_only,
                     const struct tinker_datum *data, int n)
{
    SCOPED(bytes_release) struct bytes message = BYTES_INIT;
    struct wire_answer a;
    tinker_put_learn(&message, model, seq_id, loss, forward_only, data, n);
    tinker_request("POST", "/api/v1/forward_backward", "application/x-protobuf", &message, &a);
    return check(&a, "forward_backward", 200);
}

struct proto_span tinker_field(struct proto_span message, uint32_t number)
{
    struct proto_field field;
    enum status st = ST_OK;
    while (proto_each(&message, &st, &field))
        if (field.number == number && field.type == PROTO_BYTES) return field.span;
    assert_ok(st);
    fail_msg("the answer has no field %u", number);
    return message;
}

double tinker_logprobs(json_t *future, int n, float *ret)
{
    const struct proto_span message = tinker_message(future);
    double loss;
    const struct proto_span record = tinker_field(message, 2), metric = tinker_field(message, 3);
    const struct proto_span data = tinker_field(tinker_field(tinker_field(record, 2), 2), 1);
    assert_int_equal(data.len, (size_t)n * sizeof *ret);
    memcpy(ret, data.data, data.len);
    assert_true(metric.len > sizeof loss);
    memcpy(&loss, metric.data + metric.len - sizeof loss, sizeof loss);
    return loss;
}

double tinker_step(const char *model, int seq_id, double lr)
{
    json_t *answer = tinker_retrieve(
        tinker_post("optim_step", 200,
                    "{\"model_id\":\"%s\",\"seq_id\":%d,\"adam_params\":{\"learning_rate\":%g,"
                    "\"beta1\":0.9,\"beta2\":0.95,\"eps\":1e-8}}",
                    model, seq_id, lr));
    if (!json_has(answer, "metrics")) fail_msg("optim_step: %s", json_dumps(answer, 0));
    return real_of(answer, "metrics.grad_norm:mean");
}

// ---- what is trained, and by whom
// ----------------------------------------------------------------

static const int32_t tokens[TINKER_N] = {10, 20, 30, 40, 50, 60},
                     others[TINKER_N] = {7, 8, 9, 10, 11, 12};
static const int64_t targets[TINKER_N] = {20, 30, 40, 50, 60, 70},
                     other_targets[TINKER_N] = {8, 9, 10, 11, 12, 13};
static const float weights[TINKER_N] = {0, 1, 1, 0.5f, 1, 1};
const struct tinker_datum tinker_one = {TINKER_N, tokens, targets, {"weights"}, {weights}},
                          tinker_other = {TINKER_N, others, other_targets, {"weights"}, {weights}};

void tinker_pair_start(const char *folder, const char *const daemon_more[],
                       const char *const server_more[])
{
    daemon_start(&pair.daemon, folder ? folder : daemon_model(test_folder(), true, 5), daemon_more);
    tinker_server_start(&pair.server, &pair.daemon, NULL, server_more);
}

void tinker_pair_stop(void)
{
    assert_int_equal(tinker_server_stop(&pair.server), 0);
    assert_int_equal(daemon_stop(&pair.daemon), 0);
}

void tinker_pair_kill(const char *const server_more[])
{
    const char *runs = pair.server.runs;
    test_kill(&pair.server.child, SIGKILL);
    assert_int_equal(test_wait(&pair.server.child, 10000), 128 + SIGKILL);
    tinker_server_start(&pair.server, &pair.daemon, runs, server_more);
}

// ---- sessions and runs --------------------------------------------------------------------------

const char *tinker_session(void)
{
    return text_of(tinker_post("create_session", 200, "{}"), "session_id");
}

void tinker_finish(const char *of)
{
    tinker_post(test_text("sessions/%s/finish", of), 200,
                "{\"reason\":{\"type\":\"success\"},\"detail\":null}");
}

json_t *tinker_create(const char *of, int number, int status, const char *lora)
{
    return tinker_post("create_model", status,
                       "{\"session_id\":\"%s\",\"model_seq_id\":%d,\"base_model\":\"any/model\","
                       "\"lora_config\":{%s}}",
                       of, number, lora);
}

struct tinker_run tinker_begun(json_t *future)
{
    return (struct tinker_run){.id = text_of(tinker_retrieve(future), "model_id")};
}

struct tinker_run tinker_whole(void)
{
    session = tinker_session();
    return tinker_begun(tinker_create(session, 0, 200, "\"rank\":0"));
}

struct tinker_run tinker_load(int number, const char *path)
{
    return tinker_begun(tinker_post("load_weights", 200,
                                    "{\"session_id\":\"%s\",\"model_seq_id\":%d,"
                                    "\"path\":\"%s\",\"optimizer\":true}",
                                    session, number, path));
}

static double cross_entropy(struct tinker_run *r, bool forward_only,
                            const struct tinker_datum *datum, float ret[TINKER_N])
{
    return tinker_logprobs(
        tinker_learn(r->id, ++r->seq_id, "cross_entropy", forward_only, datum, 1), TINKER_N, ret);
}

double tinker_run_learn(struct tinker_run *r, const struct tinker_datum *datum, float *ret)
{
    float unused[TINKER_N];
    return cross_entropy(r, false, datum, ret ? ret : unused);
}

double tinker_run_score(struct tinker_run *r, const struct tinker_datum *datum, float ret[TINKER_N])
{
    return cross_entropy(r, true, datum, ret);
}

double tinker_run_step(struct tinker_run *r, double lr)
{
    return tinker_step(r->id, ++r->seq_id, lr);
}

void tinker_run_update(struct tinker_run *r, const struct tinker_datum *datum)
{
    tinker_run_learn(r, datum, NULL);
    assert_true(tinker_run_step(r, 1e-2) > 0);
}

const char *tinker_run_save(struct tinker_run *r, const char *how, const char *name)
{
    return text_of(
        tinker_retrieve(tinker_post(how, 200, "{\"model_id\":\"%s\",\"seq_id\":%d,\"path\":\"%s\"}",
                                    r->id, ++r->seq_id, name)),
        "path");
}

// ---- sampling -----------------------------------------------------------------------------------

static int samplers; // so far, of any session

const char *tinker_run_snapshot(struct tinker_run *r, const char *more)
{
    return text_of(tinker_retrieve(tinker_post(
                       "save_weights_for_sampler", 200,
                       "{\"model_id\":\"%s\",\"seq_id\":%d,\"sampling_session_seq_id\":%d%s}",
                       r->id, ++r->seq_id, samplers++, more)),
                   "sampling_session_id");
}

json_t *tinker_sampler(int status, const char *field, const char *value)
{
    return tinker_post("create_sampling_session", status,
                       "{\"session_id\":\"%s\",\"sampling_session_seq_id\":%d,\"%s\":\"%s\"}",
                       session, samplers++, field, value);
}

const char *tinker_sampler_of(const char *field, const char *value)
{
    return text_of(tinker_sampler(200, field, value), "sampling_session_id");
}

json_t *tinker_sample(const char *sampler, int seq_id, int status, int max_tokens, const char *more)
{
    return tinker_post("asample", status,
                       "{\"sampling_session_id\":\"%s\",\"seq_id\":%d,\"prompt\":"
                       "{\"chunks\":[{\"type\":\"encoded_text\",\"tokens\":[10,20]},"
                       "{\"type\":\"encoded_text\",\"tokens\":[30]}]},\"sampling_params\":"
                       "{\"max_tokens\":%d,\"temperature\":1,\"seed\":3,\"stop\":[]}%s}",
                       sampler, seq_id, max_tokens, more);
}

static size_t copied(struct proto_span span, void **ret)
{
    *ret = test_keep(memcpy(malloc(span.len + 1), span.data, span.len));
    return span.len / sizeof(float);
}

struct tinker_sampled tinker_sampled(json_t *future)
{
    struct tinker_sampled a = {.message = tinker_message(future)};
    a.sequence = tinker_field(a.message, 1);
    a.n = copied(tinker_field(a.sequence, 2), (void **)&a.tokens);
    assert_int_equal(copied(tinker_field(a.sequence, 3), (void **)&a.logprobs), a.n);
    return a;
}

void tinker_same_sample(const struct tinker_sampled *a, const struct tinker_sampled *b)
{
    assert_int_equal(a->sequence.len, b->sequence.len);
    assert_memory_equal(a->sequence.data, b->sequence.data, a->sequence.len);
}
