/* rope.c: rotary position embeddings: which frequencies a config.json asks for, and their table.
 * Formulas: linear (Chen et al. 2023), Llama 3.1's blend, YaRN (Peng et al. 2023), LongRoPE (Ding
 * et al. 2024), each with the keys and defaults that Hugging Face's configs use. Any thread. */
// SPDX-License-Identifier: Apache-2.0
#include "common/base/json.h"
#include "common/model/config.h"
#include "common/model/family.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const double pi = 3.14159265358979323846;

// ---- reading -----------------------------------------------------------------------------------
struct rope_source {
    const char *where, *key;     // file, and the name of the object
    const json_t *json, *object; // the whole config; the object
};

static enum status read_factors(const struct rope_source *s, const char *name, int n, double **ret)
{
    const json_t *list = json_object_get(s->object, name);
    if (!json_is_array(list) || (int)json_array_size(list) != n)
        return status_fail(
            ST_FORMAT,
            "%s: %s: %s must be a list of %d numbers, half of the rotated entries of a head",
            s->where, s->key, name, n);
    double *factors = calloc((size_t)n, sizeof *factors);
    if (!factors) return status_fail(ST_NO_MEMORY, "%s: no memory for %s", s->where, name);
    for (int i = 0; i < n; i++) {
        const json_t *one = json_array_get(list, (size_t)i);
        factors[i] = json_is_number(one) ? json_number_value(one) : 0;
        if (!(factors[i] > 0)) {
            free(factors);
            return status_fail(ST_FORMAT, "%s: %s: %s[%d] must be a positive number", s->where,
                               s->key, name, i);
        }
    }
    *ret = factors;
    return ST_OK;
}

static enum status read_llama3(const struct rope_source *s, struct rope_config *r)
{
    enum status st = ST_OK;
    CHECK(json_get_double(s->where, s->object, "low_freq_factor", 1e-6, 1e6, &r->low_freq_factor));
    CHECK(
        json_get_double(s->where, s->object, "high_freq_factor", 1e-6, 1e6, &r->high_freq_factor));
    if (r->high_freq_factor <= r->low_freq_factor)
        st = status_fail(ST_FORMAT,
                         "%s: %s: high_freq_factor (%g) must be above low_freq_factor (%g)",
                         s->where, s->key, r->high_freq_factor, r->low_freq_factor);
out:
    return st;
}

static double yarn_mscale(double factor, double mscale)
{
    return factor <= 1 ? 1.0 : 0.1 * mscale * log(factor) + 1.0;
}

static enum status read_yarn(const struct rope_source *s, int max_positions, double mscale_all,
                             struct rope_config *r)
{
    double mscale = 0;
    enum status st = ST_OK;
    r->beta_fast = 32;
    r->beta_slow = 1;
    r->truncate = true;
    CHECK(json_get_double(s->where, s->object, "beta_fast", 1e-6, 1e6, &r->beta_fast));
    CHECK(json_get_double(s->where, s->object, "beta_slow", 1e-6, 1e6, &r->beta_slow));
    if (json_is_null(json_object_get(s->object, "truncate")))
        r->truncate = false; // in transformers
    CHECK(json_get_bool(s->where, s->object, "truncate", &r->truncate));
    CHECK(json_get_double(s->where, s->object, "mscale", 0, 1e6, &mscale));
    if (!json_has(s->object, "factor"))
        r->factor = (double)max_positions / r->original_max_positions;
    r->attention_factor = yarn_mscale(r->factor, 1);
    if (mscale > 0 && mscale_all > 0)
        r->attention_factor = yarn_mscale(r->factor, mscale) / yarn_mscale(r->factor, mscale_all);
    st = json_get_double(s->where, s->object, "attention_factor", 1e-6, 1e6, &r->attention_factor);
out:
    return st;
}

static enum status read_longrope(const struct rope_source *s, int max_positions,
                                 struct rope_config *r)
{
    enum status st = ST_OK;
    if (!json_has(s->object, "factor"))
        r->factor = (double)max_positions / r->original_max_positions;
    if (r->factor > 1)
        r->attention_factor = sqrt(1 + log(r->factor) / log((double)r->original_max_positions));
    CHECK(
        json_get_double(s->where, s->object, "attention_factor", 1e-6, 1e6, &r->attention_factor));
    CHECK(read_factors(s, "short_factor", r->dim / 2, &r->short_factor));
    st = read_factors(s, "long_factor", r->dim / 2, &r->long_factor);
out:
    return st;
}

