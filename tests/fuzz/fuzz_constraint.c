/* fuzz_constraint.c: any text as a constraint: up to the first NUL its spec (JSON, or else a
 * regular expression), behind it a text that is followed byte by byte: masks agree with what
 * follows. */
// SPDX-License-Identifier: Apache-2.0
#include "common/constraint/json_schema.h"
#include "common/constraint/regex.h"
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static enum status build(struct automaton *a, const char *spec, int *ret)
{
    json_t *schema = json_loads(spec, JSON_DECODE_ANY, NULL);
    struct json_grammar g = json_grammar_of(a, *spec == ' ');
    const enum status st = schema ? json_schema_build(&g, schema, AUTOMATON_END, ret)
                                  : regex_build(a, spec, REGEX_WHOLE, AUTOMATON_END, ret);
    json_decref(schema);
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
        st = automaton_step(a, from, data[i], &state);
        if (st != ST_OK) break;
        if (automaton_step(a, from, data[i], &again) != ST_OK || again != state) abort();
        if (state >= 0 && !automaton_may_end(a, state) && !automaton_may_go_on(a, state)) abort();
    }
    automaton_free(a);
    return 0;
}
