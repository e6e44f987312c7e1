/* chart.js: a figure with a canvas: axes, lines of several runs, zoom and the values under the
 * pointer. What is drawn of a line is at most its least and its largest value in each column of
 * pixels, so that a chart costs the same however long the run is, and no spike is lost. */

/* What the reader chose, for all charts. */
const view = {
    x: "step",
    smooth: 0,     // weight of the exponential moving average; 0: none
    log: false,
    range: null,   // [from, to] of x; null: all
    runs: [],      // those that are shown
    zoom() {},     // (range): page.js
};

const MARGIN = {left: 54, right: 14, top: 10, bottom: 24};
const N_COLORS = 8;
const DASHES = [[], [7, 3], [2, 3], [9, 3, 2, 3]], BORDERS = ["solid", "dashed", "dotted", "double"];
const DOTS_BELOW = 40; // points a line, above which they are not marked
const CHANGES_WITHIN = 3; // lines of a run, before which no value is called constant

const colors = {};
function readColors() {
    const style = getComputedStyle(document.documentElement);
    for (const name of ["bg", "fg", "dim", "edge", ...Array.from({length: N_COLORS}, (_, i) => `s${i}`)])
        colors[name] = style.getPropertyValue(`--${name}`).trim();
}
const colorOf = i => colors[`s${i % N_COLORS}`];

/* The first place in ascending xs whose value is not below x. */
function lowerBound(xs, x) {
    let lo = 0, hi = xs.length;
    while (lo < hi) {
        const middle = (lo + hi) >> 1;
        if (xs[middle] < x) lo = middle + 1;
        else hi = middle;
    }
    return lo;
}

/* ---- drawing when it is seen, a few charts a frame ---- */

const FRAME_MS = 12;
const waiting = new Set();
const sight = new IntersectionObserver(entries => {
    for (const {target, isIntersecting} of entries) {
        target.figure.inSight = isIntersecting;
        if (isIntersecting) schedule();
    }
}, {rootMargin: "200px"});
const size = new ResizeObserver(entries => entries.forEach(({target}) => target.figure.touch()));

let scheduled = false;
function schedule() {
    if (scheduled) return;
    scheduled = true;
    requestAnimationFrame(() => {
        scheduled = false;
        const end = performance.now() + FRAME_MS;
        for (const figure of waiting) {
            if (!figure.inSight) continue;
            if (performance.now() > end) return schedule();
            waiting.delete(figure);
            figure.paint();
        }
    });
}

/* ---- a figure ---- */

/* What is common to charts: a subclass draws between the axes (draw), knows the least and largest y
 * (extent: null where there is nothing), and the rows of the tip at an x. */
class Figure {
    constructor(title, unit, keys) {
        this.title = title;
        this.unit = unit;
        this.keys = keys;
        this.canvas = make("canvas", {role: "img", "aria-label": title});
        this.legend = make("ul", {className: "legend"});
        this.tip = make("div", {className: "tip", hidden: true});
        this.line = make("li"); // what stands for it in the list of those that are constant
        this.element = make("figure", {}, make("figcaption", {}, title, " ", make("span", {}, unit)),
                            this.canvas, this.legend, this.tip);
        this.element.dataset.metrics = keys.join(" ");
        this.canvas.figure = this;
        sight.observe(this.canvas);
        size.observe(this.canvas);
        this.listen();
    }
    remove() {
        sight.unobserve(this.canvas);
        size.unobserve(this.canvas);
        waiting.delete(this);
    }
    /* Has it drawn anew once it is seen. */
    touch() {
        waiting.add(this);
        if (this.inSight) schedule();
    }

