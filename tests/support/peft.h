/* peft.h: PEFT as an oracle (tests/clients/peft_logits.py), in a Python that has it. Failures fail
 * the running test. One thread. */
// SPDX-License-Identifier: Apache-2.0
#ifndef TESTS_SUPPORT_PEFT_H
#define TESTS_SUPPORT_PEFT_H

#include <stdint.h>

// Skips the running test, with the reason, where there is no such Python.
const char *peft_python(void);
// Whether logits (n, vocab) of n ids are those of PEFT with that model's and that adapter's folder,
// but for rounding.
void peft_agrees(const char *python, const char *model, const char *adapter, const int32_t *ids,
                 int n, const float *logits, int vocab);

#endif
