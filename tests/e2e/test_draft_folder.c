/* test_draft_folder.c: which folders a server takes for --draft when tokenizers cannot be compared,
 * and that a draft model in vain is said once. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/daemon.h"
#include "tests/support/support.h"
#include "tests/support/tiny_model.h"

#define LIMIT_MS 60000

static const char *bare_model(int vocab, int eos_id)
{
    const char *folder = test_folder();
    const struct tiny_model shape = {.hidden = 32,
                                     .layers = 1,
                                     .vocab = vocab,
                                     .max_positions = 128,
                                     .eos_id = eos_id,
                                     .seed = 9};
    assert_ok(tiny_model_write_as(folder, &shape));
    return folder;
}

static void assert_refused(const char *model, const char *draft, const char *part)
{
    struct daemon d = {0};
    memset(&d, 0, sizeof d);
    daemon_spawn(&d, model, OPTIONS("--draft", draft));
    assert_int_equal(test_wait(&d.child, LIMIT_MS), 1);
    char *log = test_read(d.log);
    assert_contains(log, draft);
    assert_contains(log, part);
}

TEST(other_sizes_and_ends)
{
    const char *demo = test_path(test_root(), "tools/demo-model"); // 272 tokens, 256 ends
    assert_refused(daemon_model(test_folder(), true, 3), test_path(test_root(), "tools/demo-draft"),
                   "its vocabulary of 272 tokens is not the 300 of");
    assert_refused(demo, bare_model(271, 256), "has no tokenizer.json to compare them by");
    assert_refused(demo, bare_model(273, 256), "is larger than the 272 of");
    assert_refused(demo, bare_model(272, 10), "it ends texts with token 10");
}

static int count(const char *text, const char *part)
{
    int n = 0;
    for (const char *at = text; (at = strstr(at, part)); at++) n++;
    return n;
}

// A few greedy sums: 4 tokens each, of which 3 may be drafted.
static void ask(const struct daemon *d, int n)
{
    for (int i = 0; i < n; i++) {
        SCOPED(bytes_release) struct bytes body = BYTES_INIT;
        bytes_printf(&body, "{\"prompt\": \"%d+%d=\", \"max_tokens\": 4, \"temperature\": 0}",
                     10 + i % 80, 11 + i % 80);
        daemon_post(d->socket, "/v1/completions", 200, bytes_text(&body));
    }
}

TEST(drafts_in_vain_are_said)
{
    static const char said[] = "none of the first";
    const char *demo = test_path(test_root(), "tools/demo-model");
    const char *drafts[] = {test_path(test_root(), "tools/demo-draft"), bare_model(272, 256)};
    for (int vain = 0; vain < 2; vain++) {
        struct daemon d = {0};
        memset(&d, 0, sizeof d);
        daemon_start(
            &d, demo,
            args("--draft %s --speculative draft_model:3 --draft-length fixed", drafts[vain]));
        ask(&d, 60);
        assert_int_equal(daemon_stop(&d), 0);
        char *log = test_read(d.log);
        assert_contains(log,
                        "has no tokenizer.json: draft model and policy are compared by the size "
                        "of the vocabulary (272) and end tokens alone");
        assert_int_equal(count(log, said), vain);
    }
}
