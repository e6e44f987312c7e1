/* support.c: what tests share. Folders made here are remembered in a list that the end of the
 * program empties; children are started with a parent-death signal, so a crashed test leaves none.
 */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/support.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>

// ---- tests --------------------------------------------------------------------------------------

#define CHILDREN_MAX 64
static pid_t children[CHILDREN_MAX]; // that were not waited for yet
static int n_children;

// waitpid() with `options`. True once it has ended, with its status where it had not been waited
// for before.
static bool wait_for_end(pid_t pid, int options, int *ret_exit_status)
{
    int status = SIGKILL;
    pid_t ended;
    do ended = waitpid(pid, &status, options);
    while (ended < 0 && errno == EINTR);
    if (ended == 0) return false;
    for (int i = 0; i < n_children; i++)
        if (children[i] == pid) {
            memmove(&children[i], &children[i + 1], (size_t)(--n_children - i) * sizeof pid);
            break;
        }
    if (ret_exit_status)
        *ret_exit_status = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    return true;
}

static struct listed {
    int line;
    struct CMUnitTest test;
} * listed; // by line: a compiler may order constructors as it likes
static size_t n_listed;
static void (*before_all)(void), (*after_all)(void);
static int n_children_before; // started by before_all, or main()

void test_list(int line, struct CMUnitTest test)
{
    size_t i = n_listed++;
    listed = realloc(listed, n_listed * sizeof *listed);
    if (!listed) abort();
    for (; i > 0 && listed[i - 1].line > line; i--) listed[i] = listed[i - 1];
    listed[i].line = line;
    listed[i].test = test;
}

void test_fixtures(void (*before)(void), void (*after)(void))
{
    before_all = before;
    after_all = after;
}

static int run_before(void **state)
{
    (void)state;
    if (before_all) before_all();
    n_children_before = n_children;
    return 0;
}

static int run_after(void **state)
{
    (void)state;
    if (after_all) after_all();
    return 0;
}

static int run_after_one(void **state)
{
    struct CMUnitTest *test = *state;
    const int rc = test->teardown_func ? test->teardown_func(&test->initial_state) : 0;
    while (n_children > n_children_before) {
        kill(children[n_children - 1], SIGKILL);
        wait_for_end(children[n_children - 1], 0, NULL);
    }
    return rc;
}

static int run_before_one(void **state)
{
    struct CMUnitTest *test = *state;
    return test->setup_func ? test->setup_func(&test->initial_state) : 0;
}

#define LATER_MAX 256
static struct {
    void (*release)(void *object);
    void *object;
} laters[LATER_MAX]; // what a test that fails leaves here is forgotten
static int n_later;

void *test_later(void *object, void (*release)(void *))
{
    assert_true(n_later < LATER_MAX);
    laters[n_later].release = release;
    laters[n_later++].object = object;
    return object;
}

void test_now(void *object)
{
    int i = n_later - 1;
    while (i >= 0 && laters[i].object != object) i--;
    assert_true(i >= 0);
    void (*const release)(void *) = laters[i].release;
    memmove(&laters[i], &laters[i + 1], (size_t)(--n_later - i) * sizeof *laters);
    release(object);
}

static void run_one(void **state)
{
    struct CMUnitTest *test = *state;
    n_later = 0;
    test->test_func(&test->initial_state);
    while (n_later > 0) test_now(laters[n_later - 1].object);
}

int test_main(void)
{
    struct CMUnitTest *tests = calloc(n_listed, sizeof *tests);
    assert_non_null(tests);
    for (size_t i = 0; i < n_listed; i++)
        tests[i] = (struct CMUnitTest){listed[i].test.name, run_one, run_before_one, run_after_one,
                                       &listed[i].test};
    const int failed = _cmocka_run_group_tests(program_invocation_short_name, tests, n_listed,
                                               run_before, run_after);
    free(tests);
    free(listed);
    return failed;
}

