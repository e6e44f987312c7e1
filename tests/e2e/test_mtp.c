/* test_mtp.c: a daemon that drafts with its model's own layer (--speculative mtp), and a trainer
 * that trains that layer along with the policy, in place: it comes closer to the policy, its
 * checkpoints are gone on from, and a server drafts with one. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/pair.h"
#include "tests/support/tiny_latent.h"
#include "tests/support/tiny_tokenizer.h"
#include "tests/support/training.h"

#define STEPS 24

static struct scene scene;

static void open_scene(void)
{
    const char *model = tiny_mtp_folder(300);
    assert_ok(tiny_tokenizer_write(model));
    scene_open_model(
        &scene, model,
        args("--speculative mtp:3 --draft-length fixed --dtype %s", daemon_exact_dtype()));
}

TESTS_BETWEEN(open_scene, NULL)

static void run(const char *name, int steps, const char *const more[])
{
    scene_ended(&scene,
                train(&scene, name,
                      JOIN(args("--max-steps %d --train-draft --draft-learning-rate 5e-3 "
                                "--learning-rate 1e-5 --temperature 0.5 --max-completion-length 24",
                                steps),
                           more)),
                0);
}

static double mean_of(const double *values, int n)
{
    double sum = 0;
    for (int i = 0; i < n; i++) sum += values[i] / n;
    return sum;
}

TEST(the_layer_is_trained_in_place)
{
    double loss[STEPS + 1], overlap[STEPS + 1];
    run("whole", STEPS, OPTIONS(NULL));
    assert_int_equal(column(&scene, "whole", "draft_loss", loss, STEPS + 1), STEPS);
    column(&scene, "whole", "draft_overlap", overlap, STEPS + 1);
    printf("loss %.3f to %.3f, overlap %.3f to %.3f\n", mean_of(loss, 4),
           mean_of(loss + STEPS - 4, 4), mean_of(overlap, 4), mean_of(overlap + STEPS - 4, 4));
    assert_true(mean_of(loss + STEPS - 4, 4) < 0.8 * mean_of(loss, 4));
    assert_true(mean_of(overlap + STEPS - 4, 4) > mean_of(overlap, 4));
    assert_true(metric(last_metrics(&scene, "whole"), "spec_decode/num_drafts") > 0);
    daemon_holds_file(&scene.daemon, "mtp",
                      test_path(latest(&scene, "whole"), "draft/model.safetensors"));
    daemon_holds(&scene.daemon, "policy", latest(&scene, "whole"));
}

TEST(it_goes_on_to_the_same_bits)
{
    run("halves", STEPS / 2, OPTIONS(NULL));
    run("halves", STEPS, OPTIONS("--resume"));
    const char *a = latest(&scene, "whole"), *b = latest(&scene, "halves");
    test_same_file(a, b, "model.safetensors");
    test_same_file(a, b, "draft/model.safetensors");
    test_same_file(a, b, "draft/trainer/optimizer.safetensors");
}

// Each rank's server has the layer, and both hold one in the end.
TEST(two_ranks_train_it_as_one)
{
    struct pair p;
    double losses[2][PAIR_STEPS];
    static const char *const names[] = {"one", "two"};
    pair_learns_as_one(
        &p, scene.model,
        args("--speculative mtp:3 --draft-length fixed --dtype %s", daemon_exact_dtype()),
        args(PAIR_NUMBERS " --max-steps %d --train-draft --draft-learning-rate 5e-3", PAIR_STEPS));
    for (int i = 0; i < 2; i++)
        assert_int_equal(column(&p.s, names[i], "draft_loss", losses[i], PAIR_STEPS), PAIR_STEPS);
    for (int i = 0; i < PAIR_STEPS; i++) assert_near(losses[0][i], losses[1][i], 1e-4);
    pair_holds(&p, "two");
    const char *layer = test_path(latest(&p.s, "two"), "draft/model.safetensors");
    daemon_holds_file(&p.s.daemon, "mtp", layer);
    daemon_holds_file(&p.other, "mtp", layer);
    pair_close(&p);
}

TEST(a_server_drafts_with_a_checkpoints_layer)
{
    struct daemon d = {0};
    const char *checkpoint = latest(&scene, "whole");
    daemon_start(&d, checkpoint,
                 args("--draft %s/draft --speculative mtp:2 --draft-vocabulary 200 --dtype %s",
                      checkpoint, daemon_exact_dtype()));
    daemon_post(d.socket, "/v1/completions", 200,
                "{\"prompt\": \"1+2=\", \"max_tokens\": 24, \"temperature\": 0}");
    assert_true(int_of(daemon_get(d.socket, "/v1/spec_decode_stats", 200), "num_drafts") > 0);
    assert_int_equal(daemon_stop(&d), 0);
}

// Of its own folder a checkpoint has no layer: what is missing is named.
TEST(a_model_without_it_is_refused)
{
    assert_int_equal(scene_run(&scene, OPTIONS(test_binary("cw-infer-server"), "--model",
                                               latest(&scene, "whole"), "--speculative", "mtp")),
                     1);
    assert_said(&scene, "model.layers.2.");
}

TEST(a_part_of_the_vocabulary_is_of_its_drafts)
{
    const char *const *const refused[] = {args("--speculative ngram"),
                                          args("--speculative mtp --draft-vocabulary 9999")};
    for (size_t i = 0; i < 2; i++) {
        const char *const *given = args("%s --model %s --draft-vocabulary 200",
                                        test_binary("cw-infer-server"), scene.model);
        assert_int_equal(scene_run(&scene, JOIN(given, refused[i])), 1);
        assert_said(&scene, "--draft-vocabulary");
    }
    assert_said(&scene, "--draft-vocabulary 9999: the vocabulary has");
}

// As it has come to be by the tests before: what it drafts on by itself is nearer to the policy,
// too.
TEST(its_further_drafts_are_trained)
{
    enum { DEEPER = 16, PART = 4 };
    double loss[DEEPER + 1];
    run("deeper", DEEPER, args("--draft-depths 3"));
    assert_int_equal(column(&scene, "deeper", "draft_loss", loss, DEEPER + 1), DEEPER);
    printf("loss %.3f to %.3f\n", mean_of(loss, PART), mean_of(loss + DEEPER - PART, PART));
    assert_true(mean_of(loss + DEEPER - PART, PART) < 0.9 * mean_of(loss, PART));
}
