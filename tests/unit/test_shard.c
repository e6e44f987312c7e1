/* test_shard.c: shards of a model's arena, of every family of tests/golden: put together they are
 * the whole tensors, to the bit; and numbers that ranks cannot share are refused. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/loaded.h"
#include "tests/support/support.h"

#include <dirent.h>

// experts: they are whole (--expert-parallel).
static enum status load_by(const char *folder, struct shard shard, bool experts, struct loaded *ret)
{
    loaded_config(folder, ret);
    ret->config->expert_parallel = experts;
    enum status st = model_config_shard(ret->config, shard);
    if (st != ST_OK) return st;
    loaded_zeros(ret, DT_F32);
    assert_ok(weights_load(ret->weights, ret->dev, folder));
    return ST_OK;
}

static enum status load(const char *folder, struct shard shard, struct loaded *ret)
{
    return load_by(folder, shard, false, ret);
}

static const float *values(const struct loaded *m, const struct weight_tensor *t)
{
    return (const float *)m->weights->base + t->offset;
}

// Holds a shard's tensor against the whole one, and counts in `held` who holds each element.
static void compare_tensor(const struct loaded *whole, const struct loaded *part,
                           const struct weight_tensor *t, unsigned char *held)
{
    const struct weight_tensor *all = weights_find(whole->weights, t->name);
    const struct tensor_slice *s = &t->slice;
    assert_non_null(all);
    const int64_t cols = t->n_dims == 2 ? t->shape[1] : 1, width = all->n / all->shape[0];
    const float *have = values(part, t);
    assert_int_equal(s->whole[0], all->shape[0]);
    assert_int_equal(s->whole[1], all->shape[1]);
    for (int r = 0; r < s->n_runs; r++)
        for (int64_t row = 0; row < s->runs[r].n; row++, have += cols) {
            const int64_t at = (s->runs[r].first + row) * width + s->first_col;
            assert_memory_equal(have, values(whole, all) + at, (size_t)cols * sizeof *have);
            for (int64_t c = 0; c < cols; c++) held[all->offset + at + c]++;
        }
    assert_int_equal(have - values(part, t), t->n);
}

// Who holds a tensor: each element one rank, all ranks, or (key-value heads) as many as share it.
static void check_held(const struct loaded *whole, const unsigned char *held, int size,
                       bool experts)
{
    const struct weights *w = whole->weights;
    for (int i = 0; i < w->n_tensors; i++) {
        const struct weight_tensor *t = &w->tensors[i];
        const bool shared = strstr(t->name, "shared_expert") || strstr(t->name, ".router.") ||
                            strstr(t->name, "mlp.gate.") || strstr(t->name, "latent_proj");
        const bool split = t->role == ROLE_EMBED || t->role == ROLE_HEAD || t->role == ROLE_O ||
                           t->role == ROLE_GATE_UP || t->role == ROLE_DOWN ||
                           t->role == ROLE_EXPERTS_GATE_UP || t->role == ROLE_EXPERTS_DOWN ||
                           (t->role >= ROLE_DELTA_IN && t->role <= ROLE_DELTA_OUT &&
                            !strstr(t->name, "linear_attn.norm")) || // of every head
                           strstr(t->name, "q_proj") ||
                           (strstr(t->name, "shared_expert.") && !experts);
        for (int64_t e = 0; e < t->n; e++) {
            assert_in_range(held[t->offset + e], 1, size);
            if (split)
                assert_int_equal(held[t->offset + e], 1);
            else if (strstr(t->name, "norm.weight") || (shared && experts))
                assert_int_equal(held[t->offset + e], size);
        }
    }
}

static bool shards_equal_whole(const char *folder, int size, bool experts)
{
    struct loaded whole, part;
    bool fits = true;
    assert_ok(load(folder, (struct shard){0, 1}, &whole));
    unsigned char *held = test_keep(calloc(whole.weights->bytes / sizeof(float), 1));
    assert_non_null(held);
    for (int rank = 0; rank < size && fits; rank++) {
        fits = load_by(folder, (struct shard){rank, size}, experts, &part) == ST_OK;
        if (fits) assert_int_equal(part.weights->n_tensors, whole.weights->n_tensors);
        for (int i = 0; fits && i < part.weights->n_tensors; i++)
            compare_tensor(&whole, &part, &part.weights->tensors[i], held);
        loaded_close(&part);
    }
    if (fits) check_held(&whole, held, size, experts);
    loaded_close(&whole);
    return fits;
}

TEST(every_family)
{
    const char *root = test_golden("");
    int folders = 0, n[5] = {0};
    DIR *dir = opendir(root);
    assert_non_null(dir);
    for (struct dirent *e = readdir(dir); e; e = readdir(dir)) {
        const char *folder = test_path(root, e->d_name);
        if (!file_exists(test_path(folder, "config.json"))) continue;
        folders++;
        for (int size = 2; size <= 4; size += 2) n[size] += shards_equal_whole(folder, size, false);
    }
    closedir(dir);
    assert_true(folders > 10);
    assert_int_equal(n[2], folders);
    // llama3 has 6 heads; qwen35, qwen35-moe, qwen3-next 2 key heads of linear attention
    assert_int_equal(n[4], folders - 4);
}

// Experts that are whole lie on one rank each, and all ranks have what else a mixture has.
TEST(every_mixture_by_experts)
{
    static const struct {
        const char *name;
        bool fits[2]; // 2 ranks, and 4
    } folders[] = {{"deepseek-v2", {true, true}},       {"deepseek-v3", {true, true}},
                   {"deepseek-v2-lite", {true, false}}, // 6 experts
                   {"glm4-moe", {true, true}},          {"gpt-oss", {true, false}},
                   {"gemma4-moe", {true, true}},        {"minimax-m2", {true, true}},
                   {"mixtral", {true, true}},           {"nemotron-h-latent", {true, true}},
                   {"nemotron-h-moe", {true, true}},    {"olmoe", {true, false}},
                   {"qwen2-moe", {true, false}},        {"qwen3-moe", {true, true}},
                   {"qwen3-moe-some", {false, false}},  {"qwen3-next", {true, false}},
                   {"qwen35-moe", {true, false}}};
    for (size_t i = 0; i < sizeof folders / sizeof *folders; i++)
        for (int k = 0; k < 2; k++)
            assert_int_equal(shards_equal_whole(test_golden(folders[i].name), 2 << k, true),
                             folders[i].fits[k]);
}

TEST(what_others_hold_has_no_rows)
{
    struct loaded m;
    assert_ok(load_by(test_golden("qwen3-moe"), (struct shard){1, 2}, true, &m)); // 8 experts of 40
    const struct weight_tensor *first = NULL;
    int held = 0;
    for (int i = 0; i < m.weights->n_tensors; i++) {
        const struct weight_tensor *t = &m.weights->tensors[i];
        held += t->n > 0;
        if (t->role != ROLE_EXPERTS_DOWN) continue;
        if (weights_begins_block(m.weights, i)) first = t;
        const int e = (int)(t - first);
        assert_int_equal(t->shape[0], e < 4 ? 0 : 48);
        assert_int_equal(t->offset, first->offset + (e < 4 ? 0 : (e - 4) * 48 * 40));
        if (e >= 4) assert_int_equal(t->slice.runs[0].replicas, 1);
    }
    assert_int_equal(held, m.weights->n_held);
    const struct weight_matrix down = weights_matrix(m.weights, ROLE_EXPERTS_DOWN, 0);
    assert_int_equal(down.n, 48);
    assert_int_equal(down.k, 40);
    assert_ptr_equal(
        down.w,
        values(&m, weights_find(m.weights, "model.layers.0.mlp.experts.4.down_proj.weight")));
    loaded_close(&m);
}

// Which rows and columns they are.
TEST(slices_are_where_ranks_say)
{
    struct loaded m;
    assert_ok(load(test_golden("qwen2"), (struct shard){3, 4}, &m));
    // 4 heads of 16, of 2 key-value heads: the last rank has the last of each
    const struct weight_tensor *q = weights_find(m.weights,
                                                 "model.layers.1.self_attn.q_proj.weight"),
                               *k = weights_find(m.weights, "model.layers.1.self_attn.k_proj.bias"),
                               *o = weights_find(m.weights,
                                                 "model.layers.1.self_attn.o_proj.weight"),
                               *e = weights_find(m.weights, "model.embed_tokens.weight");
    assert_int_equal(q->slice.runs[0].first, 48);
    assert_int_equal(q->slice.runs[0].n, 16);
    assert_int_equal(k->slice.runs[0].first, 16);
    assert_int_equal(k->slice.runs[0].n, 16);
    assert_int_equal(o->slice.first_col, 48);
    assert_int_equal(o->shape[1], 16);
    assert_int_equal(e->slice.runs[0].first, 240);
    assert_int_equal(e->shape[0], 80);
    loaded_close(&m);
    // queries, keys and values in one tensor: a run of each
    assert_ok(load(test_golden("phi3"), (struct shard){1, 2}, &m));
    const struct tensor_slice *s =
        &weights_find(m.weights, "model.layers.0.self_attn.qkv_proj.weight")->slice;
    assert_int_equal(s->n_runs, 3);
    for (int r = 0; r < 3; r++) {
        assert_int_equal(s->runs[r].first, 64 * r + 32);
        assert_int_equal(s->runs[r].n, 32);
    }
    loaded_close(&m);
    // linear attention's q and k of 2 heads of 8, v of 6 heads of 12; the gate by itself
    assert_ok(load(test_golden("qwen35"), (struct shard){1, 2}, &m));
    static const int64_t rows[3][2] = {{8, 8}, {24, 8}, {68, 36}};
    s = &weights_find(m.weights, "model.layers.0.linear_attn.in_proj_qkv.weight")->slice;
    assert_int_equal(s->n_runs, 3);
    for (int r = 0; r < 3; r++) {
        assert_int_equal(s->runs[r].first, rows[r][0]);
        assert_int_equal(s->runs[r].n, rows[r][1]);
    }
    s = &weights_find(m.weights, "model.layers.0.linear_attn.in_proj_z.weight")->slice;
    assert_int_equal(s->n_runs, 1);
    assert_int_equal(s->runs[0].first, 36);
    loaded_close(&m);
    // and all of them stored by key head
    assert_ok(load(test_golden("qwen3-next"), (struct shard){1, 2}, &m));
    s = &weights_find(m.weights, "model.layers.0.linear_attn.in_proj_qkvz.weight")->slice;
    assert_int_equal(s->n_runs, 1);
    assert_int_equal(s->runs[0].first, 88);
    assert_int_equal(s->runs[0].n, 88);
    loaded_close(&m);
}

TEST(shards_have_layouts_of_their_own)
{
    const char *folder = test_golden("qwen3");
    char hash[3][65];
    for (int i = 0; i < 3; i++) {
        SCOPED(loaded_close) struct loaded m;
        assert_ok(load(folder, i < 2 ? (struct shard){i, 2} : (struct shard){0, 1}, &m));
        weights_layout_hash(m.weights, hash[i]);
        for (int j = 0; j < i; j++) assert_string_not_equal(hash[i], hash[j]);
    }
}

static void refused_by(const char *name, int size, bool experts, const char *sentence)
{
    SCOPED(loaded_close) struct loaded m;
    const char *folder = test_golden(name);
    assert_fails(load_by(folder, (struct shard){0, size}, experts, &m), ST_INVALID, sentence);
}

static void refused(const char *name, int size, const char *sentence)
{
    refused_by(name, size, false, sentence);
}

TEST(uneven_numbers_are_named)
{
    refused("llama3", 4, "num_attention_heads is 6, which 4 ranks cannot share");
    refused("qwen2", 3, "vocab_size is 320, which 3 ranks cannot share");
    refused("qwen3", 5, "num_attention_heads is 4, which 5 ranks cannot share");
    refused("gemma2", 3, "num_attention_heads is 4, which 3 ranks cannot share");
    refused("qwen35", 4, "linear_num_key_heads is 2, which 4 ranks cannot share");
    refused_by("mixtral-6x3", 4, true, "it has 6 experts, which 4 ranks cannot share");
    refused_by("qwen3", 2, true, "it has no experts; leave --expert-parallel away");
}
