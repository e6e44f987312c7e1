/* chart.c: line charts as inline SVG. Stateless.
 *
 * A line of more than CHART_POINTS points is drawn as the means of buckets over a band from their
 * least to their largest value, so a page stays small whatever the run's length and no spike is
 * lost. Colours are classes, so that the page's style sheet can follow the reader's light or dark
 * mode. Tooltips are <title>s of invisible columns: no script is needed.
 */
#include "tools/report/chart.h"
#include "tools/report/axis.h"
#include "tools/report/html.h"

#include <float.h>
#include <math.h>

// In the SVG's own units, which are about a CSS pixel.
#define WIDTH      560
#define HEIGHT     230
#define LEFT       58
#define RIGHT      20
#define TOP        10
#define BOTTOM     34
#define N_COLORS   8
#define MAX_HOVERS 120
#define DOTS_BELOW 40 // points a line, above which they are not marked

struct plot {
    const struct chart *chart;
    struct curve curves[CHART_MAX_LINES];
    struct axis x, y;
    double x_lo, x_hi; // steps
    double scale;      // of values
    struct bytes *to;
};

static double at_x(const struct plot *p, double step)
{
    double range = p->x_hi - p->x_lo;
    return LEFT + (range > 0 ? (step - p->x_lo) / range : 0.5) * (WIDTH - LEFT - RIGHT);
}

static double at_y(const struct plot *p, double value)
{
    double share = (value * p->scale - p->y.lo) / (p->y.hi - p->y.lo);
    return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM);
}

static void fit_axes(struct plot *p)
{
    const struct chart *c = p->chart;
    double lo = DBL_MAX, hi = -DBL_MAX;
    for (int i = 0; i < c->n_lines; i++)
        for (int k = 0; k < p->curves[i].n; k++) {
            const struct curve_point *q = &p->curves[i].points[k];
            double error = isfinite(q->error) ? q->error : 0;
            lo = fmin(lo, fmin(q->min, q->mean - error) * p->scale);
            hi = fmax(hi, fmax(q->max, q->mean + error) * p->scale);
        }
    if (lo > 0 && lo < 0.4 * hi) lo = 0; // so near that the reader should see it
    if (hi < 0 && hi > 0.4 * lo) hi = 0;
    if (p->scale == 100 && lo == hi && lo >= 0 && hi <= 100) lo = 0, hi = 100;
    p->y = axis_fit(lo, hi, 5, false);
    p->x_lo = (double)c->first_step;
    p->x_hi = (double)c->last_step;
    p->x = axis_fit(p->x_lo, p->x_hi, 6, true);
}

static void draw_axes(const struct plot *p)
{
    char text[TICK_ROOM];
    bytes_puts(p->to, "<g class=\"axis\">");
    for (int i = 0; i < axis_ticks(&p->y); i++) {
        double y = at_y(p, axis_tick(&p->y, i) / p->scale);
        bytes_printf(p->to,
                     "<path class=\"grid\" d=\"M%d %.1fH%d\"/>"
                     "<text x=\"%d\" y=\"%.1f\" text-anchor=\"end\">%s</text>",
                     LEFT, y, WIDTH - RIGHT, LEFT - 6, y + 3.5, axis_label(&p->y, i, text));
    }
    for (int i = 0; i < axis_ticks(&p->x); i++) {
        double step = axis_tick(&p->x, i), x = at_x(p, step);
        if (step < p->x_lo || step > p->x_hi) continue;
        bytes_printf(p->to,
                     "<path d=\"M%.1f %dv4\"/>"
                     "<text x=\"%.1f\" y=\"%d\" text-anchor=\"middle\">%s</text>",
                     x, HEIGHT - BOTTOM, x, HEIGHT - BOTTOM + 16, axis_label(&p->x, i, text));
    }
    bytes_printf(p->to,
                 "<path d=\"M%d %dV%dH%d\"/>"
                 "<text x=\"%d\" y=\"%d\" text-anchor=\"end\">step</text></g>\n",
                 LEFT, TOP, HEIGHT - BOTTOM, WIDTH - RIGHT, WIDTH - RIGHT, HEIGHT - 4);
}

