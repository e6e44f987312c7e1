# Reference losses and gradients for tests/unit/test_preference.c:
#     python3 make_preference.py > preference.txt
# Needs torch and trl (1.16): each case is DPOTrainer's own compute_loss on a model that is a table of
# log-probabilities, in float64, with gradients by autograd.
import random
from collections import defaultdict
from types import SimpleNamespace

import torch
from trl.trainer.dpo_trainer import DPOTrainer

torch.set_default_dtype(torch.float64)
PAIRS, LONGEST = 5, 6
LENGTHS = [5, 3, 1, 6, 4, 2, 6, 3, 1, 4]  # of the chosen, then of the rejected


def exact(x):  # a multiple of 1/64, which float32 holds
    return round(x * 64) / 64


draw = random.Random(11)
mask = torch.tensor([[1.0] * n + [0.0] * (LONGEST - n) for n in LENGTHS])
logps = torch.tensor([[exact(-3 * draw.random() - 0.1) for _ in range(LONGEST)] for _ in LENGTHS]) * mask
reference = torch.tensor([exact(x + draw.gauss(0, 4)) for x in logps.sum(1).tolist()])


class Accelerator:
    num_processes, device = 1, torch.device("cpu")
    gather = gather_for_metrics = staticmethod(lambda x: x)


def loss_and_metrics(loss_type, beta, smoothing):
    t = SimpleNamespace(
        aux_loss_enabled=False, ld_alpha=None, precompute_ref_logps=True, f_divergence_type="reverse_kl", beta=beta,
        loss_types=[loss_type], loss_weights=[1.0], label_smoothing=smoothing, use_weighting=False,
        accelerator=Accelerator, model=SimpleNamespace(training=True), _total_train_tokens=0, _tp_size=1,
        _metrics=defaultdict(lambda: defaultdict(list)), args=SimpleNamespace(discopop_tau=0.05))
    x = logps.clone().requires_grad_(True)
    zero = torch.zeros_like(x)

    def model(**inputs):
        return SimpleNamespace(log_probs=x * mask, entropy=zero, mean_logits=zero, is_top1=zero.bool())

    ids = torch.zeros(2 * PAIRS, LONGEST + 1, dtype=torch.long)
    inputs = {
        "input_ids": ids, "attention_mask": torch.ones_like(ids),
        "completion_mask": torch.cat([torch.zeros(2 * PAIRS, 1), mask], 1),
        "ref_chosen_logps": reference[:PAIRS], "ref_rejected_logps": reference[PAIRS:]}
    model.training = True
    loss = DPOTrainer._compute_loss(t, model, inputs, False)
    loss.backward()
    metrics = t._metrics["train"]
    names = ("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies", "logps/chosen",
             "logps/rejected")
    return [loss.item()] + [metrics[n][0] for n in names], x.grad[:, 0].tolist()


def numbers(values):
    return " ".join("%.12g" % (v + 0.0) for v in values)


print("# Made by make_preference.py. Pairs: chosen and rejected completions' tokens, summed log-probabilities,")
print("# the reference's. Then cases: type beta label_smoothing: loss; rewards/chosen rewards/rejected")
print("# rewards/margins rewards/accuracies logps/chosen logps/rejected; d loss / d logprob of a token of each")
print("lengths", numbers(LENGTHS))
print("logps", numbers(logps.sum(1).tolist()))
print("reference", numbers(reference.tolist()))
for loss_type in ("sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "apo_zero",
                  "apo_down", "sigmoid_norm", "discopop"):
    for beta in (0.1, 0.5):
        for smoothing in (0.0, 0.1) if loss_type in ("sigmoid", "robust") else (0.1,):
            figures, gradients = loss_and_metrics(loss_type, beta, smoothing)
            print("case", loss_type, "%g %g" % (beta, smoothing), numbers(figures + gradients))
