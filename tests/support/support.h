/* support.h: what tests share: folders, the repository and its data, child processes, assertions on
 * statuses. Functions that cannot do their part fail the running test (or skip it, where said), so
 * that callers need no checks. One thread. */
// SPDX-License-Identifier: Apache-2.0
#ifndef TESTS_SUPPORT_SUPPORT_H
#define TESTS_SUPPORT_SUPPORT_H

#include "common/base/clock.h"
#include "common/base/file.h"
#include "common/base/json.h"
#include "common/base/status.h"
#include <float.h>
#include <limits.h>
#include <math.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>
#include <cmocka.h>

// ---- tests --------------------------------------------------------------------------------------

// TEST(name) { ... } is a test: the program runs those of its file in the file's order, or the ones
// that its argument, a pattern with * and ?, names. It has cmocka's `state`, and with TEST_WITH a
// function of cmocka's before and after it (NULL: none) and what *state points to. Children that it
// has started and that still run are killed behind it.
#define TEST(name) TEST_WITH(name, NULL, NULL, NULL)
#define TEST_WITH(name, before, after, data)                                                       \
    static void name(void **state);                                                                \
    __attribute__((constructor)) static void list_##name(void)                                     \
    {                                                                                              \
        test_list(__LINE__, (struct CMUnitTest){#name, name, before, after, data});                \
    }                                                                                              \
    static void name(void **state __attribute__((unused)))
// What runs once before and after the tests of a file (NULL: nothing).
#define TESTS_BETWEEN(before, after)                                                               \
    __attribute__((constructor)) static void list_fixtures(void)                                   \
    {                                                                                              \
        test_fixtures(before, after);                                                              \
    }

// TEST(name) of the rows of test_rows(file, "name"): what follows is called with each of them, as
// cases[i].
#define TEST_EACH(name, file)                                                                      \
    static void name##_row(const json_t *cases, size_t i);                                         \
    TEST(name)                                                                                     \
    {                                                                                              \
        test_each(test_rows(file, #name), name##_row);                                             \
    }                                                                                              \
    static void name##_row(const json_t *cases, size_t i)
// A variable that release(&variable) is called for where its block ends; not where a test fails.
#define SCOPED(release) __attribute__((cleanup(release)))

// Calls release(object) when the running test ends well, those given last first; the object.
void *test_later(void *object, void (*release)(void *));
void test_now(void *object); // does so at once
// Makes FREE_later() of a function that frees one, as test_later() takes it.
#define LATER(free)                                                                                \
    static void free##_later(void *object)                                                         \
    {                                                                                              \
        free(object);                                                                              \
    }

void test_list(int line, struct CMUnitTest test); // line 0: before those with one
void test_fixtures(void (*before)(void), void (*after)(void));
// Runs what is listed; the exit status. A file whose program does more than that calls it in a
// main() of its own.
int test_main(void);
// Of what is listed that whose name a program's first argument is ("llama*": or begins with), where
// it has one.
void test_only(int argc, char **argv);

// ---- assertions ---------------------------------------------------------------------------------

// Succeeds with ST_OK; otherwise fails the test and prints the sentence of the error.
#define assert_ok(expression) test_status((expression), ST_OK, #expression, __FILE__, __LINE__)
// Succeeds if the result is `code`, which may be an error.
#define assert_status(expression, code)                                                            \
    test_status((expression), (code), #expression, __FILE__, __LINE__)
// Both: the result is an error of this code, whose sentence contains `part`.
#define assert_fails(expression, code, part)                                                       \
    (assert_status((expression), (code)), assert_message(part))
// The sentence of the last error contains `part`.
#define assert_message(part)        test_contains(status_message(), (part), __FILE__, __LINE__)
#define assert_contains(text, part) test_contains((text), (part), __FILE__, __LINE__)

// JSON has what `wanted` has, a text as json_quoted() takes it, or JSON: of objects the named
// fields (null: none), of lists every item; numbers lie within 1e-12 of it, and of so much of it.
#define assert_json(got, wanted) assert_has((got), json_quoted(wanted))
#define assert_has(got, wanted)  test_matches((got), (wanted), __FILE__, __LINE__)

// Differs by no more than that; a NaN does.
#define assert_near(got, wanted, max) test_near((got), (wanted), (max), __FILE__, __LINE__)

// The exit status of what is run.
#define assert_exit(status, run) assert_int_equal(run, status)

void test_status(enum status got, enum status wanted, const char *expression, const char *file,
                 int line);
void test_contains(const char *text, const char *part, const char *file, int line);
void test_near(double got, double wanted, double max, const char *file, int line);
void test_matches(const json_t *got, const json_t *wanted, const char *file, int line);

// ---- folders ------------------------------------------------------------------------------------

// A new empty folder under $TMPDIR (or /tmp). It and its content go when the program ends. The path
// lives as long as the program.
const char *test_folder(void);

// FOLDER/NAME. The path lives as long as the program.
const char *test_path(const char *folder, const char *name);

// A text as of printf(), which lives as long as the program.
const char *test_text(const char *format, ...) __attribute__((format(printf, 1, 2)));

// The repository's root (looked for upwards from the working folder, then from the program).
const char *test_root(void);

// A program of this build, "cw-trainer" -> "BUILD/cw-trainer". Skips the test where it was not
// built.
const char *test_binary(const char *name);

// The model folder of reference values tests/golden/NAME with its weights, which this build made;
// "" is the folder of them all.
const char *test_golden(const char *name);

// Folder or file `name` of the shared test data: under $COMMONWEIGHT_DATA, or ../shared/data beside
// the repository. Skips the test, with the reason printed, where it is not there.
void test_data_folder(const char *name, char ret_path[PATH_MAX]);

// Keeps what malloc() or jansson gave as long as the program lives, which then need not free it.
// Any thread.
void *test_keep(void *memory);
void *test_copy(const void *memory, size_t size); // kept

// Prints "skipped: <reason>" and skips the test.
void test_skip(const char *format, ...) __attribute__((format(printf, 1, 2), noreturn));

// A Python that has these modules ("torch, transformers"): $COMMONWEIGHT_TEST_PYTHON, or python3.
// Skips the test where it lacks one.
const char *test_python(const char *modules);

// The device that daemons and trainers of this test run use: $COMMONWEIGHT_TEST_DEVICE, or "cpu".
const char *test_device(void);
bool on_cpu(void);
// Number `field` ("VmRSS:") of /proc/PID/status, in that base.
long test_process(pid_t pid, const char *field, int base);

struct test_child; // below
// Content of a file as a string, which lives as long as the program.
char *test_read(const char *path);
// How often a file has the text; 0 where there is no file.
int test_count(const char *path, const char *text);
// Waits until a file has the text. Past `ms`, or when `child` (may be NULL) ends meanwhile: fails
// the test with what the file has.
void test_wait_for_text(const char *path, const char *text, int64_t ms, struct test_child *child);
void test_write(const char *path, const void *data, size_t len);
void test_put(const char *folder, const char *name, const char *text); // FOLDER/NAME
// The JSON of a text, of a file, and of each line of a text or a file, as a list. They live as long
// as the program.
json_t *json_of(const char *text);
json_t *json_quoted(const char *text); // with ' for "
json_t *json_of_file(const char *path);
json_t *json_of_lines(const char *text);
json_t *json_of_lines_file(const char *path);
// What stands in it at a path of keys and places, "choices.0.text"; "" is all of it. Each fails the
// test where there is nothing, or another kind of value.
json_t *json_at(const json_t *json, const char *format, ...) __attribute__((format(printf, 2, 3)));
const char *text_of(const json_t *json, const char *path);
json_int_t int_of(const json_t *json, const char *path);
double real_of(const json_t *json, const char *path);
// Files and folders in a folder whose names begin with `beginning`, hidden ones aside.
int entries_of(const char *folder, const char *beginning);
// Calls `check` with each line of a file of the repository that is neither empty nor begins with #;
// how many there are.
int for_lines(const char *path, void (*check)(char *line));
// Cases that differ by data alone: the list LIST of tests/cases/FILE.json. Its rows are objects,
// whose fields (row_text: a string or null) all must be there. They live as long as the program.
const json_t *test_rows(const char *file, const char *list);
void test_each(const json_t *rows, void (*check)(const json_t *rows, size_t i));
const char *row_text(const json_t *rows, size_t i, const char *field);
// A list of texts, NULL-ended; until the next call.
const char *const *row_words(const json_t *rows, size_t i, const char *field);
double row_number(const json_t *rows, size_t i, const char *field);
// A list of up to `max` numbers; how many.
int row_numbers(const json_t *rows, size_t i, const char *field, double *ret, int max);
int row_int(const json_t *rows, size_t i, const char *field);
bool row_flag(const json_t *rows, size_t i, const char *field);
enum status row_status(const json_t *rows, size_t i, const char *field); // "ST_FORMAT"
// Both folders' files of that name hold the same bytes.
void test_same_file(const char *folder_a, const char *folder_b, const char *name);

// ---- child processes ----------------------------------------------------------------------------

// The words of a command line, or a part of them, as a NULL-ended list: word by word; or those of
// a line, with blanks between them, '...' being one word, which live as long as the program. In
// args()'s a %s or %d is the next argument, blanks and all.
#define OPTIONS(...) ((const char *const[]){__VA_ARGS__, NULL})
const char *const *words_of(const char *line);
const char *const *args(const char *format, ...) __attribute__((format(printf, 1, 2)));
const char *const *args_v(const char *format, va_list arguments)
    __attribute__((format(printf, 1, 0)));
// Such lists, one behind the other, as one; NULL is an empty one.
#define JOIN(...)                                                                                  \
    join_words((const char *const *const[]){__VA_ARGS__},                                          \
               sizeof((const char *const *const[]){__VA_ARGS__}) / sizeof(const char *const *))
const char *const *with_word(const char *const words[], const char *was, const char *is); // instead
const char *const *join_words(const char *const *const lists[], size_t n);

// Zero-initialise; test_end() may then be called at any time, also twice, and need not be at the
// end of a test.
struct test_child {
    pid_t pid;           // 0: none, or already waited for
    int exit_status;     // once ended: 0..255, or 128 + signal
    char log[PATH_MAX];  // its standard output and standard error
    const char *program; // argv[0]
};

// Starts argv[0] (a path, or found on $PATH) with stdin from /dev/null and its output in `log`
// (appended). The child is killed if this program dies.
void test_spawn(struct test_child *child, const char *log, const char *const argv[]);
// Waits for the end and returns the exit status. Past `ms`: kills it, prints its log, fails the
// test.
int test_wait(struct test_child *child, int64_t ms);
bool test_running(struct test_child *child);
void test_kill(struct test_child *child, int signal); // sends it; does not wait
void test_end(struct test_child *child);              // kills with SIGKILL if it runs, and waits
// test_spawn and test_wait in one.
int test_command(const char *log, int64_t ms, const char *const argv[]);
// What a command says, which ends with this status within four minutes; and a line for sh, with 0.
char *test_output(int status, const char *const argv[]);
char *test_shell(const char *format, ...) __attribute__((format(printf, 1, 2)));

// Wait until `path` exists, or a Unix socket at `path` takes connections. Past `ms`, or when
// `child` (may be NULL) ends meanwhile: prints the child's log and fails the test.
void test_wait_for_file(const char *path, int64_t ms, struct test_child *child);
void test_wait_for_socket(const char *path, int64_t ms, struct test_child *child);

#endif
