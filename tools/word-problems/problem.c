/* problem.c: tells a problem and works it out. Stateless but for the caller's random stream.
 *
 * A problem is a chain of steps on one quantity: each step has an operator, a random operand, a
 * sentence that tells it and one that works it out. What the quantity counts (things, things in
 * each box, dollars) decides which steps may follow and how the question is put. Sentences that
 * have nothing to do with it are strewn in. Words come from short lists, so that a tokenizer can
 * have one token for each.
 */
// SPDX-License-Identifier: Apache-2.0
#include "tools/word-problems/problem.h"

#include <stdio.h>
#include <string.h>

#define COUNT_OF(array) ((int)(sizeof(array) / sizeof *(array)))

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
// Several ways to say a thing stand in one text, with | between them.

enum counts { NOTHING, THINGS, IN_EACH, DOLLARS }; // what the quantity is; NOTHING: not told yet

static const struct step {
    enum counts from, to;
    char sign;      // '=' starts: y = b
    int min, max;   // of the operand; max 0: --max-number
    bool passes_on; // %F is the person asked about from here on
    int weight;     // how often it is sampled
    const char *tell, *work;
} steps[] = {
    {NOTHING, THINGS, '*', 2, 12, false, 2,
     "%N buys %x %C of %O. Each %c holds %b %O.|"
     "There are %x %C with %b %O each in the room of %N.|"
     "%N fills %x %C with %b %O each.",
     "%N has %x * %b = %y %O.|"
     "In all there are %x * %b = %y %O."},
    {THINGS, THINGS, '+', 2, 0, false, 4,
     "%F gives %N %b more %O.|"
     "Then %p finds another %b %O.|"
     "The next day %p buys %b more %O.|"
     "Later %p gets %b %O as a present.",
     "Then %N has %x + %b = %y %O.|"
     "With these it is %x + %b = %y %O."},
    {THINGS, THINGS, '-', 2, 0, false, 5,
     "%P gives %b of them to %F.|"
     "On the way home %p loses %b %O.|"
     "At school %p hands out %b of the %O.|"
     "After that %b of the %O break.",
     "%P keeps %x - %b = %y %O.|"
     "That leaves %x - %b = %y %O."},
    {THINGS, THINGS, '*', 2, 6, false, 1,
     "By the end of the month %p has %b times as many %O.|"
     "A year later %p has %b times as many %O.",
     "That makes %x * %b = %y %O."},
    {THINGS, THINGS, '/', 2, 2, false, 1,
     "%P gives half of the %O to %F.|"
     "Half of the %O get lost.|"
     "%P keeps only half of them.",
     "Half of them is %x / %b = %y %O."},
    {THINGS, THINGS, '+', 2, 0, true, 2, "%F has %b more %O than %N.", "%F has %x + %b = %y %O."},
    {THINGS, THINGS, '-', 2, 0, true, 2, "%F has %b fewer %O than %N.", "%F has %x - %b = %y %O."},
    {THINGS, THINGS, '*', 2, 6, true, 2, "%F has %b times as many %O as %N.",
     "%F has %x * %b = %y %O."},
    {THINGS, IN_EACH, '/', 2, 12, false, 3,
     "%P shares all the %O equally among %b %C.|"
     "%P puts the %O into %b %C, as many in each.",
     "Each %c gets %x / %b = %y %O."},
    {THINGS, DOLLARS, '*', 2, 12, false, 3,
     "%P sells all of the %O for $%b each.|"
     "%F buys all of the %O for $%b each.",
     "%P gets %x * %b = %y dollars."},
    {DOLLARS, DOLLARS, '-', 2, 0, false, 2,
     "%P spends $%b on %G.|"
     "Then %p pays $%b for %G.",
     "That leaves %x - %b = %y dollars."},
    {DOLLARS, DOLLARS, '+', 2, 0, false, 2,
     "%F gives %N another $%b.|"
     "%P finds $%b in %g coat.",
     "Then %p has %x + %b = %y dollars."},
};
static const char openings[] = "%N has %x %O.|"
                               "In the morning %N picks %x %O.|"
                               "%N has a box with %x %O in it.|"
                               "At the market %N buys %x %O.|"
                               "%N gets %x %O from %F.";
