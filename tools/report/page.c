/* page.c: the page from top to bottom, and the table of its charts.
 *
 * A chart names the keys it shows by patterns; a key belongs to the first chart of the table that
 * names it, and what no chart names gets one of its own at the end, so that a new metric is on the
 * page before anybody thinks of it here. The page forbids itself any load (its
 * Content-Security-Policy): what a model wrote into a rollout is text, and stays text even if the
 * escaping had a hole.
 */
#include "tools/report/page.h"
#include "common/base/file.h"
#include "tools/report/chart.h"
#include "tools/report/html.h"
#include "tools/report/rollouts.h"

#include <fnmatch.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define REPORTS_SHOWN 20        // cluster reports
#define REPORT_MAX    (1 << 16) // bytes of one

// ---- charts -------------------------------------------------------------------------------------

struct chart_spec {
    const char *title; // NULL: each key has a chart of its own, named by it
    const char *unit;
    const char *keys;    // patterns (fnmatch; '*' matches '/' too); KEY=ERRORS: with error bars
    const char *section; // a new one begins, and this is no chart
};
static const struct chart_spec specs[] = {
    {.section = "Reward"},
    {"Reward", "mean over the step's samples",
     "reward eval/reward=eval/reward_standard_error rewards/task rewards/cost", NULL},
    {"Terms of the task's reward", "mean, unweighted", "rewards/*/mean", NULL},
    {"Accuracy", "%", "accuracy eval/accuracy=eval/standard_error", NULL},
    {"Spread of rewards", "standard deviation", "reward_std reward_group_std rewards/*/std", NULL},
    {"What inference adds to the reward", "weighted mean", "rewards/cost/*", NULL},
    {"Groups whose rewards are all the same", "%", "frac_reward_zero_std", NULL},
    {"Advantages", "", "advantage_mean advantage_std", NULL},
    {.section = "Curriculum"},
    {"Reward of an example", "moving averages, and the buckets' boundaries",
     "curriculum/reward_* curriculum/boundary_*", NULL},
    {"Samples of a prompt", "", "curriculum/rollouts curriculum/bucket_*/rollouts", NULL},
    {"Mean reward of a bucket", "", "curriculum/bucket_*/mean", NULL},
    {"Standard deviation in a bucket", "", "curriculum/bucket_*/std", NULL},
    {"Examples in a bucket", "", "curriculum/bucket_*/count", NULL},
    {"Share of a bucket", "%", "curriculum/bucket_*/share", NULL},
    {"Spread of a bucket", "", "curriculum/bucket_*/spread", NULL},
    {"Balance of a bucket", "", "curriculum/bucket_*/balance", NULL},
    {NULL, "", "curriculum/*", NULL},
    {.section = "Inference"},
    {"Acceptance rate of drafts", "%",
     "spec_decode/acceptance_rate eval/acceptance_rate inference/accept_rate", NULL},
    {"Acceptance rate by position", "%", "spec_decode/acceptance_rate_pos_*", NULL},
    {"Acceptance length", "tokens a verification",
     "spec_decode/acceptance_length eval/acceptance_length", NULL},
    {"Drafts", "a step", "spec_decode/num_*", NULL},
    {"Draft model's loss", "nats", "draft_loss", NULL},
    {"Draft model's overlap with the policy", "%", "draft_overlap", NULL},
    {"Latency of a sample", "ms", "inference/latency_ms", NULL},
    {"Tokens per answer", "tokens",
     "completions/*_length eval/mean_length inference/generated_tokens", NULL},
    {"Answers cut off at the token limit", "%", "completions/clipped_ratio", NULL},
    {"KV cache of a sample", "MB", "inference/kv_memory_mb", NULL},
    {"Prompt tokens found in the cache", "%", "inference/cache_reuse_ratio", NULL},
    {"Samples that nothing was drafted for", "%", "inference/undrafted", NULL},
    {NULL, "", "inference/* latency_model/*", NULL},
    {.section = "Update"},
    {"Loss", "", "loss", NULL},
    {"KL divergence from the starting model", "nats", "kl", NULL},
    {"Entropy", "nats", "entropy", NULL},
    {"Tokens whose ratio was clipped", "%", "clip_ratio/* cispo_clip_ratio", NULL},
    {"Importance ratio", "", "importance_ratio/*", NULL},
    {"Tokens whose importance sampling weight was truncated", "%",
     "sampling/importance_sampling_ratio/cut", NULL},
    {"Importance sampling weight", "ratio", "sampling/importance_sampling_ratio/*", NULL},
    {"Gradient norm", "", "grad_norm draft_grad_norm", NULL},
    {"Learning rate", "", "learning_rate draft_learning_rate", NULL},
    {"Train-inference mismatch", "nats", "sampler_mismatch/*", NULL},
    {"Staleness of samples", "updates", "rollout/staleness_mean rollout/staleness_max", NULL},
    {"Groups by staleness in updates", "groups", "rollout/staleness_groups/*", NULL},
    {"Groups generated again", "%", "rollout/generated_again", NULL},
    {.section = "Time"},
    {"Time of a step", "s", "step_s rollout_s train_s", NULL},
    {"Time that each waited for the other", "s", "rollout/*_wait_s", NULL},
    {"Pause per publish", "ms", "publish/*_ms", NULL},
    {"Generated tokens", "tokens/s", "tokens_per_s", NULL},
    {.section = "Other"},
    {NULL, "", "*", NULL},
};

