"""Anthropic's SDK for Python, against a cw-infer-server of tests/e2e/test_tool_calls.c.

    anthropic_sdk.py BASE_URL

The first thing that is not as it should be ends it with a traceback.
"""
import sys

import anthropic

client = anthropic.Anthropic(base_url=sys.argv[1], api_key="none", max_retries=0, timeout=60)
TEXT, MARK, NAME, ARGUMENTS, CLOSE, END = 263, 264, 265, 266, 267, 261
ONE = [TEXT, MARK, NAME, ARGUMENTS, CLOSE]
USER = [{"role": "user", "content": "hello"}]


def tool(name, **schema):
    return {"name": name, "description": "d", "input_schema": {"type": "object"} | schema}


TOOLS = [tool("get_weather"), tool("add")]


def forced(ids, **fields):
    """As in openai_tools.py: these tokens, then the end."""
    bias = {str(token): 100 - 6 * i for i, token in enumerate(ids)} | {str(END): 100}
    extra = {"logit_bias": bias, "repetition_penalty": 2, "presence_penalty": 2, "frequency_penalty": 2}
    request = {"model": "model", "messages": USER, "tools": TOOLS, "max_tokens": 20}
    return request | {"extra_body": {"temperature": 0} | extra} | fields


def create(ids, **fields):
    return client.messages.create(**forced(ids, **fields))


def blocks(message):
    return [(b.type, b.text) if b.type == "text" else (b.type, b.name, b.input) for b in message.content]


WANT = [("text", "I look it up."), ("tool_use", "get_weather", {"city": "Paris"})]


def whole():
    a = create(ONE, system="Be brief.")
    assert blocks(a) == WANT and a.stop_reason == "tool_use" and a.role == "assistant", a
    assert a.usage.output_tokens == len(ONE) + 1 and a.usage.input_tokens > 0, a.usage
    system = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    assert blocks(create(ONE, system=system)) == WANT
    a = create([TEXT])
    assert blocks(a) == [("text", "I look it up. ")] and a.stop_reason == "end_turn", a
    assert create([TEXT], max_tokens=1).stop_reason == "max_tokens"
    a = create([TEXT], stop_sequences=["it"])
    assert (a.stop_reason, a.stop_sequence, a.content[0].text) == ("stop_sequence", "it", "I look "), a


def round_trip():
    a = create(ONE)
    result = {"type": "tool_result", "tool_use_id": a.content[1].id, "content": [{"type": "text", "text": "sunny"}]}
    turns = [*USER, {"role": "assistant", "content": a.content}, {"role": "user", "content": [result]}]
    assert blocks(create([TEXT], messages=turns)) == [("text", "I look it up. ")]
    n = client.messages.count_tokens(model="model", messages=turns, tools=TOOLS).input_tokens
    fewer = client.messages.count_tokens(model="model", messages=USER).input_tokens
    assert n > fewer > 0, (n, fewer)
    # an answer's beginning is continued
    assert blocks(create([TEXT], messages=[*USER, {"role": "assistant", "content": "Well,"}]))[0][0] == "text"


def streamed():
    for ids in (ONE, [TEXT]):
        want = create(ids)
        names, deltas = [], ""
        with client.messages.stream(**forced(ids)) as stream:
            for event in stream:
                names.append(event.type)
                if event.type == "content_block_delta" and event.delta.type == "input_json_delta":
                    deltas += event.delta.partial_json
            a = stream.get_final_message()
        assert blocks(a) == blocks(want) and a.stop_reason == want.stop_reason, (a, want)
        assert a.usage.output_tokens == want.usage.output_tokens
        assert names[0] == "message_start" and names[1] == "content_block_start", names
        assert names[-2:] == ["message_delta", "message_stop"], names
        assert deltas == ('{"city": "Paris"}' if ids == ONE else "")


def asked_for():
    none = {"properties": {}, "additionalProperties": False}
    tools = [tool("get_weather", **none), tool("add", **none)]
    bias = {"logit_bias": {"32": -100, "125": 10, str(MARK): 100}}
    for choice in ({"type": "any", "disable_parallel_tool_use": True},
                   {"type": "tool", "name": "add", "disable_parallel_tool_use": True}):
        a = create([], tools=tools, tool_choice=choice, max_tokens=100, extra_body=bias)
        assert len(a.content) == 1 and a.content[0].type == "tool_use" and a.stop_reason == "tool_use", a
        assert choice["type"] == "any" or a.content[0].name == "add"
    assert all(b.type == "text" for b in create(ONE, tool_choice={"type": "none"}).content)


def refused():
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
    for fields, word in (
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "bash_20250124"),
        ({"messages": [{"role": "user", "content": [image]}]}, "content[0]"),
        ({"messages": [{"role": "system", "content": "x"}]}, "neither user nor assistant"),
        ({"extra_body": {"colour": 1}}, "colour"),
        ({"extra_body": {"mcp_servers": [{"type": "url"}]}}, "mcp_servers"),
    ):
        for stream in (False, True):
            try:
                create([], stream=stream, **fields)
            except anthropic.BadRequestError as error:
                assert word in str(error) and error.body["type"] == "error", (word, error)
                assert error.body["error"]["type"] == "invalid_request_error", error.body
            else:
                raise AssertionError(f"{word} was taken")
    try:
        client.messages.create(model="other", messages=USER, max_tokens=1)
    except anthropic.NotFoundError as error:
        assert error.body["error"]["type"] == "not_found_error", error.body
    else:
        raise AssertionError("another model was taken")


for test in (whole, round_trip, streamed, asked_for, refused):
    test()
    print("ok", test.__name__)
