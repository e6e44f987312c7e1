# Reference values of adapters by PEFT, transformers and torch (float32, CPU), over the model folders beside this file:
# make_golden_lora.py OUT [NAME...]. Needs torch, transformers and peft.
import copy, json, os, sys
import generated, peft, torch, transformers
from peft.utils import transformers_weight_conversion as conversion
from safetensors.torch import load_file, save_file

HERE = os.path.dirname(os.path.abspath(__file__))
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]
# PEFT 0.21 takes whatever ends in gate_proj, up_proj or down_proj of a model with experts for theirs;
# here the modules that have these names are meant.
conversion._convert_peft_config_moe = lambda *_: None
HEAD = "base_model.model.lm_head.base_layer.weight"
PLAIN_MLP = r".*\.(mlp|shared_experts)\.(gate|up|down)_proj"
FOLDERS = {  # name: base, seed, LoraConfig
    # tied, soft caps on the logits
    "gemma2-r3-head": ("gemma2", 31, dict(r=3, lora_alpha=6, target_modules=["q_proj", "up_proj", "lm_head"])),
    "llama3-r4-head": ("llama3", 32, dict(r=4, lora_alpha=2, target_modules=["lm_head"])),  # nothing below it
    # dense, and of the experts' layers the shared ones
    "deepseek-v2-lite-r2": ("deepseek-v2-lite", 33, dict(r=2, lora_alpha=4,
        target_modules=rf"{PLAIN_MLP}|.*\.(q_proj|kv_a_proj_with_mqa|o_proj)")),
    "deepseek-v3-r3": ("deepseek-v3", 34, dict(r=3, lora_alpha=6, use_rslora=True,
        target_modules=rf"{PLAIN_MLP}|.*\.(q_a_proj|q_b_proj|kv_a_proj_with_mqa)")),
    "gemma3-r2": ("gemma3", 35, dict(r=2, lora_alpha=4, target_modules="all-linear")),
    "glm4-moe-lite-r2": ("glm4-moe-lite", 36, dict(r=2, lora_alpha=2,
        target_modules=r".*\.(q_b_proj|o_proj|shared_experts\.down_proj)")),
    "gpt-oss-r3-head": ("gpt-oss", 37, dict(r=3, lora_alpha=6, target_modules=[*ATTENTION, "lm_head"])),
    # nothing in the first layer, where the backward pass need not go
    "mistral-r2-top": ("mistral", 49, dict(r=2, lora_alpha=4, target_modules=[*ATTENTION, *MLP], layers_to_transform=[1])),
    "olmo2-r2": ("olmo2", 38, dict(r=2, lora_alpha=4, target_modules="all-linear")),
    "olmo3-r3": ("olmo3", 48, dict(r=3, lora_alpha=3, target_modules=["q_proj", "k_proj", "down_proj"])),
    "qwen3-moe-r4": ("qwen3-moe", 40, dict(r=4, lora_alpha=8, target_modules=ATTENTION)),
    "smollm3-r2": ("smollm3", 41, dict(r=2, lora_alpha=4, target_modules="all-linear")),
    "llama3-r4-qv": ("llama3", 42, dict(r=4, lora_alpha=16, use_rslora=True, target_modules=["q_proj", "v_proj"])),
    "qwen2-r8": ("qwen2", 43, dict(r=8, lora_alpha=16, target_modules=[*ATTENTION, *MLP])),
    "gemma2-r2": ("gemma2", 44, dict(r=2, lora_alpha=8, target_modules=[*ATTENTION, *MLP])),
    "phi3-fused-r4": ("phi3", 45, dict(r=4, lora_alpha=8, target_modules=["qkv_proj", "gate_up_proj", "o_proj", "down_proj"])),
    "deepseek-v2-r3": ("deepseek-v2", 46, dict(r=3, lora_alpha=6,
        target_modules=["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"])),
    "qwen35-r4": ("qwen35", 47, dict(r=4, lora_alpha=8,
        target_modules=[*ATTENTION, *MLP, "in_proj_qkv", "in_proj_z", "out_proj"])),
}


