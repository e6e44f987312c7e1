/* page.h: the report as one HTML page that needs nothing besides itself, or, where it is served,
 * its server. */
#ifndef TOOLS_REPORT_PAGE_H
#define TOOLS_REPORT_PAGE_H

#include "common/base/bytes.h"
#include "tools/report/run_folder.h"

// Appends the page with all data of n runs, and of their samples' texts at most so many bytes; of
// more, those of steps spread evenly.
enum status page_put(const struct run_folder *runs, int n, int64_t max_texts, struct bytes *to);
// The page without data, which asks its server for that of n runs.
enum status page_put_live(int n, struct bytes *to);

// Content of a <script> that is no program: '<' of JSON, which stands in its strings only, as
// "\u003c", so that nothing in it ends the element.
void page_put_json(struct bytes *to, const char *json, size_t len);

// tools/report/page/ as the build put it here.
extern const char report_style[], report_body[], report_script[];

#endif
