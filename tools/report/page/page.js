/* page.js: the page from top to bottom: which runs, what they are, their numbers; the controls; and,
 * of a served page, what is new every few seconds. */

const REFRESH_MS = 2000;
const breath = () => new Promise(done => setTimeout(done, 0)); // for the browser to draw

/* ---- tables ---- */

const HIGH = 1, LOW = -1, NEITHER = 0; // which is better
const SUMMARY = [
    ["reward", HIGH], ["rewards/task", HIGH], ["accuracy", HIGH], ["eval/accuracy", HIGH],
    ["eval/reward", HIGH], ["spec_decode/acceptance_rate", HIGH],
    ["spec_decode/acceptance_length", HIGH], ["eval/loss", LOW], ["draft_loss", LOW], ["inference/latency_ms", LOW],
    ["completions/mean_length", NEITHER], ["kl", NEITHER], ["entropy", NEITHER],
    ["grad_norm", NEITHER], ["sampler_mismatch/mean", LOW], ["sampler_mismatch/max", LOW],
    ["publish/total_ms", LOW], ["step_s", LOW], ["tokens_per_s", HIGH],
];

function summaryOf(run, key, better) {
    const lines = run.series.get(key).lines.all, values = run.series.get(key).values.all;
    const n = values.length;
    const tenth = values.subarray(n - Math.ceil(n / 10));
    let best = 0;
    for (let i = 1; i < n; i++) if (better * values[i] > better * values[best]) best = i;
    return {
        first: values[0], last: values[n - 1], mean: tenth.reduce((a, b) => a + b, 0) / tenth.length,
        best: better ? values[best] : NaN, step: run.steps.all[lines[best]],
    };
}

function tableOf(head, rows, className = "") {
    const row = (cells, first) => make("tr", {}, ...cells.map((cell, i) =>
        make(i === 0 || first ? "th" : "td", {}, cell)));
    return make("table", {className}, make("thead", {}, row(head, true)),
                make("tbody", {}, ...rows.map(cells => row(cells, false))));
}

/* Of one run how each number went; of several their ends beside each other. */
function summaryTable(runs) {
    const rows = SUMMARY.filter(([key]) => runs.some(run => run.series.has(key)));
    const of = (run, [key, better]) => run.series.has(key) ? summaryOf(run, key, better) : null;
    if (runs.length === 1)
        return tableOf(["metric", "first", "last", "mean of the last tenth", "best", "at step"],
            rows.map(row => {
                const {first, last, mean, best, step} = of(runs[0], row);
                return [row[0], numberText(first), numberText(last), numberText(mean),
                        ...row[1] ? [numberText(best), numberText(step)] : ["", ""]];
            }));
    return tableOf(["mean of the last tenth (best)", ...runs.map(run => run.name)],
        rows.map(row => [row[0], ...runs.map(run => {
            const s = of(run, row);
            return s ? numberText(s.mean) + (row[1] ? ` (${numberText(s.best)})` : "") : "";
        })]));
}

const optionText = value => value === null || value === undefined ? "" :
    typeof value === "string" ? value : JSON.stringify(value);

/* What a reader asks first. */
const MAIN_OPTIONS = ["data", "reward", "curriculum", "loss_type", "learning_rate", "prompts_per_step",
                      "num_generations", "max_completion_length", "temperature", "beta", "seed"];

function mainOptions(run) {
    return facts(MAIN_OPTIONS.filter(key => run.config && key in run.config)
        .map(key => [key, optionText(run.config[key])]));
}

/* Where it ran, and what the trainer held there. */
function startFacts(run) {
    if (!run.start) return "";
    const memory = Object.entries(run.start.memory_mib || {}).filter(([, mib]) => mib > 0);
    return facts([["device", run.start.device], ["model", run.start.model],
                  ...memory.map(([part, mib], i) => [`${i ? "" : "memory: "}${part}`, `${numberText(mib)} MiB`])]);
}

function optionTables(runs) {
    const known = runs.filter(run => run.config);
    if (!known.length) return [];
    const keys = [...new Set(known.flatMap(run => Object.keys(run.config)))];
    const differ = keys.filter(key => new Set(known.map(run => optionText(run.config[key]))).size > 1);
    const table = some => tableOf(["option", ...known.map(run => run.name)],
        some.map(key => [key, ...known.map(run => optionText(run.config[key]))]), "config");
    const ret = [make("h2", {}, "Options")];
    if (known.length > 1 && differ.length)
        ret.push(make("p", {className: "dim"}, "those that differ"),
                 make("div", {className: "wide"}, table(differ)));
    ret.push(make("details", {}, make("summary", {}, "all options"),
                  make("div", {className: "wide"}, table(keys))));
    return ret;
}

function reportsOf(run, several) {
    const ret = [make("h2", {}, `Cluster reports${several ? ` of ${run.name}` : ""}`)];
    run.reports.forEach(({epoch, text, left_out: leftOut}, i) => {
        const more = leftOut ? [make("p", {className: "dim"}, `${numberText(leftOut)} more bytes are in ` +
            `cluster-report-epoch-${epoch}.txt and left out here`)] : [];
        ret.push(make("details", {open: i === run.reports.length - 1},
                      make("summary", {}, `Epoch ${epoch}`), make("pre", {}, visible(text)), ...more));
        if (i === 0 && run.reportsLeftOut)
            ret.push(make("p", {className: "dim"}, `${run.reportsLeftOut} more`));
    });
    return make("section", {className: "clusters"}, ...ret);
}

/* ---- the runs ---- */

