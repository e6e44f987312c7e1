/* tiny_adapter.h: writes a PEFT folder of a LoRA adapter for a model folder, with random factors,
 * as if it had been trained. The same numbers give the same bytes. */
#ifndef TESTS_SUPPORT_TINY_ADAPTER_H
#define TESTS_SUPPORT_TINY_ADAPTER_H

#include "common/model/adapter.h"

// Makes the folder where needed. config: adapter_config.json's text.
enum status tiny_adapter_write(const char *folder, const char *model, const char *config,
                               uint64_t seed);
// Random values for both factors of one that is bound.
enum status tiny_adapter_fill(const struct adapter *a, struct device *dev, uint64_t seed);

#endif
