/* scheduler.c: owns the list of running samples and the queue of waiting ones, both oldest first.
 * The engine's thread.
 *
 * A plan is made in four passes:
 *  1. admit: samples leave the queue in order of arrival while there are places and blocks for all
 *     tokens they have so far. One block a running sample is kept back, so that an admission never
 *     makes the same step preempt. The first that does not fit stops the pass (no overtaking).
 *  2. decode: every sample whose tokens are all computed but the last feeds that one. Where it
 *     needs a new block and none is free, the youngest running sample is preempted: it drops its
 *     blocks and goes back to its place in the queue, and later computes its tokens again. The
 *     oldest one always gets on, and fits alone (the engine refuses requests that never could), so
 *     all end.
 *  3. prefill: the others, oldest first, feed up to prefill_chunk tokens in all.
 *  4. fork: a group's prompt is computed once, by its leader. Its siblings wait for that without
 *     holding up those behind them, but their places count as taken. When the leader's last prompt
 *     row is in the step, each new sibling becomes a holder of the prompt's full blocks, gets a
 *     copy of the last, partly filled one, and draws its first token from the same row.
 *
 * Prefix cache. Blocks that a step fills get names at the end of the plan, those of prompts and of
 * answers alike (a chat's next turn begins with both); no plan before the next one can find them,
 * so they are computed by then. An admitted sample begins with the longest run of blocks found
 * under the names of its own, short of its last token, which must be computed to draw the next, and
 * of the first prompt token whose row has still to give a log-probability (prompt_logprobs.h). A
 * name has the present version in it, and only samples all of whose blocks that version computed
 * give names: after an update that keeps the running samples' keys and values, these serve nobody
 * else. The cache is also how siblings that come back after a preemption, or for which there was no
 * place to fork, share their group's prompt again; where requests are to share nothing, their
 * hashes begin differently (request_prepare). */
#include "infer-server/engine/scheduler.h"
#include <assert.h>
#include <stdlib.h>
#include <string.h>

struct sample_list {
    struct sample **at; // oldest first
    int n, cap;
};

struct scheduler {
    struct scheduler_limits limits;
    struct kv_cache *cache;
    struct sample_list running, waiting;
    uint64_t next_order, version, preemptions, queried_tokens, hit_tokens;
    int32_t *block_tokens; // (block_size) of a block that is being hashed
    struct step step;
};

// ---- lists -------------------------------------------------------------------------------------

static bool list_reserve(struct sample_list *list, int n)
{
    if (n <= list->cap) return true;
    int cap = n + n / 2 + 16;
    struct sample **at = realloc(list->at, (size_t)cap * sizeof(struct sample *));
    if (!at) return false;
    list->at = at;
    list->cap = cap;
    return true;
}

static void list_insert(struct sample_list *list, struct sample *sample)
{
    assert(list->n < list->cap);
    int i = list->n;
    for (; i > 0 && list->at[i - 1]->order > sample->order; i--) list->at[i] = list->at[i - 1];
    list->at[i] = sample;
    list->n++;
}

static void list_remove(struct sample_list *list, const struct sample *sample)
{
    int i = 0;
    while (i < list->n && list->at[i] != sample) i++;
    assert(i < list->n);
    memmove(list->at + i, list->at + i + 1, (size_t)(list->n - i - 1) * sizeof(struct sample *));
    list->n--;
}

// ---- life --------------------------------------------------------------------------------------

