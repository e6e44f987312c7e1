/* test_launch_shards.c: ranks by one command whose servers hold their model in shards (tensor
 * parallel), alone and together with data parallel; what they save is any number of ranks' to go on
 * from. On the CPU, where ranks and servers are started with mpirun; where there are two GPUs, what
 * is of one or two ranks: in bf16 two do not round as one, so that there each is held to its own
 * sampler, in more steps. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/mpirun.h"
#include "tests/support/tiny_latent.h"
#include "tests/support/tiny_tokenizer.h"
#include "tests/support/training.h"

#define STEPS        6
#define GPU_STEPS    20
#define FROZEN_STEPS 4

static const char *runtime;

static void open_runtime(struct scene *s)
{
    runtime = scene_open_runtime(s);
}

SCENE_OF_ALL(open_runtime)

// Skips a test on a machine that cannot start two ranks.
static void want_ranks(void)
{
    if (on_cpu())
        mpirun_words(2); // which skips the test where there is none
    else if (!daemon_has_device("cuda:1"))
        test_skip("%s", status_message());
}

// The words that start so many ranks, "1" or "2".
static const char *const *ranks_words(const char *ranks)
{
    return on_cpu() ? args("--ranks %s", ranks)
                    : args("--gpus %s", strcmp(ranks, "2") == 0 ? "0,1" : "0");
}

// So many ranks, and so many for each server; 0: one, on the scene's server. Its exit status.
static int run_ranks(const char *run, const char *ranks, const char *shards, const char *steps)
{
    if (!on_cpu()) test_skip("it starts up to four ranks of the CPU, with mpirun");
    mpirun_words(2);
    return ranks ? train_on(&scene, run,
                            args("--ranks %s --model %s --tensor-parallel-size %s --resume "
                                 "--prompts-per-step 4 --max-steps %s --log-level debug",
                                 ranks, scene.model, shards, steps))
                 : train(&scene, run, args("--resume --prompts-per-step 4 --max-steps %s", steps));
}

static void learn(const char *run, const char *ranks, const char *shards, const char *steps)
{
    scene_ended(&scene, run_ranks(run, ranks, shards, steps), 0);
}

// The words of this command line's ranks, of which only rank 0 fails, end them all, though nothing
// kills rank 1: it says why.
static void rank_0_ends_all(const char *run, const char *const words[], const char *why)
{
    const int64_t start_ns = clock_now_ns();
    setenv("TMPDIR", scene.folder, 1); // where the sentence is left
    // mpirun's own status is of no rank where none takes the others along
    scene_run(&scene, JOIN(mpirun_words(2), trainer_command_on(&scene, run, words)));
    unsetenv("TMPDIR");
    assert_said(&scene, "cw-trainer[1]: error: rank 0 (");
    assert_said(&scene, test_text(") has failed: %s", why));
    assert_true(clock_ms_since(start_ns) < 30000);
}

TEST(rank_0_that_fails_before_all_meet_ends_all)
{
    if (!on_cpu()) test_skip("it starts ranks of the CPU, with mpirun");
    const char *bridges = test_path(scene.folder, "only-{rank}.json");
    assert_int_equal(symlink(scene.daemon.bridge, test_path(scene.folder, "only-1.json")), 0);
    rank_0_ends_all("no-bridge", args("--bridge %s", bridges), "no bridge file: looked for");
    // rank 1 waits for the server that rank 0 starts for both
    rank_0_ends_all("no-server",
                    args("--model %s --server-args=--tandem-model=/nowhere "
                         "--tensor-parallel-size 2",
                         scene.model),
                    "the server ended with status 1");
    assert_said(&scene, "/nowhere");
}

static void no_server_is_left(void)
{
    for (int rank = 0; rank < 4; rank++)
        assert_false(file_exists(test_text("%s/commonweight/cpu-%d/server.sock", runtime, rank)));
}

TEST(a_server_of_two_shards_is_started)
{
    learn("shards", "2", "2", "2");
    assert_said(&scene, "2 ranks train together, on 1 server with 2 shards of the model each");
    assert_said(&scene, "commonweight/cpu-0/bridge.json is this rank's too");
    assert_false(said(&scene, "is there already"));
    assert_int_equal(steps_done(&scene, "shards"), 2);
    no_server_is_left();
}

// Two servers of two shards, two servers of whole models, one rank: each goes on from the one
// before, and all of it is what one rank learns.
TEST(any_number_goes_on_from_data_and_tensor_parallel)
{
    learn("one", NULL, NULL, "6");
    learn("mixed", "4", "2", "2");
    assert_said(&scene, "4 ranks train together, on 2 servers with 2 shards of the model each");
    no_server_is_left();
    learn("mixed", "2", "1", "4");
    assert_said(&scene, "2 ranks train together, on 2 servers with 1 shard of the model each");
    learn("mixed", "4", "2", "5");
    learn("mixed", NULL, NULL, "6");
    same_losses(&scene, "one", "mixed", STEPS, 1e-5);
}

// Of 8 bits, a run that goes on is one that went through.
TEST(moments_of_8_bits_have_shards)
{
    static const char *const turns[][3] = {
        {"through", "2", "4"}, {"resumed", "2", "2"}, {"resumed", "2", "4"}, {"resumed", "1", "5"}};
    want_ranks();
    for (int i = 0; i < 4; i++) {
        scene_ended(
            &scene,
            train_on(&scene, turns[i][0],
                     JOIN(ranks_words(turns[i][1]),
                          args("--model %s --tensor-parallel-size %s --max-steps %s --resume "
                               "--prompts-per-step 4 --optim-moments 8bit --exact "
                               "--server-args=--exact",
                               scene.model, turns[i][1], turns[i][2]))),
            0);
        assert_int_equal(said(&scene, "8-bit moments of other shards are rounded anew"), i == 3);
    }
    same_losses(&scene, "through", "resumed", 4, 0);
    assert_int_equal(steps_done(&scene, "resumed"), 5);
}

static void learn_model(const char *run, const char *model, const char *ranks, const char *steps,
                        const char *drafts)
{
    const char *const *exact =
        JOIN(ranks_words(ranks),
             args("--model %s --tensor-parallel-size %s --exact --resume "
                  "--prompts-per-step 4 --max-steps %s --server-args=%s",
                  model, ranks, steps, test_text("--exact %s", drafts ? drafts : "")));
    scene_ended(&scene,
                train_on(&scene, run, drafts ? JOIN(exact, OPTIONS("--train-draft")) : exact), 0);
}

static void learn_exactly(const char *model, const char *run, const char *ranks,
                          const char *gradient_dtype, const char *server_args)
{
    const int steps = on_cpu() ? 2 : GPU_STEPS;
    const char *const *words =
        JOIN(ranks_words(ranks),
             args("--model %s --tensor-parallel-size %s --exact --prompts-per-step 4 "
                  "--max-steps %d --gradient-dtype %s --server-args %s",
                  model, ranks, steps, gradient_dtype, test_text("--exact %s", server_args)));
    scene_ended(&scene, train_on(&scene, run, words), 0);
    each_within(&scene, run, "sampler_mismatch/max", steps, 0, 0);
    each_within(&scene, run, "entropy", steps, DBL_MIN, INFINITY);
}

static void same_as_one(const char *one, const char *two, int steps)
{
    if (on_cpu()) same_losses(&scene, one, two, steps, 1e-5);
}

// Weights are those of one rank (golden/test_shards), when loaded and when published. A token's row
// of activations that is cut among ranks is rounded by each for itself, the server's and the
// trainer's alike.
TEST(shards_multiply_in_e4m3)
{
    want_ranks();
    learn_exactly(scene.model, "rows", "2", "e4m3", "--quantization fp8");
    learn_exactly(scene.model, "two", "2", "auto", "--quantization fp8-weights");
    learn_exactly(scene.model, "alone", "1", "auto", "--quantization fp8-weights");
    same_as_one("alone", "two", 2);
}

// The trainer learns from the bridge file that they are.
TEST(experts_are_whole)
{
    want_ranks();
    const char *model = tiny_tokenizer_beside(test_golden("qwen3-moe"));
    learn_exactly(model, "experts-rows", "2", "e4m3", "--expert-parallel --quantization fp8");
    learn_exactly(model, "experts", "2", "auto", "--expert-parallel --quantization fp8-weights");
    learn_exactly(model, "experts-one", "1", "auto", "--quantization fp8-weights");
    same_as_one("experts-one", "experts", 2);
}

// Models whose layers carry states along, and experts of a latent vector: trained as one rank does,
// with the sampler's bits, and saved whole.
TEST(linear_attention_learns_in_shards)
{
    static const char *const models[] = {"qwen35-moe", "qwen3-next", "lfm2", "nemotron-h-latent"};
    want_ranks();
    for (size_t i = 0; i < sizeof models / sizeof *models; i++) {
        const char *model = tiny_tokenizer_beside(test_golden(models[i])),
                   *one = test_text("%s-one", models[i]), *two = test_text("%s-two", models[i]);
        learn_model(one, model, "1", "3", NULL);
        learn_model(two, model, "2", "2", NULL);
        each_within(&scene, two, "sampler_mismatch/max", 2, 0, 0);
        learn_model(two, model, "1", "3", NULL);
        same_as_one(one, two, 3);
    }
}

// What drafts is trained in shards too, its own layer, whose experts are cut or whole, or another
// model, and is saved whole.
TEST(drafts_learn_in_shards)
{
    double one[3], two[3];
    want_ranks();
    static const char *const names[] = {"mtp", "draft", "mtp-experts"};
    for (int i = 0; i < 3; i++) {
        const bool draft = i == 1;
        const char *model = draft ? scene.model : tiny_mtp_folder(300), *name = names[i],
                   *drafts = "--speculative mtp:2";
        const char *whole = test_text("%s-one", name), *parts = test_text("%s-two", name);
        if (draft)
            drafts = test_text("--draft %s --speculative draft_model:2",
                               daemon_model(test_folder(), true, 8));
        else
            assert_ok(tiny_tokenizer_write(model));
        learn_model(whole, model, "1", "3", drafts);
        learn_model(parts, model, "2", "2",
                    test_text("%s%s", drafts, i == 2 ? " --expert-parallel" : ""));
        learn_model(parts, model, "1", "3", drafts);
        same_as_one(whole, parts, 3);
        assert_int_equal(column(&scene, whole, "draft_loss", one, 3), 3);
        assert_int_equal(column(&scene, parts, "draft_loss", two, 3), 3);
        for (int k = 0; k < 3; k++) {
            assert_true(one[k] > 0);
            assert_true(!on_cpu() || fabs(one[k] - two[k]) < 1e-5);
        }
    }
}

// An adapter is cut as its matrices are, and saved as one rank saves it; its base, the reference of
// --beta, is the model beside it.
TEST(adapters_learn_in_shards)
{
    want_ranks();
    const struct {
        const char *name, *model, *words, *shards, *server; // the former of two ranks alone
    } rows[] = {
        {"lora", scene.model, "--lora-r 4 --beta 0.1", "", ""},
        {"lora-dropout", scene.model,
         "--lora-r 2 --lora-target o_proj,down_proj --lora-dropout 0.3", "", ""},
        {"lora-experts", tiny_tokenizer_beside(test_golden("qwen3-moe")), "--lora-r 4",
         "--expert-parallel", ""},
        {"lora-states", tiny_tokenizer_beside(test_golden("qwen3-next")), "--lora-r 4 --beta 0.1",
         "", ""},
        {"lora-codes", scene.model, "--lora-r 4", "", "--quantization fp8-weights"},
        {"lora-mxfp4", tiny_tokenizer_beside(test_golden("gpt-oss-mxfp4")), "--lora-r 4",
         "--expert-parallel", "--quantization mxfp4"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        const char *one = test_text("%s-one", rows[i].name),
                   *two = test_text("%s-two", rows[i].name);
        const char *const turns[][3] = {{one, "1", "3"}, {two, "2", "2"}, {two, "1", "3"}};
        for (int k = 0; k < 3; k++) {
            const char *const *words =
                args("--model %s --tensor-parallel-size %s --prompts-per-step 4 --max-steps %s "
                     "--exact --resume --server-args %s",
                     rows[i].model, turns[k][1], turns[k][2],
                     test_text("--exact --max-adapters 1 %s %s", rows[i].server,
                               k == 1 ? rows[i].shards : ""));
            words = JOIN(JOIN(ranks_words(turns[k][1]), words), words_of(rows[i].words));
            scene_ended(&scene, train_on(&scene, turns[k][0], words), 0);
        }
        if (!strstr(rows[i].words, "dropout"))
            each_within(&scene, two, "sampler_mismatch/max", 3, 0, 0);
        each_within(&scene, two, "grad_norm", 3, DBL_MIN, INFINITY);
        same_as_one(one, two, 3);
        assert_true(file_exists(test_path(latest(&scene, two), "adapter_config.json")));
    }
}

// The KL term's reference, a tandem's frozen model and a teacher, which is whole where it cannot be
// cut; and all of them with a draft and an adapter.
TEST(frozen_models_have_shards)
{
    want_ranks();
    const char *frozen = daemon_model(test_folder(), true, 8),
               *experts = tiny_tokenizer_beside(test_golden("qwen3-moe")),
               *heads = tiny_tokenizer_beside(test_golden("llama3")); // 6
    const struct {
        const char *name, *model, *ranks, *words, *server, *column;
    } rows[] = {
        {"beta", scene.model, "2", "--beta 0.1", "", "kl"},
        {"tandem", scene.model, "2", "--tandem --beta 0.1", test_text("--tandem-model %s", frozen),
         "tandem/frozen_token_fraction"},
        {"forward", scene.model, "2", test_text("--distill-beta 0 --teacher %s", frozen), "",
         "teacher/divergence"},
        {"between", scene.model, "2",
         test_text("--distill-beta 0.5 --teacher %s --teacher-quantization fp8-weights", frozen),
         "", "teacher/divergence"},
        {"reverse", experts, "2", test_text("--beta 0.1 --teacher %s", experts),
         "--expert-parallel", "teacher/divergence"},
        {"all", scene.model, "2",
         test_text("--lora-r 4 --tandem --train-draft --beta 0.1 --teacher %s", frozen),
         test_text("--max-adapters 1 --tandem-model %s --draft %s --speculative draft_model:2",
                   frozen, frozen),
         "draft_loss"},
        {"whole", experts, "4", test_text("--teacher %s", heads), "", "teacher/divergence"},
    };
    double one[FROZEN_STEPS], two[FROZEN_STEPS];
    for (size_t i = 0; i < sizeof rows / sizeof *rows - !on_cpu(); i++)
        for (int n = 1; n <= 2; n++) {
            const char *run = test_text("%s-%d", rows[i].name, n),
                       *ranks = n == 1 ? "1" : rows[i].ranks;
            const char *const *words =
                args("--model %s --tensor-parallel-size %s --exact --prompts-per-step 4 "
                     "--max-steps %d --server-args %s",
                     rows[i].model, ranks, FROZEN_STEPS,
                     test_text("--exact %s", n == 1 && i == 4 ? "" : rows[i].server));
            words = JOIN(JOIN(ranks_words(ranks), words), words_of(rows[i].words));
            scene_ended(&scene, train_on(&scene, run, words), 0);
            each_within(&scene, run, "sampler_mismatch/max", FROZEN_STEPS, 0, 0);
            assert_int_equal(column(&scene, run, rows[i].column, n == 1 ? one : two, FROZEN_STEPS),
                             FROZEN_STEPS);
            if (n == 1) continue;
            same_as_one(test_text("%s-1", rows[i].name), run, FROZEN_STEPS);
            // the first step of --beta has a KL of 0
            for (int k = 0; k < FROZEN_STEPS; k++)
                assert_true((k == 0 || one[k] > 0) && (!on_cpu() || fabs(one[k] - two[k]) < 1e-5));
            assert_int_equal(said(&scene, "each rank holds it whole"), rows[i].ranks[0] == '4');
        }
}

TEST(what_does_not_fit_is_refused)
{
    train_rows(&scene, "launch", "shards_that_do_not_fit", trainer_alone);
}

// Somebody's RANK and WORLD_SIZE, and nothing by which ranks could meet.
TEST(variables_that_were_left_over_are_named)
{
    setenv("RANK", "0", 1);
    setenv("WORLD_SIZE", "2", 1);
    const int status = train(&scene, "left-over", args("--max-steps 1"));
    unsetenv("RANK");
    unsetenv("WORLD_SIZE");
    assert_int_equal(status, 2);
    assert_said(&scene, "torchrun does not say that all 2 ranks are of one job on this host; where "
                        "this process is no rank, unset RANK and what belongs to it");
}
