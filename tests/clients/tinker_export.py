"""Checkpoints taken along by users of the Tinker SDK, against a running cw-trainer serve.

    tinker_export.py URL MODEL RUNS [CHECK ...]

tests/e2e/test_tinker_export.c starts the servers (a tiny random model, two adapters) and this; RUNS is
--run-dir. The first thing that is not as it should be ends it with a traceback. Needs the SDK (0.25 or
later); transformers and peft open what came, and tinker-cookbook downloads it, where they are.
"""
import importlib.util
import inspect
import os
import pathlib
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request

os.environ.setdefault("TINKER_API_KEY", "tml-local")
os.environ.update(TINKER_TELEMETRY="0", TINKER_BASE_URL=sys.argv[1], HF_HUB_OFFLINE="1")

import numpy as np
import tinker
from tinker import types

URL, MODEL, RUNS = sys.argv[1:4]
tokens = np.arange(5, 25)
work = pathlib.Path(tempfile.mkdtemp())


def there(client):
    """A client that newer SDKs give as a future."""
    return client.result() if hasattr(client, "result") else client


def train(rank):
    service = tinker.ServiceClient(base_url=URL)
    client = there(service.create_lora_training_client(base_model=MODEL, rank=rank))
    client.forward_backward([datum()], "cross_entropy")
    client.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    return service, client


def datum():
    return types.Datum(
        model_input=types.ModelInput.from_ints([int(t) for t in tokens[:-1]]),
        loss_fn_inputs={
            "target_tokens": tokens[1:].astype(np.int64),
            "weights": np.ones(len(tokens) - 1, np.float32),
        },
    )


def score(client):
    out = client.forward([datum()], "cross_entropy").result().loss_fn_outputs[0]["logprobs"]
    return np.array(out.data, np.float32)


def has(name):
    return importlib.util.find_spec(name) is not None


def check_folder(folder, client, rank):
    """The weights are those that are trained, by the libraries that others open such a folder with."""
    if not (has("torch") and has("transformers") and (rank == 0 or has("peft"))):
        print("not opened:", sys.executable, "has no torch, transformers or peft")
        return
    import torch
    from transformers import AutoModelForCausalLM

    base = client.get_info().model_data.tokenizer_id if rank else folder
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    if rank:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, folder)
    with torch.no_grad():
        logits = model(torch.tensor(tokens)[None, :-1]).logits[0]
    wanted = torch.log_softmax(logits, -1)[torch.arange(len(tokens) - 1), torch.tensor(tokens[1:])]
    off = np.abs(wanted.numpy() - score(client)).max()
    print("opened", folder, "largest difference", off)
    assert off < 1e-4


def is_same(folder, path):
    """All files of the checkpoint but the optimizer's, as they lie on the disk."""
    source = pathlib.Path(RUNS) / path.removeprefix("tinker://")
    names = {str(p.relative_to(source)) for p in source.rglob("*") if p.is_file()}
    names = {n for n in names if not n.startswith("trainer/")}
    assert names == {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()} and names
    for name in names:
        assert (folder / name).read_bytes() == (source / name).read_bytes(), name


def cli(*args):
    run = subprocess.run([sys.executable, "-m", "tinker.cli", *args], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def download(path, name):
    """tinker checkpoint download: an archive, or, in newer SDKs, the files themselves."""
    cli("checkpoint", "download", path, "--output", str(work / name))
    return work / name / path.removeprefix("tinker://").replace("/", "_")


def exports(rank):
    service, client = train(rank)
    rest = service.create_rest_client()
    saved = client.save_state("state").result().path
    if hasattr(rest, "get_checkpoint_archive_url_from_tinker_path"):
        folder = download(saved, f"archive-{rank}")
        is_same(folder, saved)
        check_folder(folder, client, rank)
    if hasattr(client, "save_weights_external"):
        path = client.save_weights_external("out").result().path
        assert path.endswith("/external_weights/out")
        kinds = {c.tinker_path: c.checkpoint_type for c in rest.list_user_checkpoints().result().checkpoints}
        assert kinds[path] == "external" and kinds[saved] == "training"
        if hasattr(rest, "get_external_weights_urls"):
            external(rest, client, path, rank)
        rest.delete_checkpoint_from_tinker_path(path).result()
        assert path not in [c.tinker_path for c in rest.list_user_checkpoints().result().checkpoints]
    if hasattr(service, "close"):
        service.close("success").result()
    if not hasattr(rest, "get_checkpoint_archive_url_from_tinker_path"):
        # a training checkpoint, which newer SDKs load and export: now that its client has finished
        assert any((download(saved, f"state-{rank}")).iterdir())


def external(rest, client, path, rank):
    response = rest.get_external_weights_urls(path).result()
    assert "config.json" in response.urls or "adapter_config.json" in response.urls
    for name, url in response.urls.items():  # without a key
        body = urllib.request.urlopen(url).read()
        assert body == (pathlib.Path(RUNS) / path.removeprefix("tinker://") / name).read_bytes()
    folder = download(path, f"external-{rank}")
    is_same(folder, path)
    check_folder(folder, client, rank)
    if has("tinker_cookbook"):
        cookbook(path, client, rank)
    client.save_weights_external("out").result()  # anew: URLs of before are no good
    try:
        urllib.request.urlopen(url)
        raise AssertionError("a URL of what was replaced is answered")
    except urllib.error.HTTPError as error:
        assert error.code == 403 and b"anew" in error.read()
    if "age_encryption_recipients" in inspect.signature(client.save_weights_external).parameters:
        try:
            client.save_weights_external("secret", age_encryption_recipients=["age1"]).result()
            raise AssertionError("encryption is not refused")
        except Exception as error:
            assert "age_encryption_recipients" in str(error), error


def cookbook(path, client, rank):
    """The cookbook's own download, and its merging of an adapter into a model."""
    from tinker_cookbook import weights

    folder = work / f"cookbook-{rank}"
    weights.download(tinker_path=path, output_dir=str(folder), base_url=URL)
    is_same(folder, path)
    if rank:
        merged = work / "merged"
        base = client.get_info().model_data.tokenizer_id
        weights.build_hf_model(base_model=base, adapter_path=str(folder), output_path=str(merged))
        check_folder(merged, client, 0)


def whole():
    exports(0)


def adapter():
    exports(4)


CHECKS = [whole, adapter]
print("tinker", tinker.__version__)
for name in sys.argv[4:] or [check.__name__ for check in CHECKS]:
    globals()[name]()
    print(name, "ok", flush=True)
os._exit(0)  # the transport of SDK 0.38 aborts one in fifteen interpreters that end otherwise