enum status scheduler_new(const struct scheduler_limits *limits, struct kv_cache *cache,
                          struct scheduler **ret)
{
    struct scheduler *s = calloc(1, sizeof *s);
    if (!s) goto no_memory;
    s->limits = *limits;
    s->cache = cache;
    const size_t n = (size_t)limits->max_batch;
    s->step.items = calloc(n, sizeof *s->step.items);
    s->step.draws = calloc(n, sizeof *s->step.draws);
    s->step.copies = calloc(n, sizeof *s->step.copies);
    s->block_tokens = malloc((size_t)kv_cache_block_size(cache) * sizeof *s->block_tokens);
    if (!s->step.items || !s->step.draws || !s->step.copies || !s->block_tokens) goto no_memory;
    if (!list_reserve(&s->running, limits->max_batch)) goto no_memory;
    *ret = s;
    return ST_OK;
no_memory:
    scheduler_free(s);
    return status_fail(ST_NO_MEMORY, "no memory for a scheduler of %d sequences",
                       limits->max_batch);
}

void scheduler_free(struct scheduler *s)
{
    if (!s) return;
    free(s->step.items);
    free(s->step.draws);
    free(s->step.copies);
    free(s->block_tokens);
    free(s->running.at);
    free(s->waiting.at);
    free(s);
}

int scheduler_running(const struct scheduler *s)
{
    return s->running.n;
}
int scheduler_waiting(const struct scheduler *s)
{
    return s->waiting.n;
}
uint64_t scheduler_preemptions(const struct scheduler *s)
{
    return s->preemptions;
}

void scheduler_cache_tokens(const struct scheduler *s, uint64_t *ret_queried, uint64_t *ret_hits)
{
    *ret_queried = s->queried_tokens;
    *ret_hits = s->hit_tokens;
}

int scheduler_in_flight(const struct scheduler *s)
{
    int n = s->running.n;
    for (int i = 0; i < s->waiting.n; i++) n += s->waiting.at[i]->started;
    return n;
}

struct sample *scheduler_at(const struct scheduler *s, int i)
{
    return i < s->running.n ? s->running.at[i] : s->waiting.at[i - s->running.n];
}

bool scheduler_add(struct scheduler *s, struct request *r)
{
    // Room for the running ones too: a preemption must not need memory.
    if (!list_reserve(&s->waiting, s->waiting.n + s->running.n + r->sampling.n)) return false;
    for (int i = 0; i < r->sampling.n; i++) {
        r->samples[i].order = s->next_order++;
        r->samples[i].state = SAMPLE_WAITING;
        list_insert(&s->waiting, &r->samples[i]);
    }
    return true;
}

// ---- blocks ------------------------------------------------------------------------------------

static void drop_blocks(struct scheduler *s, struct sample *sample)
{
    kv_cache_drop(s->cache, sample->blocks, sample->n_blocks);
    sample->n_blocks = 0;
    sample->n_named = 0;
    sample->computed = sample->draft_computed = 0;
    sample->kv_version = 0;
    sample->draft.n_verify = 0;
}

static void note_peak(struct sample *sample)
{
    if (sample->n_blocks > sample->peak_blocks) sample->peak_blocks = sample->n_blocks;
}

// Blocks for the first n tokens; false, with nothing taken, where too few are free.
static bool hold_blocks(struct scheduler *s, struct sample *sample, int n_tokens)
{
    int more = kv_cache_blocks_for(s->cache, n_tokens) - sample->n_blocks;
    if (more <= 0) return true;
    if (!kv_cache_take(s->cache, more, sample->blocks + sample->n_blocks)) return false;
    sample->n_blocks += more;
    note_peak(sample);
    return true;
}

static void share_blocks(struct scheduler *s, struct sample *sample, const int32_t *blocks, int n)
{
    kv_cache_share(s->cache, blocks, n);
    memmove(sample->blocks, blocks, (size_t)n * sizeof *sample->blocks); // may be its own table
    sample->n_blocks = n;
    sample->computed = n * kv_cache_block_size(s->cache);
    note_peak(sample);
}

// ---- prefix cache ------------------------------------------------------------------------------

static struct kv_key key_of(const struct scheduler *s, const struct sample *sample, int block)
{
    return (struct kv_key){.hash = *sample_prefix_hash(sample, block + 1), .version = s->version};
}

