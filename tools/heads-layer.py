#!/usr/bin/env python3
# heads-layer.py MODEL DATA.jsonl TOKENIZER STEPS SECONDS [LEARNING_RATE [SEQUENCES]]: gives MODEL, a folder of Qwen3.5's text
# model, a layer that predicts further tokens (multi-token prediction), by torch and transformers. It begins as the
# model's last layer, which has to be one of full attention, and learns to answer as the model does, on prompts and
# completions, at three depths, each of which reads what the one before gave (docs/use/speculative.md has the formula).
# Ends after STEPS or SECONDS. Writes mtp.safetensors and an index into MODEL.
import copy, json, os, sys, time

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

DEPTHS = 3
HELD_OUT = 64  # lines, the first
MAX_ROWS = 4096  # of a depth, whose vocabulary-wide numbers exist at one time
folder, data, tokenizer = sys.argv[1:4]
steps, seconds = int(sys.argv[4]), float(sys.argv[5])
rate = float(sys.argv[6]) if len(sys.argv) > 6 else 5e-4
sequences = int(sys.argv[7]) if len(sys.argv) > 7 else 32
dev = "cuda" if torch.cuda.is_available() else "cpu"
dt = torch.bfloat16 if dev == "cuda" else torch.float32

model = AutoModelForCausalLM.from_pretrained(folder, dtype=dt, attn_implementation="sdpa").to(dev).eval()
for p in model.parameters():
    p.requires_grad_(False)
c, head = model.config, model.lm_head.weight
hidden = c.hidden_size
layer = copy.deepcopy(model.model.layers[c.num_hidden_layers - 1]).float()
proj = torch.nn.Linear(2 * hidden, hidden, bias=False, device=dev)
with torch.no_grad():  # the model's hidden state as it is, and little of the embedding
    proj.weight.normal_(0, 0.01)
    proj.weight[:, hidden:] += torch.eye(hidden, device=dev)
before = [torch.nn.Parameter(torch.zeros(hidden, device=dev)) for _ in range(2)]  # norms of embedding and hidden state
behind = torch.nn.Parameter(model.model.norm.weight.detach().float().clone())
params = [*layer.parameters(), *proj.parameters(), *before, behind]
for p in params:
    p.requires_grad_(True)
optimizer = torch.optim.AdamW(params, lr=rate, betas=(0.9, 0.95), weight_decay=0.0)

encode = Tokenizer.from_file(tokenizer + "/tokenizer.json").encode
with open(data) as file:
    lines = [json.loads(line) for _, line in zip(range(HELD_OUT + steps * sequences), file)]


def ids_of(text):
    return encode(text, add_special_tokens=False).ids


def norm(x, w):
    x = x.float()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + c.rms_norm_eps) * (1 + w)


def packed(chunk):
    pairs = [(ids_of(line["prompt"]), ids_of(line["completion"]) + [c.eos_token_id]) for line in chunk]
    n = max(len(a) + len(b) for a, b in pairs)
    ids, wanted = torch.full((len(pairs), n), c.eos_token_id), torch.zeros((len(pairs), n), dtype=torch.bool)
    for i, (a, b) in enumerate(pairs):
        ids[i, : len(a) + len(b)] = torch.tensor(a + b)
        wanted[i, len(a) : len(a) + len(b)] = True
    return ids.to(dev), wanted.to(dev)


# The divergence from the model, summed over depths, and at each depth the share of first choices by rejection
# sampling: the sum of min(p, q).
def divergence(ids, wanted):
    with torch.no_grad():
        states = model.model(ids).last_hidden_state
    embedded, n = model.model.embed_tokens(ids), ids.shape[1]
    positions = torch.arange(n, device=dev).expand(len(ids), n)
    y, loss, overlaps = states, 0, []
    for depth in range(1, DEPTHS + 1):
        m = n - depth - 1  # row p reads token p + depth, and predicts the one behind that
        x = torch.cat([norm(embedded[:, depth : depth + m], before[0]), norm(y[:, :m], before[1])], -1)
        with torch.autocast(dev, dt, enabled=dev == "cuda"):
            x = proj(x)
            at = (positions[:, :m] + depth - 1)[None].expand(3, -1, -1)
            x = layer(x, position_embeddings=model.model.rotary_emb(x, at), attention_mask=None)
        y = norm(x[0] if isinstance(x, tuple) else x, behind)
        row, column = wanted[:, depth + 1 : depth + 1 + m].nonzero(as_tuple=True)
        some = torch.randperm(len(row), device=dev)[:MAX_ROWS]
        row, column = row[some], column[some]
        with torch.no_grad():
            p = F.softmax(F.linear(states[row, column + depth], head).float(), -1)
        q = F.log_softmax(F.linear(y[row, column].to(dt), head).float(), -1)
        loss = loss - (p * q).sum(-1).mean()
        overlaps.append(float(torch.minimum(p, q.detach().exp()).sum(-1).mean()))
    return loss, " ".join(f"{overlap:.3f}" for overlap in overlaps)


start, done = time.time(), 0
for done in range(steps):
    spent = max(done / steps, (time.time() - start) / seconds)
    if spent >= 1:
        break
    for group in optimizer.param_groups:
        group["lr"] = rate * min(1, (done + 1) / 10) * (1 - spent)
    first = HELD_OUT + done * sequences
    loss, overlaps = divergence(*packed(lines[first : first + sequences]))
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(params, 1.0)
    optimizer.step()
    if done % 20 == 0:
        print(f"step {done}, {time.time() - start:.0f} s: overlap by depth {overlaps}", flush=True)
with torch.no_grad():
    _, overlaps = divergence(*packed(lines[:HELD_OUT]))
print(f"{done} steps in {time.time() - start:.0f} s: held-out overlap by depth {overlaps}")

tensors = {"mtp.layers.0." + name: x for name, x in layer.state_dict().items()}
tensors |= {"mtp.fc.weight": proj.weight, "mtp.norm.weight": behind, "mtp.pre_fc_norm_embedding.weight": before[0],
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
