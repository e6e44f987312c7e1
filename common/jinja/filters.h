/* filters.h: the tables of filters, each in the file that has them; filters.c looks through all. */
#ifndef COMMON_JINJA_FILTERS_H
#define COMMON_JINJA_FILTERS_H

#include "common/jinja/run.h"

extern const struct builtin text_filters[], html_filters[], order_filters[], list_filters[],
    number_filters[], value_filters[];

#endif
