/* offline.c: the programs of offline.h. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/offline.h"

#define WORDS 80

void offline_scene_open(struct scene *s)
{
    memset(s, 0, sizeof *s);
    s->folder = test_folder();
    s->model = daemon_model(s->folder, true, 7);
    s->data = test_path(s->folder, "data.jsonl");
}

static void put_command(const struct scene *s, const char *command, const char *run,
                        const char *const more[], const char *ret_argv[WORDS])
{
    const char *const *common = OPTIONS(
        test_binary("cw-trainer"), command, "--model", s->model, "--data", s->data, "--run-dir",
        test_path(s->folder, run), "--device", "cpu", "--examples-per-step", "3", "--learning-rate",
        "1e-3", "--lr-scheduler-type", "constant", "--logging-steps", "1");
    int n = 0;
    for (; *common; common++) ret_argv[n++] = *common;
    for (; *more && n < WORDS - 1; more++) ret_argv[n++] = *more;
    ret_argv[n] = NULL;
}

int offline_train(struct scene *s, const char *command, const char *run, const char *const more[])
{
    const char *argv[WORDS], *log = test_path(s->folder, "alone.log");
    put_command(s, command, run, more, argv);
    unlink(log);
    return test_command(log, LIMIT_MS, argv);
}

int offline_row(struct scene *s, const char *run, const char *const words[])
{
    return offline_train(s, words[0], run, words + 1);
}

void offline_start(struct scene *s, const char *command, const char *run, const char *const more[],
                   struct test_child *ret)
{
    const char *argv[WORDS];
    put_command(s, command, run, more, argv);
    test_spawn(ret, test_path(s->folder, "trainer.log"), argv);
}

void offline_sums(const struct scene *s, bool pairs, int n)
{
    struct bytes lines = BYTES_INIT;
    for (int i = 0; i < n; i++) {
        const int a = 10 + i * 37 % 80, b = 10 + i * 53 % 80;
        bytes_printf(&lines, "{\"prompt\": \"%d+%d=\", ", a, b);
        if (pairs)
            bytes_printf(&lines, "\"chosen\": \"%d\", \"rejected\": \"%d\"}\n", a + b, a + b - 10);
        else
            bytes_printf(&lines, "\"completion\": \"%d\"}\n", a + b);
    }
    assert_ok(bytes_status(&lines));
    test_write(s->data, lines.data, lines.len);
    bytes_release(&lines);
}
