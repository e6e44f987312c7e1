"""Log-probabilities of a prompt that servers gave, against transformers', which opens the folders.

transformers_logprobs.py DIR: in each folder of DIR `out`, a model, and `served.json`, a server's
answer to a request for completions with prompt_logprobs; DIR/ids.json has the prompt's tokens.
"""
import json
import os
import pathlib
import sys

os.environ["HF_HUB_OFFLINE"] = "1"
import torch
import transformers

root = pathlib.Path(sys.argv[1])
ids = json.loads((root / "ids.json").read_text())
folders = sorted(path.parent for path in root.glob("*/served.json"))
assert folders
for folder in folders:
    choice = json.loads((folder / "served.json").read_text())["choices"][0]
    served = [next(iter(entry.values()))["logprob"] for entry in choice["prompt_logprobs"][1:]]
    model, loading = transformers.AutoModelForCausalLM.from_pretrained(
        folder / "out", dtype=torch.float32, attn_implementation="eager", output_loading_info=True)
    assert not loading["missing_keys"] and not loading["unexpected_keys"], (folder.name, loading)
    with torch.no_grad():
        logprobs = torch.log_softmax(model.eval()(torch.tensor([ids])).logits[0], -1)
    assert len(served) == len(ids) - 1
    most = max(abs(logprobs[i, ids[i + 1]].item() - x) for i, x in enumerate(served))
    print(folder.name, "differs by", most, flush=True)
    assert most < 1e-5, (folder.name, most)
