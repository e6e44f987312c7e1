/* sync.c: the sync benchmark: a second process publishes while this one decodes. */
// SPDX-License-Identifier: Apache-2.0
#include "bridge/attach.h"
#include "common/base/clock.h"
#include "common/base/file.h"
#include "common/base/log.h"
#include "infer-server/weights/weights_owner.h"
#include "tools/bench/bench.h"
#include "trainer/learn/optimizer.h"
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

struct publisher { // in the second process
    struct optimizer *optimizer;
    struct device *dev;
    double adamw_ms;
};

static enum status publisher_update(void *context)
{
    struct publisher *p = context;
    device_timer_start(p->dev);
    enum status st = optimizer_apply(p->optimizer, 1e-9);
    p->adamw_ms = device_timer_stop(p->dev);
    return st;
}

enum { TOTAL_MS, WAIT_MS, WRITE_MS, ADAMW_MS, PAUSE_MS, N_TIMES };
typedef double publish_times_ms[N_TIMES];

// The trainer's part: maps the weights through the bridge file and publishes. ret_records: (steps).
static enum status publish_all(const struct bench_options *o, const char *bridge_path,
                               publish_times_ms *ret_records)
{
    struct optimizer_config adamw = {0.9, 0.999, 1e-8, 0.0, 1.0, MOMENTS_F32, false};
    struct bridge *bridge = NULL;
    struct model_config *config = NULL;
    struct weights *weights = NULL;
    struct publisher p = {0};
    enum status st = ST_OK;
    int64_t deadline = clock_deadline_ns(300 * 1000);
    while (!file_exists(bridge_path) && clock_now_ns() < deadline) clock_sleep_ms(20);
    CHECK(bridge_attach(bridge_path, NULL, &bridge));
    CHECK(bridge_become_writer(bridge));
    p.dev = bridge_device(bridge);
    CHECK(bench_load_config(o, device_kind(p.dev) == DEVICE_CUDA, &config));
    CHECK(weights_plan(config, bridge_file_of(bridge)->roles[0].dt, &weights));
    weights_bind(weights, bridge_base(bridge, "policy"));
    CHECK(optimizer_new_whole(p.dev, weights, &adamw, &p.optimizer));
    for (int64_t i = 0; i < o->warmup + o->steps; i++) {
        struct publish_times times;
        struct control_info info;
        double norm;
        // gradients of 7e-4, so that the arithmetic is that of a real step
        device_fill(p.dev, optimizer_grads(p.optimizer, 0)->base, 0x3a,
                    (size_t)weights->n_elements * sizeof(float));
        CHECK(optimizer_prepare(p.optimizer, &norm));
        CHECK(bridge_publish(bridge, 10000, publisher_update, &p, &times));
        clock_sleep_ms(
            20); // generation goes on between updates; the engine notes the pause meanwhile
        control_info(bridge_control(bridge), &info);
        if (i < o->warmup) continue;
        double *ms = ret_records[i - o->warmup];
        ms[TOTAL_MS] = times.total_ms;
        ms[WAIT_MS] = times.wait_ms;
        ms[WRITE_MS] = times.write_ms;
        ms[ADAMW_MS] = p.adamw_ms;
        ms[PAUSE_MS] = info.last_pause_ms;
    }
out:
    optimizer_free(p.optimizer);
    weights_free(weights);
    model_config_free(config);
    bridge_detach(bridge);
    return st;
}

// Decodes flat out until the publisher has ended, quiescing between steps as the engine does.
// The ended process is left to be waited for.
static enum status decode_until_done(struct bench *b, struct control *control, pid_t child)
{
    struct decoder d = {0};
    siginfo_t ended = {0};
    enum status st;
    CHECK(decoder_open(&d, b, DECODER_TOKENS(b)));
    CHECK(decoder_prefill(&d));
    while (waitid(P_PID, (id_t)child, &ended, WEXITED | WNOHANG | WNOWAIT) == 0 &&
           ended.si_pid == 0) {
        CHECK(decoder_step(&d));
        control_heartbeat(control);
        if (control_quiesce_requested(control) && control_grant_quiesce(control) == CONTROL_TORN)
            FAIL(ST_TORN, "the publishing process died in an update");
    }
    if (ended.si_code != CLD_EXITED || ended.si_status != 0)
        st = status_fail(ST_PEER_GONE, "the publishing process failed (its error stands above)");
out:
    decoder_close(&d);
    return st;
}

