/* method.c: the table of methods, the draft model's entry in it, and methods as text. */
// SPDX-License-Identifier: Apache-2.0
#include "infer-server/speculative/method.h"
#include "infer-server/speculative/speculative.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// It was made for this policy, so it is thought well of until it is tested.
const struct draft_method method_draft_model = {.name = "draft_model", .k = 5, .guess = 0.8};

// The model's own layer that predicts further tokens, in the draft model's place.
const struct draft_method method_mtp = {.name = "mtp", .k = 3, .guess = 0.8};

const struct draft_method *const draft_methods[SPECULATIVE_METHODS] = {
#define X(entry, method) [entry] = &method,
    DRAFT_METHODS(X)
#undef X
};

static enum status unknown_method(const char *text)
{
    char names[256];
    size_t n = 0;
    for (int m = 0; m < SPECULATIVE_METHODS && n < sizeof names; m++)
        n += (size_t)snprintf(names + n, sizeof names - n, ", %s[:K]", draft_methods[m]->name);
    return status_fail(ST_INVALID, "speculative method \"%s\" is none of off%s", CUT(text, 40),
                       names);
}

static enum status parse_method(const char *text, size_t n, struct speculative_choice *choice)
{
    const size_t length = strcspn(text, ":,");
    for (int m = 0; m < SPECULATIVE_METHODS; m++) {
        const char *name = draft_methods[m]->name;
        if (length != strlen(name) || strncmp(text, name, length) != 0) continue;
        char *end = (char *)text + length;
        long k = draft_methods[m]->k;
        if (text[length] == ':') k = strtol(text + length + 1, &end, 10);
        const bool digits =
            text[length] != ':' || (text[length + 1] >= '0' && text[length + 1] <= '9');
        if (!digits || end != text + n || k < 1 || k > SPECULATIVE_MAX)
            return status_fail(
                ST_INVALID,
                "speculative method \"%s\": K, the most tokens drafted at once, must be 1 to %d",
                CUT(text, 40), SPECULATIVE_MAX);
        if (choice->k[m])
            return status_fail(ST_INVALID, "speculative method \"%s\" is named twice", name);
        choice->k[m] = (int)k;
        return ST_OK;
    }
    return unknown_method(text);
}

enum status speculative_parse(const char *text, struct speculative_choice *ret)
{
    struct speculative_choice choice = {.chosen = true};
    for (const char *at = text; strcmp(text, "off") != 0;) {
        const size_t n = strcspn(at, ",");
        enum status st = parse_method(at, n, &choice);
        if (st != ST_OK) return st;
        if (!at[n]) break;
        at += n + 1;
    }
    *ret = choice;
    return ST_OK;
}

void speculative_write(struct speculative_choice choice, char ret[64])
{
    size_t n = 0;
    for (int m = 0; m < SPECULATIVE_METHODS && n < 64; m++)
        if (choice.k[m])
            n += (size_t)snprintf(ret + n, 64 - n, "%s%s:%d", n ? "," : "", draft_methods[m]->name,
                                  choice.k[m]);
    if (n == 0) snprintf(ret, 64, "off");
}

int speculative_max(struct speculative_choice choice)
{
    int max = 0;
    for (int m = 0; m < SPECULATIVE_METHODS; m++)
        if (choice.k[m] > max) max = choice.k[m];
    return max;
}
