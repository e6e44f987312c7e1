/* ipc-check.c: cw-ipc-check, which tells in a second whether a bridge is healthy, and why not.
 *
 * It attaches as a trainer does, one check a line, then proves that server and client see the same
 * memory: through two words of the arena's canary, which no weight touches, and through a checksum
 * of every tensor taken on both sides; of a server with several ranks, for each shard. It takes no
 * lease and writes nothing but the one canary word. One thread. Checks go to standard output as
 * they end, or with --json as one object at the end. */
// SPDX-License-Identifier: Apache-2.0
#include "bridge/attach.h"
#include "common/base/hash.h"
#include "common/http/http_client.h"
#include "common/base/clock.h"
#include "common/base/json.h"
#include "common/base/options.h"
#include "kernels/ops.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#define REQUEST_MS 10000 // the server answers at a step boundary, so at once unless it is stuck
#define ATTEMPTS   5     // while a training run publishes
#define RETRY_MS   20

struct config {
    const char *bridge, *word; // word: the same, without an option's name
    bool json;
};

#define OPTIONS_OF struct config
static const struct option_spec table[] = {
    OPT_TEXT("bridge", bridge, NULL, "PATH", "the bridge file (default: the first that is found)"),
    OPT_FLAG("json", json, NULL, "print one JSON object"),
    OPT_END,
};

struct check {
    bool json, failed;
    int rank;              // whose shard is checked now
    json_t *checks, *info; // info: the object that --json prints
    struct bridge *bridge;
    struct http_client *http;
};

// ---- reporting ----------------------------------------------------------------------------------

enum outcome { OUTCOME_OK, OUTCOME_FAIL, OUTCOME_SKIP };

static void report(struct check *c, const char *name, enum outcome outcome, const char *format, ...)
    __attribute__((format(printf, 4, 5)));
static void report(struct check *c, const char *name, enum outcome outcome, const char *format, ...)
{
    static const char *const words[] = {"ok", "FAIL", "skip"};
    char detail[2200];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(detail, sizeof detail, format, arguments);
    va_end(arguments);
    char of_rank[96] = "";
    if (c->rank > 0) snprintf(of_rank, sizeof of_rank, "rank %d: %s", c->rank, name);
    if (c->rank > 0) name = of_rank;
    if (outcome == OUTCOME_FAIL) c->failed = true;
    if (!c->json) printf("%-5s %-16s %s\n", words[outcome], name, detail);
    json_array_append_new(c->checks, json_pack("{s:s, s:s, s:s}", "check", name, "result",
                                               words[outcome], "detail", detail));
}

static void on_step(void *context, const char *step, enum status st, const char *detail)
{
    struct check *c = context;
    if (st == ST_OK)
        report(c, step, OUTCOME_OK, "%s", detail);
    else
        report(c, step, OUTCOME_FAIL, "%s: %s", status_words(st), status_message());
}

