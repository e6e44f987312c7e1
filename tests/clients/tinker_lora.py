"""What users of the Tinker SDK do with adapters, against a running cw-trainer serve.

    tinker_lora.py URL MODEL RUNS [CHECK ...]

tests/e2e/test_tinker_sdk.c starts the servers (a tiny random model, --exact, four adapters) and this;
RUNS is --run-dir. The first thing that is not as it should be ends it with a traceback. Needs the SDK
(0.25 or later), and torch, transformers and peft for one check, which says so where there are none.
"""
import os
import sys
import threading

os.environ.setdefault("TINKER_API_KEY", "tml-local")
os.environ["TINKER_TELEMETRY"] = "0"

import numpy as np
import tinker
from tinker import types

URL, MODEL, RUNS = sys.argv[1:4]
rng = np.random.default_rng(5)


def there(client):
    """A client that newer SDKs give as a future."""
    return client.result() if hasattr(client, "result") else client


def connect():
    """A session of its own, whose adapters make room once it is closed or another one wants it."""
    return tinker.ServiceClient(base_url=URL)


service = connect()


def train(rank=4, of=None, **more):
    return there((of or service).create_lora_training_client(base_model=MODEL, rank=rank, seed=3, **more))


def text(tokens):
    return types.ModelInput.from_ints([int(t) for t in tokens])


def snapshot(client):
    return there(client.save_weights_and_get_sampling_client())


def datum(tokens, scale=1.0):
    return types.Datum(
        model_input=text(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": np.asarray(tokens[1:], np.int64),
            "weights": np.full(len(tokens) - 1, scale, np.float32),
        },
    )


def logprobs(output):
    return np.array(output.loss_fn_outputs[0]["logprobs"].data, np.float32)


def score(client, tokens):
    return logprobs(client.forward([datum(tokens)], "cross_entropy").result())


def step(client, tokens, lr=1e-2):
    client.forward_backward([datum(tokens)], "cross_entropy")
    return client.optim_step(types.AdamParams(learning_rate=lr)).result().metrics


def sample(client, seed=5):
    params = types.SamplingParams(max_tokens=8, stop=[], seed=seed)
    s = client.sample(prompt=text([10, 20, 30]), num_samples=1, sampling_params=params).result().sequences[0]
    return [10, 20, 30] + list(s.tokens), np.array(s.logprobs, np.float32)


def is_same(a, b):
    return a[0] == b[0] and (a[1] == b[1]).all()


first, second = rng.integers(0, 256, 12), rng.integers(0, 256, 12)


def exact():
    """Sampled and trained log-probabilities are one number; two runs beside each other, and the base."""
    base = there(service.create_sampling_client(base_model=MODEL))
    untrained = sample(base)
    a, b = train(), train()
    assert a.get_info().lora_rank == 4
    for _ in range(3):
        step(a, first)
        step(b, second)
        for client in (a, b):
            tokens, sampled = sample(snapshot(client))
            assert (score(client, tokens)[2:] == sampled).all()
    alone = train()
    for _ in range(3):
        step(alone, first)
    assert (score(alone, first) == score(a, first)).all()
    assert is_same(sample(base), untrained)


def reference():
    """A snapshot of the beginning stays, as it was, for as long as it is asked for (DPO, a KL penalty)."""
    client = train(of=connect())
    step(client, first)
    kept = snapshot(client)
    before = kept.compute_logprobs(text(first)).result()
    drawn = sample(kept)
    for i in range(5):
        step(client, first if i % 2 else second)
        sample(snapshot(client))
        assert kept.compute_logprobs(text(first)).result() == before
        assert is_same(sample(kept), drawn)


