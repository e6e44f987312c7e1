"""Guess the number, for cw-trainer train --rollouts "command:python3 guess.py"."""
import json, sys


def episode(e):
    answer = int(e["example"]["answer"])
    tokens, reward = e["prompt_token_ids"], 0
    mask = [0] * len(tokens)
    for _ in range(e["example"]["turns"]):
        turn = yield {"sample": {"token_ids": tokens, "max_tokens": 4, "stop": "\n"}}
        tokens, mask = tokens + turn["token_ids"], mask + [1] * len(turn["token_ids"])
        guess = turn["text"].strip()
        if guess == str(answer):
            reward = 1
            break
        hint = "?\n" if not guess.isdigit() else "+\n" if int(guess) < answer else "-\n"
        text = yield {"tokenize": {"prompt": hint, "add_special_tokens": False}}
        tokens, mask = tokens + text, mask + [0] * len(text)
    yield {"trajectory": {"token_ids": tokens, "mask": mask, "reward": reward}}


print(json.dumps({"at_once": 1024}), flush=True)
running = {}
for line in sys.stdin:
    message = json.loads(line)
    number = message.pop("id")
    kind, value = message.popitem()
    if kind == "episode":
        running[number] = episode(value)
        out = next(running[number])
    else:
        out = running[number].send(value)
    if "trajectory" in out:
        del running[number]
    print(json.dumps({"id": number, **out}), flush=True)
