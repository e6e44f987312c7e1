/* test_lora_updates.c: a trainer's updates of a LoRA adapter under a server that goes on answering:
 * a hundred under full load, each token by the weights of its version; and trainers that are killed
 * in the middle of one, again and again. */
// SPDX-License-Identifier: Apache-2.0
#include "bridge/attach.h"
#include "tests/support/torn.h"

// ---- killed in an update ------------------------------------------------------------------------
#define LARGE "--lora-r 128 --save-steps 1 --resume --max-steps %d"

static json_t *base_completion(const struct scene *s)
{
    json_t *response = daemon_post(s->daemon.socket, "/v1/completions", 200,
                                   "{\"prompt\":\"12+15=\",\"max_tokens\":8,\"temperature\":0,"
                                   "\"ignore_eos\":true,\"logprobs\":1}");
    return json_object_get(response, "choices");
}

static void assert_whole(const struct scene *s, const struct control *control, const json_t *base)
{
    char snapshot[512];
    control_snapshot(control, snapshot, sizeof snapshot);
    daemon_holds_adapter(&s->daemon, "policy", snapshot);
    daemon_holds(&s->daemon, "policy", s->model);
    assert_true(json_equal(base_completion(s), base));
}

// A new trainer begins with an update of its own, the adapter as its last checkpoint has it; then
// come those of its steps. One is killed in the first, the next in the second, and so on. Every
// other time the next one starts while the server has yet to notice: it waits for it.
TEST(killed_again_and_again)
{
    enum { KILLS = 4, ATTEMPTS = 40 };
    struct scene s;
    struct bridge *bridge;
    int attempt = 0;
    scene_open_large(&s, args("--max-adapters 1 --max-lora-rank 128"));
    json_t *base = base_completion(&s);
    assert_ok(bridge_attach(s.daemon.bridge, NULL, &bridge));
    const struct control *control = bridge_control(bridge);
    for (; daemon_metric(&s.daemon, "commonweight:restores_total") < KILLS && attempt < ATTEMPTS;
         attempt++) {
        struct test_child trainer = {0};
        start_trainer(&s, &trainer, "run", args(LARGE, 100000));
        for (int i = 0; i < attempt % 4; i++) wait_for_update(&trainer, control);
        const bool torn = kill_in_an_update(&trainer, control);
        if (!torn || attempt % 2) continue;
        torn_until_restored(&s, control);
        assert_whole(&s, control, base);
    }
    assert_true(daemon_metric(&s.daemon, "commonweight:restores_total") >= KILLS);
    const int steps = steps_done(&s, "run");
    assert_true(steps > 0);
    assert_train(&s, 0, "run", LARGE, steps + 2);
    assert_said(&s, "resumed at step");
    daemon_holds_adapter(&s.daemon, "policy", latest(&s, "run"));
    assert_whole(&s, control, base);
    bridge_detach(bridge);
    assert_int_equal(daemon_stop(&s.daemon), 0);
}

// ---- under load ---------------------------------------------------------------------------------
enum { UPDATES = 100, PROMPTS = 3, EACH = 4, TOKENS = 4, STREAMS = 3 };
#define SERVER "--exact --max-adapters 1 --max-lora-rank 4 --dtype %s"

// Greedy samples with the adapter, as lines of /v1/rollouts.
static int ask(const struct daemon *d)
{
    static const char body[] =
        "{\"lora\":\"policy\",\"sampling\":{\"max_tokens\":4,\"temperature\":0,"
        "\"ignore_eos\":true},\"groups\":[{\"id\":0,\"n\":4,\"prompt_token_ids\":[5,6,7,8,9]},"
        "{\"id\":1,\"n\":4,\"prompt_token_ids\":[40,41]},"
        "{\"id\":2,\"n\":4,\"prompt_token_ids\":[90,80,70,60,50,40,30]}]}";
    return daemon_ask(d, "/v1/rollouts", body);
}

// Appends the samples of the response, none of which may be missing.
static void take(int fd, json_t *samples)
{
    struct wire_answer a;
    const size_t before = json_array_size(samples);
    assert_true(wire_read(fd, LIMIT_MS, &a));
    if (a.status != 200) fail_msg("%d %s", a.status, bytes_text(&a.body));
    json_t *lines = json_of_lines(bytes_text(&a.body)), *sample;
    size_t i;
    json_array_foreach (lines, i, sample)
        assert_int_equal(json_array_size(json_at(sample, "token_ids")), TOKENS);
    json_array_extend(samples, lines);
    assert_int_equal(json_array_size(samples), before + PROMPTS * EACH);
}

static json_int_t at(const json_t *sample, const char *list, size_t i)
{
    return json_integer_value(json_at(sample, "%s.%zu", list, i));
}

// What a server that has loaded a step's checkpoint samples: for each prompt one.
static void sample_checkpoint(const struct daemon *d, const char *folder, json_t *ret[PROMPTS])
{
    json_t *samples = test_keep(json_array());
    daemon_load_adapter(d, "policy", folder);
    take(ask(d), samples);
    for (size_t i = 0; i < json_array_size(samples); i++) {
        json_t *sample = json_array_get(samples, i);
        ret[int_of(sample, "group_id")] = sample;
    }
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
    daemon_start(&still, s->model, args(SERVER, daemon_exact_dtype()));
    assert_int_equal(column(s, "run", "weight_version", versions, UPDATES), UPDATES);
    for (int step = 0; step < UPDATES; step++) {
        json_t *want[PROMPTS] = {NULL};
        int before = n;
        const char *folder = test_text("%s/run/checkpoints/step-%d", s->folder, step + 1);
        for (size_t i = 0; i < json_array_size(samples); i++) {
            const json_t *sample = json_array_get(samples, i);
            const json_int_t group = int_of(sample, "group_id");
            if (at(sample, "weight_versions", 0) != (json_int_t)versions[step]) continue;
            if (!want[0]) sample_checkpoint(&still, folder, want);
            n += compare(sample, (json_int_t)versions[step], want[group]);
        }
        seen += n > before;
    }
    daemon_end(&still);
    return seen;
}

TEST_IN(a_hundred_updates_under_load, scene_open)
{
    struct test_child trainer = {0};
    int fd[STREAMS];
    double swaps[UPDATES];
    json_t *samples = test_keep(json_array());
    daemon_start(&s->daemon, s->model, args(SERVER, daemon_exact_dtype()));
    start_trainer(s, &trainer, "run",
                  args("--lora-r 4 --exact --max-steps 100 --save-steps 1 --learning-rate 1e-2"));
    wait_for_steps(s, "run", 1, &trainer);
    for (int i = 0; i < STREAMS; i++) fd[i] = ask(&s->daemon);
    for (int i = 0; test_running(&trainer); i = (i + 1) % STREAMS) {
        take(fd[i], samples);
        fd[i] = ask(&s->daemon);
    }
    for (int i = 0; i < STREAMS; i++) take(fd[i], samples);
    assert_int_equal(test_wait(&trainer, LIMIT_MS), 0);
    // the trainer's own samples are as it computes them, at every version
    each_within(s, "run", "sampler_mismatch/max", UPDATES, 0, 0);
    assert_int_equal(column(s, "run", "weight_version", swaps, UPDATES), UPDATES);
    for (int i = 1; i < UPDATES; i++) assert_true(swaps[i] == swaps[i - 1] + 2);
    const int seen = check_samples(s, samples);
    if (seen < UPDATES / 4)
        fail_msg("%d versions among %zu samples", seen, json_array_size(samples));
}