// How many of its blocks, from the front, any request with the same tokens may read: full ones, of
// settled tokens, that the present version alone computed.
static int nameable_blocks(const struct scheduler *s, const struct sample *sample)
{
    if (sample->kv_version == 0 || sample->kv_version != s->version) return 0;
    return sample->computed / kv_cache_block_size(s->cache);
}

// False for want of memory.
static bool hash_next_block(struct scheduler *s, struct sample *sample)
{
    const int block_size = kv_cache_block_size(s->cache), n = sample->n_hashed;
    sample_tokens(sample, n * block_size, block_size, s->block_tokens);
    if (!block_hash_chain(sample_prefix_hash(sample, n), s->block_tokens, block_size, 1,
                          sample_prefix_hash(sample, n + 1)))
        return false;
    sample->n_hashed++;
    return true;
}

static void name_blocks(struct scheduler *s, struct sample *sample)
{
    const int n = nameable_blocks(s, sample);
    for (; sample->n_named < n; sample->n_named++) {
        if (sample->n_named == sample->n_hashed && !hash_next_block(s, sample)) return; // later
        const struct kv_key key = key_of(s, sample, sample->n_named);
        kv_cache_name(s->cache, sample->blocks[sample->n_named], &key);
    }
}

// The run of blocks from the front that a waiting sample can begin with: into its block table, but
// not held yet. *ret_free of them have no holder.
static int find_blocks(const struct scheduler *s, struct sample *sample, int *ret_free)
{
    const int last = sample_length(sample) - 1, rows = request_rows_read(sample->request);
    const int most = (rows < last ? rows : last) / kv_cache_block_size(s->cache);
    int n = 0;
    *ret_free = 0;
    for (; n < most && n < sample->n_hashed; n++) {
        const struct kv_key key = key_of(s, sample, n);
        const int32_t block = kv_cache_find(s->cache, &key);
        if (block < 0) break;
        sample->blocks[n] = block;
        *ret_free += kv_cache_holders(s->cache, block) == 0;
    }
    return n;
}

// What a request found counts once: what its samples share among themselves, or find again after a
// preemption, was computed for them.
static void note_found(struct scheduler *s, struct request *r, int n_tokens)
{
    if (r->cached_tokens >= 0) return;
    r->cached_tokens = n_tokens;
    s->queried_tokens += (uint64_t)r->n_prompt;
    s->hit_tokens += (uint64_t)n_tokens;
}

// ---- leaving and coming back -------------------------------------------------------------------

static void leave_running(struct scheduler *s, struct sample *sample)
{
    if (sample->request->leader == sample) sample->request->leader = NULL;
    drop_blocks(s, sample);
    list_remove(&s->running, sample);
}

static void back_to_queue(struct scheduler *s, struct sample *sample)
{
    leave_running(s, sample);
    sample->state = SAMPLE_WAITING;
    list_insert(&s->waiting, sample);
}

void scheduler_remove(struct scheduler *s, struct sample *sample)
{
    if (sample->state == SAMPLE_RUNNING)
        leave_running(s, sample);
    else if (sample->state == SAMPLE_WAITING)
        list_remove(&s->waiting, sample);
    sample->state = SAMPLE_DONE;
}

void scheduler_update(struct scheduler *s, uint64_t version, bool recompute)
{
    s->version = version;
    if (recompute)
        while (s->running.n) back_to_queue(s, s->running.at[s->running.n - 1]);
    for (int i = 0; i < s->running.n; i++) { // what they compute from here on makes two versions
        struct sample *sample = s->running.at[i];
        sample->kv_version = sample->computed == 0 ? version : 0;
    }
}

// ---- planning ----------------------------------------------------------------------------------

static bool is_held(const struct sample *sample) // its leader is computing their prompt
{
    return sample->request->leader && sample->state == SAMPLE_WAITING;
}

