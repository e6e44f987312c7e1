"""cw-trainer sft --freeze against torch: AdamW over the parameters that ask for a gradient.

    freeze_torch.py MODEL DATA OUT STEPS LEARNING_RATE FROZEN...

tests/e2e/test_freeze.c made OUT from MODEL by as many steps, each over all lines of DATA, at a
constant learning rate; the other options are sft's defaults. FROZEN are the names' globs. What is
frozen must be equal to the bit, the rest within the bounds of tests/golden/test_golden.c.
"""
import fnmatch
import json
import sys

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

MODEL, DATA, OUT, STEPS, LEARNING_RATE = sys.argv[1:6]
FROZEN = sys.argv[6:]
RMS, FAR, SHARE_FAR = 2e-6, 1e-5, 1e-3

model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
for name, p in model.named_parameters():
    p.requires_grad = not any(fnmatch.fnmatchcase(name, f) for f in FROZEN)
trained = [p for p in model.parameters() if p.requires_grad]
assert 0 < len(trained) < len(list(model.parameters()))

tokenizer = Tokenizer.from_file(MODEL + "/tokenizer.json")
end = model.config.eos_token_id
examples = []
for line in open(DATA):
    line = json.loads(line)
    prompt = tokenizer.encode(line["prompt"], add_special_tokens=False).ids
    completion = tokenizer.encode(line["completion"], add_special_tokens=False).ids
    examples.append((prompt, completion + [end]))
n_tokens = sum(len(completion) for _, completion in examples)

adamw = torch.optim.AdamW(trained, lr=float(LEARNING_RATE), betas=(0.9, 0.999), eps=1e-8,
                          weight_decay=0.1)
for _ in range(int(STEPS)):
    adamw.zero_grad()
    for prompt, completion in examples:
        logits = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1:-1]
        loss = torch.nn.functional.cross_entropy(logits, torch.tensor(completion), reduction="sum")
        (loss / n_tokens).backward()
    torch.nn.utils.clip_grad_norm_(trained, 1.0)
    adamw.step()

before, after = ({name: t.float() for name, t in load_file(f + "/model.safetensors").items()}
                 for f in (MODEL, OUT))
squares = far = n = 0
for name, p in model.named_parameters():
    if not p.requires_grad:
        assert torch.equal(after[name], before[name]), f"{name} is frozen and has changed"
        continue
    assert not torch.equal(after[name], before[name]), f"{name} has not changed"
    difference = (after[name] - p.detach()).double()
    squares += float((difference ** 2).sum())
    far += int((difference.abs() > FAR).sum())
    n += difference.numel()
rms, share = (squares / n) ** 0.5, far / n
print(f"{n} values: rms {rms:.2e}, share off {share:.2e}")
assert rms <= RMS and share <= SHARE_FAR
