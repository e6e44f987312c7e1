"""Tool calls by OpenAI's SDK for Python, against a cw-infer-server of tests/e2e/test_tool_calls.c.

    openai_tools.py BASE_URL PARSER

PARSER: "off" where the server was told so. The first thing that is not as it should be ends it with a
traceback.
"""
import json
import sys

import openai

BASE, PARSER = sys.argv[1:3]
client = openai.OpenAI(base_url=BASE + "/v1", api_key="none", max_retries=0, timeout=60)
TEXT, MARK, NAME, ARGUMENTS, CLOSE, ADD, NOSUCH, TWO, END = 263, 264, 265, 266, 267, 268, 269, 270, 261
EXTRA = {"repetition_penalty": 2, "stop_token_ids": [END]}
USER = [{"role": "user", "content": "hello"}]


def tool(name, **schema):
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object"} | schema}}


TOOLS = [tool("get_weather"), tool("add")]


def forced(ids, **fields):
    """The fields that make an answer of these tokens and the end: each has a bias below that of the
    one before it, and falls behind the end, which stands in the prompt, once it has come."""
    bias = {str(token): 100 - 6 * i for i, token in enumerate(ids)} | {str(END): 100}
    penalties = {"presence_penalty": 2, "frequency_penalty": 2, "extra_body": EXTRA}
    sampling = {"temperature": 0, "max_tokens": 20, "logit_bias": bias} | penalties
    return {"model": "model", "messages": USER, "tools": TOOLS} | sampling | fields


def chat(ids, **fields):
    return client.chat.completions.create(**forced(ids, **fields))


def calls_of(message):
    return [(c.type, c.function.name, json.loads(c.function.arguments)) for c in message.tool_calls or []]


ONE = [TEXT, MARK, NAME, ARGUMENTS, CLOSE]
WEATHER = ("function", "get_weather", {"city": "Paris"})


def whole():
    a = chat(ONE, logprobs=True)
    choice = a.choices[0]
    assert calls_of(choice.message) == [WEATHER], (choice.token_ids, choice.message)
    assert choice.message.tool_calls[0].function.arguments == '{"city": "Paris"}'
    assert choice.message.content == "I look it up." and choice.finish_reason == "tool_calls", choice
    # of the whole answer
    assert choice.token_ids == [*ONE, END] and a.usage.completion_tokens == len(ONE) + 1
    assert [t.token_id for t in choice.logprobs.content] == choice.token_ids
    return choice.message


def several():
    ids = [MARK, ADD]
    message = chat(ids).choices[0].message
    assert calls_of(message) == [("function", "add", {})] and message.content is None, message
    # a marker comes once only, so the second call has none: text
    choice = chat([*ONE, ADD]).choices[0]
    assert calls_of(choice.message) == [WEATHER] and '"add"' in choice.message.content, choice
    add = ("function", "add", {})
    both, one = chat([TWO]).choices[0], chat([TWO], parallel_tool_calls=False).choices[0]
    assert calls_of(both.message) == [add, add] and calls_of(one.message) == [add], (both, one)
    assert both.token_ids == one.token_ids and both.finish_reason == one.finish_reason == "tool_calls"
    ids = {c.id for _ in range(3) for c in chat(ONE).choices[0].message.tool_calls}
    assert len(ids) == 3 and all(len(i) == 9 for i in ids), ids


def no_calls():
    for ids in ([TEXT], [MARK, NOSUCH], [MARK, NAME]):
        choice = chat(ids).choices[0]
        assert choice.message.tool_calls is None and choice.finish_reason == "stop", choice
        assert ("<tool_call>" in choice.message.content) == (MARK in ids), choice
    for fields in ({"tool_choice": "none"}, {"tools": openai.NOT_GIVEN}):
        choice = chat(ONE, **fields).choices[0]
        assert choice.message.tool_calls is None and choice.finish_reason == "stop", choice
        assert "get_weather" in choice.message.content and "<tool_call>" not in choice.message.content
    for n, calls in ((3, []), (4, [WEATHER])):  # cut off within the arguments, and within the marker
        cut = chat(ONE, max_tokens=n).choices[0]
        assert cut.finish_reason == "length" and calls_of(cut.message) == calls, cut
    for choice in ({"type": "allowed_tools"}, "sometimes", {"type": "function", "function": {"name": "no"}}):
        try:
            chat(ONE, tool_choice=choice)
        except openai.BadRequestError as error:
            assert '"tool_choice"' in str(error)
        else:
            raise AssertionError("tool_choice was taken")


def asked_for():
    """Whatever the tokens would be, the answer is calls, and only of what is asked for."""
    for choice, names in (
        ("required", {"add", "get_weather"}),
        ({"type": "function", "function": {"name": "add"}}, {"add"}),
    ):
        for stream in (False, True):
            fields = {"tool_choice": choice, "max_tokens": 100, "parallel_tool_calls": False}
            fields |= {"extra_body": {}, "logit_bias": {"32": -100, "125": 10, str(MARK): 100}}
            fields["tools"] = [tool(t["function"]["name"], additionalProperties=False) for t in TOOLS]
            if stream:
                with client.chat.completions.stream(**forced([MARK], **fields)) as events:
                    for _ in events:
                        pass
                    answer = events.get_final_completion().choices[0]
            else:
                answer = chat([MARK], **fields).choices[0]
            assert {c[1] for c in calls_of(answer.message)} <= names, answer
            assert answer.finish_reason == "tool_calls" and not answer.message.content, answer


def streamed():
    for ids, fields in (
        (ONE, {}),
        ([TEXT], {}),
        ([MARK, NOSUCH], {}),
        ([TWO], {}),
        ([TWO], {"parallel_tool_calls": False}),
    ):
        want = chat(ids, **fields).choices[0]
        content, calls, seen, finish, order = "", {}, [], None, []
        for chunk in chat(ids, stream=True, **fields):
            for choice in chunk.choices:
                seen += choice.token_ids
                finish = choice.finish_reason or finish
                if choice.delta.content:
                    content += choice.delta.content
                    order.append("text")
                for piece in choice.delta.tool_calls or []:
                    order.append("call")
                    if piece.index not in calls:
                        calls[piece.index] = [piece.id, piece.function.name, ""]
                        assert piece.type == "function" and piece.function.arguments == ""
                    else:
                        assert piece.id is None and piece.function.name is None
                        calls[piece.index][2] += piece.function.arguments
        got = [("function", name, json.loads(arguments)) for _, name, arguments in calls.values()]
        assert got == calls_of(want.message), (got, want)
        assert content == (want.message.content or "") and finish == want.finish_reason, (content, want)
        assert seen == want.token_ids
        assert ids != ONE or order == ["text", "call", "call"], order


def accumulated():
    """By the SDK's own helper, which agents use."""
    with client.chat.completions.stream(**forced(ONE)) as stream:
        for _ in stream:
            pass
        choice = stream.get_final_completion().choices[0]
    assert calls_of(choice.message) == [WEATHER] and choice.finish_reason == "tool_calls", choice


def round_trip(message):
    """The answer goes back as it came, with a result behind it."""
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sunny"}
    turns = [*USER, message.model_dump(exclude_none=True), result]
    assert chat([TEXT], messages=turns).choices[0].message.content == "I look it up. "


def off():
    choice = chat(ONE).choices[0]
    assert choice.message.tool_calls is None and choice.finish_reason == "stop", choice
    assert "get_weather" in choice.message.content


if PARSER == "off":
    off()
else:
    round_trip(whole())
    for test in (several, no_calls, asked_for, streamed, accumulated):
        test()
        print("ok", test.__name__)