static void start(struct scheduler *s, struct sample *sample)
{
    list_remove(&s->waiting, sample);
    sample->state = SAMPLE_RUNNING;
    sample->started = true;
    list_insert(&s->running, sample);
}

// Siblings gain by waiting for one that has prompt blocks to fill, or from whose last prompt row
// they can draw.
static void choose_leader(const struct scheduler *s, struct sample *sample)
{
    struct request *r = sample->request;
    const bool fills = sample->computed < r->full_blocks * kv_cache_block_size(s->cache);
    if (r->leader || !(fills || sample->n_generated == 0)) return;
    for (int i = 0; i < r->sampling.n; i++)
        if (r->samples[i].state == SAMPLE_WAITING) r->leader = sample;
}

// Blocks for all its tokens beyond those it finds, one a running sample kept back. A found block
// that nobody holds is one of the available ones until the sample holds it.
static bool admit_one(struct scheduler *s, struct sample *sample, int places)
{
    const int length = sample_length(sample), available = kv_cache_available(s->cache);
    int n_free;
    if (available < 1 + places) return false; // whatever it finds
    const int found = find_blocks(s, sample, &n_free);
    const int needed = kv_cache_blocks_for(s->cache, length) - found;
    if (available - n_free < needed + places) return false;
    share_blocks(s, sample, sample->blocks, found);
    if (!hold_blocks(s, sample, length)) return false; // was counted: never
    sample->n_named = found;
    sample->kv_version = s->version;
    note_found(s, sample->request, sample->computed);
    start(s, sample);
    choose_leader(s, sample);
    return true;
}

static void admit_waiting(struct scheduler *s, enum scheduler_admit admit)
{
    int places = s->running.n; // taken: by running samples and by siblings that will fork
    for (int i = 0; i < s->waiting.n; i++) places += is_held(s->waiting.at[i]);
    for (int i = 0; i < s->waiting.n && places < s->limits.max_batch;) {
        struct sample *sample = s->waiting.at[i];
        if (is_held(sample) || (admit == ADMIT_STARTED && !sample->started)) {
            i++;
            continue;
        }
        if (!admit_one(s, sample, places)) break;
        places++; // it left the queue: the next one is at i
        if (sample->request->leader != sample) continue;
        for (int k = 0; k < sample->request->sampling.n; k++)
            places += is_held(&sample->request->samples[k]);
    }
}

static void plan_item(struct scheduler *s, struct sample *sample, int n)
{
    struct step *step = &s->step;
    bool draws = sample->computed + n == sample_length(sample);
    if (draws)
        step->draws[step->n_draws++] = (struct step_draw){.sample = sample, .item = step->n_items};
    step->items[step->n_items++] =
        (struct step_item){.sample = sample, .first = sample->computed, .n = n};
    step->n_tokens += n;
    sample->computed += n;
}

// A block for its next token, taken from the youngest if need be; false where that is itself.
static bool make_room(struct scheduler *s, struct sample *sample)
{
    while (!hold_blocks(s, sample, sample->computed + 1)) {
        struct sample *youngest = s->running.at[s->running.n - 1];
        back_to_queue(s, youngest);
        s->preemptions++;
        if (youngest == sample) return false;
    }
    return true;
}

// Blocks for its drafts, if that leaves one for every running sample: a draft never preempts.
static int room_for_drafts(struct scheduler *s, struct sample *sample)
{
    const int block_size = kv_cache_block_size(s->cache), n = sample->draft.n_verify;
    const int wanted = sample->computed + 1 + n;
    const int more = kv_cache_blocks_for(s->cache, wanted) - sample->n_blocks;
    if (n == 0) return 0;
    if (more > 0 && kv_cache_available(s->cache) >= more + s->running.n)
        hold_blocks(s, sample, wanted);
    const int room = sample->n_blocks * block_size - sample->computed - 1;
    return n < room ? n : room;
}

