/* scheduler.c: owns the list of running samples and the queue of waiting ones, both oldest first.
 * The engine's thread.
 *
 * A step is of one runner, so that it reads the weights of one model. Where samples are written by
 * two, tandem_next_runner() says whose turn it is. schedule() makes the step of the samples whose
 * turn it is, in four passes:
 *  1. admit: samples leave the queue in order of arrival while there are places and blocks for all
 *     tokens they have so far. One block a running sample is kept back, so that an admission never
 *     makes the same step preempt. The first that does not fit stops the pass (no overtaking).
 *  2. decode: every sample whose tokens are all computed but the last feeds that one. Where it
 *     needs a new block and none is free, the youngest running sample is preempted: it drops its
 *     blocks and goes back to its place in the queue, and later computes its tokens again. The
 *     oldest one always gets on, and fits alone (the engine refuses requests that never could), so
 *     all end.
 *  3. prefill: the others, oldest first, feed up to prefill_chunk tokens in all.
 *  4. parallel sampling: a group's prompt is computed once, by request.prefilling. Its siblings
 *     wait for that without holding up those behind them, but their places count as taken. When the
 *     last prompt row is in the step, each new sibling shares the prompt's full blocks, gets a copy
 *     of the last, partly filled one (copy-on-write: both are about to write there), and samples
 *     its first token from the same row; of a tandem, whose samples' first tokens have authors of
 *     their own, each computes the last token again.
 *
 * Blocks that a step fills are cached at the end of the plan, those of prompts and of answers alike
 * (a chat's next turn begins with both); no plan before the next one can find them, so they are
 * computed by then. The cache is also how siblings that come back after a preemption, or for which
 * there was no place, share their group's prompt again.
 *
 * Where models carry states, a sample can begin only where one is kept: the prompt's last whole
 * block, and the block at which a prompt was found to part from what others have computed. Items
 * of prompts end there, and the state is copied to a slot of its own. Slots are blocks of one
 * manager, those of running samples and those that are kept, found by the keys of the KV blocks
 * before them; who runs takes those least recently used. */
// SPDX-License-Identifier: Apache-2.0
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
    struct block_manager *manager;
    struct sample_list running, waiting;
    struct block_manager *states; // slots of the states, one a block
    uint64_t next_order, version;
    int passed_over; // steps in a row in which others waited for the other runner
    struct scheduler_counts counts;
    struct engine_step steps[2],
        *step; // the last plan's; the one before it may not be collected yet
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
    for (; i > 0 && list->at[i - 1]->queue.order > sample->queue.order; i--)
        list->at[i] = list->at[i - 1];
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

enum status scheduler_new(const struct scheduler_limits *limits, struct block_manager *manager,
                          struct scheduler **ret)
{
    struct scheduler *s = calloc(1, sizeof *s);
    if (!s) goto no_memory;
    s->limits = *limits;
    s->manager = manager;
    const size_t n = (size_t)limits->max_batch;
    s->step = s->steps;
    for (struct engine_step *step = s->steps; step < s->steps + 2; step++) {
        step->items = calloc(n, sizeof *step->items);
        step->sampled = calloc(n, sizeof *step->sampled);
        // of a sample a block, and the states that it begins with and leaves
        step->copies = calloc(3 * n, sizeof *step->copies);
        if (!step->items || !step->sampled || !step->copies) goto no_memory;
    }
    const int n_states = limits->max_batch + (limits->n_kept > 0 ? limits->n_kept : 0);
    if (block_manager_new(n_states, 1, &s->states) != ST_OK) goto no_memory;
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
    for (struct engine_step *step = s->steps; step < s->steps + 2; step++) {
        free(step->items);
        free(step->sampled);
        free(step->copies);
    }
    block_manager_free(s->states);
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
const struct scheduler_counts *scheduler_counts(const struct scheduler *s)
{
    return &s->counts;
}

int scheduler_in_flight(const struct scheduler *s)
{
    int n = s->running.n;
    for (int i = 0; i < s->waiting.n; i++) n += s->waiting.at[i]->queue.started;
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
        r->samples[i].queue.order = s->next_order++;
        r->samples[i].queue.state = SAMPLE_WAITING;
        list_insert(&s->waiting, &r->samples[i]);
    }
    return true;
}

