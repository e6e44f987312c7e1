/* daemon.h: a cw-infer-server of this build for end-to-end tests, and HTTP to it byte by byte, so
 * that also broken requests can be sent. Failures fail the running test. One thread, but for
 * daemon_send(), daemon_connect() and wire_read(), which any thread may use. */
// SPDX-License-Identifier: Apache-2.0
#ifndef TESTS_SUPPORT_DAEMON_H
#define TESTS_SUPPORT_DAEMON_H

#include "bridge/attach.h"
#include "tests/support/support.h"

struct daemon {
    struct test_child child;
    const char *folder, *socket, *bridge, *log; // paths
};

// A tiny random model (vocabulary of 300) in FOLDER/model, with tests/support/tiny_tokenizer.h's
// tokenizer where asked for. Returns its path.
const char *daemon_model(const char *folder, bool tokenizer, uint64_t seed);
// Starts it in a fresh folder, in the place of the one that *d may be; `options` (NULL-ended) stand
// behind --model, --device, --socket, --bridge. Waits until it serves.
void daemon_start(struct daemon *d, const char *model, const char *const options[]);
void daemon_spawn(struct daemon *d, const char *model,
                  const char *const options[]); // does not wait
// The same on n ranks, under mpirun, which leaves the others be where one is killed. Skips the test
// where there is no mpirun.
void daemon_spawn_ranks(struct daemon *d, int n, const char *model, const char *const options[]);
void daemon_wait(struct daemon *d); // until /health says ok
int daemon_stop(struct daemon *d);  // SIGTERM; its exit status
void daemon_end(struct daemon *d);  // the same; fails where it has died before or ends badly
// Defines a test with a server `d` of that model with these options, which ends well behind it.
#define DAEMON_TEST(name, model, options)                                                          \
    static void in_##name(struct daemon *d);                                                       \
    TEST(name)                                                                                     \
    {                                                                                              \
        struct daemon own = {0};                                                                   \
        daemon_start(&own, model, options);                                                        \
        in_##name(&own);                                                                           \
        daemon_end(&own);                                                                          \
    }                                                                                              \
    static void in_##name(struct daemon *d)
void daemon_kill(struct daemon *d); // for teardowns: also when it never ran
// The command line of a cw-trainer train that trains it: `options`, then `more` (both NULL-ended;
// more may be NULL).
const char *const *daemon_trainer(const struct daemon *d, const char *data, const char *run_dir,
                                  const char *const options[], const char *const more[]);
// n elements of a mapped arena are those; f32 in bf16: rounded as by a trainer or a loader.
void daemon_tensor_is(struct bridge *bridge, const void *at, enum dtype dt, const void *want,
                      enum dtype want_dt, size_t n);
// The arena of a role ("policy", "draft") holds exactly what the model folder holds.
void daemon_holds(const struct daemon *d, const char *role, const char *folder);
// All tensors of that role, and no others, are those of a safetensors file.
void daemon_holds_file(const struct daemon *d, const char *role, const char *path);
// That of an adapter holds exactly what the PEFT folder holds, in the arena's dtype.
void daemon_holds_adapter(const struct daemon *d, const char *name, const char *folder);
int daemon_tcp_port(struct daemon *d); // from its log
// Runs `script` (a path in the repository) with the daemon's URL and `argument`; fails the test
// with what it printed unless it ends well.
void daemon_client(struct daemon *d, const char *python, const char *script, const char *argument);

// The dtype in which the tests' device computes exactly (docs/internals/numerics.md): that of
// daemon_start() on the CPU, bf16 elsewhere. For the option --dtype, where a later one counts.
const char *daemon_exact_dtype(void);
// Whether there is such a GPU, "cuda:1"; if not, status_message() says why.
bool daemon_has_device(const char *name);

struct wire_answer { // what it holds lives as long as the program
    int status;
    struct bytes head, body;
    json_t *json; // body, where it is JSON; else NULL
};

int daemon_connect(const char *socket_path); // connected; -1: refused
int daemon_connect_tcp(int port);
bool daemon_send(int fd, const char *text, size_t len);
// The status of a request over TCP; 0 where nobody answers in time. Headers end in \r\n.
int daemon_tcp_status(int port, const char *method, const char *path, const char *headers);
// Reads to the end of the connection (HTTP/1.0 answers have no other); false past ms.
bool wire_read(int fd, int ms, struct wire_answer *ret);

// method and path as HTTP/1.0 with an optional body. Headers: "" or lines that end in \r\n.
void daemon_request(const char *socket_path, const char *method, const char *path,
                    const char *headers, const char *body, struct wire_answer *ret);
// POST; asserts the status and gives the JSON body, which lives as long as the program.
json_t *daemon_post(const char *socket_path, const char *path, int status, const char *body);
json_t *daemon_get(const char *socket_path, const char *path, int status);
// POST of a text as of printf(); asserts the status, and that the answer has `part`.
void daemon_call(const struct daemon *d, const char *path, int status, const char *part,
                 const char *format, ...) __attribute__((format(printf, 5, 6)));
// Sends a POST; the socket, on which its answer comes.
int daemon_ask(const struct daemon *d, const char *path, const char *body);

json_int_t daemon_version(const struct daemon *d); // of its weights
// The first number in /metrics of the series whose name, or name and labels, are these.
double daemon_metric(const struct daemon *d, const char *series);
// Has it load a PEFT folder as that adapter, in place of one that there is.
void daemon_load_adapter(const struct daemon *d, const char *name, const char *folder);

#endif
