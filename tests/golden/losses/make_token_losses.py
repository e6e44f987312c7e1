# Reference losses and gradients for tests/unit/test_token_loss.c:
#   python3 make_token_losses.py > token_losses.txt
# Needs torch. In float64 with gradients by autograd, from the formulas that the Tinker API's
# documentation gives; nothing in common with trainer/learn/losses.c but these.
import torch

torch.set_default_dtype(torch.float64)

# Of each token: log-probability, log-ratio to the sampler's, advantage, weight, in the sequence's
# ratio. In 64ths, which float32 holds; tokens lie on each side of every bound, with advantages of
# both signs, and some are a prompt's, which count for nothing.
TOKENS = [(-8.25, -8.25, 0, 0, 0), (-3.5, -3.5, 0, 0, 0), (-0.5, 0.5, 0.75, 1, 1), (-1.5, -0.375, 0.75, 0.5, 1),
          (-2.25, 0.125, 0.75, 0.25, 1), (-0.125, 0, -1.25, 1, 1), (-0.75, 1.0, -1.25, 0.125, 1),
          (-3.0, -0.5, -1.25, -0.5, 1), (-1.125, -0.046875, 0.5, 2, 0), (-2.625, 1.5, 0.5, 1, 1)]
column = lambda k: torch.tensor([float(t[k]) for t in TOKENS])
START, RATIO, ADVANTAGES, WEIGHTS, MASK = (column(k) for k in range(5))
SAMPLER = START - RATIO


def surrogate(ratio, low, high):
    return -torch.minimum(ratio * ADVANTAGES, ratio.clamp(low, high) * ADVANTAGES)


def gspo(lp, low, high, beta):
    mean = (lp.detach() - SAMPLER)[MASK != 0].mean()
    return surrogate(torch.exp(mean + lp - lp.detach()), low, high)


LOSSES = {
    "cross_entropy": lambda lp, low, high, beta: -WEIGHTS * lp,
    "importance_sampling": lambda lp, low, high, beta: -torch.exp(lp - SAMPLER) * ADVANTAGES,
    "ppo": lambda lp, low, high, beta: surrogate(torch.exp(lp - SAMPLER), low, high),
    "cispo": lambda lp, low, high, beta: -torch.exp(lp - SAMPLER).detach().clamp(low, high) * ADVANTAGES * lp,
    "dro": lambda lp, low, high, beta: -(ADVANTAGES * lp - beta / 2 * (lp - SAMPLER) ** 2),
    "gspo": gspo,
}
# clip_low_threshold, clip_high_threshold, beta: the defaults, and others
SETTINGS = {
    "cross_entropy": [(0, 0, 0)],
    "importance_sampling": [(0, 0, 0)],
    "ppo": [(0.8, 1.2, 0), (0.5, 2.0, 0)],
    "cispo": [(0, 4, 0), (0.9, 1.25, 0)],
    "dro": [(0, 0, 0.05), (0, 0, 0.5)],
    "gspo": [(0.8, 1.2, 0), (0.8, 1.03, 0), (1.15, 1.3, 0)],
}

numbers = lambda values: " ".join(repr(float(x)) for x in values)
for name, values in [("logprobs", START), ("sampler", SAMPLER), ("advantages", ADVANTAGES), ("weights", WEIGHTS), ("mask", MASK)]:
    print(name, numbers(values))
for name, loss in LOSSES.items():
    for settings in SETTINGS[name]:
        lp = START.clone().requires_grad_()
        total = loss(lp, *settings).sum()
        total.backward()
        print(name, numbers(settings), repr(total.item()), numbers(lp.grad))