// ---- blocks of a sample ------------------------------------------------------------------------
/* Prefix cache. An admitted sample begins with the longest run of cached blocks that hold what its
 * own would, short of its last token, which must be computed to sample the next, and of the first
 * prompt token whose row has still to give a log-probability (logprobs.h). A block's key has
 * the version in it, and only samples all of whose blocks that version computed put blocks there:
 * after an update that keeps the running samples' keys and values, these serve nobody else. Where
 * requests are to share nothing, their hashes begin differently (request_prepare). */

static void note_peak(struct sample_blocks *b)
{
    if (b->n > b->peak) b->peak = b->n;
}

// Blocks for the first n tokens; false, with nothing taken, where too few are free.
static bool blocks_grow(struct block_manager *m, struct sample *sample, int n_tokens)
{
    struct sample_blocks *b = &sample->blocks;
    const int more = block_manager_blocks_for(m, n_tokens) - b->n;
    if (more <= 0) return true;
    if (!block_manager_allocate(m, more, b->at + b->n)) return false;
    b->n += more;
    note_peak(b);
    return true;
}

// Begins the table with n blocks of others (which may stand in it already), all computed.
static void blocks_share(struct block_manager *m, struct sample *sample, const int32_t *blocks,
                         int n)
{
    struct sample_blocks *b = &sample->blocks;
    assert(b->n == 0);
    block_manager_share(m, blocks, n);
    memmove(b->at, blocks, (size_t)n * sizeof *b->at);
    b->n = n;
    const int computed = n * block_manager_block_size(m);
    sample->kv[sample->owner].computed = computed;
    if (sample_is_tandem(sample)) sample->kv[RUNNER_FROZEN].computed = computed;
    note_peak(b);
}

// Gives back what lies behind the first n tokens; what others share of the rest stays.
static void blocks_trim(struct block_manager *m, struct sample *sample, int n_tokens)
{
    struct sample_blocks *b = &sample->blocks;
    const int needed = block_manager_blocks_for(m, n_tokens);
    if (needed >= b->n) return;
    block_manager_drop(m, b->at + needed, b->n - needed);
    b->n = needed;
}

static struct block_key key_of(const struct sample *sample, int block, uint64_t version)
{
    return (struct block_key){.hash = *sample_prefix_hash(sample, block + 1), .version = version};
}

// False for want of memory.
static bool hash_next_block(struct sample *sample, int block_size)
{
    const int n = sample->blocks.n_hashed;
    int32_t tokens[BLOCK_SIZE_MAX];
    sample_tokens(sample, n * block_size, block_size, tokens);
    if (!block_hash_chain(sample_prefix_hash(sample, n), tokens, block_size, 1,
                          sample_prefix_hash(sample, n + 1)))
        return false;
    sample->blocks.n_hashed++;
    return true;
}

// Puts its full blocks into the prefix cache, those that weights of this version alone computed.
static void cache_blocks(struct block_manager *m, struct sample *sample, uint64_t version)
{
    struct sample_blocks *b = &sample->blocks;
    const struct sample_kv *kv = &sample->kv[sample->owner];
    const int block_size = block_manager_block_size(m);
    const int computed = sample_computed_by_all(sample), coming = sample->text.n_coming;
    const int there = sample_known(sample) - coming; // whose blocks have hashes
    if (kv->version == 0 || kv->version != version) return;
    for (const int n = (computed < there ? computed : there) / block_size; b->n_cached < n;
         b->n_cached++) {
        if (b->n_cached == b->n_hashed && !hash_next_block(sample, block_size)) return; // later
        const struct block_key key = key_of(sample, b->n_cached, version);
        block_manager_cache(m, b->at[b->n_cached], &key);
    }
}

// The run of blocks from the front that a waiting sample can begin with: into its block table, not
// referenced yet.
static int find_blocks(const struct block_manager *m, struct sample *sample, uint64_t version)
{
    const int last = sample_known(sample) - 1, rows = request_rows_read(sample->request);
    const int max = (rows < last ? rows : last) / block_manager_block_size(m);
    int n = 0;
    for (; n < max && n < sample->blocks.n_hashed; n++) {
        const struct block_key key = key_of(sample, n, version);
        const int32_t block = block_manager_find(m, &key);
        if (block < 0) break;
        sample->blocks.at[n] = block;
    }
    return n;
}

