"""A calculator: cw-trainer train --rollouts "command:python3 calculator.py" (docs/use/environments.md)."""
import json
import sys


def episode(e):
    tokens, reward = e["prompt_token_ids"], 0
    mask = [0] * len(tokens)
    for _ in range(4):
        turn = yield {"sample": {"token_ids": tokens, "max_tokens": 10, "stop": "\n"}}
        tokens, mask = tokens + turn["token_ids"], mask + [1] * len(turn["token_ids"])
        line = turn["text"].strip()
        if not line.endswith("?"):
            reward = int(line == e["example"]["answer"])
            break
        called = yield {"call": line}  # has the result where a run before made this call
        if "result" not in called:
            numbers = line[:-1].split("+")
            called["result"] = str(sum(map(int, numbers))) if all(n.isdigit() for n in numbers) else "no"
            yield {"result": called["result"]}
        text = yield {"tokenize": {"prompt": called["result"] + "\n", "add_special_tokens": False}}
        tokens, mask = tokens + text, mask + [0] * len(text)
    yield {"trajectory": {"token_ids": tokens, "mask": mask, "reward": reward}}


episodes = {}
print(json.dumps({"at_once": 1024}), flush=True)
for text in sys.stdin:
    line = json.loads(text)
    number = line.pop("id")
    kind, value = line.popitem()
    if kind == "episode":
        episodes[number] = episode(value)
    out = next(episodes[number]) if kind == "episode" else episodes[number].send(value)
    if "trajectory" in out:
        del episodes[number]
    print(json.dumps({"id": number, **out}), flush=True)
