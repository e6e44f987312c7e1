#!/usr/bin/env python3
# heads-layer.py MODEL DATA.jsonl TOKENIZER SECONDS [LEARNING_RATE]: gives MODEL, a folder of Qwen3.5's text model, a
# layer that predicts further tokens (multi-token prediction), by torch, on a GPU with triton. It begins as the model's
# last layer, which has to be one of full attention, and learns to answer as the model does. A third of the time goes to
# the model's hidden states behind prompts and completions, which are kept; the rest to passes over them with the layer
# alone, which drafts as a server does (docs/use/speculative.md): a draft reads what the one before it gave, and attends
# to the layer's keys of what is known, then to those of the drafts before it. Writes mtp.safetensors and an index into
# MODEL.
import json, os, random, sys, time

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file
from tokenizers import Tokenizer

DEPTHS = 4
ROWS = 4096  # of the vocabulary, the first, among which it answers: all tokens of the data, and some that have none
GROUP = 32  # sequences of a step
HELD_OUT = 2 * GROUP  # lines, the first
folder, data, tokenizer = sys.argv[1:4]
seconds = float(sys.argv[4])
rate = float(sys.argv[5]) if len(sys.argv) > 5 else 5e-4
dev = "cuda" if torch.cuda.is_available() else "cpu"
dt = torch.bfloat16 if dev == "cuda" else torch.float32
# Of one step at most: what it made of weights is kept until its end.
in_bf16 = torch.autocast(dev, dt, enabled=dev == "cuda")

c = json.load(open(folder + "/config.json"))
D, eps, rope = c["head_dim"], c["rms_norm_eps"], c["rope_parameters"]
weights = {}  # by layer, then by name
for file in sorted(os.listdir(folder)):
    if file.endswith(".safetensors") and file != "mtp.safetensors":
        with safe_open(folder + "/" + file, "pt", device=dev) as tensors:
            for name in tensors.keys():
                parts = name.removeprefix("model.").split(".")
                at, own = (int(parts[1]), parts[2:]) if parts[0] == "layers" else (-1, parts)
                weights.setdefault(at, {})[".".join(own)] = tensors.get_tensor(name).to(dt)
embeddings, last_norm = weights[-1]["embed_tokens.weight"], weights[-1]["norm.weight"]
head = weights[-1].get("lm_head.weight", embeddings)[:ROWS]
texts = Tokenizer.from_file(tokenizer + "/tokenizer.json")
if c["layer_types"][-1] != "full_attention":
    sys.exit(f"{folder}: its last layer is {c['layer_types'][-1]}; the layer begins as one of full_attention")
if texts.get_vocab_size() > ROWS:
    sys.exit(f"{tokenizer}: {texts.get_vocab_size()} tokens, and the layer learns the first {ROWS}; raise ROWS")


# ---- the model -------------------------------------------------------------------------------------


def norm(x, w):
    return F.rms_norm(x.float(), x.shape[-1:], 1 + w.float(), eps)


def turn(x, first):  # positions from `first` on
    half = int(D * rope.get("partial_rotary_factor", 1)) // 2
    rates = rope["rope_theta"] ** (torch.arange(half, device=dev) / -half)
    angles = (torch.arange(x.shape[1], device=dev) + first)[:, None, None] * rates
    a, b, rest = x.split([half, half, D - 2 * half], -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1).to(dt)


# Queries, keys and values, (sequences, heads, positions, D), and what gates the output.
def project(w, x, first):
    of = lambda name, n=D: F.linear(x, w[f"self_attn.{name}_proj.weight"]).unflatten(-1, (-1, n))
    q, gate = of("q", 2 * D).chunk(2, -1)
    q = turn(norm(q, w["self_attn.q_norm.weight"]), first)
    k = turn(norm(of("k"), w["self_attn.k_norm.weight"]), first)
    each = q.shape[2] // k.shape[2]
    k, v = [a.repeat_interleave(each, 2).transpose(1, 2) for a in (k, of("v"))]
    return q.transpose(1, 2), k, v, gate.flatten(2).sigmoid()


def attention(w, x):
    q, k, v, gate = project(w, x, 0)
    x = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return F.linear(x.transpose(1, 2).flatten(2) * gate, w["self_attn.o_proj.weight"])


def decoder_layer(w, x, mix):
    x = x + mix(w, norm(x, w["input_layernorm.weight"]))
    y = norm(x, w["post_attention_layernorm.weight"])
    gate, up = F.linear(y, w["mlp.gate_proj.weight"]), F.linear(y, w["mlp.up_proj.weight"])
    return x + F.linear(F.silu(gate) * up, w["mlp.down_proj.weight"])