    /* ---- coordinates, in CSS pixels ---- */
    get left() { return MARGIN.left; }
    get right() { return this.width - MARGIN.right; }
    get bottom() { return this.height - MARGIN.bottom; }
    atX(x) {
        const [lo, hi] = this.xRange;
        return this.left + (hi > lo ? (x - lo) / (hi - lo) : 0.5) * (this.right - this.left);
    }
    xAt(pixel) {
        const [lo, hi] = this.xRange;
        const share = (pixel - this.left) / (this.right - this.left);
        return lo + Math.min(1, Math.max(0, share)) * (hi - lo);
    }
    atY(y) {
        const [lo, hi] = this.yRange;
        const share = this.log ? Math.log(y / lo) / Math.log(hi / lo) : (y - lo) / (hi - lo);
        return this.bottom - share * (this.bottom - MARGIN.top);
    }

    /* ---- drawing ---- */
    paint() {
        const box = this.canvas.getBoundingClientRect(), scale = window.devicePixelRatio || 1;
        if (!box.width) return;
        this.width = box.width;
        this.height = box.height;
        this.canvas.width = Math.round(box.width * scale);
        this.canvas.height = Math.round(box.height * scale);
        const ctx = this.canvas.getContext("2d");
        ctx.scale(scale, scale);
        ctx.font = "11px system-ui, sans-serif";
        this.xRange = this.rangeX();
        this.log = view.log && !this.linearOnly;
        this.yRange = this.xRange && this.fitY();
        if (!this.yRange) return this.paintNothing(ctx);
        this.paintAxes(ctx);
        ctx.save();
        ctx.beginPath();
        ctx.rect(this.left, MARGIN.top - 3, this.right - this.left, this.bottom - MARGIN.top + 3);
        ctx.clip();
        this.draw(ctx);
        ctx.restore();
        this.putLegend();
    }
    paintNothing(ctx) {
        ctx.fillStyle = colors.dim;
        ctx.textAlign = "center";
        ctx.fillText(this.log ? "no value above 0" : "no values", this.width / 2, this.height / 2);
        this.putLegend();
    }
    rangeX() {
        return view.range || this.wholeX();
    }
    wholeX() {
        let lo = Infinity, hi = -Infinity;
        for (const run of view.runs) {
            const xs = run.x(view.x);
            if (!xs || !xs.length) continue;
            lo = Math.min(lo, xs[0]);
            hi = Math.max(hi, xs[xs.length - 1]);
        }
        return hi >= lo ? [lo, hi] : null;
    }
    fitY() {
        const extent = this.extent();
        if (!extent) return null;
        let [lo, hi] = extent;
        if (this.log) return hi > lo ? [lo, hi] : [lo / 2, hi * 2];
        if (lo > 0 && lo < 0.4 * hi) lo = 0; // so near that the reader should see it
        if (hi < 0 && hi > 0.4 * lo) hi = 0;
        if (hi - lo <= 1e-9 * Math.max(Math.abs(lo), Math.abs(hi))) { // one value
            if (this.unit === "%" && lo >= 0 && hi <= 100) [lo, hi] = [0, 100];
            else if (lo > 0) lo = 0;
            else if (hi < 0) hi = 0;
            else hi = 1;
        }
        const {step} = linearTicks(lo, hi, 5);
        lo = Math.floor(lo / step + 1e-9) * step;
        hi = Math.ceil(hi / step - 1e-9) * step;
        this.yTicks = Array.from({length: Math.round((hi - lo) / step) + 1}, (_, i) => lo + i * step);
        return [lo, hi];
    }
    xTicks() {
        return xTicks(...this.xRange);
    }
    xName(x) {
        return `${view.x} ${xText(x)}`;
    }
    /* Whether a line says as much. */
    get constant() {
        return false;
    }
    paintAxes(ctx) {
        const line = (x0, y0, x1, y1, color) => {
            ctx.strokeStyle = color;
            ctx.beginPath();
            ctx.moveTo(Math.round(x0) + 0.5, Math.round(y0) + 0.5);
            ctx.lineTo(Math.round(x1) + 0.5, Math.round(y1) + 0.5);
            ctx.stroke();
        };
        ctx.lineWidth = 1;
        ctx.fillStyle = colors.dim;
        const ticks = this.log ? logTicks(...this.yRange) : this.yTicks;
        const step = ticks[1] - ticks[0];
        ctx.textAlign = "right";
        for (const y of ticks) {
            line(this.left, this.atY(y), this.right, this.atY(y), colors.edge);
            ctx.fillText(tickText(y, this.log ? y / 2 : step), this.left - 6, this.atY(y) + 3.5);
        }
        ctx.textAlign = "center";
        for (const {x, text} of this.xTicks()) {
            line(this.atX(x), this.bottom, this.atX(x), this.bottom + 4, colors.dim);
            ctx.fillText(text, this.atX(x), this.bottom + 16);
        }
        line(this.left, MARGIN.top, this.left, this.bottom, colors.dim);
        line(this.left, this.bottom, this.right, this.bottom, colors.dim);
    }

