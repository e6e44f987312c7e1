/* training.c: the scene of training.h. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/training.h"

void scene_open_model(struct scene *s, const char *model, const char *const options[])
{
    SCOPED(bytes_release) struct bytes lines = BYTES_INIT;
    memset(s, 0, sizeof *s);
    s->folder = test_folder();
    s->model = model;
    s->data = test_path(s->folder, "data.jsonl");
    for (int a = 0; a < 20; a++)
        bytes_printf(&lines, "{\"prompt\": \"%d+%d=\", \"answer\": \"%d\"}\n", a, a + 3, 2 * a + 3);
    test_write(s->data, lines.data, lines.len);
    daemon_start(&s->daemon, s->model, options);
}

static void open_in(struct scene *s, const char *dtype)
{
    scene_open_model(s, daemon_model(test_folder(), true, 11), OPTIONS("--dtype", dtype));
}

void scene_open(struct scene *s)
{
    open_in(s, "f32");
}

void scene_open_exact(struct scene *s)
{
    open_in(s, daemon_exact_dtype());
}

const char *scene_open_runtime(struct scene *s)
{
    const char *runtime = test_folder();
    setenv("XDG_RUNTIME_DIR", runtime, 1);
    setenv("OMP_NUM_THREADS", "1", 1);
    scene_open(s);
    return runtime;
}

void scene_end(struct scene *s)
{
    if (test_running(&s->daemon.child)) assert_int_equal(daemon_stop(&s->daemon), 0);
}

const char *scene_prompts(const struct scene *s, const char *name, int n)
{
    const char *path = test_path(s->folder, name);
    SCOPED(bytes_release) struct bytes lines = BYTES_INIT;
    for (int a = 0; a < n; a++)
        bytes_printf(&lines, "{\"prompt\": \"%d+1=\", \"answer\": \"%d\"}\n", a, a + 1);
    test_write(path, lines.data, lines.len);
    return path;
}

const char *scene_scorer(const struct scene *s, const char *script)
{
    const char *path = test_text("%s/scorer-%d.sh", s->folder, entries_of(s->folder, "scorer-"));
    test_write(path, script, strlen(script));
    return test_text("command:sh %s", path);
}

const char *const *trainer_command(const struct scene *s, const char *folder,
                                   const char *const more[])
{
    return daemon_trainer(
        &s->daemon, s->data, folder,
        args("--reward length --length-target 10 --prompts-per-step 3 --num-generations 4 "
             "--max-completion-length 12 --learning-rate 1e-3 --lr-scheduler-type constant "
             "--logging-steps 1"),
        more);
}

const char *const *trainer_command_on(const struct scene *s, const char *run,
                                      const char *const more[])
{
    const char **words =
        (const char **)(uintptr_t)trainer_command(s, test_path(s->folder, run), more + 2);
    assert_string_equal(words[2], "--bridge");
    memcpy(words + 2, more, 2 * sizeof *words);
    return words;
}

static const char *log_of(const struct scene *s)
{
    return test_path(s->folder, "trainer.log");
}

void scene_spawn(const struct scene *s, struct test_child *child, const char *const argv[])
{
    unlink(log_of(s));
    test_spawn(child, log_of(s), argv);
}

int scene_run(const struct scene *s, const char *const argv[])
{
    struct test_child child = {0};
    scene_spawn(s, &child, argv);
    return test_wait(&child, LIMIT_MS);
}

void start_trainer(const struct scene *s, struct test_child *child, const char *run,
                   const char *const more[])
{
    scene_spawn(s, child, trainer_command(s, test_path(s->folder, run), more));
}

int train(struct scene *s, const char *run, const char *const more[])
{
    return scene_run(s, trainer_command(s, test_path(s->folder, run), more));
}

void scene_ended(const struct scene *s, int status, int wanted)
{
    if (status != wanted) fail_msg("status %d, not %d:\n%s", status, wanted, test_read(log_of(s)));
}

void assert_train(struct scene *s, int status, const char *run, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    scene_ended(s, train(s, run, args_v(format, arguments)), status);
    va_end(arguments);
}

int train_on(struct scene *s, const char *run, const char *const more[])
{
    return scene_run(s, trainer_command_on(s, run, more));
}

int trainer_alone(struct scene *s, const char *run, const char *const words[])
{
    (void)run;
    return scene_run(s, JOIN(OPTIONS(test_binary("cw-trainer")), words));
}

void assert_trainer(struct scene *s, int status, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    scene_ended(s, trainer_alone(s, NULL, args_v(format, arguments)), status);
    va_end(arguments);
}

bool said(const struct scene *s, const char *part)
{
    return test_count(log_of(s), part) > 0;
}

void assert_said(const struct scene *s, const char *part)
{
    assert_contains(test_read(log_of(s)), part);
}

int steps_done(const struct scene *s, const char *run)
{
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/%s/metrics.jsonl", s->folder, run);
    return test_count(path, "\n");
}

void wait_for_steps(const struct scene *s, const char *run, int n, struct test_child *child)
{
    int64_t deadline = clock_deadline_ns(LIMIT_MS);
    while (steps_done(s, run) < n) {
        if (!test_running(child) || clock_ms_until(deadline) == 0) {
            fail_msg("the trainer does not come to step %d:\n%s", n, test_read(log_of(s)));
        }
        clock_sleep_ms(10);
    }
}

int saved_step(const struct scene *s, const char *run)
{
    const char *state = test_path(latest(s, run), "trainer/trainer_state.json");
    return (int)metric(json_of_file(state), "step");
}

const char *latest(const struct scene *s, const char *run)
{
    return test_path(test_path(s->folder, run), "checkpoints/latest");
}

json_t *metrics_of(const struct scene *s, const char *run)
{
    return json_of_lines_file(test_path(test_path(s->folder, run), "metrics.jsonl"));
}

json_t *last_metrics(const struct scene *s, const char *run)
{
    json_t *lines = metrics_of(s, run);
    assert_int_not_equal(json_array_size(lines), 0);
    return json_array_get(lines, json_array_size(lines) - 1);
}

double metric(const json_t *m, const char *key)
{
    if (!json_is_number(json_object_get(m, key))) fail_msg("no number %s in metrics.jsonl", key);
    return json_number_value(json_object_get(m, key));
}

int column(const struct scene *s, const char *run, const char *key, double *ret, int max)
{
    const json_t *lines = metrics_of(s, run), *m;
    size_t i;
    json_array_foreach (lines, i, m)
        if ((int)i < max) ret[i] = json_number_value(json_object_get(m, key));
    return (int)json_array_size(lines) < max ? (int)json_array_size(lines) : max;
}

void each_within(const struct scene *s, const char *run, const char *key, int n, double low,
                 double high)
{
    const json_t *lines = metrics_of(s, run);
    assert_int_equal(json_array_size(lines), n);
    for (int i = 0; i < n; i++) {
        const double value = metric(json_array_get(lines, (size_t)i), key);
        if (!(value >= low && value <= high))
            fail_msg("%s of line %d is %.9g, not within %g and %g", key, i + 1, value, low, high);
    }
}

void wait_for_log(const struct scene *s, const char *part)
{
    test_wait_for_text(log_of(s), part, 10000, NULL);
}

void same_losses(const struct scene *s, const char *a, const char *b, int steps, double max)
{
    static const char *const keys[] = {"loss", "kl", "reward", "entropy"};
    double x[64], y[64];
    assert_in_range(steps, 1, 64);
    for (size_t k = 0; k < sizeof keys / sizeof *keys; k++) {
        assert_int_equal(column(s, a, keys[k], x, steps), steps);
        assert_int_equal(column(s, b, keys[k], y, steps), steps);
        for (int i = 0; i < steps; i++)
            if (fabs(x[i] - y[i]) > max * (k == 0 ? 1 : 10))
                fail_msg("%s of step %d: %.9g and %.9g", keys[k], i + 1, x[i], y[i]);
    }
}

// ---- rows ---------------------------------------------------------------------------------------

// What stands for the scene's, put in.
static const char *filled(const struct scene *s, const char *text)
{
    const struct {
        const char *name, *value;
    } places[] = {{"$FOLDER", s->folder},
                  {"$MODEL", s->model},
                  {"$DATA", s->data},
                  {"$BRIDGE", s->daemon.bridge},
                  {"$DEVICE", test_device()}};
    enum { PLACES = sizeof places / sizeof *places };
    SCOPED(bytes_release) struct bytes whole = BYTES_INIT;
    while (*text) {
        size_t i = 0;
        while (i < PLACES && strncmp(text, places[i].name, strlen(places[i].name)) != 0) i++;
        if (i < PLACES) bytes_puts(&whole, places[i].value);
        if (i < PLACES)
            text += strlen(places[i].name);
        else
            bytes_append(&whole, text++, 1);
    }
    char *kept = test_keep(strdup(bytes_text(&whole)));
    return kept;
}

// The texts of a row's field: one, several or none.
static const char *text_at(const struct scene *s, const json_t *row, const char *field, size_t i)
{
    const json_t *texts = json_object_get(row, field);
    if (json_is_array(texts))
        texts = json_array_get(texts, i);
    else if (i > 0)
        return NULL;
    return texts ? filled(s, json_string_value(texts)) : NULL;
}

static void assert_row(const struct scene *s, const json_t *row, const char *run, const char *which)
{
    char *log = test_read(log_of(s));
    const json_t *steps = json_object_get(row, "steps");
    const char *text;
    for (size_t i = 0; (text = text_at(s, row, "says", i)); i++)
        if (!strstr(log, text)) fail_msg("%s: \"%s\" is not said:\n%s", which, text, log);
    for (size_t i = 0; (text = text_at(s, row, "not", i)); i++)
        if (strstr(log, text)) fail_msg("%s: \"%s\" is said:\n%s", which, text, log);
    for (size_t i = 0; (text = text_at(s, row, "there", i)); i++)
        if (!file_exists(test_path(s->folder, text))) fail_msg("%s: no %s", which, text);
    for (size_t i = 0; (text = text_at(s, row, "gone", i)); i++)
        if (file_exists(test_path(s->folder, text))) fail_msg("%s: %s is there", which, text);
    if (steps && steps_done(s, run) != json_integer_value(steps))
        fail_msg("%s: %d steps", which, steps_done(s, run));
}

void train_rows(struct scene *s, const char *file, const char *list,
                int (*start)(struct scene *s, const char *run, const char *const words[]))
{
    static const char fields[] = " run words exit says not steps there gone data ";
    const json_t *rows = test_rows(file, list), *row;
    size_t i;
    json_array_foreach (rows, i, row) {
        const char *run = text_at(s, row, "run", 0), *key;
        const char *data = text_at(s, row, "data", 0);
        char which[200];
        json_t *value;
        json_object_foreach ((json_t *)(uintptr_t)row, key, value) {
            snprintf(which, sizeof which, " %s ", key);
            if (!strstr(fields, which)) fail_msg("%s, row %zu: no field is \"%s\"", list, i, key);
        }
        snprintf(which, sizeof which, "%s, row %zu (%s)", list, i, row_text(rows, i, "words"));
        if (data) test_write(s->data, data, strlen(data));
        const char **words = (const char **)(uintptr_t)words_of(row_text(rows, i, "words"));
        for (int k = 0; words[k]; k++) words[k] = filled(s, words[k]);
        const int status = start(s, run ? run : "run", words);
        if (status != row_int(rows, i, "exit"))
            fail_msg("%s: status %d:\n%s", which, status, test_read(log_of(s)));
        assert_row(s, row, run ? run : "run", which);
    }
}
