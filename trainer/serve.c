/* serve.c: `cw-trainer serve`: the Tinker API on the model a server is serving. The main thread
 * owns the device: it does what clients ask for, one request after the other. Beside it run the
 * API's loop (serve/tinker.h) and the bridge's heartbeat. */
// SPDX-License-Identifier: Apache-2.0
#include "trainer/commands.h"
#include "bridge/control.h"
#include "common/base/clock.h"
#include "common/base/file.h"
#include "common/base/log.h"
#include "common/base/options.h"
#include "common/http/listen.h"
#include "common/model/model.h"
#include "trainer/run/options_shared.h"
#include "trainer/run/stop.h"
#include "trainer/serve/tinker.h"

#include <signal.h>
#include <stdlib.h>

#define TURN_MS   100   // between two checks of signals and the server
#define GONE_MS   30000 // clients get to read that the server is gone
#define OWN_FILES 64    // descriptors beside those of connections

struct config {
    struct trained_model_options model;
    struct tinker_options tinker;
    struct learner_options learner;
    const char *config, *listen, *api_key_file, *run_dir;
    enum log_level log_level;
};

#define OPTIONS_OF struct config

const struct option_spec serve_options[] = {
    OPT_TEXT("bridge", model.bridge, NULL, "PATH", "the server's bridge file (default: searched)"),
    OPT_TEXT("listen", listen, "127.0.0.1:8011", "HOST:PORT",
             "where clients come; off loopback only with --api-key-file"),
    OPT_TEXT("api-key-file", api_key_file, NULL, "FILE",
             "its first line, which begins with tml-, is the key that clients must send (default: "
             "api-key in --run-dir, which is made)"),
    OPT_TEXT("run-dir", run_dir, "runs/tinker", "DIR",
             "training runs and their checkpoints, which tinker:// paths name"),
    OPT_TEXT("model-names", tinker.model_names, NULL, "NAME[=http://HOST:PORT],...",
             "by which clients may ask for the served model (beside its folder and that one's last "
             "part), or for one that the cw-infer-server at that address, which has the same key "
             "where it has one, samples: a teacher, a judge"),
    OPT_TEXT("loss-for", model.loss_for, NULL, "NAME=OTHER",
             "the loss OTHER is computed where a client asks for NAME, and what requests have "
             "beyond it is passed over"),
    OPT_CHOICE("snapshots", tinker.inflight, "live", OPTION_WORDS("live", "inflight"),
               "live: a snapshot is answered for as long as the live weights are it; inflight: "
               "newer weights answer for older ones"),
    OPT_INT("keep-snapshots", model.keep_snapshots, "2", "N", 0, 64,
            "older snapshots of each adapter that stay on the server as copies, each in a place of "
            "its --max-adapters; the least lately sampled goes first"),
    OPT_FLAG("exact", model.exact, NULL,
             "each datum is a micro-batch of its own, so that gradients have the same bits however "
             "datums are cut into requests; slower"),
    FREEZE_OPTION(),
    OPT_HEADING("Machine"),
    MEMORY_OPTIONS,
    OPT_INT("max-connections", tinker.http.max_connections, "900", "N", 1, 65536,
            "open connections"),
    OPT_SIZE("max-body", tinker.http.max_body, "64M", 1024, 1 << 30, "largest request body"),
    OPT_SIZE("max-buffered", tinker.http.max_buffered, "1G", 1024, 1e15,
             "all request bodies in memory together, more get 429"),
    OPT_DOUBLE("quiesce-timeout", model.quiesce_timeout, "60", "SECONDS", 0.1, 1e6,
               "longest wait for the server's step boundary"),
    OPT_DOUBLE("rollout-timeout", model.sample_timeout, "1800", "SECONDS", 1, 1e6,
               "longest time for one request's samples"),
    OPT_DOUBLE("gap-timeout", tinker.gap_timeout, "360", "SECONDS", 0.1, 1e6,
               "longest wait for a request whose number is missing, until those behind it fail; "
               "the SDK sends what got lost again for five minutes"),
    OPT_DOUBLE("session-timeout", tinker.session_timeout, "3600", "SECONDS", 1, 1e6,
               "a client that was not heard of for so long is forgotten, with its sampling "
               "sessions; not while it has the weights or an adapter"),
    LOG_LEVEL_OPTION,
    OPT_CONFIG,
    OPT_FOREIGN(
        OPTION_WORDS("unembed: adapters are on the head where the client says so (train_unembed)")),
    OPT_END,
};

