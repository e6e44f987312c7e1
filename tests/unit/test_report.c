/* test_report.c: tools/report: metrics and samples of folders made by hand, as they grow; what of
 * them the page is given; and pages. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/html_check.h"
#include "tests/support/long_run.h"
#include "tests/support/support.h"
#include "tools/report/report.h"

#include <fcntl.h>
#include <sys/stat.h>

// Text with ' for ".
static void put_file(const char *folder, const char *name, const char *text)
{
    char *quoted = test_keep(strdup(text));
    for (char *at = quoted; (at = strchr(at, '\''));) *at = '"';
    test_write(test_path(folder, name), quoted, strlen(quoted));
}

static void append(const char *path, const char *text)
{
    const int fd = open(path, O_WRONLY | O_APPEND);
    assert_true(fd >= 0);
    assert_ok(file_write_all(fd, path, text, strlen(text)));
    close(fd);
}

static const struct series *find_series(const struct metrics *m, const char *key)
{
    const json_t *place = json_object_get(m->index, key);
    return place ? &m->series[json_integer_value(place)] : NULL;
}

LATER(run_folder_release)

// Released when the test ends.
static struct run_folder *run_of(const char *folder)
{
    struct run_folder *run = test_keep(calloc(1, sizeof *run));
    assert_ok(run_folder_open(folder, run));
    test_later(run, run_folder_release_later);
    assert_ok(run_folder_refresh(run, -1));
    return run;
}

// Well formed; lives as long as the program.
static const char *checked_page(struct bytes *page)
{
    char sentence[200];
    if (!html_check(bytes_text(page), sentence, sizeof sentence)) fail_msg("%s", sentence);
    return test_keep(page->data);
}

static const char *page_of(const char *folder, int64_t max_texts)
{
    struct bytes page = BYTES_INIT;
    assert_ok(page_put(run_of(folder), 1, max_texts, &page));
    return checked_page(&page);
}

// ---- series -------------------------------------------------------------------------------------

TEST(series_of_a_file)
{
    const char *folder = test_folder(), *path = test_path(folder, "metrics.jsonl");
    struct metrics m = {0};
    bool anew;
    put_file(folder, "metrics.jsonl",
             "{'step':0,'eval/accuracy':0.5}\n"
             "{'step':1,'reward':0.25,'kl':null}\n"
             "not JSON\n"
             "{'step':1,'reward':9}\n"
             "{'step':3,'reward':1,'kl':2,'big':1e305}\n"
             "{'step':4,'rew");
    assert_ok(metrics_read(&m, path, &anew));
    assert_false(anew);
    assert_int_equal(m.n_lines, 3);
    assert_int_equal(m.n_bad, 2);
    assert_int_equal(m.steps[0], 0);
    assert_int_equal(m.steps[2], 3);
    const struct series *reward = find_series(&m, "reward"), *kl = find_series(&m, "kl");
    assert_int_equal(reward->n, 2);
    assert_int_equal(reward->at[1], 2); // the line, not the step
    assert_true(reward->values[1] == 1);
    assert_int_equal(kl->n, 1);
    assert_null(find_series(&m, "step"));
    assert_null(find_series(&m, "big"));
    metrics_release(&m);
    put_file(folder, "metrics.jsonl", "{'name':1}\nhello\n");
    assert_fails(metrics_read(&m, path, &anew), ST_FORMAT, "metrics.jsonl");
    metrics_release(&m);
    assert_status(metrics_read(&m, test_path(folder, "none"), &anew), ST_NOT_FOUND);
    put_file(folder, "metrics.jsonl", "");
    assert_ok(metrics_read(&m, path, &anew));
    assert_int_equal(m.n_lines, 0);
    metrics_release(&m);
}

// What is appended is read on; a file in its place is read anew.
TEST(files_grow)
{
    const char *folder = test_folder(), *path = test_path(folder, "metrics.jsonl");
    struct metrics m = {0};
    bool anew;
    put_file(folder, "metrics.jsonl", "{'step':1,'reward':1}\n{'step':2,'rew");
    assert_ok(metrics_read(&m, path, &anew));
    assert_int_equal(m.n_lines, 1);
    const int64_t at = m.at;
    assert_ok(metrics_read(&m, path, &anew));
    assert_int_equal(m.at, at);
    append(path, "ard\":2}\n{\"step\":3,\"reward\":3,\"late\":4}\n");
    assert_ok(metrics_read(&m, path, &anew));
    assert_false(anew);
    assert_int_equal(m.n_lines, 3);
    assert_int_equal(m.n_bad, 0);
    assert_true(find_series(&m, "reward")->values[2] == 3);
    assert_int_equal(find_series(&m, "late")->at[0], 2);
    const char one[] = "{\"step\":1,\"reward\":5}\n"; // as a resumed run drops lines
    assert_ok(file_write_atomic(path, 0644, one, strlen(one)));
    assert_ok(metrics_read(&m, path, &anew));
    assert_true(anew);
    assert_int_equal(m.n_lines, 1);
    assert_true(find_series(&m, "reward")->values[0] == 5);
    metrics_release(&m);
}

// ---- samples ------------------------------------------------------------------------------------

TEST(samples_of_steps)
{
    const char *folder = test_folder();
    assert_ok(file_make_folders(test_path(folder, "rollouts")));
    put_file(folder, "metrics.jsonl", "{'step':1,'reward':1}\n{'step':4,'reward':1}\n");
    put_file(folder, "rollouts/step-1.jsonl",
             "{'line':7,'sample':0,'completion':'a]\\'[1,','reward':0.5,'advantage':-1,'tokens':3,"
             "'prompt':[{'role':'system','content':'s'},{'role':'user','content':'2+2?'}],"
             "'accepted':[0,1, 2],'logprobs':[-0.5,-1e-05,-2]}\n"
             "broken\n"
             "{'line':7,'sample':1,'completion':'b','reward':null,'truncated':true}\n"
             "{'line':7,'sam");
    put_file(folder, "rollouts/step-4.jsonl",
             "{'line':7,'sample':0,'completion':'','reward':1,'prompt':'other'}\n");
    put_file(folder, "rollouts/step-5.jsonl", // has no line yet: of before the run was resumed
             "{'line':9,'sample':0,'completion':'old','reward':1}\n");
    struct run_folder *run = run_of(folder);
    const struct samples *s = &run->samples;
    assert_int_equal(s->n, 3);
    assert_int_equal(s->samples[0].tokens, 3);
    assert_true(s->samples[0].reward == 0.5F && s->samples[0].advantage == -1);
    assert_int_equal(s->samples[1].row, 2);
    assert_int_equal(s->samples[1].number, 1);
    assert_true(isnan(s->samples[1].reward) && s->samples[1].truncated);
    assert_int_equal(s->samples[1].tokens, -1);
    assert_int_equal(s->samples[2].step, 4);
    assert_int_equal(s->n_bad, 2);     // the broken one, and the one that was cut off
    assert_int_equal(s->n_prompts, 1); // a line of the data has one
    assert_string_equal(s->prompts[0].text, "2+2?");
    append(test_path(folder, "metrics.jsonl"), "{\"step\":5,\"reward\":1}\n");
    put_file(folder, "rollouts/step-5.jsonl",
             "{'line':9,'sample':0,'completion':'new','reward':0}\n");
    assert_ok(run_folder_refresh(run, -1));
    assert_int_equal(s->n, 4);
    assert_true(s->samples[3].reward == 0);
}

// Those of an evaluation stand behind the step's own, with prompts of their own lines.
TEST(samples_of_evaluations)
{
    const char *folder = test_folder();
    assert_ok(file_make_folders(test_path(folder, "rollouts")));
    put_file(folder, "metrics.jsonl", "{'step':0,'eval/reward':1}\n{'step':1,'reward':1}\n");
    put_file(folder, "rollouts/step-1.jsonl",
             "{'line':7,'sample':0,'completion':'a','reward':1,'prompt':'seen'}\n");
    for (int step = 0; step < 2; step++)
        put_file(folder, step ? "rollouts/eval-step-1.jsonl" : "rollouts/eval-step-0.jsonl",
                 "{'line':7,'sample':0,'completion':'b','reward':0.5,"
                 "'prompt':'held out','finish_reason':'length'}\n");
    const struct samples *s = &run_of(folder)->samples;
    assert_int_equal(s->n, 3);
    assert_true(s->samples[0].step == 0 && s->samples[0].line == -7 && s->samples[0].truncated);
    assert_true(s->samples[1].step == 1 && s->samples[1].line == 7 && !s->samples[1].truncated);
    assert_true(s->samples[2].step == 1 && s->samples[2].line == -7 && s->samples[2].row == 0);
    assert_int_equal(s->n_prompts, 2);
    const char *page = page_of(folder, 1 << 20);
    assert_contains(page, "id=\"rollouts-0-0-eval\"");
    assert_contains(page, "id=\"rollouts-0-1\"");
    assert_contains(page, "id=\"rollouts-0-1-eval\"");
}

TEST(samples_are_read_bit_by_bit)
{
    const char *folder = test_folder();
    struct run_folder run;
    long_run_write(folder, &(struct long_run){.first = 1, .last = 300, .keys = 1, .samples = 5});
    assert_ok(run_folder_open(folder, &run));
    assert_int_equal(run.metrics.n_lines, 300);
    assert_int_equal(run.samples.n, 0);
    assert_true(run_folder_is_behind(&run));
    assert_ok(run_folder_refresh(&run, 0)); // no time for any
    assert_true(run_folder_is_behind(&run));
    assert_ok(run_folder_refresh(&run, -1));
    assert_false(run_folder_is_behind(&run));
    assert_int_equal(run.samples.n, 1500);
    run_folder_release(&run);
}

// ---- data ---------------------------------------------------------------------------------------

static json_t *data_of(const struct run_folder *run, const struct run_cursor *has)
{
    struct bytes text = BYTES_INIT;
    assert_ok(run_data_put(run, has, &text));
    return json_of(test_keep(text.data));
}

// A column holds these values.
#define assert_column(object, path, type, ...)                                                     \
    column_is((object), (path), (const type[]){__VA_ARGS__}, sizeof((const type[]){__VA_ARGS__}))

static size_t column_of(const json_t *object, const char *path, struct bytes *ret)
{
    *ret = (struct bytes)BYTES_INIT;
    assert_ok(base64_decode(text_of(object, path), ret));
    test_keep(ret->data);
    return ret->len;
}

static void column_is(const json_t *object, const char *path, const void *wanted, size_t len)
{
    struct bytes got;
    assert_int_equal(column_of(object, path, &got), len);
    assert_memory_equal(got.data, wanted, len);
}

static const json_t *series_in(const json_t *data, const char *key)
{
    size_t i;
    const json_t *series;
    json_array_foreach (json_object_get(data, "series"), i, series)
        if (strcmp(json_string_value(json_object_get(series, "key")), key) == 0) return series;
    return NULL;
}

TEST(columns_of_a_run)
{
    const char *folder = test_path(test_folder(), "run <1>");
    assert_ok(file_make_folders(test_path(folder, "rollouts")));
    put_file(folder, "config.json", "{'seed':42,'stop':null}");
    put_file(folder, "metrics.jsonl",
             "{'step':0,'eval/accuracy':0.5}\n{'step':2,'reward':1}\nbad\n"
             "{'step':3,'reward':2,'eval/accuracy':0.75}\n");
    put_file(folder, "rollouts/step-3.jsonl",
             "{'line':7,'sample':0,'completion':'a','reward':0.5,'prompt':'p'}\nbad\n");
    const json_t *data = data_of(run_of(folder), &(struct run_cursor){0});
    assert_json(data, "{'name': 'run <1>', 'lines': 3, 'bad': 1, 'config': {'seed': 42},"
                      " 'samples': {'bad': 1}, 'prompts': {'text': ['p']}}");
    assert_json(series_in(data, "reward"), "{'first': 1}");
    assert_column(data, "steps", int32_t, 0, 2, 3);
    assert_column(series_in(data, "reward"), "values", float, 1, 2);
    assert_column(series_in(data, "eval/accuracy"), "at", int32_t, 0, 2);
    assert_column(data, "samples.reward", float, 0.5F);
}

TEST(only_what_is_new)
{
    const char *folder = test_folder();
    const struct long_run first = {.first = 1, .last = 50, .keys = 30, .samples = 5, .words = 9};
    const struct long_run more = {.first = 51, .last = 52, .keys = 30, .samples = 5, .words = 9};
    const struct run_cursor has = {.lines = 50, .samples = 250, .prompts = 50};
    struct bytes whole = BYTES_INIT, new = BYTES_INIT, rows;
    long_run_write(folder, &first);
    struct run_folder *run = run_of(folder);
    assert_ok(run_data_put(run, &(struct run_cursor){0}, &whole));
    long_run_write(folder, &more);
    assert_ok(run_folder_refresh(run, -1));
    assert_ok(run_data_put(run, &has, &new));
    assert_true(new.len < whole.len / 3);
    const json_t *data = data_of(run, &has);
    assert_json(data, "{'from': 50, 'config': null}");
    assert_json(series_in(data, "reward"), "{'first': 50}");
    assert_int_equal(column_of(data, "steps", &rows), 2 * sizeof(int32_t));
    assert_int_equal(column_of(data, "samples.row", &rows), 10 * sizeof(int32_t));
    // of another generation, or of more than there is: all
    const struct run_cursor strange[] = {
        {.generation = 1, .lines = 50}, {.lines = 53}, {.samples = 261}, {.lines = -1}};
    for (size_t i = 0; i < sizeof strange / sizeof *strange; i++)
        assert_json(data_of(run, &strange[i]), "{'from': 0}");
    bytes_release(&whole);
    bytes_release(&new);
}

TEST(cluster_reports)
{
    const char *folder = test_folder();
    put_file(folder, "metrics.jsonl", "{'step':1,'reward':1}\n");
    for (int i = 0; i < 25; i++) {
        char name[64], text[64];
        snprintf(name, sizeof name, "cluster-report-epoch-%d.txt", i);
        snprintf(text, sizeof text, "+---+\n| e%d & |\n+---+\n\xff", i);
        put_file(folder, name, text);
    }
    struct run_folder *run = run_of(folder);
    const json_t *data = data_of(run, &(struct run_cursor){0});
    assert_int_equal(json_array_size(json_at(data, "reports")), 20); // the first and the latest
    assert_int_equal(int_of(data, "left_out"), 5);
    assert_int_equal(int_of(data, "reports.0.epoch"), 0);
    assert_int_equal(int_of(data, "reports.1.epoch"), 6);
    assert_string_equal(text_of(data, "reports.19.text"), "+---+\n| e24 & |\n+---+\n?");
    assert_json(data_of(run, &(struct run_cursor){.lines = 1, .reports = 25}), "{'reports': null}");
}

// Of one longer than the page takes, the lines that begin it.
TEST(long_cluster_report)
{
    const char *folder = test_folder();
    struct bytes text = BYTES_INIT;
    put_file(folder, "metrics.jsonl", "{'step':1,'reward':1}\n");
    while (text.len < 100000) bytes_printf(&text, "| cluster at %zu |\n", text.len);
    put_file(folder, "cluster-report-epoch-3.txt", test_keep(text.data));
    const json_t *data = data_of(run_of(folder), &(struct run_cursor){0});
    const char *given = text_of(data, "reports.0.text");
    const size_t len = strlen(given);
    assert_in_range(len, 65000, 65536);
    assert_memory_equal(given, text.data, len);
    assert_true(given[len - 1] == '\n');
    assert_int_equal(int_of(data, "reports.0.left_out"), text.len - len);
}

// ---- pages --------------------------------------------------------------------------------------

static int count(const char *text, const char *part)
{
    int n = 0;
    while ((text = strstr(text, part))) n++, text++;
    return n;
}

// Nothing that stands in a file ends the element it is in.
TEST(text_stays_text)
{
    static const char evil[] =
        "{\"line\":1,\"sample\":0,\"prompt\":\"<!--<script>\",\"completion\":"
        "\"</script><script>alert(1)</script>\",\"reward\":1}\n";
    const char *folder = test_path(test_folder(), "<script>");
    assert_ok(file_make_folders(test_path(folder, "rollouts")));
    put_file(folder, "metrics.jsonl", "{'step':7,'<script>':1,'reward':1}\n");
    put_file(folder, "config.json", "{'data':'</script><b>'}");
    put_file(folder, "rollouts/step-7.jsonl", evil);
    const char *page = page_of(folder, 1 << 20);
    assert_contains(page, "id=\"rollouts-0-7\">{\"line\":1");
    assert_contains(page, "\\u003c/script>\\u003cscript>alert(1)\\u003c/script>");
    assert_int_equal(count(page, "alert"), 1);
    assert_int_equal(count(page, "<script>"), 1); // the page's own
    struct bytes back = BYTES_INIT;
    page_put_json(&back, evil, strlen(evil)); // and the JSON says the same
    assert_json(json_of(test_keep(back.data)),
                "{'completion': '</script><script>alert(1)</script>'}");
}

// Of more text than is wanted, that of steps all over the run.
TEST(texts_are_bounded)
{
    const char *folder = test_folder();
    long_run_write(
        folder, &(struct long_run){.first = 1, .last = 200, .keys = 1, .samples = 5, .words = 100});
    const char *all = page_of(folder, 1 << 30), *some = page_of(folder, 200000),
               *none = page_of(folder, 0);
    assert_int_equal(count(all, "id=\"rollouts-0-"), 200);
    const int n = count(some, "id=\"rollouts-0-");
    assert_true(n > 20 && n < 100);
    assert_true(strlen(some) - strlen(none) < 220000);
    assert_contains(some, "id=\"rollouts-0-1\"");
    assert_contains(some, "id=\"rollouts-0-200\"");
    assert_int_equal(count(none, "id=\"rollouts-0-"), 0);
}

// So is that of a single step: its first samples are there, whole.
TEST(texts_of_a_step_are_bounded)
{
    const char *folder = test_folder();
    long_run_write(
        folder, &(struct long_run){.first = 1, .last = 2, .keys = 1, .samples = 500, .words = 100});
    const char *some = page_of(folder, 50000), *one = page_of(folder, 100),
               *none = page_of(folder, 0);
    assert_in_range(strlen(some) - strlen(none), 50000, 70000); // a "<" is six bytes there
    const char *texts = strstr(some, "id=\"rollouts-0-2\">{");
    assert_non_null(texts);
    assert_memory_equal(strstr(texts, "</script>") - 2, "}\n", 2);
    assert_int_equal(strlen(one), strlen(none)); // not one line fits
}

TEST(missing_parts_are_left_out)
{
    const char *folder = test_folder();
    put_file(folder, "metrics.jsonl", "");
    const char *page = page_of(folder, 1 << 20);
    assert_contains(page, "\"lines\":0");
    assert_contains(page, "\"config\":null");
}

TEST(live_pages_are_empty)
{
    struct bytes bytes = BYTES_INIT;
    assert_ok(page_put_live(3, 1, &bytes));
    const char *page = checked_page(&bytes);
    assert_contains(page, "data-shown=\"1\" id=\"live\">3</script>");
    assert_contains(page, "default-src 'none'");
    assert_contains(page, "connect-src 'self'");
    assert_null(strstr(page, "id=\"run-"));
}

TEST(other_folders_are_refused)
{
    const char *folder = test_folder();
    struct run_folder run;
    assert_fails(run_folder_open(folder, &run), ST_NOT_FOUND, "there is no metrics.jsonl in it");
    assert_fails(run_folder_open(test_path(folder, "none"), &run), ST_NOT_FOUND,
                 "No such file or directory; name the folder that cw-trainer wrote");
    put_file(folder, "file", "x");
    assert_fails(run_folder_open(test_path(folder, "file"), &run), ST_INVALID, "is no folder");
    put_file(folder, "metrics.jsonl", "[1,2]\n");
    assert_fails(run_folder_open(folder, &run), ST_FORMAT, "\"step\"");
    put_file(folder, "metrics.jsonl", "");
    put_file(folder, "config.json", "{");
    assert_true(run_folder_open(folder, &run) != ST_OK);
    assert_message("config.json");
}

// What is shown to others is of the run's folder, and a file.
TEST(links_stay_inside)
{
    const char *outside = test_folder(), *folder = test_folder();
    const char *secret = test_path(outside, "secret"),
               *metrics = test_path(folder, "metrics.jsonl");
    struct run_folder run;
    char path[PATH_ROOM];
    put_file(outside, "secret", "{'step':1,'reward':1}\n");
    assert_int_equal(symlink(secret, metrics), 0);
    assert_fails(run_folder_open(folder, &run), ST_MISMATCH, "leads out of the run's folder");
    assert_int_equal(unlink(metrics), 0);
    put_file(folder, "kept.jsonl", "{'step':1,'reward':1}\n");
    assert_int_equal(symlink("kept.jsonl", metrics), 0); // inside
    assert_int_equal(symlink(outside, test_path(folder, "rollouts")), 0);
    put_file(outside, "step-1.jsonl", "{}\n");
    assert_ok(run_folder_open(folder, &run));
    assert_status(run_folder_rollouts(&run, 1, false, path), ST_MISMATCH);
    assert_status(run_folder_refresh(&run, -1), ST_MISMATCH);
    run_folder_release(&run);
    assert_int_equal(unlink(metrics), 0);
    put_file(folder, "metrics.jsonl", "{'step':1,'reward':1}\n");
    assert_int_equal(symlink(secret, test_path(folder, "cluster-report-epoch-1.txt")), 0);
    assert_status(run_folder_open(folder, &run), ST_MISMATCH);
    assert_int_equal(unlink(metrics), 0);
    assert_int_equal(mkfifo(metrics, 0600), 0);
    assert_status(run_folder_open(folder, &run), ST_IO); // and does not hang
}

TEST(the_checker_refuses)
{
    const json_t *pages = test_rows("report", "the_checker_refuses");
    char sentence[200];
    for (size_t i = 0; i < json_array_size(pages); i++)
        if (html_check(row_text(pages, i, "page"), sentence, sizeof sentence) !=
            row_flag(pages, i, "taken"))
            fail_msg("%s", row_text(pages, i, "page"));
}
