/* statement.h: what each rank says of itself when all meet, and what must be the same for all. Pure
 * functions, but for statement_of_this_process(); any thread. */
#ifndef COMMON_RANKS_STATEMENT_H
#define COMMON_RANKS_STATEMENT_H

#include "common/base/bytes.h"
#include "common/ranks/ranks.h"
#include <jansson.h>
#include <stdint.h>

struct statement {
    int rank, size;
    int64_t pid;
    char host[65];
    char version[32];          // of the program
    char run_id[RANKS_RUN_ID]; // "": it knows none
    char layout[72];           // of the weights; "": it has none to compare
};

void statement_of_this_process(const struct ranks *who, const char *version, const char *layout,
                               struct statement *ret);
json_t *statement_to_json(const struct statement *s); // new; NULL for want of memory
// ST_INVALID, ST_FORMAT naming the field.
enum status statement_parse(const json_t *object, struct statement *ret);

// "rank 2 (host, pid 123)"
#define STATEMENT_NAME 128
const char *statement_name(const struct statement *s, char ret[STATEMENT_NAME]);
// Appends a sentence for each thing in which `s` differs from what rank 0 says.
void statement_compare(const struct statement *zero, const struct statement *s, struct bytes *to);
// Of two jobs: both know their run, and it is not the same.
bool statement_other_run(const struct statement *a, const struct statement *b);

#endif