def make(out, base, seed, options):
    torch.manual_seed(seed)
    folder = os.path.join(HERE, base)
    given = load_file(folder + "/golden.safetensors")
    facts = json.load(open(folder + "/golden.json"))
    with generated.model_folder(folder) as made:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            made, dtype=torch.float32, attn_implementation="eager").eval()
    model = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **options)).eval()
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    plain = {n: n.replace(".default", "") for n in trained}  # as the folder has them
    # A as PEFT begins it, B as after some steps
    recipe = [generated.entry(seed, plain[n], "f32", 0.0, 0.08 if "lora_B" in n else round((3 * p.shape[1]) ** -0.5, 4),
                              p.shape) for n, p in trained.items()]
    with torch.no_grad():
        for (n, p), x in zip(trained.items(), generated.tensors(recipe).values()):
            p.copy_(torch.from_numpy(x))
    model.peft_config["default"].base_model_name_or_path = base
    model.save_pretrained(out)
    saved = load_file(out + "/adapter_model.safetensors")
    if HEAD in saved:  # PEFT keeps the base's beside it
        names = {t[0]: t for t in generated.read_recipe(folder)[1]}
        head = names.get("lm_head.weight") or names["model.embed_tokens.weight"]
        recipe.append((HEAD, *head[1:]))
    weights = generated.tensors(recipe)
    assert saved.keys() == weights.keys() and all((saved[n].numpy() == weights[n]).all() for n in saved), out
    for name in "README.md", "adapter_model.safetensors":  # the first names this machine's folders
        os.remove(os.path.join(out, name))
    generated.write_recipe(out, "adapter_model.safetensors", seed, recipe)

    prompt, ids, mask = facts["prompt_len"], given["input_ids"].long(), given["completion_mask"]
    seen = torch.cat([torch.ones(len(ids), prompt), mask], 1).long()

    def logits_of(m):
        return m(input_ids=ids, attention_mask=seen, use_cache=False).logits.float()

    def logprobs_of(logits):
        return logits.log_softmax(-1)[:, prompt - 1:-1].gather(-1, ids[:, prompt:, None]).squeeze(-1)

    # Of weights rounded to bf16, what computing in bf16 changes: told where it is more than test_golden.c allows.
    def bf16_rms():
        m = copy.deepcopy(model)
        for p in m.parameters():
            p.data = p.data.bfloat16().float()
        wide = logits_of(m)[seen > 0]
        for p in m.parameters():
            p.data = p.data.bfloat16()
        return ((logits_of(m)[seen > 0] - wide).pow(2).mean() / wide.pow(2).mean()).sqrt().item()

    with torch.no_grad():
        logits, off = logits_of(model), bf16_rms()
    logprobs = logprobs_of(logits)
    old = logprobs + 0.15 * torch.randn(logprobs.shape)
    advantages = given["advantages"][:, None]

    def loss_of():
        ratio = (logprobs_of(logits_of(model)) - old).exp()
        clipped = ratio.clamp(1 - facts["eps_low"], 1 + facts["eps_high"])
        return (-torch.min(ratio * advantages, clipped * advantages) * mask).sum() / mask.sum()

    values = {"logits": logits, "logprobs": logprobs, "old_logprobs": old}
    loss = loss_of()
    loss.backward()
    grads = {plain[n]: p.grad.clone().numpy() for n, p in trained.items()}
    begun = {n: p.detach().clone() for n, p in trained.items()}
    adamw = torch.optim.AdamW(trained.values(), lr=facts["lr"], betas=facts["betas"], eps=facts["eps"],
                              weight_decay=facts["weight_decay"])
    losses, norms = [], []
    for _ in range(3):
        adamw.zero_grad()
        step = loss_of()
        step.backward()
        losses.append(step.item())
        norms.append(torch.nn.utils.clip_grad_norm_(trained.values(), facts["max_grad_norm"]).item())
        adamw.step()
    after3 = {plain[n]: p.detach().clone().numpy() for n, p in trained.items()}
    values |= {n: torch.from_numpy(x) for n, x in generated.kept(out, grads, after3).items()}
    with torch.no_grad():
        for n, p in trained.items():
            p.copy_(begun[n])
        values["greedy"] = model.generate(
            input_ids=ids[:1, :prompt], attention_mask=torch.ones(1, prompt).long(), max_new_tokens=24,
            do_sample=False, eos_token_id=None, pad_token_id=0)[0].int()
        # PEFT's merge would change the embeddings with a head that is tied to them
        if not (model.config.tie_word_embeddings and "lm_head" in options["target_modules"]):
            values["merged_logits"] = logits_of(model.merge_and_unload())
    save_file({n: x.contiguous() for n, x in values.items()}, out + "/golden.safetensors")
    kept = {k: facts[k] for k in ("lr", "weight_decay", "betas", "eps", "max_grad_norm", "eps_low", "eps_high")}
    json.dump({"base": base, "loss_dapo": loss.item(), "adamw_losses": losses, "adamw_grad_norms": norms, **kept,
               **({"bf16_logits_rms": round(off, 5)} if off > 1.5e-2 else {}), "beta": 0.0, "peft": peft.__version__, "transformers": transformers.__version__,
               "torch": torch.__version__}, open(out + "/golden.json", "w"), indent=1)


for name, (base, seed, options) in FOLDERS.items():
    if name in (sys.argv[2:] or FOLDERS):
        os.makedirs(os.path.join(sys.argv[1], name), exist_ok=True)
        make(os.path.join(sys.argv[1], name), base, seed, options)