static enum status read_kind(const struct rope_source *s, const struct model_config *c,
                             struct rope_config *r)
{
    enum { MOST = 1, PHI3 = 2 }; // families whose folders say so
    static const struct {
        const char *name;
        enum rope_kind kind;
        int families;
        const char *needed[3]; // keys without which transformers refuses it
    } kinds[] = {
        {"default", ROPE_DEFAULT, MOST | PHI3, {NULL}},
        {"linear", ROPE_LINEAR, MOST, {"factor"}},
        {"dynamic", ROPE_DYNAMIC, MOST, {"factor"}},
        {"llama3", ROPE_LLAMA3, MOST, {"factor", "low_freq_factor", "high_freq_factor"}},
        {"yarn", ROPE_YARN, MOST, {"factor"}},
        {"longrope", ROPE_LONGROPE, MOST | PHI3, {NULL}},
        {"proportional", ROPE_PROPORTIONAL, MOST, {NULL}},
        {"su", ROPE_LONGROPE, PHI3, {NULL}}, // older names
        {"yarn", ROPE_LONGROPE, PHI3, {NULL}},
    };
    const char *name = "default";
    const bool phi3 = c->family->phi3_ropes;
    size_t i = 0, n = sizeof kinds / sizeof kinds[0];
    double mscale_all = 0;
    enum status st = ST_OK;
    CHECK(json_get_string(s->where, s->object, "type", &name)); // the older spelling
    CHECK(json_get_string(s->where, s->object, "rope_type", &name));
    while (i < n && !(strcmp(kinds[i].name, name) == 0 && kinds[i].families & (phi3 ? PHI3 : MOST)))
        i++;
    if (i == n)
        FAIL(ST_UNSUPPORTED, "%s: %s: rope type \"%s\" is not supported; %s are", s->where, s->key,
             name,
             phi3 ? "default and longrope (in older folders su or yarn)"
                  : "default, linear, dynamic, llama3, yarn, longrope and proportional");
    r->kind = kinds[i].kind;
    for (int k = 0; k < 3 && kinds[i].needed[k]; k++)
        if (r->kind == ROPE_YARN ? !json_object_get(s->object, "factor") // null: see there
                                 : !json_has(s->object, kinds[i].needed[k]))
            FAIL(ST_FORMAT, "%s: %s: %s is missing, which rope type \"%s\" needs", s->where, s->key,
                 kinds[i].needed[k], name);
    CHECK(json_get_double(s->where, s->object, "rope_theta", 1.0, 1e12, &r->theta));
    CHECK(json_get_double(s->where, s->object, "factor", 1e-3, 1e6, &r->factor));
    if (phi3) // whatever the object says
        r->original_max_positions = 4096;
    else
        CHECK(json_get_int32(s->where, s->object, "original_max_position_embeddings", 1, 1 << 30,
                             &r->original_max_positions));
    CHECK(json_get_int32(s->where, s->json, "original_max_position_embeddings", 1, 1 << 30,
                         &r->original_max_positions));
    if (c->family->query_growth && !json_has(s->object, "llama_4_scaling_beta"))
        FAIL(ST_FORMAT, "%s: %s: llama_4_scaling_beta is missing, which %s models have", s->where,
             s->key, c->family->title);
    if (c->family->query_growth)
        CHECK(json_get_double(s->where, s->object, "llama_4_scaling_beta", 0, 1e3, &r->query_beta));
    CHECK(json_get_double(s->where, s->object, "mscale_all_dim", 0, 1e6, &mscale_all));
    if (r->kind == ROPE_LLAMA3) st = read_llama3(s, r);
    if (r->kind == ROPE_YARN) st = read_yarn(s, c->max_positions, mscale_all, r);
    if (r->kind == ROPE_LONGROPE) st = read_longrope(s, c->max_positions, r);
    // of latent attention's scores, whatever else stretches positions
    if (r->kind != ROPE_DEFAULT) r->mscale_all = yarn_mscale(r->factor, mscale_all);
out:
    return st;
}

