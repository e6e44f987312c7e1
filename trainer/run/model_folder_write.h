/* model_folder_write.h: writes a Hugging Face folder that any loader opens, whole or not at all:
 * under a temporary name, synced, and renamed. One thread. */
#ifndef TRAINER_MODEL_FOLDER_WRITE_H
#define TRAINER_MODEL_FOLDER_WRITE_H

#include "common/base/file.h"
#include "common/model/weights.h"

// Writes a Hugging Face folder at `folder`, replacing one that is there. Tokenizer and generation
// files are copied from source_folder (NULL: none). extra (may be NULL) adds files to the temporary
// folder before it is renamed.
enum status model_folder_write(const char *folder, struct device *dev,
                               const struct weights *weights, enum dtype as,
                               const char *source_folder,
                               enum status (*extra)(void *context, const char *temporary),
                               void *context);

// The same of a folder of any kind, which fill() fills: it is given an empty one beside it.
enum status folder_write(const char *folder,
                         enum status (*fill)(void *context, const char *temporary), void *context);

// "a/b" -> "a/.b.PID.new": beside it, so that a rename stays within one file system.
enum status path_beside(const char *path, char ret[PATH_ROOM]);

#endif
