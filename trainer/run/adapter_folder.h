/* adapter_folder.h: the PEFT folder that a run which trains an adapter starts from: whatever it is,
 * it is written first and published from there, so that the first update has a snapshot like any
 * other. One thread. */
#ifndef TRAINER_ADAPTER_FOLDER_H
#define TRAINER_ADAPTER_FOLDER_H

#include "common/http/http_client.h"
#include "common/model/adapter.h"

#define ADAPTER_STATE "adapter" // in trainer_state.json: its name, by which the server restores it
// What trainer_state.json has of an adapter: by which name a server restores it (NULL: by none),
// and its base (adapter_base()). New reference; NULL: no memory.
json_t *adapter_state(const char *name, json_t *base);

// Writes the folder of the adapter as it is in the memory of `dev`, and in it, as a checkpoint has
// it, that these are the weights of the server's adapter `name` (NULL: nobody's), trained on that
// base.
enum status adapter_folder_write(const char *folder, const struct adapter *a, struct device *dev,
                                 const char *name, json_t *base);
// The same of a new one like `a`, which need not be bound: from a PEFT folder, or (NULL) by `seed`.
enum status adapter_folder_start(const char *folder, const struct adapter *a, const char *from,
                                 uint64_t seed, const char *name, json_t *base);

// What a server's adapters are of now (adapter_base()).
enum status adapter_base_ask(struct http_client *http, json_t **ret);
// adapter_base_check(), which without `exact` is a warning.
enum status adapter_base_notice(const char *folder, const json_t *base, bool exact);

#endif
