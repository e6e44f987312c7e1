"""TRL's own GRPOTrainer on the weights of a running cw-infer-server: one copy, no transfer.

    cw-infer-server --model DIR --dtype f32 &
    python trl_rollout.py train.jsonl --steps 60           # lines with "prompt" and "answer"

The model's parameters are views of the server's tensors, rollout_func samples there, and each step of
the optimizer is one publish. For TRL 1.16. In bf16 small updates round away: serve in f32.
Of TRL's sampling options temperature, top_p and max_completion_length are passed on.
"""

import argparse

import datasets
import torch
import transformers
import trl

import commonweight


class PublishedAdamW(torch.optim.AdamW):
    """Generation stands still while step() writes."""

    bridge = None

    def step(self, closure=None):
        with self.bridge.publish():
            return super().step(closure)


def ids_of(prompt, tokenizer):
    if isinstance(prompt, str):
        return tokenizer(prompt).input_ids
    return tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=True).input_ids


def rollouts_of(bridge):
    def rollout(prompts, trainer):  # each prompt stands there as often as it is to be answered
        args = trainer.args
        ids = [ids_of(prompt, trainer.processing_class) for prompt in prompts]
        body = {
            "prompt": ids, "max_tokens": args.max_completion_length, "temperature": args.temperature,
            "top_p": args.top_p, "logprobs": 0, "seed": trainer.state.global_step,
        }  # fmt: skip
        choices = commonweight.request(bridge.socket(), "/v1/completions", body, timeout=600)["choices"]
        return {
            "prompt_ids": ids,
            "completion_ids": [choice["token_ids"] for choice in choices],
            "logprobs": [choice["logprobs"]["token_logprobs"] for choice in choices],
        }

    return rollout


def right_answer(completions, answer, **_):
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    return [float(text.strip() == right) for text, right in zip(texts, answer)]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("data")
    parser.add_argument("--bridge", help="bridge file (default: searched)")
    parser.add_argument("--library", help="libcommonweight-bridge.so, where it is not installed")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--learning-rate", type=float, default=5e-5)
    parser.add_argument("--out", default="runs/trl")
    args = parser.parse_args()
    with commonweight.Bridge(args.bridge, args.library) as bridge, bridge.lease():
        model = commonweight.torch_model(bridge)
        optimizer = PublishedAdamW(model.parameters(), lr=args.learning_rate, weight_decay=0)
        optimizer.bridge = bridge
        config = trl.GRPOConfig(
            args.out, max_steps=args.steps, per_device_train_batch_size=256, num_generations=8, bf16=False,
            max_completion_length=8, lr_scheduler_type="constant", logging_steps=1, save_strategy="no",
            report_to=[], use_cpu=model.device.type == "cpu",
        )  # fmt: skip
        trl.GRPOTrainer(
            model,
            right_answer,
            args=config,
            train_dataset=datasets.load_dataset("json", data_files=args.data, split="train"),
            processing_class=transformers.AutoTokenizer.from_pretrained(bridge.model()),
            rollout_func=rollouts_of(bridge),
            optimizers=(optimizer, None),
        ).train()


if __name__ == "__main__":
    main()