struct serve {
    struct config config;
    struct trained_model *model;
    struct tinker *tinker;
    char runs[PATH_ROOM], key_file[PATH_ROOM]; // the latter: where there is no --api-key-file
    char *key;
    int64_t gone_ns; // the server was found gone; 0: it lives
    char gone_why[1024];
};

static enum status open_api(struct serve *s)
{
    struct config *c = &s->config;
    struct tinker_options *o = &c->tinker;
    enum status st;
    char host[256];
    int64_t files;
    int port;
    if (c->model.loss_for)
        log_warn("--loss-for %s: the first is asked for, the second computed, the rest passed over",
                 c->model.loss_for);
    o->http.idle_timeout_s = 120;
    o->http.request_timeout_s = 120;
    if (limit_connections(1, OWN_FILES, &o->http.max_connections, &files))
        log_info("%lld connections: this process may open %lld files",
                 (long long)o->http.max_connections, (long long)files);
    if (c->api_key_file)
        CHECK(api_key_read("--api-key-file", c->api_key_file, &s->key));
    else
        CHECK(api_key_make("--run-dir", s->key_file, &s->key));
    o->http.api_key = s->key;
    CHECK(tcp_listen("--listen", c->listen, c->api_key_file ? NULL : "--api-key-file", host,
                     &o->tcp_fd, &port));
    st = tinker_start(o, s->model, &s->tinker);
    if (st == ST_OK)
        log_info("the Tinker API on %s, port %d; runs lie in %s; clients need the key: export "
                 "TINKER_API_KEY=$(cat %s)",
                 c->listen, port, s->runs, c->api_key_file ? c->api_key_file : s->key_file);
out:
    return st;
}

static enum status serve(void *context)
{
    struct serve *s = context;
    enum status st;
    log_open("cw-trainer", s->config.log_level);
    signal(SIGPIPE, SIG_IGN);
    stop_catch_signals();
    s->config.model.learner = &s->config.learner;
    s->config.model.runs = s->runs;
    CHECK(loss_for_check(s->config.model.loss_for));
    CHECK(file_make_folders(s->config.run_dir));
    CHECK(path_absolute(s->config.run_dir, s->runs, sizeof s->runs));
    CHECK(path_put(s->key_file, s->runs, "api-key"));
    CHECK(trained_open(&s->config.model, &s->model));
    CHECK(open_api(s));
    while (!stop_requested() && !(s->gone_ns && clock_ms_since(s->gone_ns) > GONE_MS)) {
        // Requests after the server's end fail for a while, so that clients read why; then this
        // ends too.
        if (!s->gone_ns && control_owner_alive(s->model->info.control) != ST_OK) {
            snprintf(s->gone_why, sizeof s->gone_why, "%s, by a new cw-trainer serve",
                     CUT(status_message(), 900));
            log_error("%s", s->gone_why);
            s->gone_ns = clock_now_ns();
        }
        tinker_perform(s->tinker, s->model, TURN_MS, s->gone_ns ? s->gone_why : NULL);
    }
    if (s->gone_ns && !stop_requested()) FAIL(ST_PEER_GONE, "%s", s->gone_why);
    log_info("stopping");
out:
    tinker_stop(s->tinker);
    trained_close(s->model);
    free(s->key);
    return st;
}

int serve_main(int argc, char **argv)
{
    static struct serve s;
    const struct program program = {
        .name = "cw-trainer",
        .command = "serve",
        .usage = "[options]\n\nServes the Tinker API: clients of Thinking Machines' SDK sample "
                 "from and train the model\nthat a server is serving, on its own copy of the "
                 "weights (docs/use/tinker.md).",
        .options = serve_options,
        .config = &s.config,
        .run = serve,
        .context = &s,
    };
    return program_main(&program, argc, argv);
}