// ---- states of a sample ------------------------------------------------------------------------

static const struct sample_states no_states = {-1, {0, -1}, {{0, -1}, {0, -1}}};

static struct block_key state_key(const struct scheduler *s, const struct sample *sample,
                                  int position)
{
    return key_of(sample, position / block_manager_block_size(s->manager) - 1, s->version);
}

// Of n blocks that it finds, those before the last state that is kept. What it leaves for others:
// the state where they part, and the one before what of its prompt fills no block.
static int find_state(const struct scheduler *s, struct sample *sample, int n)
{
    const int block = block_manager_block_size(s->manager);
    const int last = (sample->request->n_prompt - 1) / block * block, parted = n * block;
    struct sample_states *states = &sample->states;
    int32_t slot = -1;
    for (; n > 0; n--) {
        const struct block_key key = state_key(s, sample, n * block);
        if ((slot = block_manager_find(s->states, &key)) >= 0) break;
    }
    // Its own slot is another one, and comes first; where none is left but these, it keeps nothing.
    int spare = s->limits.n_kept < 0 ? 0 : block_manager_available(s->states) - 1;
    if (n > 0 && block_manager_ref_count(s->states, slot) == 0 && --spare < 0) n = 0;
    states->from = (struct kept_state){n * block, n > 0 ? slot : -1};
    const int borders[STATES_KEPT] = {parted < last ? parted : 0, last};
    for (int k = 0; k < STATES_KEPT; k++)
        states->keep[k] =
            (struct kept_state){spare > 0 && borders[k] > n * block ? borders[k] : 0, -1};
    return n;
}

static void drop_state(struct scheduler *s, struct kept_state *state)
{
    if (state->slot >= 0) block_manager_drop(s->states, &state->slot, 1);
    *state = (struct kept_state){0, -1};
}

// Up to which of its tokens an item may go.
static int next_border(const struct sample *sample, int computed)
{
    for (int k = 0; k < STATES_KEPT; k++)
        if (sample->states.keep[k].position > computed) return sample->states.keep[k].position;
    return sample_known(sample);
}

static void copy_state(struct engine_step *step, int32_t from, int32_t to)
{
    step->copies[step->n_copies++] = (struct step_copy){{from, to, true}, false};
}

// Behind the runner's item that ends there, unless it is there already or no slot is free.
static void keep_state(struct scheduler *s, struct sample *sample, int computed)
{
    struct engine_step *step = s->step;
    for (int k = 0; k < STATES_KEPT; k++) {
        struct kept_state *keep = &sample->states.keep[k];
        if (keep->position != computed) continue;
        const struct block_key key = state_key(s, sample, computed);
        if (keep->slot < 0 && (block_manager_find(s->states, &key) >= 0 ||
                               !block_manager_allocate(s->states, 1, &keep->slot)))
            keep->position = 0;
        else
            copy_state(step, sample->states.own, keep->slot);
    }
}

// What all that write the sample have left there can be found from the next plan on.
static void cache_states(struct scheduler *s, struct sample *sample)
{
    struct sample_states *states = &sample->states;
    const int computed = sample_computed_by_all(sample);
    if (computed > states->from.position) drop_state(s, &states->from);
    for (int k = 0; k < STATES_KEPT; k++) {
        struct kept_state *keep = &states->keep[k];
        if (keep->slot < 0 || computed < keep->position) continue;
        const struct block_key key = state_key(s, sample, keep->position);
        if (sample->kv[sample->owner].version == s->version)
            block_manager_cache(s->states, keep->slot, &key);
        drop_state(s, keep);
    }
}

// ---- running and waiting -----------------------------------------------------------------------

// A slot of the states is free.
static void start(struct scheduler *s, struct sample *sample)
{
    block_manager_allocate(s->states, 1, &sample->states.own);
    list_remove(&s->waiting, sample);
    sample->queue.state = SAMPLE_RUNNING;
    sample->queue.started = true;
    list_insert(&s->running, sample);
}

