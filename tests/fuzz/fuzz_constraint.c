/* fuzz_constraint.c: any text as a constraint: up to the first NUL its spec (JSON, of a response
 * format where it begins with a tab, a grammar where it begins with "root", or else a regular
 * expression), behind it a text that is followed byte by
 * byte: a state that is come to again is the same, and none is without an end. */
// SPDX-License-Identifier: Apache-2.0
#include "common/constraint/constraint.h"
#include "common/constraint/pattern.h"
#include "common/constraint/spec.h"
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static enum status build(struct automaton *a, const char *text, int *ret)
{
    static const char *const special = "<|x|>";
    json_t *parsed = json_loads(text, JSON_DECODE_ANY, NULL),
           *spec = *text == ' ' ? json_incref(parsed) : NULL;
    enum status st = ST_OK;
    if (*text == '\t')
        st = constraint_of_format(parsed, &spec);
    else if (!spec && parsed)
        spec = json_pack("{s:O}", "json_schema", parsed);
    else if (!spec)
        spec = json_pack("{s:s?}", strncmp(text, "root", 4) == 0 ? "grammar" : "regex", text);
    if (st == ST_OK && !spec) st = status_fail(ST_INVALID, "no UTF-8");
    if (st == ST_OK) st = spec_build(a, &special, 1, spec, ret);
    json_decref(spec);
    json_decref(parsed);
    return st;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    char spec[4096];
    const size_t n = strnlen((const char *)data, size < sizeof spec - 1 ? size : sizeof spec - 1);
    struct automaton *a;
    int start, state = 0, again;
    memcpy(spec, data, n);
    spec[n] = '\0';
    if (automaton_new(&a) != ST_OK) return 0;
    enum status st = build(a, spec, &start);
    if (st == ST_OK) st = automaton_finish(a, start);
    for (size_t i = n + 1; i < size && st == ST_OK && state >= 0; i++) {
        const int from = state;
        automaton_allow(a);
        st = automaton_step(a, from, data[i], &state);
        if (st != ST_OK) break;
        if (automaton_step(a, from, data[i], &again) != ST_OK || again != state) abort();
        if (state >= 0 && !automaton_may_end(a, state) && !automaton_may_go_on(a, state)) abort();
    }
    automaton_free(a);
    return 0;
}
