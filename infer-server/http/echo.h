/* echo.h: a prompt as an answer gives it back ("echo"): its text, and where in it each token
 * begins. Loop's thread. */
#ifndef INFER_SERVER_ECHO_H
#define INFER_SERVER_ECHO_H

#include "infer-server/http/api.h"

struct echo {
    struct bytes text;
    int *text_at; // (prompt's ids) characters of text before each token
    int chars;    // of text
};

// The text as it was sent; of a prompt sent as ids, that of its tokens. tokenizer NULL: no text.
enum status echo_init(const struct api_prompt *prompt, const struct tokenizer *tokenizer,
                      bool skip_special, struct echo *ret);
void echo_release(struct echo *e);

int count_characters(const char *text, size_t len); // of UTF-8

#endif
