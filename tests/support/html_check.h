/* html_check.h: what a page must be that needs nothing besides itself. */
// SPDX-License-Identifier: Apache-2.0
#ifndef TESTS_SUPPORT_HTML_CHECK_H
#define TESTS_SUPPORT_HTML_CHECK_H

#include <stdbool.h>
#include <stddef.h>

// True where the page is well formed (a doctype, balanced tags, quoted attributes, each once in its
// tag, no bare '<' or '&'), loads nothing (no src, href, url(), @import) and runs nothing (no on...
// attribute, no script but those that its Content-Security-Policy names by their hash; data in
// scripts of a type holds no '<'). Else false, with a sentence.
bool html_check(const char *page, char *ret_sentence, size_t room);

#endif
