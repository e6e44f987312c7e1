"""What users of the Tinker SDK do, against a running cw-trainer serve.

    tinker_sdk.py URL MODEL RUNS [CHECK ...]

RUNS is the server's --run-dir. tests/e2e/test_tinker_sdk.c starts the servers (a tiny random model,
--exact) and this. The first thing that is not as it should be ends it with a traceback. Needs the SDK
(0.25 or later), and torch for one check, which says so where there is none.
"""
import collections
import http.client
import http.server
import json
import os
import pathlib
import resource
import sys
import threading
import urllib.error
import urllib.parse
import urllib.request

os.environ.setdefault("TINKER_API_KEY", "tml-local")
os.environ["TINKER_TELEMETRY"] = "0"

import numpy as np
import tinker
from tinker import types

URL, MODEL, RUNS = sys.argv[1:4]
rng = np.random.default_rng(3)
service = tinker.ServiceClient(base_url=URL)


def there(client):
    """A client that newer SDKs give as a future."""
    return client.result() if hasattr(client, "result") else client


def train(rank=0, service=service):
    return there(service.create_lora_training_client(base_model=MODEL, rank=rank))


def text(tokens):
    return types.ModelInput.from_ints([int(t) for t in tokens])


def snapshot(client):
    return there(client.save_weights_and_get_sampling_client())


def datum(tokens, **inputs):
    """Of tokens that each predict the next; inputs are of the targets."""
    inputs = {name: np.asarray(x, np.float32) for name, x in inputs.items()}
    return types.Datum(
        model_input=text(tokens[:-1]), loss_fn_inputs={"target_tokens": np.asarray(tokens[1:], np.int64), **inputs}
    )


def plain(tokens, scale=1.0):
    return datum(tokens, weights=np.full(len(tokens) - 1, scale))


def logprobs(output, i=0):
    return np.array(output.loss_fn_outputs[i]["logprobs"].data, np.float32)


def adam(lr=1e-3, **more):
    return types.AdamParams(learning_rate=lr, **more)


def refused(call, *parts):
    try:
        call()
    except Exception as error:
        for part in parts:
            assert part in str(error), (part, str(error))
        return
    raise AssertionError(f"not refused: {parts}")


def session():  # A1
    client = train()
    assert client.get_info().lora_rank == 0
    sampler = snapshot(client)
    result = sampler.sample(
        prompt=text([10, 20, 30]), num_samples=3, sampling_params=types.SamplingParams(max_tokens=6)
    ).result()
    assert len(result.sequences) == 3
    for sequence in result.sequences:
        assert len(sequence.tokens) == len(sequence.logprobs) <= 6
    data = [plain(rng.integers(0, 256, 12)) for _ in range(4)]
    before = client.forward_backward(data, "cross_entropy")
    step = client.optim_step(adam())  # sent before the first is answered
    assert before.result().metrics["loss:sum"] > 0 and step.result() is not None
    after = client.forward(data, "cross_entropy").result()
    assert after.metrics["loss:sum"] < before.result().metrics["loss:sum"]
    refused(lambda: train(rank=32), "rank 0")


def key():  # A2: against a server with a key, which is in $TINKER_API_KEY
    train()
    refused(lambda: tinker.ServiceClient(base_url=URL, api_key="tml-wrong-key").get_server_capabilities(), "401")
    try:
        urllib.request.urlopen(URL + "/api/v1/get_server_capabilities")
        raise AssertionError("no key was asked for")
    except urllib.error.HTTPError as error:
        assert error.code == 401


def reference_loss(name, lp, q, a, w, mask):
    r = np.exp(lp - q)
    if name == "gspo":
        r = np.full_like(lp, np.exp((lp - q)[mask != 0].mean()))
    cut = np.clip(r, 0.8, 1.2)
    return {
        "cross_entropy": lambda: -(w * lp).sum(),
        "importance_sampling": lambda: -(r * a).sum(),
        "ppo": lambda: -np.minimum(r * a, cut * a).sum(),
        "gspo": lambda: -np.minimum(r * a, cut * a).sum(),
        "cispo": lambda: -(np.clip(r, 0, 4) * a * lp).sum(),
        "dro": lambda: -(a * lp - 0.05 / 2 * (lp - q) ** 2).sum(),
    }[name]()