void test_only(int argc, char **argv)
{
    if (argc > 1) cmocka_set_test_filter(argv[1]);
}

int main(int argc, char **argv)
{
    test_only(argc, argv);
    return test_main();
}

// ---- assertions ---------------------------------------------------------------------------------

void test_status(enum status got, enum status wanted, const char *expression, const char *file,
                 int line)
{
    if (got == wanted) return;
    print_error("%s: %s instead of %s: \"%s\"\n", expression, status_words(got),
                status_words(wanted), got == ST_OK ? "" : status_message());
    _fail(file, line);
}

void test_contains(const char *text, const char *part, const char *file, int line)
{
    if (text && strstr(text, part)) return;
    print_error("\"%s\" does not contain \"%s\"\n", text ? text : "(null)", part);
    _fail(file, line);
}

void test_near(double got, double wanted, double max, const char *file, int line)
{
    if (fabs(got - wanted) <= max) return;
    print_error("%.17g is not %.17g\n", got, wanted);
    _fail(file, line);
}

static bool json_matches(const json_t *got, const json_t *wanted)
{
    size_t i;
    const char *key;
    json_t *item;
    bool same = got && json_typeof(got) == json_typeof(wanted);
    if (json_is_null(wanted)) {
        same = !got || json_is_null(got);
    } else if (json_is_number(wanted)) {
        const double want = json_number_value(wanted);
        same = json_is_number(got) &&
               fabs(json_number_value(got) - want) <= 1e-12 * fmax(1, fabs(want));
    } else if (same && json_is_object(wanted)) {
        json_object_foreach ((json_t *)wanted, key, item)
            if (!json_matches(json_object_get(got, key), item)) return false;
    } else if (same && json_is_array(wanted)) {
        same = json_array_size(got) == json_array_size(wanted);
        for (i = 0; same && i < json_array_size(wanted); i++)
            if (!json_matches(json_array_get(got, i), json_array_get(wanted, i))) return false;
    } else {
        same = json_equal(got, wanted);
    }
    if (!same)
        print_error("%s is not %s\n",
                    got ? (char *)test_keep(json_dumps(got, JSON_ENCODE_ANY)) : "nothing",
                    (char *)test_keep(json_dumps(wanted, JSON_ENCODE_ANY)));
    return same;
}

void test_matches(const json_t *got, const json_t *wanted, const char *file, int line)
{
    if (!json_matches(got, wanted)) _fail(file, line);
}

void test_skip(const char *format, ...)
{
    char reason[1024];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(reason, sizeof reason, format, arguments);
    va_end(arguments);
    print_message("skipped: %s\n", reason);
    skip();
    abort(); // skip() jumps away; the compiler is not told
}

// ---- folders ------------------------------------------------------------------------------------

// Memory that lives as long as the program; kept reachable, so that it is no leak.
static struct kept {
    struct kept *next;
    bool folder; // remove it at the end
    char text[];
} * all_kept;
static pid_t owner; // forked children must not remove the folders

static void remove_folders(void)
{
    for (struct kept *k = all_kept; k && getpid() == owner; k = k->next)
        if (k->folder) file_remove_tree(k->text);
}

static char *keep(const char *text, bool folder)
{
    size_t size = strlen(text) + 1;
    struct kept *k = malloc(sizeof *k + size);
    assert_non_null(k);
    memcpy(k->text, text, size);
    if (!owner) {
        owner = getpid();
        atexit(remove_folders);
    }
    k->folder = folder;
    k->next = all_kept;
    all_kept = k;
    return k->text;
}

void *test_keep(void *memory)
{
    static struct kept_memory {
        struct kept_memory *next;
        void *memory;
    } * _Atomic newest; // reachable, so that it is no leak
    struct kept_memory *k = malloc(sizeof *k);
    if (!k) abort();
    k->memory = memory;
    k->next = newest;
    while (!atomic_compare_exchange_weak(&newest, &k->next, k)) continue;
    return memory;
}

