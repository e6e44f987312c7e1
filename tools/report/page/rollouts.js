/* rollouts.js: the browser of rollouts: a list of all samples that can be filtered and sorted, from
 * a few numbers of each; and the sample that was chosen, whose text is fetched then. */

const PAGE_ROWS = 25;
const TOKENS_COLORED = 4000; // of a text, beyond which it is plain until asked for

/* Control characters are seen as their pictures; all else stays text. */
function visible(text) {
    return text.replace(/[\0-\x08\x0b-\x1f\x7f]/g, c =>
        c === "\x7f" ? "\u2421" : String.fromCharCode(0x2400 + c.charCodeAt(0)));
}

/* ---- tokens ---- */

/* A colour for a share of -1 (blue) to 1 (orange); 0 is none. */
function shade(share) {
    const strength = Math.min(1, Math.abs(share));
    const color = share > 0 ? "var(--s1)" : "var(--s0)", percent = Math.round(65 * strength);
    return strength < 0.02 ? "" : `color-mix(in srgb, ${color} ${percent}%, transparent)`;
}

/* What a token may be coloured by: the value of token t, as text, and its colour's share. */
const MEASURES = {
    logprob: {
        title: "log-probability by the server", from: "likely", to: "unlikely",
        there: line => line.logprobs,
        value: (line, t) => line.logprobs[t], share: x => Math.min(1, -x / 5),
    },
    trainer: {
        title: "log-probability by the trainer", from: "likely", to: "unlikely",
        there: line => line.trainer_logprobs,
        value: (line, t) => line.trainer_logprobs[t], share: x => Math.min(1, -x / 5),
    },
    weight: {
        title: "importance weight (trainer's over server's)", from: "½", to: "2",
        there: line => line.logprobs && line.trainer_logprobs,
        value: (line, t) => Math.exp((line.trainer_logprobs[t] ?? NaN) - (line.logprobs[t] ?? NaN)),
        share: x => Math.max(-1, Math.min(1, Math.log2(x))),
    },
};

/* The text's tokens: [{text, t}]; text_offset counts characters, not JavaScript's halves of them.
 * Tokens without text of their own (half a character) belong to the next, but for those at the end
 * (an end token). null: not recorded. */
function tokensOf(line) {
    const offsets = line.text_offset;
    if (!offsets || !offsets.length) return null;
    const characters = Array.from(line.completion), tokens = [];
    for (let t = 0; t < offsets.length; t++) {
        const from = offsets[t], to = t + 1 < offsets.length ? offsets[t + 1] : characters.length;
        if (from < to) tokens.push({text: characters.slice(from, to).join(""), t});
        else if (from >= characters.length) tokens.push({text: "∎", t});
    }
    return tokens;
}

function tokenTitle(line, t) {
    const parts = [`token ${t}`];
    for (const {title, there, value} of Object.values(MEASURES))
        if (there(line)) parts.push(`${title}: ${numberText(value(line, t))}`);
    if (line.accepted) parts.push(line.accepted[t] > 0 ? `accepted draft, ${line.accepted[t]} of its step`
                                                       : "sampled by the model");
    if (line.model_mask && !line.model_mask[t]) parts.push("not the policy's");
    return parts.join("\n");
}

function tokenElement(line, {text, t}, measure) {
    const span = make("span", {title: tokenTitle(line, t)}, visible(text));
    if (line.accepted && line.accepted[t] > 0) span.classList.add("draft");
    if (line.model_mask && !line.model_mask[t]) span.classList.add("foreign");
    if (measure) span.style.background = shade(measure.share(measure.value(line, t)));
    return span;
}

function completionElement(line, measure) {
    const tokens = tokensOf(line), pre = make("pre", {className: "completion"});
    if (!tokens) {
        pre.append(visible(line.completion));
        return pre;
    }
    const put = some => pre.append(...some.map(token => tokenElement(line, token, measure)));
    put(tokens.slice(0, TOKENS_COLORED));
    const more = tokens.slice(TOKENS_COLORED);
    if (more.length) {
        const button = make("button", {type: "button"}, `${more.length} more tokens`);
        button.addEventListener("click", () => { button.remove(); put(more); });
        pre.append(button);
    }
    return pre;
}