    /* ---- the pointer ---- */
    listen() {
        let start = null;
        const pixel = event => event.clientX - this.canvas.getBoundingClientRect().left;
        this.canvas.addEventListener("pointerdown", event => {
            if (event.button !== 0 || !this.yRange) return;
            start = pixel(event);
            this.canvas.setPointerCapture(event.pointerId);
        });
        this.canvas.addEventListener("pointermove", event => {
            if (!this.yRange) return;
            if (start === null) return this.showTip(pixel(event));
            this.tip.hidden = true;
            this.paint();
            const ctx = this.canvas.getContext("2d");
            ctx.fillStyle = colors.dim;
            ctx.globalAlpha = 0.2;
            ctx.fillRect(start, MARGIN.top, pixel(event) - start, this.bottom - MARGIN.top);
        });
        this.canvas.addEventListener("pointerup", event => {
            const from = start;
            start = null;
            if (from === null) return;
            const ends = [from, pixel(event)].map(p => this.xAt(p)).sort((a, b) => a - b);
            if (Math.abs(pixel(event) - from) > 5) this.zoom(ends);
            else this.touch();
        });
        this.canvas.addEventListener("pointercancel", () => { start = null; this.touch(); });
        this.canvas.addEventListener("pointerleave", () => { this.tip.hidden = true; });
        this.canvas.addEventListener("dblclick", () => this.zoom(null));
    }
    zoom(range) {
        view.zoom(range);
    }
    showTip(pixel) {
        const x = this.xAt(pixel), rows = this.rows(x);
        this.tip.hidden = !rows.length;
        if (!rows.length) return;
        const table = make("table", {}, make("tr", {}, make("td", {colSpan: 2}, this.xName(x))));
        for (const {color, name, text} of rows) {
            const swatch = make("span", {className: "swatch"});
            swatch.style.borderColor = color;
            table.append(make("tr", {}, make("td", {}, swatch, name), make("td", {}, text)));
        }
        this.tip.replaceChildren(table);
        const canvas = this.canvas.offsetLeft, right = pixel > this.width / 2;
        this.tip.style.top = `${this.canvas.offsetTop + 8}px`;
        this.tip.style.left = right ? "auto" : `${canvas + pixel + 14}px`;
        this.tip.style.right = right ? `${this.element.clientWidth - canvas - pixel + 14}px` : "auto";
    }
}

function xText(x) {
    return view.x === "time" ? durationText(x) : numberText(view.x === "step" ? Math.round(x) : x);
}

function xTicks(lo, hi) {
    if (hi <= lo) return [{x: lo, text: xText(lo)}];
    const unit = view.x !== "time" ? 1 : [86400, 3600, 60].find(s => hi - lo >= 3 * s) || 1;
    const {step, ticks} = linearTicks(lo, hi, 6, unit);
    return ticks.filter(x => view.x !== "step" || Number.isInteger(Number(x.toPrecision(12))))
        .map(x => ({x, text: view.x === "time" ? `${Number((x / unit).toPrecision(6))}` +
                             {1: " s", 60: " min", 3600: " h", 86400: " d"}[unit]
                                              : tickText(x, step)}));
}

/* ---- lines ---- */

/* Weight w of what was before; the mean of few values is of these alone. */
function smoothed(values, w) {
    const ret = new Float64Array(values.length);
    let sum = 0, weight = 0;
    for (let i = 0; i < values.length; i++) {
        sum = w * sum + (1 - w) * values[i];
        weight = w * weight + (1 - w);
        ret[i] = sum / weight;
    }
    return ret;
}

