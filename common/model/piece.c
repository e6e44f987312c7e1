/* piece.c: a list that grows by doubling. No state; any thread, each on its own lists. */
#include "common/model/piece.h"
#include <stdlib.h>

void piece_list_release(struct piece_list *list)
{
    free(list->items);
    *list = (struct piece_list)PIECE_LIST_INIT;
}

enum status piece_list_push(struct piece_list *list, size_t start, size_t len, int id)
{
    if (list->n == list->cap) {
        size_t cap = list->cap ? 2 * list->cap : 64;
        struct text_piece *items = realloc(list->items, cap * sizeof(*items));
        if (!items) return status_fail(ST_NO_MEMORY, "out of memory for pieces of text");
        list->items = items;
        list->cap = cap;
    }
    list->items[list->n++] = (struct text_piece){start, len, id};
    return ST_OK;
}
