/* json_schema.h: JSON Schema (drafts 7 and 2020-12) as nodes of an automaton: texts of the values
 * that it takes, members in the order of "properties", further ones behind them. Keywords that are
 * checked: type, enum, const, properties, required, additionalProperties, items, prefixItems,
 * minItems, maxItems, anyOf, oneOf whose branches exclude each other, allOf, $ref within the
 * schema, minimum, maximum and their exclusive forms, minLength, maxLength, pattern, format. Those
 * that would rule out something else are refused by name (ST_UNSUPPORTED); annotations, and
 * keywords that no draft knows, say nothing. Any thread. */
// SPDX-License-Identifier: Apache-2.0
#ifndef COMMON_CONSTRAINT_JSON_SCHEMA_H
#define COMMON_CONSTRAINT_JSON_SCHEMA_H

#include "common/constraint/json_grammar.h"

enum status json_schema_build(const struct json_grammar *g, const json_t *schema, int next,
                              int *ret);

// A count that an object has by this name, at most 100,000; fallback: where it has none.
enum status json_count(const json_t *object, const char *name, int64_t fallback, int64_t *ret);

#endif
