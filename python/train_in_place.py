"""Trains the model that a running cw-infer-server serves, from PyTorch, on the server's own weights.

The parameters of a transformers model are made views of the mapped tensors; every optimizer step is
one publish, so the server's next token comes from it. Nothing is copied or sent.

    python train_in_place.py --prompt "27+35=" --completion "99" --steps 30

Needs torch, transformers and the module commonweight, which lies beside this or is installed
(--library where libcommonweight-bridge.so is not).
bf16 weights are updated in bf16: fine for trying out, too coarse for small learning rates.
"""

import argparse

import torch
import transformers

import commonweight


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--bridge", help="bridge file (default: searched)")
    parser.add_argument("--library")
    parser.add_argument("--prompt", default="27+35=")
    parser.add_argument("--completion", default="99")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--learning-rate", type=float, default=0.02)
    args = parser.parse_args()

    bridge = commonweight.Bridge(args.bridge, args.library)
    tokenizer = transformers.AutoTokenizer.from_pretrained(bridge.model())
    model = commonweight.torch_model(bridge)

    prompt = tokenizer(args.prompt, return_tensors="pt").input_ids
    completion = tokenizer(args.completion, return_tensors="pt", add_special_tokens=False).input_ids
    ids = torch.cat([prompt, completion], 1).to(model.device)
    labels = ids.clone()
    labels[:, : prompt.shape[1]] = -100
    n = completion.shape[1]

    def answer():
        body = {"prompt": args.prompt, "max_tokens": n, "temperature": 0}
        return repr(commonweight.request(bridge.socket(), "/v1/completions", body)["choices"][0]["text"])

    print("before:", answer(), "version", bridge.version())
    optimizer = torch.optim.SGD(model.parameters(), lr=args.learning_rate)
    with bridge.lease():
        for step in range(args.steps):
            optimizer.zero_grad()
            loss = model(input_ids=ids, labels=labels).loss
            loss.backward()
            with bridge.publish() as times:
                optimizer.step()
            print(f"step {step} loss {loss.item():.4f} pause {times.total_ms:.2f} ms version {bridge.version()}")
    print("after:", answer(), "version", bridge.version())
    bridge.close()


if __name__ == "__main__":
    main()