static void draw_band(const struct plot *p, const struct curve *c)
{
    bytes_puts(p->to, "<path class=\"band\" d=\"");
    for (int k = 0; k < c->n; k++)
        bytes_printf(p->to, "%s%.1f %.1f", k ? "L" : "M", at_x(p, c->points[k].step),
                     at_y(p, c->points[k].max));
    for (int k = c->n - 1; k >= 0; k--)
        bytes_printf(p->to, "L%.1f %.1f", at_x(p, c->points[k].step), at_y(p, c->points[k].min));
    bytes_puts(p->to, "Z\"/>");
}

static void draw_error_bars(const struct plot *p, const struct curve *c, const char *key)
{
    bytes_puts(p->to, "<g class=\"errors\" data-metric=\"");
    html_puts(p->to, key);
    bytes_puts(p->to, "\"><path d=\"");
    for (int k = 0; k < c->n; k++) {
        const struct curve_point *q = &c->points[k];
        if (!isfinite(q->error)) continue;
        double x = at_x(p, q->step);
        double top = at_y(p, q->mean + q->error), bottom = at_y(p, q->mean - q->error);
        bytes_printf(p->to, "M%.1f %.1fh6m-3 0V%.1fm-3 0h6", x - 3, top, bottom);
    }
    bytes_puts(p->to, "\"/></g>");
}

static void draw_line(const struct plot *p, int i)
{
    const struct chart_line *line = &p->chart->lines[i];
    const struct curve *c = &p->curves[i];
    bytes_printf(p->to, "<g class=\"line s%d%s\" data-metric=\"", i % N_COLORS,
                 i >= N_COLORS ? " dashed" : "");
    html_puts(p->to, line->series->key);
    bytes_puts(p->to, "\">");
    if (c->reduced) draw_band(p, c);
    bytes_puts(p->to, "<path class=\"curve\" d=\"");
    for (int k = 0; k < c->n; k++)
        bytes_printf(p->to, "%s%.1f %.1f", k ? "L" : "M", at_x(p, c->points[k].step),
                     at_y(p, c->points[k].mean));
    bytes_puts(p->to, "\"/>");
    for (int k = 0; c->n < DOTS_BELOW && k < c->n; k++)
        bytes_printf(p->to, "<circle cx=\"%.1f\" cy=\"%.1f\" r=\"2.2\"/>",
                     at_x(p, c->points[k].step), at_y(p, c->points[k].mean));
    if (line->error) draw_error_bars(p, c, line->error->key);
    bytes_puts(p->to, "</g>\n");
}

// ---- tooltips -----------------------------------------------------------------------------------

static void put_value(const struct plot *p, double value)
{
    char text[NUMBER_ROOM];
    bytes_printf(p->to, "%s%s", number_text(value * p->scale, text), p->scale == 100 ? "%" : "");
}

// The values of a line's point that is nearest to `step`, if it lies in [from, to).
static void put_nearest(const struct plot *p, int i, double from, double to, double step)
{
    const struct curve *c = &p->curves[i];
    const struct curve_point *best = NULL;
    int lo = 0, hi = c->n; // first point not before `from`
    while (lo < hi) {
        int middle = (lo + hi) / 2;
        if (c->points[middle].step < from)
            lo = middle + 1;
        else
            hi = middle;
    }
    for (; lo < c->n && c->points[lo].step < to; lo++)
        if (!best || fabs(c->points[lo].step - step) < fabs(best->step - step))
            best = &c->points[lo];
    if (!best) return;
    bytes_puts(p->to, "\n");
    html_puts(p->to, p->chart->lines[i].series->key);
    bytes_puts(p->to, " ");
    put_value(p, best->mean);
    if (isfinite(best->error)) {
        bytes_puts(p->to, " \xc2\xb1 ");
        put_value(p, best->error);
    }
    if (c->reduced) {
        bytes_puts(p->to, " (");
        put_value(p, best->min);
        bytes_puts(p->to, " to ");
        put_value(p, best->max);
        bytes_puts(p->to, ")");
    }
}

