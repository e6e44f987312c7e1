/* tandem_selector.c: see tandem_selector.h. */
// SPDX-License-Identifier: Apache-2.0
#include "common/model/tandem_selector.h"
#include <stddef.h>

const char *const tandem_selector_names[] = {"bernoulli", "chunk", "alternating",
                                             "sentence",  "word",  NULL};
