/* charts.js: the table of charts. A chart names the keys it shows by patterns; a key belongs to the
 * first chart of the table that names it, and what no chart names gets one of its own at the end, so
 * that a new metric is on the page before anybody thinks of it here. */

/* [title, unit, patterns]: '*' stands for any text, KEY=ERRORS for a key with its error bars; title
 * null: each key has a chart of its own, named by it. A string alone begins a section. */
const CHARTS = [
    "Reward",
    ["Reward", "mean over the step's samples",
     "reward eval/reward=eval/reward_standard_error rewards/task rewards/cost"],
    ["Terms of the task's reward", "mean, unweighted", "rewards/*/mean"],
    ["Accuracy", "%", "accuracy eval/accuracy=eval/standard_error"],
    ["Spread of rewards", "standard deviation", "reward_std reward_group_std rewards/*/std"],
    ["What inference adds to the reward", "weighted mean", "rewards/cost/*"],
    ["Groups whose rewards are all the same", "%", "frac_reward_zero_std"],
    ["Advantages", "", "advantage_mean advantage_std"],
    "Curriculum",
    ["Reward of an example", "moving averages, and the buckets' boundaries",
     "curriculum/reward_* curriculum/boundary_*"],
    ["Samples of a prompt", "", "curriculum/rollouts curriculum/bucket_*/rollouts"],
    ["Mean reward of a bucket", "", "curriculum/bucket_*/mean"],
    ["Standard deviation in a bucket", "", "curriculum/bucket_*/std"],
    ["Examples in a bucket", "", "curriculum/bucket_*/count"],
    ["Share of a bucket", "%", "curriculum/bucket_*/share"],
    ["Spread of a bucket", "", "curriculum/bucket_*/spread"],
    ["Balance of a bucket", "", "curriculum/bucket_*/balance"],
    [null, "", "curriculum/*"],
    "Inference",
    ["Acceptance rate of drafts", "%",
     "spec_decode/acceptance_rate eval/acceptance_rate inference/accept_rate"],
    ["Acceptance rate by position", "%", "spec_decode/acceptance_rate_pos_*"],
    ["Acceptance length", "tokens a verification",
     "spec_decode/acceptance_length eval/acceptance_length"],
    ["Drafts", "a step", "spec_decode/num_*"],
    ["Draft model's loss", "nats", "draft_loss"],
    ["Draft model's overlap with the policy", "%", "draft_overlap"],
    ["Latency of a sample", "ms", "inference/latency_ms"],
    ["Tokens per sample", "tokens",
     "completions/*_length eval/mean_length inference/generated_tokens"],
    ["Samples cut off at the token limit", "%", "completions/clipped_ratio"],
    ["KV cache of a sample", "MB", "inference/kv_memory_mb"],
    ["Prompt tokens found in the cache", "%", "inference/cache_reuse_ratio"],
    ["Samples that nothing was drafted for", "%", "inference/undrafted"],
    [null, "", "inference/* latency_model/*"],
    "Update",
    ["Loss", "", "loss policy_loss eval/loss"],
    ["Learnt tokens that were the likeliest", "%", "mean_token_accuracy eval/mean_token_accuracy"],
    ["Pairs whose chosen completion gained more", "%", "rewards/accuracies eval/rewards/accuracies"],
    ["Rewards of pairs", "", "rewards/chosen rewards/rejected rewards/margins eval/rewards/*"],
    ["Log-probability of a completion", "nats", "logps/* eval/logps/*"],
    ["KL divergence from the starting model", "nats", "kl kl_reward/kl"],
    ["Entropy", "nats", "entropy"],
    ["Tokens whose ratio was clipped", "%", "clip_ratio/* cispo_clip_ratio"],
    ["Importance ratio", "", "importance_ratio/*"],
    ["Tokens whose importance sampling weight was truncated", "%",
     "sampling/importance_sampling_ratio/cut"],
    ["Importance sampling weight", "ratio", "sampling/importance_sampling_ratio/*"],
    ["Gradient norm", "", "grad_norm draft_grad_norm"],
    ["Learning rate", "", "learning_rate draft_learning_rate"],
    ["Train-inference mismatch", "nats", "sampler_mismatch/*"],
    ["Staleness of samples", "updates", "rollout/staleness_mean rollout/staleness_max"],
    ["Groups by staleness in updates", "groups", "rollout/staleness_groups/*"],
    ["Groups generated again", "%", "rollout/generated_again"],
    "Time",
    ["spans", "s", "spans/*"],
    ["Time of a step", "s", "step_s rollout_s train_s"],
    ["Time that each waited for the other", "s", "rollout/*_wait_s"],
    ["Pause per publish", "ms", "publish/*_ms"],
    ["Generated tokens", "tokens/s", "tokens_per_s"],
    "Other",
    [null, "", "*"],
];
const MOST_LINES = 16; // of a chart; another of its title follows where there are more

