/* tensorboard.c: TensorBoard event files, written by hand. Owns the open file; the trainer's
 * thread.
 *
 * An event file is a log that is only appended to, so it cannot be replaced atomically as the run's
 * other files are. Each record leaves in one write(2); one that a crash cut off is the file's last,
 * its checksum or its length shows it, and readers stop there and wait for the rest. A process that
 * goes on with a run never appends behind such a record: it begins a file of its own, named so that
 * readers, who take files in the order of their names, come to it last. Its first event is a
 * session START, at which TensorBoard drops what it has read of that step and later ones.
 */
// SPDX-License-Identifier: Apache-2.0
#include "trainer/run/runlog.h"
#include "common/base/bytes.h"
#include "common/base/clock.h"
#include "common/base/file.h"
#include "common/base/protobuf.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define PREFIX "events.out.tfevents."

struct tensorboard {
    char path[PATH_ROOM];
    int fd;
};

// ---- TFRecord -----------------------------------------------------------------------------------

uint32_t crc32c(const void *data, size_t len)
{
    const unsigned char *byte = data;
    uint32_t crc = ~0u;
    for (size_t i = 0; i < len; i++) { // a record a step: bit by bit is fast enough
        crc ^= byte[i];
        for (int bit = 0; bit < 8; bit++) crc = crc >> 1 ^ (crc & 1 ? 0x82f63b78u : 0);
    }
    return ~crc;
}

// Rotated, so that the checksum of a record that holds its own checksum is no fixed number.
uint32_t crc32c_masked(const void *data, size_t len)
{
    uint32_t crc = crc32c(data, len);
    return (crc >> 15 | crc << 17) + 0xa282ead8u;
}

// Numbers are little-endian there, as in memory.
static enum status write_record(struct tensorboard *tb, const struct bytes *data)
{
    enum status st;
    struct bytes record = BYTES_INIT;
    const uint64_t len = data->len;
    CHECK(bytes_status(data));
    const uint32_t data_sum = crc32c_masked(bytes_text(data), data->len),
                   len_sum = crc32c_masked(&len, sizeof len);
    bytes_append(&record, &len, sizeof len);
    bytes_append(&record, &len_sum, sizeof len_sum);
    bytes_append(&record, bytes_text(data), data->len);
    bytes_append(&record, &data_sum, sizeof data_sum);
    CHECK(bytes_status(&record));
    st = file_write_all(tb->fd, tb->path, record.data, record.len);
out:
    bytes_release(&record);
    return st;
}

// ---- messages -----------------------------------------------------------------------------------

enum { // field numbers
    EVENT_WALL_TIME = 1,
    EVENT_STEP = 2,
    EVENT_FILE_VERSION = 3,
    EVENT_SUMMARY = 5,
    EVENT_SESSION_LOG = 7,
    SUMMARY_VALUE = 1,
    VALUE_TAG = 1,
    VALUE_SIMPLE = 2,
    SESSION_STATUS = 1,
};
#define SESSION_START 1

static void put_event_head(struct bytes *to, int64_t step)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    proto_put_double(to, EVENT_WALL_TIME, (double)now.tv_sec + (double)now.tv_nsec / 1e9);
    proto_put_varint(to, EVENT_STEP, (uint64_t)step);
}

// ---- the file -----------------------------------------------------------------------------------

// The time in a new file's name: now, or later than any that is there (a clock may have been set
// back, and two processes may begin within a second).
static enum status pick_stamp(const char *folder, int64_t *ret)
{
    int64_t stamp = clock_wall_s();
    DIR *dir = opendir(folder);
    if (!dir) return status_fail(ST_IO, "%s: %s", folder, strerror(errno));
    for (struct dirent *entry; (entry = readdir(dir));) {
        if (strncmp(entry->d_name, PREFIX, sizeof PREFIX - 1) != 0) continue;
        long long other = strtoll(entry->d_name + sizeof PREFIX - 1, NULL, 10);
        if (other >= stamp && other < 9999999999LL) stamp = other + 1; // names have 10 digits
    }
    closedir(dir);
    *ret = stamp;
    return ST_OK;
}

enum status tensorboard_new(const char *folder, int64_t step, struct tensorboard **ret)
{
    enum status st;
    char host[64] = "";
    int64_t stamp = 0;
    struct bytes event = BYTES_INIT, session = BYTES_INIT;
    struct tensorboard *tb = calloc(1, sizeof *tb);
    if (!tb) return status_fail(ST_NO_MEMORY, "no memory for an event file");
    tb->fd = -1;
    CHECK(pick_stamp(folder, &stamp));
    if (gethostname(host, sizeof host - 1) != 0 || !host[0] || strchr(host, '/'))
        snprintf(host, sizeof host, "localhost");
    CHECK(path_put(tb->path, folder, PREFIX "%010" PRId64 ".%s.%d", stamp, host, (int)getpid()));
    tb->fd = open(tb->path, O_WRONLY | O_CREAT | O_EXCL | O_APPEND | O_CLOEXEC, 0644);
    if (tb->fd < 0) FAIL(ST_IO, "%s: %s", tb->path, strerror(errno));
    put_event_head(&event, 0);
    proto_put_text(&event, EVENT_FILE_VERSION, "brain.Event:2");
    CHECK(write_record(tb, &event));
    bytes_clear(&event);
    put_event_head(&event, step > 0 ? step + 1 : 0); // a run that starts over has a line of step 0
    proto_put_varint(&session, SESSION_STATUS, SESSION_START);
    proto_put_message(&event, EVENT_SESSION_LOG, &session);
    CHECK(write_record(tb, &event));
    *ret = tb;
out:
    bytes_release(&event);
    if (st != ST_OK) tensorboard_free(tb);
    return st;
}

void tensorboard_free(struct tensorboard *tb)
{
    if (!tb) return;
    if (tb->fd >= 0) close(tb->fd);
    free(tb);
}

enum status tensorboard_write(struct tensorboard *tb, const json_t *metrics)
{
    enum status st = ST_OK;
    struct bytes event = BYTES_INIT, summary = BYTES_INIT;
    const json_t *value;
    const char *key;
    put_event_head(&event, (int64_t)json_integer_value(json_object_get(metrics, "step")));
    json_object_foreach ((json_t *)metrics, key, value) {
        struct bytes message = BYTES_INIT;
        char logged[40];
        snprintf(logged, sizeof logged, "%.*g", METRICS_DIGITS, json_number_value(value));
        const float scalar = (float)strtod(logged, NULL);
        if (!json_is_number(value) || !isfinite(scalar) || strcmp(key, "step") == 0) continue;
        proto_put_text(&message, VALUE_TAG, key);
        proto_put_float(&message, VALUE_SIMPLE, scalar);
        proto_put_message(&summary, SUMMARY_VALUE, &message);
    }
    if (summary.len > 0 || summary.failed) {
        proto_put_message(&event, EVENT_SUMMARY, &summary);
        st = write_record(tb, &event);
    }
    bytes_release(&event);
    return st;
}
