/* test_checkpoint.c: trainer/checkpoint (round trip, crash in the middle, which are kept) and the
 * run's log beside it. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/loaded.h"
#include "tests/support/support.h"
#include "tests/support/tiny_model.h"
#include "trainer/run/checkpoint.h"
#include "trainer/run/runlog.h"

#include <dirent.h>
#include <errno.h>
#include <sys/resource.h>
#include <sys/wait.h>

struct fixture {
    const char *source, *run, *checkpoints;
    struct loaded model;
    struct optimizer *optimizer;
    const struct model_folder *draft; // NULL: none
    const int64_t *best;              // NULL: none
};

// Hidden ones too.
static int entries(const char *folder)
{
    DIR *dir = opendir(folder);
    int n = 0;
    assert_non_null(dir);
    while (readdir(dir)) n++;
    closedir(dir);
    return n - 2; // . and ..
}

static struct optimizer *new_optimizer(const struct fixture *f)
{
    static const struct optimizer_config adamw = {0.9, 0.999, 1e-8, 0, 0, MOMENTS_F32, false};
    struct optimizer *o;
    assert_ok(optimizer_new_whole(f->model.dev, f->model.weights, &adamw, &o));
    return o;
}

static void fixture_close(void *fixture)
{
    struct fixture *f = fixture;
    optimizer_free(f->optimizer);
    loaded_close(&f->model);
}

// Closed with the test.
static struct fixture *fixture(void)
{
    struct fixture *f = test_keep(calloc(1, sizeof *f));
    f->source = test_folder();
    f->run = test_folder();
    f->checkpoints = test_path(f->run, "checkpoints");
    assert_ok(tiny_model_write(f->source, 32, 2, 80, 4));
    test_write(test_path(f->source, "tokenizer.json"), "{\"tokens\": 1}", 13);
    assert_ok(loaded_open(f->source, DT_F32, &f->model));
    f->optimizer = new_optimizer(f);
    return test_later(f, fixture_close);
}

static void *weights_of(const struct fixture *f) // as they are
{
    void *copy = test_keep(malloc(f->model.weights->bytes));
    return memcpy(copy, f->model.weights->base, f->model.weights->bytes);
}

static void train_one(struct fixture *f, float gradient)
{
    double norm;
    const struct weights *g = optimizer_grads(f->optimizer, 0);
    for (int t = 0; t < g->n_tensors; t++)
        for (int64_t i = 0; i < g->tensors[t].n; i++)
            ((float *)g->base)[g->tensors[t].offset + i] = gradient;
    assert_ok(optimizer_prepare(f->optimizer, &norm));
    assert_ok(optimizer_apply(f->optimizer, 1e-3));
}

static enum status write_step(struct fixture *f, int64_t step, int keep, char ret_folder[PATH_ROOM])
{
    json_t *state =
        test_keep(json_pack("{s:I, s:I, s:{s:s}}", "step", (json_int_t)step, "data_index",
                            (json_int_t)(10 * step), "start", "note", "kept"));
    const struct model_folder policy = {.weights = f->model.weights,
                                        .as = DT_F32,
                                        .source_folder = f->source,
                                        .optimizer = f->optimizer,
                                        .state = state,
                                        .draft = f->draft};
    const struct checkpoint_others others = {.best_step = f->best, .keep = keep};
    enum status st = checkpoint_write(f->run, f->model.dev, &policy, &others, ret_folder);
    return st;
}

// Loads a checkpoint into fresh memory and compares with what is in the fixture.
static void assert_holds(const char *folder, const void *wanted)
{
    struct loaded *m = loaded_of(folder, DT_F32);
    assert_memory_equal(m->weights->base, wanted, (size_t)m->weights->n_elements * sizeof(float));
}

// checkpoint_read(), whose state is kept.
static struct checkpoint read_of(const char *folder)
{
    struct checkpoint c;
    assert_ok(checkpoint_read(folder, &c));
    test_keep(c.state);
    return c;
}

TEST(round_trip)
{
    char folder[PATH_ROOM], latest[PATH_ROOM];
    struct fixture *f = fixture();
    assert_ok(checkpoint_find(f->run, "latest", latest));
    assert_string_equal(latest, "");
    train_one(f, 0.5f);
    assert_ok(write_step(f, 3, 0, folder));
    assert_int_equal(folder[0], '/');
    assert_ok(checkpoint_find(f->run, "latest", latest));
    assert_string_equal(latest, folder);
    assert_holds(folder, f->model.weights->base);
    assert_string_equal(test_read(test_path(folder, "tokenizer.json")), "{\"tokens\": 1}");

    const struct checkpoint c = read_of(folder);
    assert_int_equal(c.step, 3);
    assert_int_equal(c.data_index, 30);
    assert_string_equal(text_of(c.state, "start.note"), "kept");
    struct optimizer *fresh = new_optimizer(f);
    assert_ok(checkpoint_load_optimizer(folder, c.optimizer_steps, fresh));
    assert_int_equal(optimizer_steps(fresh), 1);
    optimizer_free(fresh);

    // the same step again, with other weights, takes the old one's place; what a killed process
    // left beside it, a link that it was about to rename, goes
    train_one(f, -0.25f);
    assert_int_equal(symlink("step-3", test_path(f->checkpoints, ".latest.999999.new")), 0);
    assert_ok(write_step(f, 3, 0, folder));
    assert_holds(folder, f->model.weights->base);
    assert_int_equal(entries(f->checkpoints), 2); // step-3, latest
}

// A draft model trained with the policy: a model folder and an optimizer's state of its own.
TEST(draft_round_trip)
{
    char folder[PATH_ROOM];
    struct fixture *f = fixture(), *draft = fixture();
    assert_ok(write_step(f, 1, 0, folder));
    assert_true(read_of(folder).draft_optimizer_steps < 0);
    assert_false(file_exists(test_path(folder, DRAFT_FOLDER)));

    const struct model_folder model = {.weights = draft->model.weights,
                                       .as = DT_F32,
                                       .source_folder = draft->source,
                                       .optimizer = draft->optimizer};
    f->draft = &model;
    train_one(f, 0.5f);
    assert_ok(write_step(f, 2, 0, folder)); // the draft has no step yet
    struct checkpoint c = read_of(folder);
    assert_true(c.draft_optimizer_steps >= 0);
    const char *inside = test_path(folder, DRAFT_FOLDER);
    assert_holds(inside, draft->model.weights->base);
    assert_false(file_exists(test_path(inside, "trainer/optimizer.safetensors")));
    assert_ok(checkpoint_load_optimizer(inside, c.draft_optimizer_steps, draft->optimizer));

    train_one(draft, -0.25f);
    train_one(draft, 0.25f);
    assert_ok(write_step(f, 3, 1, folder));
    inside = test_path(folder, DRAFT_FOLDER);
    assert_holds(folder, f->model.weights->base);
    assert_holds(inside, draft->model.weights->base);
    assert_int_equal(entries(inside), 4); // config, tokenizer, weights, optimizer
    assert_int_equal(entries(f->checkpoints), 2);
    struct optimizer *fresh[2] = {new_optimizer(f), new_optimizer(draft)};
    c = read_of(folder);
    assert_ok(checkpoint_load_optimizer(folder, c.optimizer_steps, fresh[0]));
    assert_ok(checkpoint_load_optimizer(inside, c.draft_optimizer_steps, fresh[1]));
    assert_int_equal(optimizer_steps(fresh[0]), 1);
    assert_int_equal(optimizer_steps(fresh[1]), 2);
    optimizer_free(fresh[0]);
    // what was loaded is what was saved: the next step ends in the same bits
    const size_t bytes = (size_t)draft->model.weights->n_elements * sizeof(float);
    const void *before = weights_of(draft);
    train_one(draft, 0.125f);
    const void *after = weights_of(draft);
    memcpy(draft->model.weights->base, before, bytes);
    optimizer_free(draft->optimizer);
    draft->optimizer = fresh[1];
    train_one(draft, 0.125f);
    assert_memory_equal(after, draft->model.weights->base, bytes);
    assert_int_equal(unlink(test_path(inside, "trainer/optimizer.safetensors")), 0);
    assert_fails(checkpoint_load_optimizer(inside, c.draft_optimizer_steps, fresh[1]), ST_NOT_FOUND,
                 "draft/trainer/optimizer.safetensors");
}

// Before the first step there is no state but zeros, and no file for it.
TEST(step_zero)
{
    char folder[PATH_ROOM];
    struct fixture *f = fixture();
    assert_ok(write_step(f, 0, 0, folder));
    assert_false(file_exists(test_path(folder, "trainer/optimizer.safetensors")));
    assert_ok(checkpoint_load_optimizer(folder, read_of(folder).optimizer_steps, f->optimizer));
    // with a step, a missing file is an error
    train_one(f, 1);
    assert_ok(write_step(f, 1, 0, folder));
    assert_int_equal(unlink(test_path(folder, "trainer/optimizer.safetensors")), 0);
    assert_fails(checkpoint_load_optimizer(folder, read_of(folder).optimizer_steps, f->optimizer),
                 ST_NOT_FOUND, "trainer/optimizer.safetensors");
}

TEST(keeps_the_newest)
{
    struct fixture *f = fixture();
    static const int64_t steps[] = {0, 9, 10, 100, 11};
    for (int i = 0; i < 5; i++) assert_ok(write_step(f, steps[i], 3, NULL));
    assert_int_equal(entries(f->checkpoints), 4); // three and the link
    assert_true(file_exists(test_path(f->checkpoints, "step-11")));
    assert_true(file_exists(test_path(f->checkpoints, "step-100")));
    assert_true(file_exists(test_path(f->checkpoints, "step-10")));
    char latest[PATH_ROOM];
    assert_ok(checkpoint_find(f->run, "latest", latest));
    assert_contains(latest, "/step-11");
    // one that somebody removes is not taken for a run that has not begun
    assert_ok(file_remove_tree(test_path(f->checkpoints, "step-11")));
    assert_fails(checkpoint_find(f->run, "latest", latest), ST_NOT_FOUND,
                 "it names step-11, which is not there any more");
    assert_string_equal(latest, "");
}

static void assert_best(const struct fixture *f, const char *name)
{
    char best[PATH_ROOM];
    assert_ok(checkpoint_find(f->run, "best", best));
    assert_true(best[0]);
    assert_contains(best, name);
}

// It outlives all the newer ones, until another is better.
TEST(keeps_the_best)
{
    char best[PATH_ROOM];
    int64_t best_step = 2;
    struct fixture *f = fixture();
    assert_ok(write_step(f, 1, 1, NULL));
    assert_ok(checkpoint_find(f->run, "best", best));
    assert_string_equal(best, "");
    f->best = &best_step;
    for (int64_t step = 2; step <= 5; step++) {
        assert_ok(write_step(f, step, 1, NULL));
        assert_best(f, "/step-2");
    }
    assert_int_equal(entries(f->checkpoints), 4); // the best, the newest, and the links to them
    assert_int_equal(unlink(test_path(f->checkpoints, "best")), 0); // as if it had died before that
    assert_ok(write_step(f, 6, 1, NULL));
    assert_best(f, "/step-2");
    best_step = 7;
    assert_ok(write_step(f, 7, 1, NULL));
    assert_best(f, "/step-7");
    assert_int_equal(entries(f->checkpoints), 3);
    best_step = 4; // somebody removed it
    assert_ok(write_step(f, 8, 2, NULL));
    assert_best(f, "/step-7");
}

// Waits for a child with a limit; its status as waitpid gives it.
static int wait_for(pid_t pid)
{
    int status;
    for (int i = 0; i < 1000; i++) {
        if (waitpid(pid, &status, WNOHANG) == pid) return status;
        usleep(10000);
    }
    kill(pid, SIGKILL);
    waitpid(pid, &status, 0);
    fail_msg("the child hangs");
    return status;
}

// The kernel kills the writer once a file passes a size: in the header, in the middle of the
// weights, in the optimizer's state. The checkpoint before stays whole, and so does the link to it.
TEST(crash_leaves_the_old_one)
{
    char folder[PATH_ROOM], latest[PATH_ROOM];
    struct fixture *f = fixture();
    train_one(f, 0.5f);
    assert_ok(write_step(f, 1, 0, folder));
    const void *old = weights_of(f);
    train_one(f, 0.5f);
    static const rlim_t limits[] = {100, 4096, 60000, 150000};
    for (size_t i = 0; i < sizeof limits / sizeof *limits; i++) {
        for (int64_t step = 1; step <= 2; step++) { // in the old one's place, and as a new one
            pid_t pid = fork();
            assert_true(pid >= 0);
            if (pid == 0) {
                struct rlimit limit = {limits[i], limits[i]};
                setrlimit(RLIMIT_FSIZE, &limit);
                signal(SIGXFSZ, SIG_DFL);
                write_step(f, step, 1, NULL);
                _exit(0);
            }
            int status = wait_for(pid);
            assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGXFSZ);
            assert_ok(checkpoint_find(f->run, "latest", latest));
            assert_string_equal(latest, folder);
            assert_holds(latest, old);
        }
    }
    assert_false(file_exists(test_path(f->run, "checkpoints/step-2")));
    assert_ok(write_step(f, 2, 1, NULL)); // and the next one is written as if nothing had been
    assert_ok(checkpoint_find(f->run, "latest", latest));
    assert_holds(latest, f->model.weights->base);
    assert_int_equal(entries(f->checkpoints), 2); // nothing half-written is left
}

// From now on a file may be `bytes` long; what is longer is an error, as on a full disk. 0: no
// limit.
static void limit_files(rlim_t bytes)
{
    struct rlimit limit;
    getrlimit(RLIMIT_FSIZE, &limit);
    limit.rlim_cur = bytes ? bytes : limit.rlim_max;
    signal(SIGXFSZ, SIG_IGN);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &limit), 0);
}

TEST(full_disk_is_a_clear_error)
{
    struct runlog *log;
    char folder[PATH_ROOM], latest[PATH_ROOM];
    struct fixture *f = fixture();
    train_one(f, 0.5f);
    assert_ok(write_step(f, 1, 0, folder));
    const void *old = weights_of(f);
    train_one(f, 0.5f);
    static const rlim_t limits[] = {100, 4096, 60000, 150000};
    for (size_t i = 0; i < sizeof limits / sizeof *limits; i++) {
        limit_files(limits[i]);
        enum status st = write_step(f, 2, 1, NULL);
        limit_files(0);
        assert_fails(st, ST_IO, "checkpoints/.step-2.");
        assert_message(strerror(EFBIG));
        assert_ok(checkpoint_find(f->run, "latest", latest));
        assert_string_equal(latest, folder);
        assert_holds(latest, old);
        assert_int_equal(entries(f->checkpoints), 2); // step-1 and the link
    }
    // A line of the log that fits in part: the sentence is that of what did not fit.
    assert_ok(runlog_new(f->run, 0, 1, &log));
    assert_ok(runlog_write(log, json_pack("{s:i}", "step", 1)));
    limit_files(20);
    enum status st = runlog_write(log, json_pack("{s:i}", "step", 2));
    limit_files(0);
    assert_fails(st, ST_IO, "metrics.jsonl");
    assert_message(strerror(EFBIG));
    runlog_free(log);
}

TEST(failure_cleans_up)
{
    struct fixture *f = fixture();
    const char *folder = test_path(f->run, "model"), *broken = test_folder();
    const struct model_folder draft = {
        .weights = f->model.weights, .as = DT_F32, .source_folder = broken};
    struct model_folder model = {
        .weights = f->model.weights, .as = DT_F32, .source_folder = f->source};
    assert_ok(model_folder_write(folder, f->model.dev, &model));
    const void *old = weights_of(f);
    train_one(f, 1);
    // all of the model is there by then
    assert_ok(file_make_folders(test_path(broken, "tokenizer.json")));
    model.draft = &draft;
    assert_fails(model_folder_write(folder, f->model.dev, &model), ST_IO, "tokenizer.json");
    assert_int_equal(entries(f->run), 1);
    assert_holds(folder, old);
}

TEST(written_dtype_is_named)
{
    struct fixture *f = fixture();
    const char *folder = test_path(f->run, "model/"); // a slash at the end does no harm
    assert_ok(model_folder_write(
        folder, f->model.dev, &(struct model_folder){.weights = f->model.weights, .as = DT_BF16}));
    const json_t *json = json_of_file(test_path(f->run, "model/config.json"));
    assert_string_equal(text_of(json, json_object_get(json, "dtype") ? "dtype" : "torch_dtype"),
                        "bfloat16");
    assert_false(file_exists(test_path(f->run, "model/tokenizer.json")));
}

TEST(bad_state_is_refused)
{
    const char *folder = test_folder(), *path = test_path(folder, "trainer_state.json");
    struct checkpoint c;
    const json_t *cases = test_rows("checkpoint", "bad_state_is_refused");
    assert_status(checkpoint_read(folder, &c), ST_NOT_FOUND);
    for (size_t i = 0; i < json_array_size(cases); i++) {
        test_write(path, row_text(cases, i, "text"), strlen(row_text(cases, i, "text")));
        assert_true(checkpoint_read(folder, &c) != ST_OK);
        assert_message(row_text(cases, i, "part"));
    }
}

// A log of what is behind step `from`, that takes up to so many lines {"step": n} from `next` on.
static const char *log_of(const char *folder, int from, int next, int n)
{
    struct runlog *log;
    assert_ok(runlog_new(folder, from, 1, &log));
    for (int step = next; step < next + n; step++)
        assert_ok(runlog_write(log, json_pack("{s:i}", "step", step)));
    runlog_free(log);
    return test_read(test_path(folder, "metrics.jsonl"));
}

// Resuming drops the lines of steps that will come again, and one that a crash cut off.
TEST(log_is_rewound)
{
    const char *folder = test_folder();
    const char *text = log_of(folder, 0, 1, 5);
    assert_contains(text, "{\"step\":5}\n");
    test_write(test_path(folder, "metrics.jsonl"), text, strlen(text) - 4); // cut off
    assert_contains(log_of(folder, 4, 5, 1), "{\"step\":4}\n{\"step\":5}\n");
    text = log_of(folder, 2, 0, 0);
    assert_null(strstr(text, "\"step\":3"));
    assert_contains(text, "\"step\":2");
    // a run that starts over writes the line of step 0 again
    log_of(folder, 0, 0, 1);
    assert_string_equal(log_of(folder, 0, 0, 1), "{\"step\":0}\n");
}
