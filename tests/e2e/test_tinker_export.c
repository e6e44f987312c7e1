/* test_tinker_export.c: checkpoints that are taken along: saved for others, their URLs, which need
 * no key and end, archives, and what is not given out. With the SDK, where there is one:
 * tests/clients/tinker_export.py says what it does. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/tinker_client.h"

#include <fcntl.h>

static void start(void)
{
    tinker_pair_start(NULL, args("--max-adapters 2 --max-lora-rank 8"), NULL);
    trained = tinker_whole();
}

static void export(void)
{
    tinker_run_save(&trained, "save_weights_external", "out");
}

// The path of a URL of this server.
static const char *path_of(const json_t *url)
{
    static const char before[] = "http://localhost";
    const char *text = json_string_value(url);
    assert_non_null(text);
    assert_contains(text, before);
    return text + strlen(before);
}

static json_t *urls_of(const char *part, const char *what)
{
    const char *path = test_text("training_runs/%s/checkpoints/%s/%s", trained.id, part, what);
    return tinker_get(path, 200);
}

static void fetch(const char *path, int status, struct wire_answer *ret)
{
    tinker_request("GET", path, NULL, NULL, ret);
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
    char *copy = test_keep(strdup(path)), *digit = strstr(copy, "files/") + strlen("files/") + at;
    *digit = *digit == '1' ? '2' : '1';
    refused(copy, why);
}

TINKER_TEST(test_urls)
{
    start();
    export();
    json_t *answer = urls_of("external_weights/out", "external_weights_urls"), *url;
    const json_t *urls = json_object_get(answer, "urls");
    assert_non_null(json_object_get(answer, "expires"));
    const char *name,
        *folder = test_path(test_path(pair.server.runs, trained.id), "external_weights/out");
    json_object_foreach ((json_t *)urls, name, url) {
        struct wire_answer a;
        char *on_disk = test_read(test_path(folder, name));
        fetch(path_of(url), 200, &a);
        assert_contains(bytes_text(&a.head), test_text("Content-Length: %zu\r\n", a.body.len));
        assert_memory_equal(bytes_text(&a.body), on_disk, a.body.len);
    }
    assert_non_null(json_object_get(urls, "config.json"));
    const char *path = path_of(json_object_get(urls, "config.json"));
    refused_changed(path, 0, "ask for another");  // the time
    refused_changed(path, 20, "ask for another"); // the signature
    const char *other = test_text("%.*s/model.safetensors", (int)(strrchr(path, '/') - path), path);
    refused(other, "ask for another");
    other = test_text("%.*s/../../run.json", (int)(strrchr(path, '/') - path), path);
    refused(other, "ask for another");
    export();
    refused(path, "saved anew");
}

// Tar reads it; the optimizer's state is not in it.
TINKER_TEST(test_archive)
{
    struct wire_answer a;
    start();
    tinker_run_save(&trained, "save_weights", "state");
    json_t *answer = urls_of("weights/state", "archive");
    fetch(path_of(json_object_get(answer, "url")), 200, &a);
    const char *to = test_folder(), *file = test_path(to, "archive.tar");
    const char *from = test_path(test_path(pair.server.runs, trained.id), "weights/state");
    test_write(file, bytes_text(&a.body), a.body.len);
    assert_exit(0, test_command(test_path(test_folder(), "log"), 10000,
                                args("tar -C %s -xf %s", to, file)));
    test_same_file(from, to, "config.json");
    test_same_file(from, to, "model.safetensors");
    assert_int_equal(access(test_path(from, "trainer"), F_OK), 0);
    assert_int_not_equal(access(test_path(to, "trainer"), F_OK), 0);
}

static int64_t peak_kib(void)
{
    return test_process((int)pair.server.child.pid, "VmHWM:", 10);
}

static int64_t drain(const char *path)
{
    static char buffer[1 << 16];
    int64_t n_bytes = 0;
    ssize_t n;
    int fd = daemon_connect_tcp(pair.server.port);
    assert_true(fd >= 0);
    const char *request = test_text("GET %s HTTP/1.0\r\nHost: localhost\r\n\r\n", path);
    assert_true(daemon_send(fd, request, strlen(request)));
    while ((n = read(fd, buffer, sizeof buffer)) > 0) n_bytes += n;
    close(fd);
    return n_bytes;
}

// A file larger than what serving it takes.
TINKER_TEST(test_large_file)
{
    const int64_t size = (int64_t)512 << 20;
    start();
    export();
    const char *folder = test_path(test_path(pair.server.runs, trained.id), "external_weights/out");
    int fd = open(test_path(folder, "model.safetensors"), O_WRONLY);
    assert_true(fd >= 0);
    assert_int_equal(ftruncate(fd, size), 0);
    close(fd);
    json_t *answer = urls_of("external_weights/out", "external_weights_urls");
    const int64_t before = peak_kib();
    const json_t *url = json_object_get(json_object_get(answer, "urls"), "model.safetensors");
    assert_true(drain(path_of(url)) > size);
    assert_true(peak_kib() - before < 16 << 10);
}

static void run_script(const char *python)
{
    const char *const checks[] = {"whole", "adapter"};
    for (int i = 0; i < 2; i++) { // older SDKs do not tell when they end
        start();
        tinker_finish(session);
        tinker_script(python, "tests/clients/tinker_export.py", checks[i]);
        tinker_pair_stop();
    }
}

TEST(test_sdk)
{
    tinker_each_python(run_script);
}
