/* word-problems.c: cw-word-problems, grade-school word problems of GSM8K's form, as many as asked
 * for. One thread.
 *
 * A problem is a chain of 1 to 8 steps on one quantity: each step has an operator, a drawn operand,
 * a sentence that tells it and one that works it out. What the quantity counts (things, things in
 * each box, dollars) decides which steps may follow and how the question is put. Sentences that
 * have nothing to do with it are strewn in. Problem i is drawn from its own random stream (seed, i)
 * and the training problems come last, so a larger --count begins with the problems of a smaller
 * one. No question is given out twice, over all files. Words come from short lists, so that the
 * tokenizer written beside them has a token for each: its merges build a word letter by letter (a
 * trie), and never touch digits, which stay single.
 */
#include "common/base/file.h"
#include "common/base/json.h"
#include "common/base/log.h"
#include "common/base/options.h"
#include "common/base/rng.h"

#include <ctype.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define COUNT_OF(array) ((int)(sizeof(array) / sizeof *(array)))
#define MAX_STEPS       8
#define MAX_TELL        4

// ---- words --------------------------------------------------------------------------------------

static const struct person {
    const char *name, *they, *They, *their;
} people[] = {
    {"Tom", "he", "He", "his"},     {"Anna", "she", "She", "her"},  {"Ben", "he", "He", "his"},
    {"Clara", "she", "She", "her"}, {"David", "he", "He", "his"},   {"Ella", "she", "She", "her"},
    {"Frank", "he", "He", "his"},   {"Grace", "she", "She", "her"}, {"Hugo", "he", "He", "his"},
    {"Iris", "she", "She", "her"},  {"Jack", "he", "He", "his"},    {"Kate", "she", "She", "her"},
    {"Leo", "he", "He", "his"},     {"Maria", "she", "She", "her"}, {"Noah", "he", "He", "his"},
    {"Olga", "she", "She", "her"},  {"Paul", "he", "He", "his"},    {"Rosa", "she", "She", "her"},
    {"Sam", "he", "He", "his"},     {"Tina", "she", "She", "her"},
};
static const char *const things[] = {
    "apples", "books",   "cards",  "marbles", "pencils",  "stickers", "cookies", "shells",
    "coins",  "flowers", "stamps", "buttons", "balloons", "oranges",  "toys",    "beads",
    "eggs",   "candles", "stones", "ribbons", "peaches",  "muffins",  "bottles", "photos",
};
static const struct container {
    const char *many, *one;
} containers[] = {
    {"boxes", "box"}, {"bags", "bag"},      {"baskets", "basket"}, {"jars", "jar"},
    {"rows", "row"},  {"shelves", "shelf"}, {"crates", "crate"},   {"drawers", "drawer"},
};
static const char *const goods[] = {"lunch", "a hat", "a lamp", "paint", "a ticket", "shoes"};

// ---- sentences ----------------------------------------------------------------------------------
// %N the person asked about, %F another one, %p %P %g he, He, his (the name, once there was an
// aside); %O the things, %D other things; %C %c boxes, box; %G something bought; %x the quantity
// before the step, %b the operand, %y the quantity after it, %n a number that does not matter.

enum counts { NOTHING, THINGS, IN_EACH, DOLLARS }; // what the quantity is; NOTHING: not told yet

