/* test_packaging.c: what packaging/ has for several GPUs and hosts: the template unit, the script
 * for Slurm (run with the variables that Slurm sets, over processes of this machine), the
 * manifests for Kubernetes, and the container files, without an engine. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/rank_program.h"

#include <sys/stat.h>

#define LIMIT_MS 60000

static const char *programs; // a folder in front of PATH

static const char *packaging(const char *name)
{
    return test_path(test_path(test_root(), "packaging"), name);
}

// ---- systemd ------------------------------------------------------------------------------------

TEST(test_template_unit)
{
    const char *folder = test_folder(), *log = test_path(folder, "log"),
               *bin = test_path(folder, "bin");
    test_shell("sed 's|@PREFIX@|%s|g' '%s/infer-server/cw-infer-server.service' | sed -f '%s' "
               "> '%s/cw-infer-server@.service'",
               folder, test_root(), packaging("instance.sed"), folder);
    char *unit = test_read(test_path(folder, "cw-infer-server@.service"));
    assert_contains(unit, "--socket %t/commonweight/%i/server.sock");
    assert_contains(unit, "--bridge %t/commonweight/%i/bridge.json");
    assert_contains(unit, "--device cuda:%i\n");
    assert_contains(unit, "\nRuntimeDirectory=commonweight/%i\n");
    assert_contains(unit, "\nConflicts=cw-infer-server.service\n");
    assert_contains(unit, "\nProtectSystem=strict\n"); // the rest is the other unit's
    if (test_command(log, 10000, args("systemd-analyze --version")) != 0)
        test_skip("no systemd-analyze here");
    assert_ok(file_make_folders(bin));
    assert_int_equal(symlink(test_binary("cw-infer-server"), test_path(bin, "cw-infer-server")), 0);
    const int status = test_command(
        log, 30000,
        args("systemd-analyze verify --man=no %s", test_path(folder, "cw-infer-server@3.service")));
    char *said = test_read(log);
    // it also speaks of other units of this system
    if (status != 0 || strstr(said, "cw-infer-server@"))
        fail_msg("systemd-analyze verify: status %d: %s", status, said);
}

// ---- Slurm --------------------------------------------------------------------------------------

// In the place of Slurm's: as many tasks as $TASKS, each with the variables that it sets.
static const char srun[] =
    "#!/bin/bash\n"
    "n=$TASKS pids=() status=0\n"
    "while [[ $1 == --* ]]; do\n"
    "    if [[ $1 == --ntasks=* ]]; then n=${1#*=}; fi\n"
    "    shift\n"
    "done\n"
    "export SLURM_STEP_ID=3 SLURM_STEP_NUM_TASKS=$n SLURM_STEP_TASKS_PER_NODE=$n\n"
    "for ((i = 0; i < n; i++)); do\n"
    "    SLURM_PROCID=$i SLURM_LOCALID=$i \"$@\" &\n"
    "    pids+=($!)\n"
    "done\n"
    "for pid in \"${pids[@]}\"; do wait \"$pid\" || status=$?; done\n"
    "exit $status\n";

static char *run_script(int status, const char *gpus)
{
    setenv("SLURM_JOB_ID", "77", 1);
    setenv("SLURM_NNODES", "1", 1);
    setenv("TASKS", "2", 1);
    setenv("RUN_DIR", test_path(test_folder(), "run"), 1);
    setenv("SLURM_GPUS_ON_NODE", gpus, 1);
    char *said = test_output(status, OPTIONS("bash", packaging("train.sbatch"), "--data", "x"));
    unsetenv("SLURM_JOB_ID");
    unsetenv("SLURM_NNODES");
    unsetenv("SLURM_GPUS_ON_NODE");
    unsetenv("RUN_DIR");
    return said;
}

TEST(test_slurm_script)
{
    const char *path = test_path(programs, "srun");
    test_write(path, srun, sizeof srun - 1);
    assert_int_equal(chmod(path, 0755), 0);
    char *said = run_script(0, "2");
    assert_contains(said, "rank 0 of 2 on GPU 0, pid ");
    assert_contains(said, "rank 1 of 2 on GPU 1, pid ");
    assert_int_not_equal(access("/tmp/commonweight-77", F_OK), 0);
    // a failure is the job's
    assert_contains(run_script(2, "3"),
                    "--gpus 0,1,2 names 3 GPUs, but srun has started 2 processes");
    assert_contains(test_output(1, OPTIONS("bash", packaging("train.sbatch"))),
                    "send this script with sbatch");
}

TEST(test_slurm_script_form)
{
    const char *log = test_path(test_folder(), "log"), *script = packaging("train.sbatch");
    test_output(0, args("bash -n %s", script));
    if (test_command(log, LIMIT_MS, args("shellcheck --version")) != 0)
        test_skip("no shellcheck here");
    test_output(0, OPTIONS("shellcheck", script));
}

// ---- Kubernetes ---------------------------------------------------------------------------------

TEST(test_manifests)
{
    const char *python = test_python("kubernetes_validate, yaml"),
               *script = test_path(test_root(), "tests/clients/validate_manifests.py");
    static const char *const versions[] = {"1.25", "1.29"};
    for (int i = 0; i < 2; i++)
        test_output(0, OPTIONS(python, script, packaging("kubernetes.yaml"), versions[i]));
    // what is no field of the API's is found
    const char *broken = test_path(test_folder(), "broken.yaml");
    test_shell("sed 's/completionMode/completionMood/' '%s' > '%s'", packaging("kubernetes.yaml"),
               broken);
    test_output(1, OPTIONS(python, script, broken, "1.29"));
}

// The container's arguments are options of the program, and make the same plan on both hosts.
TEST(test_manifest_arguments)
{
    const char *line =
        test_text("cw-trainer train $(sed -n 's/^ *- \\(--[a-z-]*=.*\\)$/\\1/p' '%s' | "
                  "sed 's/$(JOB_COMPLETION_INDEX)/2/')",
                  packaging("kubernetes.yaml"));
    assert_contains(test_output(2, args("bash -c %s", line)),
                    "--node-rank 2 with --nnodes 2: hosts are counted from 0");
}

// ---- containers ---------------------------------------------------------------------------------

static char *check_containers(int status, const char *folder)
{
    char *bin = test_keep(strdup(test_binary("cw-trainer")));
    *strrchr(bin, '/') = '\0';
    const char *script = test_path(test_root(), "tests/clients/check_containers.py");
    return test_output(status, OPTIONS(test_python("yaml"), script, folder, bin));
}

TEST(test_container_files)
{
    const char *broken = test_folder();
    check_containers(0, test_path(test_root(), "packaging"));
    test_shell(
        "cd '%s/packaging' && cp Dockerfile compose* '%s' && cd '%s' && sed -i "
        "'s/--resume/--resumed/; s/listen=0.0.0.0:8000/listen=0.0.0.0:9000/' compose.yaml && "
        "sed -i 's|tools/grafana-d|tools/d|' Dockerfile",
        test_root(), broken, broken);
    char *said = check_containers(1, broken);
    assert_contains(said, "cw-trainer has no option --resumed");
    assert_contains(said, "Prometheus asks server:8000");
    assert_contains(said, "tools/dashboard is not in the tree");
}

int main(int argc, char **argv)
{
    if (argc > 1) return rank_program(argc, argv);
    programs = rank_program_folder();
    return test_main();
}
