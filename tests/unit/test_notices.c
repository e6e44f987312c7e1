/* test_notices.c: what a run says of its adapter: one that PEFT opens otherwise than this server.
 */
#include "tests/support/reference.h"
#include "tests/support/support.h"
#include "tests/support/tiny_adapter.h"
#include "trainer/run/notices.h"
#include <fcntl.h>

// What notice_adapter() logs of an adapter of a model of tests/golden; the caller frees it.
static char *notice_of(const char *model, const char *targets)
{
    const char *log = test_path(test_folder(), "log");
    char config[256];
    struct reference r;
    snprintf(config, sizeof config, "{\"r\":2,\"target_modules\":%s}", targets);
    reference_open(test_golden(model), "cpu", &r);
    struct adapter *a = tiny_adapter_new(r.dev, r.weights, config);
    const int file = open(log, O_WRONLY | O_CREAT | O_TRUNC, 0600), saved = dup(STDERR_FILENO);
    assert_true(file >= 0 && saved >= 0 && dup2(file, STDERR_FILENO) >= 0);
    notice_adapter(a);
    dup2(saved, STDERR_FILENO);
    close(saved);
    close(file);
    tiny_adapter_free(r.dev, a);
    reference_close(&r);
    return test_read(log);
}

TEST(adapters_that_peft_takes_otherwise)
{
    static const struct {
        const char *model, *targets;
        bool said;
    } cases[] = {
        {"deepseek-v2-lite", "\"all-linear\"", true},
        {"deepseek-v2-lite", "[\"q_proj\",\"o_proj\"]", false},
        {"deepseek-v3", "[\"shared_experts.down_proj\"]", true},
        {"qwen2-moe", "\"all-linear\"", true},
        {"qwen3-moe", "\"all-linear\"", false}, // has experts alone
        {"qwen3-moe-some", "\"all-linear\"", true},
        {"gpt-oss", "\"all-linear\"", false},
        {"llama3", "\"all-linear\"", false},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char *text = notice_of(cases[i].model, cases[i].targets);
        if (cases[i].said)
            assert_contains(text, "but PEFT on transformers 5 reads gate_proj, up_proj and");
        else
            assert_string_equal(text, "");
        free(text);
    }
}