static void fact(const struct check *c, const char *name, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
static void fact(const struct check *c, const char *name, const char *format, ...)
{
    if (c->json) return;
    va_list arguments;
    va_start(arguments, format);
    printf("      %-16s ", name);
    vprintf(format, arguments);
    putchar('\n');
    va_end(arguments);
}

// ---- the same memory ----------------------------------------------------------------------------

// "0123456789abcdef" of the server's answers
static enum status hex_word(const char *where, const json_t *value, uint64_t *ret)
{
    const char *text = json_string_value(value);
    char *end = NULL;
    uint64_t word = text ? strtoull(text, &end, 16) : 0;
    if (!text || end == text || *end)
        return status_fail(ST_FORMAT, "%s is not a hexadecimal word", where);
    *ret = word;
    return ST_OK;
}

// Writes a word into the canary, asks the server what it sees, and looks for the server's answer,
// the word's complement, beside it.
static enum status exchange_canary(struct check *c, bool *ret_seen, bool *ret_answered)
{
    struct device *dev = bridge_device(c->bridge);
    const struct bridge_role *policy = &bridge_file_of(c->bridge)->roles[0];
    char *canary = (char *)bridge_base(c->bridge, policy->role) + policy->canary_offset;
    uint64_t word = 0, seen = 0, words[2] = {0, 0};
    json_t *answer = NULL;
    const json_t *value;
    enum status st;
    if (getrandom(&word, sizeof word, 0) != (ssize_t)sizeof word)
        word = (uint64_t)clock_now_ns() * HASH_SPREAD;
    device_copy_in(dev, canary, &word, sizeof word);
    CHECK(device_sync(dev));
    CHECK(http_get_json(c->http, "/bridge/info?canary=1", REQUEST_MS, &answer));
    value = c->rank == 0 ? json_object_get(answer, "canary")
                         : json_array_get(json_object_get(answer, "canaries"), (size_t)c->rank);
    CHECK(hex_word("/bridge/info: \"canary\"", value, &seen));
    device_copy_out(dev, words, canary, sizeof words);
    CHECK(device_sync(dev));
    *ret_seen = seen == word;
    *ret_answered = words[0] == word && words[1] == ~word;
out:
    json_decref(answer);
    return st;
}

static void check_canary(struct check *c)
{
    bool seen = false, answered = false;
    enum status st = ST_OK;
    // another checker may use it at this moment
    for (int i = 0; st == ST_OK && i < 3 && !(seen && answered); i++)
        st = exchange_canary(c, &seen, &answered);
    if (st != ST_OK)
        on_step(c, "canary", st, NULL);
    else if (seen && answered)
        report(c, "canary", OUTCOME_OK,
               "the server read the word written here, and its answer was read back");
    else if (seen)
        report(c, "canary", OUTCOME_FAIL,
               "the server reads what is written here, but its answer does not arrive: this is not "
               "the server's memory; start cw-infer-server again");
    else
        report(c, "canary", OUTCOME_FAIL,
               "the server does not see what is written here: the file's handle leads to other "
               "memory; start cw-infer-server again, which writes the file anew");
}

// ---- the same weights ---------------------------------------------------------------------------

struct sums { // of every role's tensors, as the bridge file lists them
    int n;
    struct bridge_tensor *tensors;
    uint64_t *offset, *bytes, *mine;
};

static enum status sums_init(struct sums *s, const struct bridge_file *file)
{
    size_t n = 0;
    for (int i = 0; i < file->n_roles; i++) n += (size_t)file->roles[i].n_tensors;
    s->tensors = calloc(n, sizeof *s->tensors);
    s->offset = calloc(n, sizeof *s->offset);
    s->bytes = calloc(n, sizeof *s->bytes);
    s->mine = calloc(n, sizeof *s->mine);
    if (!s->tensors || !s->offset || !s->bytes || !s->mine)
        return status_fail(ST_NO_MEMORY, "no memory for %zu checksums", n);
    for (int i = 0; i < file->n_roles; i++) {
        const struct bridge_role *role = &file->roles[i];
        memcpy(s->tensors + s->n, role->tensors, (size_t)role->n_tensors * sizeof *role->tensors);
        s->n += role->n_tensors;
    }
    for (int i = 0; i < s->n; i++) {
        s->offset[i] = s->tensors[i].offset;
        s->bytes[i] = s->tensors[i].bytes;
    }
    return ST_OK;
}

// One comparison. ret_version stays 0 where the weights changed meanwhile; ret_differs counts
// tensors and ret_first is the first of them.
static enum status compare_sums(struct check *c, struct sums *s, uint64_t *ret_version,
                                int *ret_differs, int *ret_first)
{
    struct device *dev = bridge_device(c->bridge);
    struct control *control = bridge_control(c->bridge);
    int64_t theirs = 0;
    int differs = 0, first = -1;
    json_t *answer = NULL;
    enum status st;
    uint64_t version = control_version(control);
    if (version & 1) return ST_OK;
    const struct bridge_file *file = bridge_file_of(c->bridge);
    for (int i = 0, at = 0; i < file->n_roles; at += file->roles[i++].n_tensors)
        device_ops(dev)->checksum(dev, s->mine + at, bridge_base(c->bridge, file->roles[i].role),
                                  s->offset + at, s->bytes + at, file->roles[i].n_tensors);
    CHECK(device_sync(dev));
    CHECK(http_get_json(c->http, "/bridge/info?checksums=1", REQUEST_MS, &answer));
    CHECK(json_get_int("/bridge/info", answer, "weight_version", 0, INT64_MAX, &theirs));
    if ((uint64_t)theirs != version || control_version(control) != version) goto out;
    const json_t *sums = json_object_get(answer, "checksums");
    const int all = s->n * file->tp_degree;
    if ((int)json_array_size(sums) != all)
        FAIL(ST_MISMATCH, "the server sums %zu tensors, the bridge file names %d",
             json_array_size(sums), all);
    // The server sums its arenas, and behind them each follower's.
    const int first_sum = c->rank * s->n;
    for (int i = 0; i < s->n; i++) {
        uint64_t sum = 0;
        CHECK(hex_word("/bridge/info: \"checksums\"", json_array_get(sums, (size_t)(first_sum + i)),
                       &sum));
        if (sum == s->mine[i]) continue;
        if (differs++ == 0) first = i;
    }
    *ret_version = version;
    *ret_differs = differs;
    *ret_first = first;
out:
    json_decref(answer);
    return st;
}

static void check_sums(struct check *c)
{
    struct sums s = {0};
    uint64_t version = 0;
    int differs = 0, first = 0;
    enum status st = sums_init(&s, bridge_file_of(c->bridge));
    for (int i = 0; st == ST_OK && i < ATTEMPTS && version == 0; i++) {
        if (i > 0) clock_sleep_ms(RETRY_MS);
        st = compare_sums(c, &s, &version, &differs, &first);
    }
    if (st != ST_OK)
        on_step(c, "checksums", st, NULL);
    else if (version == 0)
        report(c, "checksums", OUTCOME_SKIP,
               "not compared: in %d attempts the weights changed each time (a run is publishing)",
               ATTEMPTS);
    else if (differs > 0)
        report(c, "checksums", OUTCOME_FAIL,
               "mismatch: %d of %d tensors differ from the server's at version %" PRIu64
               ", the first is %s: this is not the memory it serves from; start cw-infer-server "
               "again",
               differs, s.n, version, s.tensors[first].name);
    else
        report(c, "checksums", OUTCOME_OK, "%d tensors equal the server's at version %" PRIu64, s.n,
               version);
    free(s.tensors);
    free(s.offset);
    free(s.bytes);
    free(s.mine);
}

// ---- state --------------------------------------------------------------------------------------

static const char *weights_words(const struct control_info *f)
{
    if (f->torn) return "torn";
    if (f->version & 1) return f->quiesce_granted ? "being updated" : "being loaded by the server";
    return "whole";
}

static void check_weights(struct check *c, const struct control_info *f)
{
    if (f->torn)
        report(c, "weights", OUTCOME_FAIL,
               "weights are torn: version %" PRIu64 " is odd and nobody is writing; the server "
               "restores them from %s, wait until its /health says ok or start it again",
               f->version, f->snapshot[0] ? f->snapshot : "its model folder");
    else
        report(c, "weights", OUTCOME_OK, "version %" PRIu64 ", %s", f->version, weights_words(f));
}

static json_t *process_info(int pid, bool alive, double heartbeat_age_ms)
{
    return pid ? json_pack("{s:i, s:b, s:f}", "pid", pid, "alive", (int)alive, "heartbeat_age_ms",
                           heartbeat_age_ms)
               : json_null();
}

static void add_info(struct check *c, const struct control_info *f)
{
    const struct bridge_file *file = bridge_file_of(c->bridge);
    json_t *roles = json_array();
    for (int i = 0; i < file->n_roles; i++) {
        const struct bridge_role *r = &file->roles[i];
        struct control_info of = {0};
        control_info_of(bridge_control(c->bridge), r->role, &of);
        json_array_append_new(
            roles, json_pack("{s:s, s:s, s:s, s:s, s:I, s:i, s:I, s:s, s:I, s:s, s:I}", "role",
                             r->role, "model", r->model, "kind", r->kind, "dtype",
                             dtype_name(r->dt), "bytes", (json_int_t)r->bytes, "tensors",
                             r->n_tensors, "parameters", (json_int_t)r->n_parameters, "origin",
                             of.origin, "updates", (json_int_t)of.updates, "run", of.run,
                             "run_updates", (json_int_t)of.run_updates));
    }
    json_t *last = f->publishes
                       ? json_pack("{s:f, s:f, s:f}", "wait_ms", f->last_wait_ms, "write_ms",
                                   f->last_write_ms, "pause_ms", f->last_pause_ms)
                       : json_null();
    json_t *info = json_pack(
        "{s:s, s:s, s:s, s:s, s:I, s:s, s:o, s:o, s:I, s:o, s:s, s:s, s:s, s:I, s:s, s:I, s:o, "
        "s:i}",
        "bridge", file->path, "socket", file->socket, "device", file->device, "device_uuid",
        file->device_uuid, "weight_version", (json_int_t)f->version, "weights", weights_words(f),
        "owner", process_info(f->owner_pid, f->owner_alive, f->owner_heartbeat_age_ms), "writer",
        process_info(f->writer_pid, f->writer_alive, f->writer_heartbeat_age_ms), "publishes",
        (json_int_t)f->publishes, "last_publish", last, "snapshot", f->snapshot, "loaded",
        f->loaded, "origin", f->origin, "updates", (json_int_t)f->updates, "run", f->run,
        "run_updates", (json_int_t)f->run_updates, "roles", roles, "tp_degree", file->tp_degree);
    json_object_update(c->info, info);
    json_decref(info);
}

static void print_info(const struct check *c, const struct control_info *f)
{
    const struct bridge_file *file = bridge_file_of(c->bridge);
    struct bytes words = BYTES_INIT;
    if (!(f->version & 1)) {
        control_origin_words(f, &words);
        fact(c, "origin", "%s", bytes_text(&words));
        bytes_release(&words);
    }
    fact(c, "owner", "pid %d, heartbeat %.0f ms ago, socket %s", (int)f->owner_pid,
         f->owner_heartbeat_age_ms, file->socket);
    if (f->writer_pid)
        fact(c, "lease", "writer pid %d, heartbeat %.0f ms ago%s", (int)f->writer_pid,
             f->writer_heartbeat_age_ms,
             f->writer_alive ? "" : " (dead: the server takes the lease back)");
    else
        fact(c, "lease", "free");
    if (f->publishes)
        fact(c, "last publish",
             "waited %.3f ms, wrote %.3f ms, generation paused %.3f ms; %" PRIu64 " so far",
             f->last_wait_ms, f->last_write_ms, f->last_pause_ms, f->publishes);
    else
        fact(c, "last publish", "none yet");
    if (f->snapshot[0]) fact(c, "snapshot", "%s", f->snapshot);
    for (int i = 0; i < file->n_roles; i++) {
        const struct bridge_role *r = &file->roles[i];
        struct control_info of;
        if (i > 0 && control_info_of(bridge_control(c->bridge), r->role, &of)) {
            bytes_puts(&words, "; ");
            control_origin_words(&of, &words);
        }
        fact(c, r->role, "%.1f MiB, %d tensors, %lld parameters, %s, from %s%s",
             (double)r->bytes / (1 << 20), r->n_tensors, (long long)r->n_parameters,
             dtype_name(r->dt), r->model, bytes_text(&words));
        bytes_release(&words);
    }
}

static void check_attached(struct check *c)
{
    struct control_info info;
    control_info(bridge_control(c->bridge), &info);
    check_weights(c, &info);
    enum status st = http_client_new(bridge_file_of(c->bridge)->socket, &c->http);
    if (st == ST_OK) {
        check_canary(c);
        // Torn weights have no version to compare at.
        if (!c->failed) check_sums(c);
    } else {
        on_step(c, "socket", st, NULL);
    }
    if (c->rank > 0) return; // what follows is of the server
    control_info(bridge_control(c->bridge), &info);
    add_info(c, &info);
    print_info(c, &info);
}

// Of one rank's shard; returns how many there are.
static int check_rank(struct check *c, const char *path, int rank)
{
    int shards = 0;
    c->rank = rank;
    if (bridge_attach_shard(path, rank, NULL, on_step, c, &c->bridge) == ST_OK) {
        shards = bridge_file_of(c->bridge)->tp_degree;
        check_attached(c);
    }
    http_client_free(c->http);
    bridge_detach(c->bridge);
    c->http = NULL;
    c->bridge = NULL;
    return shards;
}

static enum status run(void *context)
{
    const struct config *config = context;
    struct check c = {.json = config->json, .checks = json_array(), .info = json_object()};
    int64_t start = clock_now_ns();
    const char *path = config->word ? config->word : config->bridge;
    const int shards = check_rank(&c, path, 0);
    for (int rank = 1; rank < shards; rank++) check_rank(&c, path, rank);
    double total_ms = clock_ms_since(start);
    json_object_set_new(c.info, "ok", json_boolean(!c.failed));
    json_object_set(c.info, "checks", c.checks);
    json_object_set_new(c.info, "total_ms", json_real(total_ms));
    if (c.json) {
        json_dumpf(c.info, stdout, JSON_INDENT(2));
        putchar('\n');
    } else {
        printf("%s in %.0f ms\n", c.failed ? "NOT healthy" : "healthy", total_ms);
    }
    json_decref(c.checks);
    json_decref(c.info);
    return c.failed || fflush(stdout) != 0 ? ST_CANCELLED : ST_OK;
}

int main(int argc, char **argv)
{
    struct config config = {0};
    const struct program program = {
        .name = "cw-ipc-check",
        .usage = "[BRIDGE] [--json]\n\n"
                 "Checks a bridge file and the server behind it: 0 healthy, 1 not, 2 wrong usage.\n"
                 "BRIDGE is looked for in $COMMONWEIGHT_BRIDGE, $LOGDIR/vllm_bridge_config.json, "
                 "./bridge.json,\n"
                 "$XDG_RUNTIME_DIR/commonweight/bridge.json and /run/commonweight/bridge.json.",
        .options = table,
        .config = &config,
        .word = &config.word,
        .run = run,
        .context = &config,
    };
    return program_main(&program, argc, argv);
}
