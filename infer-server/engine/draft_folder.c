/* draft_folder.c: holds a draft model's config against its policy's. A draft of other tokens is not
 * wrong, verification sees to that; it only never saves a step, and says nothing. No state. */
#include "infer-server/engine/draft_folder.h"
#include "common/base/file.h"
#include "common/base/log.h"

#include <stdlib.h>

static bool has_tokenizer(const char *folder)
{
    char *path = path_join(folder, "tokenizer.json");
    bool there = path && file_exists(path);
    free(path);
    return there;
}

// None in common, though both have some.
static bool ends_differ(const struct model_config *a, const struct model_config *b)
{
    for (int i = 0; i < a->n_eos; i++)
        for (int k = 0; k < b->n_eos; k++)
            if (a->eos_ids[i] == b->eos_ids[k]) return false;
    return a->n_eos > 0 && b->n_eos > 0;
}

static enum status check_sizes(const char *folder, const struct model_config *draft,
                               const char *policy_folder, const struct model_config *policy)
{
    const char *bare = !has_tokenizer(folder)          ? folder
                       : !has_tokenizer(policy_folder) ? policy_folder
                                                       : NULL;
    if (draft->vocab_size > policy->vocab_size)
        return status_fail(ST_MISMATCH,
                           "--draft %s: its vocabulary of %d tokens is larger than the %d of %s; a "
                           "draft model must be of the same tokenizer",
                           folder, draft->vocab_size, policy->vocab_size, policy_folder);
    if (!bare) return ST_OK;
    if (draft->vocab_size != policy->vocab_size)
        return status_fail(
            ST_MISMATCH,
            "--draft %s: its vocabulary of %d tokens is not the %d of %s, and %s has "
            "no tokenizer.json to compare them by; a draft model must be of the same "
            "tokenizer: if it is, copy tokenizer.json there",
            folder, draft->vocab_size, policy->vocab_size, policy_folder, bare);
    if (ends_differ(draft, policy))
        return status_fail(ST_MISMATCH,
                           "--draft %s: it ends texts with token %d, %s with %d, and %s has no "
                           "tokenizer.json to compare them by; a draft model must be of the same "
                           "tokenizer: if it is, copy tokenizer.json there",
                           folder, draft->eos_ids[0], policy_folder, policy->eos_ids[0], bare);
    log_info("%s has no tokenizer.json: draft model and policy are compared by the size of the "
             "vocabulary (%d) and end tokens alone",
             bare, draft->vocab_size);
    return ST_OK;
}

enum status draft_folder_load(const char *folder, const char *policy_folder,
                              const struct model_config *policy, struct model_config **ret)
{
    struct model_config *draft = NULL;
    enum status st = status_context(model_config_load(folder, &draft), "--draft");
    if (st == ST_OK) st = check_sizes(folder, draft, policy_folder, policy);
    if (st == ST_OK)
        *ret = draft;
    else
        model_config_free(draft);
    return st;
}
