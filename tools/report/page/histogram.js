/* histogram.js: how many of some samples have which value, of two groups of them beside each other. */

const MOST_BINS = 24;

class Histogram extends Figure {
    constructor(title, unit, whole) {
        super(title, unit, []);
        this.linearOnly = true;
        this.whole = whole; // values are whole numbers
        this.groups = [];
    }
    /* groups: [{name, color, values}]; counted by the shares of each. */
    set(groups) {
        let lo = Infinity, hi = -Infinity;
        for (const {values} of groups)
            for (const value of values) {
                if (value < lo) lo = value;
                if (value > hi) hi = value;
            }
        this.groups = [];
        this.element.hidden = !(hi >= lo);
        if (this.element.hidden) return;
        this.bin = hi > lo ? linearTicks(lo, hi, MOST_BINS).step : this.whole ? 1 : Math.abs(hi) / 10 || 0.1;
        if (this.whole) this.bin = Math.max(1, this.bin);
        this.first = Math.floor(lo / this.bin + 1e-9);
        const n = this.binOf(hi) + 1;
        this.groups = groups.map(({name, color, values}) => {
            const shares = new Float64Array(n);
            for (const value of values) shares[this.binOf(value)] += 100 / values.length;
            return {name, color, shares, n: values.length};
        });
        this.bins = n;
        this.touch();
    }
    binOf(value) {
        return Math.floor(value / this.bin + 1e-6) - this.first;
    }
    rangeX() {
        return this.groups.length ? [this.first * this.bin, (this.first + this.bins) * this.bin] : null;
    }
    extent() {
        return [0, Math.max(...this.groups.map(({shares}) => shares.reduce((a, b) => Math.max(a, b), 0)))];
    }
    draw(ctx) {
        this.groups.forEach(({shares, color}, g) => shares.forEach((share, i) => {
            const left = this.atX((this.first + i) * this.bin), right = this.atX((this.first + i + 1) * this.bin);
            const each = (right - left) * 0.9 / this.groups.length;
            ctx.fillStyle = colors[color];
            ctx.fillRect(left + g * each, this.atY(share), Math.max(each, 1), this.atY(0) - this.atY(share));
        }));
    }
    xTicks() {
        const {step, ticks} = linearTicks(...this.xRange, 6, this.whole ? 1 : undefined);
        return ticks.filter(x => !this.whole || Number.isInteger(x)).map(x => ({x, text: tickText(x, step)}));
    }
    xName(x) {
        const low = (this.first + this.at(x)) * this.bin;
        return this.whole && this.bin === 1 ? numberText(low)
                                            : `from ${numberText(low)} to below ${numberText(low + this.bin)}`;
    }
    at(x) {
        return Math.max(0, Math.min(this.bins - 1, this.binOf(x)));
    }
    rows(x) {
        return this.groups.map(({name, color, shares}) =>
            ({color: colors[color], name, text: `${numberText(shares[this.at(x)])}%`}));
    }
    zoom() {} // it has no steps
    putLegend() {
        this.legend.replaceChildren(...this.groups.map(({name, color, n}) => {
            const swatch = make("i", {className: "swatch"});
            swatch.style.borderTopWidth = "8px";
            swatch.style.borderColor = colors[color];
            return make("li", {}, swatch, name, " ", make("b", {}, `${numberText(n)} samples`));
        }));
    }
}
