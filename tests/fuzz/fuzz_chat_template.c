/* fuzz_chat_template.c: any text as a chat template, parsed and rendered with a few messages under
 * small limits: refused in a sentence, or valid UTF-8 within the limits. */
// SPDX-License-Identifier: Apache-2.0
#include "common/text/jinja/jinja.h"
#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static json_t *variables(void)
{
    static json_t *all;
    static const char text[] =
        "{\"messages\":[{\"role\":\"system\",\"content\":\"S <b>&\"},"
        "{\"role\":\"user\",\"content\":\"\\u00e9\\u65e5\\ud83d\\ude00 x\"},"
        "{\"role\":\"assistant\",\"content\":[{\"type\":\"text\",\"text\":\"a\"}],"
        "\"tool_calls\":[{\"function\":{\"name\":\"f\",\"arguments\":{\"n\":1,\"x\":2.5}}}]}],"
        "\"tools\":[{\"type\":\"function\",\"function\":{\"name\":\"f\",\"parameters\":{}}}],"
        "\"add_generation_prompt\":true,\"bos_token\":\"<s>\",\"n\":7,\"none_at_all\":null}";
    if (!all) all = json_loads(text, 0, NULL);
    return all;
}

static void check_text(const struct bytes *text)
{
    for (size_t at = 0; at < text->len;) {
        int n = utf8_sequence(text->data + at, text->len - at);
        if (n <= 0) abort();
        at += (size_t)n;
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const struct jinja_limits limits = {
        .steps = 20000, .memory = (size_t)4 << 20, .output = (size_t)1 << 20};
    static const struct tm now = {.tm_year = 125, .tm_mday = 2, .tm_hour = 3};
    struct jinja *t = NULL;
    struct bytes text = BYTES_INIT;
    json_t *given = variables();
    if (!given) abort();
    if (jinja_parse("fuzz", (const char *)data, size, &t) == ST_OK) {
        enum status st = jinja_render(t, given, &now, &limits, &text);
        if (st == ST_OK)
            check_text(&text);
        else if (text.len > 0 || !status_message()[0])
            abort();
    } else if (t || !status_message()[0]) {
        abort();
    }
    bytes_release(&text);
    jinja_free(t);
    return 0;
}
