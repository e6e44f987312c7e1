/* tandem_selector.c: see tandem_selector.h. */
#include "common/model/tandem_selector.h"
#include <stddef.h>

const char *const tandem_selector_names[] = {"bernoulli", "chunk", "alternating",
                                             "sentence",  "word",  NULL};
