/* number.js: numbers as text, and round numbers along an axis. No state. */

const UNITS = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]];

/* "0.512", "12,345", "1.2e-7"; "-" for what is not finite. */
function numberText(value) {
    const size = Math.abs(value);
    if (!Number.isFinite(value)) return "-";
    if (size >= 1e12 || (size > 0 && size < 1e-4)) return value.toExponential(2);
    if (size >= 999.5) return Math.round(value).toLocaleString("en-US");
    return String(Number(value.toPrecision(4)));
}

/* "1.5k", "0.25", "2e-7", with as many digits as ticks that are `step` apart need. */
function tickText(value, step) {
    if (value === 0) return "0";
    if (step < 1e-4 || Math.abs(value) >= 1e15) return String(Number(value.toPrecision(6)));
    const [unit, name] = UNITS.find(([size]) => Math.abs(value) >= 10 * size ||
                                                (Math.abs(value) >= size && step >= size)) || [1, ""];
    const digits = Math.max(0, Math.ceil(-Math.log10(step / unit) - 1e-9));
    const text = (value / unit).toFixed(Math.min(digits + 1, 6));
    return (text.includes(".") ? text.replace(/\.?0+$/, "") : text) + name;
}

/* Seconds: "45 s", "3.5 min", "2 h". */
function durationText(seconds) {
    const [unit, name] = [[86400, "d"], [3600, "h"], [60, "min"]].find(
        ([size]) => Math.abs(seconds) >= 2 * size) || [1, "s"];
    return `${Number((seconds / unit).toPrecision(4))} ${name}`;
}

/* Ticks of 1, 2 or 5 times a power of ten (times `unit`) within lo to hi, about n. */
function linearTicks(lo, hi, n, unit = 1) {
    const rough = (hi - lo) / n / unit, power = 10 ** Math.floor(Math.log10(rough));
    const step = unit * power * [1, 2, 5, 10].find(k => k * power >= rough * (1 - 1e-9));
    const ticks = [];
    for (let k = Math.ceil(lo / step - 1e-9); k * step <= hi + 1e-9 * step; k++) ticks.push(k * step);
    return {step, ticks};
}

/* Powers of ten within lo to hi (above 0), of less than two also their doubles and fives, and where
 * that is next to nothing, round numbers. */
function logTicks(lo, hi) {
    const from = Math.floor(Math.log10(lo)), to = Math.ceil(Math.log10(hi));
    const every = Math.max(1, Math.ceil((to - from) / 6)), ticks = [];
    for (let power = from; power <= to; power += every)
        for (const k of to - from <= 2 ? [1, 2, 5] : [1])
            if (k * 10 ** power >= lo && k * 10 ** power <= hi) ticks.push(k * 10 ** power);
    return ticks.length > 2 ? ticks : linearTicks(lo, hi, 4).ticks;
}
