#!/usr/bin/env python3
"""TRL's GRPOTrainer with vLLM in the same process on what tools/real-run trains, for docs/start/compare.md:
the same start, prompts, reward, samples a step and learning rate.

usage: compare-trl.py MODEL_DIR DATA_DIR OUT_DIR SEED...

MODEL_DIR: a Hugging Face folder, such as runs/real/seed-1/checkpoints/step-0; DATA_DIR: of
tools/real-model. Writes OUT_DIR/seed-N/ (the trained weights as such a folder) and a line for each
seed into OUT_DIR/trl.jsonl. The engine and the trainer are made once and begin each seed with the
first weights. CPU=1: without vLLM and in few steps, to see that all of it works."""

import json
import os
import pathlib
import re
import shutil
import sys
import time

SERVER = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}
os.environ.update(SERVER, MASTER_PORT="29512", HF_HUB_OFFLINE="1", WANDB_MODE="disabled")
started = time.perf_counter()

import torch  # noqa: E402
from accelerate.utils import set_seed  # noqa: E402
from datasets import Dataset  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402

STEPS, PROMPTS, SAMPLES = 150, 32, 8
CPU = "CPU" in os.environ
if CPU:
    STEPS, PROMPTS, SAMPLES = 2, 2, 2


def numeric(completions, answer, **_):
    """1 where the last number of the text is the answer, as the reward of that name in cw-trainer."""
    scores = []
    for completion, right in zip(completions, answer):
        numbers = re.findall(r"-?\d[\d,]*\.?\d*", completion[0]["content"])
        scores.append(float(bool(numbers) and float(numbers[-1].replace(",", "")) == float(right)))
    return scores


def problems(path):
    lines = [json.loads(line) for line in open(path)]
    return Dataset.from_list(
        [{"prompt": [{"role": "user", "content": x["prompt"]}], "answer": x["answer"]} for x in lines]
    )


def make_trainer(model, data, seed):
    config = GRPOConfig(
        output_dir="/tmp/compare-trl",
        per_device_train_batch_size=PROMPTS * SAMPLES,
        num_generations=SAMPLES,
        max_completion_length=48,
        use_vllm=not CPU,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=0.2,
        vllm_max_model_length=512,
        bf16=True,
        use_cpu=CPU,
        gradient_checkpointing=False,
        max_steps=STEPS,
        learning_rate=1e-5,
        lr_scheduler_type="linear",
        temperature=1.0,
        beta=0.0,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        model_init_kwargs={"dtype": torch.float32},
        seed=seed,
    )
    return GRPOTrainer(model=model, reward_funcs=numeric, args=config, train_dataset=problems(data))


def begin(trainer, weights, seed):
    """As it was when it was made, but for its engine."""
    trainer.model.load_state_dict(weights)
    trainer.optimizer = trainer.lr_scheduler = trainer._buffered_inputs = None
    trainer._step, trainer._last_loaded_step = 0, -1
    trainer.args.seed = seed
    set_seed(seed)


def train(trainer, seed):
    if not CPU:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    trainer.train()
    seconds = time.perf_counter() - start
    lines = [line for line in trainer.state.log_history if "reward" in line]
    rewards = [line["reward"] for line in lines]
    tens = [round(sum(rewards[i : i + 10]) / len(rewards[i : i + 10]), 4) for i in range(0, len(rewards), 10)]
    peak = 0 if CPU else torch.cuda.max_memory_reserved() / 2**30
    return {"peer": "TRL with vLLM", "seed": seed, "steps": len(lines), "seconds": round(seconds, 2),
            "torch_peak_gib": round(peak, 1), "reward_by_tens": tens, "last": lines[-1]}  # fmt: skip


def main():
    model, data, out = map(pathlib.Path, sys.argv[1:4])
    seeds = [int(word) for word in sys.argv[4:]]
    out.mkdir(parents=True, exist_ok=True)
    trainer = make_trainer(str(model), data / "train.jsonl", seeds[0])
    weights = {name: tensor.detach().cpu().clone() for name, tensor in trainer.model.state_dict().items()}
    start_s = round(time.perf_counter() - started, 1)
    for seed in seeds:
        if seed != seeds[0]:
            begin(trainer, weights, seed)
        result = {**train(trainer, seed), "start_s": start_s}
        with open(out / "trl.jsonl", "a") as file:
            file.write(json.dumps(result) + "\n")
        print(json.dumps(result), flush=True)
        trainer.model.save_pretrained(out / f"seed-{seed}")
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(model / name, out / f"seed-{seed}" / name)


main()
