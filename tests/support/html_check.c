/* html_check.c: a strict reader of HTML that is written like XML: it takes less than browsers do.
 */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/html_check.h"
#include "common/base/bytes.h"
#include "common/base/hash.h"

#include <ctype.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#define DEPTH      64
#define NAME       32
#define ATTRIBUTES 32

struct reader {
    const char *page, *at;
    char open[DEPTH][NAME];
    int depth;
    char *sentence;
    size_t room;
};

static bool fails(struct reader *r, const char *format, ...) __attribute__((format(printf, 2, 3)));
static bool fails(struct reader *r, const char *format, ...)
{
    va_list arguments;
    int line = 1;
    for (const char *c = r->page; c < r->at; c++) line += *c == '\n';
    int n = snprintf(r->sentence, r->room, "line %d: ", line);
    va_start(arguments, format);
    vsnprintf(r->sentence + n, r->room - (size_t)n, format, arguments);
    va_end(arguments);
    return false;
}

// A name of letters, digits, '-' and ':' into ret.
static bool read_name(struct reader *r, char ret[NAME])
{
    size_t n = 0;
    while (isalnum((unsigned char)*r->at) || *r->at == '-' || *r->at == ':') {
        if (n + 1 == NAME) return fails(r, "a name is too long");
        ret[n++] = *r->at++;
    }
    ret[n] = 0;
    return n > 0 || fails(r, "a name is missing before \"%.20s\"", r->at);
}

// At an '&': one of the five, or a number.
static bool check_entity(struct reader *r)
{
    static const char *const known[] = {"&amp;", "&lt;", "&gt;", "&quot;", "&#39;"};
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (strncmp(r->at, known[i], strlen(known[i])) == 0) return true;
    return fails(r, "a bare & at \"%.20s\"", r->at);
}

static bool check_style(struct reader *r, const char *end)
{
    for (const char *c = r->at; c < end; c++)
        if (strncmp(c, "url(", 4) == 0 || strncmp(c, "@import", 7) == 0)
            return fails(r, "the style loads something: \"%.30s\"", c);
    return true;
}

static bool read_attribute(struct reader *r, char name[NAME])
{
    static const char *const loading[] = {"src",  "srcset", "href",       "xlink:href",
                                          "data", "action", "background", "style"};
    if (!read_name(r, name)) return false;
    for (size_t i = 0; i < sizeof loading / sizeof *loading; i++)
        if (strcmp(name, loading[i]) == 0) return fails(r, "an attribute %s", name);
    if (strncmp(name, "on", 2) == 0) return fails(r, "an attribute %s", name);
    if (strncmp(r->at, "=\"", 2) != 0) return fails(r, "attribute %s has no quoted value", name);
    for (r->at += 2; *r->at && *r->at != '"'; r->at++) {
        if (*r->at == '<') return fails(r, "a bare < in attribute %s", name);
        if (*r->at == '&' && !check_entity(r)) return false;
    }
    if (!*r->at) return fails(r, "attribute %s does not end", name);
    r->at++;
    return true;
}

// ret_typed: there is one `type`
static bool read_attributes(struct reader *r, const char *tag, bool *ret_typed)
{
    char names[ATTRIBUTES][NAME];
    int n = 0;
    *ret_typed = false;
    while (*r->at == ' ') {
        r->at++;
        if (n == ATTRIBUTES) return fails(r, "<%s> has too many attributes", tag);
        if (!read_attribute(r, names[n])) return false;
        for (int i = 0; i < n; i++)
            if (strcmp(names[i], names[n]) == 0)
                return fails(r, "<%s> has attribute %s twice", tag, names[n]);
        *ret_typed |= strcmp(names[n], "type") == 0;
        n++;
    }
    return true;
}

// At the content of a script, up to `end`.
static bool check_script(struct reader *r, const char *end, bool typed)
{
    unsigned char hash[HASH_SHA256_BYTES];
    struct bytes name = BYTES_INIT;
    const char *policy = strstr(r->page, "http-equiv=\"Content-Security-Policy\"");
    const size_t len = policy ? strcspn(policy, ">") : 0;
    if (typed) return !memchr(r->at, '<', (size_t)(end - r->at)) || fails(r, "a < in data");
    hash_sha256(r->at, (size_t)(end - r->at), hash);
    if (base64_encode(hash, sizeof hash, &name) != ST_OK) return fails(r, "no memory");
    const char *found = policy ? strstr(policy, bytes_text(&name)) : NULL;
    const bool named = found && found < policy + len;
    bytes_release(&name);
    return named || fails(r, "a <script> that the page's policy does not name");
}

// What HTML reads to its end tag and no further.
static bool read_raw(struct reader *r, const char *tag, bool typed)
{
    char close[NAME + 4];
    snprintf(close, sizeof close, "</%s>", tag);
    const char *end = strstr(r->at, close);
    if (!end) return fails(r, "<%s> does not end", tag);
    if (!(strcmp(tag, "style") == 0 ? check_style(r, end) : check_script(r, end, typed)))
        return false;
    r->at = end;
    return true;
}

static bool read_start_tag(struct reader *r)
{
    static const char *const refused[] = {"link", "iframe", "img",   "image", "object", "embed",
                                          "base", "video",  "audio", "use",   "source", "frame"};
    char tag[NAME];
    bool typed;
    r->at++;
    if (!read_name(r, tag)) return false;
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++)
        if (strcmp(tag, refused[i]) == 0) return fails(r, "a <%s>", tag);
    if (!read_attributes(r, tag, &typed)) return false;
    if (strncmp(r->at, "/>", 2) == 0) {
        r->at += 2;
        return true;
    }
    if (*r->at++ != '>') return fails(r, "<%s> does not end", tag);
    if (r->depth == DEPTH) return fails(r, "tags are nested too deeply");
    memcpy(r->open[r->depth++], tag, NAME);
    const bool raw = strcmp(tag, "style") == 0 || strcmp(tag, "script") == 0;
    return !raw || read_raw(r, tag, typed);
}

static bool read_end_tag(struct reader *r)
{
    char tag[NAME];
    r->at += 2;
    if (!read_name(r, tag)) return false;
    if (*r->at++ != '>') return fails(r, "</%s> does not end", tag);
    if (r->depth == 0) return fails(r, "</%s> without its start", tag);
    if (strcmp(r->open[--r->depth], tag) != 0)
        return fails(r, "</%s> where <%s> is open", tag, r->open[r->depth]);
    return true;
}

bool html_check(const char *page, char *ret_sentence, size_t room)
{
    static const char doctype[] = "<!DOCTYPE html>\n";
    struct reader r = {.page = page, .at = page, .sentence = ret_sentence, .room = room};
    if (strncmp(page, doctype, sizeof doctype - 1) != 0) return fails(&r, "no doctype");
    r.at += sizeof doctype - 1;
    while (*r.at) {
        bool good = true;
        if (strncmp(r.at, "</", 2) == 0)
            good = read_end_tag(&r);
        else if (*r.at == '<')
            good = read_start_tag(&r);
        else if (*r.at == '&')
            good = check_entity(&r), r.at++;
        else
            r.at++;
        if (!good) return false;
    }
    if (r.depth) return fails(&r, "<%s> is still open at the end", r.open[r.depth - 1]);
    return true;
}
