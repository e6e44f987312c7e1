/* time.js: where the time of steps went: of one run the spans of each step upon each other, of
 * several runs a bar each, of the mean step in the range. */

/* In the order in which a step goes through them; run_metrics.c may know more. */
const SPANS = ["wait", "rollout", "score", "pack", "forward", "backward", "optimizer", "publish",
               "log", "eval", "checkpoint"];

class TimeChart extends Figure {
    constructor(keys) {
        super("Where a step's time went", "s", keys);
        this.linearOnly = true;
        this.names = keys.map(key => key.slice("spans/".length, -"_s".length));
        this.names.sort((a, b) => (SPANS.indexOf(a) + 99) % 99 - (SPANS.indexOf(b) + 99) % 99);
    }
    get one() {
        return view.runs.length === 1 ? view.runs[0] : null;
    }

    /* Mean seconds of each span in the lines of each column of pixels; [{x, seconds: [...]}]. */
    columns(run) {
        const what = `${view.x} ${this.xRange} ${this.width} ${run.number} ${run.generation} ${run.lines}`;
        if (this.kept && this.kept.what === what) return this.kept.columns;
        const xs = run.x(view.x), found = new Map();
        if (!xs) return [];
        this.names.forEach((name, k) => {
            const series = run.series.get(`spans/${name}_s`);
            if (!series) return;
            const lines = series.lines.all, values = series.values.all;
            for (let i = 0; i < lines.length; i++) {
                const x = xs[lines[i]];
                if (x < this.xRange[0] || x > this.xRange[1]) continue;
                const at = Math.round(this.atX(x));
                if (!found.has(at))
                    found.set(at, {x, counts: this.names.map(() => 0), sums: this.names.map(() => 0)});
                found.get(at).sums[k] += values[i];
                found.get(at).counts[k]++;
            }
        });
        const columns = [...found.values()].sort((a, b) => a.x - b.x).map(({x, sums, counts}) =>
            ({x, seconds: sums.map((sum, k) => counts[k] ? sum / counts[k] : 0)}));
        this.kept = {what, columns};
        return columns;
    }
    /* Mean seconds of each span over the range. */
    means(run) {
        const xs = run.x(view.x);
        return this.names.map(name => {
            const series = xs && run.series.get(`spans/${name}_s`);
            if (!series) return 0;
            const lines = series.lines.all, values = series.values.all;
            let sum = 0, n = 0;
            for (let i = 0; i < lines.length; i++)
                if (xs[lines[i]] >= this.xRange[0] && xs[lines[i]] <= this.xRange[1]) {
                    sum += values[i];
                    n++;
                }
            return n ? sum / n : 0;
        });
    }
    extent() {
        const sum = seconds => seconds.reduce((a, b) => a + b, 0);
        const sums = this.one ? this.columns(this.one).map(c => sum(c.seconds))
                              : view.runs.map(run => sum(this.means(run)));
        const most = sums.reduce((a, b) => Math.max(a, b), 0);
        return most > 0 ? [0, most] : null;
    }
    draw(ctx) {
        if (this.one) this.stack(ctx, this.columns(this.one));
        else this.bars(ctx);
    }
    color(ctx, k) {
        ctx.fillStyle = colorOf(k);
        ctx.globalAlpha = k < N_COLORS ? 0.85 : 0.45;
    }
    stack(ctx, columns) {
        const below = columns.map(() => 0);
        const narrow = columns.length < 2;
        this.names.forEach((_, k) => {
            this.color(ctx, k);
            ctx.beginPath();
            columns.forEach(({x}, i) => ctx.lineTo(this.atX(x), this.atY(below[i])));
            if (narrow) columns.forEach(({x}) => ctx.lineTo(this.atX(x) + 8, this.atY(below[0])));
            const above = below.map((y, i) => y + columns[i].seconds[k]);
            if (narrow) columns.forEach(({x}) => ctx.lineTo(this.atX(x) + 8, this.atY(above[0])));
            for (let i = columns.length - 1; i >= 0; i--)
                ctx.lineTo(this.atX(columns[i].x), this.atY(above[i]));
            ctx.fill();
            above.forEach((y, i) => { below[i] = y; });
        });
        ctx.globalAlpha = 1;
    }
    bars(ctx) {
        const each = (this.right - this.left) / view.runs.length;
        view.runs.forEach((run, r) => {
            const left = this.left + r * each + 0.15 * each;
            let below = 0;
            this.means(run).forEach((seconds, k) => {
                this.color(ctx, k);
                ctx.fillRect(left, this.atY(below + seconds), 0.7 * each,
                             this.atY(below) - this.atY(below + seconds));
                below += seconds;
            });
            ctx.globalAlpha = 1;
            ctx.fillStyle = colors.fg;
            ctx.textAlign = "center";
            ctx.fillText(run.name, left + 0.35 * each, Math.max(this.atY(below) - 4, 10), each);
        });
    }
    xTicks() {
        const [lo, hi] = this.xRange;
        return this.one ? super.xTicks() : [{x: (lo + hi) / 2, text: "mean of a step"}]; // a bar has no x
    }
    rows(x) {
        let seconds;
        if (this.one) {
            const columns = this.columns(this.one);
            let i = lowerBound(columns.map(c => c.x), x);
            if (i > 0 && (i === columns.length || x - columns[i - 1].x < columns[i].x - x)) i--;
            seconds = columns[i].seconds;
        } else {
            const r = Math.floor((this.atX(x) - this.left) / (this.right - this.left) * view.runs.length);
            seconds = this.means(view.runs[Math.min(r, view.runs.length - 1)]);
        }
        const sum = seconds.reduce((a, b) => a + b, 0);
        return this.names.map((name, k) => ({
            color: colorOf(k), name,
            text: `${numberText(seconds[k])} s, ${numberText(100 * seconds[k] / (sum || 1))}%`,
        })).filter((_, k) => seconds[k] > 0);
    }
    putLegend() {
        const means = this.xRange && this.one ? this.means(this.one) : null;
        this.legend.replaceChildren(...this.names.map((name, k) => {
            const swatch = make("i", {className: "swatch"});
            swatch.style.borderTopWidth = "8px";
            swatch.style.borderColor = colorOf(k);
            swatch.style.opacity = k < N_COLORS ? 0.85 : 0.45;
            return make("li", {}, swatch, name, " ",
                        make("b", {}, means ? `${numberText(means[k])} s` : ""));
        }));
    }
}
