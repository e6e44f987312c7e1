/* generated.c: see generated.h. What is rounded is rounded once, from a double that is exact, so
 * that neither order nor fusing changes a bit. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/generated.h"
#include "common/base/file.h"
#include "common/model/safetensors.h"
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// Standard deviation of the sum of four 16-bit numbers.
#define SUM_DEVIATION 37837.2268

uint64_t generated_state(const char *text)
{
    uint64_t state = 0xCBF29CE484222325u;
    for (; *text; text++) state = (state ^ (unsigned char)*text) * 0x100000001B3u;
    return state;
}

uint64_t generated_bits(uint64_t state, int64_t i)
{
    uint64_t z = state + ((uint64_t)i + 1) * 0x9E3779B97F4A7C15u;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    return z ^ z >> 31;
}

void projection_init(struct projection *p, const char *tensor)
{
    char text[240];
    snprintf(text, sizeof text, "signs/%s", tensor);
    *p = (struct projection){.state = generated_state(text)};
}

void projection_add(struct projection *p, int64_t i, double x)
{
    const uint64_t z = generated_bits(p->state, i);
    for (int j = 0; j < GENERATED_SIGNS; j++) p->sum[j] += z >> j & 1 ? -x : x;
    p->squares += x * x;
}

// ---- weights ------------------------------------------------------------------------------------

struct recipe {
    char file[64], seed[24];
    int n;
    struct tensor {
        struct safetensors_source source; // tag: this tensor
        char text[200];                   // what its bits are of
        double a, b;                      // mean and deviation, or lowest and highest
    } * tensors;
};

static enum status fill(void *context, const struct safetensors_source *source, size_t bytes,
                        void *to)
{
    const struct tensor *t = source->tag;
    const uint64_t state = generated_state(t->text);
    const int64_t n = (int64_t)(bytes / dtype_size(source->dt));
    const float scale = (float)(t->b / SUM_DEVIATION);
    (void)context;
    for (int64_t i = 0; i < n; i++) {
        const uint64_t z = generated_bits(state, i);
        const int sum = (int)(z & 0xFFFF) + (int)(z >> 16 & 0xFFFF) + (int)(z >> 32 & 0xFFFF) +
                        (int)(z >> 48) - 131070;
        const float normal = (float)(t->a + sum * (double)scale);
        if (source->dt == DT_F32)
            ((float *)to)[i] = normal;
        else if (source->dt == DT_E4M3)
            ((uint8_t *)to)[i] = e4m3_from_f32(normal);
        else
            ((uint8_t *)to)[i] =
                (uint8_t)(t->a + (double)((z >> 32) * (uint64_t)(t->b - t->a + 1) >> 32));
    }
    return ST_OK;
}

// A line of weights.txt behind the first.
static bool read_tensor(char *line, const char *seed, struct tensor *ret)
{
    char kind[8], *save, *word;
    int used;
    struct safetensors_source *s = &ret->source;
    if (sscanf(line, "%159s %7s %lf %lf%n", s->name, kind, &ret->a, &ret->b, &used) != 4)
        return false;
    s->dt = (enum dtype)dtype_from_name(kind);
    snprintf(ret->text, sizeof ret->text, "%s/%s", seed, s->name);
    for (word = strtok_r(line + used, " \n", &save); word && s->n_dims < 8;
         word = strtok_r(NULL, " \n", &save))
        if (*word == '=')
            snprintf(ret->text, sizeof ret->text, "%s", word + 1);
        else
            s->shape[s->n_dims++] = atoll(word);
    return s->n_dims > 0;
}

static enum status read_recipe(const char *path, struct recipe *r)
{
    enum status st = ST_OK;
    char line[300];
    FILE *f = fopen(path, "r");
    if (!f) return status_fail(ST_NOT_FOUND, "cannot read %s", path);
    if (!fgets(line, sizeof line, f) || sscanf(line, "%63s %23s", r->file, r->seed) != 2)
        st = status_fail(ST_FORMAT, "%s does not begin with a file and a seed", path);
    while (st == ST_OK && fgets(line, sizeof line, f)) {
        r->tensors = realloc(r->tensors, (size_t)(r->n + 1) * sizeof *r->tensors);
        memset(&r->tensors[r->n], 0, sizeof *r->tensors);
        if (!read_tensor(line, r->seed, &r->tensors[r->n++]))
            st = status_fail(ST_FORMAT, "%s, line %d: not a tensor", path, r->n + 1);
    }
    fclose(f);
    return st;
}

enum status generated_write(const char *folder, const char *to)
{
    struct recipe r = {0};
    struct safetensors_source *sources = NULL;
    char path[PATH_ROOM], file[PATH_ROOM];
    enum status st;
    CHECK(path_put(path, folder, "weights.txt"));
    CHECK(read_recipe(path, &r));
    CHECK(path_put(file, to, "%s", r.file));
    sources = calloc((size_t)r.n + 1, sizeof *sources);
    for (int i = 0; i < r.n; i++) {
        sources[i] = r.tensors[i].source;
        sources[i].tag = &r.tensors[i];
    }
    st = safetensors_write(file, sources, r.n, NULL, fill, NULL);
out:
    free(sources);
    free(r.tensors);
    return st;
}