static const char asides[] = "%F has %n %D.|"
                             "%N is %n years old.|"
                             "There are %n children in the class of %N.|"
                             "The shop is %n miles away.|"
                             "%F has walked for %n minutes.|"
                             "Last year %N had %n %D.";
static const char *const questions[] = {
    [THINGS] = "How many %O does %N have now?|How many %O does %N have in the end?",
    [IN_EACH] = "How many %O are in each %c?|How many %O does each %c hold?",
    [DOLLARS] = "How many dollars does %N have now?|How much money does %N have, in dollars?",
};

struct story {
    struct rng *rng;
    const struct person *who, *other;
    const char *thing, *other_thing, *good;
    const struct container *container;
    long x, b, y, n;
    bool by_name; // a pronoun might be another person's
};

static int pick(struct rng *rng, int n)
{
    return (int)rng_below(rng, (uint32_t)n);
}

// What stands for a sign; numbers are written into `number`.
static const char *word_of(const struct story *s, char sign, char number[24])
{
    const struct person *who = s->who;
    const char *const words[128] = {['N'] = who->name,
                                    ['F'] = s->other->name,
                                    ['p'] = s->by_name ? who->name : who->they,
                                    ['P'] = s->by_name ? who->name : who->They,
                                    ['g'] = who->their,
                                    ['O'] = s->thing,
                                    ['D'] = s->other_thing,
                                    ['C'] = s->container->many,
                                    ['c'] = s->container->one,
                                    ['G'] = s->good};
    const long numbers[128] = {['x'] = s->x, ['b'] = s->b, ['y'] = s->y, ['n'] = s->n};
    if (words[(int)sign]) return words[(int)sign];
    snprintf(number, 24, "%ld", numbers[(int)sign]);
    return number;
}

// The next way to say it, behind this one; NULL: there is none.
static const char *next_way(const char *text)
{
    const char *bar = strchr(text, '|');
    return bar ? bar + 1 : NULL;
}

// Appends one of the ways.
static void say(struct bytes *to, const struct story *s, const char *ways)
{
    char number[24];
    int n = 0;
    for (const char *way = ways; way; way = next_way(way)) n++;
    for (int skip = pick(s->rng, n); skip > 0; skip--) ways = next_way(ways);
    if (to->len && to->data[to->len - 1] != '\n') bytes_puts(to, " ");
    for (const char *c = ways; *c && *c != '|'; c++)
        if (*c == '%')
            bytes_puts(to, word_of(s, *++c, number));
        else
            bytes_append(to, c, 1);
}

// ---- a problem ----------------------------------------------------------------------------------

static long between(struct rng *rng, long min, long max)
{
    return min + pick(rng, (int)(max - min + 1));
}

static const struct person *pick_person(struct rng *rng, const struct person *not_this)
{
    const struct person *p;
    do p = &people[pick(rng, COUNT_OF(people))];
    while (p == not_this);
    return p;
}