static enum status read_rope(const struct rope_source *s, const struct model_config *c,
                             int head_dim, struct rope_config *r)
{
    const double whole = c->rotary_share;
    double share = whole;
    enum status st = ST_OK;
    r->factor = r->attention_factor = r->mscale_all = 1.0;
    r->original_max_positions = c->max_positions;
    const bool all = c->family->ropes_say_all;
    if (!all) CHECK(json_get_double(s->where, s->json, "partial_rotary_factor", 0.01, 1.0, &share));
    if (s->object)
        CHECK(json_get_double(s->where, s->object, "partial_rotary_factor", 0.01, 1.0, &share));
    if (s->object && all && !json_has(s->object, "rope_theta"))
        FAIL(ST_FORMAT, "%s: %s: rope_theta is missing, which %s models have", s->where, s->key,
             c->family->title);
    r->dim = (int)(head_dim * share);
    if (share != whole && !c->family->partial_rotary)
        FAIL(ST_UNSUPPORTED, "%s: partial_rotary_factor %g: %s models rotate whole heads", s->where,
             share, c->family->title);
    if (s->object) CHECK(read_kind(s, c, r));
    r->turned = r->dim / 2;
    if (r->kind == ROPE_PROPORTIONAL || (r->kind == ROPE_DEFAULT && all)) r->dim = head_dim;
    if (r->dim < 2 || r->dim % 2 != 0)
        FAIL(ST_UNSUPPORTED,
             "%s: partial_rotary_factor %g rotates %d of %d entries of a head; an even "
             "number is needed",
             s->where, share, r->dim, head_dim);
out:
    return st;
}

// Of the layers with a window, or of those without.
static int rope_head_dim(const struct model_config *c, bool windows)
{
    int l = 0;
    while (l < c->n_layers && (c->layers[l].window > 0) != windows) l++;
    return c->layers[l < c->n_layers ? l : 0].head_dim;
}

// An object of the config; NULL where there is none, or nothing in it.
static enum status find_object(const char *where, const json_t *json, const char *key,
                               const json_t **ret)
{
    *ret = json_has(json, key) ? json_object_get(json, key) : NULL;
    if (*ret && !json_is_object(*ret))
        return status_fail(ST_FORMAT, "%s: %s must be an object", where, key);
    if (json_object_size(*ret) == 0) *ret = NULL;
    return ST_OK;
}

// rope_scaling takes the place of rope_parameters where a config has both. Families whose layers
// with a window have positions of their own write rope_parameters of both kinds of layers, and
// rope_scaling adds to those of the layers without.
enum status rope_config_read(const char *where, const json_t *json, struct model_config *c)
{
    struct rope_config *r = &c->ropes[0];
    struct rope_source s = {where, "rope_parameters", json, NULL};
    const json_t *scaling, *parameters, *part;
    json_t *both = json_object(), *silent = NULL;
    enum status st = ST_OK;
    c->n_ropes = 1;
    r->theta = c->family->rope_theta > 0 ? c->family->rope_theta : 10000.0;
    CHECK(find_object(where, json, "rope_scaling", &scaling));
    CHECK(find_object(where, json, s.key, &parameters));
    if (!parameters && c->family->ropes)
        parameters = silent = json_loads(c->family->ropes, 0, NULL);
    CHECK(find_object(where, parameters, "full_attention", &part));
    const bool parts = part || json_has(parameters, "sliding_attention");
    if (parameters && parts != c->family->window_ropes)
        FAIL(ST_FORMAT, "%s: rope_parameters %s full_attention and sliding_attention in a %s model",
             where, parts ? "have no" : "must have", c->family->title);
    if (c->family->window_ropes && scaling && !json_has(scaling, "rope_type"))
        FAIL(ST_FORMAT, "%s: rope_scaling must have a rope_type in a %s model", where,
             c->family->title);
    if (parts || !scaling) json_object_update(both, (json_t *)(parts ? part : parameters));
    if (scaling) {
        s.key = "rope_scaling";
        json_object_update(both, (json_t *)scaling);
    }
    s.object = json_object_size(both) > 0 ? both : NULL;
    CHECK(json_get_double(where, json, "rope_theta", 1.0, 1e12, &r->theta));
    st = read_rope(&s, c, rope_head_dim(c, false), r);
out:
    json_decref(both);
    json_decref(silent);
    return st;
}

