/* test_tinker_open.c: cw-trainer serve and whoever else is on the machine: the key that it makes,
 * and what a client may put into its folder and its log. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/tinker_pair.h"

#include <sys/stat.h>

static struct tinker_pair pair;
static char session[128];

static void start(void)
{
    tinker_pair_start(&pair, NULL, NULL, NULL);
}

static int lines_with(const char *part)
{
    char *log = test_read(pair.server.log);
    int n = 0;
    for (const char *at = log; (at = strstr(at, part)); at += strlen(part)) n++;
    return n;
}

// Without --api-key-file: made where there is none, and the same from then on.
TEST(a_key_is_made)
{
    char made[sizeof pair.server.key], line[PATH_MAX + 64];
    struct stat info;
    start();
    const char *file = test_path(pair.server.runs, "api-key");
    assert_int_equal(stat(file, &info), 0);
    assert_int_equal(info.st_mode & 0777, 0600);
    snprintf(made, sizeof made, "%s", pair.server.key);
    assert_memory_equal(made, "tml-", 4);
    assert_int_equal(strlen(made), 4 + 32);
    snprintf(line, sizeof line, "export TINKER_API_KEY=$(cat %s)\n", file);
    assert_int_equal(lines_with(line), 1);

    tinker_get(&pair.server, "training_runs", 200);
    pair.server.key[0] = 0;
    tinker_get(&pair.server, "training_runs", 401);
    tinker_get(&pair.server, "healthz", 200);
    snprintf(pair.server.key, sizeof pair.server.key, "tml-of-somebody-else");
    tinker_post(&pair.server, "create_session", 401, "{}");

    assert_int_equal(tinker_server_stop(&pair.server), 0);
    tinker_server_start(&pair.server, &pair.daemon, pair.server.runs, NULL);
    assert_string_equal(pair.server.key, made);
    tinker_pair_stop(&pair);
}

static json_t *make(int number, int status, const char *metadata)
{
    return tinker_post(&pair.server, "create_model", status,
                       "{\"session_id\":\"%s\",\"model_seq_id\":%d,\"base_model\":\"model\","
                       "\"lora_config\":{\"rank\":0},\"user_metadata\":{\"a\":\"%s\"}}",
                       session, number, metadata);
}

static size_t runs_listed(void)
{
    json_t *answer = tinker_get(&pair.server, "training_runs", 200);
    const size_t n = json_array_size(json_object_get(answer, "training_runs"));
    return n;
}

// What one client says of its run, or a file that was damaged, takes nothing from the others.
TEST(a_run_of_others_harms_none)
{
    enum { LONG = 1100000 };
    char *metadata = malloc(LONG + 1);
    start();
    const struct tinker_run run = tinker_whole(&pair.server, session);
    memset(metadata, 'a', LONG);
    metadata[LONG] = 0;
    tinker_refused(make(1, 400, metadata), "\"user_metadata\" has 1100009 bytes");
    metadata[60000] = 0;
    tinker_retrieve(&pair.server, make(1, 200, metadata));
    assert_int_equal(runs_listed(), 2);

    const char *damaged = test_path(test_path(pair.server.runs, run.id), "run.json");
    test_write(damaged, "{\"base", 6);
    for (int i = 0; i < 3; i++) assert_int_equal(runs_listed(), 1);
    assert_int_equal(lines_with("leaves"), 1);
    assert_int_equal(lines_with(damaged), 1);
    free(metadata);
    tinker_pair_stop(&pair);
}

TEST(a_log_line_is_one)
{
    start();
    tinker_post(&pair.server, "create_session", 200,
                "{\"sdk_version\":\"1\\nforged\\r\\u001b[2J\\u009bJ\\u007f\"}");
    assert_int_equal(lines_with("\nforged"), 0);
    assert_int_equal(lines_with("SDK 1 | forged\\x0d\\x1b[2J\\x9bJ\\x7f\n"), 1);
    tinker_pair_stop(&pair);
}
