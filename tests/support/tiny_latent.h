/* tiny_latent.h: writes a small model folder with latent attention (DeepSeek-V3) and random
 * weights: config.json and model.safetensors, no tokenizer. The same numbers give the same bytes.
 */
// SPDX-License-Identifier: Apache-2.0
#ifndef TESTS_SUPPORT_TINY_LATENT_H
#define TESTS_SUPPORT_TINY_LATENT_H

#include "common/base/status.h"

// Two layers, the second with experts in two groups, of which one may be picked from. The folder
// must be there.
enum status tiny_latent_write(const char *folder, int heads, int vocab);
// The same with a layer that predicts further tokens, in a folder of the test's own.
const char *tiny_mtp_folder(int vocab);

#endif
