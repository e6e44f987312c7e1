# Reference losses and gradients for tests/unit/test_recipe_losses.c:
#     python3 make_recipe_losses.py > recipe_losses.txt
# Needs torch, trl (1.16) and verl (0.9): each case is their own code, run on padded tensors in
# float64, with gradients by autograd.
import functools
import itertools
import random
from collections import defaultdict
from types import SimpleNamespace

import torch
from trl.trainer.grpo_trainer import GRPOTrainer
from verl.trainer.ppo import core_algos
from verl.workers.config import ActorConfig

torch.set_default_dtype(torch.float64)
EPSILON, EPSILON_HIGH, BETA, LONGEST, NEG, POS = 0.2, 0.28, 0.04, 10, 1.05, 0.9
LENGTHS = [5, 3, 1, 6, 0, 4, 5]


def exact(x):  # a multiple of 1/64, which float32 holds
    return round(x * 64) / 64


def make_batch(seed, spread):
    draw = random.Random(seed)
    rows = lambda f: torch.tensor([[exact(f()) if t < n else 0.0 for t in range(6)] for n in LENGTHS])
    b = SimpleNamespace(mask=torch.tensor([[1.0 if t < n else 0.0 for t in range(6)] for n in LENGTHS]))
    b.logprobs = rows(lambda: -3 * draw.random() - 0.1)
    b.old = b.logprobs + rows(lambda: draw.gauss(0, spread))
    b.sampler = b.old + rows(lambda: draw.gauss(0, 0.4))
    b.ref = b.logprobs + rows(lambda: draw.gauss(0, spread))
    b.entropy = rows(lambda: 2.5 * draw.random())
    b.advantages = torch.tensor([exact(draw.gauss(0, 1)) for _ in LENGTHS])
    b.advantages[2] = 0
    return b


class Accelerator:
    num_processes, sync_gradients = 1, True
    gather = staticmethod(lambda x: x)
    reduce = staticmethod(lambda x, reduction: x)
    pad_across_processes = staticmethod(lambda x, dim, pad_index: x)


def trl_trainer(loss_type, level, beta, bias, threshold, top, coef, **more):
    args = SimpleNamespace(use_bias_correction_kl=bias, delta=None, steps_per_generation=1,
                           sapo_temperature_neg=NEG, sapo_temperature_pos=POS, **more)
    t = SimpleNamespace(
        args=args, aux_loss_enabled=False, top_entropy_quantile=top, off_policy_mask_threshold=threshold or None,
        importance_sampling_level=level, beta=beta, loss_type=loss_type, epsilon_low=EPSILON,
        epsilon_high=EPSILON_HIGH, use_vllm=False, vllm_importance_sampling_correction=False,
        model=SimpleNamespace(training=True), current_gradient_accumulation_steps=1, max_completion_length=LONGEST,
        accelerator=Accelerator, _metrics=defaultdict(lambda: defaultdict(list)), entropy_coef=coef,
        use_adaptive_entropy=bool(more), _entropy_bonus_enabled=coef != 0 or bool(more),
        _last_world_entropy=float("inf"), _entropy_window_stats=None,
        get_off_policy_mask=GRPOTrainer.get_off_policy_mask)
    t.get_high_entropy_mask = functools.partial(GRPOTrainer.get_high_entropy_mask, t)
    return t


def trl_loss(t, b):
    x, h = b.logprobs.clone().requires_grad_(True), b.entropy.clone().requires_grad_(True)
    t._get_per_token_logps_and_entropies = lambda *a, **k: (x, h, None)
    ids = torch.zeros_like(b.mask).long()
    loss = GRPOTrainer._compute_loss(t, None, {
        "prompt_ids": ids, "prompt_mask": ids, "completion_ids": ids, "completion_mask": b.mask,
        "advantages": b.advantages, "old_per_token_logps": b.old, "sampling_per_token_logps": b.sampler,
        "ref_per_token_logps": b.ref, "num_items_in_batch": b.mask.sum()})
    loss.backward()
    return loss.item(), x.grad, torch.zeros_like(b.mask) if h.grad is None else h.grad


