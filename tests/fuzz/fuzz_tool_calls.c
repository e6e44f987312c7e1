/* fuzz_tool_calls.c: any text as a chat's answer that is searched for calls: calls are of functions
 * that there are, with JSON objects, and how the text is cut up changes nothing. The first byte
 * picks the form, the second where the text is cut. */
// SPDX-License-Identifier: Apache-2.0
#include "common/base/json.h"
#include "infer-server/http/tool_calls.h"
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static json_t *known_tools(void)
{
    static json_t *tools;
    if (!tools)
        tools = json_loads("[{\"function\":{\"name\":\"f\"}},{\"name\":\"g\"},{},1]", 0, NULL);
    return tools;
}

static struct tool_calls *search(const struct tool_form *form, const char *text, size_t len,
                                 size_t step, bool early)
{
    struct tool_calls *c = NULL;
    if (tool_calls_new(form, known_tools(), early, &c) != ST_OK) abort();
    for (size_t at = step; step > 0 && at < len; at += step) {
        const size_t before = c->content.len;
        if (tool_calls_read(c, text, at, false) != ST_OK || c->content.len < before) abort();
    }
    if (tool_calls_read(c, text, len, true) != ST_OK) abort();
    return c;
}

// early: what is given early may be cut off or broken.
static void check(const struct tool_calls *c, const struct tool_calls *cut, size_t len, bool early)
{
    if (c->n != cut->n || c->content.len != cut->content.len || c->content.len > len ||
        (c->content.len && memcmp(c->content.data, cut->content.data, c->content.len) != 0))
        abort();
    for (int i = 0; i < c->n; i++) {
        const struct tool_call *call = &c->list[i];
        json_t *arguments = NULL;
        if (strcmp(call->name, "f") != 0 && strcmp(call->name, "g") != 0) abort();
        if (!early && (json_parse("fuzz", bytes_text(&call->arguments), call->arguments.len,
                                  &arguments) != ST_OK ||
                       !json_is_object(arguments)))
            abort();
        if (strcmp(call->name, cut->list[i].name) != 0 ||
            strcmp(bytes_text(&call->arguments), bytes_text(&cut->list[i].arguments)) != 0)
            abort();
        json_decref(arguments);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    const struct tool_form *form = size >= 2 ? tool_form_at(data[0] & 15) : NULL;
    if (!form) return 0;
    const char *text = (const char *)data + 2;
    for (int early = 0; early < 2; early++) {
        struct tool_calls *whole = search(form, text, size - 2, early ? 1 : 0, early);
        struct tool_calls *cut = search(form, text, size - 2, (size_t)data[1] + 1, early);
        check(whole, cut, size - 2, early);
        tool_calls_free(whole);
        tool_calls_free(cut);
    }
    return 0;
}