static enum status sync_owner(const struct bench_options *o, const char *bridge_path, pid_t child,
                              const publish_times_ms *records)
{
    struct bench b = {0};
    int n = (int)o->steps;
    double *column = calloc((size_t)n, sizeof *column), m[N_TIMES];
    enum status st;
    if (!column) return status_fail(ST_NO_MEMORY, "no memory for %d times", n);
    CHECK(bench_open(&b, o, bridge_path));
    CHECK(limits_bandwidth(&b));
    CHECK(weights_owner_announce(b.owner, "/nonexistent")); // nobody asks for rollouts
    CHECK(decode_until_done(&b, weights_owner_control(b.owner), child));
    for (int i = 0; i < N_TIMES; i++) {
        for (int k = 0; k < n; k++) column[k] = records[k][i];
        m[i] = median(column, n);
    }
    // gradient, both moments and the master read, all but the gradient written
    double each = 4 + 2 * (8 + 4); // a master is 4 bytes: f32, or bf16 and its residual
    double limit_ms = 1e3 * each * (double)b.weights->n_elements / b.bandwidth;
    bench_print(&b, "sync",
                json_pack("{s:i, s:f, s:f, s:f, s:f, s:f, s:f, s:i, s:f, s:f}", "publishes", n,
                          "pause_ms", m[PAUSE_MS], "adamw_ms", m[ADAMW_MS], "overhead_ms",
                          m[PAUSE_MS] - m[ADAMW_MS], "wait_ms", m[WAIT_MS], "write_ms", m[WRITE_MS],
                          "total_ms", m[TOTAL_MS], "bytes_copied", 0, "limit_ms", limit_ms,
                          "ratio_to_limit", limit_ms / m[PAUSE_MS]),
                "sync, %d publishes under full generation: pause %.3f ms, of which AdamW %.3f ms "
                "and the rest %.3f ms; wait for the step in flight %.3f ms; limit %.3f ms at %.1f "
                "GB/s, reached %.0f%%; bytes copied 0\n",
                n, m[PAUSE_MS], m[ADAMW_MS], m[PAUSE_MS] - m[ADAMW_MS], m[WAIT_MS], limit_ms,
                b.bandwidth / 1e9, 100 * limit_ms / m[PAUSE_MS]);
out:
    bench_close(&b);
    free(column);
    return st;
}

enum status bench_sync(const struct bench_options *o)
{
    char folder[PATH_ROOM], path[PATH_ROOM];
    size_t bytes = (size_t)o->steps * sizeof(publish_times_ms);
    enum status st;
    publish_times_ms *records = // both processes' memory
        mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (records == MAP_FAILED)
        return status_fail(ST_NO_MEMORY, "no memory for %zu bytes of times", bytes);
    CHECK(file_make_temporary_folder("/tmp", "commonweight-bench", folder));
    CHECK(path_put(path, folder, "bridge.json"));
    // the second process starts before either opens a device: a GPU does not survive a fork
    pid_t child = fork();
    if (child < 0) {
        st = status_fail(ST_IO, "cannot start a second process: %m");
    } else if (child == 0) {
        st = publish_all(o, path, records);
        if (st != ST_OK) log_error("publisher: %s", status_message());
        _exit(st == ST_OK ? 0 : 1);
    } else {
        st = sync_owner(o, path, child, records);
        kill(child, SIGKILL); // not waited for yet, so the number is still its own
        waitpid(child, NULL, 0);
    }
    file_remove_tree(folder);
out:
    munmap(records, bytes);
    return st;
}