static const struct step {
    enum counts from, to;
    char sign;       // '=' starts: y = b
    int least, most; // of the operand; most 0: --max-number
    bool passes_on;  // %F is the person asked about from here on
    int weight;      // how often it is drawn
    const char *tell[MAX_TELL], *work[2];
} steps[] = {
    {NOTHING,
     THINGS,
     '*',
     2,
     12,
     false,
     2,
     {"%N buys %x %C of %O. Each %c holds %b %O.",
      "There are %x %C with %b %O each in the room of %N.", "%N fills %x %C with %b %O each."},
     {"%N has %x * %b = %y %O.", "In all there are %x * %b = %y %O."}},
    {THINGS,
     THINGS,
     '+',
     2,
     0,
     false,
     4,
     {"%F gives %N %b more %O.", "Then %p finds another %b %O.", "The next day %p buys %b more %O.",
      "Later %p gets %b %O as a present."},
     {"Then %N has %x + %b = %y %O.", "With these it is %x + %b = %y %O."}},
    {THINGS,
     THINGS,
     '-',
     2,
     0,
     false,
     5,
     {"%P gives %b of them to %F.", "On the way home %p loses %b %O.",
      "At school %p hands out %b of the %O.", "After that %b of the %O break."},
     {"%P keeps %x - %b = %y %O.", "That leaves %x - %b = %y %O."}},
    {THINGS,
     THINGS,
     '*',
     2,
     6,
     false,
     1,
     {"By the end of the month %p has %b times as many %O.",
      "A year later %p has %b times as many %O."},
     {"That makes %x * %b = %y %O."}},
    {THINGS,
     THINGS,
     '/',
     2,
     2,
     false,
     1,
     {"%P gives half of the %O to %F.", "Half of the %O get lost.", "%P keeps only half of them."},
     {"Half of them is %x / %b = %y %O."}},
    {THINGS,
     THINGS,
     '+',
     2,
     0,
     true,
     2,
     {"%F has %b more %O than %N."},
     {"%F has %x + %b = %y %O."}},
    {THINGS,
     THINGS,
     '-',
     2,
     0,
     true,
     2,
     {"%F has %b fewer %O than %N."},
     {"%F has %x - %b = %y %O."}},
    {THINGS,
     THINGS,
     '*',
     2,
     6,
     true,
     2,
     {"%F has %b times as many %O as %N."},
     {"%F has %x * %b = %y %O."}},
    {THINGS,
     IN_EACH,
     '/',
     2,
     12,
     false,
     3,
     {
         "%P shares all the %O equally among %b %C.",
         "%P puts the %O into %b %C, as many in each.",
     },
     {"Each %c gets %x / %b = %y %O."}},
    {THINGS,
     DOLLARS,
     '*',
     2,
     12,
     false,
     3,
     {"%P sells all of the %O for $%b each.", "%F buys all of the %O for $%b each."},
     {"%P gets %x * %b = %y dollars."}},
    {DOLLARS,
     DOLLARS,
     '-',
     2,
     0,
     false,
     2,
     {"%P spends $%b on %G.", "Then %p pays $%b for %G."},
     {"That leaves %x - %b = %y dollars."}},
    {DOLLARS,
     DOLLARS,
     '+',
     2,
     0,
     false,
     2,
     {"%F gives %N another $%b.", "%P finds $%b in %g coat."},
     {"Then %p has %x + %b = %y dollars."}},
};
static const char *const openings[] = {
    "%N has %x %O.",
    "In the morning %N picks %x %O.",
    "%N has a box with %x %O in it.",
    "At the market %N buys %x %O.",
    "%N gets %x %O from %F.",
};
static const char *const asides[] = {
    "%F has %n %D.",
    "%N is %n years old.",
    "There are %n children in the class of %N.",
    "The shop is %n miles away.",
    "%F has walked for %n minutes.",
    "Last year %N had %n %D.",
};
static const char *const questions[][2] = {
    [THINGS] = {"How many %O does %N have now?", "How many %O does %N have in the end?"},
    [IN_EACH] = {"How many %O are in each %c?", "How many %O does each %c hold?"},
    [DOLLARS] = {"How many dollars does %N have now?", "How much money does %N have, in dollars?"},
};

struct story {
    struct rng rng;
    const struct person *who, *other;
    const char *thing, *other_thing, *good;
    const struct container *container;
    long x, b, y, n;
    bool by_name; // a pronoun might be another person's
};