void *test_copy(const void *memory, size_t size)
{
    void *copy = malloc(size ? size : 1);
    assert_non_null(copy);
    return test_keep(memcpy(copy, memory, size));
}

const char *test_folder(void)
{
    const char *base = getenv("TMPDIR");
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/cw.XXXXXX", base && *base ? base : "/tmp");
    if (!mkdtemp(path)) fail_msg("cannot make %s: %s", path, strerror(errno));
    return keep(path, true);
}

const char *test_path(const char *folder, const char *name)
{
    char path[PATH_ROOM];
    assert_ok(path_put(path, folder, "%s", name));
    return keep(path, false);
}

const char *test_text(const char *format, ...)
{
    char *text = NULL;
    va_list arguments;
    va_start(arguments, format);
    assert_true(vasprintf(&text, format, arguments) >= 0);
    va_end(arguments);
    return test_keep(text);
}

// The folder of this program's binary.
static void program_folder(char ret[PATH_MAX])
{
    ssize_t n = readlink("/proc/self/exe", ret, PATH_MAX - 1);
    if (n <= 0) fail_msg("cannot read /proc/self/exe: %s", strerror(errno));
    ret[n] = 0;
    *strrchr(ret, '/') = 0;
}

// Cuts components off `path` until it holds the file `mark`; false if none does.
static bool climb_to(char *path, const char *mark)
{
    for (;;) {
        char candidate[2 * PATH_MAX];
        snprintf(candidate, sizeof candidate, "%s/%s", path, mark);
        if (file_exists(candidate)) return true;
        char *slash = strrchr(path, '/');
        if (!slash) return false;
        *slash = 0;
    }
}

const char *test_root(void)
{
    static const char *root;
    if (root) return root;
    char path[PATH_MAX];
    if (getcwd(path, sizeof path) && climb_to(path, "common/base/status.h"))
        return root = keep(path, false);
    program_folder(path);
    if (!climb_to(path, "common/base/status.h"))
        fail_msg("the repository is not found: run tests from its root");
    return root = keep(path, false);
}

// BUILD/NAME of this build.
static const char *built(const char *name)
{
    char path[PATH_MAX];
    program_folder(path); // BUILD/tests/unit
    char *tests = strstr(path, "/tests/");
    for (char *later = tests; later; later = strstr(later + 1, "/tests/")) tests = later;
    if (!tests) fail_msg("%s is not BUILD/tests/KIND", path);
    *tests = 0;
    return test_path(path, name);
}

const char *test_binary(const char *name)
{
    const char *binary = built(name);
    if (!file_exists(binary)) test_skip("%s is not built", binary);
    return binary;
}

const char *test_golden(const char *name)
{
    const char *folder = test_path(built("golden"), name);
    if (!file_exists(folder)) fail_msg("%s is not there: 'make tests' makes it", folder);
    return folder;
}

void test_data_folder(const char *name, char ret_path[PATH_MAX])
{
    const char *base = getenv("COMMONWEIGHT_DATA");
    int n = base && *base ? snprintf(ret_path, PATH_MAX, "%s/%s", base, name)
                          : snprintf(ret_path, PATH_MAX, "%s/../shared/data/%s", test_root(), name);
    assert_in_range(n, 1, PATH_MAX - 1);
    if (!file_exists(ret_path))
        test_skip("no test data at %s (set COMMONWEIGHT_DATA to the folder that holds it)",
                  ret_path);
}

char *test_read(const char *path)
{
    struct bytes text = BYTES_INIT;
    assert_ok(file_read(path, 1u << 30, &text));
    return test_keep(text.data ? text.data : strdup("")); // the buffer ends in NUL
}

int test_count(const char *path, const char *text)
{
    SCOPED(bytes_release) struct bytes all = BYTES_INIT;
    int n = 0;
    if (file_exists(path)) assert_ok(file_read(path, 1u << 30, &all));
    for (const char *at = bytes_text(&all); (at = strstr(at, text)); at += strlen(text)) n++;
    return n;
}