function matcher(pattern) {
    const parts = pattern.split("*").map(part => part.replace(/[.+?^${}()|[\]\\]/g, "\\$&"));
    return new RegExp(`^${parts.join(".*")}$`);
}

/* The lines of one entry of the table; takes its keys, and their errors', out of `left`. */
function takeLines(patterns, left) {
    const lines = [];
    for (const pattern of patterns.split(" ")) {
        const [name, error] = pattern.split("="), wanted = matcher(name);
        for (const key of [...left]) {
            if (!left.has(key) || !wanted.test(key)) continue;
            left.delete(key);
            if (error) left.delete(error);
            lines.push({key, error});
        }
    }
    return lines;
}

function chartsOf([title, unit, patterns], left) {
    const lines = takeLines(patterns, left), charts = [];
    if (!lines.length) return [];
    if (title === "spans") return [new TimeChart(lines.map(({key}) => key))];
    const most = title === null ? 1 : MOST_LINES;
    for (let i = 0; i < lines.length; i += most) {
        const some = lines.slice(i, i + most);
        charts.push(new LineChart(title || some[0].key, unit, some));
    }
    return charts;
}

/* All charts of the runs' keys, by section: of the runs, since one that is hidden may be shown. */
class Charts {
    constructor(place) {
        this.place = place;
        this.keys = "";
        this.words = [];
        this.figures = [];
    }
    /* Makes those that are new, or all where keys came, and draws all anew. */
    update(runs) {
        const keys = new Set(runs.flatMap(run => [...run.series.keys()]));
        if ([...keys].join() !== this.keys) {
            this.keys = [...keys].join();
            this.build(keys);
        }
        this.arrange();
        this.figures.forEach(figure => figure.touch());
    }
    build(left) {
        this.figures.forEach(figure => figure.remove());
        this.figures = [];
        this.place.replaceChildren();
        let section = null, grid = null, list = null;
        for (const entry of CHARTS) {
            if (typeof entry === "string") {
                grid = make("div", {className: "charts"});
                list = make("ul", {className: "constant"});
                section = make("section", {}, make("h2", {}, entry), grid, list);
                continue;
            }
            for (const chart of chartsOf(entry, left)) {
                if (!section.isConnected) this.place.append(section);
                grid.append(chart.element);
                list.append(chart.line);
                this.figures.push(chart);
            }
        }
    }
    /* Shows those whose title or keys hold one of the words; none: all. */
    filter(words) {
        this.words = words;
        this.arrange();
    }
    /* One whose values never change is a line in its section's list. */
    arrange() {
        for (const figure of this.figures) {
            const text = `${figure.title} ${figure.keys.join(" ")}`.toLowerCase();
            const out = this.words.length > 0 && !this.words.some(word => text.includes(word));
            const folded = figure.constant;
            if (folded) figure.putConstant();
            figure.element.hidden = out || folded;
            figure.line.hidden = out || !folded;
        }
        for (const section of this.place.children)
            section.hidden = [...section.querySelectorAll("figure, .constant > li")].every(e => e.hidden);
    }
}
