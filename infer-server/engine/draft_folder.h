/* draft_folder.h: whether a folder can draft for a policy, as far as its config.json tells. Any
 * thread. */
#ifndef INFER_SERVER_DRAFT_FOLDER_H
#define INFER_SERVER_DRAFT_FOLDER_H

#include "common/model/config.h"

// Reads the draft's config (the caller's to free). A draft is a token id, which must mean the same
// to both models. Where both folders have a tokenizer the tokens themselves are compared, by who
// loads them (server.c), and the draft's vocabulary may be the smaller: larger models pad theirs
// further. Where one has none, sizes must be equal and the end tokens, if both name some, must
// share one; that no more could be compared is logged. ST_MISMATCH says what differs.
enum status draft_folder_load(const char *folder, const char *policy_folder,
                              const struct model_config *policy, struct model_config **ret);

#endif