// Adds what one pattern of the spec names and no chart has yet; draws what is full.
static enum status take_pattern(struct metrics *m, const char *pattern, struct chart *c,
                                const char *title, struct bytes *to)
{
    enum status st = ST_OK;
    char key[128];
    const size_t len = strcspn(pattern, "=");
    snprintf(key, sizeof key, "%.*s", (int)len, pattern);
    for (int i = 0; i < m->n; i++) {
        struct series *s = &m->series[i];
        if (s->claimed || fnmatch(key, s->key, 0) != 0) continue;
        struct series *error = pattern[len] ? metrics_find(m, pattern + len + 1) : NULL;
        s->claimed = true;
        if (error) error->claimed = true;
        c->lines[c->n_lines++] = (struct chart_line){s, error};
        c->title = title ? title : s->key;
        if (title && c->n_lines < CHART_MAX_LINES) continue;
        CHECK(chart_draw(c, to)); // another of this title follows where there are more lines
        c->n_lines = 0;
    }
out:
    return st;
}

static enum status draw_spec(struct metrics *m, const struct chart_spec *spec, struct bytes *to)
{
    enum status st = ST_OK;
    struct chart c = {.unit = spec->unit, .first_step = m->first_step, .last_step = m->last_step};
    char patterns[256], *rest = NULL;
    snprintf(patterns, sizeof patterns, "%s", spec->keys);
    for (char *p = strtok_r(patterns, " ", &rest); p; p = strtok_r(NULL, " ", &rest))
        CHECK(take_pattern(m, p, &c, spec->title, to));
    if (c.n_lines) CHECK(chart_draw(&c, to));
out:
    return st;
}

static enum status draw_charts(struct metrics *m, struct bytes *to)
{
    enum status st = ST_OK;
    const size_t n = sizeof specs / sizeof *specs;
    struct bytes section = BYTES_INIT;
    for (size_t i = 0; i < n;) {
        const char *title = specs[i++].section;
        bytes_clear(&section);
        while (i < n && !specs[i].section) CHECK(draw_spec(m, &specs[i++], &section));
        CHECK(bytes_status(&section));
        if (!section.len) continue;
        bytes_printf(to, "<section><h2>%s</h2>\n<div class=\"charts\">\n", title);
        bytes_append(to, section.data, section.len);
        bytes_puts(to, "</div></section>\n");
    }
    st = bytes_status(to);
out:
    bytes_release(&section);
    return st;
}

// ---- summary ------------------------------------------------------------------------------------

enum better { BETTER_HIGH, BETTER_LOW, BETTER_NONE };
static const struct {
    const char *key;
    enum better better;
} summary[] = {
    {"reward", BETTER_HIGH},
    {"rewards/task", BETTER_HIGH},
    {"accuracy", BETTER_HIGH},
    {"eval/accuracy", BETTER_HIGH},
    {"eval/reward", BETTER_HIGH},
    {"spec_decode/acceptance_rate", BETTER_HIGH},
    {"spec_decode/acceptance_length", BETTER_HIGH},
    {"draft_loss", BETTER_LOW},
    {"inference/latency_ms", BETTER_LOW},
    {"completions/mean_length", BETTER_NONE},
    {"kl", BETTER_NONE},
    {"entropy", BETTER_NONE},
    {"grad_norm", BETTER_NONE},
    {"sampler_mismatch/mean", BETTER_LOW},
    {"sampler_mismatch/max", BETTER_LOW},
    {"publish/total_ms", BETTER_LOW},
    {"step_s", BETTER_LOW},
    {"tokens_per_s", BETTER_HIGH},
};

