"""python/trl_rollout.py against the real TRL, on the CPU: trl_rollout.py BRIDGE LIBRARY FOLDER.

TRL's own GRPOTrainer takes three steps on the demo's model: each is one version of the server's weights,
and what the server says a sampled token's log-probability is, TRL's forward pass over the same memory says.
"""

import json
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "python"))
import commonweight
import trl
import trl_rollout

path, library, folder = sys.argv[1:]
folder = pathlib.Path(folder)
data = folder / "sums.jsonl"
data.write_text("".join(json.dumps({"prompt": f"{a}+35=", "answer": str(a + 35)}) + "\n" for a in range(10, 50)))

far = []  # of each micro-batch: how far the two log-probabilities are apart at most
theirs = trl.GRPOTrainer._get_per_token_logps_and_entropies


def compared(self, *arguments, **words):
    found = theirs(self, *arguments, **words)
    sampled, mask = self.latest["sampling_per_token_logps"], self.latest["completion_mask"]
    far.append(((found[0].detach() - sampled) * mask).abs().max().item())
    return found


class Trainer(trl.GRPOTrainer):
    def _compute_loss(self, model, inputs):
        self.latest = inputs
        return super()._compute_loss(model, inputs)


Trainer._get_per_token_logps_and_entropies = compared
trl.GRPOTrainer = Trainer
with commonweight.Bridge(path, library) as bridge:
    version, before = bridge.version(), bridge.tensors()["model.norm.weight"].clone()
sys.argv = ["trl_rollout", str(data), "--bridge", path, "--library", library, "--steps", "3", "--out", str(folder / "trl")]
trl_rollout.main()
with commonweight.Bridge(path, library) as bridge:
    assert bridge.version() == version + 6, (version, bridge.version())
    assert (bridge.tensors()["model.norm.weight"] != before).any()
    bridge.check()
assert len(far) >= 3 and max(far) < 1e-4, far
print("trl_rollout: PASS, log-probabilities", max(far), "apart at most")
