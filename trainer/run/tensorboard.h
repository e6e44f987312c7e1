/* tensorboard.h: a run's metrics as a TensorBoard event file, events.out.tfevents.* in the run's
 * folder. One thread.
 *
 * Formats: TFRecord framing (tensorflow/core/lib/io/record_writer.h) around Event messages
 * (tensorflow/core/util/event.proto). */
#ifndef TRAINER_TENSORBOARD_H
#define TRAINER_TENSORBOARD_H

#include "common/base/status.h"
#include <jansson.h>
#include <stdint.h>

struct tensorboard;

// A new file in `folder`, which exists. What files of earlier processes say of the steps after
// `step` (the last one done; 0: of all steps) no longer counts for readers.
enum status tensorboard_new(const char *folder, int64_t step, struct tensorboard **ret);
void tensorboard_free(struct tensorboard *tb);

// Significant digits of a number, in metrics.jsonl and so here: a scalar is the float nearest to
// what the line says, not to what was rounded for the line.
#define METRICS_DIGITS 9

// One event: a scalar for each number of the object, at its "step". Booleans, nulls and what is not
// finite as a float are left out. ST_IO where the file cannot take it.
enum status tensorboard_write(struct tensorboard *tb, const json_t *metrics);

const char *tensorboard_path(const struct tensorboard *tb); // of its file; lives as long as tb

// CRC-32C (Castagnoli, reflected 0x82f63b78), RFC 3720 appendix B.4; and as TFRecord stores it.
uint32_t crc32c(const void *data, size_t len);
uint32_t crc32c_masked(const void *data, size_t len);

#endif
