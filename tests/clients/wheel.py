"""The installed wheel, as packaging/try-wheel has it: wheel.py MODEL [DEVICE]. MODEL is the demo's.

Every console script runs; the model is served, checked, trained by one step, and read and written
through the bridge. The first thing that is not as it should be ends this with a traceback.
"""

import importlib.metadata
import json
import pathlib
import subprocess
import sys
import sysconfig
import tempfile

import commonweight

model, device = (*sys.argv[1:], "cpu")[:2]
scripts = pathlib.Path(sysconfig.get_path("scripts"))
entries = [e for e in importlib.metadata.distribution("commonweight").entry_points if e.group == "console_scripts"]
assert len(entries) >= 7, entries
for entry in entries:
    said = subprocess.run([scripts / entry.name, "--version"], check=True, capture_output=True, text=True).stdout
    assert importlib.metadata.version("commonweight") in said, (entry, said)
    print(said.strip())

with tempfile.TemporaryDirectory() as folder, commonweight.serve(60, model=model, device=device, max_batch=16) as server:

    def answer(tokens=5):
        body = {"prompt": "27+35=", "max_tokens": tokens, "temperature": 0}
        return server.request("/v1/completions", body)["choices"][0]["text"]

    print("27+35= is answered", answer())
    assert answer().strip().isdigit(), answer()
    subprocess.run([scripts / "cw-ipc-check", server.bridge], check=True)
    data = pathlib.Path(folder, "train.jsonl")
    data.write_text("".join(json.dumps({"prompt": f"{a}+37=", "answer": str(a + 37)}) + "\n" for a in range(10, 60)))
    view = commonweight.numpy_view if device == "cpu" else commonweight.torch_view
    with commonweight.Bridge(server.bridge) as bridge:
        weights = bridge.tensors(view=view)
        name, shared = next(iter(weights.items()))
        before, version = shared.copy() if device == "cpu" else shared.clone(), bridge.version()
        commonweight.train(
            120, bridge=server.bridge, data=data, reward="exact", max_completion_length=5, prompts_per_step=16,
            max_steps=1, learning_rate=1e-3, run_dir=f"{folder}/run",
        )  # fmt: skip
        assert bridge.version() > version and (shared != before).any(), "the step changed nothing"

        # one update of our own: nothing is left of the answer
        with bridge.lease(), bridge.publish() as times:
            for tensor in weights.values():
                tensor[:] = 0
        print(f"{len(weights)} tensors of {name.split('.')[0]}, published in {times.total_ms:.2f} ms")
        assert bridge.roles()[0] == "policy" and bridge.version() > version + 2
        assert not answer().strip().isdigit(), answer()
        try:  # the server restores what an update leaves half written
            with bridge.lease(), bridge.publish():
                raise KeyError("half written")
        except KeyError:
            pass
        del weights, shared
try:
    commonweight.serve(20, model=f"{model}/nowhere")
    raise AssertionError("a server without a model is healthy")
except RuntimeError as error:
    assert "ended with status" in str(error), error
print("wheel: PASS")
