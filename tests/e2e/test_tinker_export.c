/* test_tinker_export.c: checkpoints that are taken along: saved for others, their URLs, which need
 * no key and end, archives, and what is not given out. With the SDK, where there is one:
 * tests/clients/tinker_export.py says what it does. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/tinker_pair.h"

#include <fcntl.h>

static struct tinker_pair pair;
static char session[128];
static struct tinker_run run;

static void start(void)
{
    tinker_pair_start(&pair, NULL, OPTIONS("--max-adapters", "2", "--max-lora-rank", "8"), NULL);
}

static void export(void)
{
    char path[256];
    tinker_run_save(&run, "save_weights_external", "out", path);
}

// The path of a URL of this server.
static const char *path_of(const json_t *url)
{
    char before[64];
    snprintf(before, sizeof before, "http://localhost");
    const char *text = json_string_value(url);
    assert_non_null(text);
    assert_contains(text, before);
    return text + strlen(before);
}

static json_t *urls_of(const char *part, const char *what)
{
    char path[256];
    snprintf(path, sizeof path, "training_runs/%s/checkpoints/%s/%s", run.id, part, what);
    return tinker_get(&pair.server, path, 200);
}

static void fetch(const char *path, int status, struct wire_answer *ret)
{
    tinker_request(&pair.server, "GET", path, NULL, NULL, ret);
    if (ret->status != status)
        fail_msg("%s: status %d, not %d: %s", path, ret->status, status, bytes_text(&ret->body));
}

static void refused(const char *path, const char *why)
{
    struct wire_answer a;
    fetch(path, 403, &a);
    assert_contains(bytes_text(&a.body), why);
}

// A URL whose digit at `at`, counted from behind "files/", is another one.
static void refused_changed(const char *path, size_t at, const char *why)
{
    char *copy = strdup(path), *digit = strstr(copy, "files/") + strlen("files/") + at;
    *digit = *digit == '1' ? '2' : '1';
    refused(copy, why);
    free(copy);
}

TEST(test_urls)
{
    start();
    run = tinker_whole(&pair.server, session);
    export();
    json_t *answer = urls_of("external_weights/out", "external_weights_urls"), *url;
    const json_t *urls = json_object_get(answer, "urls");
    assert_non_null(json_object_get(answer, "expires"));
    const char *name,
        *folder = test_path(test_path(pair.server.runs, run.id), "external_weights/out");
    json_object_foreach ((json_t *)urls, name, url) {
        struct wire_answer a;
        char *on_disk = test_read(test_path(folder, name)), length[64];
        fetch(path_of(url), 200, &a);
        snprintf(length, sizeof length, "Content-Length: %zu\r\n", a.body.len);
        assert_contains(bytes_text(&a.head), length);
        assert_memory_equal(bytes_text(&a.body), on_disk, a.body.len);
    }
    assert_non_null(json_object_get(urls, "config.json"));
    const char *path = path_of(json_object_get(urls, "config.json"));
    refused_changed(path, 0, "ask for another");  // the time
    refused_changed(path, 20, "ask for another"); // the signature
    char other[512];
    snprintf(other, sizeof other, "%.*s/model.safetensors", (int)(strrchr(path, '/') - path), path);
    refused(other, "ask for another");
    snprintf(other, sizeof other, "%.*s/../../run.json", (int)(strrchr(path, '/') - path), path);
    refused(other, "ask for another");
    export();
    refused(path, "saved anew");
    json_decref(answer);
    tinker_pair_stop(&pair);
}

// Tar reads it; the optimizer's state is not in it.
TEST(test_archive)
{
    struct wire_answer a;
    char path[256];
    start();
    run = tinker_whole(&pair.server, session);
    tinker_run_save(&run, "save_weights", "state", path);
    json_t *answer = urls_of("weights/state", "archive");
    fetch(path_of(json_object_get(answer, "url")), 200, &a);
    const char *to = test_folder(), *file = test_path(to, "archive.tar");
    const char *from = test_path(test_path(pair.server.runs, run.id), "weights/state");
    test_write(file, bytes_text(&a.body), a.body.len);
    assert_exit(0, test_command(test_path(test_folder(), "log"), 10000,
                                OPTIONS("tar", "-C", to, "-xf", file)));
    test_same_file(from, to, "config.json");
    test_same_file(from, to, "model.safetensors");
    assert_int_equal(access(test_path(from, "trainer"), F_OK), 0);
    assert_int_not_equal(access(test_path(to, "trainer"), F_OK), 0);
    json_decref(answer);
    tinker_pair_stop(&pair);
}

static int64_t peak_kib(void)
{
    char path[64], line[256];
    long kib = 0;
    snprintf(path, sizeof path, "/proc/%d/status", (int)pair.server.child.pid);
    FILE *f = fopen(path, "r");
    assert_non_null(f);
    while (fgets(line, sizeof line, f)) sscanf(line, "VmHWM: %ld", &kib);
    fclose(f);
    assert_true(kib > 0);
    return kib;
}

static int64_t drain(const char *path)
{
    static char buffer[1 << 16];
    char request[768];
    int64_t n_bytes = 0;
    ssize_t n;
    int fd = daemon_connect_tcp(pair.server.port);
    assert_true(fd >= 0);
    snprintf(request, sizeof request, "GET %s HTTP/1.0\r\nHost: localhost\r\n\r\n", path);
    assert_true(daemon_send(fd, request, strlen(request)));
    while ((n = read(fd, buffer, sizeof buffer)) > 0) n_bytes += n;
    close(fd);
    return n_bytes;
}

// A file larger than what serving it takes.
TEST(test_large_file)
{
    const int64_t size = (int64_t)512 << 20;
    start();
    run = tinker_whole(&pair.server, session);
    export();
    const char *folder = test_path(test_path(pair.server.runs, run.id), "external_weights/out");
    int fd = open(test_path(folder, "model.safetensors"), O_WRONLY);
    assert_true(fd >= 0);
    assert_int_equal(ftruncate(fd, size), 0);
    close(fd);
    json_t *answer = urls_of("external_weights/out", "external_weights_urls");
    const int64_t before = peak_kib();
    const json_t *url = json_object_get(json_object_get(answer, "urls"), "model.safetensors");
    assert_true(drain(path_of(url)) > size);
    assert_true(peak_kib() - before < 16 << 10);
    json_decref(answer);
    tinker_pair_stop(&pair);
}

static void run_script(const char *python)
{
    const char *const checks[] = {"whole", "adapter"};
    for (int i = 0; i < 2; i++) { // older SDKs do not tell when they end
        start();
        tinker_script(&pair.server, python, "tests/clients/tinker_export.py", checks[i]);
        tinker_pair_stop(&pair);
    }
}

TEST(test_sdk)
{
    tinker_each_python(run_script);
}
