# Reference advantages for tests/unit/test_advantage.c: python3 make_advantages.py > advantages.txt
# Needs torch, trl (1.16) and verl (0.9). Estimators are verl's own functions; of pass@k each advantage
# is a mean over all choices of k samples, counted out; samples that nothing scored (nan) are as in
# TRL's trainer, with its nanstd.
import itertools
import random

import numpy
import torch
from trl.trainer.utils import nanstd
from verl.trainer.config import AlgoConfig
from verl.trainer.ppo import core_algos

torch.set_default_dtype(torch.float64)
GROUPS, EACH = 4, 6


def numbers(values):
    return " ".join("nan" if v != v else "%.12g" % (v + 0.0) for v in values)


def verl(name, rewards, lengths, **config):
    longest = max(lengths)
    mask = torch.tensor([[1.0] * n + [0.0] * (longest - n) for n in lengths])
    scores = torch.zeros_like(mask)
    for i, n in enumerate(lengths):
        scores[i, n - 1] = rewards[i]
    index = numpy.array([i // EACH for i in range(len(rewards))])
    advantages, _ = core_algos.get_adv_estimator_fn(name)(
        token_level_rewards=scores, response_mask=mask, index=index, config=AlgoConfig(**config))
    return advantages[:, 0].tolist()


def choices(rewards, k):
    result = []
    for g in range(GROUPS):
        passes = [r > 0 for r in rewards[g * EACH:(g + 1) * EACH]]
        subsets = list(itertools.combinations(range(EACH), k))
        outcome = torch.tensor([float(any(passes[i] for i in s)) for s in subsets])
        std = outcome.std(unbiased=False)
        scaled = (outcome - outcome.mean()) / std if std > 0 else torch.zeros_like(outcome)
        result += [scaled[[i in s for s in subsets]].mean().item() for i in range(EACH)]
    return result


def unscored(rewards, scale):
    r = torch.tensor(rewards).view(GROUPS, EACH)
    a = r - torch.nanmean(r, dim=1, keepdim=True)
    if scale == "group":
        a = a / (nanstd(r, dim=1)[:, None] + 1e-4)
    if scale == "batch":
        a = a / (nanstd(r) + 1e-4)
    return torch.nan_to_num(a, nan=0.0).flatten().tolist()


print("# Made by make_advantages.py:", GROUPS, "groups of", EACH)
print("# estimator scale k; rewards; tokens; advantages")
draw = random.Random(5)
for kind in ("binary", "real", "real"):
    lengths = [draw.randint(1, 9) for _ in range(GROUPS * EACH)]
    rewards = [float(draw.random() < 0.4) if kind == "binary" else round(draw.gauss(0, 1), 3) for _ in lengths]
    rewards[:EACH] = [0.5] * EACH  # a flat group

    def show(name, scale, k, advantages):
        print(name, scale, k, "|", numbers(rewards), "|", numbers(lengths), "|", numbers(advantages))

    for name in ("rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"):
        show(name, "none", 1, verl(name, rewards, lengths, gamma=1.0))
    if kind == "real":
        show("grpo_passk", "group", 1, verl("grpo_passk", rewards, lengths, norm_adv_by_std_in_grpo=True))
        show("grpo_passk", "none", 1, verl("grpo_passk", rewards, lengths, norm_adv_by_std_in_grpo=False))
    for k in (1, 2, 3, 6):
        show("pass_at_k", "none", k, choices(rewards, k))
    for i in (1, 7, 8, 14, *range(18, 24)):
        rewards[i] = float("nan")
    for scale in ("group", "batch", "none"):
        show("grpo", scale, 1, unscored(rewards, scale))
