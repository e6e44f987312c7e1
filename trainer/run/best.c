/* best.c: a record of one number. Owns nothing; the trainer's thread. */
#include "trainer/run/best.h"
#include "common/base/json.h"

#include <float.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>

bool best_consider(struct best *b, int64_t step, double score)
{
    if (isfinite(score) && (b->step < 0 || score > b->score)) {
        *b = (struct best){.step = step, .score = score};
        return true;
    }
    if (b->step >= 0) b->waited++;
    return false;
}

bool best_out_of_patience(const struct best *b, int64_t patience)
{
    return patience > 0 && b->waited >= patience;
}

void best_words(const struct best *b, bool is_best, int64_t step, char ret[BEST_WORDS])
{
    if (is_best || b->step < 0)
        snprintf(ret, BEST_WORDS, "%s", is_best && step > 0 ? ", the best so far" : "");
    else
        snprintf(ret, BEST_WORDS, "; the best was at step %" PRId64, b->step);
}

void best_end_words(const struct best *b, const char *scored, char ret[BEST_WORDS])
{
    ret[0] = 0;
    if (b->step >= 0)
        snprintf(ret, BEST_WORDS, "; the best was step %" PRId64 " (%s %.4f): checkpoints/best",
                 b->step, scored, b->score);
}

json_t *best_to_json(const struct best *b)
{
    if (b->step < 0) return json_null();
    return json_pack("{s:I, s:f, s:I}", "step", (json_int_t)b->step, "score", b->score, "waited",
                     (json_int_t)b->waited);
}

enum status best_from_json(const char *where, const json_t *json, struct best *ret)
{
    struct best b = BEST_NONE;
    double score = NAN;
    enum status st;
    if (!json || json_is_null(json)) {
        *ret = b;
        return ST_OK;
    }
    if (!json_is_object(json))
        return status_fail(ST_FORMAT, "%s: field \"best\" is not an object", where);
    CHECK(json_get_int(where, json, "step", 0, INT64_MAX, &b.step));
    CHECK(json_get_double(where, json, "score", -DBL_MAX, DBL_MAX, &score));
    CHECK(json_get_int(where, json, "waited", 0, INT64_MAX, &b.waited));
    if (b.step < 0 || isnan(score))
        FAIL(ST_FORMAT, "%s: field \"best\" has no \"step\" or no \"score\"", where);
    b.score = score;
    *ret = b;
out:
    return st;
}
