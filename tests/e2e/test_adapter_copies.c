/* test_adapter_copies.c: what a server does with adapters for a trainer that is attached: copies of
 * one as it is, more of them than a handful, and unloading those that the trainer asks for itself.
 */
// SPDX-License-Identifier: Apache-2.0
#include "bridge/attach.h"
#include "tests/support/served.h"
#include "tests/support/tiny_adapter.h"

#define CONFIG "{\"r\":2,\"lora_alpha\":4,\"target_modules\":\"all-linear\"}"
#define MANY   "40"

static const char *model;

static void start(void)
{
    model = daemon_model(test_folder(), true, 11);
    daemon_start(&served, model, OPTIONS("--max-adapters", MANY, "--max-lora-rank", "2"));
}

#define LOAD   "/v1/load_lora_adapter"
#define UNLOAD "/v1/unload_lora_adapter"

TEST(a_copy_is_what_it_was)
{
    const char *folder = test_folder(), *other = test_folder();
    assert_ok(tiny_adapter_write(folder, model, CONFIG, 1));
    assert_ok(tiny_adapter_write(other, model, CONFIG, 2));
    daemon_call(&served, LOAD, 200, "added", "{\"lora_name\":\"a\",\"lora_path\":\"%s\"}", folder);
    daemon_call(&served, LOAD, 200, "added", "{\"lora_name\":\"a@1\",\"copy_of\":\"a\"}");
    daemon_call(&served, LOAD, 200, "added",
                "{\"lora_name\":\"a\",\"lora_path\":\"%s\",\"load_inplace\":true}", other);
    daemon_holds_adapter(&served, "a@1", folder);
    daemon_holds_adapter(&served, "a", other);
    daemon_call(&served, LOAD, 404, "there is no adapter 'b'",
                "{\"lora_name\":\"c\",\"copy_of\":\"b\"}");
    daemon_call(&served, LOAD, 400, "another's name",
                "{\"lora_name\":\"c\",\"copy_of\":\"a\",\"config\":%s}", CONFIG);
    daemon_call(&served, LOAD, 400, "has already been loaded",
                "{\"lora_name\":\"a\",\"copy_of\":\"a@1\"}");
    daemon_call(&served, UNLOAD, 200, "removed", "{\"lora_name\":\"a\"}");
    daemon_holds_adapter(&served, "a@1", folder);
    daemon_call(&served, UNLOAD, 200, "removed", "{\"lora_name\":\"a@1\"}");
}

// All that --max-adapters allows for stand in the bridge file.
TEST(many)
{
    struct bridge *bridge;
    const int n = atoi(MANY);
    for (int i = 0; i < n; i++)
        daemon_call(&served, LOAD, 200, "added", "{\"lora_name\":\"m%d\",\"config\":%s}", i,
                    CONFIG);
    daemon_call(&served, LOAD, 400, "--max-adapters", "{\"lora_name\":\"more\",\"config\":%s}",
                CONFIG);
    assert_ok(bridge_attach(served.bridge, NULL, &bridge));
    assert_int_equal(bridge_file_of(bridge)->n_roles, n + 1);
    bridge_detach(bridge);
    for (int i = 0; i < n; i++)
        daemon_call(&served, UNLOAD, 200, "removed", "{\"lora_name\":\"m%d\"}", i);
}

// A trainer that is attached has it mapped, unless it says itself that it has not.
TEST(the_trainer_unloads)
{
    struct bridge *bridge;
    struct bridge_arena *arena, *none;
    assert_ok(bridge_attach(served.bridge, NULL, &bridge));
    assert_ok(bridge_become_writer(bridge));
    assert_int_equal(bridge_map(bridge, "adapter:a", &none), ST_NOT_FOUND);
    daemon_call(&served, LOAD, 200, "added", "{\"lora_name\":\"a\",\"config\":%s}", CONFIG);
    assert_ok(bridge_map(bridge, "adapter:a", &arena));
    daemon_call(&served, UNLOAD, 409, "is attached", "{\"lora_name\":\"a\"}");
    daemon_call(&served, UNLOAD, 409, "is attached", "{\"lora_name\":\"a\",\"writer_pid\":1}");
    bridge_unmap(arena);
    daemon_call(&served, UNLOAD, 200, "removed", "{\"lora_name\":\"a\",\"writer_pid\":%d}",
                (int)getpid());
    bridge_detach(bridge);
}

TESTS_BETWEEN(start, served_stop)
