/* tiny_adapter.h: LoRA adapters with random factors, as if they had been trained: as PEFT folders
 * for a model folder, and in memory. The same numbers give the same bytes. */
// SPDX-License-Identifier: Apache-2.0
#ifndef TESTS_SUPPORT_TINY_ADAPTER_H
#define TESTS_SUPPORT_TINY_ADAPTER_H

#include "common/model/adapter.h"

// Makes the folder where needed. config: adapter_config.json's text.
enum status tiny_adapter_write(const char *folder, const char *model, const char *config,
                               uint64_t seed);
// The config of that text; and an adapter with it, bound to zeros in memory of its own.
// Failures fail the running test.
struct adapter_config *tiny_adapter_config(const char *text);
struct adapter *tiny_adapter_new(struct device *dev, const struct weights *base, const char *text);
// Random values for both factors of one that is bound.
enum status tiny_adapter_fill(const struct adapter *a, struct device *dev, uint64_t seed);

#endif