static void say(struct bytes *to, const struct story *s, const char *sentence)
{
    if (to->len && to->data[to->len - 1] != '\n') bytes_puts(to, " ");
    for (const char *c = sentence; *c; c++) {
        if (*c != '%') {
            bytes_append(to, c, 1);
            continue;
        }
        switch (*++c) {
        case 'N':
            bytes_puts(to, s->who->name);
            break;
        case 'F':
            bytes_puts(to, s->other->name);
            break;
        case 'p':
            bytes_puts(to, s->by_name ? s->who->name : s->who->they);
            break;
        case 'P':
            bytes_puts(to, s->by_name ? s->who->name : s->who->They);
            break;
        case 'g':
            bytes_puts(to, s->who->their);
            break;
        case 'O':
            bytes_puts(to, s->thing);
            break;
        case 'D':
            bytes_puts(to, s->other_thing);
            break;
        case 'C':
            bytes_puts(to, s->container->many);
            break;
        case 'c':
            bytes_puts(to, s->container->one);
            break;
        case 'G':
            bytes_puts(to, s->good);
            break;
        case 'x':
            bytes_printf(to, "%ld", s->x);
            break;
        case 'b':
            bytes_printf(to, "%ld", s->b);
            break;
        case 'y':
            bytes_printf(to, "%ld", s->y);
            break;
        default:
            bytes_printf(to, "%ld", s->n);
        }
    }
}

// ---- a problem ----------------------------------------------------------------------------------

struct config {
    const char *out;
    int64_t count, heldout, sft, seed, min_steps, max_steps, max_number;
    double asides, careless;
};

static int draw(struct rng *rng, int n)
{
    return (int)rng_below(rng, (uint32_t)n);
}

static long between(struct rng *rng, long least, long most)
{
    return least + draw(rng, (int)(most - least + 1));
}

static const struct person *draw_person(struct rng *rng, const struct person *not_this)
{
    const struct person *p;
    do p = &people[draw(rng, COUNT_OF(people))];
    while (p == not_this);
    return p;
}

static int n_sentences(const char *const *list, int most)
{
    int n = 0;
    while (n < most && list[n]) n++;
    return n;
}

// Draws the operand and fills y. False: the step does not fit this quantity.
static bool take_step(struct story *s, const struct step *step, const struct config *c)
{
    long most = step->most ? step->most : c->max_number, limit = 5 * c->max_number;
    if (step->sign == '-' && most >= s->x) most = s->x - 1;
    if (most < step->least) return false;
    s->b = between(&s->rng, step->least, most);
    switch (step->sign) {
    case '+':
        s->y = s->x + s->b;
        break;
    case '-':
        s->y = s->x - s->b;
        break;
    case '*':
        s->y = s->x * s->b;
        break;
    default:
        if (s->x % s->b != 0 || s->x == s->b) return false;
        s->y = s->x / s->b;
    }
    return s->y <= limit;
}

// The next step from a quantity that counts `from`; NULL: none fits, draw the problem anew. A step
// that nothing may follow is kept for the last.
static const struct step *draw_step(struct story *s, enum counts from, bool last,
                                    const struct config *c)
{
    for (int attempt = 0; attempt < 50; attempt++) {
        int total = 0, at;
        for (int i = 0; i < COUNT_OF(steps); i++)
            if (steps[i].from == from && (last || steps[i].to != IN_EACH)) total += steps[i].weight;
        at = draw(&s->rng, total);
        for (int i = 0; i < COUNT_OF(steps); i++) {
            if (steps[i].from != from || (!last && steps[i].to == IN_EACH)) continue;
            if ((at -= steps[i].weight) >= 0) continue;
            if (take_step(s, &steps[i], c)) return &steps[i];
            break;
        }
    }
    return NULL;
}

struct problem {
    struct bytes question, answer; // answer: worked, ends on "#### N"
    struct bytes careless;         // the same by one who leaves out the last of several steps
    int n_steps;
};

static void aside(struct problem *p, struct story *s, const struct config *c)
{
    if (rng_uniform(&s->rng) >= (float)c->asides) return;
    s->by_name = true;
    s->n = between(&s->rng, 2, c->max_number);
    say(&p->question, s, asides[draw(&s->rng, COUNT_OF(asides))]);
}

