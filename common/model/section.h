/* section.h: the sections of tokenizer.json that say how text is processed ("normalizer",
 * "decoder", ...): one part with a type, or a Sequence of parts. */
#ifndef COMMON_MODEL_SECTION_H
#define COMMON_MODEL_SECTION_H

#include "common/base/bytes.h"
#include <jansson.h>

typedef enum status (*section_visit)(void *context, const char *where, const char *type,
                                     const json_t *part);
// Calls visit for each part, in order; one Sequence within another is the same list. `name` is the
// section's, `parts` the key of a Sequence's list ("normalizers"). NULL or null: there is no part.
enum status section_each(const char *where, const char *name, const char *parts,
                         const json_t *section, section_visit visit, void *context);

// A field that is one character: its UTF-8 in *ret, ended by NUL; ST_FORMAT: it is none or more.
enum status section_character(const char *where, const char *field, const char *text, char ret[5]);

// A Metaspace's fields, which a pre-tokenizer and a decoder have alike: what stands for a space,
// and where one is put in front.
enum prepend_scheme { PREPEND_ALWAYS, PREPEND_FIRST, PREPEND_NEVER };
enum status section_metaspace(const char *where, const char *name, const json_t *part,
                              char ret_replacement[5], enum prepend_scheme *ret_scheme);

#endif