static double mean_of_last_tenth(const struct series *s)
{
    size_t n = (s->n + 9) / 10;
    double sum = 0;
    for (size_t i = s->n - n; i < s->n; i++) sum += s->points[i].value / (double)n;
    return sum;
}

static void put_cell(double value, struct bytes *to)
{
    char text[NUMBER_ROOM];
    bytes_printf(to, "<td>%s</td>", number_text(value, text));
}

static void draw_summary(const struct metrics *m, struct bytes *to)
{
    char text[NUMBER_ROOM];
    bytes_puts(to, "<table class=\"summary\"><thead><tr><th>metric</th><th>first</th><th>last</th>"
                   "<th>mean of the last tenth</th><th>best</th><th>at step</th></tr></thead>"
                   "<tbody>\n");
    for (size_t i = 0; i < sizeof summary / sizeof *summary; i++) {
        const struct series *s = metrics_find(m, summary[i].key);
        if (!s) continue;
        const struct point *best = &s->points[0];
        for (size_t k = 1; k < s->n; k++)
            if (summary[i].better == BETTER_HIGH ? s->points[k].value > best->value
                                                 : s->points[k].value < best->value)
                best = &s->points[k];
        bytes_puts(to, "<tr><th>");
        html_puts(to, s->key);
        bytes_puts(to, "</th>");
        put_cell(s->points[0].value, to);
        put_cell(s->points[s->n - 1].value, to);
        put_cell(mean_of_last_tenth(s), to);
        if (summary[i].better == BETTER_NONE) {
            bytes_puts(to, "<td></td><td></td>");
        } else {
            put_cell(best->value, to);
            bytes_printf(to, "<td>%s</td>", number_text((double)best->step, text));
        }
        bytes_puts(to, "</tr>\n");
    }
    bytes_puts(to, "</tbody></table>\n");
}

// ---- head ---------------------------------------------------------------------------------------

