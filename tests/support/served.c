/* served.c: see served.h. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/served.h"

struct daemon served;

void served_start(void)
{
    const char *const *options = OPTIONS("--max-batch", "8", "--max-queue", "192", "--max-body",
                                         "64K", "--kv-memory", "32M", "--prefill-chunk", "24");
    daemon_start(&served, daemon_model(test_folder(), true, 7), options);
}

void served_stop(void)
{
    daemon_end(&served);
}

json_t *ask(const char *path, const char *body)
{
    return daemon_post(served.socket, path, 200, body);
}