void test_wait_for_text(const char *path, const char *text, int64_t ms, struct test_child *child)
{
    const int64_t deadline = clock_deadline_ns(ms);
    for (bool over = false; test_count(path, text) == 0; clock_sleep_ms(10)) {
        if (over) fail_msg("no \"%s\" in %s:\n%s", text, path, test_read(path));
        over = clock_ms_until(deadline) == 0 || (child && !test_running(child)); // one look more
    }
}

void test_write(const char *path, const void *data, size_t len)
{
    FILE *file = fopen(path, "wb");
    if (!file) fail_msg("cannot write %s: %s", path, strerror(errno));
    size_t written = fwrite(data, 1, len, file);
    int closed = fclose(file);
    assert_int_equal(written, len);
    assert_int_equal(closed, 0);
}

void test_each(const json_t *rows, void (*check)(const json_t *rows, size_t i))
{
    for (size_t i = 0; i < json_array_size(rows); i++) check(rows, i);
}

void test_put(const char *folder, const char *name, const char *text)
{
    test_write(test_path(folder, name), text, strlen(text));
}

const json_t *test_rows(const char *file, const char *list)
{
    char name[64];
    json_error_t error;
    snprintf(name, sizeof name, "tests/cases/%s.json", file);
    json_t *all = test_keep(json_load_file(test_path(test_root(), name), 0, &error));
    if (!all) fail_msg("%s, line %d: %s", name, error.line, error.text);
    const json_t *rows = json_object_get(all, list);
    if (json_array_size(rows) == 0) fail_msg("%s has no rows \"%s\"", name, list);
    return rows;
}

static const json_t *field_of(const json_t *rows, size_t i, const char *field,
                              bool (*is)(const json_t *))
{
    const json_t *value = json_object_get(json_array_get(rows, i), field);
    if (!value || !is(value)) fail_msg("row %zu has no such \"%s\"", i, field);
    return value;
}

static bool is_text(const json_t *value)
{
    return json_is_string(value) || json_is_null(value);
}

static bool is_list(const json_t *value)
{
    return json_is_array(value);
}

static bool is_number(const json_t *value)
{
    return json_is_number(value);
}

static bool is_int(const json_t *value)
{
    return json_is_integer(value);
}

static bool is_flag(const json_t *value)
{
    return json_is_boolean(value);
}

const char *row_text(const json_t *rows, size_t i, const char *field)
{
    return json_string_value(field_of(rows, i, field, is_text));
}

const char *const *row_words(const json_t *rows, size_t i, const char *field)
{
    static const char *words[32];
    const json_t *list = field_of(rows, i, field, is_list);
    const size_t n = json_array_size(list);
    assert_in_range(n, 0, 31);
    for (size_t k = 0; k <= n; k++) words[k] = json_string_value(json_array_get(list, k));
    return words;
}

double row_number(const json_t *rows, size_t i, const char *field)
{
    return json_number_value(field_of(rows, i, field, is_number));
}

int row_numbers(const json_t *rows, size_t i, const char *field, double *ret, int max)
{
    const json_t *list = field_of(rows, i, field, is_list);
    const int n = (int)json_array_size(list);
    assert_in_range(n, 0, max);
    for (int k = 0; k < n; k++) ret[k] = json_number_value(json_array_get(list, (size_t)k));
    return n;
}

int row_int(const json_t *rows, size_t i, const char *field)
{
    return (int)json_integer_value(field_of(rows, i, field, is_int));
}

bool row_flag(const json_t *rows, size_t i, const char *field)
{
    return json_is_true(field_of(rows, i, field, is_flag));
}