// Columns around points of the line that has most, each up to half way to the next.
static void draw_hovers(const struct plot *p)
{
    int longest = 0;
    char text[NUMBER_ROOM];
    for (int i = 1; i < p->chart->n_lines; i++)
        if (p->curves[i].n > p->curves[longest].n) longest = i;
    const struct curve *c = &p->curves[longest];
    int every = (c->n + MAX_HOVERS - 1) / MAX_HOVERS;
    double from = -DBL_MAX;
    bytes_puts(p->to, "<g class=\"hover\">");
    for (int k = 0; k < c->n; k += every) {
        double step = c->points[k].step, to = DBL_MAX;
        if (k + every < c->n) to = (step + c->points[k + every].step) / 2;
        double left = k ? at_x(p, from) : LEFT;
        double right = to < DBL_MAX ? at_x(p, to) : WIDTH - RIGHT;
        bytes_printf(p->to, "<rect x=\"%.1f\" y=\"%d\" width=\"%.1f\" height=\"%d\"><title>step %s",
                     left, TOP, fmax(right - left, 0.1), HEIGHT - TOP - BOTTOM,
                     number_text(step, text));
        for (int i = 0; i < p->chart->n_lines; i++) put_nearest(p, i, from, to, step);
        bytes_puts(p->to, "</title></rect>");
        from = to;
    }
    bytes_puts(p->to, "</g>\n");
}

// ---- the figure ---------------------------------------------------------------------------------

static void draw_legend(const struct plot *p)
{
    bytes_puts(p->to, "<ul class=\"legend\">");
    for (int i = 0; i < p->chart->n_lines; i++) {
        const struct chart_line *line = &p->chart->lines[i];
        bytes_printf(p->to, "<li><i class=\"s%d%s\"></i>", i % N_COLORS,
                     i >= N_COLORS ? " dashed" : "");
        html_puts(p->to, line->series->key);
        if (line->error) {
            bytes_puts(p->to, " \xc2\xb1 ");
            html_puts(p->to, line->error->key);
        }
        bytes_puts(p->to, " <b>");
        put_value(p, line->series->points[line->series->n - 1].value);
        bytes_puts(p->to, "</b></li>");
    }
    bytes_puts(p->to, "</ul>");
}

enum status chart_draw(const struct chart *chart, struct bytes *to)
{
    enum status st = ST_OK;
    struct plot p = {.chart = chart, .scale = chart->unit[0] == '%' ? 100 : 1, .to = to};
    for (int i = 0; i < chart->n_lines; i++)
        CHECK(curve_new(chart->lines[i].series, chart->lines[i].error, CHART_POINTS, &p.curves[i]));
    fit_axes(&p);
    bytes_puts(to, "<figure><figcaption>");
    html_puts(to, chart->title);
    if (chart->unit[0]) {
        bytes_puts(to, " <span>");
        html_puts(to, chart->unit);
        bytes_puts(to, "</span>");
    }
    bytes_printf(to, "</figcaption>\n<svg viewBox=\"0 0 %d %d\" role=\"img\" aria-label=\"", WIDTH,
                 HEIGHT);
    html_puts(to, chart->title);
    bytes_puts(to, "\">\n");
    draw_axes(&p);
    for (int i = 0; i < chart->n_lines; i++) draw_line(&p, i);
    draw_hovers(&p);
    bytes_puts(to, "</svg>\n");
    draw_legend(&p);
    bytes_puts(to, "</figure>\n");
    st = bytes_status(to);
out:
    for (int i = 0; i < chart->n_lines; i++) curve_release(&p.curves[i]);
    return st;
}
