/* serve.h: the page over HTTP, with the newest data of runs that go on. */
#ifndef TOOLS_REPORT_SERVE_H
#define TOOLS_REPORT_SERVE_H

#include "tools/report/run_folder.h"

// Listens on HOST:PORT, a loopback address, says where, and serves until SIGINT or SIGTERM.
enum status report_serve(const char *listen, struct run_folder *runs, int n);

#endif