// Light and dark by the reader's setting; s0 to s7 are the lines' colours.
static const char style[] =
    ":root{color-scheme:light dark;--bg:#fff;--fg:#1b1f24;--dim:#5b6570;--edge:#d5dae0;"
    "--box:#f5f7f9;--mark:#cdeccf;--hover:rgba(0,0,0,.07);--s0:#1f6feb;--s1:#d9620a;--s2:#1a7f45;"
    "--s3:#c3262f;--s4:#7d3bd1;--s5:#0f7f92;--s6:#b0307c;--s7:#7a6a00}\n"
    "@media(prefers-color-scheme:dark){:root{--bg:#14171b;--fg:#e4e8ec;--dim:#97a1ac;"
    "--edge:#363d45;--box:#1d2227;--mark:#1f5130;--hover:rgba(255,255,255,.1);--s0:#6cb0ff;"
    "--s1:#ffa657;--s2:#5fd38a;--s3:#ff8080;--s4:#c79bff;--s5:#55d0e0;--s6:#ff8ecb;--s7:#d9c84a}}\n"
    "body{margin:0 auto;padding:1rem 1.25rem 3rem;max-width:1240px;background:var(--bg);"
    "color:var(--fg);font:15px/1.45 system-ui,sans-serif}\n"
    "h1{font-size:1.5rem;margin:.5rem 0;overflow-wrap:anywhere}h2{font-size:1.15rem;"
    "margin:2rem 0 .75rem;border-bottom:1px solid var(--edge)}h3{font-size:1rem;margin:1.5rem 0 "
    ".5rem}h3 span,figcaption span,.dim{color:var(--dim);font-weight:normal}\n"
    ".charts{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,480px),1fr));"
    "gap:1rem}figure{margin:0;padding:.6rem .75rem;border:1px solid var(--edge);"
    "border-radius:6px;min-width:0}figcaption{font-weight:600;overflow-wrap:anywhere}\n"
    "svg{display:block;width:100%;height:auto}.axis path{stroke:var(--dim);fill:none}.axis "
    ".grid{stroke:var(--edge)}.axis text{fill:var(--dim);font-size:11px}\n"
    ".line .curve{fill:none;stroke:var(--c);stroke-width:1.6;stroke-linejoin:round}.line "
    ".band{fill:var(--c);opacity:.2}.line circle{fill:var(--c)}.errors path{fill:none;"
    "stroke:var(--c)}.line.dashed .curve{stroke-dasharray:5 3}.hover rect{fill:transparent}.hover "
    "rect:hover{fill:var(--hover)}\n"
    ".s0{--c:var(--s0)}.s1{--c:var(--s1)}.s2{--c:var(--s2)}.s3{--c:var(--s3)}.s4{--c:var(--s4)}"
    ".s5{--c:var(--s5)}.s6{--c:var(--s6)}.s7{--c:var(--s7)}\n"
    ".legend{list-style:none;margin:.25rem 0 0;padding:0;font-size:12.5px;color:var(--dim);"
    "display:flex;flex-wrap:wrap;gap:.1rem 1rem}.legend li{overflow-wrap:anywhere}.legend "
    "i{display:inline-block;width:1.1em;height:0;border-top:3px solid var(--c);"
    "vertical-align:middle;margin-right:.4em}.legend i.dashed{border-top-style:dashed}.legend "
    "b{color:var(--fg);font-weight:600}\n"
    ".wide{overflow-x:auto;margin-top:1rem}table{border-collapse:collapse;font-variant-numeric:"
    "tabular-nums}"
    "th,td{padding:.2rem .8rem .2rem 0;text-align:right;border-bottom:1px solid var(--edge);"
    "vertical-align:top}thead th{white-space:nowrap}tbody th,thead "
    "th:first-child{text-align:left;font-weight:normal}.config "
    "td{text-align:left;overflow-wrap:anywhere}\n"
    "pre{background:var(--box);border-radius:4px;padding:.5rem .7rem;margin:.3rem 0;"
    "overflow-x:auto;font:13px/1.4 ui-monospace,monospace;unicode-bidi:isolate}.sample "
    "pre,.prompt{white-space:pre-wrap;overflow-wrap:anywhere}.prompt b{color:var(--dim);"
    "font-weight:normal}.sample{border-left:3px solid var(--edge);padding-left:.75rem;"
    "margin:.8rem 0}\n"
    "dl{display:flex;flex-wrap:wrap;gap:.1rem 1.1rem;margin:0;font-size:13px}dl div{display:flex;"
    "gap:.4rem;min-width:0}dt{color:var(--dim)}dd{margin:0;font-weight:600;overflow-wrap:anywhere}"
    "code{white-space:pre-wrap;overflow-wrap:anywhere}mark{background:var(--mark);color:inherit;"
    "border-bottom:2px solid var(--s2)}summary{cursor:pointer}.clusters pre{line-height:1.15}\n"
    "@media(max-width:600px){.axis text{font-size:15px}}\n";

static void draw_head(const struct run_folder *run, struct bytes *to)
{
    bytes_puts(
        to, "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"/>\n"
            "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; "
            "style-src 'unsafe-inline'\"/>\n"
            "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\"/>\n<title>");
    html_puts(to, run->name);
    bytes_puts(to, "</title>\n<style>\n");
    bytes_puts(to, style);
    bytes_puts(to, "</style></head>\n<body>\n<h1>");
    html_puts(to, run->name);
    bytes_puts(to, "</h1>\n");
}

// Text of an option: "4", "gsm8k"; empty for null. Freed by the caller.
static char *option_text(const json_t *value)
{
    if (json_is_null(value)) return strdup("");
    if (json_is_string(value)) return strdup(json_string_value(value));
    return json_dumps(value, JSON_ENCODE_ANY | JSON_REAL_PRECISION(9));
}

// What a reader asks first.
static const char *const main_options[] = {
    "data",
    "reward",
    "curriculum",
    "loss_type",
    "learning_rate",
    "prompts_per_step",
    "num_generations",
    "max_completion_length",
    "temperature",
    "beta",
    "seed",
};

static void draw_main_options(const json_t *config, struct bytes *to)
{
    bytes_puts(to, "<dl>");
    for (size_t i = 0; i < sizeof main_options / sizeof *main_options; i++) {
        const json_t *value = json_object_get(config, main_options[i]);
        char *text = value ? option_text(value) : NULL;
        if (text && text[0]) html_fact(to, main_options[i], text);
        free(text);
    }
    bytes_puts(to, "</dl>\n");
}