def ahead():
    """Samples that are under way while the weights change are of the snapshot that was asked."""
    client = train(of=connect())
    step(client, first)
    old = snapshot(client)
    params = types.SamplingParams(max_tokens=60, stop=[])
    wanted = {}
    for _ in range(4):
        futures = [
            old.sample(prompt=text([i, 1, 2]), num_samples=1, sampling_params=params) for i in range(20)
        ]
        step(client, second)
        for i, future in enumerate(futures):
            tokens = [i, 1, 2] + list(future.result().sequences[0].tokens)
            scored = old.compute_logprobs(text(tokens)).result()[3:]
            assert np.array(scored, np.float32).tolist() == np.array(
                future.result().sequences[0].logprobs, np.float32
            ).tolist()


def together():
    """Clients of their own, at the same time: each ends where it would alone."""
    texts = [first, second, rng.integers(0, 256, 20)]
    alone = train(of=connect())
    ends, errors = [None] * len(texts), []

    def work(client, i):
        try:
            for _ in range(4):
                step(client, texts[i])
                tokens, sampled = sample(snapshot(client), seed=i)
                assert (score(client, tokens)[2:] == sampled).all()
            ends[i] = score(client, texts[i])
        except Exception as error:
            errors.append(error)

    threads = [
        threading.Thread(target=work, args=(train(of=connect()), i)) for i in range(len(texts))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    for _ in range(4):
        step(alone, texts[2])
    assert (score(alone, texts[2]) == ends[2]).all()


def resume():
    client = train(of=connect())
    step(client, first)
    path = client.save_state("kept").result().path
    wanted = score(client, first)
    step(client, first)
    went_on = score(client, first)
    other = connect()
    again = there(other.create_training_client_from_state_with_optimizer(path))
    assert (score(again, first) == wanted).all()
    step(again, first)
    assert (score(again, first) == went_on).all()
    sampler = there(other.create_sampling_client(model_path=path))
    tokens, sampled = sample(sampler)
    client.load_state(path).result()
    assert (score(client, tokens)[2:] == sampled).all()


def gradient():
    """The change that one step makes is the gradient that PEFT has of the same folder and datum."""
    try:
        import torch
        from peft import PeftModel
        from safetensors.numpy import load_file
        from transformers import AutoModelForCausalLM
    except ImportError as error:
        print("gradient: skipped:", error)
        return
    client = train(of=connect())
    step(client, second)  # B is not zero any more
    before = client.save_state("before").result().path
    client.forward_backward([datum(first)], "cross_entropy").result()
    client.optim_step(types.AdamParams(learning_rate=1.0, beta1=0.0, beta2=0.0, eps=1.0)).result()
    after = client.save_state("after").result().path
    folders = [os.path.join(RUNS, path.removeprefix("tinker://")) for path in (before, after)]
    old, new = (load_file(os.path.join(folder, "adapter_model.safetensors")) for folder in folders)
    base = client.get_info().model_data.tokenizer_id
    model = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), folders[0], is_trainable=True
    )
    tokens = torch.tensor(first)[None]
    logits = model(tokens[:, :-1]).logits
    loss = torch.nn.functional.cross_entropy(logits[0], tokens[0, 1:], reduction="sum")
    loss.backward()
    worst, n = 0.0, 0
    for name, p in model.named_parameters():
        if p.grad is None:
            continue
        key = name.replace(".default", "")
        change = torch.tensor(old[key] - new[key])  # g / (|g| + 1)
        wanted = p.grad / (p.grad.abs() + 1)
        worst = max(worst, float((change - wanted).abs().max() / wanted.abs().max()))
        n += 1
    assert n == len(old)
    print("gradient: largest difference of", n, "tensors", worst)
    assert worst < 1e-4


CHECKS = [exact, reference, ahead, together, resume, gradient]
print("tinker", tinker.__version__)
for name in sys.argv[4:] or [check.__name__ for check in CHECKS]:
    service = connect()
    globals()[name]()
    print(name, "ok", flush=True)
os._exit(0)  # the transport of SDK 0.38 aborts one in fifteen interpreters that end otherwise