static void stop(struct scheduler *s, struct sample *sample)
{
    if (sample->request->prefilling == sample) sample->request->prefilling = NULL;
    blocks_trim(s->manager, sample, 0); // all are given back: nothing is computed any more
    sample->blocks.n_cached = 0;
    memset(sample->kv, 0, sizeof sample->kv);
    sample->draft.n_verify = 0;
    list_remove(&s->running, sample);
    block_manager_drop(s->states, &sample->states.own, 1);
    drop_state(s, &sample->states.from);
    for (int k = 0; k < STATES_KEPT; k++) drop_state(s, &sample->states.keep[k]);
}

static void preempt(struct scheduler *s, struct sample *sample)
{
    stop(s, sample);
    sample->queue.state = SAMPLE_WAITING;
    list_insert(&s->waiting, sample);
}

void scheduler_remove(struct scheduler *s, struct sample *sample)
{
    if (sample->queue.state == SAMPLE_RUNNING)
        stop(s, sample);
    else if (sample->queue.state == SAMPLE_WAITING)
        list_remove(&s->waiting, sample);
    sample->queue.state = SAMPLE_DONE;
    for (struct engine_step *step = s->steps; step < s->steps + 2;
         step++) { // what comes of it is dropped
        for (int i = 0; i < step->n_items; i++)
            if (step->items[i].sample == sample) step->items[i].sample = NULL;
        for (int i = 0; i < step->n_sampled; i++)
            if (step->sampled[i].sample == sample) step->sampled[i].sample = NULL;
    }
}

void scheduler_update(struct scheduler *s, uint64_t version, bool recompute)
{
    s->version = version;
    if (recompute)
        while (s->running.n) preempt(s, s->running.at[s->running.n - 1]);
    for (int i = 0; i < s->running.n; i++) { // what they compute from here on makes two versions
        struct sample_kv *kv = &s->running.at[i]->kv[s->running.at[i]->owner];
        kv->version = kv->computed == 0 ? version : 0;
    }
}

// ---- admission ---------------------------------------------------------------------------------

static bool waits_for_prompt(const struct sample *sample) // which a sibling is computing
{
    return sample->request->prefilling && sample->queue.state == SAMPLE_WAITING;
}

// Siblings gain by waiting for one that has prompt blocks to fill, or from whose last prompt row
// they can sample. One of a tandem that came back fills both models' blocks in its own time.
static void let_siblings_wait(const struct scheduler *s, struct sample *sample)
{
    struct request *r = sample->request;
    const int prompt = r->full_blocks * block_manager_block_size(s->manager);
    const bool is_new = sample_n_sampled(sample) == 0, tandem = sample_is_tandem(sample);
    const bool fills = s->limits.states ? sample->states.keep[STATES_KEPT - 1].position > 0
                                        : sample_computed_by_all(sample) < prompt;
    const bool gives_row = is_new && !(tandem && s->limits.states); // share_prompt()
    if (r->prefilling || (tandem && !is_new) || !(fills || gives_row)) return;
    for (int i = 0; i < r->sampling.n; i++)
        if (r->samples[i].queue.state == SAMPLE_WAITING) r->prefilling = sample;
}

// Blocks for all its tokens beyond those it finds, one a running sample kept back. A found block
// that is free is one of the available ones until the sample references it.
static bool admit_one(struct scheduler *s, struct sample *sample, int places)
{
    const int known = sample_known(sample), available = block_manager_available(s->manager);
    if (available < 1 + places || block_manager_available(s->states) < 1)
        return false; // whatever it finds
    int found = find_blocks(s->manager, sample, s->version), n_free = 0;
    sample->states = no_states;
    if (s->limits.states) found = find_state(s, sample, found);
    for (int i = 0; i < found; i++)
        n_free += block_manager_ref_count(s->manager, sample->blocks.at[i]) == 0;
    const int needed = block_manager_blocks_for(s->manager, known) - found;
    if (available - n_free < needed + places) return false;
    blocks_share(s->manager, sample, sample->blocks.at, found);
    if (!blocks_grow(s->manager, sample, known)) return false; // was counted: never
    if (sample->states.from.slot >= 0) block_manager_share(s->states, &sample->states.from.slot, 1);
    sample->blocks.n_cached = found;
    sample->kv[sample->owner].version = s->version;
    struct request *r = sample->request;
    // What a request found counts once: what its samples share among themselves, or find again
    // after a preemption, was computed for them.
    if (r->cached_tokens < 0) {
        r->cached_tokens = sample_computed(sample);
        s->counts.queried_tokens += (uint64_t)r->n_prompt;
        s->counts.hit_tokens += (uint64_t)r->cached_tokens;
    }
    start(s, sample);
    let_siblings_wait(s, sample);
    return true;
}

