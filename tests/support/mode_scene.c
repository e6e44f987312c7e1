/* mode_scene.c: see mode_scene.h. One thread. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/mode_scene.h"
#include "tests/support/environment.h"

bool mode_scene_is_skipped(void)
{
    if (!on_cpu()) puts("SKIP: two ranks are there on the CPU");
    return !on_cpu();
}

// ---- Atropos' API -------------------------------------------------------------------------------

// Each group has sequences of one prompt and one token, with the log-probability of a uniform
// model.
static void send_batch(int fd)
{
    SCOPED(bytes_release) struct bytes text = BYTES_INIT;
    bytes_puts(&text, "{\"batch\": [");
    for (int g = 0; g < MODE_PROMPTS; g++) {
        bytes_printf(&text, "%s{\"tokens\": [", g ? ", " : "");
        for (int i = 0; i < MODE_SAMPLES; i++)
            bytes_printf(&text, "%s[%d, 61, %d]", i ? ", " : "", '1' + g, '0' + i);
        bytes_puts(&text, "], \"masks\": [");
        for (int i = 0; i < MODE_SAMPLES; i++)
            bytes_printf(&text, "%s[-100, -100, %d]", i ? ", " : "", '0' + i);
        bytes_puts(&text, "], \"inference_logprobs\": [");
        for (int i = 0; i < MODE_SAMPLES; i++) bytes_printf(&text, "%s[1, 1, -5.6]", i ? ", " : "");
        bytes_puts(&text, "], \"scores\": [");
        for (int i = 0; i < MODE_SAMPLES; i++) bytes_printf(&text, "%s%d", i ? ", " : "", i % 2);
        bytes_puts(&text, "]}");
    }
    bytes_puts(&text, "]}");
    canned_response(fd, "200 OK", bytes_text(&text));
}

static void serve_atropos(int fd)
{
    char request[16384], info[80];
    json_int_t batch_size = -1, max_token_len = -1;
    while (canned_request(fd, request, sizeof request)) {
        json_t *body = json_loads(canned_body(request), 0, NULL);
        snprintf(info, sizeof info, "{\"batch_size\": %d, \"max_token_len\": %d}", (int)batch_size,
                 (int)max_token_len);
        if (canned_is(request, "/info")) {
            canned_response(fd, "200 OK", info);
        } else if (canned_is(request, "/register")) {
            batch_size = json_integer_value(json_object_get(body, "batch_size"));
            max_token_len = json_integer_value(json_object_get(body, "max_token_len"));
            canned_response(fd, "200 OK", "{\"uuid\": 7}");
        } else {
            send_batch(fd);
        }
        json_decref(body);
    }
}

// ---- the scene ----------------------------------------------------------------------------------

void mode_scene_start(struct mode_scene *s, struct daemon *d)
{
    daemon_spawn(
        d, s->model,
        args("--draft %s --tandem-model %s --max-adapters 1 --max-context 64", s->draft, s->draft));
}

static void link_bridges(const struct mode_scene *s)
{
    for (int i = 0; i < 2; i++) {
        const char *link = test_path(s->runs.folder, i ? "rank-1.json" : "rank-0.json");
        unlink(link);
        assert_int_equal(symlink(s->daemons[i].bridge, link), 0);
    }
}

void mode_scene_open(struct mode_scene *s, int lines)
{
    SCOPED(bytes_release) struct bytes data = BYTES_INIT;
    *s = (struct mode_scene){.lines = lines};
    s->runs.folder = test_folder();
    s->runs.data = test_path(s->runs.folder, "data.jsonl");
    s->model = test_path(test_root(), "tools/demo-model");
    s->draft = test_path(test_root(), "tools/demo-draft");
    s->environment = environment_of("2 drops");
    s->server_args = test_text("--speculative off --dtype f32 --tandem-model '%s'", s->draft);
    s->bridges = test_path(s->runs.folder, "rank-{rank}.json");
    for (int i = 0; i < lines; i++)
        bytes_printf(&data, "{\"prompt\": \"%d+%d=\", \"answer\": \"%d\"}\n", 17 + 9 * (i % 9),
                     28 + i, 45 + 9 * (i % 9) + i);
    test_write(s->runs.data, data.data, data.len);
    mode_scene_start(s, &s->daemons[0]);
    mode_scene_start(s, &s->daemons[1]);
    mode_scene_start(s, &s->worker);
    for (int i = 0; i < 2; i++) daemon_wait(&s->daemons[i]);
    daemon_wait(&s->worker);
    mode_scene_serve_atropos(s);
}

void mode_scene_serve_atropos(struct mode_scene *s)
{
    canned_server_start(&s->atropos, serve_atropos);
}

void mode_scene_close(struct mode_scene *s)
{
    for (int i = 0; i < 2; i++) daemon_kill(&s->daemons[i]);
    daemon_kill(&s->worker);
    canned_server_stop(&s->atropos);
}

// ---- runs ---------------------------------------------------------------------------------------

// A word of a mode as this scene has it.
static const char *filled(const struct mode_scene *s, const char *word)
{
    const struct {
        const char *name, *word;
    } words[] = {
        {"{environment}", s->environment},
        {"{atropos}", s->atropos.url},
        {"{worker}", s->worker.bridge},
        {"{model}", s->model},
        {"{draft}", s->draft},
        {"{server-args}", s->server_args},
    };
    for (size_t i = 0; i < sizeof words / sizeof *words; i++)
        if (strstr(word, words[i].name)) return words[i].word;
    return word;
}

const char *const *mode_scene_command(const struct mode_scene *s, const struct mode_run *run,
                                      const char *name, const char *const more[])
{
    const bool plays = run->set & MODE(ENVIRONMENT), copies = run->set & MODE(CHECKPOINT);
    const char *const *command = JOIN(
        run->ranks > 1 ? mpirun_words(run->ranks) : NULL,
        args("%s train --run-dir %s", test_binary("cw-trainer"), test_path(s->runs.folder, name)),
        run->set & MODE(ATROPOS) ? NULL : args("--data %s", s->runs.data),
        copies ? NULL : args("--bridge %s", run->ranks > 1 ? s->bridges : s->daemons[0].bridge),
        copies && run->ranks == 1 ? args("--device %s", test_device()) : NULL, // else the CPU
        args("--reward %s --max-steps 3 --prompts-per-step 4 --num-generations 4 "
             "--max-completion-length 5 --learning-rate 1e-4 --lr-scheduler-type constant "
             "--lora-name adapter --temperature 1.2 --draft-learning-rate 1e-3 --log-completions "
             "--save-steps 100",
             plays ? "environment" : "exact"));
    link_bridges(s);
    for (int m = 0; m < N_MODES; m++)
        for (int i = 0; run->set & MODE(m) && i < MODE_WORDS && modes[m].words[i]; i++)
            command = JOIN(command, OPTIONS(filled(s, modes[m].words[i])));
    return JOIN(command, more);
}

void mode_scene_begin_anew(const struct mode_scene *s)
{
    const struct daemon *daemons[] = {&s->daemons[0], &s->daemons[1], &s->worker};
    for (int i = 0; i < 3; i++)
        daemon_post(daemons[i]->socket, "/reload", 200, "{\"draft\": true}");
}

char *mode_scene_samples(const struct mode_scene *s, const char *name, int step, int ret_lines[])
{
    struct bytes all = BYTES_INIT;
    const json_t *samples, *sample;
    size_t i;
    samples =
        json_of_lines_file(test_text("%s/%s/rollouts/step-%d.jsonl", s->runs.folder, name, step));
    json_array_foreach (samples, i, sample) {
        const int number = (int)int_of(sample, "line");
        bytes_printf(&all, "%d %s\n", number, text_of(sample, "completion"));
        if (number <= s->lines && int_of(sample, "sample") == 0) ret_lines[number]++;
    }
    return all.data;
}
