# make_mtp.py OUT: reference values of layers that predict further tokens (multi-token prediction), by torch in
# float32. OUT/NAME has a config.json, a weights.txt (../README.md) and mtp.txt. The formula is that of "DeepSeek-V3
# Technical Report" (2024), section 2.2, in the order of the published tensors: x = W [norm(embedding of token p + 1);
# norm(hidden state of p)], with the hidden state behind the model's last norm; one decoder layer of the model, which is
# transformers'; the layer's own last norm, and the model's head. What the next step reads is the layer's output, by
# Qwen3.5 behind that norm.
#
# mtp.txt: the prompt; then a line for each of its positions but the last: the likeliest token, and the logits of the
# tokens 0, 16, ... 112. The last line is one step on: of the token that was likeliest there.
import json, os, shutil, sys, tempfile

import safetensors.torch
import torch
from transformers import AutoConfig, AutoModelForCausalLM

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
import generated

HERE = os.path.dirname(os.path.abspath(__file__))
PROMPT = [3, 17, 90, 41, 5, 66, 120, 8, 33, 101, 59, 12]
KINDS = {  # (config of, prefix of the layer, of the other tensors' names, whether the next step reads behind the norm)
    "deepseek-v3": ("model.layers.2.", {"embed": "model.layers.2.enorm.weight", "hidden": "model.layers.2.hnorm.weight",
                                        "proj": "model.layers.2.eh_proj.weight",
                                        "norm": "model.layers.2.shared_head.norm.weight"}, False),
    "qwen35": ("mtp.layers.0.", {"embed": "mtp.pre_fc_norm_embedding.weight", "hidden": "mtp.pre_fc_norm_hidden.weight",
                                 "proj": "mtp.fc.weight", "norm": "mtp.norm.weight"}, True),
}


def is_norm(name):
    return name.endswith("norm.weight") or name.endswith("layernorm.weight") or "_norm_" in name


def make(name, out):
    prefix, names, normed = KINDS[name]
    folder = os.path.join(out, name)
    os.makedirs(folder, exist_ok=True)
    config = json.load(open(os.path.join(HERE, "..", name, "config.json")))
    layers = config["num_hidden_layers"]
    plus_one = name == "qwen35"
    if plus_one:
        config["mtp_num_hidden_layers"] = 1
    json.dump(config, open(os.path.join(folder, "config.json"), "w"), indent=2)

    # The model with the layer behind its last one, from which the shapes are.
    deeper = dict(config, num_hidden_layers=layers + 1)
    if "layer_types" in deeper:
        deeper["layer_types"] = config["layer_types"] + ["full_attention"]
    if "mlp_layer_types" in deeper:
        deeper["mlp_layer_types"] = config["mlp_layer_types"] + [config["mlp_layer_types"][-1]]
    temporary = tempfile.mkdtemp()
    json.dump(deeper, open(os.path.join(temporary, "config.json"), "w"))
    bare = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(temporary))
    bare.save_pretrained(temporary)
    shapes = {n: list(t.shape) for n, t in
              safetensors.torch.load_file(os.path.join(temporary, "model.safetensors")).items()}
    hidden = config["hidden_size"]
    own = f"model.layers.{layers}."
    shapes.update({names[n]: [hidden, 2 * hidden] if n == "proj" else [hidden] for n in names})
    recipe = []
    for n in sorted(shapes):
        published = n.replace(own, prefix)
        mean, deviation = (0.0 if plus_one and "linear_attn.norm" not in n else 1.0, 0.1) if is_norm(n) else (0.0, 0.08)
        recipe.append(generated.entry(7, published, "f32", mean, deviation, shapes[n]))
    generated.write_recipe(folder, "model.safetensors", 7, recipe)
    weights = {n: torch.from_numpy(t) for n, t in generated.tensors(recipe).items()}
    inner = {n.replace(prefix, own): t.contiguous() for n, t in weights.items() if n not in names.values()}
    safetensors.torch.save_file(inner, os.path.join(temporary, "model.safetensors"), metadata={"format": "pt"})
    model = AutoModelForCausalLM.from_pretrained(temporary, dtype=torch.float32, attn_implementation="eager").eval()
    shutil.rmtree(temporary)

    block = model.model.layers[layers]
    model.model.layers = model.model.layers[:layers]
    model.config.num_hidden_layers = model.model.config.num_hidden_layers = layers
    eps = config["rms_norm_eps"]

    def norm(x, w):
        w = weights[w]
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * (1 + w if plus_one else w)

    def run(tokens, states):
        embedded = weights["model.embed_tokens.weight"][torch.tensor(tokens)]
        x = torch.cat([norm(embedded, names["embed"]), norm(states, names["hidden"])], -1) @ weights[names["proj"]].T
        n = len(tokens)
        positions = torch.arange(n)[None]
        mask = torch.full((n, n), torch.finfo(torch.float32).min).triu(1)[None, None]
        y = block(x[None], attention_mask=mask, position_ids=positions,
                  position_embeddings=model.model.rotary_emb(x[None], positions))
        y = (y[0] if isinstance(y, tuple) else y)[0]
        behind = norm(y, names["norm"])
        return behind if normed else y, behind @ model.lm_head.weight.T

    with torch.no_grad():
        states = model.model(torch.tensor([PROMPT])).last_hidden_state[0][:-1]
        fed, logits = run(PROMPT[1:], states)
        likeliest = int(logits[-1].argmax())
        _, further = run(PROMPT[1:] + [likeliest], torch.cat([states, fed[-1:]]))
    with open(os.path.join(folder, "mtp.txt"), "w") as f:
        print(*PROMPT, file=f)
        for row in torch.cat([logits, further[-1:]]):
            print(int(row.argmax()), *(f"{float(x):.6f}" for x in row[0:128:16]), file=f)


for kind in KINDS:
    make(kind, sys.argv[1])
