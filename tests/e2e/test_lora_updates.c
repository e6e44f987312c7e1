/* test_lora_updates.c: a trainer's updates of a LoRA adapter under a server that goes on answering:
 * a hundred under full load, each token by the weights of its version; and trainers that are killed
 * in the middle of one, again and again. */
// SPDX-License-Identifier: Apache-2.0
#include "bridge/attach.h"
#include "tests/support/torn.h"

// ---- killed in an update ------------------------------------------------------------------------
#define LARGE "--lora-r", "128", "--save-steps", "1", "--max-steps", "100000", "--resume"

static json_t *base_completion(const struct scene *s)
{
    json_t *response = daemon_post(s->daemon.socket, "/v1/completions", 200,
                                   "{\"prompt\":\"12+15=\",\"max_tokens\":8,\"temperature\":0,"
                                   "\"ignore_eos\":true,\"logprobs\":1}");
    json_t *choices = json_incref(json_object_get(response, "choices"));
    return choices;
}

static int restores(const struct scene *s)
{
    struct wire_answer a;
    daemon_request(s->daemon.socket, "GET", "/metrics", "", NULL, &a);
    const char *at = strstr(bytes_text(&a.body), "\ncommonweight:restores_total{");
    assert_non_null(at);
    const int n = atoi(strchr(at, '}') + 1);
    return n;
}

static void assert_whole(const struct scene *s, const struct control *control, const json_t *base)
{
    char snapshot[512];
    control_snapshot(control, snapshot, sizeof snapshot);
    daemon_holds_adapter(&s->daemon, "policy", snapshot);
    daemon_holds(&s->daemon, "policy", s->model);
    json_t *now = base_completion(s);
    assert_true(json_equal(now, base));
    json_decref(now);
}

// A new trainer begins with an update of its own, the adapter as its last checkpoint has it; then
// come those of its steps. One is killed in the first, the next in the second, and so on. Every
// other time the next one starts while the server has yet to notice: it waits for it.
TEST(killed_again_and_again)
{
    enum { KILLS = 8, ATTEMPTS = 40 };
    struct scene s;
    struct bridge *bridge;
    int attempt = 0;
    scene_open_large(&s, OPTIONS("--max-adapters", "1", "--max-lora-rank", "128"));
    json_t *base = base_completion(&s);
    assert_ok(bridge_attach(s.daemon.bridge, NULL, &bridge));
    const struct control *control = bridge_control(bridge);
    for (; restores(&s) < KILLS && attempt < ATTEMPTS; attempt++) {
        struct test_child trainer = {0};
        start_trainer(&s, &trainer, "run", OPTIONS(LARGE));
        for (int i = 0; i < attempt % 4; i++) wait_for_update(&trainer, control);
        const bool torn = kill_in_an_update(&trainer, control);
        if (!torn || attempt % 2) continue;
        torn_until_restored(&s, control);
        assert_whole(&s, control, base);
    }
    assert_true(restores(&s) >= KILLS);
    const int steps = steps_done(&s, "run");
    assert_true(steps > 0);
    char last[16];
    snprintf(last, sizeof last, "%d", steps + 2);
    assert_int_equal(train_alone(&s, "run", OPTIONS(LARGE, "--max-steps", last)), 0);
    assert_said(&s, "resumed at step");
    daemon_holds_adapter(&s.daemon, "policy", latest(&s, "run"));
    assert_whole(&s, control, base);
    bridge_detach(bridge);
    json_decref(base);
    assert_int_equal(daemon_stop(&s.daemon), 0);
}

// ---- under load ---------------------------------------------------------------------------------
enum { UPDATES = 100, PROMPTS = 3, EACH = 4, TOKENS = 4, STREAMS = 3 };
#define SERVER "--exact", "--max-adapters", "1", "--max-lora-rank", "4"

// Greedy samples with the adapter, as lines of /v1/rollouts.
static int ask(const struct daemon *d)
{
    static const char body[] =
        "{\"lora\":\"policy\",\"sampling\":{\"max_tokens\":4,\"temperature\":0,"
        "\"ignore_eos\":true},\"groups\":[{\"id\":0,\"n\":4,\"prompt_token_ids\":[5,6,7,8,9]},"
        "{\"id\":1,\"n\":4,\"prompt_token_ids\":[40,41]},"
        "{\"id\":2,\"n\":4,\"prompt_token_ids\":[90,80,70,60,50,40,30]}]}";
    char text[600];
    int n =
        snprintf(text, sizeof text, "POST /v1/rollouts HTTP/1.0\r\nContent-Length: %zu\r\n\r\n%s",
                 sizeof body - 1, body);
    int fd = daemon_connect(d->socket);
    assert_true(fd >= 0 && daemon_send(fd, text, (size_t)n));
    return fd;
}

// Appends the samples of the response, none of which may be missing.
static void take(int fd, json_t *samples)
{
    struct wire_answer a;
    const size_t before = json_array_size(samples);
    assert_true(wire_read(fd, LIMIT_MS, &a));
    if (a.status != 200) fail_msg("%d %s", a.status, bytes_text(&a.body));
    char *remaining = NULL;
    for (char *line = strtok_r((char *)bytes_text(&a.body), "\n", &remaining); line;
         line = strtok_r(NULL, "\n", &remaining)) {
        json_t *sample = json_loads(line, JSON_ALLOW_NUL, NULL); // token 0 is one
        if (json_array_size(json_object_get(sample, "token_ids")) != TOKENS) fail_msg("%s", line);
        json_array_append_new(samples, sample);
    }
    assert_int_equal(json_array_size(samples), before + PROMPTS * EACH);
}

