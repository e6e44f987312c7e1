"""Writes cases.jsonl: what vLLM's tool parsers make of the texts below, one object a line:
{"form", "text", "calls": [[name, arguments], ...], "content"}. Needs vLLM's Python files (no GPU) and
what they import; README.md says more.

    make_cases.py > cases.jsonl
"""
import json
from types import SimpleNamespace

from vllm.tool_parsers.deepseekv3_tool_parser import DeepSeekV3ToolParser
from vllm.tool_parsers.deepseekv31_tool_parser import DeepSeekV31ToolParser
from vllm.tool_parsers.hermes_tool_parser import Hermes2ProToolParser
from vllm.tool_parsers.llama_tool_parser import Llama3JsonToolParser

MARKERS = """<tool_call> </tool_call> <|python_tag|>
<｜tool▁calls▁begin｜> <｜tool▁calls▁end｜> <｜tool▁call▁begin｜> <｜tool▁call▁end｜> <｜tool▁sep｜>"""


class Tokenizer:
    """As much of one as the parsers ask for."""

    vocab = {text: i for i, text in enumerate(MARKERS.split())}

    def get_vocab(self):
        return self.vocab

    def encode(self, text, **_):
        return [self.vocab[text]]


HARD = '{"s": "a \\"b\\" } ] </tool_call> \\\\", "n": [1, -2.5e3, {"deep": null}], "\\u00e9": "日本 😀"}'


def hermes():
    one = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
    two = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2, 3]}}\n</tool_call>'
    yield one
    yield "I look it up.\n" + one
    yield one + "\n" + two
    yield "First\n\n" + one + two + "\n"
    yield '<tool_call>{"arguments":{"a":1},"name":"add"}</tool_call>'
    yield '<tool_call>\n{"name": "get_weather", "arguments": {}}'
    yield '<tool_call>{"name":"add","arguments":' + HARD.replace("</tool_call>", "<tool_call") + "}</tool_call>"
    yield "<tool_call>\n{'name': 'add'}\n</tool_call>"
    yield '<tool_call>\n{"name": "add", "arguments": {"a": 1}\n</tool_call>'
    yield '<tool_call>\n{"name": "add"}\n</tool_call>'
    yield "no call at all < <tool"
    yield ""


def llama3():
    yield '{"name": "get_weather", "parameters": {"city": "Paris"}}'
    yield '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Paris"}}'
    yield '<|python_tag|>{"name": "add", "parameters": {"a": 1}}; {"name": "add", "parameters": {"a": 2}}'
    yield '{"name": "add", "arguments": {"a": 1}}'
    yield '{"name": "add", "parameters": ' + HARD + "}"
    yield "Two and two are four."
    yield '{"answer": 4}'
    yield '{"name": "add", "parameters": {"a": '


def deepseek():
    begin, end = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"

    def call(name, arguments):
        return f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```<｜tool▁call▁end｜>"

    yield begin + call("get_weather", '{"city": "Paris"}') + end
    yield "Let me see." + begin + call("add", '{"a": 1}') + "\n" + call("add", HARD) + end
    yield "no call"


def deepseek31():
    begin, end = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"

    def call(name, arguments):
        return f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>"

    yield begin + call("get_weather", '{"city": "Paris"}') + end
    yield "Let me see." + begin + call("add", '{"a": 1}') + call("add", HARD) + end


def cases(form, parser, texts):
    request = SimpleNamespace(tools=[], tool_choice="auto", skip_special_tokens=False)
    for text in texts:
        got = parser(Tokenizer()).extract_tool_calls(text, request)
        calls = [[c.function.name, c.function.arguments] for c in got.tool_calls]
        yield {"form": form, "text": text, "calls": calls, "content": got.content}


if __name__ == "__main__":
    for all_cases in (
        cases("hermes", Hermes2ProToolParser, hermes()),
        cases("llama3", Llama3JsonToolParser, llama3()),
        cases("deepseek", DeepSeekV3ToolParser, deepseek()),
        cases("deepseek", DeepSeekV31ToolParser, deepseek31()),
    ):
        for case in all_cases:
            print(json.dumps(case, ensure_ascii=False))
