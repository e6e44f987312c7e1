/* test_manual.c: every command of cw-trainer has a page of the manual, with a title, and a word in
 * bash's completion. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/support.h"

// The line of a file that begins with, after blanks, `start`.
static char *line_of(const char *name, const char *start)
{
    char *text = test_read(test_path(test_root(), name)), *next = text;
    for (char *line; (line = strsep(&next, "\n"));) {
        line += strspn(line, " ");
        if (strncmp(line, start, strlen(start)) != 0) continue;
        return line;
    }
    fail_msg("%s: no line \"%s\"", name, start);
    return NULL;
}

TEST(each_command)
{
    char *pages = line_of("Makefile", "PAGES "),
         *words = line_of("packaging/completion.bash", "choices=\"train"), name[16];
    int n = 0;
    char *next = test_output(0, OPTIONS(test_binary("cw-trainer"), "--help"));
    for (char *line; (line = strsep(&next, "\n"));) {
        if (strncmp(line, "  ", 2) != 0 || sscanf(line, " %15[a-z]", name) != 1) continue;
        assert_contains(pages, name);
        assert_contains(words, name);
        line_of("packaging/make-man", test_text("cw-trainer-%s) echo \"", name));
        n++;
    }
    assert_true(n >= 6);
}
