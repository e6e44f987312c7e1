"""OpenAI's Responses API by its SDK, against a cw-infer-server of tests/e2e/test_tool_calls.c.

    responses.py BASE_URL

The first thing that is not as it should be ends it with a traceback.
"""
import json
import sys

import openai

client = openai.OpenAI(base_url=sys.argv[1] + "/v1", api_key="none", max_retries=0, timeout=60)
TEXT, MARK, NAME, ARGUMENTS, CLOSE, ADD, NOSUCH, TWO, END = 263, 264, 265, 266, 267, 268, 269, 270, 261
ONE = [TEXT, MARK, NAME, ARGUMENTS, CLOSE]


def tool(name, **fields):
    return {"type": "function", "name": name, "parameters": {"type": "object"}} | fields


TOOLS = [tool("get_weather"), tool("add")]


def forced(ids, **fields):
    """As in openai_tools.py: these tokens, then the end."""
    bias = {str(token): 100 - 6 * i for i, token in enumerate(ids)} | {str(END): 100}
    extra = {"logit_bias": bias, "repetition_penalty": 2, "presence_penalty": 2, "frequency_penalty": 2}
    request = {"model": "model", "input": "hello", "tools": TOOLS, "temperature": 0, "max_output_tokens": 20}
    return request | {"extra_body": extra} | fields


def create(ids, **fields):
    return client.responses.create(**forced(ids, **fields))


def kinds(response):
    return [(o.type, o.name, o.arguments) if o.type == "function_call" else (o.type, o.content[0].text)
            for o in response.output]


WANT = [("message", "I look it up."), ("function_call", "get_weather", '{"city": "Paris"}')]


def whole():
    a = create(ONE, instructions="Be brief.", metadata={"a": "b"})
    assert kinds(a) == WANT and a.status == "completed" and a.output_text == "I look it up.", a
    assert a.instructions == "Be brief." and a.metadata == {"a": "b"} and a.tools[0].name == "get_weather"
    assert a.usage.output_tokens == len(ONE) + 1 and a.usage.total_tokens > a.usage.input_tokens > 0, a.usage
    cut = create([TEXT], max_output_tokens=1)
    assert cut.status == "incomplete" and cut.incomplete_details.reason == "max_output_tokens", cut
    return a


def round_trip(a):
    """What came goes back as input, with the call's result behind it."""
    items = [{"role": "user", "content": [{"type": "input_text", "text": "hello"}]}]
    items += [item.model_dump(exclude_none=True) for item in a.output]
    items += [{"type": "function_call_output", "call_id": a.output[1].call_id, "output": "sunny"}]
    assert create([TEXT], input=items).output_text == "I look it up. "


def streamed():
    for ids, want in ((ONE, WANT), ([TEXT], [("message", "I look it up. ")]), ([TWO], None)):
        events = list(create(ids, stream=True))
        assert [e.sequence_number for e in events] == list(range(len(events)))
        names = [e.type.removeprefix("response.") for e in events]
        assert names[:3] == ["created", "in_progress", "output_item.added"] and names[-1] == "completed", names
        final = events[-1].response
        assert want is None or kinds(final) == want, final
        for i, item in enumerate(final.output):
            mine = [e for e in events if getattr(e, "output_index", None) == i]
            deltas = "".join(e.delta for e in mine if e.type.endswith(".delta"))
            assert deltas == (item.arguments if item.type == "function_call" else item.content[0].text)
            assert mine[-1].type == "response.output_item.done" and mine[-1].item == item, mine[-1]
        assert len(final.output) == 2 or ids != [TWO]


def helper():
    """By the SDK's own accumulation, which agents use."""
    with client.responses.stream(**forced(ONE)) as stream:
        for _ in stream:
            pass
        assert kinds(stream.get_final_response()) == WANT


def constrained():
    none = {"type": "object", "properties": {}, "additionalProperties": False}
    tools = [tool("add", parameters=none), tool("get_weather", parameters=none)]
    bias = {"logit_bias": {"32": -100, "125": 10, str(MARK): 100}}
    for choice in ("required", {"type": "function", "name": "add"}):
        a = create([], tools=tools, tool_choice=choice, max_output_tokens=100, parallel_tool_calls=False,
                   extra_body=bias)
        assert [o.type for o in a.output] == ["function_call"], a
        assert choice == "required" or a.output[0].name == "add"
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"],
              "additionalProperties": False}
    text = {"format": {"type": "json_schema", "name": "x", "schema": schema, "strict": True}}
    a = create([], tools=[], text=text, max_output_tokens=60, extra_body={"logit_bias": {"32": -100, "10": -100, "9": -100, "13": -100}})
    assert isinstance(json.loads(a.output_text)["a"], bool), a


def refused():
    for fields, word in (
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"store": True}, "store"),
        ({"background": True}, "background"),
        ({"tools": [{"type": "web_search"}]}, "web_search"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "item_reference"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "content[0]"),
    ):
        for stream in (False, True):
            try:
                create([], stream=stream, **fields)
            except openai.BadRequestError as error:
                assert word in str(error), (word, error)
            else:
                raise AssertionError(f"{word} was taken")


round_trip(whole())
for test in (streamed, helper, constrained, refused):
    test()
    print("ok", test.__name__)
