# Reference values for tests/unit/test_balance.c, of the mixtures of experts in this folder's neighbours:
#     python3 make_balance.py > balance.txt
# Needs torch and transformers. The load-balancing loss is transformers' load_balancing_loss_func, its gradient
# autograd's, in float32, of the rows that a packed batch has: all tokens but each sequence's last. "whole": all
# sequences at once. "each": a sequence at a time, of all but the
# last, weighted by their rows.
import os
import sys

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.append(HERE)
import generated  # noqa: E402

FOLDERS = ["mixtral", "mixtral-6x3", "qwen2-moe", "qwen3-moe", "qwen3-moe-some", "gpt-oss"]


def balance(model, ids, mask):
    out = model(input_ids=ids, attention_mask=torch.ones_like(ids), output_router_logits=True, use_cache=False)
    experts = getattr(model.config, "num_local_experts", None) or model.config.num_experts
    return load_balancing_loss_func(out.router_logits, experts, model.config.num_experts_per_tok, mask)


def numbers(x):
    return " ".join(f"{v:.5g}" for v in x.flatten().tolist())


for name in FOLDERS:
    folder = os.path.join(HERE, name)
    with generated.model_folder(folder) as made:
        model = AutoModelForCausalLM.from_pretrained(made, dtype=torch.float32, attn_implementation="eager")
    golden = load_file(os.path.join(folder, "golden.safetensors"))
    ids, completion = golden["input_ids"].long(), golden["completion_mask"]
    length = ids.shape[1] - completion.shape[1] + completion.sum(1).long()
    mask = (torch.arange(ids.shape[1])[None] < length[:, None] - 1).long()
    routers = [(n, p) for n, p in model.named_parameters() if n.endswith((".gate.weight", ".router.weight"))]
    print(name, len(routers), model.config.router_aux_loss_coef)
    for way in "whole", "each":
        model.zero_grad()
        if way == "whole":
            loss = balance(model, ids, mask)
        else:
            parts = [slice(i, i + 1) for i in range(len(ids) - 1)]
            loss = sum(mask[p].sum() * balance(model, ids[p], mask[p]) for p in parts) / mask[:-1].sum()
        loss.backward()
        norm = torch.sqrt(sum((p.grad**2).sum() for p in model.parameters() if p.grad is not None))
        print(way, f"{loss.item():.8g} {norm.item():.8g}")
        for n, p in routers:
            print(n.split(".")[2], numbers(p.grad))
