/* prose.c: PCRE2 over prose. Owns the compiled expressions, for the life of the process. */
#include "trainer/reward/math/prose.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

static pcre2_code *compiled(struct prose *p)
{
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    int error;
    PCRE2_SIZE at;
    pthread_mutex_lock(&lock);
    if (!p->code) {
        p->code = pcre2_compile((PCRE2_SPTR)p->expression, PCRE2_ZERO_TERMINATED,
                                PCRE2_EXTENDED | PCRE2_DOTALL, &error, &at, NULL);
        if (p->code) pcre2_jit_compile(p->code, PCRE2_JIT_COMPLETE); // or it is interpreted
    }
    pcre2_code *code = p->code;
    pthread_mutex_unlock(&lock);
    return code;
}

bool prose_find(struct prose *p, const char *text, const char *from, const char *end,
                struct prose_match *ret)
{
    pcre2_code *code = from <= end ? compiled(p) : NULL;
    pcre2_match_data *match = code ? pcre2_match_data_create(PROSE_GROUPS, NULL) : NULL;
    int n = PCRE2_ERROR_JIT_STACKLIMIT;
    // the interpreter keeps its state on the heap
    for (int jit = 1; match && jit >= 0 && n == PCRE2_ERROR_JIT_STACKLIMIT; jit--)
        n = pcre2_match(code, (PCRE2_SPTR)text, (size_t)(end - text), (size_t)(from - text),
                        jit ? 0 : PCRE2_NO_JIT, match, NULL);
    *ret = (struct prose_match){0};
    for (int i = 0; i < n; i++) {
        const PCRE2_SIZE *at = pcre2_get_ovector_pointer(match) + 2 * i;
        if (at[0] == PCRE2_UNSET) continue;
        ret->begin[i] = text + at[0];
        ret->end[i] = text + at[1];
    }
    pcre2_match_data_free(match);
    return n > 0;
}

const char *behind_last(const char *begin, const char *end, const char *mark)
{
    const size_t n = strlen(mark);
    for (const char *at = end; at >= begin + n; at--)
        if (strncasecmp(at - n, mark, n) == 0) return at;
    return NULL;
}

const char *behind_braces(const char *at, const char *end)
{
    int open = 0;
    for (const char *begin = at; at < end && at - begin < PROSE_LONGEST; at++) {
        open += *at == '{' ? 1 : *at == '}' ? -1 : 0;
        if (open == 0) return at + 1;
    }
    return NULL;
}
