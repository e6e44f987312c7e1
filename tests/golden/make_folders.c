/* make_folders.c: makes folders that models and adapters can be loaded from out of those of
 * tests/golden and tests/golden-lora, which describe their weights (tests/support/generated.h):
 *     make_folders OUT FOLDER...
 * OUT/golden/NAME of tests/golden/NAME has the weights and a copy of all other files; one without
 * weights.txt is copied as it is. */
// SPDX-License-Identifier: Apache-2.0
#include "common/base/bytes.h"
#include "common/base/file.h"
#include "tests/support/generated.h"
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static enum status copy_file(const char *folder, const char *to, const char *name)
{
    char from[PATH_ROOM], copy[PATH_ROOM];
    struct bytes text = BYTES_INIT;
    enum status st;
    CHECK(path_put(from, folder, "%s", name));
    CHECK(path_put(copy, to, "%s", name));
    CHECK(file_read(from, 1 << 30, &text));
    st = file_write_atomic(copy, 0644, text.data, text.len);
out:
    bytes_release(&text);
    return st;
}

static enum status make(const char *folder, const char *out)
{
    const char *kind = strstr(folder, "/golden");
    char to[PATH_ROOM];
    DIR *dir = opendir(folder);
    enum status st;
    CHECK(dir ? ST_OK : status_fail(ST_NOT_FOUND, "cannot read %s", folder));
    CHECK(path_put(to, out, "%s", kind ? kind + 1 : folder));
    CHECK(file_make_folders(to));
    for (struct dirent *e = readdir(dir); e; e = readdir(dir))
        if (e->d_name[0] != '.') CHECK(copy_file(folder, to, e->d_name));
    if (file_exists_in(folder, "weights.txt")) st = generated_write(folder, to); // else it has them
out:
    if (dir) closedir(dir);
    return st;
}

int main(int argc, char **argv)
{
    for (int i = 2; i < argc; i++)
        if (make(argv[i], argv[1]) != ST_OK) {
            fprintf(stderr, "make_folders: %s\n", status_message());
            return 1;
        }
    return 0;
}