def losses():  # A3
    """loss:sum is numpy's on the returned log-probabilities. One step of plain gradient descent (AdamW
    without memory, by an eps that dwarfs the gradient) changes it by -lr |g|^2."""
    tokens, scale = rng.integers(0, 256, 16), 1e-4
    n = len(tokens) - 1
    mask = (np.arange(n) >= 4).astype(np.float32)
    a, w = (scale * mask * rng.normal(size=n)).astype(np.float32), (scale * mask).astype(np.float32)
    for name in ["cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo"]:
        client = train()
        first = logprobs(client.forward([plain(tokens)], "cross_entropy").result())
        q = np.where(mask != 0, first + 0.05 * rng.normal(size=n), first).astype(np.float32)
        inputs = {"weights": w} if name == "cross_entropy" else {"logprobs": q, "advantages": a}
        if name == "gspo":
            inputs["sequence_ratio_mask"] = mask
        config = {"beta": 0.05 * scale} if name == "dro" else None
        data, lr = [datum(tokens, **inputs)], 2e-2
        output = client.forward_backward(data, name, config).result()
        got, lp = output.metrics["loss:sum"], logprobs(output).astype(np.float64)
        wanted = reference_loss(name, lp, q, a, w, mask)
        if name == "dro":
            wanted = -(a * lp - 0.05 * scale / 2 * (lp - q) ** 2).sum()
        assert abs(got - wanted) <= 1e-9 * abs(wanted) + 1e-15, (name, got, wanted)
        step = client.optim_step(adam(lr, beta1=0.0, beta2=0.0, eps=1.0)).result()
        after = logprobs(client.forward([plain(tokens)], "cross_entropy").result()).astype(np.float64)
        if name == "cispo":  # its gradient takes the ratio for a constant
            change = -(np.clip(np.exp(lp - q), 0, 4) * a * (after - lp)).sum()
        else:
            change = reference_loss(name, after, q, a, w, mask) - reference_loss(name, lp, q, a, w, mask)
            if name == "dro":
                change = (-(a * (after - lp)) + 0.05 * scale / 2 * ((after - q) ** 2 - (lp - q) ** 2)).sum()
            if name == "gspo":  # likewise but for each token's own
                s = np.exp((lp - q)[mask != 0].mean())
                change = -(s * a * (after - lp)).sum()
        expected = -lr * step.metrics["grad_norm:mean"] ** 2
        print(name, got, change, expected)
        assert abs(change - expected) < 0.05 * abs(expected), (name, change, expected)


def adding_up():  # A4: bits, with --exact
    data = [plain(rng.integers(0, 256, n)) for n in (9, 30, 4, 17)]
    ends = []
    for cuts in ([data], [data[:2], data[2:]], [[x] for x in data]):
        client = train()
        for part in cuts:
            client.forward_backward(part, "cross_entropy")
        client.optim_step(adam(1e-2))
        ends.append(logprobs(client.forward(data[:1], "cross_entropy").result()))
    assert (ends[0] == ends[1]).all() and (ends[0] == ends[2]).all()


def chunks():  # A5: cut by the client, whose parts come in another order
    data = [plain(rng.integers(0, 256, 6)) for _ in range(3000)]
    client = train()
    output = client.forward_backward(data, "cross_entropy").result()
    client.optim_step(adam(1e-2)).result()
    at_once = logprobs(client.forward(data[:1], "cross_entropy").result())
    assert len(output.loss_fn_outputs) == 3000
    client = train()
    for i in range(0, 3000, 500):  # one after the other
        client.forward_backward(data[i : i + 500], "cross_entropy").result()
    client.optim_step(adam(1e-2)).result()
    assert (logprobs(client.forward(data[:1], "cross_entropy").result()) == at_once).all()


