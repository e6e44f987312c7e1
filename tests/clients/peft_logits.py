"""Opens a base folder and a LoRA folder with PEFT and writes the logits of some token ids.

peft_logits.py BASE ADAPTER OUT ID...: OUT gets (ids, vocabulary) float32.
"""

import sys

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

base, adapter, out = sys.argv[1:4]
ids = torch.tensor([[int(x) for x in sys.argv[4:]]])
model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, attn_implementation="eager")
model = PeftModel.from_pretrained(model, adapter).eval()
with torch.no_grad():
    logits = model(input_ids=ids).logits[0]
logits.to(torch.float32).numpy().tofile(out)
