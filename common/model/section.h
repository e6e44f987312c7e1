/* section.h: the sections of tokenizer.json that say how text is processed ("normalizer",
 * "decoder", ...): one part with a type, or a Sequence of parts. */
#ifndef COMMON_MODEL_SECTION_H
#define COMMON_MODEL_SECTION_H

#include "common/base/status.h"
#include <jansson.h>

typedef enum status (*section_visit)(void *context, const char *where, const char *type,
                                     const json_t *part);
// Calls visit for each part, in order; one Sequence within another is the same list. `name` is the
// section's, `parts` the key of a Sequence's list ("normalizers"). NULL or null: there is no part.
enum status section_each(const char *where, const char *name, const char *parts,
                         const json_t *section, section_visit visit, void *context);

#endif
