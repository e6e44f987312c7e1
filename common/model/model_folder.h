/* model_folder.h: what a Hugging Face model folder is made of and how its files are
 * read, and what to say where something else
 * was given for one. Stateless; any thread. */
// SPDX-License-Identifier: Apache-2.0
#ifndef COMMON_MODEL_MODEL_FOLDER_H
#define COMMON_MODEL_MODEL_FOLDER_H

#include "common/base/bytes.h"
#include "common/base/file.h"
#include <jansson.h>

// Beside config.json and the weights; all optional, copied into checkpoints. NULL-ended.
extern const char *const model_folder_files[];
#define MODEL_TEMPLATES_FOLDER "additional_chat_templates" // likewise

// Of a model folder's file, or of what a GGUF file given in a folder's place says instead: whether
// it is there, its content, which replaces the buffer's, and its JSON, of one that is not there
// NULL.
bool model_file_exists(const char *folder, const char *name);
enum status model_file_read(const char *folder, const char *name, size_t max, struct bytes *ret);
enum status model_file_read_json(const char *folder, const char *name, size_t max, json_t **ret);

// What was given as a model, as a path: a name of the Hub that is no folder here (ORG/NAME) is
// looked for in its local cache ($HF_HUB_CACHE, $HF_HOME/hub, ~/.cache/huggingface/hub), at the
// revision of refs/main. ST_NOT_FOUND says where it was looked for; all else is given back as it
// is.
enum status model_folder_find(const char *given, char ret[PATH_ROOM]);
// By what a folder is known: its last part, or of a revision in the Hub's cache ORG/NAME.
void model_folder_name(const char *folder, char *ret, size_t size);
// `needed` (config.json, tokenizer.json) is in the folder, and none of the files above is a link
// that leads nowhere. Else a sentence that says what is needed: for a name of the Hub, a file, a
// folder of another kind, a run's for one, a cut-off download.
enum status model_folder_check(const char *folder, const char *needed);
// The same where a config.json by itself is wanted: a folder or a name of the Hub is none.
enum status model_config_path_check(const char *path);
// Whether --out may be written: what is there is replaced on request only, and only if it holds no
// other files than models written here do, and none of `read`, n paths or NULLs.
enum status model_folder_check_out(const char *out, bool overwrite, const char *const *read, int n);

#endif