static void draw_config(const json_t *config, struct bytes *to)
{
    const char *key;
    const json_t *value;
    if (!config) return;
    draw_main_options(config, to);
    bytes_puts(to,
               "<details><summary>All options of the run</summary>\n<table class=\"config\"><tbody>"
               "\n");
    json_object_foreach ((json_t *)config, key, value) {
        char *text = option_text(value);
        bytes_puts(to, "<tr><th>");
        html_puts(to, key);
        bytes_puts(to, "</th><td>");
        html_puts(to, text ? text : "");
        bytes_puts(to, "</td></tr>\n");
        free(text);
    }
    bytes_puts(to, "</tbody></table></details>\n");
}

static double sum_of(const struct metrics *m, const char *key)
{
    const struct series *s = metrics_find(m, key);
    double sum = 0;
    for (size_t i = 0; s && i < s->n; i++) sum += s->points[i].value;
    return sum;
}

static void draw_facts(const struct run_folder *run, struct bytes *to)
{
    const struct metrics *m = &run->metrics;
    char text[NUMBER_ROOM], when[64];
    time_t written = (time_t)run->written_s;
    struct tm tm;
    bool reduced = false;
    strftime(when, sizeof when, "%Y-%m-%d %H:%M:%S %Z", localtime_r(&written, &tm));
    bytes_printf(to, "<p class=\"dim\">");
    if (m->n_lines) {
        bytes_printf(to, "Steps %s", number_text((double)m->first_step, text));
        bytes_printf(to, " to %s", number_text((double)m->last_step, text));
        if (metrics_find(m, "step_s"))
            bytes_printf(to, ", %s s of steps", number_text(sum_of(m, "step_s"), text));
    } else {
        bytes_puts(to, "No step has been done yet");
    }
    bytes_printf(to, "; written %s.", when);
    if (m->n_bad)
        bytes_printf(to, " %s lines of metrics.jsonl could not be read and are left out.",
                     number_text((double)m->n_bad, text));
    for (int i = 0; i < m->n; i++) reduced |= m->series[i].n > CHART_POINTS;
    if (reduced)
        bytes_printf(
            to,
            " Curves are drawn with at most %d points: the mean of a bucket of neighbouring "
            "steps, over a band from its least to its largest value.",
            CHART_POINTS);
    bytes_puts(to, "</p>\n");
}

// ---- cluster reports ----------------------------------------------------------------------------

// Of many, the first and the latest.
static enum status draw_cluster_reports(const struct run_folder *run, struct bytes *to)
{
    enum status st = ST_OK;
    const struct file_list *list = &run->cluster_reports;
    struct bytes text = BYTES_INIT;
    int left_out = list->n > REPORTS_SHOWN ? list->n - REPORTS_SHOWN : 0;
    if (!list->n) return ST_OK;
    bytes_puts(to, "<section class=\"clusters\"><h2>Cluster reports</h2>\n");
    for (int i = 0; i < list->n; i++) {
        const struct numbered_file *file = &list->files[i];
        if (i > 0 && i <= left_out) continue;
        CHECK(file_read(file->path, REPORT_MAX, &text));
        bytes_printf(to, "<details%s><summary>Epoch %" PRId64 "</summary><pre>",
                     i == list->n - 1 ? " open=\"open\"" : "", file->number);
        html_text(to, bytes_text(&text), text.len);
        bytes_puts(to, "</pre></details>\n");
        if (i == 0 && left_out) bytes_printf(to, "<p class=\"dim\">%d more</p>\n", left_out);
    }
    bytes_puts(to, "</section>\n");
    st = bytes_status(to);
out:
    bytes_release(&text);
    return st;
}

enum status page_draw(struct run_folder *run, struct bytes *to)
{
    enum status st;
    draw_head(run, to);
    draw_facts(run, to);
    draw_config(run->config, to);
    if (run->metrics.n) {
        bytes_puts(to, "<div class=\"wide\">\n");
        draw_summary(&run->metrics, to);
        bytes_puts(to, "</div>\n");
    }
    CHECK(draw_charts(&run->metrics, to));
    CHECK(draw_cluster_reports(run, to));
    CHECK(rollouts_draw(run, to));
    bytes_puts(to, "</body></html>\n");
    st = bytes_status(to);
out:
    return st;
}
