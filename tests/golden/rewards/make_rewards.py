# Reference scores for tests/unit/test_shape_rewards.c: python3 make_rewards.py > rewards.txt
# Needs trl (1.16), whose reward functions are called as they are; of `json` Python's json and its ==.
import json
import random

from trl.rewards import get_repetition_penalty_reward, get_soft_overlong_punishment, think_format_reward

draw = random.Random(3)
print("# Made by make_rewards.py. overlong longest buffer tokens score; repetition n ids score;")
print("# think text score; json answer text score (texts as JSON)")
for longest, buffer in ((100, 20), (10, 9), (512, 1)):
    lengths = sorted({0, 1, longest - buffer, longest - buffer + 1, longest - 1, longest, longest + 3})
    scores = get_soft_overlong_punishment(longest, buffer)([[1] * n for n in lengths])
    for n, score in zip(lengths, scores):
        print("overlong", longest, buffer, n, "%.12g" % score)
for n in (1, 2, 3, 5):
    for length, kinds in ((0, 1), (2, 2), (4, 1), (5, 9), (40, 2), (40, 5), (60, 30)):
        ids = [draw.randrange(kinds) for _ in range(length)]
        score = get_repetition_penalty_reward(n)([ids])[0]
        print("repetition", n, ",".join(map(str, ids)) or "-", "%.12g" % score)
for text in ("<think>\na\n</think>\nb", "<think>a", "a</think>", " <think>a</think>", "<think></think>",
             "<think>a<think>b</think>", "<think>a</think> <think>b</think>", "<think>a</think></think>", "",
             "<think>", "</think><think>", "x\n<think>a</think>", "<THINK>a</THINK>", "<think>\u00e9</think>\n"):
    print("think", json.dumps(text), "%g" % think_format_reward([[{"content": text}]])[0])
answers = [None, '{"a": 1, "b": [1, 2.5, null]}', "3", '"x"', "[true, {}]"]
texts = ['{"b": [1.0, 2.5, null], "a": 1}', '{"a": 1, "b": [1, 2.5]}', "3", "3.0", "3 4", "", '"x"', "'x'", '{"a": }',
         " [true, {}]\n", "[true, {}, 1]", '{"a": 1, "b": [2.5, 1, null]}', "null", "[1"]
for answer in answers:
    for text in texts:
        for form in ("%s", "Here it is:\n```json\n%s\n```\nDone.", "```\n[0]\n```\nor\n```\n%s\n```"):
            try:
                got = json.loads(text)
                score = answer is None or (got == json.loads(answer) and type(got) != bool)
            except ValueError:
                score = False
            print("json", json.dumps(answer), json.dumps(form % text), int(score))