/* What of the tokens the run did not record, in words; "" where all is there. */
function absent(line) {
    const missing = [];
    if (!line.logprobs || !line.trainer_logprobs)
        missing.push("log-probabilities and importance weights were not recorded (--log-logprobs)");
    else if (!line.text_offset)
        missing.push("where tokens lie in the text was not recorded (the sampler does not say)");
    if (!line.accepted) missing.push("nothing was drafted");
    return missing.join("; ");
}

/* ---- a sample ---- */

function promptElements(first) {
    const block = (role, text) => [make("div", {className: "role"}, role), make("pre", {}, visible(text))];
    if (typeof first.prompt_text === "string")
        return block("prompt, as the model saw it", first.prompt_text);
    if (typeof first.prompt === "string") return block("prompt", first.prompt);
    if (Array.isArray(first.prompt))
        return first.prompt.flatMap(message => block(message.role || "message",
            typeof message.content === "string" ? message.content : JSON.stringify(message.content)));
    return [make("p", {className: "dim"}, "the run did not record the prompt")];
}

function facts(pairs) {
    return make("dl", {}, ...pairs.filter(([, value]) => value !== undefined && value !== "" && value !== "-")
        .map(([key, value]) => make("div", {}, make("dt", {}, key), make("dd", {}, value))));
}

function sampleFacts(line) {
    const told = line.telemetry || {}, number = x => typeof x === "number" ? numberText(x) : undefined;
    return facts([
        ["reward", line.reward === null ? "none" : number(line.reward)],
        ["advantage", number(line.advantage)],
        ...Object.entries(line.terms || {}).map(([term, value]) => [term, number(value)]),
        ["tokens", number(line.tokens)],
        ["latency", number(told.latency_ms) && `${number(told.latency_ms)} ms`],
        ["drafts accepted", number(told.accept_rate) && `${numberText(told.accept_rate * 100)}%`],
        ["truncated", line.truncated || line.finish_reason === "length" ? "at the token limit" : undefined],
    ]);
}

/* A line of the data, of which the held-out ones are below 0. */
const lineText = line => line < 0 ? `held-out #${-line}` : `#${line}`;

/* Lines of a step's file; null where one cannot be read. */
function linesOf(text) {
    return text.split("\n").filter(line => line).map(line => {
        try {
            return JSON.parse(line);
        } catch {
            return null;
        }
    });
}

/* ---- the browser ---- */

/* [column, 1: the least first, -1: the largest] */
const SORTS = {
    "newest step": ["step", -1], "oldest step": ["step", 1], "highest reward": ["reward", -1],
    "lowest reward": ["reward", 1], "most tokens": ["tokens", -1],
};

/* Places by their value, those of equal values in their order, those of none last. A hundred
 * thousand are sorted as whole numbers of 64 bits, the value's above the place's: a float's bits
 * rise with it once those of negative ones are turned round. */
function sorted(places, values, sign) {
    const keys = new BigUint64Array(places.length), halves = new Uint32Array(keys.buffer);
    const value = new Float32Array(1), bits = new Uint32Array(value.buffer);
    places.forEach((place, i) => {
        value[0] = sign * values[place];
        halves[2 * i] = place;
        halves[2 * i + 1] = Number.isNaN(value[0]) ? 0xffffffff
            : bits[0] & 0x80000000 ? ~bits[0] : bits[0] | 0x80000000;
    });
    keys.sort();
    return Uint32Array.from(places, (_, i) => halves[2 * i]);
}

