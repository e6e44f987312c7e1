# Reference values of adapters of the head, by PEFT, transformers and torch (float32, CPU), over the
# model folders beside this file: make_golden_lora.py OUT. Needs torch, transformers and peft.
import json, os, sys
import peft, torch, transformers
from safetensors.torch import load_file, save_file

HERE = os.path.dirname(os.path.abspath(__file__))
FOLDERS = {  # name: base, seed, LoraConfig
    # tied, soft caps on the logits
    "gemma2-r3-head": ("gemma2", 31, dict(r=3, lora_alpha=6, target_modules=["q_proj", "up_proj", "lm_head"])),
    "llama3-r4-head": ("llama3", 32, dict(r=4, lora_alpha=2, target_modules=["lm_head"])),  # nothing below it
}


def make(out, base, seed, options):
    torch.manual_seed(seed)
    folder = os.path.join(HERE, base)
    given = load_file(folder + "/golden.safetensors")
    facts = json.load(open(folder + "/golden.json"))
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager").eval()
    model = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **options)).eval()
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    with torch.no_grad():
        for name, p in trained.items():
            if "lora_B" in name:
                p.normal_(0, 0.08)
    model.peft_config["default"].base_model_name_or_path = base
    model.save_pretrained(out)

    prompt, ids, mask = facts["prompt_len"], given["input_ids"].long(), given["completion_mask"]
    seen = torch.cat([torch.ones(len(ids), prompt), mask], 1).long()

    def logits_of(m):
        return m(input_ids=ids, attention_mask=seen, use_cache=False).logits.float()

    def logprobs_of(logits):
        return logits.log_softmax(-1)[:, prompt - 1:-1].gather(-1, ids[:, prompt:, None]).squeeze(-1)

    with torch.no_grad():
        logits = logits_of(model)
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
    plain = {n: n.replace(".default", "") for n in trained}  # as the folder has them
    values |= {"grad." + plain[n]: p.grad.clone() for n, p in trained.items()}
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
    values |= {"after3." + plain[n]: p.detach().clone() for n, p in trained.items()}
    with torch.no_grad():
        for n, p in trained.items():
            p.copy_(begun[n])
        values["greedy"] = model.generate(
            input_ids=ids[:1, :prompt], attention_mask=torch.ones(1, prompt).long(), max_new_tokens=24,
            do_sample=False, eos_token_id=None, pad_token_id=0)[0].int()
        if not model.config.tie_word_embeddings:  # PEFT would change the embeddings with the head
            values["merged_logits"] = logits_of(model.merge_and_unload())
    save_file({n: x.contiguous() for n, x in values.items()}, out + "/golden.safetensors")
    kept = {k: facts[k] for k in ("lr", "weight_decay", "betas", "eps", "max_grad_norm", "eps_low", "eps_high")}
    json.dump({"base": base, "loss_dapo": loss.item(), "adamw_losses": losses, "adamw_grad_norms": norms, **kept,
               "beta": 0.0, "peft": peft.__version__, "transformers": transformers.__version__,
               "torch": torch.__version__}, open(out + "/golden.json", "w"), indent=1)


for name, (base, seed, options) in FOLDERS.items():
    make(os.path.join(sys.argv[1], name), base, seed, options)
