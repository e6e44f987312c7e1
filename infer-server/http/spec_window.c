/* spec_window.c: a ring. Loop's thread. */
#include "infer-server/http/spec_window.h"
#include <stdio.h>
#include <string.h>

void spec_window_add(struct spec_window *w, const char *request_id, int choice,
                     const struct sample_telemetry *telemetry)
{
    struct spec_window_entry *e = &w->entries[w->n++ % SPEC_WINDOW_SAMPLES];
    snprintf(e->request_id, sizeof e->request_id, "%s", request_id);
    e->choice = choice;
    e->telemetry = *telemetry;
}

const struct spec_window_entry *spec_window_find(const struct spec_window *w,
                                                 const char *request_id,
                                                 const struct spec_window_entry *after)
{
    const uint64_t oldest = w->n > SPEC_WINDOW_SAMPLES ? w->n - SPEC_WINDOW_SAMPLES : 0;
    bool found = !after;
    for (uint64_t i = oldest; i < w->n; i++) {
        const struct spec_window_entry *e = &w->entries[i % SPEC_WINDOW_SAMPLES];
        if (found && strcmp(e->request_id, request_id) == 0) return e;
        found |= e == after;
    }
    return NULL;
}