def verl_loss(name, mode, kl, b):
    config = ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, clip_ratio_low=EPSILON,
                         clip_ratio_high=EPSILON_HIGH, clip_ratio_c=1e12, tau_pos=POS, tau_neg=NEG)
    whole = {"dp_size": 1, "global_batch_size": len(LENGTHS)}  # empty sequences count, as in TRL
    config.global_batch_info.update(whole)
    x = b.logprobs.clone().requires_grad_(True)
    advantages = b.advantages[:, None] * b.mask
    loss, _ = core_algos.get_policy_loss_fn(name)(b.old, x, advantages, b.mask, loss_agg_mode=mode, config=config)
    if kl:
        divergence = core_algos.kl_penalty(x, b.ref, "low_var_kl")
        loss = loss + BETA * core_algos.agg_loss(divergence, b.mask, mode, **whole)
    loss.backward()
    return loss.item(), x.grad, torch.zeros_like(b.mask)


def numbers(values):
    return " ".join("%.12g" % (v + 0.0) for v in values)


def flat(b, x):
    return x[b.mask > 0].tolist()


def show_batch(b):
    print("bounds", numbers([sum(LENGTHS[:i]) for i in range(len(LENGTHS) + 1)]))
    for name in ("logprobs", "old", "sampler", "ref", "entropy"):
        print(name, numbers(flat(b, getattr(b, name))))
    print("advantages", numbers(b.advantages.tolist()))


def show(b, kind, values):
    loss, dlogprobs, dentropy = values
    print("case", kind, numbers([loss] + flat(b, dlogprobs) + flat(b, dentropy)))


print("# Made by make_recipe_losses.py. A batch, then its cases:")
print("# type level beta bias_correction_kl off_policy_threshold top_entropy_quantile entropy_coef clamp:")
print("# loss; d loss / d logprob, d loss / d entropy of each token")
near, far = make_batch(7, 0.4), make_batch(8, 11)
show_batch(near)
for loss_type, beta, threshold, top, coef in itertools.product(
        ("sapo", "luspo", "dapo", "grpo", "dr_grpo"), (0, BETA), (0, 0.1), (1, 0.2, 0.5, 0), (0, 0.01)):
    level = "sequence" if loss_type == "luspo" else "token"
    t = trl_trainer(loss_type, level, beta, True, threshold, top, coef)
    show(near, f"{loss_type} {level} {beta:g} 1 {threshold:g} {top:g} {coef:g} 0", trl_loss(t, near))
show(near, "gmpo token 0 0 0 1 0 0", verl_loss("geo_mean", "token-mean", False, near))
show_batch(far)
for name, verl_name, level, mode in (
        ("dapo", "vanilla", "token", "token-mean"), ("grpo", "vanilla", "token", "seq-mean-token-mean"),
        ("grpo", "gspo", "sequence", "seq-mean-token-mean"), ("sapo", "sapo", "token", "seq-mean-token-mean")):
    for kl in (False, True):
        show(far, f"{name} {level} {BETA * kl:g} 0 0 1 0 1", verl_loss(verl_name, mode, kl, far))
show(far, "gmpo token 0 0 0 1 0 0", verl_loss("geo_mean", "token-mean", False, far))

print("# adaptive: coef, min, max, delta, target; then mean entropy and applied coefficient of each step")
for settings in ((0.02, 0.01, 0.05, 0.015, 1.0), (0.0, 0.0, 1.0, 0.005, 1.3)):
    coef, least, most, delta, target = settings
    t = trl_trainer("dapo", "token", 0, False, 0, 1, coef, entropy_coef_min=least, entropy_coef_max=most,
                    entropy_coef_delta=delta, entropy_target=target)
    steps = []
    for mean in (2.0, 0.9, 0.5, 0.5, 0.25, 1.5, 2.0, 0.75, 1.0, 1.25):
        b = SimpleNamespace(**vars(near))
        b.entropy = torch.full_like(near.entropy, mean)
        _, _, dentropy = trl_loss(t, b)
        steps += [mean, -dentropy[0, 0].item() * b.mask.sum().item()]
    print("adaptive", numbers(settings), numbers(steps))