// False: no step fitted.
static bool tell(struct problem *p, struct story *s, const struct config *c)
{
    int n = (int)between(&s->rng, c->min_steps, c->max_steps);
    enum counts counts = NOTHING;
    bytes_clear(&p->question);
    bytes_clear(&p->answer);
    bytes_clear(&p->careless);
    p->n_steps = n;
    s->by_name = false;
    s->who = draw_person(&s->rng, NULL);
    s->thing = things[draw(&s->rng, COUNT_OF(things))];
    do s->other_thing = things[draw(&s->rng, COUNT_OF(things))];
    while (s->other_thing == s->thing);
    s->container = &containers[draw(&s->rng, COUNT_OF(containers))];
    s->good = goods[draw(&s->rng, COUNT_OF(goods))];
    s->other = draw_person(&s->rng, s->who);
    s->x = between(&s->rng, 2, draw(&s->rng, 4) ? c->max_number : 12);
    if (s->x > 12 || draw(&s->rng, 3)) { // told as it is; else by a first step of its own
        say(&p->question, s, openings[draw(&s->rng, COUNT_OF(openings))]);
        counts = THINGS;
    }
    for (int i = 0; i < n; i++) {
        const struct step *step = draw_step(s, counts, i + 1 == n, c);
        if (!step) return false;
        if (counts != NOTHING) aside(p, s, c);
        s->other = draw_person(&s->rng, s->who);
        say(&p->question, s, step->tell[draw(&s->rng, n_sentences(step->tell, MAX_TELL))]);
        if (i + 1 == n && n > 1) {
            bytes_append(&p->careless, p->answer.data, p->answer.len);
            bytes_printf(&p->careless, "#### %ld", s->x);
        }
        say(&p->answer, s, step->work[draw(&s->rng, n_sentences(step->work, 2))]);
        bytes_puts(&p->answer, "\n");
        if (step->passes_on) s->who = s->other;
        s->other = draw_person(&s->rng, s->who);
        s->x = s->y;
        counts = step->to;
    }
    bytes_printf(&p->answer, "#### %ld", s->x);
    if (n == 1) bytes_append(&p->careless, p->answer.data, p->answer.len);
    say(&p->question, s, questions[counts][draw(&s->rng, 2)]);
    return true;
}

// ---- questions given out ------------------------------------------------------------------------

struct seen { // hashes of questions; open addressing, 0: free
    uint64_t *slots;
    size_t mask;
};

static uint64_t hash_of(const struct bytes *text)
{
    uint64_t h = 0xcbf29ce484222325u; // FNV-1a, its bits then mixed for the table
    for (size_t i = 0; i < text->len; i++) h = (h ^ (unsigned char)text->data[i]) * 0x100000001b3u;
    h = (h ^ (h >> 32)) * 0x9e3779b97f4a7c15u;
    return h ? h : 1;
}

static bool seen_before(struct seen *s, uint64_t hash) // and adds it
{
    size_t at = hash & s->mask;
    for (; s->slots[at]; at = (at + 1) & s->mask)
        if (s->slots[at] == hash) return true;
    s->slots[at] = hash;
    return false;
}

// ---- the tokenizer ------------------------------------------------------------------------------

// What every word is made of: the lists and the sentences, a word with the blank before it, and
// without one where it begins a line.
struct words {
    json_t *vocab, *merges;
    int next_id;
};

#define END_OF_TEXT "<|endoftext|>"

// Adds the merges that build `word`, letter by letter.
static void add_word(struct words *w, bool blank, const char *word, size_t len)
{
    char left[64], pair[72];
    size_t n = 0;
    if (blank)
        n = (size_t)sprintf(left, "\xc4\xa0"); // GPT-2's stand-in for a blank, U+0120
    else
        left[n++] = word[0];
    for (size_t i = blank ? 0 : 1; i < len && n + 2 < sizeof left; i++) {
        left[n] = word[i], left[n + 1] = '\0';
        if (!json_object_get(w->vocab, left)) {
            snprintf(pair, sizeof pair, "%.*s %c", (int)n, left, word[i]);
            json_array_append_new(w->merges, json_string(pair));
            json_object_set_new(w->vocab, left, json_integer(w->next_id++));
        }
        n++;
    }
}

// Those of a text that may stand within a line, or the one that may begin it.
static void add_words(struct words *w, bool blank, const char *text)
{
    for (const char *c = text; c && *c && (blank || c == text);) {
        size_t n = 0;
        while (isalpha((unsigned char)c[n])) n++;
        if (n) add_word(w, blank, c, n);
        c += n ? n : *c == '%' ? 2 : 1;
    }
}

