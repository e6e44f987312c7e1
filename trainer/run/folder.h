/* folder.h: the folder of a run, of whichever command it is: made and locked, and the two files
 * that say what the run is: config.json, its options, and run.json, one entry for each start of a
 * process. The main thread; logs. */
#ifndef TRAINER_FOLDER_H
#define TRAINER_FOLDER_H

#include "common/base/options.h"
#include "common/base/status.h"
#include "kernels/device.h"
#include "trainer/run/train_ranks.h"

#include <jansson.h>

#define FOLDER_ROOM 512

// Makes --run-dir's folder (NULL: runs/DATE-TIME), and keeps other trainers out until *ret_lock is
// closed. A model's folder is refused.
enum status folder_open(const char *wanted, char ret_folder[FOLDER_ROOM], int *ret_lock);
// What rank 0 has opened, on every rank: its folder, and *latest, a checkpoint's or NULL, which is
// the caller's to free.
enum status folder_agree(const struct train_ranks *ranks, char folder[FOLDER_ROOM], char **latest);
// The options that were not given are those of its config.json, where it has one; says which.
// forget (may be NULL) takes away what is not to be taken over.
enum status folder_take_options(struct option_set *set, const char *folder,
                                void (*forget)(const void *config, json_t *recorded), void *config);
// config.json, without what is of a start and not of the run; takes the reference. resumed: says
// which options are others than before.
enum status folder_write_options(const char *folder, bool resumed, json_t *options);
// What every entry of run.json has. New reference; NULL: no memory.
json_t *folder_start(int64_t step, struct device *dev, enum dtype dt);
// Nothing where the text is NULL, or cannot stand in JSON.
void folder_put_text(json_t *object, const char *key, const char *text);
// Adds an entry, and takes its reference.
enum status folder_add_start(const char *folder, bool resumed, json_t *start);

#endif
