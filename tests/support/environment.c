/* environment.c: the environment of environment.h. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/environment.h"

const char *environment_of(const char *words)
{
    char self[PATH_MAX];
    const ssize_t len = readlink("/proc/self/exe", self, sizeof self - 1);
    assert_true(len > 0);
    self[len] = '\0';
    return test_text("command:'%s' play %s", self, words);
}

json_t *environment_hear(void)
{
    static char *text;
    static size_t room;
    const ssize_t len = getline(&text, &room, stdin);
    return len < 0 ? NULL : json_loadb(text, (size_t)len, JSON_ALLOW_NUL, NULL);
}

void environment_say(const json_t *id, const char *kind, json_t *value)
{
    json_t *line = json_pack("{s:O, s:o}", "id", id, kind, value);
    json_dumpf(line, stdout, JSON_COMPACT);
    puts("");
    fflush(stdout);
    json_decref(line);
}

static void play_episode(const json_t *id, const json_t *episode, int tokens, bool turns,
                         bool drops)
{
    const json_t *prompt = json_object_get(episode, "prompt_token_ids");
    json_t *ids = json_copy((json_t *)prompt), *mask = json_array();
    int even[2] = {0}, n[2] = {0};
    for (size_t t = 0; t < json_array_size(prompt); t++)
        json_array_append_new(mask, json_integer(0));
    for (int turn = 0; turn < 2; turn++) {
        json_t *token;
        size_t t;
        environment_say(id, "sample",
                        json_pack("{s:O, s:i}", "token_ids", ids, "max_tokens", tokens));
        json_t *heard = environment_hear();
        const json_t *sampled = json_object_get(json_object_get(heard, "sampled"), "token_ids");
        json_array_foreach (sampled, t, token) {
            json_array_append(ids, token);
            json_array_append_new(mask, json_integer(1));
            even[turn] += json_integer_value(token) % 2 == 0;
            n[turn]++;
        }
        json_decref(heard);
        if (turn == 1) break;
        if (drops) {
            json_t *kept = json_copy((json_t *)prompt);
            json_array_append(kept, json_array_get(ids, json_array_size(ids) - 1));
            ids = kept;
        }
        json_array_append_new(ids, json_integer(turns ? 5 + even[0] : '='));
        json_array_append_new(mask, json_integer(0));
    }
    const double first = n[0] ? (double)even[0] / n[0] : 0,
                 last = n[1] ? (double)even[1] / n[1] : 0,
                 whole = (double)(even[0] + even[1]) / fmax(1, n[0] + n[1]);
    environment_say(
        id, "trajectory",
        drops   ? json_pack("{s:[i, i], s:f}", "turns", 1, 1, "reward", whole)
        : turns ? json_pack("{s:o, s:o, s:[f, f]}", "token_ids", ids, "mask", mask, "rewards",
                            first, last)
                : json_pack("{s:o, s:o, s:f}", "token_ids", ids, "mask", mask, "reward", whole));
}

void environment_main(int argc, char **argv)
{
    if (argc != 4 || strcmp(argv[1], "play") != 0) return;
    for (json_t *line; (line = environment_hear()); json_decref(line))
        play_episode(json_object_get(line, "id"), json_object_get(line, "episode"), atoi(argv[2]),
                     strcmp(argv[3], "turns") == 0, strcmp(argv[3], "drops") == 0);
    exit(0);
}