enum status row_status(const json_t *rows, size_t i, const char *field)
{
#define NAME_OF(name, words) #name,
    static const char *const names[] = {STATUS_TABLE(NAME_OF)};
    const char *wanted = row_text(rows, i, field);
    size_t k = 0;
    while (k < sizeof names / sizeof *names && strcmp(names[k], wanted) != 0) k++;
    if (k == sizeof names / sizeof *names) fail_msg("row %zu: there is no status %s", i, wanted);
    return (enum status)k;
}

json_t *json_of(const char *text)
{
    json_t *json = NULL;
    assert_ok(json_parse("the test", text, strlen(text), &json));
    return test_keep(json);
}

json_t *json_quoted(const char *text)
{
    char *quoted = test_keep(strdup(text));
    for (char *at = quoted; (at = strchr(at, '\''));) *at = '"';
    return json_of(quoted);
}

json_t *json_of_file(const char *path)
{
    json_t *json = NULL;
    assert_ok(json_read_file(path, 1 << 24, &json));
    return test_keep(json);
}

json_t *json_of_lines(const char *text)
{
    json_t *lines = test_keep(json_array()), *one;
    for (const char *end; (end = strchr(text, '\n')); text = end + 1) {
        assert_ok(json_parse("a line", text, (size_t)(end - text), &one));
        json_array_append_new(lines, one);
    }
    if (*text) { // without an end of line
        assert_ok(json_parse("the last line", text, strlen(text), &one));
        json_array_append_new(lines, one);
    }
    return lines;
}

json_t *json_of_lines_file(const char *path)
{
    return json_of_lines(test_read(path));
}

json_t *json_at(const json_t *json, const char *format, ...)
{
    char path[160], whole[160], *remaining = path;
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(path, sizeof path, format, arguments);
    va_end(arguments);
    memcpy(whole, path, sizeof whole);
    json_t *at = (json_t *)json;
    for (const char *part; *path && (part = strsep(&remaining, "."));) {
        at = json_is_array(at) ? json_array_get(at, (size_t)atoi(part)) : json_object_get(at, part);
        if (!at) fail_msg("there is no \"%s\" of %s", part, whole);
    }
    return at;
}

const char *text_of(const json_t *json, const char *path)
{
    const json_t *value = json_at(json, "%s", path);
    if (!json_is_string(value)) fail_msg("\"%s\" is not a string", path);
    return json_string_value(value);
}

json_int_t int_of(const json_t *json, const char *path)
{
    const json_t *value = json_at(json, "%s", path);
    if (!json_is_integer(value)) fail_msg("\"%s\" is not a whole number", path);
    return json_integer_value(value);
}

double real_of(const json_t *json, const char *path)
{
    const json_t *value = json_at(json, "%s", path);
    if (!json_is_number(value)) fail_msg("\"%s\" is not a number", path);
    return json_number_value(value);
}

int entries_of(const char *folder, const char *beginning)
{
    int n = 0;
    DIR *dir = opendir(folder);
    if (!dir) fail_msg("%s: %s", folder, strerror(errno));
    for (const struct dirent *e; (e = readdir(dir));)
        n += e->d_name[0] != '.' && strncmp(e->d_name, beginning, strlen(beginning)) == 0;
    closedir(dir);
    return n;
}

int for_lines(const char *path, void (*check)(char *line))
{
    char *next = test_read(test_path(test_root(), path));
    int n = 0;
    for (char *line; (line = strsep(&next, "\n"));) {
        if (!*line || *line == '#') continue;
        check(line);
        n++;
    }
    return n;
}

void test_same_file(const char *folder_a, const char *folder_b, const char *name)
{
    SCOPED(file_map_release) struct file_map a, b;
    assert_ok(file_map_open(test_path(folder_a, name), &a));
    assert_ok(file_map_open(test_path(folder_b, name), &b));
    assert_int_equal(a.len, b.len);
    assert_memory_equal(a.data, b.data, a.len);
}

// ---- child processes ----------------------------------------------------------------------------

