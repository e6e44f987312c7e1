/* filters.c: finding and applying filters. One thread. */
#include "common/jinja/filters.h"

const struct builtin *filter_find(const struct string *name)
{
    const struct builtin *f = builtin_find(text_filters, n_text_filters, name);
    if (!f) f = builtin_find(list_filters, n_list_filters, name);
    return f ? f : builtin_find(value_filters, n_value_filters, name);
}

enum status filter_apply(struct run *r, const struct string *name, const struct value *input,
                         const struct arguments *arguments, struct value *ret)
{
    const struct builtin *f = filter_find(name);
    if (!f)
        return status_fail(ST_INVALID, "No filter named '%.*s'.",
                           (int)(name->n_bytes < 100 ? name->n_bytes : 100), name->data);
    return builtin_invoke(r, f, input, arguments, ret);
}

enum status call_method(struct run *r, const struct value *self, const char *method,
                        const struct value *arguments, int n, struct value *ret)
{
    struct string name = {method, strlen(method), strlen(method), false};
    struct arguments all = {arguments, n, NULL, 0};
    return builtin_invoke(r, method_find(self, &name), self, &all, ret);
}
