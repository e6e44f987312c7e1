"""An environment of verifiers for tests/e2e/test_environments.c: two turns, with a sum in between."""
import verifiers as vf
from datasets import Dataset


class Calculator(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **_):
        text = messages[-1].content.strip()
        return [vf.UserMessage(content=str(sum(map(int, text.split("+")))) if text.isdigit() else "no")]


def has_digits(completion, **_):
    return float(any(c.isdigit() for c in completion[0].content))


def load_environment():
    rows = [{"prompt": [{"role": "user", "content": f"{a}+{a + 3}="}], "answer": str(2 * a + 3)} for a in range(8)]
    return Calculator(dataset=Dataset.from_list(rows), rubric=vf.Rubric(funcs=[has_digits]), max_turns=2)