class Rollouts {
    constructor(place, source) {
        this.place = place;
        this.source = source;
        this.runs = [];
        this.page = 0;
        this.measure = "logprob";
        this.together = false; // the chosen sample's group is shown whole
        this.text = {}; // of the last step that was fetched
        this.histograms = [["reward", new Histogram("Rewards", "% of samples", false)],
                           ["tokens", new Histogram("Tokens", "% of samples", true)]];
        const field = (name, type = "number") =>
            make("input", {type, name, step: "any", placeholder: {from: "first", to: "last"}[name] || ""});
        this.fields = {
            run: make("select"), from: field("from"), to: field("to"), least: field("least"),
            most: field("most"), prompt: field("prompt", "search"),
            of: make("select", {}, ...["all", "training", "held-out"].map(name => make("option", {}, name))),
            sort: make("select", {}, ...Object.keys(SORTS).map(name => make("option", {}, name))),
        };
        const f = this.fields;
        f.prompt.placeholder = "words, or #line of the data";
        this.runLabel = make("label", {}, "run ", f.run);
        this.filters = make("div", {className: "filters"}, this.runLabel, make("label", {}, "prompts ", f.of),
            make("label", {}, "steps ", f.from, " to ", f.to),
            make("label", {}, "rewards ", f.least, " to ", f.most),
            make("label", {}, "prompt ", f.prompt), make("label", {}, "order ", f.sort));
        this.filters.addEventListener("input", () => { this.page = 0; this.find(); });
        this.head = make("p", {className: "dim"});
        this.rows = make("tbody");
        const heading = (text, className = "number") => make("th", {className}, text);
        this.table = make("table", {className: "list"},
            make("thead", {}, make("tr", {}, heading("step"), heading("prompt", "prompt"),
                heading("sample"), heading("reward"), heading("adv."), heading("tokens"))), this.rows);
        this.pager = make("div", {className: "pager"});
        this.detail = make("div", {className: "sample"});
        this.browser = make("div", {className: "browser"}, make("div", {}, this.table, this.pager), this.detail);
        place.append(make("h2", {}, "Rollouts"), this.filters, this.head,
            make("div", {className: "charts histograms"}, ...this.histograms.map(([, {element}]) => element)),
            this.browser);
    }
    get run() {
        return this.runs.find(run => String(run.number) === this.fields.run.value) || this.runs[0];
    }

    /* New data, or other runs. */
    update(runs) {
        this.runs = runs.filter(run => run.nSamples > 0);
        this.place.hidden = !this.runs.length;
        if (this.place.hidden) return;
        const chosen = this.run.number; // stays, if it is still there
        this.fields.run.replaceChildren(...this.runs.map(run =>
            make("option", {value: run.number, selected: run.number === chosen}, run.name)));
        this.runLabel.hidden = this.runs.length < 2;
        this.find();
    }

