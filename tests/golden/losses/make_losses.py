# Reference losses and gradients for tests/unit/test_loss.c: python3 make_losses.py > losses.txt
# Needs torch. Written on padded (sequences, tokens) tensors in float64, with gradients by autograd:
# nothing in common with trainer/learn/loss.c but the formulas of TRL 1.16's documentation of GRPOConfig.
import itertools
import torch

torch.set_default_dtype(torch.float64)
EPSILON, EPSILON_HIGH, CISPO_CAP, BETA, DELTA, LONGEST = 0.2, 0.28, 1.5, 0.04, 2.0, 10

# One row a sequence: advantage, then of each token: log-probability, log-ratio to the trainer's
# before the step, the same of that to the sampler's, and log-ratio to the reference. Chosen so that
# a token and a sequence lie on each side of every bound; one sequence has no tokens.
SEQUENCES = [
    (0.75, [(-0.5, 0.5, 1.25, 0.2), (-1.5, -0.4, -0.1, -0.3), (-2.25, 0.1, 0.1, 0.05), (-0.1, 0, 0.05, -0.5)]),
    (-1.25, [(-0.75, 1.0, 0.3, 0.4), (-3.0, 0.5, -0.9, 0.7), (-1.1, -0.5, 0.2, -0.8)]),
    (0.5, []),
    (0.5, [(-1.3, 0.6, 0.02, 0.1)]),
    (-0.5, [(-0.3, 0.9, 0.5, 0.6), (-1.9, 0.8, 0.5, -0.2), (-0.9, 0.7, 0.5, 0.3)]),
    (-1.0, [(-2.6, -0.5, -0.5, -0.4), (-0.6, -0.3, -0.4, 0.9)]),
    (0.0, [(-1.7, 0.25, 0.1, -0.6)]),
]


def exact(x):  # a multiple of 1/64: what float32 holds, and sums of which are exact
    return round(x * 64) / 64


def column(k):
    rows = [[exact(token[k]) for token in tokens] for _, tokens in SEQUENCES]
    return torch.tensor([row + [0.0] * (4 - len(row)) for row in rows])


mask = torch.tensor([[1.0] * len(t) + [0.0] * (4 - len(t)) for _, t in SEQUENCES])
advantages = torch.tensor([a for a, _ in SEQUENCES])[:, None]
logprobs = column(0)
old, sampler, ref = logprobs - column(1), logprobs - column(1) - column(2), logprobs - column(3)
lengths = mask.sum(1, keepdim=True)


def correction(mode, low, high):
    if mode == "off":
        return torch.ones_like(mask), None
    level, how = mode.split("_")
    log_weight = (old - sampler) * mask
    if level == "sequence":
        log_weight = log_weight.sum(1, keepdim=True)
    weight = log_weight.exp()
    if how == "truncate":
        weight = weight.clamp(min=low or None, max=high)
    else:
        weight = torch.where((weight < low) | (weight > high), 0.0, weight)
    counted = weight[lengths > 0] if level == "sequence" else weight[mask > 0]
    return weight.expand_as(mask), counted


def mean_of(flags, level):  # of one ratio a token, or a sequence that has tokens
    flags = flags.double().expand_as(mask)
    return (flags[:, :1][lengths > 0] if level == "sequence" else flags[mask > 0]).mean().item()


def case(loss_type, level, kl, bias, delta, mode, low, high):
    x = logprobs.clone().requires_grad_(True)
    log_ratio = x - old
    if level == "sequence":
        log_ratio = (log_ratio * mask).sum(1, keepdim=True) / lengths.clamp(min=1)
    ratio = log_ratio.exp()
    if loss_type == "cispo":
        loss = -ratio.clamp(max=CISPO_CAP).detach() * advantages * x
        clip_low = torch.zeros_like(ratio) > 0
        clip_high = (ratio > CISPO_CAP) & (advantages > 0)
    else:
        plain = ratio.clamp(max=delta) if delta else ratio
        clipped = ratio.clamp(1 - EPSILON, 1 + EPSILON_HIGH)
        loss = -torch.minimum(plain * advantages, clipped * advantages)
        clip_low = (ratio < 1 - EPSILON) & (advantages < 0)
        clip_high = (ratio > 1 + EPSILON_HIGH) & (advantages > 0)
    weight, counted = correction(mode, low, high)
    loss = loss * weight
    divergence = torch.zeros_like(mask)
    if kl != "none":
        d = ref - x
        divergence = {"k1": -d, "k2": d.square() / 2, "k3": d.exp() - d - 1}[kl]
        loss = loss + BETA * (divergence * ratio if bias else divergence)
    loss = loss * mask
    if loss_type == "grpo":
        loss = (loss.sum(1) / lengths[:, 0].clamp(min=1)).mean()
    elif loss_type == "dr_grpo":
        loss = loss.sum() / (len(SEQUENCES) * LONGEST)
    else:
        loss = loss.sum() / mask.sum()
    loss.backward()
    stats = [
        loss.item(),
        divergence[mask > 0].mean().item(),
        mean_of(ratio, level),
        mean_of(clip_low, level),
        mean_of(clip_high, level),
        *([1, 1, 1] if counted is None else [counted.mean().item(), counted.min().item(), counted.max().item()]),
    ]
    return stats + x.grad[mask > 0].tolist()


def numbers(values):
    return " ".join("%.9g" % (v + 0.0) for v in values)


def flat(x):
    return x[mask > 0].tolist()


print("# Made by make_losses.py. The batch:")
print("bounds", numbers([0] + torch.cumsum(lengths[:, 0], 0).tolist()))
for name, x in (("logprobs", logprobs), ("old", old), ("sampler", sampler), ("ref", ref)):
    print(name, numbers(flat(x)))
print("advantages", numbers(advantages[:, 0].tolist()))
print("# epsilon epsilon_high (cispo's own) beta max_completion_length")
print("settings", numbers([EPSILON, EPSILON_HIGH, CISPO_CAP, BETA, LONGEST]))
print("# type level kl bias_correction_kl delta correction min max: loss; means of kl, ratio, low and high")
print("# clips; correction's mean, min, max; d loss / d logprob of each token")
KL = [("none", 0)] + list(itertools.product(("k1", "k2", "k3"), (0, 1)))
MODES = ("off", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
for loss_type, level, (kl, bias), delta, mode in itertools.product(
    ("grpo", "bnpo", "dapo", "dr_grpo", "cispo"), ("token", "sequence"), KL, (0, DELTA), MODES
):
    low = 0.5 if delta else 0  # with and without a lower bound
    print("case", loss_type, level, kl, bias, "%g" % delta, mode, "%g" % low, 3,
          numbers(case(loss_type, level, kl, bias, delta, mode, low, 3.0)))
