/* model_folder.h: what a Hugging Face model folder is made of and how its files are
 * read, and what to say where something else
 * was given for one. Stateless; any thread. */
#ifndef COMMON_MODEL_MODEL_FOLDER_H
#define COMMON_MODEL_MODEL_FOLDER_H

#include "common/base/bytes.h"
#include <jansson.h>

// Beside config.json and the weights; all optional, copied into checkpoints. NULL-ended.
extern const char *const model_folder_files[];

// Of a model folder's file, or of what a GGUF file given in a folder's place says instead: whether
// it is there, its content, which replaces the buffer's, and its JSON, of one that is not there
// NULL.
bool model_file_exists(const char *folder, const char *name);
enum status model_file_read(const char *folder, const char *name, size_t max, struct bytes *ret);
enum status model_file_read_json(const char *folder, const char *name, size_t max, json_t **ret);

// `needed` (config.json, tokenizer.json) is in the folder, and none of the files above is a link
// that leads nowhere. Else a sentence that says what is needed: for a name of the Hub, a file, a
// folder of another kind, a run's for one, a cut-off download.
enum status model_folder_check(const char *folder, const char *needed);
// The same where a config.json by itself is wanted: a folder or a name of the Hub is none.
enum status model_config_path_check(const char *path);

#endif
