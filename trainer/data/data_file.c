/* data_file.c: what is given as data is often what a data set was fetched as. Each such thing gets
 * the line that turns it into JSONL. No state; the trainer's thread. */
#include "trainer/data/data_file.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>
#include <sys/stat.h>

#define TO_JSONL                                                                                   \
    "python3 -c 'import datasets; "                                                                \
    "datasets.load_dataset(\"%s\"%s)[\"train\"].to_json(\"train.jsonl\")'"

// "openai/gsm8k", "gsm8k": not a path that was mistyped, which would end on .jsonl or so.
static bool is_hub_name(const char *name)
{
    const char *slash = strchr(name, '/');
    return name[0] != '/' && name[0] != '.' && !(slash && strchr(slash + 1, '/')) &&
           !strstr(name, ".json") && !strchr(name, ' ');
}

enum status data_file_open(const char *path, struct file_map *ret)
{
    struct stat info;
    bool there = stat(path, &info) == 0;
    if (!there && errno == ENOENT && !file_exists(path) && is_hub_name(path))
        return status_fail(
            ST_NOT_FOUND,
            "%s: there is no such file, and no data set is fetched by name; if it is "
            "one of the Hub: " TO_JSONL,
            path, path, "");
    if (there && S_ISDIR(info.st_mode))
        return status_fail(ST_INVALID,
                           "%s is a folder; data is one file, JSONL, an example a line; of a data "
                           "set's folder: " TO_JSONL,
                           path, path, "");
    return file_map_open(path, ret);
}

bool data_file_has_mark(const char *text, size_t len)
{
    return len >= 3 && memcmp(text, "\xef\xbb\xbf", 3) == 0;
}

static enum status must_convert(const char *path, const char *is, const char *loader)
{
    char files[512];
    snprintf(files, sizeof files, ", data_files=\"%s\"", path);
    return status_fail(ST_FORMAT, "%s %s; data is JSONL, an example a line: " TO_JSONL, path, is,
                       loader, files);
}

enum status data_file_check(const char *where, const char *text, size_t len)
{
    static const struct {
        const char *magic, *words, *loader; // loader: of datasets; NULL: not for it
    } formats[] = {
        {"PAR1", "is a Parquet file", "parquet"},
        {"ARROW1", "is an Arrow file", "arrow"},
        {"\xff\xff\xff\xff", "is an Arrow file", "arrow"},
        {"\x1f\x8b", "is compressed (gzip): unpack it with gunzip", NULL},
        {"\x28\xb5\x2f\xfd", "is compressed (zstd): unpack it with unzstd", NULL},
        {"PK\x03\x04", "is a zip file: unpack it", NULL},
        {"\xff\xfe", "is UTF-16: write it as UTF-8 (iconv -f UTF-16 -t UTF-8)", NULL},
        {"\xfe\xff", "is UTF-16: write it as UTF-8 (iconv -f UTF-16 -t UTF-8)", NULL},
    };
    for (size_t i = 0; i < sizeof formats / sizeof formats[0]; i++) {
        size_t n = strlen(formats[i].magic);
        if (len < n || memcmp(text, formats[i].magic, n) != 0) continue;
        if (!formats[i].loader) return status_fail(ST_FORMAT, "%s %s", where, formats[i].words);
        return must_convert(where, formats[i].words, formats[i].loader);
    }
    const char *dot = strrchr(where, '.');
    const bool is_csv = dot && strcasecmp(dot, ".csv") == 0;
    if (data_file_has_mark(text, len)) text += 3, len -= 3;
    size_t blank = 0;
    while (blank < len && strchr(" \t\r\n", text[blank]) && text[blank]) blank++;
    if (blank < len && text[blank] == '[')
        return status_fail(
            ST_FORMAT,
            "%s is one JSON list; data is JSONL, an example a line: jq -c '.[]' %s > "
            "train.jsonl",
            where, where);
    // whatever it is called, a line of JSONL begins so
    if (is_csv && blank < len && text[blank] != '{')
        return must_convert(where, "is a CSV file", "csv");
    return ST_OK;
}
