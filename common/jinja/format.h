/* format.h: a field of a format, which "..." % values (format_percent.c) and "...".format(values)
 * (format_braces.c) both come down to, and what fills it (format_field.c). */
#ifndef COMMON_JINJA_FORMAT_H
#define COMMON_JINJA_FORMAT_H

#include "common/jinja/run.h"

#define MAX_PRECISION 300
#define MAX_WIDTH     100000000

struct field {
    char fill[4];
    int n_fill;     // 0: a blank
    char align;     // < > ^ =, 0: by the value's type
    char sign;      // + - or blank; 0: -
    bool alternate; // #
    char group;     // , or _; 0: none
    int64_t width;
    int precision; // -1: none
    char type;     // 0: by the value's type
};

// `otherwise`: how text is aligned where the field does not say.
void put_text_field(struct run *r, const struct field *f, char otherwise, const struct string *s);
void put_integer_field(struct run *r, const struct field *f, int64_t x);
void put_real_field(struct run *r, const struct field *f, double x);
void put_character_field(struct run *r, const struct field *f, char otherwise, int64_t code);
// One of a set of characters at *at, moved behind it; 0: none stands here.
char read_one(const char **at, const char *end, const char *set);
// The decimal digits at *at, moved behind them; no more than `max` or thereabouts.
int64_t read_digits(const char **at, const char *end, int64_t max);
void check_precision(struct run *r, int64_t precision);

#endif