// Samples the operand and fills y. False: the step does not fit this quantity.
static bool take_step(struct story *s, const struct step *step, const struct problem_options *c)
{
    long max = step->max ? step->max : c->max_number, limit = 5 * c->max_number;
    if (step->sign == '-' && max >= s->x) max = s->x - 1;
    if (max < step->min) return false;
    s->b = between(s->rng, step->min, max);
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

// The next step from a quantity that counts `from`; NULL: none fits, begin the problem anew. A step
// that nothing may follow is kept for the last.
static const struct step *pick_step(struct story *s, enum counts from, bool last,
                                    const struct problem_options *c)
{
    for (int attempt = 0; attempt < 50; attempt++) {
        int total = 0, at;
        for (int i = 0; i < COUNT_OF(steps); i++)
            if (steps[i].from == from && (last || steps[i].to != IN_EACH)) total += steps[i].weight;
        at = pick(s->rng, total);
        for (int i = 0; i < COUNT_OF(steps); i++) {
            if (steps[i].from != from || (!last && steps[i].to == IN_EACH)) continue;
            if ((at -= steps[i].weight) >= 0) continue;
            if (take_step(s, &steps[i], c)) return &steps[i];
            break;
        }
    }
    return NULL;
}

static void aside(struct problem *p, struct story *s, const struct problem_options *c)
{
    if (rng_uniform(s->rng) >= (float)c->asides) return;
    s->by_name = true;
    s->n = between(s->rng, 2, c->max_number);
    say(&p->question, s, asides);
}

bool problem_tell(struct problem *p, struct rng *rng, const struct problem_options *c)
{
    struct story story = {.rng = rng}, *s = &story;
    int n = (int)between(s->rng, c->min_steps, c->max_steps);
    enum counts counts = NOTHING;
    bytes_clear(&p->question);
    bytes_clear(&p->answer);
    bytes_clear(&p->careless);
    p->n_steps = n;
    s->by_name = false;
    s->who = pick_person(s->rng, NULL);
    s->thing = things[pick(s->rng, COUNT_OF(things))];
    do s->other_thing = things[pick(s->rng, COUNT_OF(things))];
    while (s->other_thing == s->thing);
    s->container = &containers[pick(s->rng, COUNT_OF(containers))];
    s->good = goods[pick(s->rng, COUNT_OF(goods))];
    s->other = pick_person(s->rng, s->who);
    s->x = between(s->rng, 2, pick(s->rng, 4) ? c->max_number : 12);
    if (s->x > 12 || pick(s->rng, 3)) { // told as it is; else by a first step of its own
        say(&p->question, s, openings);
        counts = THINGS;
    }
    for (int i = 0; i < n; i++) {
        const struct step *step = pick_step(s, counts, i + 1 == n, c);
        if (!step) return false;
        if (counts != NOTHING) aside(p, s, c);
        s->other = pick_person(s->rng, s->who);
        say(&p->question, s, step->tell);
        if (i + 1 == n && n > 1) {
            bytes_append(&p->careless, p->answer.data, p->answer.len);
            bytes_printf(&p->careless, "#### %ld", s->x);
        }
        say(&p->answer, s, step->work);
        bytes_puts(&p->answer, "\n");
        if (step->passes_on) s->who = s->other;
        s->other = pick_person(s->rng, s->who);
        s->x = s->y;
        counts = step->to;
    }
    bytes_printf(&p->answer, "#### %ld", s->x);
    if (n == 1) bytes_append(&p->careless, p->answer.data, p->answer.len);
    say(&p->question, s, questions[counts]);
    return true;
}

void problem_release(struct problem *p)
{
    bytes_release(&p->question);
    bytes_release(&p->answer);
    bytes_release(&p->careless);
}

typedef void (*text_fn)(void *context, const char *text);

static void each_way(const char *ways, text_fn take, void *context)
{
    for (; ways; ways = next_way(ways)) take(context, ways);
}

void problem_texts(bool line_starts, text_fn take, void *context)
{
    for (int i = 0; i < COUNT_OF(people); i++) {
        take(context, people[i].name);
        take(context, people[i].They);
        if (line_starts) continue;
        take(context, people[i].they);
        take(context, people[i].their);
    }
    for (int i = 0; !line_starts && i < COUNT_OF(things); i++) take(context, things[i]);
    for (int i = 0; !line_starts && i < COUNT_OF(containers); i++) {
        take(context, containers[i].many);
        take(context, containers[i].one);
    }
    for (int i = 0; !line_starts && i < COUNT_OF(goods); i++) take(context, goods[i]);
    for (int i = 0; i < COUNT_OF(steps); i++) {
        each_way(steps[i].tell, take, context);
        each_way(steps[i].work, take, context);
    }
    each_way(openings, take, context);
    if (line_starts) return;
    each_way(asides, take, context);
    for (int i = THINGS; i <= DOLLARS; i++) each_way(questions[i], take, context);
}
