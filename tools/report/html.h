/* html.h: text as HTML. What stands in a run's files is untrusted (a model wrote it): it reaches
 * the page through these functions only. */
#ifndef TOOLS_REPORT_HTML_H
#define TOOLS_REPORT_HTML_H

#include "common/base/bytes.h"

// Appends text (UTF-8) for an element's content or a quoted attribute. Control characters other
// than tab and newline become their pictures (U+2400...), bytes that are no UTF-8 U+FFFD.
void html_text(struct bytes *to, const char *text, size_t len);
void html_puts(struct bytes *to, const char *text); // NUL-ended
// An entry of a list: "<div><dt>key</dt><dd>text</dd></div>".
void html_fact(struct bytes *to, const char *key, const char *text);

// "0.512", "12,345", "1.2e-07"; "-" for what is not finite.
#define NUMBER_ROOM 32
const char *number_text(double value, char ret[NUMBER_ROOM]);

#endif
