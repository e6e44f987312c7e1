/* fuzz_sample_request.c: any two lines as an asample of the Tinker API and as what the server
 * answers to it: refused in a sentence, or numbers that the loop and the protobuf answer
 * may rely on. */
// SPDX-License-Identifier: Apache-2.0
#include "common/base/json.h"
#include "trainer/serve/request.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void check_asked(const struct sample_request *r, const struct trained_model_info *model)
{
    if (r->n < 1 || r->prompt.n < 1 || !r->sampling || !r->samples) abort();
    if (r->last_n < 0 || r->last_n > r->prompt.n || r->top < 0) abort();
    for (int i = 0; i < r->prompt.n; i++)
        if (r->prompt.ids[i] < 0 || r->prompt.ids[i] >= model->limits.vocab) abort();
}

// All that an answer is made of is there, to be read to its end.
static void check_sample(const struct sample_request *r)
{
    volatile float sum = 0;
    const struct completion *s = &r->samples[0];
    for (int i = 0; i < s->n; i++) sum += s->logprobs[i] + (float)s->ids[i];
    for (size_t i = 0; i < r->scores.len; i++) sum += (float)r->scores.data[i];
    (void)sum;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    const struct trained_model_info model = {.limits = {.vocab = 300}, .max_context = 64};
    const char *text = (const char *)data, *cut = size ? memchr(text, '\n', size) : NULL;
    const size_t first = cut ? (size_t)(cut - text) : size;
    struct sample_request r = {0};
    json_t *body = NULL, *line = NULL;
    if (json_parse("fuzz", text, first, &body) == ST_OK &&
        sample_request_parse(body, &model, &r) == ST_OK) {
        check_asked(&r, &model);
        if (cut && json_parse("fuzz", cut + 1, size - first - 1, &line) == ST_OK &&
            sample_request_read(&r, 0, line) == ST_OK)
            check_sample(&r);
    }
    sample_request_release(&r.request);
    json_decref(line);
    json_decref(body);
    return 0;
}
