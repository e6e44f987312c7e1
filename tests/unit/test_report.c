/* test_report.c: tools/report: axes, reduction of long series, escaping, and whole pages of folders
 * made by hand. */
#include "common/base/file.h"
#include "tests/support/html_check.h"
#include "tests/support/support.h"
#include "tools/report/axis.h"
#include "tools/report/chart.h"
#include "tools/report/html.h"
#include "tools/report/page.h"
#include "tools/report/rollouts.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// ---- axes ---------------------------------------------------------------------------------------

static void axes(void **state)
{
    (void)state;
    static const struct {
        double lo, hi;
        int n;
        bool whole;
        double axis_lo, axis_hi, step;
        const char *first, *last;
    } cases[] = {
        {0, 1, 5, false, 0, 1, 0.2, "0", "1.0"},
        {0.31, 0.87, 5, false, 0.2, 1, 0.2, "0.2", "1.0"},
        {0, 10000, 5, false, 0, 10000, 2000, "0", "10k"},
        {0, 11, 5, false, 0, 12.5, 2.5, "0", "12.5"},
        {1, 100000, 6, true, 0, 100000, 20000, "0", "100k"},
        {1, 3, 6, true, 1, 3, 1, "1", "3"},
        {0, 11, 5, true, 0, 15, 5, "0", "15"},
        {-0.3, 0.2, 5, false, -0.3, 0.2, 0.1, "-0.3", "0.2"},
        {0, 2e-5, 4, false, 0, 2e-5, 5e-6, "0", "2e-05"},
        {0, 3e6, 3, false, 0, 3e6, 1e6, "0", "3000k"},
        {0, 3e7, 3, false, 0, 3e7, 1e7, "0", "30M"},
        // one value
        {0, 0, 5, false, 0, 1, 0.2, "0", "1.0"},
        {24, 24, 5, false, 0, 25, 5, "0", "25"},
        {-4, -4, 4, false, -4, 0, 1, "-4", "0"},
        {1e300, 1e300, 5, false, 0, 1e300, 2e299, "0", "1e+300"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char text[TICK_ROOM];
        struct axis a = axis_fit(cases[i].lo, cases[i].hi, cases[i].n, cases[i].whole);
        double slack = 1e-9 * fabs(cases[i].step);
        int n = axis_ticks(&a);
        if (fabs(a.lo - cases[i].axis_lo) > slack || fabs(a.hi - cases[i].axis_hi) > slack * 100 ||
            fabs(a.step - cases[i].step) > slack)
            fail_msg("case %zu: %g to %g by %g", i, a.lo, a.hi, a.step);
        assert_string_equal(axis_label(&a, 0, text), cases[i].first);
        assert_string_equal(axis_label(&a, n - 1, text), cases[i].last);
        assert_true(n >= 2 && n <= 2 * cases[i].n + 2);
        assert_true(fabs(axis_tick(&a, n - 1) - a.hi) <= slack * 100);
    }
}

static void axes_hold_their_range(void **state)
{
    (void)state;
    for (int power = -12; power <= 12; power++)
        for (int k = 1; k < 200; k++) {
            double hi = k * 0.37 * pow(10, power), lo = hi * ((k % 7) - 3) / 3;
            if (lo > hi) continue;
            struct axis a = axis_fit(lo, hi, 5, false);
            assert_true(a.lo <= lo + 1e-6 * a.step && a.hi >= hi - 1e-6 * a.step);
            assert_true(axis_ticks(&a) >= 2 && axis_ticks(&a) <= 9);
        }
}

// ---- text ---------------------------------------------------------------------------------------

static void escaping(void **state)
{
    (void)state;
    static const struct {
        const char *text;
        size_t len;
        const char *html;
    } cases[] = {
        {"a<b>&\"'", 7, "a&lt;b&gt;&amp;&quot;&#39;"},
        {"</pre><script>", 14, "&lt;/pre&gt;&lt;script&gt;"},
        {"tab\tline\n", 9, "tab\tline\n"},
        {"\0\r\x1b\x7f", 4, "\xe2\x90\x80\xe2\x90\x8d\xe2\x90\x9b\xe2\x90\xa1"},
        {"\xc3\xa9\xe2\x82\xac", 5, "\xc3\xa9\xe2\x82\xac"},
        {"\xff<\xc3", 3, "\xef\xbf\xbd&lt;\xef\xbf\xbd"},
        {"", 0, ""},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct bytes html = BYTES_INIT;
        html_text(&html, cases[i].text, cases[i].len);
        assert_string_equal(bytes_text(&html), cases[i].html);
        bytes_release(&html);
    }
}

static void numbers(void **state)
{
    (void)state;
    static const struct {
        double value;
        const char *text;
    } cases[] = {
        {0, "0"},
        {-0.0, "0"},
        {0.5, "0.5"},
        {0.123456, "0.1235"},
        {5e-5, "5e-05"},
        {1000, "1,000"},
        {-1234567, "-1,234,567"},
        {999, "999"},
        {999.9, "1,000"},
        {123.456, "123.5"},
        {1e15, "1e+15"},
        {NAN, "-"},
        {-100, "-100"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char text[NUMBER_ROOM];
        assert_string_equal(number_text(cases[i].value, text), cases[i].text);
    }
}

static void draw_completion(const char *text, const char *accepted, const char *offsets,
                            const char *html)
{
    struct bytes to = BYTES_INIT;
    json_t *a = json_loads(accepted, 0, NULL), *o = json_loads(offsets, 0, NULL);
    completion_draw(text, strlen(text), a, o, &to);
    assert_string_equal(bytes_text(&to), html);
    json_decref(a);
    json_decref(o);
    bytes_release(&to);
}

static void accepted_tokens_are_marked(void **state)
{
    (void)state;
    draw_completion("one two three", "[0,1,2]", "[0,3,7]", "one<mark> two three</mark>");
    draw_completion("one two three", "[1,0,1]", "[0,3,7]",
                    "<mark>one</mark> two<mark> three</mark>");
    draw_completion("a<b", "[0,1,0]", "[0,1,2]", "a<mark>&lt;</mark>b");
    // characters, not bytes; a token that holds half a character has no text of its own
    draw_completion("\xc3\xa9\xe2\x82\xac!", "[0,1,2,0]", "[0,1,1,2]",
                    "\xc3\xa9<mark>\xe2\x82\xac</mark>!");
    // the text was cut at a stop string; tokens behind it are not in it
    draw_completion("one", "[0,1,1]", "[0,3,8]", "one");
    draw_completion("one", "[0,1,1]", "[0,2,8]", "on<mark>e</mark>");
    // nothing known of the tokens, or lists that do not fit: plain
    draw_completion("one", "[1]", "[0,1]", "one");
    draw_completion("one", "null", "null", "one");
    draw_completion("one", "[1,1]", "[0,-5]", "<mark>one</mark>");
    draw_completion("", "[1]", "[0]", "");
}

// ---- series -------------------------------------------------------------------------------------

static const char *write_metrics(const char *folder, const char *text)
{
    const char *path = test_path(folder, "metrics.jsonl");
    test_write(path, text, strlen(text));
    return path;
}

static void series_of_a_file(void **state)
{
    (void)state;
    const char *folder = test_folder();
    struct metrics m;
    const char *path = write_metrics(folder, "{\"step\":0,\"eval/accuracy\":0.5}\n"
                                             "{\"step\":1,\"reward\":0.25,\"kl\":null}\n"
                                             "not JSON\n"
                                             "{\"step\":1,\"reward\":9}\n"
                                             "{\"step\":3,\"reward\":1,\"kl\":2,\"big\":1e305}\n"
                                             "{\"step\":4,\"rew");
    assert_ok(metrics_read(path, &m));
    assert_int_equal(m.n_lines, 3);
    assert_int_equal(m.n_bad, 2);
    assert_int_equal(m.first_step, 0);
    assert_int_equal(m.last_step, 3);
    const struct series *reward = metrics_find(&m, "reward"), *kl = metrics_find(&m, "kl");
    assert_int_equal(reward->n, 2);
    assert_int_equal(reward->points[1].step, 3);
    assert_true(reward->points[1].value == 1);
    assert_int_equal(kl->n, 1);
    assert_null(metrics_find(&m, "step"));
    assert_null(metrics_find(&m, "big"));
    metrics_release(&m);
    assert_status(metrics_read(write_metrics(folder, "{\"name\":1}\nhello\n"), &m), ST_FORMAT);
    assert_message("metrics.jsonl");
    assert_status(metrics_read(test_path(folder, "none"), &m), ST_NOT_FOUND);
    assert_ok(metrics_read(write_metrics(folder, ""), &m));
    assert_int_equal(m.n_lines, 0);
    metrics_release(&m);
}

static void long_series_are_reduced(void **state)
{
    (void)state;
    enum { N = 100007 };
    struct point *points = malloc(N * sizeof *points), errors[2] = {{1, 0.5}, {N, 1.5}};
    assert_non_null(points);
    double sum = 0;
    for (int i = 0; i < N; i++) {
        points[i] = (struct point){i + 1, i == 50000 ? 1000 : sin(i)};
        sum += points[i].value;
    }
    struct series s = {.key = "x", .points = points, .n = N};
    struct series error = {.key = "e", .points = errors, .n = 2};
    struct curve c;
    assert_ok(curve_new(&s, &error, 1000, &c));
    assert_true(c.reduced);
    assert_true(c.n <= 1000 && c.n > 900);
    double largest = -1, before = 0, weighted = 0;
    for (int i = 0; i < c.n; i++) {
        const struct curve_point *p = &c.points[i];
        assert_true(p->min <= p->mean && p->mean <= p->max && p->step > before);
        before = p->step;
        largest = fmax(largest, p->max); // the spike is not lost
        weighted += p->mean * (i + 1 < c.n ? 101 : N - 101 * (c.n - 1));
    }
    assert_true(largest == 1000);
    assert_true(fabs(weighted - sum) < 1e-6 * fabs(sum));
    assert_true(c.points[0].error == 0.5 && c.points[c.n - 1].error == 1.5);
    assert_true(isnan(c.points[1].error));
    curve_release(&c);
    // a short one stays as it is
    s.n = 1000;
    assert_ok(curve_new(&s, NULL, 1000, &c));
    assert_false(c.reduced);
    assert_int_equal(c.n, 1000);
    for (int i = 0; i < c.n; i++)
        assert_true(c.points[i].mean == points[i].value && c.points[i].step == i + 1);
    curve_release(&c);
    s.n = 0;
    assert_ok(curve_new(&s, NULL, 1000, &c));
    assert_int_equal(c.n, 0);
    curve_release(&c);
    free(points);
}

// A line's points lie where its axes say.
static void chart_is_to_scale(void **state)
{
    (void)state;
    struct point points[] = {{0, 0}, {5, 0.5}, {10, 1}};
    struct series s = {.key = "a<b", .points = points, .n = 3};
    struct chart chart = {.title = "T & t",
                          .unit = "%",
                          .first_step = 0,
                          .last_step = 10,
                          .lines = {{&s, NULL}},
                          .n_lines = 1};
    struct bytes svg = BYTES_INIT;
    double x[3], y[3];
    assert_ok(chart_draw(&chart, &svg));
    assert_contains(bytes_text(&svg), "T &amp; t");
    assert_contains(bytes_text(&svg), "data-metric=\"a&lt;b\"");
    assert_contains(bytes_text(&svg), ">100</text>");
    assert_contains(bytes_text(&svg), "step 5\na&lt;b 50%</title>");
    const char *path = strstr(bytes_text(&svg), "class=\"curve\" d=\"");
    assert_non_null(path);
    assert_int_equal(sscanf(path, "class=\"curve\" d=\"M%lf %lfL%lf %lfL%lf %lf\"", &x[0], &y[0],
                            &x[1], &y[1], &x[2], &y[2]),
                     6);
    assert_true(fabs(x[1] - (x[0] + x[2]) / 2) < 0.11 && x[2] > x[0] + 400);
    assert_true(fabs(y[1] - (y[0] + y[2]) / 2) < 0.11 && y[2] < y[0] - 150); // up is less
    bytes_release(&svg);
}

// ---- pages --------------------------------------------------------------------------------------

static char *page_of(const char *folder)
{
    struct run_folder run;
    struct bytes page = BYTES_INIT;
    char sentence[200];
    assert_ok(run_folder_read(folder, &run));
    assert_ok(page_draw(&run, &page));
    run_folder_release(&run);
    char *text = strdup(bytes_text(&page));
    bytes_release(&page);
    if (!html_check(text, sentence, sizeof sentence)) fail_msg("%s", sentence);
    return text;
}

static void put_file(const char *folder, const char *name, const char *text)
{
    test_write(test_path(folder, name), text, strlen(text));
}

// The prompt as the model saw it, where the run logged it beside what the row says.
static void prompt_as_seen(void **state)
{
    (void)state;
    const char *folder = test_path(test_folder(), "run");
    assert_ok(file_make_folders(test_path(folder, "rollouts")));
    write_metrics(folder, "{\"step\":1,\"reward\":1}\n");
    put_file(folder, "config.json", "{}");
    put_file(folder, "rollouts/step-1.jsonl",
             "{\"line\":1,\"sample\":0,\"prompt\":[{\"role\":\"user\",\"content\":\"said\"}],"
             "\"prompt_text\":\"<|user|>said<|end|>\",\"completion\":\"4\",\"reward\":1}\n");
    char *page = page_of(folder);
    assert_contains(page, "&lt;|user|&gt;said&lt;|end|&gt;");
    assert_null(strstr(page, "<b>user</b> said"));
    free(page);
}

static void a_whole_run(void **state)
{
    (void)state;
    const char *folder = test_path(test_folder(), "run <1>");
    struct bytes metrics = BYTES_INIT;
    assert_ok(file_make_folders(test_path(folder, "rollouts")));
    for (int i = 1; i <= 30; i++)
        bytes_printf(&metrics,
                     "{\"step\":%d,\"reward\":%g,\"rewards/exact/mean\":0.5,\"accuracy\":0.5,"
                     "\"curriculum/n_buckets\":4,\"brand_new\":%d,\"<script>\":1%s}\n",
                     i, 0.01 * i, i,
                     i % 10 ? ""
                            : ",\"eval/accuracy\":0.5,"
                              "\"eval/standard_error\":0.02");
    write_metrics(folder, bytes_text(&metrics));
    bytes_release(&metrics);
    put_file(folder, "config.json", "{\"data\":\"<b>\",\"seed\":42,\"stop\":null}");
    for (int i = 0; i < 25; i++) {
        char name[64], text[64];
        snprintf(name, sizeof name, "cluster-report-epoch-%d.txt", i);
        snprintf(text, sizeof text, "+---+\n| e%d & |\n+---+\n", i);
        put_file(folder, name, text);
    }
    put_file(folder, "rollouts/step-7.jsonl",
             "{\"line\":1,\"sample\":0,\"prompt\":[{\"role\":\"user\",\"content\":\"<i>2+2?\"}],"
             "\"answer\":\"4\",\"completion\":\"</pre><script src=http://x>4\",\"reward\":1,"
             "\"terms\":{\"exact\":1,\"cost/<b>\":-0.5},\"tokens\":3,\"truncated\":true,"
             "\"accepted\":[0,1,0],\"text_offset\":[0,6,27]}\n"
             "{\"line\":1,\"sample\":1,\"completion\":\"5\",\"reward\":0}\n"
             "{\"line\":1,\"sam");
    put_file(folder, "rollouts/step-8.jsonl.tmp", "not one of them");
    char *page = page_of(folder);
    static const char *const parts[] = {
        "run &lt;1&gt;</h1>",
        "data-metric=\"reward\"",
        "data-metric=\"rewards/exact/mean\"",
        "data-metric=\"accuracy\"",
        "data-metric=\"eval/accuracy\"",
        "data-metric=\"eval/standard_error\"",
        "data-metric=\"curriculum/n_buckets\"",
        "data-metric=\"brand_new\"",
        "data-metric=\"&lt;script&gt;\"",
        "Epoch 24</summary><pre>+---+\n| e24 &amp; |",
        "Epoch 0</summary>",
        "5 more",
        "Step 7 ",
        "&lt;i&gt;2+2?",
        "&lt;/pre&gt;<mark>&lt;script src=http://x&gt;</mark>4",
        "cost/&lt;b&gt;",
        "at the token limit",
        "2 of a group of 2 samples",
    };
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) assert_contains(page, parts[i]);
    assert_null(strstr(page, "Epoch 3<"));
    assert_null(strstr(page, "<script"));
    free(page);
}

static void missing_parts_are_left_out(void **state)
{
    (void)state;
    const char *folder = test_folder();
    write_metrics(folder, "");
    char *page = page_of(folder);
    assert_contains(page, "No step has been done yet");
    assert_null(strstr(page, "<figure"));
    assert_null(strstr(page, "<h2>"));
    free(page);
    write_metrics(folder, "{\"step\":1,\"reward\":0.5}\n"); // one step, and nothing else
    page = page_of(folder);
    assert_contains(page, "data-metric=\"reward\"");
    assert_null(strstr(page, "Rollouts"));
    free(page);
}

static void long_runs_give_small_pages(void **state)
{
    (void)state;
    const char *folder = test_folder();
    struct bytes metrics = BYTES_INIT;
    for (int i = 1; i <= 20000; i++)
        bytes_printf(&metrics, "{\"step\":%d,\"reward\":%g,\"loss\":%g}\n", i, sin(i), cos(i));
    write_metrics(folder, bytes_text(&metrics));
    bytes_release(&metrics);
    char *page = page_of(folder);
    assert_contains(page, "at most 1000 points");
    assert_contains(page, "class=\"band\"");
    assert_true(strlen(page) < 200000);
    free(page);
}

static void other_folders_are_refused(void **state)
{
    (void)state;
    const char *folder = test_folder();
    struct run_folder run;
    assert_status(run_folder_read(folder, &run), ST_NOT_FOUND);
    assert_message("there is no metrics.jsonl in it");
    assert_status(run_folder_read(test_path(folder, "none"), &run), ST_NOT_FOUND);
    assert_message("none");
    put_file(folder, "file", "x");
    assert_status(run_folder_read(test_path(folder, "file"), &run), ST_INVALID);
    assert_message("is no folder");
    write_metrics(folder, "[1,2]\n");
    assert_status(run_folder_read(folder, &run), ST_FORMAT);
    assert_message("\"step\"");
    write_metrics(folder, "");
    put_file(folder, "config.json", "{");
    assert_true(run_folder_read(folder, &run) != ST_OK);
    assert_message("config.json");
}

// The checker itself sees what it is there for.
static void the_checker_refuses(void **state)
{
    (void)state;
    static const char *const pages[] = {
        "<p></p>",
        "<!DOCTYPE html>\n<p>",
        "<!DOCTYPE html>\n<p></b>",
        "<!DOCTYPE html>\n</p>",
        "<!DOCTYPE html>\n<p>a & b</p>",
        "<!DOCTYPE html>\n<p>a < b</p>",
        "<!DOCTYPE html>\n<p class=x></p>",
        "<!DOCTYPE html>\n<p class=\"a\" class=\"b\"></p>",
        "<!DOCTYPE html>\n<script></script>",
        "<!DOCTYPE html>\n<p onclick=\"x\"></p>",
        "<!DOCTYPE html>\n<a href=\"https://x\"></a>",
        "<!DOCTYPE html>\n<style>p{background:url(x)}</style>",
    };
    char sentence[200];
    assert_true(html_check("<!DOCTYPE html>\n<p class=\"x\">a &lt; b<br/></p>", sentence, 200));
    for (size_t i = 0; i < sizeof pages / sizeof *pages; i++)
        if (html_check(pages[i], sentence, sizeof sentence)) fail_msg("taken: %s", pages[i]);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(axes),
        cmocka_unit_test(axes_hold_their_range),
        cmocka_unit_test(escaping),
        cmocka_unit_test(numbers),
        cmocka_unit_test(accepted_tokens_are_marked),
        cmocka_unit_test(series_of_a_file),
        cmocka_unit_test(long_series_are_reduced),
        cmocka_unit_test(chart_is_to_scale),
        cmocka_unit_test(a_whole_run),
        cmocka_unit_test(prompt_as_seen),
        cmocka_unit_test(missing_parts_are_left_out),
        cmocka_unit_test(long_runs_give_small_pages),
        cmocka_unit_test(other_folders_are_refused),
        cmocka_unit_test(the_checker_refuses),
    };
    return cmocka_run_group_tests_name("report", tests, NULL, NULL);
}
