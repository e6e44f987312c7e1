/* page.h: a run's report: one HTML page that needs nothing besides itself. */
#ifndef TOOLS_REPORT_PAGE_H
#define TOOLS_REPORT_PAGE_H

#include "common/base/bytes.h"
#include "tools/report/run_folder.h"

// Appends the whole page. Marks the run's series as `claimed` as they are put on it.
enum status page_draw(struct run_folder *run, struct bytes *to);

#endif
