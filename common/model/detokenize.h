/* detokenize.h: the "decoder" section of tokenizer.json, parsed. tokenizer.h has the calls that use
 * it (detokenizer_push and others). Loaded once, then read-only. */
#ifndef COMMON_MODEL_DETOKENIZE_H
#define COMMON_MODEL_DETOKENIZE_H

#include "common/model/pattern.h"

struct decoder;

enum status decoder_parse(const char *where, const json_t *section, struct decoder **ret);
void decoder_free(struct decoder *d);

// The state of one text on its way out.
struct decoding {
    struct bytes pending; // bytes held back: an open character, or a run of byte tokens
    bool started;         // a token has been seen
    int strip_left;       // characters that may still be taken off the front
};
void decoding_reset(const struct decoder *d, struct decoding *state);
// What comes no longer depends on what has come: no token is the first, nothing is stripped.
bool decoding_is_inside(const struct decoder *d, const struct decoding *state);
void decoding_set_inside(struct decoding *state);
// One token's text; what can be given out is appended to *ret. bytes_status() tells of failures.
enum status decoding_push(const struct decoder *d, struct decoding *state, const char *token,
                          size_t len, struct bytes *ret);
enum status decoding_flush(const struct decoder *d, struct decoding *state, struct bytes *ret);

#endif