static void admit_waiting(struct scheduler *s, enum scheduler_admit admit)
{
    int places = s->running.n; // taken: by running samples and by siblings that wait for a prompt
    for (int i = 0; i < s->waiting.n; i++) places += waits_for_prompt(s->waiting.at[i]);
    for (int i = 0; i < s->waiting.n && places < s->limits.max_batch;) {
        struct sample *sample = s->waiting.at[i];
        if (waits_for_prompt(sample) || (admit == ADMIT_STARTED && !sample->queue.started)) {
            i++;
            continue;
        }
        if (!admit_one(s, sample, places)) break;
        places++; // it left the queue: the next one is at i
        if (sample->request->prefilling != sample) continue;
        for (int k = 0; k < sample->request->sampling.n; k++)
            places += waits_for_prompt(&sample->request->samples[k]);
    }
}

// ---- a step ------------------------------------------------------------------------------------

static void add_item(struct scheduler *s, struct sample *sample, int n, int n_drafts)
{
    struct engine_step *step = s->step;
    const struct kept_state *from = &sample->states.from;
    int *computed = &sample->kv[step->runner].computed;
    if (*computed + n == sample_known(sample) && step->runner == sample_author(sample))
        step->sampled[step->n_sampled++] =
            (struct step_sample){.sample = sample, .item = step->n_items};
    step->items[step->n_items++] = (struct step_item){.sample = sample,
                                                      .first = *computed,
                                                      .n = n + n_drafts,
                                                      .n_drafts = n_drafts,
                                                      .state = sample->states.own};
    if (from->slot >= 0 && from->position == *computed)
        step->items[step->n_items - 1].state = from->slot;
    step->n_tokens += n + n_drafts;
    *computed += n;
    keep_state(s, sample, *computed);
}

// A block for its last token, taken from the youngest if need be; false where that is itself.
static bool make_room(struct scheduler *s, struct sample *sample)
{
    while (!blocks_grow(s->manager, sample, sample_known(sample))) {
        struct sample *youngest = s->running.at[s->running.n - 1];
        preempt(s, youngest);
        s->counts.preemptions++;
        if (youngest == sample) return false;
    }
    return true;
}

// Blocks for its drafts, if that leaves one for every running sample: a draft never preempts.
static int room_for_drafts(struct scheduler *s, struct sample *sample)
{
    const int n = sample->draft.n_verify, own = sample_computed(sample) + 1;
    const int more = block_manager_blocks_for(s->manager, own + n) - sample->blocks.n;
    if (n == 0) return 0;
    if (more > 0 && block_manager_available(s->manager) >= more + s->running.n)
        blocks_grow(s->manager, sample, own + n);
    const int room = sample->blocks.n * block_manager_block_size(s->manager) - own;
    return n < room ? n : room;
}

void scheduler_reserve_drafts(struct scheduler *s, struct sample *sample)
{
    // Its own next token takes a block first: drafts behind it need that one too.
    const int room = room_for_drafts(s, sample);
    sample->draft.n_verify = room > 0 ? room : 0;
}

// What of its prompt a sibling need not compute: all, or, where its first token has an author of
// its own, all but the last token.
static int shared_prompt(const struct sample *from)
{
    return from->request->n_prompt - sample_is_tandem(from);
}