# The gated delta rule, row after row: q, k (sequences, positions, heads, key_dim), v likewise, decay and beta
# (sequences, positions, heads), all f32.
def delta_rule(q, k, v, decay, beta):
    S, out = torch.zeros(*k[:, 0].shape, v.shape[-1], device=dev), []
    for t in range(q.shape[1]):
        S = S * decay[:, t, :, None, None]
        u = beta[:, t, :, None] * (v[:, t] - (S * k[:, t, ..., None]).sum(-2))
        S = S + k[:, t, ..., None] * u[..., None, :]
        out.append((S * q[:, t, ..., None]).sum(-2))
    return torch.stack(out, 1)


if dev == "cuda" or os.environ.get("TRITON_INTERPRET"):
    import triton
    import triton.language as tl

    @triton.jit
    def delta_kernel(q, k, v, decay, beta, out, n, HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
                     EACH: tl.constexpr):
        row = tl.program_id(0) // HEADS * n * HEADS + tl.program_id(0) % HEADS
        key, column = tl.arange(0, K), tl.program_id(1) * EACH + tl.arange(0, EACH)
        S = tl.zeros([EACH, K], tl.float32)
        for _ in range(n):
            k_row = tl.load(k + row * K + key)
            S *= tl.load(decay + row)
            u = tl.load(beta + row) * (tl.load(v + row * V + column) - tl.sum(S * k_row[None, :], 1))
            S += u[:, None] * k_row[None, :]
            tl.store(out + row * V + column, tl.sum(S * tl.load(q + row * K + key)[None, :], 1))
            row += HEADS

    def delta_rule(q, k, v, decay, beta):
        sequences, n, heads, size = v.shape
        out, each = torch.empty_like(v), min(size, 16)
        q, k, v, decay, beta = [x.contiguous() for x in (q, k, v, decay, beta)]
        grid = (sequences * heads, size // each)
        delta_kernel[grid](q, k, v, decay, beta, out, n, heads, k.shape[-1], size, each, num_warps=1)
        return out


def linear_attention(w, x):
    n_keys, n_values = c["linear_num_key_heads"], c["linear_num_value_heads"]
    key_dim, size = c["linear_key_head_dim"], c["linear_value_head_dim"]
    of = lambda name: F.linear(x, w[f"linear_attn.in_proj_{name}.weight"]).float()
    taps = w["linear_attn.conv1d.weight"].float().squeeze(1)
    padded, n = F.pad(of("qkv"), (0, 0, taps.shape[1] - 1, 0)), x.shape[1]
    qkv = F.silu(sum(padded[:, i : i + n] * taps[:, i] for i in range(taps.shape[1])))
    q, k, v = qkv.split([n_keys * key_dim, n_keys * key_dim, n_values * size], -1)
    q, k = [a.unflatten(-1, (n_keys, key_dim)) for a in (q, k)]
    q, k = [a * torch.rsqrt(a.pow(2).sum(-1, keepdim=True) + 1e-6) for a in (q, k)]
    q, k = [a.repeat_interleave(n_values // n_keys, 2) for a in (q * key_dim**-0.5, k)]
    steps = F.softplus(of("a") + w["linear_attn.dt_bias"].float())
    decay = (-w["linear_attn.A_log"].float().exp() * steps).exp()
    y = delta_rule(q, k, v.unflatten(-1, (n_values, size)), decay, of("b").sigmoid())
    y = F.rms_norm(y, (size,), w["linear_attn.norm.weight"].float(), eps)
    y = y * F.silu(of("z").unflatten(-1, (n_values, size)))
    return F.linear(y.flatten(2).to(dt), w["linear_attn.out_proj.weight"])


# Behind the last norm.
@in_bf16
def states_of(ids):
    x = F.embedding(ids, embeddings).float()
    for i, kind in enumerate(c["layer_types"]):
        x = decoder_layer(weights[i], x, attention if kind == "full_attention" else linear_attention)
    return norm(x, last_norm).to(dt)


# ---- its layer -------------------------------------------------------------------------------------

hidden = c["hidden_size"]
layer = {name: x.float().clone() for name, x in weights[c["num_hidden_layers"] - 1].items()}
proj = torch.randn(hidden, 2 * hidden, device=dev) * 0.01
proj[:, hidden:] += torch.eye(hidden, device=dev)  # the model's hidden state as it is, and little of the embedding
before = [torch.zeros(hidden, device=dev) for _ in range(2)]  # norms of embedding and hidden state
behind = last_norm.float().clone()
params = [*layer.values(), proj, *before, behind]
for p in params:
    p.requires_grad_(True)


# The divergence from the model, summed over depths, and the overlap at each: the share of drafts that rejection
# sampling accepts, the sum of min(p, q).
@in_bf16
def divergence(ids, wanted, states):
    embedded, y, past, n = F.embedding(ids, embeddings), states, [], ids.shape[1]
    loss, overlaps = 0, []

    def attend(w, x):
        q, k, v, gate = project(w, x, len(past))
        past.append((k, v))
        m = x.shape[1]
        at = [k[:, :, :m] for k, _ in past], [v[:, :, :m] for _, v in past]
        known = (q @ at[0][0].transpose(-1, -2)).float()
        known = known.masked_fill(torch.ones(m, m, dtype=torch.bool, device=dev).triu(1), float("-inf"))
        drafts = [(q * k).sum(-1, keepdim=True).float() for k in at[0][1:]]
        p = F.softmax(torch.cat([known, *drafts], -1) * D**-0.5, -1).to(v)
        x = p[..., :m] @ at[1][0]
        for i, v in enumerate(at[1][1:]):
            x = x + p[..., m + i, None] * v
        return F.linear(x.transpose(1, 2).flatten(2) * gate, w["self_attn.o_proj.weight"])

    for depth in range(1, DEPTHS + 1):
        m = n - depth - 1  # row p reads token p + depth, and predicts the one behind that
        x = torch.cat([norm(embedded[:, depth : depth + m], before[0]), norm(y[:, :m], before[1])], -1)
        y = norm(decoder_layer(layer, F.linear(x, proj), attend), behind)
        row, column = wanted[:, depth + 1 :].nonzero(as_tuple=True)
        with torch.no_grad():
            p = F.softmax(F.linear(states[row, column + depth], head).float(), -1)
        q = F.log_softmax(F.linear(y[row, column], head).float(), -1)
        overlap = torch.minimum(p, q.exp()).sum(-1).mean()
        loss = loss - (p * q).sum(-1).mean() - overlap
        overlaps.append(overlap.detach())
    return loss, torch.stack(overlaps)


# ---- the data --------------------------------------------------------------------------------------


def groups_of(lines):
    of = lambda key: texts.encode_batch([json.loads(line)[key] for line in lines], add_special_tokens=False)
    pairs = [(a.ids, b.ids + [c["eos_token_id"]]) for a, b in zip(of("prompt"), of("completion"))]
    pairs.sort(key=lambda pair: len(pair[0] + pair[1]))
    for first in range(0, len(pairs), GROUP):
        group = pairs[first : first + GROUP]
        shape = len(group), max(len(a + b) for a, b in group)
        ids, wanted = torch.full(shape, c["eos_token_id"]), torch.zeros(shape, dtype=torch.bool)
        for i, (a, b) in enumerate(group):
            ids[i, : len(a + b)] = torch.tensor(a + b)
            wanted[i, len(a) : len(a + b)] = True
        ids, wanted = ids.to(dev), wanted.to(dev)
        with torch.no_grad():
            yield ids, wanted, states_of(ids)


def overlaps_of(groups):
    with torch.no_grad():
        overlaps = torch.stack([divergence(*group)[1] for group in groups]).mean(0).tolist()
    return " ".join(f"{overlap:.3f}" for overlap in overlaps)


groups, done, spent = [], 0, 0
optimizer = torch.optim.AdamW(params, lr=rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
with open(data) as file:
    held_out = list(groups_of([next(file) for _ in range(HELD_OUT)]))
    start = time.time()
    while time.time() - start < seconds / 3:
        for group in groups_of([line for _, line in zip(range(16 * GROUP), file)]):
            groups.append(group)
            if time.time() - start >= seconds / 3:
                break
    tokens = sum(int(wanted.sum()) for _, wanted, _ in groups)
    began = time.time()
    print(f"{began - start:.1f} s: states of {len(groups) * GROUP} examples, {tokens} tokens to predict", flush=True)
    while spent < 1:
        if done % len(groups) == 0:
            random.Random(done).shuffle(groups)
        if done % 100 == 0:
            overlaps = overlaps_of(held_out)
            print(f"{time.time() - start:.1f} s, step {done}: held-out overlap by depth {overlaps}", flush=True)
        for options in optimizer.param_groups:
            options["lr"] = rate * min(1, (done + 1) / 20) * (1 - spent)
        loss, _ = divergence(*groups[done % len(groups)])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()
        done += 1
        spent = (time.time() - began) / (start + seconds - began)
    print(f"{done} steps in {time.time() - start:.1f} s: held-out overlap by depth {overlaps_of(held_out)}")

tensors = {"mtp.layers.0." + name: x for name, x in layer.items()}
tensors |= {"mtp.fc.weight": proj, "mtp.norm.weight": behind, "mtp.pre_fc_norm_embedding.weight": before[0],
            "mtp.pre_fc_norm_hidden.weight": before[1]}
tensors = {name: x.detach().to(dt).contiguous().cpu() for name, x in tensors.items()}
save_file(tensors, folder + "/mtp.safetensors", metadata={"format": "pt"})
where = {}
for file in sorted(os.listdir(folder)):
    if file.endswith(".safetensors"):
        with safe_open(folder + "/" + file, "pt") as tensors:
            where.update({name: file for name in tensors.keys()})
json.dump({"metadata": {}, "weight_map": where}, open(folder + "/model.safetensors.index.json", "w"), indent=1)
config = json.load(open(folder + "/config.json"))
config["mtp_num_hidden_layers"] = 1
json.dump(config, open(folder + "/config.json", "w"), indent=2)
