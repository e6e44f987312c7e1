"""An environment of verifiers (0.1.14) as one of cw-trainer's (docs/use/environments.md):

    python verifiers_environment.py ENVIRONMENT --data > train.jsonl
    cw-trainer train --data train.jsonl --rollouts "command:python verifiers_environment.py ENVIRONMENT" ...

ENVIRONMENT is a FILE.py that has load_environment(), or an installed environment's name. Each turn's messages are
rendered by the server's chat template, and each turn is learned behind what it was sampled behind. Calls of tools are not
parsed out of the text: environments that read them there themselves will do."""
import asyncio
import json
import os
import runpy
import sys
import time

lines = os.fdopen(os.dup(1), "w")  # what environments print goes to standard error
os.dup2(2, 1)

try:
    import verifiers as vf
    from verifiers.types import Response, ResponseMessage
except ImportError as error:
    sys.exit(f"{error}: this file is for verifiers 0.1 (pip install 'verifiers<0.2'), the later ones are another design")


class Policy(vf.Client):
    """The client of one episode; what it has is a function that asks the trainer."""

    turns = 0

    def setup_client(self, config):
        return config

    async def to_native_tool(self, tool):
        return {"type": "function", "function": tool.model_dump(exclude={"strict"})}

    async def to_native_prompt(self, messages):
        return [m.model_dump(exclude_none=True) for m in messages], {}

    async def get_native_response(self, prompt, model, sampling_args, tools=None, **_):
        body = {"messages": prompt, "add_generation_prompt": True, **({"tools": tools} if tools else {})}
        before = await self.client({"tokenize": body})
        limits = {k: v for k, v in sampling_args.items() if k in ("max_tokens", "stop") and v}
        turn = await self.client({"sample": {"token_ids": before, **limits}})
        self.turns += 1
        return turn

    async def raise_from_native_response(self, response):
        pass

    async def from_native_response(self, turn):
        message = ResponseMessage(content=turn["text"], finish_reason=turn["finish_reason"],
                                  is_truncated=turn["finish_reason"] == "length")
        return Response(id="", created=int(time.time()), model="policy", message=message)

    async def close(self):
        pass


async def play(environment, number, example, replies):
    async def ask(line):
        say({"id": number, **line})
        return await replies.get()

    policy = Policy(ask)
    task = {"example_id": number, **example}
    if isinstance(task["prompt"], str):
        task["prompt"] = [{"role": "user", "content": task["prompt"]}]
    try:
        output = await environment.run_rollout(task, policy, "policy", {})
        if output["error"] or not policy.turns:
            raise RuntimeError(output["error"] or "the environment sampled nothing")
        say({"id": number, "trajectory": {"turns": [1] * policy.turns, "reward": output["reward"]}})
    except Exception as e:
        say({"id": number, "error": f"{type(e).__name__}: {e}"})


def say(line):
    print(json.dumps(line), file=lines, flush=True)


async def serve(environment):
    replies, tasks = {}, set()
    say({"at_once": 256})
    while text := await asyncio.to_thread(sys.stdin.readline):
        line = json.loads(text)
        number = line.pop("id")
        kind, value = line.popitem()
        if kind != "episode":
            replies[number].put_nowait(value)
            continue
        replies[number] = asyncio.Queue()
        task = asyncio.create_task(play(environment, number, value["example"], replies[number]))
        tasks.add(task)  # a task that nobody holds may vanish
        task.add_done_callback(lambda t, n=number: (tasks.discard(t), replies.pop(n)))


name = sys.argv[1]
load = runpy.run_path(name)["load_environment"] if name.endswith(".py") else lambda: vf.load_environment(name)
if "--data" in sys.argv:
    for row in load().get_dataset():
        say({k: row[k] for k in ("prompt", "answer", "info") if k in row})
else:
    asyncio.run(serve(load()))
