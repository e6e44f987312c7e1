"""TRL's AsyncGRPOTrainer on a running cw-infer-server: an update is one copy into the server's own weights.

    cw-infer-server --model DIR --listen 127.0.0.1:8000 &
    python trl_weight_transfer.py DIR train.jsonl          # lines with "prompt" and "answer"

BridgeWeightTransfer takes the place of TRL's transfer over NCCL (its WeightTransferProtocol), on a CPU as
on a GPU. The trainer itself wants CUDA, for its attention's kernel, and the package vllm, which its
rollout worker asks for; the rollouts come from cw-infer-server's /v1/completions. For TRL 1.16.
"""

import contextlib
import sys

import commonweight


class BridgeWeightTransfer:
    def __init__(self, path=None, library=None):
        self.path, self.library = path, library
        self.held = contextlib.ExitStack()

    def init_weight_transfer(self):
        self.bridge = self.held.enter_context(commonweight.Bridge(self.path, self.library))
        self.held.enter_context(self.bridge.lease())
        self.weights = self.bridge.tensors()

    def pause(self):
        """Nothing: generation stands still for the copy alone."""

    def send_weights(self, iterator):
        """From (name, tensor) in any dtype; what fails half-way is undone by the server."""
        with self.bridge.publish():
            for name, tensor in iterator:
                shared = self.weights.get(name)
                if shared is None or shared.shape != tensor.shape:
                    raise ValueError(f"{name} {tuple(tensor.shape)} is none of the server's tensors")
                shared.copy_(tensor)

    def resume(self):
        """Nothing, as pause()."""

    def destroy(self):
        self.weights = None
        self.held.close()


def right_answer(completions, answer, **_):
    return [float(right in completion[0]["content"]) for completion, right in zip(completions, answer)]


def main(model, data):
    import datasets
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

    examples = datasets.load_dataset("json", data_files=data, split="train")
    examples = examples.map(lambda row: {"prompt": [{"role": "user", "content": row["prompt"]}]})
    args = AsyncGRPOConfig(
        "runs/trl-async", vllm_server_base_url="http://127.0.0.1:8000", max_completion_length=64, max_steps=50,
        learning_rate=1e-5, logging_steps=1, report_to=[],
    )  # fmt: skip
    AsyncGRPOTrainer(
        model, reward_funcs=right_answer, args=args, train_dataset=examples, weight_transfer=BridgeWeightTransfer()
    ).train()


if __name__ == "__main__":
    main(*sys.argv[1:])