class LineChart extends Figure {
    /* lines: [{key, error}]; error: key of half-widths of its error bars, or undefined. */
    constructor(title, unit, lines) {
        super(title, unit, lines.flatMap(({key, error}) => error ? [key, error] : [key]));
        this.lines = lines;
        this.scale = unit === "%" ? 100 : 1;
        this.cache = new Map();
    }

    get constant() {
        const runs = view.runs.filter(run => run.lines);
        return runs.some(run => run.lines >= CHANGES_WITHIN) && runs.every(run => this.keys.every(key =>
            !run.series.has(key) || run.series.get(key).same !== undefined));
    }
    /* Its title, and each key's value, or its values in the runs. */
    putConstant() {
        const valuesOf = key => [...new Set(view.runs.filter(run => run.series.has(key))
            .map(run => this.valueText(run.series.get(key).same * this.scale)))].join(", ") || "-";
        this.line.replaceChildren(make("b", {}, this.title), " ", this.keys.map(key =>
            `${key === this.title ? "" : `${key} `}${valuesOf(key)}`).join("; "));
    }

    /* x and y of a run's key, and y as smoothed; null where it has none. */
    points(run, key) {
        const what = `${view.x} ${view.smooth} ${run.generation} ${run.lines}`;
        const name = `${run.number} ${key}`, kept = this.cache.get(name);
        if (kept && kept.what === what) return kept.points;
        const points = this.makePoints(run, key);
        this.cache.set(name, {what, points});
        return points;
    }
    makePoints(run, key) {
        const series = run.series.get(key), xs = run.x(view.x);
        if (!series || !xs) return null;
        const lines = series.lines.all, values = series.values.all;
        const x = Float64Array.from(lines, line => xs[line]);
        const raw = Float64Array.from(values, value => value * this.scale);
        return {x, raw, y: view.smooth > 0 ? smoothed(raw, view.smooth) : raw};
    }

    /* All there is to draw, in the range: [{run, line, points, color, dash, from, to}]. */
    curves() {
        const ret = [], several = view.runs.length > 1;
        for (const run of view.runs)
            this.lines.forEach((line, i) => {
                const points = this.points(run, line.key);
                if (!points || !points.x.length) return;
                const [lo, hi] = this.xRange;
                ret.push({
                    run, line, points,
                    color: colorOf(several ? run.number : i),
                    dash: (several ? i : i / N_COLORS | 0) % DASHES.length,
                    name: several ? `${run.name} ${this.lines.length > 1 ? line.key : ""}` : line.key,
                    from: Math.max(0, lowerBound(points.x, lo) - 1),
                    to: Math.min(points.x.length, lowerBound(points.x, hi) + 1),
                });
            });
        return ret;
    }
    extent() {
        let lo = Infinity, hi = -Infinity;
        for (const curve of this.curves()) {
            const {x, y} = curve.points, errors = this.errors(curve);
            for (let i = curve.from; i < curve.to; i++) {
                if (x[i] < this.xRange[0] || x[i] > this.xRange[1] || (this.log && y[i] <= 0)) continue;
                const error = errors && !this.log && errors.get(x[i]) || 0;
                if (y[i] - error < lo) lo = y[i] - error;
                if (y[i] + error > hi) hi = y[i] + error;
            }
        }
        return hi >= lo ? [lo, hi] : null;
    }
    draw(ctx) {
        for (const curve of this.curves()) {
            ctx.strokeStyle = ctx.fillStyle = curve.color;
            ctx.setLineDash(DASHES[curve.dash]);
            ctx.lineJoin = "round";
            if (view.smooth > 0) {
                ctx.globalAlpha = 0.25;
                ctx.lineWidth = 1;
                this.trace(ctx, curve, curve.points.raw);
                ctx.globalAlpha = 1;
            }
            ctx.lineWidth = 1.6;
            this.trace(ctx, curve, curve.points.y);
            ctx.setLineDash([]);
            if (curve.to - curve.from < DOTS_BELOW) this.dots(ctx, curve);
            this.errorBars(ctx, curve);
        }
    }

