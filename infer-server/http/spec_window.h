/* spec_window.h: what was drafted and accepted for the samples that ended last, for
 * GET /v1/spec_decode_stats?id=ID. The oldest gives its place to the next: nothing else is kept of
 * a finished request. Loop's thread. */
#ifndef INFER_SERVER_SPEC_WINDOW_H
#define INFER_SERVER_SPEC_WINDOW_H

#include "infer-server/engine/engine.h"

#define SPEC_WINDOW_SAMPLES 1024
#define REQUEST_NAME_BYTES  129 // what a client may call its request
#define REQUEST_ID_BYTES    144 // "chatcmpl-NAME"

struct spec_window_entry {
    char request_id[REQUEST_ID_BYTES];
    int choice; // over all prompts of the request
    struct sample_telemetry telemetry;
};
struct spec_window { // all zero: empty
    struct spec_window_entry entries[SPEC_WINDOW_SAMPLES];
    uint64_t n; // ever added
};

void spec_window_add(struct spec_window *w, const char *request_id, int choice,
                     const struct sample_telemetry *telemetry);
// The next of the request's samples after `after` (NULL: the first), in the order they ended; NULL:
// no more.
const struct spec_window_entry *spec_window_find(const struct spec_window *w,
                                                 const char *request_id,
                                                 const struct spec_window_entry *after);

#endif
