/* report_server.c: its port is that of its log. */
#include "tests/support/report_server.h"

#define START_MS 120000
#define LOOK_MS  20

int report_server_start(struct test_child *child, const char *log, const char *a, const char *b)
{
    const char *const argv[] = {
        test_binary("cw-report"), "--serve", "--listen", "127.0.0.1:0", a, b, NULL};
    int port = 0;
    test_spawn(child, log, argv);
    test_wait_for_file(log, START_MS, child);
    for (int i = 0; i < START_MS / LOOK_MS && port == 0 && test_running(child); i++) {
        char *text = test_read(log);
        const char *url = strstr(text, "http://127.0.0.1:");
        if (url && strchr(url, '\n')) sscanf(url, "http://127.0.0.1:%d/", &port);
        if (port == 0) clock_sleep_ms(LOOK_MS);
    }
    if (port == 0) fail_msg("cw-report --serve does not say where: %s", log);
    return port;
}

void report_server_stop(struct test_child *child)
{
    test_kill(child, SIGTERM);
    assert_int_equal(test_wait(child, START_MS), 0);
}
