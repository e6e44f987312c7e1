/* loop.c: `for`, and what its body may ask of `loop`. Items are taken one by one, and a loop's test
 * ("for x in y if z") is asked when its item is due, as in Jinja: what the body has changed in a
 * namespace counts. One thread. */
#include "common/jinja/run.h"

struct loop {
    struct run *run;
    struct scope *scope; // around it
    const struct node *node;
    struct list items;
    size_t at;                             // the next of them to be looked at
    bool tested;                           // the test has been asked of all that remain
    int64_t index0, length, depth0;        // length -1: not known yet
    struct value previous, current, after; // after: looked ahead; V_MISSING: not, or none
    struct value last_changed;             // V_MISSING: changed() was not called yet
};

// ---- taking items -------------------------------------------------------------------------------

static bool passes(struct loop *l, struct value item)
{
    struct scope scope = {.outer = l->scope};
    if (!l->node->c || l->tested) return true;
    scope_assign(l->run, &scope, l->node->a, item);
    return jinja_evaluate_truth(l->run, &scope, l->node->c);
}

// V_MISSING: there is none.
static struct value take(struct loop *l)
{
    while (l->at < l->items.n) {
        struct value item = l->items.items[l->at++];
        run_steps(l->run, 1);
        if (passes(l, item)) return item;
    }
    return MISSING;
}

static struct value look_ahead(struct loop *l)
{
    if (!given(l->after)) l->after = take(l);
    return l->after;
}

static bool advance(struct loop *l)
{
    struct value item = look_ahead(l);
    l->after = MISSING;
    if (!given(item)) return false;
    l->index0++;
    l->previous = l->current;
    l->current = item;
    return true;
}

// With a test, what remains is asked now.
int64_t loop_length(struct loop *l)
{
    if (l->length >= 0) return l->length;
    if (l->node->c && !l->tested) {
        struct value *items = arena_array(&l->run->arena, l->items.n - l->at, sizeof *items);
        size_t n = 0;
        for (struct value item; given(item = take(l));) items[n++] = item;
        l->length = (int64_t)n + l->index0 + 1 + given(l->after);
        l->items = (struct list){.items = items, .n = n};
        l->at = 0;
        l->tested = true;
    } else {
        l->length = (int64_t)l->items.n;
    }
    return l->length;
}

// ---- loop.x -------------------------------------------------------------------------------------

struct value loop_attribute(struct loop *l, const struct string *name)
{
    if (string_is(name, "index")) return value_int(l->index0 + 1);
    if (string_is(name, "index0")) return value_int(l->index0);
    if (string_is(name, "first")) return value_bool(l->index0 == 0);
    if (string_is(name, "last")) return value_bool(!given(look_ahead(l)));
    if (string_is(name, "length")) return value_int(loop_length(l));
    if (string_is(name, "revindex")) return value_int(loop_length(l) - l->index0);
    if (string_is(name, "revindex0")) return value_int(loop_length(l) - l->index0 - 1);
    if (string_is(name, "depth")) return value_int(l->depth0 + 1);
    if (string_is(name, "depth0")) return value_int(l->depth0);
    if (string_is(name, "previtem"))
        return given(l->previous) ? l->previous
                                  : undefined_because(l->run, "there is no previous item");
    if (string_is(name, "nextitem"))
        return given(look_ahead(l)) ? l->after : undefined_because(l->run, "there is no next item");
    return MISSING;
}

BUILTIN(loop_changed)
{
    struct loop *l = c->v[0].loop;
    struct value now = list_of(&r->arena, V_TUPLE, c->all->positional);
    bool same = given(l->last_changed) && value_equal(r, l->last_changed, now);
    l->last_changed = now;
    return value_bool(!same);
}

BUILTIN(loop_cycle)
{
    size_t n = c->all->positional.n;
    if (n == 0) fail(r, "no items for cycling given");
    return c->all->positional.items[(size_t)c->v[0].loop->index0 % n];
}

struct value loop_call(struct run *r, struct loop *l, const struct arguments *arguments)
{
    if (!l->node->op)
        fail(r, "The loop must have the 'recursive' marker to be called recursively.");
    if (arguments->positional.n != 1 || arguments->named.n > 0)
        fail(r, "a recursive loop is called with one list");
    size_t text = text_begin(r);
    loop_render(r, l->scope, l->node, arguments->positional.items[0], l->depth0 + 1);
    return text_end(r, text, false);
}

// ---- the loop -----------------------------------------------------------------------------------

// Each time round has a scope of its own: what it sets is gone with it.
static void render_item(struct run *r, struct scope *outer, struct loop *l,
                        const struct string *name)
{
    struct scope *scope = scope_new(r, outer);
    scope_set(r, scope, name, value_of(.kind = V_LOOP, .loop = l));
    scope_assign(r, scope, l->node->a, l->current);
    jinja_render_body(r, scope, &l->node->body);
}

void loop_render(struct run *r, struct scope *scope, const struct node *node, struct value iterable,
                 int64_t depth0)
{
    bool completed = false, stop = false;
    struct loop *l = arena_alloc(&r->arena, sizeof *l);
    *l = (struct loop){
        .run = r, .scope = scope, .node = node, .index0 = -1, .length = -1, .depth0 = depth0};
    run_deeper(r);
    l->items = value_items(r, iterable);
    const struct string *name = string_of(&r->arena, "loop").string;
    while (!stop && advance(l)) {
        render_item(r, scope, l, name);
        stop = r->flow == FLOW_BREAK;
        completed |= r->flow == FLOW_ON;
        r->flow = FLOW_ON;
    }
    // no round went to its end, be it for a break: so it is in Jinja
    if (!completed) jinja_render_body(r, scope_new(r, scope), &node->items);
    r->depth--;
}

const struct builtin loop_builtins[] = {
    {METHOD(V_LOOP), "cycle", loop_cycle, 0, "*", 0},
    {METHOD(V_LOOP), "changed", loop_changed, 0, "*", 0},
    {.name = NULL},
};