void scheduler_hold_drafts(struct scheduler *s, struct sample *sample)
{
    // Its own next token takes a block first: drafts behind it need that one too.
    const int room = room_for_drafts(s, sample);
    sample->draft.n_verify = room > 0 ? room : 0;
}

static void plan_decode(struct scheduler *s)
{
    for (int i = 0; i < s->running.n; i++) {
        struct sample *sample = s->running.at[i];
        if (!sample_is_decoding(sample) || !make_room(s, sample)) continue;
        const int n_drafts = room_for_drafts(s, sample);
        plan_item(s, sample, 1);
        if (n_drafts == 0) continue;
        struct step_item *item = &s->step.items[s->step.n_items - 1];
        item->n_drafts = n_drafts;
        item->n += n_drafts;
        s->step.n_tokens += n_drafts;
    }
}

static void plan_prefill(struct scheduler *s)
{
    // Decoding samples were planned, so that all their tokens count as computed.
    int room = s->limits.prefill_chunk;
    for (int i = 0; i < s->running.n && room > 0; i++) {
        struct sample *sample = s->running.at[i];
        int n = sample_length(sample) - sample->computed;
        if (n > room) n = room;
        if (n <= 0) continue;
        plan_item(s, sample, n);
        room -= n;
    }
}

// Gives a sibling the prompt's blocks. Its place is free; its block may not be.
static bool fork_one(struct scheduler *s, const struct sample *leader, int item,
                     struct sample *sample)
{
    struct step *step = &s->step;
    const int n_prompt = leader->request->n_prompt;
    const int full = n_prompt / kv_cache_block_size(s->cache);
    if (s->running.n >= s->limits.max_batch) return false;
    if (kv_cache_available(s->cache) < 1 + s->running.n) return false;
    share_blocks(s, sample, leader->blocks, full);
    if (!hold_blocks(s, sample, n_prompt)) return false; // one was there
    if (sample->n_blocks > full)
        step->copies[step->n_copies++] =
            (struct step_copy){.from = leader->blocks[full], .to = sample->blocks[full]};
    sample->computed = n_prompt;
    sample->kv_version = leader->kv_version;
    start(s, sample);
    step->draws[step->n_draws++] = (struct step_draw){.sample = sample, .item = item};
    return true;
}

static void plan_forks(struct scheduler *s)
{
    for (int i = 0; i < s->step.n_items; i++) {
        struct sample *leader = s->step.items[i].sample;
        struct request *r = leader->request;
        if (r->leader != leader || leader->computed < r->n_prompt) continue;
        // A leader that came back computes tokens of its own behind the prompt: the item's last row
        // is not the prompt's, and its siblings are admitted by the next plan.
        bool room = leader->computed == r->n_prompt;
        for (int k = 0; k < r->sampling.n && room; k++) {
            struct sample *sample = &r->samples[k];
            if (sample->state == SAMPLE_WAITING && sample->n_generated == 0)
                room = fork_one(s, leader, i, sample);
        }
        r->leader = NULL;
    }
}

const struct step *scheduler_plan(struct scheduler *s, enum scheduler_admit admit)
{
    struct step *step = &s->step;
    step->n_items = step->n_draws = step->n_copies = step->n_tokens = 0;
    admit_waiting(s, admit);
    plan_decode(s);
    plan_prefill(s);
    plan_forks(s);
    for (int i = 0; i < step->n_items; i++) name_blocks(s, step->items[i].sample);
    return step;
}

void scheduler_drawn(struct scheduler *s, struct sample *sample, int32_t token)
{
    (void)s;
    sample->generated[sample->n_generated++] = token;
}

void scheduler_settle(struct scheduler *s, struct sample *sample, int n_accepted)
{
    sample->computed += n_accepted;
    const int needed = kv_cache_blocks_for(s->cache, sample->computed);
    if (needed >= sample->n_blocks) return;
    kv_cache_drop(s->cache, sample->blocks + needed, sample->n_blocks - needed);
    sample->n_blocks = needed;
}
