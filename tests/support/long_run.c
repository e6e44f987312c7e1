/* long_run.c: lines by printf. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/long_run.h"
#include "tests/support/support.h"

#include <fcntl.h>

#define GROUP 5

static void put_metrics(int step, int keys, struct bytes *to)
{
    bytes_printf(to, "{\"step\":%d,\"reward\":%g", step, step == 500 ? 77 : step / 1000.0);
    for (int k = 1; k < keys; k++)
        bytes_printf(to, ",\"metric_%d\":%.4g", k, k + (step * 7919 + k) % 1000 / 997.0);
    bytes_printf(to,
                 ",\"num_tokens\":%d,\"learning_rate\":0.002,\"spans/forward_s\":0.25,\"spans/"
                 "rollout_s\":0.75}\n",
                 step * 1000);
}

static void put_list(struct bytes *to, const char *key, int n, const char *format, double each)
{
    bytes_printf(to, ",\"%s\":[", key);
    for (int t = 0; t < n; t++) {
        if (t) bytes_puts(to, ",");
        bytes_printf(to, format, t * each);
    }
    bytes_puts(to, "]");
}

static void put_sample(const struct long_run *run, int step, int i, struct bytes *to)
{
    bytes_printf(to,
                 "{\"line\":%d,\"sample\":%d,\"answer\":\"7\",\"reward\":%d,\"advantage\":%g,"
                 "\"terms\":{\"exact\":%d},\"tokens\":%d,\"truncated\":%s,\"telemetry\":"
                 "{\"latency_ms\":12.5},\"completion\":\"",
                 step % 100, i % GROUP, i % GROUP == 4, i % GROUP == 4 ? 2 : -0.5, i % GROUP == 4,
                 run->words, i % 7 == 6 ? "true" : "false");
    for (int w = 0; w < run->words; w++) bytes_puts(to, w % 3 == 2 ? "<b>&" : "word");
    bytes_puts(to, "\"");
    if (i % GROUP == 0)
        bytes_printf(to, ",\"prompt\":\"Question %d?\",\"prompt_text\":\"<|user|>Question %d?\"",
                     step % 100, step % 100);
    if (run->with_tokens) {
        put_list(to, "text_offset", run->words, "%.0f", 4);
        put_list(to, "accepted", run->words, "%.0f", 1);
        put_list(to, "logprobs", run->words, "%.4f", -0.01);
        put_list(to, "trainer_logprobs", run->words, "%.4f", -0.02);
    }
    bytes_puts(to, "}\n");
}

void long_run_write(const char *folder, const struct long_run *run)
{
    SCOPED(bytes_release) struct bytes metrics = BYTES_INIT, samples = BYTES_INIT;
    char path[PATH_ROOM];
    assert_ok(path_put(path, folder, "rollouts"));
    assert_ok(file_make_folders(run->samples ? path : folder));
    for (int step = run->first; step <= run->last; step++) {
        put_metrics(step, run->keys, &metrics);
        if (!run->samples) continue;
        bytes_clear(&samples);
        for (int i = 0; i < run->samples; i++) put_sample(run, step, i, &samples);
        assert_ok(path_put(path, folder, "rollouts/step-%d.jsonl", step));
        test_write(path, samples.data, samples.len);
    }
    assert_ok(path_put(path, folder, "metrics.jsonl"));
    const int fd = open(path, O_WRONLY | O_CREAT | O_APPEND, 0644);
    assert_true(fd >= 0);
    assert_ok(file_write_all(fd, path, metrics.data, metrics.len));
    close(fd);
}