def tensors(path, file, prefix=""):
    """Of a checkpoint's safetensors file (f32), by name behind the prefix."""
    raw = (pathlib.Path(RUNS) / path.removeprefix("tinker://") / file).read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    out = {}
    for name, entry in json.loads(raw[8:start]).items():
        if name == "__metadata__" or not name.startswith(prefix):
            continue
        assert entry["dtype"] == "F32", (name, entry)
        at, end = entry["data_offsets"]
        out[name.removeprefix(prefix)] = np.frombuffer(raw[start + at : start + end], np.float32).astype(np.float64)
    return out


def adamw(w, gradients, steps):
    """torch.optim.AdamW behind clip_grad_norm_, whose settings are new at each step."""
    m, v = np.zeros_like(w), np.zeros_like(w)
    for t, (g, p) in enumerate(zip(gradients, steps), 1):
        if p.grad_clip_norm > 0:
            g = g * min(1, p.grad_clip_norm / (np.sqrt((g * g).sum()) + 1e-6))
        m, v = p.beta1 * m + (1 - p.beta1) * g, p.beta2 * v + (1 - p.beta2) * g * g
        w = w * (1 - p.learning_rate * p.weight_decay)
        w = w - p.learning_rate / (1 - p.beta1**t) * m / (np.sqrt(v / (1 - p.beta2**t)) + p.eps)
        yield w


def adam_settings():  # A6
    """Each step's own settings. A gradient is what a step without memory leaves as its first moment."""
    steps = [
        adam(1e-2, beta1=0.9, beta2=0.95, eps=1e-8),
        adam(3e-3, beta1=0.8, beta2=0.999, eps=1e-6, weight_decay=0.1),
        adam(5e-2, beta1=0.5, beta2=0.9, eps=1e-4, grad_clip_norm=0.5),
        adam(1e-2, beta1=0.95, beta2=0.98, eps=1e-12, weight_decay=0.01, grad_clip_norm=1e6),
    ]
    batches = [[plain(rng.integers(0, 256, 14)) for _ in range(3)] for _ in steps]
    client = train()
    paths = [client.save_state("0").result().path]
    for i, (data, step) in enumerate(zip(batches, steps)):
        client.forward_backward(data, "cross_entropy")
        client.optim_step(step)
        paths.append(client.save_state(str(i + 1)).result().path)
    gradients = []
    for data, path in zip(batches, paths):
        client = there(service.create_training_client_from_state(path))
        client.forward_backward(data, "cross_entropy")
        client.optim_step(adam(0.0, beta1=0.0))
        probe = client.save_state("probe").result().path
        gradients.append(tensors(probe, "trainer/optimizer.safetensors", "exp_avg."))
    states = [tensors(path, "model.safetensors") for path in paths]
    names = sorted(gradients[0])
    assert names == sorted(states[0])
    whole = lambda state: np.concatenate([state[name] for name in names])
    start = w = whole(states[0])
    for wanted, state in zip(adamw(w, [whole(g) for g in gradients], steps), states[1:]):
        off = np.abs(whole(state) - wanted).max()
        print("largest weight's distance from AdamW's", off, "of a largest step of", np.abs(wanted - w).max())
        assert off < 1e-6
        w = wanted
    assert np.abs(w - start).max() > 1e-2


