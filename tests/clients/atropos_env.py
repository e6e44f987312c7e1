"""A minimal environment of Atropos' for test_atropos.c: sums of two digits, whose answers are
sampled by the server through atroposlib's managed server. Arguments: URL of the API server, URL of
the inference server, model folder, group size."""

import asyncio
import random
import sys

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataGroup


class Sums(BaseEnv):
    name = "sums"

    async def setup(self):
        self.random = random.Random(1)

    async def get_next_item(self):
        a, b = self.random.randrange(10, 100), self.random.randrange(10, 100)
        return f"{a}+{b}=", str(a + b)

    async def evaluate(self, *args, **kwargs):
        pass

    async def collect_trajectories(self, item):
        prompt, answer = item
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            answers = await managed.completion(
                prompt=prompt, n=self.config.group_size, max_tokens=5, temperature=1.0
            )
            nodes = managed.get_state()["nodes"]
        group = ScoredDataGroup(
            tokens=[node.tokens for node in nodes],
            masks=[node.masked_tokens for node in nodes],
            inference_logprobs=[node.logprobs for node in nodes],
            scores=[float(c.text.strip() == answer) for c in answers.choices],
        )
        return group, []


async def main():
    api, server, model, group_size = sys.argv[1:]
    config = BaseEnvConfig(
        tokenizer_name=model,
        group_size=int(group_size),
        max_token_length=32,
        use_wandb=False,
        wandb_name="sums",
        rollout_server_url=api,
        ensure_scores_are_not_same=False,
        steps_per_eval=0,
    )
    servers = [
        APIServerConfig(model_name=model, base_url=f"{server}/v1", api_key="x", server_type="vllm")
    ]
    await Sums(config, servers).env_manager()


asyncio.run(main())
