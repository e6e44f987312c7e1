/* test_rank_sources.c: where samples come from, on two ranks: each samples its share of every step,
 * and all learn from the same; with other modes: test_combinations. This program is also an
 * environment: `test_rank_sources play`. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/pair.h"

// ---- an environment -----------------------------------------------------------------------------

static json_t *hear(void)
{
    static char *text;
    static size_t room;
    const ssize_t len = getline(&text, &room, stdin);
    return len < 0 ? NULL : json_loadb(text, (size_t)len, JSON_ALLOW_NUL, NULL);
}

static void send_line(const json_t *id, const char *kind, json_t *value)
{
    json_t *line = json_pack("{s:O, s:o}", "id", id, kind, value);
    json_dumpf(line, stdout, JSON_COMPACT);
    puts("");
    fflush(stdout);
    json_decref(line);
}

// Two turns of four tokens, with a token of the environment's between, whose number is how many
// tokens below 150 the first turn has. A reward after each turn.
static void play_episode(const json_t *id, const json_t *episode)
{
    const json_t *prompt = json_object_get(episode, "prompt_token_ids");
    json_t *ids = json_copy((json_t *)prompt), *mask = json_array();
    double reward[2];
    for (size_t t = 0; t < json_array_size(prompt); t++)
        json_array_append_new(mask, json_integer(0));
    for (int turn = 0; turn < 2; turn++) {
        int low = 0, n = 0;
        json_t *token;
        size_t t;
        send_line(id, "sample", json_pack("{s:O, s:i}", "token_ids", ids, "max_tokens", 4));
        json_t *heard = hear();
        const json_t *sampled = json_object_get(json_object_get(heard, "sampled"), "token_ids");
        json_array_foreach (sampled, t, token) {
            json_array_append(ids, token);
            json_array_append_new(mask, json_integer(1));
            low += json_integer_value(token) < 150;
            n++;
        }
        json_decref(heard);
        reward[turn] = n ? (double)low / n : 0;
        if (turn == 1) break;
        json_array_append_new(ids, json_integer(5 + low));
        json_array_append_new(mask, json_integer(0));
    }
    send_line(id, "trajectory",
              json_pack("{s:o, s:o, s:[f, f]}", "token_ids", ids, "mask", mask, "rewards",
                        reward[0], reward[1]));
}

static int play(void)
{
    for (json_t *line; (line = hear()); json_decref(line))
        play_episode(json_object_get(line, "id"), json_object_get(line, "episode"));
    return 0;
}

static const char *environment(void)
{
    static char words[2 * PATH_MAX];
    char self[PATH_MAX];
    const ssize_t len = readlink("/proc/self/exe", self, sizeof self - 1);
    assert_true(len > 0);
    self[len] = 0;
    snprintf(words, sizeof words, "command:'%s' play", self);
    return words;
}

// ---- runs ---------------------------------------------------------------------------------------

static void train_two(struct pair *p, const char *run, const char *const more[])
{
    struct test_child child = {0};
    pair_start(p, &child, run, more);
    if (test_wait(&child, LIMIT_MS) != 0) fail_msg("%s", test_read(child.log));
}

TEST(environments_learn_as_one)
{
    struct pair p;
    double turns[2];
    pair_learns_as_one(&p, NULL, NULL,
                       OPTIONS(PAIR_NUMBERS, "--max-steps", "20", "--reward", "environment",
                               "--rollouts", environment()));
    assert_true(column(&p.s, "two", "environment/turns", turns, 2) > 0);
    assert_true(turns[0] == 2); // of the samples of both
    train_two(&p, "ahead",
              OPTIONS(PAIR_NUMBERS, "--max-steps", "8", "--reward", "environment", "--rollouts",
                      environment(), "--async", "--max-staleness", "1"));
    pair_holds(&p, "ahead");
}

TEST(sampling_ahead)
{
    struct pair p;
    double oldest[12], most = 0, mismatch[12];
    pair_open(&p);
    train_two(&p, "plain", OPTIONS(PAIR_NUMBERS, "--max-steps", "12"));
    train_two(&p, "0",
              OPTIONS(PAIR_NUMBERS, "--max-steps", "12", "--async", "--max-staleness", "0"));
    same_losses(&p.s, "plain", "0", 12, 0);
    test_same_file(latest(&p.s, "plain"), latest(&p.s, "0"), "model.safetensors");
    train_two(&p, "2",
              OPTIONS(PAIR_NUMBERS, "--max-steps", "12", "--async", "--max-staleness", "2"));
    assert_int_equal(column(&p.s, "2", "rollout/staleness_max", oldest, 12), 12);
    column(&p.s, "2", "sampler_mismatch/max", mismatch, 12);
    for (int i = 0; i < 12; i++) {
        assert_true(oldest[i] <= 2);
        if (oldest[i] > most) most = oldest[i];
        if (oldest[i] == 0 && on_cpu()) assert_true(mismatch[i] == 0);
    }
    assert_true(most > 0);
    pair_holds(&p, "2");
}

// A worker is one rank's, and what it samples changes nothing; one that is gone is left out.
TEST(workers_sample_too)
{
    struct pair p;
    struct daemon workers[2] = {0};
    double samples[2][4], up[4], mismatch[4];
    char words[2 * PATH_MAX];
    pair_open(&p);
    for (int i = 0; i < 2; i++) daemon_start(&workers[i], p.s.model, OPTIONS(NULL));
    snprintf(words, sizeof words, "%s,%s", workers[0].bridge, workers[1].bridge);
    train_two(&p, "plain", OPTIONS(PAIR_NUMBERS, "--prompts-per-step", "12", "--max-steps", "4"));
    train_two(
        &p, "workers",
        OPTIONS(PAIR_NUMBERS, "--prompts-per-step", "12", "--max-steps", "4", "--workers", words));
    same_losses(&p.s, "plain", "workers", 4, 0);
    test_same_file(latest(&p.s, "plain"), latest(&p.s, "workers"), "model.safetensors");
    column(&p.s, "workers", "workers/1/samples", samples[0], 4);
    column(&p.s, "workers", "workers/2/samples", samples[1], 4);
    column(&p.s, "workers", "sampler_mismatch/max", mismatch, 4);
    assert_int_equal(column(&p.s, "workers", "workers/up", up, 4), 4);
    for (int i = 0; i < 4; i++) {
        assert_true(samples[0][i] > 0 && samples[1][i] > 0 && up[i] == 2);
        if (on_cpu()) assert_true(mismatch[i] == 0);
    }
    daemon_holds(&workers[1], "policy", test_path(p.s.folder, "workers/workers"));
    for (int i = 0; i < 2; i++) daemon_kill(&workers[i]);
}

int main(int argc, char **argv)
{
    if (argc > 1 && strcmp(argv[1], "play") == 0) return play();
    return test_main();
}