class Broken(http.server.BaseHTTPRequestHandler):
    """Stands between a client and the server, and lets every other answer of each endpoint go nowhere."""

    protocol_version = "HTTP/1.1"
    asked, sessions = collections.Counter(), []

    def relay(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        server = http.client.HTTPConnection(urllib.parse.urlsplit(URL).netloc)
        server.request(self.command, self.path, body, dict(self.headers))
        answer = server.getresponse()
        text = answer.read()
        server.close()
        endpoint = self.path.rsplit("/", 1)[1]
        self.asked[endpoint] += answer.status < 400
        if answer.status < 400 and self.asked[endpoint] % 2 == 1:
            self.close_connection = True
            return
        if self.path.endswith("/create_session"):
            self.sessions.append(json.loads(text)["session_id"])
        self.send_response(answer.status)
        self.send_header("Content-Type", answer.headers["Content-Type"])
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    do_GET = do_POST = relay

    def log_message(self, *_):
        pass


def finish(session):
    """What newer SDKs say when they end: the weights are free for another client's run."""
    headers = {"X-API-Key": os.environ["TINKER_API_KEY"]}
    urllib.request.urlopen(urllib.request.Request(f"{URL}/api/v1/sessions/{session}/finish", b"{}", headers, method="POST"))


def twice():  # A7: each request comes twice, since its first answer was lost. Before others have a run
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Broken)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    data = [plain(rng.integers(0, 256, 10)) for _ in range(2)]
    params = types.SamplingParams(max_tokens=5, seed=5, stop=[])
    ends = []
    for through in (tinker.ServiceClient(base_url=f"http://127.0.0.1:{server.server_port}"), service):
        client = train(service=through)
        for _ in range(2):
            client.forward_backward(data, "cross_entropy")
            client.optim_step(adam(1e-2)).result()
        sampler = snapshot(client)
        sequence = sampler.sample(prompt=text([1, 2]), num_samples=1, sampling_params=params).result().sequences[0]
        client.save_state("end").result()
        ends.append((list(sequence.tokens), list(sequence.logprobs), logprobs(client.forward(data, "cross_entropy").result())))
        for session in Broken.sessions:
            finish(session)
    (tokens, drawn, lp), (again, drawn_again, lp_again) = ends
    assert tokens == again and drawn == drawn_again and (lp == lp_again).all()
    for path in ("create_model", "forward_backward", "optim_step", "save_weights_for_sampler", "asample", "save_weights"):
        assert Broken.asked[path] >= 2, path
    server.shutdown()


def scores():  # A8: one number, whoever computes it
    client = train()
    sampler = snapshot(client)
    prompt = [int(t) for t in rng.integers(0, 256, 20)]
    sequence = (
        sampler.sample(prompt=text(prompt), num_samples=1, sampling_params=types.SamplingParams(max_tokens=9, stop=[]))
        .result()
        .sequences[0]
    )
    whole = prompt + list(sequence.tokens)
    scored = sampler.compute_logprobs(text(whole)).result()
    assert scored[0] is None and np.isfinite(np.array(scored[1:])).all()
    assert (np.array(scored[len(prompt) :], np.float32) == np.array(sequence.logprobs, np.float32)).all()
    learnt = logprobs(client.forward([plain(whole)], "cross_entropy").result())
    assert (learnt == np.array(scored[1:], np.float32)).all()
    top = sampler.sample(
        prompt=text(prompt), num_samples=1, sampling_params=types.SamplingParams(max_tokens=1),
        include_prompt_logprobs=True, topk_prompt_logprobs=3,
    ).result()
    places = top.topk_prompt_logprobs
    assert places[0] is None and all(len(place) == 3 for place in places[1:])


def targets():
    """cross_entropy with several targets a token, dense and sparse: the sum over each column's."""
    client = train()
    tokens = [int(t) for t in rng.integers(0, 256, 7)]
    wide = rng.integers(0, 256, (7, 3))
    weights = rng.random((7, 3)).astype(np.float32)
    both = types.Datum(
        model_input=text(tokens), loss_fn_inputs={"target_tokens": wide.astype(np.int64), "weights": weights}
    )
    output = client.forward_backward([both], "cross_entropy").result()
    got = np.array(output.loss_fn_outputs[0]["logprobs"].data).reshape(7, 3)
    for k in range(3):
        column = types.Datum(
            model_input=text(tokens), loss_fn_inputs={"target_tokens": wide[:, k].copy(), "weights": weights[:, k].copy()}
        )
        assert (logprobs(client.forward([column], "cross_entropy").result()) == got[:, k].astype(np.float32)).all()
    assert abs(output.metrics["loss:sum"] + (weights * got).sum()) < 1e-4
    # the same with what has no weight left out (CSR): the same loss, and the same log-probabilities there
    listed = np.arange(21).reshape(7, 3) % 2 == 0
    sparse = {
        name: types.TensorData(
            data=x[listed], dtype=dtype, shape=[7, 3], sparse_crow_indices=[0, *np.cumsum(listed.sum(1)).tolist()],
            sparse_col_indices=np.nonzero(listed)[1].tolist(),
        )
        for name, x, dtype in (("target_tokens", wide, "int64"), ("weights", weights, "float32"))
    }
    few = client.forward_backward(
        [types.Datum(model_input=text(tokens), loss_fn_inputs=sparse)], "cross_entropy"
    ).result()
    assert abs(few.metrics["loss:sum"] + (weights * got)[listed].sum()) < 1e-4
    assert (np.array(few.loss_fn_outputs[0]["logprobs"].data).reshape(7, 3)[listed] == got[listed]).all()


