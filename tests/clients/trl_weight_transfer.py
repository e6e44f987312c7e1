"""python/trl_weight_transfer.py against the real TRL, on the CPU: trl_weight_transfer.py BRIDGE LIBRARY.

Its class is TRL's protocol, takes what TRL's trainer streams of a model, and the server of the demo's model
then says what that model learnt. The trainer itself wants CUDA and is not run.
"""

import inspect
import pathlib
import sys

import torch
import transformers
from trl.experimental.async_grpo import async_grpo_trainer

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "python"))
import commonweight
from trl_weight_transfer import BridgeWeightTransfer

path, library = sys.argv[1:3]
protocol = async_grpo_trainer.WeightTransferProtocol
for name, method in inspect.getmembers(protocol, inspect.isfunction):
    if not name.startswith("_"):
        ours = inspect.signature(getattr(BridgeWeightTransfer, name))
        assert list(ours.parameters) == list(inspect.signature(method).parameters), (name, ours)

with commonweight.Bridge(path, library) as bridge:
    socket, folder, version = bridge.socket(), bridge.model(), bridge.version()
tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
prompt = tokenizer("27+35=").input_ids


def answer():
    """As TRL's rollout worker asks, but greedy."""
    body = {
        "prompt": prompt, "max_tokens": 2, "temperature": 0, "top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0,
        "n": 1, "return_token_ids": True, "logprobs": 0, "seed": 1 << 62,
    }  # fmt: skip
    choice = commonweight.request(socket, "/v1/completions", body)["choices"][0]
    assert len(choice["logprobs"]["token_logprobs"]) == len(choice["token_ids"]) == 2
    return choice["text"]


model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
ids = torch.tensor([prompt + tokenizer("99", add_special_tokens=False).input_ids])
optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
for _ in range(20):
    optimizer.zero_grad()
    model(input_ids=ids, labels=torch.where(torch.arange(ids.shape[1]) < len(prompt), -100, ids)).loss.backward()
    optimizer.step()


def stream():
    return ((name, p.detach()) for name, p in async_grpo_trainer._iter_vllm_named_params(model))


before = answer()
assert before != "99", before
transfer = BridgeWeightTransfer(path, library)
transfer.init_weight_transfer()
transfer.pause()
transfer.send_weights(stream())
transfer.resume()
assert answer() == "99", answer()
assert transfer.bridge.version() == version + 2
try:  # what is not the model's is refused by name, and undone
    transfer.send_weights(iter([("model.norm.weight", torch.zeros(3))]))
    raise AssertionError("a tensor of another shape was taken")
except ValueError as error:
    assert "model.norm.weight (3,)" in str(error), error
transfer.destroy()
print("trl_weight_transfer: PASS")