static json_int_t at(const json_t *sample, const char *list, size_t i)
{
    return json_integer_value(json_at(sample, "%s.%zu", list, i));
}

// What a server that has loaded a step's checkpoint samples: for each prompt one, to be released.
static void sample_checkpoint(const struct daemon *d, const char *folder, json_t *ret[PROMPTS])
{
    char body[600];
    json_t *samples = json_array();
    snprintf(body, sizeof body,
             "{\"lora_name\":\"policy\",\"lora_path\":\"%s\",\"load_inplace\":true}", folder);
    struct wire_answer a;
    daemon_request(d->socket, "POST", "/v1/load_lora_adapter", "", body, &a);
    if (a.status != 200) fail_msg("%s: %s", folder, bytes_text(&a.body));
    take(ask(d), samples);
    for (size_t i = 0; i < json_array_size(samples); i++) {
        json_t *sample = json_array_get(samples, i);
        ret[int_of(sample, "group_id")] = sample;
    }
    for (int i = 0; i < PROMPTS; i++) json_incref(ret[i]);
    json_decref(samples);
}

// Tokens of one version from the first on have the ids and the log-probabilities that the weights
// of that version give; versions never go back. Returns how many tokens were compared.
static int compare(const json_t *sample, json_int_t version, const json_t *want)
{
    int n = 0;
    for (size_t i = 0; i < TOKENS; i++) {
        assert_true(at(sample, "weight_versions", i) % 2 == 0);
        if (i > 0)
            assert_true(at(sample, "weight_versions", i) >= at(sample, "weight_versions", i - 1));
        if (at(sample, "weight_versions", i) != version) continue;
        const json_t *have_p = json_at(sample, "logprobs.%zu", i),
                     *want_p = json_at(want, "logprobs.%zu", i);
        if (at(sample, "token_ids", i) != at(want, "token_ids", i) || !json_equal(have_p, want_p))
            fail_msg("version %lld: %s\nwanted: %s", (long long)version, json_dumps(sample, 0),
                     json_dumps(want, 0));
        n++;
    }
    return n;
}

// Against the checkpoints of the steps, loaded by a server that nobody trains. Returns how many
// versions were seen.
static int check_samples(const struct scene *s, const json_t *samples)
{
    static double versions[UPDATES];
    struct daemon still = {0};
    int seen = 0, n = 0;
    daemon_start(&still, s->model, OPTIONS(SERVER, "--dtype", daemon_exact_dtype()));
    assert_int_equal(column(s, "run", "weight_version", versions, UPDATES), UPDATES);
    for (int step = 0; step < UPDATES; step++) {
        char folder[64];
        json_t *want[PROMPTS] = {NULL};
        int before = n;
        snprintf(folder, sizeof folder, "run/checkpoints/step-%d", step + 1);
        for (size_t i = 0; i < json_array_size(samples); i++) {
            const json_t *sample = json_array_get(samples, i);
            const json_int_t group = int_of(sample, "group_id");
            if (at(sample, "weight_versions", 0) != (json_int_t)versions[step]) continue;
            if (!want[0]) sample_checkpoint(&still, test_path(s->folder, folder), want);
            n += compare(sample, (json_int_t)versions[step], want[group]);
        }
        for (int i = 0; i < PROMPTS; i++) json_decref(want[i]);
        seen += n > before;
    }
    assert_int_equal(daemon_stop(&still), 0);
    daemon_kill(&still);
    return seen;
}

TEST_IN(a_hundred_updates_under_load, scene_open)
{
    struct test_child trainer = {0};
    int fd[STREAMS];
    double mismatch[UPDATES], swaps[UPDATES];
    json_t *samples = json_array();
    daemon_kill(&s.daemon);
    daemon_start(&s.daemon, s.model, OPTIONS(SERVER, "--dtype", daemon_exact_dtype()));
    start_trainer(&s, &trainer, "run",
                  OPTIONS("--lora-r", "4", "--exact", "--max-steps", "100", "--save-steps", "1",
                          "--learning-rate", "1e-2"));
    wait_for_steps(&s, "run", 1, &trainer);
    for (int i = 0; i < STREAMS; i++) fd[i] = ask(&s.daemon);
    for (int i = 0; test_running(&trainer); i = (i + 1) % STREAMS) {
        take(fd[i], samples);
        fd[i] = ask(&s.daemon);
    }
    for (int i = 0; i < STREAMS; i++) take(fd[i], samples);
    assert_int_equal(test_wait(&trainer, LIMIT_MS), 0);
    // the trainer's own samples are as it computes them, at every version
    assert_int_equal(column(&s, "run", "sampler_mismatch/max", mismatch, UPDATES), UPDATES);
    assert_int_equal(column(&s, "run", "weight_version", swaps, UPDATES), UPDATES);
    for (int i = 0; i < UPDATES; i++) {
        assert_true(mismatch[i] == 0);
        if (i > 0) assert_true(swaps[i] == swaps[i - 1] + 2);
    }
    const int seen = check_samples(&s, samples);
    if (seen < UPDATES / 4)
        fail_msg("%d versions among %zu samples", seen, json_array_size(samples));
    json_decref(samples);
    assert_int_equal(daemon_stop(&s.daemon), 0);
}
