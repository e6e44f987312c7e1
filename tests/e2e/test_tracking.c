/* test_tracking.c: the script of docs/use/tracking.md, as it stands there, with the real wandb and
 * mlflow where a Python has them: a run's numbers arrive, offline. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/support.h"

static const char config[] =
    "{\"learning_rate\": 1e-05, \"reward\": \"exact\", \"resume\": null}\n";
static const char metrics[] = "{\"step\":0,\"eval/accuracy\":0.5}\n"
                              "{\"step\":1,\"reward\":0.25,\"spec_decode/acceptance_rate\":null}\n"
                              "{\"step\":2,\"reward\":0.75}\n"
                              "{\"step\":2,\"reward\":0.5}\n" // dropped by a resumed run, or not
                              "{\"step\":3,\"reward\":0.8125}\n"
                              "{\"step\":4,\"rew"; // being written

// FOLDER/track.py and FOLDER/run
static const char *prepare(void)
{
    const char *folder = test_folder(), *run = test_path(folder, "run");
    char *page = test_read(test_path(test_root(), "docs/use/tracking.md"));
    char *script = strstr(page, "```python\n"), *end = script ? strstr(script, "\n```") : NULL;
    if (!end) fail_msg("docs/use/tracking.md has no script");
    script += strlen("```python\n");
    test_write(test_path(folder, "track.py"), script, (size_t)(end + 1 - script));
    assert_ok(file_make_folders(run));
    test_write(test_path(run, "config.json"), config, strlen(config));
    test_write(test_path(run, "metrics.jsonl"), metrics, strlen(metrics));
    return folder;
}

// Runs `line` in the folder, with $PYTHON.
static void shell(const char *python, const char *folder, const char *line)
{
    test_shell("cd '%s' && PYTHON='%s' && %s", folder, python, line);
}

TEST(test_wandb)
{
    const char *python = test_python("wandb"), *folder = prepare();
    shell(python, folder,
          "HOME=$PWD WANDB_MODE=offline WANDB_SILENT=true \"$PYTHON\" track.py run wandb --once");
    shell(python, folder, "grep -q 0.8125 wandb/offline-run-*-run/*.wandb");
}

TEST(test_mlflow)
{
    const char *python = test_python("mlflow, sqlalchemy"), *folder = prepare();
    const char *const check =
        "export MLFLOW_TRACKING_URI=sqlite:///m.db; \"$PYTHON\" track.py run mlflow --once && "
        "\"$PYTHON\" -c \"\n"
        "import mlflow\n"
        "c = mlflow.MlflowClient()\n"
        "e = mlflow.get_experiment_by_name('commonweight')\n"
        "r = c.search_runs([e.experiment_id])[0]\n"
        "h = [(m.step, m.value) for m in c.get_metric_history(r.info.run_id, 'reward')]\n"
        "assert sorted(h) == [(1, 0.25), (2, 0.75), (3, 0.8125)], h\n"
        "assert r.data.metrics['eval/accuracy'] == 0.5\n"
        "assert r.data.params == {'learning_rate': '1e-05', 'reward': 'exact'}, r.data.params\n"
        "\"";
    shell(python, folder, check);
}
