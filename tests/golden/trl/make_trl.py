# Reference runs for tests/e2e/test_offline_reference.c and test_dpo.c:
#     python3 make_trl.py > trl.txt
# Needs torch, transformers and trl (1.16): three AdamW steps of their SFTTrainer and DPOTrainer, on the CPU in
# float32, from the model ../llama3, with a token a byte. Each step is all of the data, so that its order does not
# matter. What is given to the programs as files is written beside this one: sft.jsonl, sft_heldout.jsonl,
# pairs.jsonl, pairs_heldout.jsonl.
import json
import os
import sys
import tempfile

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.trainer_callback import PrinterCallback
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

here = os.path.dirname(os.path.abspath(__file__))
sys.path.append(os.path.join(here, ".."))
import generated  # noqa: E402

MADE = generated.model_folder(os.path.join(here, "../llama3"))

SFT = [("2+2=", "4"), ("12+30=", "42"), ("colours: ", "red, green and blue"), ("once ", "upon a time"), ("a", "bcd"),
       ("the sum of 7 and 8 is ", "15")]
SFT_HELDOUT = [("3+3=", "6"), ("the end", " of it"), ("x", "yz, and so on")]
PAIRS = [("2+2=", "4", "5"), ("12+30=", "42", "a number"), ("colours: ", "red, green and blue", "7"),
         ("once ", "upon a time", "more, with less"), ("a", "bcd", "bdc")]
PAIRS_HELDOUT = [("3+3=", "6", "9"), ("the end", " of it", " is near"), ("x", "yz", "y")]

common = dict(
    per_device_eval_batch_size=8, max_steps=3, learning_rate=1e-3, lr_scheduler_type="constant", weight_decay=0.01,
    max_grad_norm=1.0, logging_steps=1, report_to=[], use_cpu=True, bf16=False, save_strategy="no", disable_tqdm=True,
    gradient_checkpointing=False, optim="adamw_torch", eval_strategy="no", seed=1, max_length=None)


def tokenizer():
    model = models.BPE(vocab={"<0x%02X>" % i: i for i in range(256)}, merges=[], byte_fallback=True)
    t = Tokenizer(model)
    t.decoder = decoders.ByteFallback()
    return PreTrainedTokenizerFast(tokenizer_object=t, eos_token="<0x02>", pad_token="<0x00>")


def write(name, keys, rows):
    rows = [dict(zip(keys, r)) for r in rows]
    with open(os.path.join(here, name), "w") as f:
        f.writelines(json.dumps(r) + "\n" for r in rows)
    return Dataset.from_list(rows)


def number(x):
    return "%.9g" % x


def run(kind, trainer, names, before):
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    for step, line in enumerate((l for l in trainer.state.log_history if "loss" in l), 1):
        print(kind, "step", step, *("%s %s" % (n, number(float(line[n]))) for n in names if n in line))
    held = trainer.evaluate()
    print(kind, "eval", 3, *("%s %s" % (n, number(held["eval_" + n])) for n in names if "eval_" + n in held))
    for name, p in trainer.model.named_parameters():
        print(kind, "moved", name, number((p.detach().double() - before[name].double()).norm().item()))


def model():
    m = AutoModelForCausalLM.from_pretrained(MADE.name, dtype=torch.float32, attn_implementation="eager")
    return m, {n: p.detach().clone() for n, p in m.named_parameters()}


print("# Made by make_trl.py. A line: run, what (a step, the evaluation after the last), its number, and pairs of")
print("# TRL's name and value; or how far a tensor has moved, as a norm.")
sys.stdout.flush()
with tempfile.TemporaryDirectory() as out:
    m, before = model()
    args = SFTConfig(output_dir=out, per_device_train_batch_size=len(SFT), completion_only_loss=True, packing=False,
                     **common)
    keys = ("prompt", "completion")
    run("sft", SFTTrainer(m, args, train_dataset=write("sft.jsonl", keys, SFT), processing_class=tokenizer(),
                          eval_dataset=write("sft_heldout.jsonl", keys, SFT_HELDOUT)),
        ("loss", "grad_norm", "learning_rate", "entropy", "mean_token_accuracy", "num_tokens"), before)
    keys = ("prompt", "chosen", "rejected")
    for loss in ("sigmoid", "ipo", "hinge", "sigmoid_norm", "sigmoid+sft"):
        m, before = model()
        args = DPOConfig(output_dir=out, per_device_train_batch_size=len(PAIRS), loss_type=loss.split("+"), beta=0.3,
                         loss_weights=[1.0, 0.5] if "+" in loss else None,
                         precompute_ref_log_probs=True, disable_dropout=True, **common)
        run("dpo:" + loss,
            DPOTrainer(m, args=args, train_dataset=write("pairs.jsonl", keys, PAIRS), processing_class=tokenizer(),
                       eval_dataset=write("pairs_heldout.jsonl", keys, PAIRS_HELDOUT)),
            ("loss", "grad_norm", "learning_rate", "entropy", "mean_token_accuracy", "num_tokens", "rewards/chosen",
             "rewards/rejected", "rewards/margins", "rewards/accuracies", "logps/chosen", "logps/rejected"), before)