const char *const *words_of(const char *line)
{
    const char **words = test_keep(calloc(strlen(line) + 1, sizeof *words));
    char *remaining = test_keep(strdup(line));
    for (int n = 0; *remaining; n++) {
        const char end[] = {*remaining == '\'' ? *remaining++ : ' ', '\0'};
        words[n] = remaining;
        remaining += strcspn(remaining, end);
        if (*remaining) *remaining++ = '\0';
        if (*remaining == ' ') remaining++;
    }
    return words;
}

// A word of args() with its arguments put in.
static const char *fill(const char *word, va_list *arguments)
{
    struct bytes text = BYTES_INIT;
    if (!strchr(word, '%')) return word;
    for (; *word; word++) {
        if (*word != '%' || *++word == '%')
            bytes_append(&text, word, 1);
        else if (*word == 's')
            bytes_puts(&text, va_arg(*arguments, const char *));
        else
            bytes_printf(&text, "%d", va_arg(*arguments, int));
    }
    return test_keep(text.data ? text.data : strdup(""));
}

const char *const *args_v(const char *format, va_list given)
{
    va_list arguments;
    const char **words = (const char **)(uintptr_t)words_of(format);
    va_copy(arguments, given);
    for (int i = 0; words[i]; i++) words[i] = fill(words[i], &arguments);
    va_end(arguments);
    return words;
}

const char *const *args(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    const char *const *words = args_v(format, arguments);
    va_end(arguments);
    return words;
}

const char *const *with_word(const char *const words[], const char *was, const char *is)
{
    const char **all = (const char **)(uintptr_t)JOIN(words);
    int i = 0;
    while (all[i] && strcmp(all[i], was) != 0) i++;
    assert_non_null(all[i]);
    all[i] = is;
    return all;
}

const char *const *join_words(const char *const *const lists[], size_t n)
{
    size_t count = 0;
    for (size_t i = 0; i < n; i++)
        for (const char *const *word = lists[i]; word && *word; word++) count++;
    const char **all = test_keep(calloc(count + 1, sizeof *all));
    count = 0;
    for (size_t i = 0; i < n; i++)
        for (const char *const *word = lists[i]; word && *word; word++) all[count++] = *word;
    return all;
}

static void print_log(const struct test_child *child)
{
    SCOPED(bytes_release) struct bytes text = BYTES_INIT;
    if (file_read(child->log, 1u << 30, &text) != ST_OK) return;
    size_t from = text.len > 4000 ? text.len - 4000 : 0;
    print_error("--- output of %s (%s):\n%s\n---\n", child->program, child->log,
                bytes_text(&text) + from);
}

static void run_child(const char *log, const char *const argv[], pid_t parent)
{
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) _exit(127); // it died before the line above
    int in = open("/dev/null", O_RDONLY), out = open(log, O_WRONLY | O_CREAT | O_APPEND, 0644);
    if (in < 0 || out < 0) _exit(127);
    dup2(in, STDIN_FILENO);
    dup2(out, STDOUT_FILENO);
    dup2(out, STDERR_FILENO);
    execvp(argv[0], (char *const *)(uintptr_t)argv);
    dprintf(STDERR_FILENO, "cannot run %s: %s\n", argv[0], strerror(errno));
    _exit(127);
}

void test_spawn(struct test_child *child, const char *log, const char *const argv[])
{
    assert_false(test_running(child));
    assert_in_range(n_children, 0, CHILDREN_MAX - 1);
    *child = (struct test_child){.program = argv[0]};
    snprintf(child->log, sizeof child->log, "%s", log);
    fflush(NULL);
    pid_t parent = getpid(), pid = fork();
    if (pid == 0) run_child(log, argv, parent);
    if (pid < 0) fail_msg("fork: %s", strerror(errno));
    child->pid = children[n_children++] = pid;
}

// waitpid() with `options`; notes the exit status when the child has ended.
static void reap(struct test_child *child, int options)
{
    if (child->pid == 0 || !wait_for_end(child->pid, options, &child->exit_status)) return;
    child->pid = 0;
}

