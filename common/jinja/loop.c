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
    bool looked_ahead;
    struct value last_changed; // V_MISSING: changed() was not called yet
};

// ---- taking items -------------------------------------------------------------------------------

static enum status passes(struct loop *l, struct value item, bool *ret)
{
    struct scope scope = {.outer = l->scope};
    struct value truth;
    enum status st;
    *ret = true;
    if (!l->node->c || l->tested) return ST_OK;
    CHECK(scope_assign(l->run, &scope, l->node->a, item));
    CHECK(jinja_evaluate(l->run, &scope, l->node->c, &truth));
    CHECK(value_truth(l->run, &truth, ret));
out:
    return st;
}

// V_MISSING: there is none.
static enum status take(struct loop *l, struct value *ret)
{
    enum status st = ST_OK;
    bool good = false;
    *ret = MISSING;
    while (st == ST_OK && !good && l->at < l->items.n) {
        struct value item = l->items.items[l->at++];
        st = run_steps(l->run, 1);
        if (st == ST_OK) st = passes(l, item, &good);
        if (good) *ret = item;
    }
    return st;
}

static enum status look_ahead(struct loop *l)
{
    if (l->looked_ahead && given(&l->after)) return ST_OK;
    l->looked_ahead = true;
    return take(l, &l->after);
}

static enum status advance(struct loop *l, struct value *ret)
{
    enum status st = ST_OK;
    if (l->looked_ahead && given(&l->after))
        *ret = l->after;
    else
        st = take(l, ret);
    l->looked_ahead = false;
    l->after = MISSING;
    return st;
}

// With a test, what remains is asked now.
enum status loop_length(struct run *r, struct loop *l, int64_t *ret)
{
    enum status st = ST_OK;
    if (l->length < 0 && (!l->node->c || l->tested)) l->length = (int64_t)l->items.n;
    if (l->length < 0) {
        struct value list, *items, item;
        size_t n = 0;
        CHECK(list_make(&r->arena, V_LIST, l->items.n - l->at, &items, &list));
        for (;;) {
            CHECK(take(l, &item));
            if (!given(&item)) break;
            items[n++] = item;
        }
        l->length = (int64_t)n + l->index0 + 1 + (l->looked_ahead && given(&l->after));
        l->items = (struct list){.items = items, .n = n};
        l->at = 0;
        l->tested = true;
    }
    *ret = l->length;
out:
    return st;
}

int64_t loop_index(const struct loop *l)
{
    return l->index0 + 1;
}

// ---- loop.x -------------------------------------------------------------------------------------

static enum status neighbour(struct loop *l, bool next, struct value *ret)
{
    enum status st = next ? look_ahead(l) : ST_OK;
    *ret = next ? l->after : l->previous;
    if (st == ST_OK && !given(ret))
        st = undefined_make(l->run, next ? "there is no next item" : "there is no previous item",
                            NULL, MISSING, ret);
    return st;
}

enum status loop_attribute(struct run *r, struct loop *l, const struct string *name,
                           struct value *ret)
{
    int64_t length;
    enum status st = ST_OK;
    *ret = MISSING;
    if (string_is(name, "index")) {
        *ret = value_int(l->index0 + 1);
    } else if (string_is(name, "index0")) {
        *ret = value_int(l->index0);
    } else if (string_is(name, "first")) {
        *ret = value_bool(l->index0 == 0);
    } else if (string_is(name, "last")) {
        st = look_ahead(l);
        *ret = value_bool(!given(&l->after));
    } else if (string_is(name, "length")) {
        st = loop_length(r, l, &length);
        *ret = value_int(length);
    } else if (string_is(name, "revindex") || string_is(name, "revindex0")) {
        st = loop_length(r, l, &length);
        *ret = value_int(length - l->index0 - string_is(name, "revindex0"));
    } else if (string_is(name, "previtem") || string_is(name, "nextitem")) {
        st = neighbour(l, string_is(name, "nextitem"), ret);
    } else if (string_is(name, "depth") || string_is(name, "depth0")) {
        *ret = value_int(l->depth0 + string_is(name, "depth"));
    }
    return st;
}

enum status loop_changed(struct run *r, struct loop *l, const struct arguments *arguments,
                         struct value *ret)
{
    struct value now, *items;
    bool same = false;
    size_t n = (size_t)arguments->n_positional;
    enum status st = list_make(&r->arena, V_TUPLE, n, &items, &now);
    if (st != ST_OK) return st;
    if (n > 0) memcpy(items, arguments->positional, n * sizeof *items);
    if (given(&l->last_changed)) st = value_equal(r, &l->last_changed, &now, &same);
    l->last_changed = now;
    *ret = value_bool(!same);
    return st;
}

enum status loop_call(struct run *r, struct loop *l, const struct arguments *arguments,
                      struct value *ret)
{
    struct bytes text = BYTES_INIT, *out = r->out;
    if (!l->node->op)
        return status_fail(ST_INVALID, "The loop must have the 'recursive' marker to be called "
                                       "recursively.");
    if (arguments->n_positional != 1 || arguments->n_named > 0)
        return status_fail(ST_INVALID, "a recursive loop is called with one list");
    r->out = &text;
    enum status st = loop_render(r, l->scope, l->node, &arguments->positional[0], l->depth0 + 1);
    r->out = out;
    return run_take(r, st, &text, ret);
}

// ---- the loop -----------------------------------------------------------------------------------

// Each time round has a scope of its own: what it sets is gone with it.
static enum status render_item(struct run *r, struct scope *outer, struct loop *l,
                               const struct string *name, struct value item)
{
    enum status st;
    struct scope *scope = arena_alloc(&r->arena, sizeof *scope); // a macro may keep it
    if (!scope) return ST_NO_MEMORY;
    scope->outer = outer;
    CHECK(scope_set(r, scope, name, value_of(.kind = V_LOOP, .loop = l)));
    CHECK(scope_assign(r, scope, l->node->a, item));
    CHECK(jinja_render_body(r, scope, &l->node->body));
out:
    return st;
}

enum status loop_render(struct run *r, struct scope *scope, const struct node *node,
                        const struct value *iterable, int64_t depth0)
{
    struct value name, item;
    bool completed = false;
    enum status st;
    struct loop *l = arena_alloc(&r->arena, sizeof *l);
    if (!l) return ST_NO_MEMORY;
    *l = (struct loop){
        .run = r, .scope = scope, .node = node, .index0 = -1, .length = -1, .depth0 = depth0};
    CHECK(run_deeper(r));
    CHECK(value_items(r, iterable, &l->items));
    CHECK(string_puts(&r->arena, "loop", &name));
    for (;;) {
        CHECK(advance(l, &item));
        if (!given(&item)) break;
        l->index0++;
        l->previous = l->current;
        l->current = item;
        CHECK(render_item(r, scope, l, name.string, item));
        bool stop = r->flow == FLOW_BREAK;
        completed |= r->flow == FLOW_ON;
        r->flow = FLOW_ON;
        if (stop) break;
    }
    if (!completed) { // no round went to its end, be it for a break: so it is in Jinja
        struct scope *otherwise = arena_alloc(&r->arena, sizeof *otherwise);
        if (!otherwise) return ST_NO_MEMORY;
        otherwise->outer = scope;
        CHECK(jinja_render_body(r, otherwise, &node->items));
    }
    r->depth--;
out:
    return st;
}
