/* html.c: escaping and numbers. Stateless. */
#include "tools/report/html.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

void html_text(struct bytes *to, const char *text, size_t len)
{
    char picture[4];
    for (size_t i = 0; i < len;) {
        unsigned char c = (unsigned char)text[i];
        int n = utf8_sequence(text + i, len - i);
        if (n <= 0) {
            bytes_puts(to, "\xef\xbf\xbd");
            n = 1;
        } else if (n > 1) {
            bytes_append(to, text + i, (size_t)n);
        } else if (c == '&') {
            bytes_puts(to, "&amp;");
        } else if (c == '<') {
            bytes_puts(to, "&lt;");
        } else if (c == '>') {
            bytes_puts(to, "&gt;");
        } else if (c == '"') {
            bytes_puts(to, "&quot;");
        } else if (c == '\'') {
            bytes_puts(to, "&#39;");
        } else if ((c < 0x20 && c != '\t' && c != '\n') || c == 0x7f) {
            bytes_append(to, picture,
                         (size_t)utf8_encode(c == 0x7f ? 0x2421 : 0x2400u + c, picture));
        } else {
            bytes_append(to, text + i, 1);
        }
        i += (size_t)n;
    }
}

void html_puts(struct bytes *to, const char *text)
{
    html_text(to, text, strlen(text));
}

// "1234567" -> "1,234,567", in place
static void group_thousands(char text[NUMBER_ROOM])
{
    size_t sign = text[0] == '-', digits = strlen(text) - sign;
    for (size_t at = digits; at > 3;) {
        at -= 3;
        memmove(text + sign + at + 1, text + sign + at, strlen(text + sign + at) + 1);
        text[sign + at] = ',';
    }
}

const char *number_text(double value, char ret[NUMBER_ROOM])
{
    double size = fabs(value);
    if (!isfinite(value)) {
        snprintf(ret, NUMBER_ROOM, "-");
    } else if (size >= 999.5 && size < 1e12) {
        snprintf(ret, NUMBER_ROOM, "%.0f", value);
        group_thousands(ret);
    } else if (size >= 1e12 || (size > 0 && size < 1e-4)) {
        snprintf(ret, NUMBER_ROOM, "%.3g", value);
    } else {
        snprintf(ret, NUMBER_ROOM, "%.4g", value + 0.0); // no "-0"
    }
    return ret;
}
