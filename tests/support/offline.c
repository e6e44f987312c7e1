/* offline.c: the programs of offline.h. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/offline.h"

void offline_scene_open(struct scene *s)
{
    memset(s, 0, sizeof *s);
    s->folder = test_folder();
    s->model = daemon_model(s->folder, true, 7);
    s->data = test_path(s->folder, "data.jsonl");
}

static const char *const *command_of(const struct scene *s, const char *command, const char *run,
                                     const char *const more[])
{
    return JOIN(args("%s %s --model %s --data %s --run-dir %s --device cpu --examples-per-step 3 "
                     "--learning-rate 1e-3 --lr-scheduler-type constant --logging-steps 1",
                     test_binary("cw-trainer"), command, s->model, s->data,
                     test_path(s->folder, run)),
                more);
}

int offline_train(struct scene *s, const char *command, const char *run, const char *const more[])
{
    return scene_run(s, command_of(s, command, run, more));
}

void assert_offline(struct scene *s, int status, const char *command, const char *run,
                    const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    scene_ended(s, offline_train(s, command, run, args_v(format, arguments)), status);
    va_end(arguments);
}

int offline_row(struct scene *s, const char *run, const char *const words[])
{
    return offline_train(s, words[0], run, words + 1);
}

void offline_start(const struct scene *s, const char *command, const char *run,
                   const char *const more[], struct test_child *ret)
{
    scene_spawn(s, ret, command_of(s, command, run, more));
}

void offline_sums(const struct scene *s, bool pairs, int n)
{
    SCOPED(bytes_release) struct bytes lines = BYTES_INIT;
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
}
