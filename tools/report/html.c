/* html.c: escaping and numbers. Stateless. */
#include "tools/report/html.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

void html_text(struct bytes *to, const char *text, size_t len)
{
    static const struct {
        char c;
        const char *entity;
    } entities[] = {{'&', "&amp;"}, {'<', "&lt;"}, {'>', "&gt;"}, {'"', "&quot;"}, {'\'', "&#39;"}};
    char picture[4];
    for (size_t i = 0; i < len;) {
        unsigned char c = (unsigned char)text[i];
        int n = utf8_sequence(text + i, len - i);
        size_t e = 0;
        while (e < 5 && entities[e].c != text[i]) e++;
        if (n <= 0)
            bytes_puts(to, "\xef\xbf\xbd");
        else if (n == 1 && e < 5)
            bytes_puts(to, entities[e].entity);
        else if ((c < 0x20 && c != '\t' && c != '\n') || c == 0x7f)
            bytes_append(to, picture,
                         (size_t)utf8_encode(c == 0x7f ? 0x2421 : 0x2400u + c, picture));
        else
            bytes_append(to, text + i, (size_t)n);
        i += (size_t)(n > 0 ? n : 1);
    }
}

void html_puts(struct bytes *to, const char *text)
{
    html_text(to, text, strlen(text));
}

void html_fact(struct bytes *to, const char *key, const char *text)
{
    bytes_puts(to, "<div><dt>");
    html_puts(to, key);
    bytes_puts(to, "</dt><dd>");
    html_puts(to, text);
    bytes_puts(to, "</dd></div>");
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