def custom():
    """A loss of the client's own: the cross-entropy, whose step is then the server's own."""
    try:
        import torch
    except ImportError:
        print("custom losses: skipped, no torch")
        return
    data = [plain(rng.integers(0, 256, 11)) for _ in range(3)]

    def loss(data, lists):
        total = -sum(lp.sum() for lp in lists)
        return total, {"mine": float(total)}

    ends = []
    for own in (True, False):
        client = train()
        future = client.forward_backward_custom(data, loss) if own else client.forward_backward(data, "cross_entropy")
        future.result()
        client.optim_step(adam(1e-2)).result()
        ends.append(logprobs(client.forward(data[:1], "cross_entropy").result()))
    assert (ends[0] == ends[1]).all()


def resume():
    client = train()
    data = [plain(rng.integers(0, 256, 10))]
    client.forward_backward(data, "cross_entropy")
    client.optim_step(adam(1e-2))
    path = client.save_state("kept").result().path
    wanted = logprobs(client.forward(data, "cross_entropy").result())
    client.forward_backward(data, "cross_entropy")
    client.optim_step(adam(1e-2)).result()
    went_on = logprobs(client.forward(data, "cross_entropy").result())
    again = there(service.create_training_client_from_state_with_optimizer(path))
    assert (logprobs(again.forward(data, "cross_entropy").result()) == wanted).all()
    again.forward_backward(data, "cross_entropy")
    again.optim_step(adam(1e-2)).result()
    assert (logprobs(again.forward(data, "cross_entropy").result()) == went_on).all()
    rest = service.create_rest_client()
    assert path in [c.tinker_path for c in rest.list_user_checkpoints().result().checkpoints]


def snapshots():
    client = train()
    old = snapshot(client)
    client.forward_backward([plain(rng.integers(0, 256, 8))], "cross_entropy")
    client.optim_step(adam()).result()
    params = types.SamplingParams(max_tokens=2)
    refused(lambda: old.sample(prompt=text([1, 2]), num_samples=1, sampling_params=params).result(), "snapshot")
    snapshot(client).sample(prompt=text([1, 2]), num_samples=1, sampling_params=params).result()


def base():  # B4, B5: against a server whose frozen model is of the model's folder
    """A reference, taken before the first step or of the base model after it, stays what it was."""
    client = train()
    tokens = [int(t) for t in rng.integers(0, 256, 14)]
    start = snapshot(client)
    wanted = start.compute_logprobs(text(tokens)).result()
    own = logprobs(client.forward([plain(tokens)], "cross_entropy").result())
    assert (own == np.array(wanted[1:], np.float32)).all()
    for _ in range(4):
        client.forward_backward([plain(tokens)], "cross_entropy")
        client.optim_step(adam(1e-2)).result()
        reference = there(service.create_sampling_client(base_model=MODEL))
        assert start.compute_logprobs(text(tokens)).result() == wanted
        assert reference.compute_logprobs(text(tokens)).result() == wanted
        assert snapshot(client).compute_logprobs(text(tokens)).result() != wanted


def crowd():  # A9
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    sampler = snapshot(train())
    params = types.SamplingParams(max_tokens=4)
    futures = [
        sampler.sample(prompt=text([i % 250, 1, 2]), num_samples=1, sampling_params=params) for i in range(1000)
    ]
    assert all(len(f.result().sequences) == 1 for f in futures)
    print("1000 samples in flight within", limit[0], "files")


CHECKS = [
    twice, session, losses, adding_up, chunks, adam_settings, scores, targets, custom, resume, snapshots, crowd
]
print("tinker", tinker.__version__)
for name in sys.argv[4:] or [check.__name__ for check in CHECKS]:
    globals()[name]()
    print(name, "ok", flush=True)
os._exit(0)  # the transport of SDK 0.38 aborts one in fifteen interpreters that end otherwise
