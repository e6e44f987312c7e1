/* piece.h: a list of stretches of a text: what a pattern matches and what stands between, added
 * tokens and plain text, the words of the pre-tokenizer. Plain storage of the caller. */
#ifndef COMMON_MODEL_PIECE_H
#define COMMON_MODEL_PIECE_H

#include "common/base/status.h"

struct text_piece {
    size_t start, len; // bytes
    int id;            // whoever makes the list says what it means
};
struct piece_list {
    struct text_piece *items;
    size_t n, cap;
};
#define PIECE_LIST_INIT                                                                            \
    {                                                                                              \
        NULL, 0, 0                                                                                 \
    }
void piece_list_release(struct piece_list *list);
enum status piece_list_push(struct piece_list *list, size_t start, size_t len, int id);

#endif