static void add_all_words(struct words *w, bool blank)
{
    for (int i = 0; i < COUNT_OF(people); i++) {
        add_words(w, blank, people[i].name);
        add_words(w, blank, people[i].They);
        if (!blank) continue;
        add_words(w, blank, people[i].they);
        add_words(w, blank, people[i].their);
    }
    for (int i = 0; blank && i < COUNT_OF(things); i++) add_words(w, blank, things[i]);
    for (int i = 0; blank && i < COUNT_OF(containers); i++) {
        add_words(w, blank, containers[i].many);
        add_words(w, blank, containers[i].one);
    }
    for (int i = 0; blank && i < COUNT_OF(goods); i++) add_words(w, blank, goods[i]);
    for (int i = 0; i < COUNT_OF(steps); i++) {
        for (int k = 0; k < MAX_TELL; k++) add_words(w, blank, steps[i].tell[k]);
        for (int k = 0; k < 2; k++) add_words(w, blank, steps[i].work[k]);
    }
    for (int i = 0; i < COUNT_OF(openings); i++) add_words(w, blank, openings[i]);
    for (int i = 0; blank && i < COUNT_OF(asides); i++) add_words(w, blank, asides[i]);
    for (int i = THINGS; blank && i <= DOLLARS; i++)
        for (int k = 0; k < 2; k++) add_words(w, blank, questions[i][k]);
}

// Bytes are tokens 0 to 255, in the order of GPT-2's printable stand-ins for them.
static void add_bytes(struct words *w)
{
    for (int b = 0, moved = 0; b < 256; b++) {
        char token[5];
        bool plain = (b >= '!' && b <= '~') || (b >= 0xa1 && b <= 0xac) || b >= 0xae;
        token[utf8_encode((uint32_t)(plain ? b : 256 + moved), token)] = '\0';
        moved += !plain;
        json_object_set_new(w->vocab, token, json_integer(w->next_id++));
    }
}

static enum status write_tokenizer(const char *folder)
{
    enum status st;
    struct words w = {json_object(), json_array(), 0};
    char *tokenizer_path = path_join(folder, "tokenizer.json");
    char *config_path = path_join(folder, "tokenizer_config.json");
    json_t *tokenizer = NULL, *config = NULL;
    add_bytes(&w);
    int end = w.next_id++;
    add_all_words(&w, true); // before those without: " Tom" must not become " " and "Tom"
    add_all_words(&w, false);
    tokenizer = json_pack(
        "{s:s, s:n, s:n, s:[{s:i, s:s, s:b, s:b, s:b, s:b, s:b}], s:n,"
        " s:{s:s, s:[{s:s, s:{s:s}, s:s, s:b}, {s:s, s:b, s:b, s:b}]}, s:n, s:{s:s, s:b, s:b, s:b},"
        " s:{s:s, s:n, s:n, s:n, s:n, s:b, s:b, s:O, s:O}}",
        "version", "1.0", "truncation", "padding", "added_tokens", "id", end, "content",
        END_OF_TEXT, "single_word", 0, "lstrip", 0, "rstrip", 0, "normalized", 0, "special", 1,
        "normalizer", "pre_tokenizer", "type", "Sequence", "pretokenizers", "type", "Split",
        "pattern", "Regex", " ?\\p{L}+|\\p{N}|[^\\p{L}\\p{N}]", "behavior", "Isolated", "invert", 0,
        "type", "ByteLevel", "add_prefix_space", 0, "trim_offsets", 1, "use_regex", 0,
        "post_processor", "decoder", "type", "ByteLevel", "add_prefix_space", 0, "trim_offsets", 1,
        "use_regex", 0, "model", "type", "BPE", "dropout", "unk_token", "continuing_subword_prefix",
        "end_of_word_suffix", "fuse_unk", 0, "byte_fallback", 0, "vocab", w.vocab, "merges",
        w.merges);
    config = json_pack("{s:s, s:s, s:s}", "tokenizer_class", "PreTrainedTokenizerFast", "eos_token",
                       END_OF_TEXT, "pad_token", END_OF_TEXT);
    if (!tokenizer || !config || !tokenizer_path || !config_path) {
        st = status_fail(ST_NO_MEMORY, "no memory for a tokenizer");
        goto out;
    }
    CHECK(json_write_file(tokenizer_path, 0644, tokenizer));
    CHECK(json_write_file(config_path, 0644, config));
    printf("%s: %d tokens\n", folder, w.next_id);
out:
    json_decref(tokenizer);
    json_decref(config);
    json_decref(w.vocab);
    json_decref(w.merges);
    free(tokenizer_path);
    free(config_path);
    return st;
}