function runFacts(run) {
    const steps = run.steps.all, time = run.x("time"), parts = [];
    if (run.lines) {
        parts.push(`steps ${numberText(steps[0])} to ${numberText(steps[run.lines - 1])}`);
        if (time) parts.push(durationText(time[run.lines - 1]));
    } else {
        parts.push("no step has been done yet");
    }
    parts.push(`written ${new Date(run.written * 1000).toLocaleString()}`);
    for (const [n, where] of [[run.bad, "metrics.jsonl"], [run.badSamples, "rollouts/"]])
        if (n) parts.push(`left out: ${numberText(n)} line${n > 1 ? "s" : ""} of ${where} that cannot be read`);
    return parts.join(", ");
}

class Page {
    constructor() {
        this.source = sourceOfPage();
        this.runs = Array.from({length: this.source.n}, (_, i) => new Run(i, i < this.source.shown));
        this.charts = new Charts(byId("charts"));
        this.rollouts = new Rollouts(byId("rollouts"), this.source);
        view.zoom = range => this.zoom(range);
        readColors();
        matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
            readColors();
            this.draw();
        });
        this.listen();
    }

    /* ---- controls ---- */
    listen() {
        byId("controls").addEventListener("submit", event => event.preventDefault());
        byId("x").addEventListener("change", event => {
            view.x = event.target.value;
            this.zoom(null);
        });
        byId("smooth").addEventListener("input", event => {
            view.smooth = Number(event.target.value);
            byId("smooth-value").value = event.target.value;
            this.draw();
        });
        byId("log").addEventListener("change", event => {
            view.log = event.target.checked;
            this.draw();
        });
        byId("filter").addEventListener("input", event =>
            this.charts.filter(event.target.value.toLowerCase().split(/\s+/).filter(word => word)));
        byId("reset").addEventListener("click", () => this.zoom(null));
    }
    zoom(range) {
        view.range = range;
        byId("reset").hidden = !range;
        this.draw();
    }
    draw() {
        this.charts.figures.forEach(figure => figure.touch());
        this.rollouts.histograms.forEach(([, figure]) => figure.touch());
    }

    /* ---- what there is ---- */
    get shown() {
        return this.runs.filter(run => run.shown && run.name !== undefined);
    }
    putRuns() {
        const several = this.runs.length > 1;
        document.title = this.shown.map(run => run.name).join(", ") || "cw-report";
        byId("title").textContent = this.runs.map(run => run.name).join(", ");
        byId("runs").replaceChildren(make("div", {className: "runs"}, ...this.runs.map(run => {
            const text = make("span", {className: "dim"}, `${several ? `${run.name}: ` : ""}${runFacts(run)}`);
            if (!several) return text;
            const box = make("input", {type: "checkbox", checked: run.shown});
            const swatch = make("span", {className: "swatch"});
            swatch.style.borderColor = `var(--s${run.number % N_COLORS})`;
            box.addEventListener("change", () => {
                run.shown = box.checked;
                this.update();
            });
            return make("label", {}, box, " ", swatch, text);
        })), ...several ? [] : [mainOptions(this.runs[0]), startFacts(this.runs[0])]);
    }
    /* A run that does not say its tokens has no curve over them. */
    putX() {
        for (const option of byId("x").options)
            option.disabled = !this.shown.some(run => run.lines && run.x(option.value));
    }
    /* In the order in which the reader comes to it, with room for a frame in between. */
    async update() {
        const runs = view.runs = this.shown;
        this.putRuns();
        this.putX();
        byId("summary").replaceChildren(...runs.length && runs.some(run => run.lines)
            ? [make("div", {className: "wide"}, summaryTable(runs))] : []);
        await breath();
        const lines = runs.map(run => `${run.number} ${run.generation} ${run.lines}`).join();
        if (this.inCharts !== lines) this.charts.update(this.runs);
        this.inCharts = lines;
        await breath();
        this.rollouts.update(runs);
        this.putOnce("reports", runs.map(run => `${run.name} ${run.generation} ${run.nReports}`), () =>
            runs.filter(run => run.reports.length).map(run => reportsOf(run, runs.length > 1)));
        this.putOnce("options", runs.map(run => run.name), () => optionTables(runs));
    }
    /* Not again where it is of the same: what the reader has opened stays open. */
    putOnce(id, of, elements) {
        const what = of.join("\n");
        if (byId(id).dataset.of === what) return;
        byId(id).dataset.of = what;
        byId(id).replaceChildren(...elements());
    }

    /* ---- data ---- */

    /* True where a run has more at once. */
    async refresh() {
        let changed = false, behind = false, failed = null;
        for (const run of this.runs) {
            try {
                const data = await this.source.data(run);
                if (data && run.take(data)) changed = true;
                behind = behind || Boolean(run.behind);
            } catch (error) {
                failed = failed || error; // of this run; the others go on
            }
        }
        if (changed) await this.update();
        if (failed) throw failed;
        return behind;
    }
    async follow() {
        for (;;) {
            let behind = false;
            try {
                behind = await this.refresh();
                byId("status").textContent = `live, as of ${new Date().toLocaleTimeString()}`;
            } catch (error) {
                byId("status").textContent = `no new data: ${error.message} (cw-report --serve, does it run?)`;
            }
            await new Promise(done => setTimeout(done, behind ? 0 : REFRESH_MS));
            while (document.hidden)
                await new Promise(done => document.addEventListener("visibilitychange", done, {once: true}));
        }
    }
    async start() {
        if (this.source.live) return this.follow();
        await this.refresh();
    }
}

const page = new Page();
page.start().then(() => performance.mark("report-ready"));
