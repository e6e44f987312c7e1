/* run.js: runs as the page holds them, and how their data comes: out of the page's own elements, or
 * from its server. tools/report/report.h says what is in an object of data. */

function bytesOf(base64) {
    if (Uint8Array.fromBase64) return Uint8Array.fromBase64(base64);
    const text = atob(base64), bytes = new Uint8Array(text.length);
    for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
    return bytes;
}

const bytesIn = base64 => base64.length / 4 * 3 - (base64.match(/=*$/)[0].length);

/* An array of numbers that grows at its end. What is added, base64 or what gives an array, is looked
 * into when first asked for: a page of a long run holds a million numbers, of which few are. */
class Column {
    constructor(Type) {
        this.Type = Type;
        this.array = new Type(0);
        this.pending = [];
    }
    add(part) {
        this.pending.push(part);
    }
    get all() {
        for (const part of this.pending.splice(0)) {
            const more = typeof part === "string" ? new this.Type(bytesOf(part).buffer) : part();
            const joined = new this.Type(this.array.length + more.length);
            joined.set(this.array);
            joined.set(more, this.array.length);
            this.array = joined;
        }
        return this.array;
    }
}

/* One key's numbers: values.all[i] is of line lines.all[i]; same is the value of all, where there is
 * only one. */
class Series {
    constructor() {
        this.lines = new Column(Int32Array);
        this.values = new Column(Float32Array);
    }
    add({values, same, n = bytesIn(values) / Float32Array.BYTES_PER_ELEMENT, at, first}) {
        this.same = !("same" in this) || this.same === same ? same : undefined;
        this.values.add(values ?? (() => new Float32Array(n).fill(same)));
        this.lines.add(at ?? (() => Int32Array.from({length: n}, (_, i) => first + i)));
    }
}

const SAMPLE_COLUMNS = {
    step: Int32Array, row: Int32Array, line: Int32Array, number: Int32Array, tokens: Int32Array,
    reward: Float32Array, advantage: Float32Array, truncated: Uint8Array,
};

class Run {
    constructor(number, shown) {
        this.number = number;
        this.shown = shown;
        this.clear();
    }
    clear() {
        this.generation = 0;
        this.lines = 0;
        this.bad = 0;
        this.badSamples = 0;
        this.steps = new Column(Int32Array);
        this.series = new Map();
        this.reports = [];
        this.nReports = 0;
        this.samples = {};
        for (const key in SAMPLE_COLUMNS) this.samples[key] = new Column(SAMPLE_COLUMNS[key]);
        this.prompts = new Map(); // line of the data (below 0: held-out) -> how its prompt begins
        this.nPrompts = 0;
    }
    get nSamples() {
        return this.samples.step.all.length;
    }
    /* What differs when there is more, or other, data. */
    get state() {
        return `${this.name} ${this.generation} ${this.lines} ${this.nSamples} ${this.badSamples} ${this.nReports}`;
    }

    /* Adds what is new; true where there was anything. Data from the start replaces all. */
    take(data) {
        if (data.from === 0 && this.lines > 0) this.clear();
        const before = this.state;
        for (const key of ["name", "generation", "lines", "bad", "written", "behind"])
            this[key] = data[key];
        for (const key of ["config", "start"]) if (key in data) this[key] = data[key];
        this.steps.add(data.steps);
        for (const part of data.series) {
            if (!this.series.has(part.key)) this.series.set(part.key, new Series());
            this.series.get(part.key).add(part);
        }
        if (data.reports) {
            this.reports = data.reports;
            this.reportsLeftOut = data.left_out;
            this.nReports = data.n_reports;
        }
        this.badSamples = data.samples.bad;
        for (const key in SAMPLE_COLUMNS) this.samples[key].add(data.samples[key]);
        const lines = new Int32Array(bytesOf(data.prompts.line).buffer);
        data.prompts.text.forEach((text, i) => this.prompts.set(lines[i], text));
        this.nPrompts += lines.length;
        this.xs = new Map();
        return before !== this.state;
    }

    /* The x of each line: its step, the seconds of the run until it, the tokens learned from until
     * it. null: the run does not say. */
    x(kind) {
        if (!this.xs.has(kind)) this.xs.set(kind, this.makeX(kind));
        return this.xs.get(kind);
    }
    makeX(kind) {
        const n = this.lines, ret = new Float64Array(n);
        if (kind === "step") return Float64Array.from(this.steps.all);
        const spans = [...this.series.keys()].filter(key => key.startsWith("spans/"));
        const keys = kind === "tokens" ? ["num_tokens"] : spans.length ? spans : ["step_s"];
        if (!this.series.has(keys[0])) return null;
        for (const key of keys) {
            const lines = this.series.get(key).lines.all, values = this.series.get(key).values.all;
            for (let i = 0; i < lines.length; i++) ret[lines[i]] += values[i];
        }
        for (let i = 1; i < n; i++)
            ret[i] = kind === "tokens" ? Math.max(ret[i], ret[i - 1]) : ret[i] + ret[i - 1];
        return ret;
    }
    last(key) {
        const values = this.series.has(key) ? this.series.get(key).values.all : [];
        return values[values.length - 1];
    }
}

/* ---- where data comes from ---- */

/* Of a page that holds it all. */
class Held {
    constructor() {
        this.live = false;
        this.shown = this.n = document.querySelectorAll("script[id^=run-]").length;
    }
    async data(run) {
        const element = byId(`run-${run.number}`);
        return run.lines ? null : JSON.parse(element.textContent);
    }
    element(run, step, heldOut) {
        return byId(`rollouts-${run.number}-${step}${heldOut ? "-eval" : ""}`);
    }
    has(run, step, heldOut) {
        return this.element(run, step, heldOut) !== null;
    }
    get missing() {
        return "the text of this sample is not on this page, which holds those of some only " +
            "(--texts): cw-report --serve shows all";
    }
    async rollouts(run, step, heldOut) {
        const element = this.element(run, step, heldOut);
        return element ? element.textContent : "";
    }
}

/* Of a page that asks its server. */
class Served {
    constructor(n, shown) {
        this.live = true;
        this.n = n;
        this.shown = shown; // at first
    }
    async get(path, query) {
        const response = await fetch(`${path}?${new URLSearchParams(query)}`);
        if (response.ok) return response;
        const error = await response.json().catch(() => ({}));
        throw new Error(error.error ? error.error.message : `HTTP status ${response.status}`);
    }
    async data(run) {
        const query = {run: run.number, generation: run.generation, lines: run.lines,
                       samples: run.nSamples, prompts: run.nPrompts, reports: run.nReports};
        return (await this.get("data", query)).json();
    }
    has() {
        return true;
    }
    get missing() {
        return "its file says something else by now: reload the page";
    }
    async rollouts(run, step, heldOut) {
        return (await this.get("rollouts", {run: run.number, step, held_out: heldOut ? 1 : 0})).text();
    }
}

function sourceOfPage() {
    const live = byId("live");
    return live ? new Served(Number(live.textContent), Number(live.dataset.shown)) : new Held();
}
