/* spec_counters.c: counters of speculative decoding, read from Prometheus' text format, under
 * vLLM's names (vllm/v1/spec_decode/metrics.py). Stateless. */
#include "trainer/rollout/spec_counters.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define PREFIX     "vllm:spec_decode_"
#define TIMEOUT_MS 10000

// The value of a label inside "{...}" as a position; -1: there is none.
static int position_of(const char *labels, size_t len)
{
    static const char key[] = "position=\"";
    const char *at = memmem(labels, len, key, sizeof key - 1);
    if (!at) return -1;
    at += sizeof key - 1;
    char *end;
    long position = strtol(at, &end, 10);
    return end == at || *end != '"' || position < 0 || position >= SPEC_MAX_POSITIONS
               ? -1
               : (int)position;
}

static void take_line(struct spec_counters *c, const char *line, size_t len)
{
    if (len <= sizeof PREFIX || memcmp(line, PREFIX, sizeof PREFIX - 1) != 0) return;
    const char *name = line + sizeof PREFIX - 1, *end = line + len;
    size_t name_len = strcspn(name, "{ \n");
    const char *labels = name + name_len, *value = labels;
    if (*labels == '{') {
        const char *close = memchr(labels, '}', (size_t)(end - labels));
        if (!close) return;
        value = close + 1;
    }
    char *after;
    double x = strtod(value, &after);
    if (after == value || after > end || !isfinite(x)) return;
    const struct {
        const char *name;
        double *sum;
    } counters[] = {
        {"num_drafts_total", &c->num_drafts},
        {"num_draft_tokens_total", &c->num_draft_tokens},
        {"num_accepted_tokens_total", &c->num_accepted_tokens},
    };
    for (size_t i = 0; i < sizeof counters / sizeof *counters; i++)
        if (strlen(counters[i].name) == name_len && !memcmp(counters[i].name, name, name_len)) {
            *counters[i].sum += x;
            c->present = true;
        }
    static const char per_position[] = "num_accepted_tokens_per_pos_total";
    if (name_len != sizeof per_position - 1 || memcmp(per_position, name, name_len) != 0) return;
    int position = position_of(labels, (size_t)(value - labels));
    if (position < 0) return;
    c->accepted_per_position[position] += x;
    if (position >= c->n_positions) c->n_positions = position + 1;
}

void spec_counters_parse(const char *text, struct spec_counters *ret)
{
    struct spec_counters c = {0};
    while (*text) {
        size_t len = strcspn(text, "\n");
        take_line(&c, text, len);
        text += len + (text[len] == '\n');
    }
    *ret = c;
}

enum status spec_counters_scrape(struct http_client *http, const char *server,
                                 struct spec_counters *ret)
{
    struct bytes body = BYTES_INIT;
    const struct http_call call = {.server = server, .path = "/metrics", .timeout_ms = TIMEOUT_MS};
    enum status st = http_perform(http, &call, &body);
    if (st == ST_OK)
        spec_counters_parse(bytes_text(&body), ret);
    else if (st != ST_PEER_GONE && st != ST_NO_MEMORY) { // it answers, but not this
        *ret = (struct spec_counters){0};
        st = ST_OK;
    }
    bytes_release(&body);
    return st;
}

struct spec_counters spec_counters_between(const struct spec_counters *before,
                                           const struct spec_counters *after)
{
    struct spec_counters c = *after;
    c.num_drafts -= before->num_drafts;
    c.num_draft_tokens -= before->num_draft_tokens;
    c.num_accepted_tokens -= before->num_accepted_tokens;
    for (int i = 0; i < SPEC_MAX_POSITIONS; i++)
        c.accepted_per_position[i] -= before->accepted_per_position[i];
    c.present = before->present && after->present && c.num_drafts >= 0 && c.num_draft_tokens >= 0 &&
                c.num_accepted_tokens >= 0;
    return c;
}

void spec_counters_add(struct spec_counters *sum, const struct spec_counters *more)
{
    if (!more->present) return;
    sum->present = true;
    sum->num_drafts += more->num_drafts;
    sum->num_draft_tokens += more->num_draft_tokens;
    sum->num_accepted_tokens += more->num_accepted_tokens;
    if (more->n_positions > sum->n_positions) sum->n_positions = more->n_positions;
    for (int i = 0; i < more->n_positions; i++)
        sum->accepted_per_position[i] += more->accepted_per_position[i];
}

double spec_acceptance_length(const struct spec_counters *c)
{
    return c->num_drafts > 0 ? 1 + c->num_accepted_tokens / c->num_drafts : NAN;
}

double spec_acceptance_rate(const struct spec_counters *c)
{
    return c->num_draft_tokens > 0 ? c->num_accepted_tokens / c->num_draft_tokens : NAN;
}

double spec_acceptance_at(const struct spec_counters *c, int position)
{
    return c->num_drafts > 0 ? c->accepted_per_position[position] / c->num_drafts : NAN;
}
