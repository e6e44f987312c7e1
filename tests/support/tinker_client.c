/* tinker_client.c: cw-trainer serve as a child process, and a client of it. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/tinker_client.h"

#define START_MS  60000
#define ANSWER_MS 60000
#define SCRIPT_MS 300000

void tinker_server_start(struct tinker_server *s, const struct daemon *d, const char *runs,
                         const char *const more[])
{
    const char *argv[24] = {test_binary("cw-trainer"),
                            "serve",
                            "--bridge",
                            d->bridge,
                            "--listen",
                            "127.0.0.1:0",
                            "--run-dir"};
    int n = 7;
    const char *folder = test_folder();
    s->runs = runs ? runs : test_path(folder, "runs");
    s->log = test_path(folder, "serve.log");
    argv[n++] = s->runs;
    for (; more && *more; more++) argv[n++] = *more;
    test_spawn(&s->child, s->log, argv);
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

void tinker_script(const struct tinker_server *s, const char *python, const char *script,
                   const char *check)
{
    char url[64];
    snprintf(url, sizeof url, "http://127.0.0.1:%d", s->port);
    const char *const argv[] = {
        python, test_path(test_root(), script), url, "model", s->runs, check, NULL};
    const char *log = test_path(test_folder(), "script.log");
    if (s->key[0]) setenv("TINKER_API_KEY", s->key, 1);
    if (test_command(log, SCRIPT_MS, argv) == 0) return;
    char *text = test_read(log);
    print_message("%s\n", text);
    fail_msg("the script failed");
}

void tinker_each_python(void (*run)(const char *python))
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
        run(name);
        n++;
    }
    free(names);
    if (n == 0) test_skip("$COMMONWEIGHT_TINKER_PYTHONS (%s) names no Python that is there", list);
}

void tinker_request(const struct tinker_server *s, const char *method, const char *path,
                    const char *type, const struct bytes *body, struct wire_answer *ret)
{
    struct bytes text = BYTES_INIT;
    int fd = daemon_connect_tcp(s->port);
    if (fd < 0) fail_msg("port %d: refused", s->port);
    bytes_printf(&text, "%s %s HTTP/1.0\r\nHost: localhost\r\nX-API-Key: %s\r\n", method, path,
                 s->key);
    if (type) bytes_printf(&text, "Content-Type: %s\r\nContent-Length: %zu\r\n", type, body->len);
    bytes_puts(&text, "\r\n");
    if (type) bytes_append(&text, bytes_text(body), body->len);
    daemon_send(fd, text.data, text.len);
    bytes_release(&text);
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

json_t *tinker_post(const struct tinker_server *s, const char *path, int status, const char *format,
                    ...)
{
    char whole[128];
    struct bytes body = BYTES_INIT;
    struct wire_answer a;
    va_list arguments;
    va_start(arguments, format);
    bytes_vprintf(&body, format, arguments);
    va_end(arguments);
    snprintf(whole, sizeof whole, "/api/v1/%s", path);
    tinker_request(s, "POST", whole, "application/json", &body, &a);
    bytes_release(&body);
    return check(&a, whole, status);
}

json_t *tinker_get(const struct tinker_server *s, const char *path, int status)
{
    char whole[512];
    struct wire_answer a;
    snprintf(whole, sizeof whole, "/api/v1/%s", path);
    tinker_request(s, "GET", whole, NULL, NULL, &a);
    return check(&a, whole, status);
}

static void retrieve(const struct tinker_server *s, json_t *future, struct wire_answer *ret)
{
    struct bytes body = BYTES_INIT;
    const char *id = json_string_value(json_object_get(future, "request_id"));
    assert_non_null(id);
    bytes_printf(&body, "{\"request_id\":\"%s\"}", id);
    tinker_request(s, "POST", "/api/v1/retrieve_future", "application/json", &body, ret);
    bytes_release(&body);
    json_decref(future);
}

json_t *tinker_retrieve(const struct tinker_server *s, json_t *future)
{
    struct wire_answer a;
    retrieve(s, future, &a);
    return check(&a, "retrieve_future", 200);
}

void tinker_retrieve_bytes(const struct tinker_server *s, json_t *future, struct bytes *ret)
{
    struct wire_answer a;
    retrieve(s, future, &a);
    if (a.status != 200 || !strstr(bytes_text(&a.head), "application/x-protobuf"))
        fail_msg("retrieve_future: status %d: %s", a.status, bytes_text(&a.body));
    *ret = a.body;
    a.body = (struct bytes)BYTES_INIT;
}

void tinker_refused(json_t *answer, const char *why)
{
    const json_t *error = json_object_get(answer, "error");
    if (json_is_object(error)) error = json_object_get(error, "message");
    if (!json_is_string(error)) fail_msg("not refused: %s", json_dumps(answer, 0));
    assert_contains(json_string_value(error), why);
    json_decref(answer);
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

json_t *tinker_learn(const struct tinker_server *s, const char *model, int seq_id, const char *loss,
                     bool forward_only, const struct tinker_datum *data, int n)
{
    struct bytes message = BYTES_INIT;
    struct wire_answer a;
    tinker_put_learn(&message, model, seq_id, loss, forward_only, data, n);
    tinker_request(s, "POST", "/api/v1/forward_backward", "application/x-protobuf", &message, &a);
    bytes_release(&message);
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

double tinker_logprobs(const struct tinker_server *s, json_t *future, int n, float *ret)
{
    struct bytes answer = BYTES_INIT;
    double loss;
    tinker_retrieve_bytes(s, future, &answer);
    const struct proto_span message = {(const unsigned char *)bytes_text(&answer), answer.len};
    const struct proto_span record = tinker_field(message, 2), metric = tinker_field(message, 3);
    const struct proto_span data = tinker_field(tinker_field(tinker_field(record, 2), 2), 1);
    assert_int_equal(data.len, (size_t)n * sizeof *ret);
    memcpy(ret, data.data, data.len);
    assert_true(metric.len > sizeof loss);
    memcpy(&loss, metric.data + metric.len - sizeof loss, sizeof loss);
    bytes_release(&answer);
    return loss;
}

double tinker_step(const struct tinker_server *s, const char *model, int seq_id, double lr)
{
    json_t *answer = tinker_retrieve(
        s, tinker_post(s, "optim_step", 200,
                       "{\"model_id\":\"%s\",\"seq_id\":%d,\"adam_params\":{\"learning_rate\":%g,"
                       "\"beta1\":0.9,\"beta2\":0.95,\"eps\":1e-8}}",
                       model, seq_id, lr));
    const json_t *norm = json_object_get(json_object_get(answer, "metrics"), "grad_norm:mean");
    if (!norm) fail_msg("optim_step: %s", json_dumps(answer, 0));
    const double value = json_number_value(norm);
    return value;
}