// Shares the computed prompt with a sibling. Its place is free; its block and state may not be. Of
// a tandem the state before the last token is gone, and it begins where one is kept.
static bool share_prompt(struct scheduler *s, const struct sample *from, int item,
                         struct sample *sample)
{
    struct engine_step *step = s->step;
    const bool tandem = sample_is_tandem(from);
    const int shared = shared_prompt(from), block = block_manager_block_size(s->manager);
    const int full = shared / block;
    if (s->running.n >= s->limits.max_batch || (tandem && s->limits.states)) return false;
    if (block_manager_available(s->manager) < 1 + s->running.n) return false;
    if (block_manager_available(s->states) < 1) return false;
    sample->states = no_states;
    blocks_share(s->manager, sample, from->blocks.at, full);
    if (!blocks_grow(s->manager, sample, from->request->n_prompt)) return false; // one was there
    if (shared > full * block)
        step->copies[step->n_copies++] = (struct step_copy){
            {from->blocks.at[full], sample->blocks.at[full], false}, sample_uses_frozen(from)};
    const enum runner_role owner = sample->owner;
    sample->kv[owner] = (struct sample_kv){.computed = shared, .version = from->kv[owner].version};
    if (tandem) sample->kv[RUNNER_FROZEN].computed = shared;
    start(s, sample);
    copy_state(step, from->states.own, sample->states.own);
    if (!tandem)
        step->sampled[step->n_sampled++] = (struct step_sample){.sample = sample, .item = item};
    return true;
}

static void start_siblings(struct scheduler *s, int item)
{
    const struct sample *from = s->step->items[item].sample;
    struct request *r = from->request;
    if (r->prefilling != from || sample_computed(from) < r->n_prompt ||
        sample_computed_by_all(from) < shared_prompt(from))
        return;
    // One that came back computes tokens of its own behind the prompt: the item's last row is not
    // the prompt's, and its siblings are admitted by the next plan.
    bool room = sample_computed(from) == r->n_prompt;
    for (int k = 0; k < r->sampling.n && room; k++) {
        struct sample *sample = &r->samples[k];
        if (sample->queue.state == SAMPLE_WAITING && sample_n_sampled(sample) == 0)
            room = share_prompt(s, from, item, sample);
    }
    r->prefilling = NULL;
}

enum runner_role scheduler_choose_runner(struct scheduler *s)
{
    s->step->runner =
        tandem_next_runner(s->running.at, s->running.n, s->step->runner, &s->passed_over);
    return s->step->runner;
}

static void plan_items(struct scheduler *s)
{
    struct engine_step *step = s->step;
    int room = s->limits.prefill_chunk;
    for (int i = 0; i < s->running.n; i++) { // decode
        struct sample *sample = s->running.at[i];
        if (sample_runner(sample) != step->runner || sample_n_sampled(sample) == 0) continue;
        if (sample_is_ending(sample)) continue;
        if (make_room(s, sample) && sample_is_decoding(sample))
            add_item(s, sample, 1, room_for_drafts(s, sample));
    }
    for (int i = 0; i < s->running.n && room > 0; i++) { // prefill; the above are all computed
        struct sample *sample = s->running.at[i];
        if (sample_runner(sample) != step->runner || sample_is_ending(sample)) continue;
        const int computed = sample_computed(sample),
                  left = next_border(sample, computed) - computed;
        // What a tandem's model has missed goes with its last token, which has a place as decoding.
        const int place = sample_is_tandem(sample) && sample->text.n_generated > 0 && left > 0;
        const int n = left < room + place ? left : room + place;
        if (n > 0) add_item(s, sample, n, 0);
        room -= n - place;
    }
}

const struct engine_step *schedule(struct scheduler *s, enum scheduler_admit admit)
{
    const enum runner_role runner = s->step->runner;
    struct engine_step *step = s->step = &s->steps[s->step == s->steps];
    step->runner = runner;
    step->n_items = step->n_sampled = step->n_copies = 0;
    step->n_tokens = 0;
    admit_waiting(s, admit);
    plan_items(s);
    // Those that were admitted wait for the other, or the one that waited was preempted.
    if (step->n_items == 0 && s->running.n > 0) {
        step->runner = runner_other(step->runner);
        plan_items(s);
    }
    for (int i = 0; i < step->n_items; i++) start_siblings(s, i);
    for (int i = 0; i < step->n_items; i++) {
        cache_blocks(s->manager, step->items[i].sample, s->version);
        cache_states(s, step->items[i].sample);
        sample_check(step->items[i].sample, block_manager_block_size(s->manager));
    }
    for (int i = 0; i < s->running.n; i++) // what it leaves for others
        if (sample_is_ending(s->running.at[i]))
            cache_blocks(s->manager, s->running.at[i], s->version);
    return step;
}

void scheduler_accept(struct scheduler *s, struct sample *sample, int n)
{
    sample->kv[sample->owner].computed += n;
    blocks_trim(s->manager, sample, sample_computed(sample));
}
