/* loaded.h: a model folder's weights in the test's own process, on the CPU, and folders whose
 * tensors are another's with changes. Failures fail the running test. One thread. */
// SPDX-License-Identifier: Apache-2.0
#ifndef TESTS_SUPPORT_LOADED_H
#define TESTS_SUPPORT_LOADED_H

#include "common/model/safetensors.h"
#include "common/model/weights.h"

struct loaded {
    struct device *dev;
    struct model_config *config;
    struct weights *weights; // in memory of their own
};

// The folder's config alone; or with weights of zeros as it has them; or with the folder's own.
// What weights_load() says is returned.
void loaded_config(const char *folder, struct loaded *ret);
void loaded_plan(const char *folder, enum dtype dt, struct loaded *ret);
enum status loaded_open(const char *folder, enum dtype dt, struct loaded *ret);
void loaded_zeros(struct loaded *m, enum dtype dt); // behind loaded_config()
void loaded_close(struct loaded *m);

// The same, closed with the test; a folder's config alone; its tensors, or those of a file.
struct model_config *config_of(const char *folder);
struct safetensors *tensors_of(const char *folder);
struct safetensors *tensors_of_file(const char *path);
struct device *test_cpu(void);
struct loaded *loaded_planned(const char *folder, enum dtype dt);
struct loaded *loaded_of(const char *folder, enum dtype dt);

// What writes the tensors of a file that is open, their data as tags; `ret` has room for all.
int tensor_sources(const struct safetensors *set, struct safetensors_source *ret);
// Writes FOLDER/model.safetensors; a tensor's tag is its data.
void tensors_write(const char *folder, const struct safetensors_source *sources, int n);

#endif