    /* Lists the samples that the filters leave, sorted. */
    find() {
        const run = this.run, f = this.fields, s = {};
        for (const key in run.samples) s[key] = run.samples[key].all;
        const bound = (field, otherwise) => field.value === "" ? otherwise : Number(field.value);
        const from = bound(f.from, -Infinity), to = bound(f.to, Infinity);
        const least = bound(f.least, NaN), most = bound(f.most, NaN);
        const prompts = this.promptsNamed(f.prompt.value.trim().toLowerCase());
        const found = [], of = f.of.value;
        for (let i = 0; i < s.step.length; i++)
            if (s.step[i] >= from && s.step[i] <= to && !(s.reward[i] < least) && !(s.reward[i] > most) &&
                !(Number.isNaN(s.reward[i]) && !(Number.isNaN(least) && Number.isNaN(most))) &&
                (of === "all" || s.line[i] < 0 === (of === "held-out")) &&
                (!prompts || prompts.has(s.line[i])))
                found.push(i);
        const [column, sign] = SORTS[f.sort.value];
        this.samples = s;
        this.found = sorted(found, s[column], sign);
        this.count(found);
        this.list();
    }
    /* Of the samples that are left, those of the first and of the last tenth of the steps; held-out ones
     * where there are no others. */
    count(all) {
        const training = all.filter(i => this.samples.line[i] >= 0), found = training.length ? training : all;
        const steps = this.samples.step, first = steps[found[0]], last = steps[found[found.length - 1]];
        const tenth = Math.floor((last - first) / 10);
        const groups = first === last ? [[first, last, "s0"]]
            : [[first, first + tenth, "dim"], [last - tenth, last, "s0"]];
        for (const [column, histogram] of this.histograms)
            histogram.set(groups.map(([from, to, color]) => ({
                color, name: from === to ? `step ${from}` : `steps ${from} to ${to}`,
                values: found.filter(i => steps[i] >= from && steps[i] <= to).map(i => this.samples[column][i])
                    .filter(value => column === "tokens" ? value >= 0 : Number.isFinite(value)),
            })));
    }
    /* Lines of the data; null: all. */
    promptsNamed(words) {
        if (!words) return null;
        const named = words.match(/^(held-out )?#(\d+)$/);
        if (named) return new Set([named[1] ? -Number(named[2]) : Number(named[2])]);
        return new Set([...this.run.prompts].filter(([, text]) => text.toLowerCase().includes(words))
            .map(([line]) => line));
    }

    list() {
        const {samples, found, run} = this;
        const pages = Math.max(1, Math.ceil(found.length / PAGE_ROWS));
        this.page = Math.min(this.page, pages - 1);
        this.head.textContent = `${found.length.toLocaleString("en-US")} of ` +
            `${run.nSamples.toLocaleString("en-US")} samples` + (run.behind ? ", more are being read" : "");
        const cell = (text, className = "") => make("td", {className}, text);
        const rows = Array.from(found.subarray(this.page * PAGE_ROWS, (this.page + 1) * PAGE_ROWS));
        this.rows.replaceChildren(...rows.map(i => {
            const prompt = run.prompts.get(samples.line[i]) || "";
            const row = make("tr", {tabIndex: 0}, cell(samples.step[i]),
                cell(`${lineText(samples.line[i])} ${visible(prompt).replace(/\s+/g, " ")}`, "prompt"),
                cell(samples.number[i]), cell(numberText(samples.reward[i])),
                cell(numberText(samples.advantage[i])),
                cell(samples.tokens[i] >= 0 ? samples.tokens[i] + (samples.truncated[i] ? " …" : "") : "-"));
            row.setAttribute("aria-selected", this.shown === i && this.shownRun === run);
            row.addEventListener("click", () => this.show(run, i));
            row.addEventListener("keydown", event => { if (event.key === "Enter") this.show(run, i); });
            return row;
        }));
        const turn = (text, by) => {
            const none = this.page + by < 0 || this.page + by >= pages;
            const button = make("button", {type: "button", disabled: none}, text);
            button.addEventListener("click", () => { this.page += by; this.list(); });
            return button;
        };
        this.pager.replaceChildren(turn("◀", -1), `${this.page + 1} of ${pages}`, turn("▶", 1));
        if (this.shown !== undefined) return;
        const first = found.find(i => this.source.has(run, samples.step[i], samples.line[i] < 0)); // whose text is there
        if (first !== undefined) this.show(run, first);
    }

    async show(run, i) {
        const step = run.samples.step.all[i], row = run.samples.row.all[i];
        const heldOut = run.samples.line.all[i] < 0;
        const what = `${run.number} ${run.generation} ${step} ${heldOut}`;
        this.shown = i;
        this.shownRun = run;
        try {
            if (this.text.what !== what)
                this.text = {what, lines: linesOf(await this.source.rollouts(run, step, heldOut))};
            const line = this.text.lines[row];
            if (this.shown !== i || this.shownRun !== run) return; // another was chosen meanwhile
            if (!line) throw new Error(this.source.missing);
            this.draw(run, i, line);
        } catch (error) {
            this.detail.replaceChildren(make("p", {}, `Step ${step}: ${error.message}.`));
        }
        if (this.run === run) this.list(); // the row is marked
    }

    draw(run, i, line) {
        const step = run.samples.step.all, number = run.samples.number.all, of = run.samples.line.all;
        let first = run.samples.row.all[i]; // of the group, which has the prompt
        while (first > 0 && this.text.lines[first] && this.text.lines[first].sample > 0) first--;
        const neighbour = (text, by) => {
            const k = i + by, there = step[k] === step[i] && of[k] === of[i] &&
                number[k] === number[i] + by;
            const button = make("button", {type: "button", disabled: !there}, text);
            button.addEventListener("click", () => this.show(run, k));
            return button;
        };
        const same = make("button", {type: "button"}, "this prompt in all steps");
        same.addEventListener("click", () => {
            this.fields.prompt.value = lineText(of[i]);
            this.page = 0;
            this.find();
        });
        const whole = make("button", {type: "button"}, this.together ? "this sample alone" : "the group side by side");
        whole.addEventListener("click", () => {
            this.together = !this.together;
            this.draw(run, i, line);
        });
        const answer = typeof line.answer === "string"
            ? [make("p", {}, "answer: ", make("code", {}, visible(line.answer)))] : [];
        this.detail.replaceChildren(
            make("h3", {}, `Step ${step[i]}, prompt ${lineText(of[i])}, sample ${line.sample} `,
                 make("span", {}, run.name)),
            make("div", {className: "pager"}, neighbour("◀", -1), "sample of the group",
                 neighbour("▶", 1), whole, same),
            ...promptElements(this.text.lines[first] || {}), ...answer,
            ...this.together ? [this.measures(run, i, line), this.group(run, i, first)]
                : [sampleFacts(line), this.measures(run, i, line), completionElement(line, this.usedMeasure(line))],
            make("p", {className: "dim"}, absent(line)));
        this.browser.classList.toggle("together", this.together);
    }
    /* All samples of the group of sample i, whose first one is in that row of its step. */
    group(run, i, first) {
        const lines = this.text.lines, chosen = run.samples.row.all[i], cards = [];
        for (let row = first; lines[row] && (row === first || lines[row].sample > 0); row++) {
            const line = lines[row], card = make("div", {className: "card", tabIndex: 0},
                make("h4", {}, `sample ${line.sample}`), sampleFacts(line),
                completionElement(line, this.usedMeasure(line)));
            card.setAttribute("aria-current", row === chosen);
            card.addEventListener("click", () => this.show(run, i + row - chosen));
            cards.push(card);
        }
        return make("div", {className: "group"}, ...cards);
    }
    usedMeasure(line) {
        const measure = MEASURES[this.measure];
        return measure && measure.there(line) ? measure : null;
    }
    /* What the tokens are coloured by, and what the colours say. */
    measures(run, i, line) {
        const there = Object.entries(MEASURES).filter(([, measure]) => measure.there(line));
        const drafts = line.accepted ? [make("span", {className: "draft"}, "accepted draft")] : [];
        const foreign = line.model_mask ? [make("span", {className: "foreign"}, "not the policy's")] : [];
        if (!there.length) return make("div", {className: "pager"}, ...drafts, ...foreign);
        const select = make("select", {}, make("option", {value: ""}, "no colour"),
            ...there.map(([name, {title}]) => make("option", {value: name}, title)));
        select.value = this.measure in MEASURES && MEASURES[this.measure].there(line) ? this.measure : "";
        select.addEventListener("change", () => {
            this.measure = select.value;
            this.draw(run, i, line);
        });
        const used = this.usedMeasure(line), scale = make("span", {className: "scale", hidden: !used});
        if (used) {
            const bar = make("i");
            const below = used === MEASURES.weight ? `${shade(-1)}, transparent` : "transparent";
            bar.style.background = `linear-gradient(to right, ${below}, ${shade(1)})`;
            scale.append(used.from, bar, used.to);
        }
        return make("div", {className: "pager"}, select, scale, ...drafts, ...foreign);
    }
}
