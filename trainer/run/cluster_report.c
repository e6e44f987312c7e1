/* cluster_report.c: the report of an epoch's buckets. Pure functions; the trainer's thread.
 *
 * Lines are collected first and put into a frame as wide as the longest of them: rewards may be of
 * any size. Every character used is one column wide, so columns are counted as characters.
 */
// SPDX-License-Identifier: Apache-2.0
#include "trainer/run/runlog.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#define BAR 12 // columns of a histogram's bar

static const char *mark(double ratio, double good, double fair)
{
    return ratio <= good ? "✓" : ratio <= fair ? "~" : "✗";
}

// The bucket's std over that of all rewards.
static double spread(const struct buckets *b, int bucket)
{
    return b->std > 0 ? b->bucket[bucket].std / b->std : 0;
}

static double share(const struct buckets *b, int bucket)
{
    return (double)b->bucket[bucket].n / b->n_total;
}

// ---- the frame ----------------------------------------------------------------------------------

static void repeat(struct bytes *b, const char *what, int n)
{
    for (int i = 0; i < n; i++) bytes_puts(b, what);
}

static void rule(struct bytes *b, const char *left, const char *line, const char *right, int width)
{
    bytes_puts(b, left);
    repeat(b, line, width + 2);
    bytes_puts(b, right);
    bytes_puts(b, "\n");
}

// Lines of `text` in a frame; an empty line is a rule across it.
static void frame(const struct bytes *text, struct bytes *ret)
{
    const char *start = bytes_text(text), *end;
    int width = 0;
    for (const char *line = start; (end = strchr(line, '\n')); line = end + 1) {
        const int n = (int)utf8_count(line, (size_t)(end - line));
        if (n > width) width = n;
    }
    rule(ret, "╔", "═", "╗", width);
    for (const char *line = start; (end = strchr(line, '\n')); line = end + 1) {
        size_t len = (size_t)(end - line);
        if (len == 0) {
            rule(ret, "╟", "─", "╢", width);
            continue;
        }
        bytes_puts(ret, "║ ");
        bytes_append(ret, line, len);
        repeat(ret, " ", width - (int)utf8_count(line, len));
        bytes_puts(ret, " ║\n");
    }
    rule(ret, "╚", "═", "╝", width);
}

// ---- text ---------------------------------------------------------------------------------------

static void put_bucket(const struct cluster_report *r, int k, struct bytes *ret)
{
    const struct buckets *b = r->buckets;
    const struct bucket *x = &b->bucket[k];
    char range[64];
    const double balance = share(b, k) * b->n, off = balance < 1 ? 1 / balance : balance;
    int filled = (int)(share(b, k) * BAR + 0.5);
    if (filled == 0) filled = 1; // no bucket is empty
    snprintf(range, sizeof range, "[%.4g, %.4g%c", x->low, x->high, k + 1 < b->n ? ')' : ']');
    bytes_printf(ret, "%6d  %-18s %7d %6.1f%% %8.4g  ", k + 1, range, x->n, 100 * share(b, k),
                 r->rollouts[k]);
    repeat(ret, "█", filled);
    repeat(ret, "░", BAR - filled);
    bytes_printf(ret, "  %8.4g %s  x%-5.2f %s\n", x->std, mark(spread(b, k), 0.5, 1), balance,
                 mark(off, 2, 4));
}

void cluster_report_text(const struct cluster_report *r, struct bytes *ret)
{
    const struct buckets *b = r->buckets;
    struct bytes text = BYTES_INIT;
    bytes_printf(&text, "Cluster report of epoch %" PRId64 " (--curriculum %s)\n\n", r->epoch,
                 r->mode);
    bytes_printf(&text, "rewards of %d examples: mean %.4g  std %.4g  min %.4g  max %.4g\n",
                 b->n_total, b->mean, b->std, b->min, b->max);
    for (int k = 0; k + 1 < b->n; k++)
        bytes_printf(&text, "boundary %-2d at %.4g: %s\n", k + 1, b->boundary[k].at,
                     boundary_origin_names[b->boundary[k].origin]);
    if (b->n == 1) bytes_puts(&text, "no boundary\n");
    if (b->n > 1 && b->contrast < 1)
        bytes_printf(&text,
                     "rewards hardly differ: their range counts as %.2g of a full one, and the "
                     "numbers of rollouts come closer\n",
                     b->contrast);
    bytes_printf(&text, "\n%6s  %-18s %7s %7s %8s  %-*s  %10s  %-8s\n\n", "bucket", "range",
                 "count", "share", "rollouts", BAR, "histogram", "spread", "balance");
    for (int k = 0; k < b->n; k++) put_bucket(r, k, &text);
    bytes_puts(&text, "\nrollouts: of each prompt in the next epoch\n"
                      "spread: std in the bucket; ✓ up to 1/2 of that of all, ~ up to all of it\n"
                      "balance: count over an even share; ✓ within 2, ~ within 4 times\n");
    if (text.failed)
        ret->failed = true;
    else
        frame(&text, ret);
    bytes_release(&text);
}

void cluster_report_line(const struct cluster_report *r, struct bytes *ret)
{
    const struct buckets *b = r->buckets;
    bytes_printf(ret, "epoch %" PRId64 ": reward %.4g +- %.4g over %d examples; %d bucket%s",
                 r->epoch, b->mean, b->std, b->n_total, b->n, b->n == 1 ? "" : "s");
    for (int k = 0; k < b->n; k++) {
        const struct bucket *x = &b->bucket[k];
        bytes_printf(ret, "%s %d of mean %.4g x %.4g rollouts", k ? "," : ":", x->n, x->mean,
                     r->rollouts[k]);
        if (k + 1 < b->n)
            bytes_printf(ret, " | %s %.4g |", boundary_origin_names[b->boundary[k].origin],
                         b->boundary[k].at);
    }
}

// ---- numbers ------------------------------------------------------------------------------------

void cluster_report_metrics(const struct cluster_report *r, json_t *metrics)
{
    const struct buckets *b = r->buckets;
    int valleys = 0;
    metrics_put(metrics, "curriculum/epoch", (double)r->epoch);
    metrics_put(metrics, "curriculum/reward_mean", b->mean);
    metrics_put(metrics, "curriculum/reward_std", b->std);
    metrics_put(metrics, "curriculum/reward_min", b->min);
    metrics_put(metrics, "curriculum/reward_max", b->max);
    metrics_put(metrics, "curriculum/contrast", b->contrast);
    metrics_put(metrics, "curriculum/buckets", b->n);
    for (int k = 0; k + 1 < b->n; k++) {
        metrics_putf(metrics, b->boundary[k].at, "curriculum/boundary_%d", k + 1);
        valleys += b->boundary[k].origin == BOUNDARY_VALLEY;
    }
    metrics_put(metrics, "curriculum/valleys", valleys);
    for (int k = 0; k < b->n; k++) {
        const struct bucket *x = &b->bucket[k];
        metrics_putf(metrics, x->n, "curriculum/bucket_%d/count", k + 1);
        metrics_putf(metrics, share(b, k), "curriculum/bucket_%d/share", k + 1);
        metrics_putf(metrics, x->mean, "curriculum/bucket_%d/mean", k + 1);
        metrics_putf(metrics, x->std, "curriculum/bucket_%d/std", k + 1);
        metrics_putf(metrics, r->rollouts[k], "curriculum/bucket_%d/rollouts", k + 1);
        metrics_putf(metrics, spread(b, k), "curriculum/bucket_%d/spread", k + 1);
        metrics_putf(metrics, share(b, k) * b->n, "curriculum/bucket_%d/balance", k + 1);
    }
}
