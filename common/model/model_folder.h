/* model_folder.h: what a Hugging Face model folder is made of, and what to say where something else
 * was given for one. Stateless; any thread. */
#ifndef COMMON_MODEL_MODEL_FOLDER_H
#define COMMON_MODEL_MODEL_FOLDER_H

#include "common/base/status.h"

// Beside config.json and the weights; all optional, copied into checkpoints. NULL-ended.
extern const char *const model_folder_files[];

// `needed` (config.json, tokenizer.json) is in the folder, and none of the files above is a link
// that leads nowhere. Else a sentence that says what is needed: for a name of the Hub, a file, a
// folder of another kind, a run's for one, a cut-off download.
enum status model_folder_check(const char *folder, const char *needed);
// The same where a config.json by itself is wanted: a folder or a name of the Hub is none.
enum status model_config_path_check(const char *path);

#endif
