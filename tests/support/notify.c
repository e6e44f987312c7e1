/* notify.c: see notify.h. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/notify.h"
#include "tests/support/support.h"

#include <sys/socket.h>
#include <sys/un.h>

int notify_open(void)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    const char *path = test_path(test_folder(), "notify");
    snprintf(address.sun_path, sizeof address.sun_path, "%s", path);
    const int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    assert_int_equal(bind(fd, (struct sockaddr *)&address, sizeof address), 0);
    setenv("NOTIFY_SOCKET", path, 1);
    return fd;
}

bool notify_heard(int fd, const char *word, int ms)
{
    const int64_t deadline = clock_deadline_ns(ms);
    char text[2048];
    while (clock_now_ns() < deadline) {
        const ssize_t n = recv(fd, text, sizeof text - 1, MSG_DONTWAIT);
        if (n <= 0) {
            clock_sleep_ms(10);
            continue;
        }
        text[n] = 0;
        if (strstr(text, word)) return true;
    }
    return false;
}
