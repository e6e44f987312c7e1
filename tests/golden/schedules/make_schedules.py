# Reference learning rates for tests/unit/test_schedule.c: python3 make_schedules.py > schedules.txt
# Needs torch and transformers (5), whose schedulers and count of warm-up steps are taken as they are.
import itertools
import torch
from transformers import TrainingArguments, get_scheduler

PEAK, TOTAL = 3e-5, 23


def rates(name, warmup, **kwargs):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)
    arguments = TrainingArguments(output_dir="/tmp/none", warmup_steps=warmup)
    steps = arguments.get_warmup_steps(TOTAL)
    scheduler = get_scheduler(name, optimizer, steps, TOTAL, scheduler_specific_kwargs=kwargs or None)
    values = []
    for _ in range(TOTAL):
        values.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return values


def case(name, warmup, ratio=0, decay=0, shape="cosine", **kwargs):
    line = " ".join("%.17g" % rate for rate in rates(name, warmup, **kwargs))
    print(name, "%g %g %g" % (warmup, ratio, decay), shape, line)


print("# Made by make_schedules.py:", TOTAL, "steps of peak", PEAK)
print("# type warmup_steps min_lr_ratio num_decay_steps decay_type: the rate of each step")
for warmup in (0, 5, 0.1, 0.3):
    for name in ("linear", "cosine", "constant_with_warmup"):
        case(name, warmup)
    for ratio in (0.1, 0.5):
        case("cosine_with_min_lr", warmup, ratio, min_lr_rate=ratio)
    for decay, ratio, kind in itertools.product((4, 16), (0, 0.2), ("cosine", "linear", "1-sqrt")):
        case("warmup_stable_decay", warmup, ratio, decay, kind,
             num_decay_steps=decay, decay_type=kind, min_lr_ratio=ratio)
case("constant", 0)
