/* test_control_page.c: docs/internals/bridge.md tells other languages where each word of the
 * control page lies; this holds its table against the struct. */
// SPDX-License-Identifier: Apache-2.0
#include "bridge/control_page.h"
#include "tests/support/support.h"

#define FIELD(name)                                                                                \
    {                                                                                              \
#name, offsetof(struct page, name), sizeof((struct page *)0)->name                         \
    }
static const struct {
    const char *name;
    size_t offset, bytes;
} fields[] = {
    FIELD(magic),
    FIELD(format),
    FIELD(bytes),
    FIELD(layout_hash),
    FIELD(owner_start),
    FIELD(owner_pid),
    FIELD(owner_namespace),
    FIELD(version),
    FIELD(publishes),
    FIELD(owner_heartbeat_ns),
    FIELD(owner_updating),
    FIELD(ended),
    FIELD(phase),
    FIELD(doorbell),
    FIELD(lease),
    FIELD(identity),
    FIELD(writer_heartbeat_ns),
    FIELD(heartbeat_limit_ms),
    FIELD(wait_ns),
    FIELD(write_ns),
    FIELD(pause_ns),
    FIELD(snapshot_turn),
    FIELD(snapshot),
    FIELD(noted_publishes),
    FIELD(loaded),
    FIELD(policy_version),
    FIELD(roles_given),
    FIELD(roles),
};

TEST(the_page_says_where_each_word_lies)
{
    char *text = test_read(test_path(test_root(), "docs/internals/bridge.md"));
    int rows = 0;
    for (char *at = text; (at = strstr(at, "\n| ")); at += 3)
        if (at[3] >= '0' && at[3] <= '9') rows++;
    assert_int_equal(rows, sizeof fields / sizeof *fields);
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++) {
        char row[96];
        snprintf(row, sizeof row, "| %zu | %zu | `%s` |", fields[i].offset, fields[i].bytes,
                 fields[i].name);
        assert_contains(text, row);
    }
}
