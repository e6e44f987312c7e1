# Reference values for tests/unit/test_distill.c:
#     python3 make_distill.py > distill.txt
# Needs torch, transformers and trl (1.16): the loss of its GKDTrainer and of its DistillationTrainer, which must
# agree, for pairs of the folders beside this one, and the gradients of the student, on the CPU in float64.
import os
import sys

import torch
from transformers import AutoModelForCausalLM
from trl.experimental.gkd import GKDTrainer
from trl.trainer.distillation_trainer import _chunked_divergence_loss

here = os.path.dirname(os.path.abspath(__file__))
sys.path.append(os.path.join(here, ".."))
import generated  # noqa: E402

PROMPT, LENGTHS, VOCAB = 5, (6, 4, 7), 256


def model(name):
    made = generated.model_folder(os.path.join(here, "..", name))
    return AutoModelForCausalLM.from_pretrained(made.name, dtype=torch.float64, attn_implementation="eager")


def sequence(i):
    return [(7 + 37 * i + 11 * t * (t + i)) % VOCAB for t in range(PROMPT + LENGTHS[i])]


print("# Made by make_distill.py: student, teacher, beta, temperature, loss; then a tensor a line: its name, the")
print("# gradient's sums with eight lists of signs, and its norm.")
for student_name, teacher_name in (("mistral", "smollm3"), ("gemma2", "llama3")):
    student, teacher = model(student_name), model(teacher_name)
    vocab = student.config.vocab_size  # of a larger teacher the first entries are shared
    longest = PROMPT + max(LENGTHS)
    ids = torch.zeros(len(LENGTHS), longest, dtype=torch.long)
    labels = torch.full_like(ids, -100)
    for i in range(len(LENGTHS)):
        s = torch.tensor(sequence(i))
        ids[i, : len(s)] = s
        labels[i, PROMPT : len(s)] = s[PROMPT:]
    mask = labels[:, 1:] != -100
    for beta in (0, 0.3, 1):
        for temperature in (1, 0.7):
            student.zero_grad()
            logits = student(ids).logits[:, :-1]
            with torch.no_grad():
                wanted = teacher(ids).logits[:, :-1, :vocab]
            loss = GKDTrainer.generalized_jsd_loss(
                logits, wanted, labels[:, 1:], beta=beta, temperature=temperature, num_items_in_batch=mask.sum())
            loss.backward()
            grads = {n: p.grad.clone() for n, p in student.named_parameters()}
            hidden = [m.model(ids).last_hidden_state[:, :-1] for m in (student, teacher)]
            other, _, _ = _chunked_divergence_loss(
                hidden[0].float(), hidden[1].detach().float(), student.lm_head.weight.float(),
                teacher.lm_head.weight.detach()[:vocab].float(), mask, beta, temperature=temperature,
                student_final_logit_softcapping=getattr(student.config, "final_logit_softcapping", None))
            assert abs(other.item() - loss.item()) < 1e-5 * max(1, loss.item()), (other.item(), loss.item())
            print("pair", student_name, teacher_name, beta, temperature, "%.9g" % loss.item())
            for name, g in grads.items():
                print(name, *("%.9g" % x for x in generated.projected(name, g.numpy())))
