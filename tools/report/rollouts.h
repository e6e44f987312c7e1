/* rollouts.h: some samples of a run with their rewards, as HTML. */
#ifndef TOOLS_REPORT_ROLLOUTS_H
#define TOOLS_REPORT_ROLLOUTS_H

#include "common/base/bytes.h"
#include "tools/report/run_folder.h"

// Appends a group of samples of the first, the middle and the last step that was logged. Lines that
// cannot be read are left out.
enum status rollouts_draw(const struct run_folder *run, struct bytes *to);

// A completion of `len` bytes whose tokens that were accepted drafts stand in <mark>. accepted,
// text_offset: arrays as in rollouts/step-N.jsonl; NULL: nothing is marked. Exposed for tests.
void completion_draw(const char *text, size_t len, const json_t *accepted,
                     const json_t *text_offset, struct bytes *to);

#endif
