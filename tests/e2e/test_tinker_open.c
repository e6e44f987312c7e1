/* test_tinker_open.c: cw-trainer serve and whoever else is on the machine: the key that it makes,
 * and what a client may put into its folder and its log. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/tinker_client.h"

#include <sys/stat.h>

static void start(void)
{
    tinker_pair_start(NULL, NULL, NULL);
}

static int lines_with(const char *part)
{
    return test_count(pair.server.log, part);
}

// Without --api-key-file: made where there is none, and the same from then on.
TINKER_TEST(a_key_is_made)
{
    struct stat info;
    start();
    const char *file = test_path(pair.server.runs, "api-key");
    assert_int_equal(stat(file, &info), 0);
    assert_int_equal(info.st_mode & 0777, 0600);
    const char *made = test_text("%s", pair.server.key);
    assert_memory_equal(made, "tml-", 4);
    assert_int_equal(strlen(made), 4 + 32);
    assert_int_equal(lines_with(test_text("export TINKER_API_KEY=$(cat %s)\n", file)), 1);

    tinker_get("training_runs", 200);
    pair.server.key[0] = 0;
    tinker_get("training_runs", 401);
    tinker_get("healthz", 200);
    snprintf(pair.server.key, sizeof pair.server.key, "tml-of-somebody-else");
    tinker_post("create_session", 401, "{}");

    assert_int_equal(tinker_server_stop(&pair.server), 0);
    tinker_server_start(&pair.server, &pair.daemon, pair.server.runs, NULL);
    assert_string_equal(pair.server.key, made);
}

static json_t *make(int number, int status, const char *metadata)
{
    return tinker_post("create_model", status,
                       "{\"session_id\":\"%s\",\"model_seq_id\":%d,\"base_model\":\"model\","
                       "\"lora_config\":{\"rank\":0},\"user_metadata\":{\"a\":\"%s\"}}",
                       session, number, metadata);
}

static size_t runs_listed(void)
{
    return json_array_size(json_at(tinker_get("training_runs", 200), "training_runs"));
}

// What one client says of its run, or a file that was damaged, takes nothing from the others.
TINKER_TEST(a_run_of_others_harms_none)
{
    enum { LONG = 1100000 };
    char *metadata = test_keep(malloc(LONG + 1));
    start();
    trained = tinker_whole();
    memset(metadata, 'a', LONG);
    metadata[LONG] = 0;
    tinker_refused(make(1, 400, metadata), "\"user_metadata\" has 1100009 bytes");
    metadata[60000] = 0;
    tinker_retrieve(make(1, 200, metadata));
    assert_int_equal(runs_listed(), 2);

    const char *damaged = test_path(test_path(pair.server.runs, trained.id), "run.json");
    test_write(damaged, "{\"base", 6);
    for (int i = 0; i < 3; i++) assert_int_equal(runs_listed(), 1);
    assert_int_equal(lines_with("leaves"), 1);
    assert_int_equal(lines_with(damaged), 1);
}

TINKER_TEST(a_log_line_is_one)
{
    start();
    tinker_post("create_session", 200,
                "{\"sdk_version\":\"1\\nforged\\r\\u001b[2J\\u009bJ\\u007f\"}");
    assert_int_equal(lines_with("\nforged"), 0);
    assert_int_equal(lines_with("SDK 1 | forged\\x0d\\x1b[2J\\x9bJ\\x7f\n"), 1);
}