    /* The line through its points, or, where there are more than pixels, through the first, least,
     * largest and last of each column. */
    trace(ctx, {points, from, to}, y) {
        const dense = to - from > 4 * (this.right - this.left);
        let column = NaN, least = 0, largest = 0, last = 0, drawing = false;
        const go = (x, value) => {
            if (drawing) ctx.lineTo(x, this.atY(value));
            else ctx.moveTo(x, this.atY(value));
            drawing = true;
        };
        const end = () => {
            if (Number.isNaN(column)) return;
            for (const value of [least, largest, last]) go(column, value);
            column = NaN;
        };
        ctx.beginPath();
        for (let i = from; i < to; i++) {
            if (this.log && y[i] <= 0) {
                end();
                drawing = false;
                continue;
            }
            const x = this.atX(points.x[i]);
            if (!dense) {
                go(x, y[i]);
                continue;
            }
            if (Math.round(x) !== column) {
                end();
                column = Math.round(x);
                go(column, y[i]);
                least = largest = y[i];
            }
            if (y[i] < least) least = y[i];
            if (y[i] > largest) largest = y[i];
            last = y[i];
        }
        end();
        ctx.stroke();
    }
    dots(ctx, {points: {x, y}, from, to}) {
        for (let i = from; i < to; i++) {
            if (this.log && y[i] <= 0) continue;
            ctx.beginPath();
            ctx.arc(this.atX(x[i]), this.atY(y[i]), 2.2, 0, 7);
            ctx.fill();
        }
    }
    /* Half-widths by x; null: it has none. */
    errors({run, line}) {
        const points = line.error && this.points(run, line.error);
        return points && new Map(Array.from(points.x, (x, i) => [x, points.raw[i]]));
    }
    errorBars(ctx, curve) {
        const errors = this.errors(curve), {x, y} = curve.points;
        if (!errors || this.log) return;
        ctx.lineWidth = 1;
        ctx.beginPath();
        for (let i = curve.from; i < curve.to; i++) {
            const error = errors.get(x[i]), at = this.atX(x[i]);
            if (error === undefined) continue;
            for (const end of [y[i] - error, y[i] + error]) {
                ctx.moveTo(at - 3, this.atY(end));
                ctx.lineTo(at + 3, this.atY(end));
            }
            ctx.moveTo(at, this.atY(y[i] - error));
            ctx.lineTo(at, this.atY(y[i] + error));
        }
        ctx.stroke();
    }

    valueText(value) {
        return numberText(value) + (this.scale === 100 ? "%" : "");
    }
    /* Of each line its point that is nearest to x. */
    rows(x) {
        return this.curves().map(curve => {
            const {x: xs, y, raw} = curve.points;
            let i = lowerBound(xs, x);
            if (i > 0 && (i === xs.length || x - xs[i - 1] < xs[i] - x)) i--;
            const error = this.errors(curve)?.get(xs[i]), parts = [this.valueText(y[i])];
            if (error !== undefined) parts.push(`± ${this.valueText(error)}`);
            if (view.smooth > 0) parts.push(`(${this.valueText(raw[i])})`);
            if (Math.abs(this.atX(xs[i]) - this.atX(x)) > 3) parts.push(`at ${xText(xs[i])}`);
            return {color: curve.color, name: curve.name, text: parts.join(" ")};
        });
    }
    putLegend() {
        const curves = this.xRange ? this.curves() : [];
        this.legend.replaceChildren(...curves.map(({run, line, color, dash, name}) => {
            const swatch = make("i", {className: "swatch"});
            swatch.style.borderColor = color;
            swatch.style.borderTopStyle = BORDERS[dash];
            return make("li", {}, swatch, name, line.error ? ` ± ${line.error}` : "", " ",
                        make("b", {}, this.valueText(run.last(line.key) * this.scale)));
        }));
    }
}
