/* checks.h: what an engine is started with and asked for, checked before anything is done about it.
 * No state; any thread. */
#ifndef INFER_SERVER_CHECKS_H
#define INFER_SERVER_CHECKS_H

#include "common/model/config.h"
#include "infer-server/engine/engine.h"

// Fills in the defaults. ST_INVALID names the option.
enum status checks_options(struct engine_options *options);
// Reads the draft's config (the caller's to free). A draft is a token id, which must mean the same
// to both models. Where both folders have a tokenizer the tokens themselves are compared, by who
// loads them (server.c), and the draft's vocabulary may be the smaller: larger models pad theirs
// further. Where one has none, sizes must be equal and the end tokens, if both name some, must
// share one; that no more could be compared is logged. ST_MISMATCH says what differs.
enum status checks_draft_folder(const char *folder, const char *policy_folder,
                                const struct model_config *policy, struct model_config **ret);
// ST_INVALID names the field: what a model and an engine like these can never do.
enum status checks_request(const struct engine_options *options, const struct model_config *config,
                           const struct request *r);

#endif