// ---- the files ----------------------------------------------------------------------------------

struct source {
    const struct config *config;
    struct seen seen;
    uint64_t next; // problem to draw
    struct problem problem;
};

#define MAX_ATTEMPTS 1000

static enum status next_problem(struct source *s)
{
    struct story story = {0};
    rng_init(&story.rng, (uint64_t)s->config->seed, s->next);
    for (int attempt = 0; attempt < MAX_ATTEMPTS; attempt++) {
        if (!tell(&s->problem, &story, s->config)) continue;
        if (s->problem.question.failed || s->problem.answer.failed || s->problem.careless.failed)
            return status_fail(ST_NO_MEMORY, "no memory for a problem");
        if (seen_before(&s->seen, hash_of(&s->problem.question))) continue;
        s->next++;
        return ST_OK;
    }
    return status_fail(ST_INVALID,
                       "no new problem after %" PRIu64 " of them; lower --count, or raise "
                       "--max-number, --max-steps or --asides",
                       s->next);
}

// A line for training or held out, in GSM8K's form; or, for the warm start, from a teacher who is
// careless in a share of the problems.
static json_t *line_of(const struct source *s, bool warm_start, bool careless)
{
    const struct problem *p = &s->problem;
    if (!warm_start)
        return json_pack("{s:s, s:s, s:i}", "question", p->question.data, "answer", p->answer.data,
                         "steps", p->n_steps);
    return json_pack("{s:s, s:s}", "prompt", p->question.data, "completion",
                     careless ? p->careless.data : p->answer.data);
}

static enum status write_file(struct source *s, const char *name, int64_t count, bool warm_start)
{
    enum status st = ST_OK;
    struct bytes text = BYTES_INIT;
    struct rng teacher;
    char *path = path_join(s->config->out, name);
    rng_init(&teacher, (uint64_t)s->config->seed, UINT64_MAX);
    for (int64_t i = 0; i < count; i++) {
        CHECK(next_problem(s));
        bool careless = rng_uniform(&teacher) < (float)s->config->careless;
        json_t *line = line_of(s, warm_start, careless);
        char *dumped = line ? json_dumps(line, JSON_COMPACT) : NULL;
        if (dumped) bytes_puts(&text, dumped);
        bytes_puts(&text, "\n");
        free(dumped);
        json_decref(line);
        if (!dumped || text.failed) {
            st = status_fail(ST_NO_MEMORY, "no memory for %s", name);
            goto out;
        }
    }
    if (!path) {
        st = status_fail(ST_NO_MEMORY, "no memory for %s", name);
        goto out;
    }
    CHECK(file_write_atomic(path, 0644, bytes_text(&text), text.len));
    printf("%s: %" PRId64 " problems\n", path, count);
out:
    bytes_release(&text);
    free(path);
    return st;
}

static enum status write_all(const struct config *c)
{
    enum status st = ST_OK;
    struct source s = {.config = c};
    char *tokenizer = path_join(c->out, "tokenizer");
    size_t slots = 16;
    while (slots < 2 * (size_t)(c->count + c->heldout + c->sft)) slots *= 2;
    s.seen.mask = slots - 1;
    s.seen.slots = calloc(slots, sizeof *s.seen.slots);
    if (!tokenizer || !s.seen.slots) {
        st = status_fail(ST_NO_MEMORY, "no memory for %zu problems", slots / 2);
        goto out;
    }
    CHECK(file_make_folders(tokenizer));
    CHECK(write_tokenizer(tokenizer));
    CHECK(write_file(&s, "heldout.jsonl", c->heldout, false));
    if (c->sft) CHECK(write_file(&s, "sft.jsonl", c->sft, true));
    CHECK(write_file(&s, "train.jsonl", c->count, false));
out:
    bytes_release(&s.problem.question);
    bytes_release(&s.problem.answer);
    bytes_release(&s.problem.careless);
    free(s.seen.slots);
    free(tokenizer);
    return st;
}