enum status rope_config_read_local(const char *where, const json_t *json, struct model_config *c)
{
    const char *key = c->family->local_key;
    struct rope_config *r = &c->ropes[1];
    struct rope_source s = {where, "rope_parameters", json, NULL};
    enum status st = ST_OK;
    r->theta = c->family->local_theta;
    if (key) CHECK(json_get_double(where, json, key, 1.0, 1e12, &r->theta));
    CHECK(find_object(where, json, s.key, &s.object));
    CHECK(find_object(where, s.object, "sliding_attention", &s.object));
    CHECK(read_rope(&s, c, rope_head_dim(c, true), r));
    c->n_ropes = 2;
    for (int l = 0; l < c->n_layers; l++)
        if (c->layers[l].window > 0) c->layers[l].rope = 1;
out:
    return st;
}

// ---- the table ----------------------------------------------------------------------------------
static double llama3_frequency(const struct rope_config *r, double f)
{
    // long waves are stretched by `factor`, short ones kept, those between blended
    double wave = 2 * pi / f, original = r->original_max_positions;
    if (wave > original / r->low_freq_factor) return f / r->factor;
    if (wave < original / r->high_freq_factor) return f;
    double keep =
        (original / wave - r->low_freq_factor) / (r->high_freq_factor - r->low_freq_factor);
    return (1 - keep) * f / r->factor + keep * f;
}

// The pair whose wave turns `rotations` times over the original context.
static double yarn_pair(const struct rope_config *r, double rotations)
{
    return r->dim * log(r->original_max_positions / (rotations * 2 * pi)) / (2 * log(r->theta));
}

static double yarn_frequency(const struct rope_config *r, int i, double f)
{
    double low = yarn_pair(r, r->beta_fast), high = yarn_pair(r, r->beta_slow);
    if (r->truncate) {
        low = floor(low);
        high = ceil(high);
    }
    low = fmax(low, 0);
    high = fmin(high, r->dim - 1);
    if (low == high) high += 0.001;
    double stretched = fmin(fmax((i - low) / (high - low), 0), 1); // 0: kept, 1: divided by factor
    return f / r->factor * stretched + f * (1 - stretched);
}

double rope_frequency(const struct rope_config *r, int i, bool long_factors)
{
    double f = pow(r->theta, -2.0 * i / r->dim);
    switch (r->kind) {
    case ROPE_LINEAR:
        return f / r->factor;
    case ROPE_LLAMA3:
        return llama3_frequency(r, f);
    case ROPE_YARN:
        return yarn_frequency(r, i, f);
    case ROPE_LONGROPE:
        return f / (long_factors ? r->long_factor : r->short_factor)[i];
    case ROPE_PROPORTIONAL:
        return i < r->turned ? f / r->factor : 0;
    case ROPE_DEFAULT:
    case ROPE_DYNAMIC:
        break;
    }
    return f;
}

// Longrope: whether sequences are meant that are longer than the original ones.
static bool beyond_original(const struct model_config *config, const struct rope_config *r,
                            int n_positions)
{
    int meant = config->rope_context > 0 ? config->rope_context : n_positions;
    return meant > r->original_max_positions;
}

bool rope_describe(const struct model_config *config, char *ret, size_t size)
{
    const struct rope_config *r = &config->ropes[0];
    if (r->kind != ROPE_LONGROPE) return false;
    snprintf(ret, size,
             "longrope takes its %s factors, for contexts of up to %d tokens (short: up to %d)",
             beyond_original(config, r, 0) ? "long" : "short", config->rope_context,
             r->original_max_positions);
    return true;
}

static double query_factor(const struct rope_config *r, int position)
{
    return 1 + r->query_beta * log(1.0 + position / r->original_max_positions);
}

float *rope_table(const struct model_config *config, int index, int n_positions)
{
    const struct rope_config *r = &config->ropes[index];
    int half = r->dim / 2;
    float *table = malloc((size_t)n_positions * (size_t)half * 2 * sizeof *table);
    if (!table) return NULL;
    for (int i = 0; i < half; i++) {
        // published models were trained with f32 frequencies and f32 angles: round where they did
        float f = (float)rope_frequency(r, i, beyond_original(config, r, n_positions));
        for (int p = 0; p < n_positions; p++) {
            float angle = (float)p * f;
            float *entry = table + ((size_t)p * (size_t)half + (size_t)i) * 2;
            const double factor = r->attention_factor * query_factor(r, p);
            entry[0] = (float)(cos((double)angle) * factor);
            entry[1] = (float)(sin((double)angle) * factor);
        }
    }
    return table;
}