bool test_running(struct test_child *child)
{
    reap(child, WNOHANG);
    return child->pid != 0;
}

int test_wait(struct test_child *child, int64_t ms)
{
    int64_t deadline = clock_deadline_ns(ms);
    while (test_running(child)) {
        if (clock_ms_until(deadline) == 0) {
            test_end(child);
            print_log(child);
            fail_msg("%s did not end within %lld ms", child->program, (long long)ms);
        }
        clock_sleep_ms(2);
    }
    return child->exit_status;
}

void test_kill(struct test_child *child, int signal)
{
    if (child->pid) kill(child->pid, signal);
}

void test_end(struct test_child *child)
{
    if (!test_running(child)) return;
    kill(child->pid, SIGKILL);
    reap(child, 0);
}

int test_command(const char *log, int64_t ms, const char *const argv[])
{
    struct test_child child = {0};
    test_spawn(&child, log, argv);
    return test_wait(&child, ms);
}

char *test_output(int status, const char *const argv[])
{
    const char *log = test_path(test_folder(), "output");
    const int got = test_command(log, 240000, argv);
    char *text = test_read(log);
    if (got != status) fail_msg("%s: status %d, not %d: %s", argv[0], got, status, text);
    return text;
}

char *test_shell(const char *format, ...)
{
    va_list arguments;
    SCOPED(bytes_release) struct bytes line = BYTES_INIT;
    va_start(arguments, format);
    bytes_vprintf(&line, format, arguments);
    va_end(arguments);
    char *text = test_output(0, OPTIONS("sh", "-c", bytes_text(&line)));
    return text;
}

static bool takes_connections(const char *path)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    if (strlen(path) >= sizeof address.sun_path)
        fail_msg("socket path %s is longer than %zu bytes", path, sizeof address.sun_path - 1);
    memcpy(address.sun_path, path, strlen(path) + 1);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0) fail_msg("socket: %s", strerror(errno));
    bool ok = connect(fd, (struct sockaddr *)&address, sizeof address) == 0;
    close(fd);
    return ok;
}

static void wait_for(bool (*ready)(const char *), const char *path, int64_t ms,
                     struct test_child *child)
{
    int64_t deadline = clock_deadline_ns(ms);
    while (!ready(path)) {
        bool ended = child && !test_running(child);
        if (ended || clock_ms_until(deadline) == 0) {
            if (child) print_log(child);
            if (ended)
                fail_msg("%s ended with status %d before %s was there", child->program,
                         child->exit_status, path);
            if (child) test_end(child);
            fail_msg("%s was not there within %lld ms", path, (long long)ms);
        }
        clock_sleep_ms(2);
    }
}

void test_wait_for_file(const char *path, int64_t ms, struct test_child *child)
{
    wait_for(file_exists, path, ms, child);
}

void test_wait_for_socket(const char *path, int64_t ms, struct test_child *child)
{
    wait_for(takes_connections, path, ms, child);
}

const char *test_python(const char *modules)
{
    const char *python = getenv("COMMONWEIGHT_TEST_PYTHON");
    if (!python || !*python) python = "python3";
    char command[512];
    snprintf(command, sizeof command, "'%s' -c 'import %s' >/dev/null 2>&1", python, modules);
    if (system(command) != 0)
        test_skip("%s has no modules %s (a Python that has them: COMMONWEIGHT_TEST_PYTHON)", python,
                  modules);
    return python;
}

const char *test_device(void)
{
    const char *device = getenv("COMMONWEIGHT_TEST_DEVICE");
    return device && *device ? device : "cpu";
}

bool on_cpu(void)
{
    return strcmp(test_device(), "cpu") == 0;
}

long test_process(pid_t pid, const char *field, int base)
{
    const char *line = strstr(test_read(test_text("/proc/%d/status", (int)pid)), field);
    if (!line) fail_msg("process %d has no %s", (int)pid, field);
    return strtol(line + strlen(field), NULL, base);
}