// ---- main ---------------------------------------------------------------------------------------

#define FIELD(name) .offset = offsetof(struct config, name)
static const struct option_spec options[] = {
    {.name = "out",
     .type = OPTION_PATH,
     FIELD(out),
     .value_name = "DIR",
     .help = "folder to write into; made where needed"},
    {.name = "count",
     .type = OPTION_INT,
     FIELD(count),
     .fallback = "10000",
     .value_name = "N",
     .help = "problems in train.jsonl",
     .min = 1,
     .max = 1e7},
    {.name = "heldout",
     .type = OPTION_INT,
     FIELD(heldout),
     .fallback = "500",
     .value_name = "N",
     .help = "problems in heldout.jsonl",
     .min = 1,
     .max = 1e6},
    {.name = "sft",
     .type = OPTION_INT,
     FIELD(sft),
     .fallback = "0",
     .value_name = "N",
     .help = "problems in sft.jsonl, for a warm start; 0: no such file",
     .min = 0,
     .max = 1e7},
    {.name = "careless",
     .type = OPTION_DOUBLE,
     FIELD(careless),
     .fallback = "0",
     .value_name = "SHARE",
     .help = "of the problems of sft.jsonl with several steps: the last one is left out",
     .min = 0,
     .max = 1},
    {.name = "min-steps",
     .type = OPTION_INT,
     FIELD(min_steps),
     .fallback = "1",
     .value_name = "N",
     .help = "steps to the answer, at least",
     .min = 1,
     .max = MAX_STEPS},
    {.name = "max-steps",
     .type = OPTION_INT,
     FIELD(max_steps),
     .fallback = "4",
     .value_name = "N",
     .help = "at most",
     .min = 1,
     .max = MAX_STEPS},
    {.name = "max-number",
     .type = OPTION_INT,
     FIELD(max_number),
     .fallback = "99",
     .value_name = "N",
     .help = "largest number in a problem; results go up to five times that",
     .min = 12,
     .max = 1e6},
    {.name = "asides",
     .type = OPTION_DOUBLE,
     FIELD(asides),
     .fallback = "0.2",
     .value_name = "SHARE",
     .help = "of the steps that have a sentence before them which does not matter",
     .min = 0,
     .max = 1},
    {.name = "seed",
     .type = OPTION_INT,
     FIELD(seed),
     .fallback = "1",
     .value_name = "N",
     .help = "of all that is drawn",
     .min = 0,
     .max = 1e15},
    {.name = NULL},
};

int main(int argc, char **argv)
{
    struct config config = {0};
    struct option_set *set = NULL;
    int exit_status = 0;
    log_open("cw-word-problems", LOG_INFO);
    enum option_result parsed = options_parse(
        options, "cw-word-problems",
        "--out DIR [options]\n\n"
        "Writes word problems: train.jsonl and heldout.jsonl as GSM8K has them ({\"question\", "
        "\"answer\"},\nthe answer worked out and ending on \"#### N\"), sft.jsonl for a warm start "
        "({\"prompt\",\n\"completion\"}), no problem in two of them, and tokenizer/ for their "
        "words.",
        argc, argv, 0, &config, NULL, &set);
    if (parsed == OPTIONS_DONE) return 0;
    if (parsed == OPTIONS_OK && !config.out) {
        status_fail(ST_INVALID, "--out is missing: the folder to write into");
        parsed = OPTIONS_BAD;
    } else if (parsed == OPTIONS_OK && config.min_steps > config.max_steps) {
        status_fail(ST_INVALID, "--min-steps %" PRId64 " is above --max-steps %" PRId64,
                    config.min_steps, config.max_steps);
        parsed = OPTIONS_BAD;
    }
    if (parsed == OPTIONS_BAD) {
        log_error("%s", status_message());
        exit_status = 2;
    } else if (write_all(&config) != ST_OK) {
        log_error("%s", status_message());
        exit_status = 1;
    }
    options_free(set);
    return exit_status;
}
