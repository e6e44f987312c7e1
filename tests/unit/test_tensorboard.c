/* test_tensorboard.c: trainer/tensorboard and the live line of trainer/runlog: checksums against
 * known answers, and event files read back by a reader of their own. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/support.h"
#include "trainer/run/runlog.h"

#include <dirent.h>

// ---- a reader -----------------------------------------------------------------------------------

struct cursor {
    const unsigned char *at, *end;
};

static uint64_t little(const unsigned char *at, int n_bytes)
{
    uint64_t value = 0;
    for (int i = 0; i < n_bytes; i++) value |= (uint64_t)at[i] << (8 * i);
    return value;
}

static uint64_t varint(struct cursor *c)
{
    uint64_t value = 0;
    for (int shift = 0;; shift += 7) {
        assert_true(c->at < c->end && shift < 64);
        value |= (uint64_t)(*c->at & 0x7f) << shift;
        if (!(*c->at++ & 0x80)) return value;
    }
}

struct field {
    int number, wire;
    uint64_t value;      // of a varint or fixed field
    struct cursor bytes; // of a length-delimited one
};
static bool next_field(struct cursor *c, struct field *f)
{
    if (c->at == c->end) return false;
    uint64_t key = varint(c);
    size_t width = (key & 7) == 1 ? 8 : (key & 7) == 5 ? 4 : 0;
    *f = (struct field){.number = (int)(key >> 3), .wire = key & 7};
    if (f->wire == 0) {
        f->value = varint(c);
        return true;
    }
    if (f->wire == 2) width = varint(c);
    assert_true(width <= (size_t)(c->end - c->at));
    f->bytes = (struct cursor){c->at, c->at + width};
    if (f->wire != 2) f->value = little(c->at, (int)width);
    c->at += width;
    return true;
}

struct scalar {
    char tag[64];
    float value;
};
struct event {
    double wall_time;
    int64_t step;
    char version[32];
    int session; // status; 0: no session log
    int n_scalars;
    struct scalar scalars[8];
};

static void read_text(const struct field *f, char *ret, size_t room)
{
    size_t len = (size_t)(f->bytes.end - f->bytes.at);
    assert_true(f->wire == 2 && len < room);
    memcpy(ret, f->bytes.at, len);
    ret[len] = 0;
}

static void read_scalar(struct cursor message, struct scalar *ret)
{
    for (struct field f; next_field(&message, &f);) {
        uint32_t bits = (uint32_t)f.value;
        if (f.number == 1) read_text(&f, ret->tag, sizeof ret->tag);
        if (f.number == 2) memcpy(&ret->value, &bits, sizeof bits);
    }
}

static void read_event(struct cursor message, struct event *ret)
{
    *ret = (struct event){0};
    for (struct field f, inner; next_field(&message, &f);) {
        if (f.number == 1) memcpy(&ret->wall_time, &f.value, sizeof f.value);
        if (f.number == 2) ret->step = (int64_t)f.value;
        if (f.number == 3) read_text(&f, ret->version, sizeof ret->version);
        if (f.number == 5)
            while (next_field(&f.bytes, &inner)) {
                assert_int_equal(inner.number, 1);
                assert_true(ret->n_scalars < 8);
                read_scalar(inner.bytes, &ret->scalars[ret->n_scalars++]);
            }
        if (f.number == 7 && next_field(&f.bytes, &inner)) ret->session = (int)inner.value;
    }
}

// The records of a file, each framed and summed as it should be; returns how many.
static int read_events(const char *path, struct event *ret, int room)
{
    SCOPED(bytes_release) struct bytes file = BYTES_INIT;
    int n = 0;
    assert_ok(file_read(path, 1 << 20, &file));
    const unsigned char *at = (unsigned char *)file.data, *end = at + file.len;
    while (at < end) {
        assert_true(end - at >= 16);
        uint64_t len = little(at, 8);
        assert_int_equal(little(at + 8, 4), crc32c_masked(at, 8));
        at += 12;
        assert_true(len + 4 <= (uint64_t)(end - at));
        assert_int_equal(little(at + len, 4), crc32c_masked(at, len));
        assert_true(n < room);
        read_event((struct cursor){at, at + len}, &ret[n++]);
        at += len + 4;
    }
    return n;
}

// ---- tests --------------------------------------------------------------------------------------

TEST(checksums)
{
    unsigned char block[32] = {0};
    // RFC 3720, appendix B.4: byte i is first + step * i
    static const struct {
        int first, step;
        uint32_t sum;
    } blocks[] = {
        {0, 0, 0x8a9136aau}, {255, 0, 0x62a8ab43u}, {0, 1, 0x46dd794eu}, {31, -1, 0x113fdb5cu}};
    assert_int_equal(crc32c("123456789", 9), 0xe3069283u);
    assert_int_equal(crc32c("", 0), 0);
    for (size_t k = 0; k < sizeof blocks / sizeof *blocks; k++) {
        for (int i = 0; i < 32; i++)
            block[i] = (unsigned char)(blocks[k].first + blocks[k].step * i);
        assert_int_equal(crc32c(block, 32), blocks[k].sum);
    }
    // rotated right by 15, plus 0xa282ead8
    uint32_t crc = 0xe3069283u;
    assert_int_equal(crc32c_masked("123456789", 9), (crc >> 15 | crc << 17) + 0xa282ead8u);
}

static json_t *line(int64_t step, double reward)
{
    return json_pack("{s:I, s:f, s:i, s:n, s:b, s:s, s:f}", "step", (json_int_t)step, "reward",
                     reward, "weight_version", 12, "kl", "done", 1, "name", "x", "huge", 1e300);
}

static int is_event_file(const struct dirent *entry)
{
    return strncmp(entry->d_name, "events.out.tfevents.", 20) == 0;
}

// The i-th event file of a folder that has n of them, as readers take them.
static const char *event_file(const char *folder, int i, int n)
{
    struct dirent **entries;
    const char *path = NULL;
    const int found = scandir(folder, &entries, is_event_file, alphasort);
    assert_int_equal(found, n);
    for (int k = 0; k < found; k++) {
        if (k == i) path = test_path(folder, entries[k]->d_name);
        free(entries[k]);
    }
    free(entries);
    return path;
}

TEST(a_scalar_for_each_number)
{
    const char *folder = test_folder();
    struct tensorboard *tb;
    struct event events[8];
    assert_ok(tensorboard_new(folder, 0, &tb));
    for (int64_t step = 1; step <= 2; step++) {
        assert_ok(
            tensorboard_write(tb, test_keep(line(step == 2 ? 300 : step, -0.1 * (double)step))));
        // on disk at once
        assert_int_equal(read_events(event_file(folder, 0, 1), events, 8), 2 + step);
    }
    assert_string_equal(events[0].version, "brain.Event:2");
    assert_true(events[0].wall_time > 1.6e9);
    assert_int_equal(events[1].session, 1);
    assert_int_equal(events[1].step, 0);
    assert_int_equal(events[2].step, 1);
    assert_int_equal(events[3].step, 300);
    assert_int_equal(events[3].n_scalars, 2);
    assert_string_equal(events[3].scalars[0].tag, "reward");
    assert_true(events[3].scalars[0].value == (float)-0.2);
    assert_string_equal(events[3].scalars[1].tag, "weight_version");
    assert_true(events[3].scalars[1].value == 12);
    tensorboard_free(tb);
}

// A process that goes on with a run begins a file that sorts behind the others, also within the
// same second, and says from which step on the others no longer count.
TEST(resuming_begins_a_file)
{
    const char *folder = test_folder();
    struct tensorboard *first, *second, *third;
    struct event events[8];
    assert_ok(tensorboard_new(folder, 0, &first));
    assert_ok(tensorboard_new(folder, 10, &second));
    assert_ok(tensorboard_new(folder, 20, &third));
    for (int i = 1; i < 3; i++) {
        assert_int_equal(read_events(event_file(folder, i, 3), events, 8), 2);
        assert_int_equal(events[1].session, 1);
        assert_int_equal(events[1].step, 10 * i + 1);
    }
    tensorboard_free(first);
    tensorboard_free(second);
    tensorboard_free(third);
    struct tensorboard *none = NULL;
    assert_fails(tensorboard_new(test_path(folder, "missing"), 0, &none), ST_IO, "missing");
    assert_null(none);
}

TEST(the_run_log_writes_both)
{
    const char *folder = test_folder();
    struct runlog *log;
    struct event events[8];
    int n_files = 0, n = 0;
    assert_ok(runlog_new(folder, 0, 1, &log));
    assert_ok(runlog_write(log, line(1, 0.25)));
    runlog_free(log);
    DIR *dir = opendir(folder);
    assert_non_null(dir);
    for (struct dirent *entry; (entry = readdir(dir));) {
        if (!strstr(entry->d_name, "tfevents")) continue;
        n_files++;
        n = read_events(test_path(folder, entry->d_name), events, 8);
    }
    closedir(dir);
    assert_int_equal(n_files, 1);
    assert_int_equal(n, 3);
    assert_true(events[2].scalars[0].value == 0.25f);
    assert_true(file_exists(test_path(folder, "metrics.jsonl")));
}

TEST(live_line)
{
    SCOPED(bytes_release) struct bytes text = BYTES_INIT;
    struct progress p = {.step = 3,
                         .reward = 0.5124,
                         .teacher = NAN,
                         .accuracy = 0.5,
                         .acceptance = 0.631,
                         .zero_spread = 0.25,
                         .kl = 0.00123,
                         .grad_norm = 0.2134,
                         .clipped = 0.011,
                         .cut_off = 0.5,
                         .mean_length = 12.25,
                         .tokens_per_s = 4200.4};
    progress_line(&p, 200, 64.4, &text);
    assert_string_equal(bytes_text(&text),
                        "step 3/200  1:04 left  reward 0.512  accuracy 50.0%  acceptance 63.1%"
                        "  zero-spread 25.0%  kl 0.0012  grad norm 0.213  clipped 1.1%"
                        "  cut off 50.0%  4200 tokens/s  length 12.2");
    bytes_clear(&text);
    p.accuracy = p.acceptance = p.clipped = -1;
    p.kl = NAN;
    progress_line(&p, 200, 3600 + 4 * 60 + 8.7, &text);
    assert_string_equal(bytes_text(&text),
                        "step 3/200  1:04:09 left  reward 0.512  zero-spread 25.0%"
                        "  grad norm 0.213  cut off 50.0%  4200 tokens/s"
                        "  length 12.2");
    bytes_clear(&text);
    p.reward = NAN; // a teacher alone
    p.teacher = 0.08810;
    progress_line(&p, 200, 64.4, &text);
    assert_string_equal(bytes_text(&text),
                        "step 3/200  1:04 left  teacher 0.0881  grad norm 0.213  cut off 50.0%"
                        "  4200 tokens/s  length 12.2");
}

// A run whose folder is gone does not go on as if its lines were kept.
TEST(a_removed_folder_is_said)
{
    const char *folder = test_path(test_folder(), "run");
    struct runlog *log;
    assert_ok(file_make_folders(folder));
    assert_ok(runlog_new(folder, 0, 1, &log));
    assert_ok(runlog_write(log, json_pack("{s:i}", "step", 1)));
    assert_ok(file_remove_tree(folder));
    assert_fails(runlog_write(log, json_pack("{s:i}", "step", 2)), ST_IO,
                 "metrics.jsonl was removed or replaced while the run goes on");
    runlog_free(log);
}
