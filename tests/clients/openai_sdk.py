"""What users of OpenAI's SDK for Python do, against a running cw-infer-server.

    openai_sdk.py BASE_URL MODEL

tests/e2e/test_tool_calls.c starts the server (a tiny random model with a byte-level tokenizer and
ChatML's template) and this. The first thing that is not as it should be ends it with a traceback.
"""
import json
import sys

import openai

BASE, MODEL = sys.argv[1:3]
client = openai.OpenAI(base_url=BASE + "/v1", api_key="none", max_retries=0, timeout=60)
USER = [{"role": "user", "content": "hello"}]


def refused(call, *parts, code=None):
    try:
        call()
    except openai.BadRequestError as error:
        for part in parts:
            assert part in str(error), (part, str(error))
        if code:
            assert error.code == code, error.code
        return error
    raise AssertionError(f"not refused: {parts}")


def completion(**fields):
    fields = {"model": MODEL, "prompt": "hello", "max_tokens": 4, "temperature": 0} | fields
    return client.completions.create(**fields)


def chat(messages=USER, **fields):
    fields = {"model": MODEL, "max_tokens": 4, "temperature": 0} | fields
    return client.chat.completions.create(messages=messages, **fields)


def models():
    assert [m.id for m in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    try:
        client.models.retrieve("another/model")
    except openai.NotFoundError:
        return
    raise AssertionError("a model that is not there was found")


def completions():
    special = {"skip_special_tokens": False}
    a = completion(logprobs=0, user="someone", best_of=1, suffix=None, extra_body=special)
    choice = a.choices[0]
    assert a.usage.completion_tokens == 4 and choice.finish_reason == "length"
    whole = "\ufffd" not in choice.text  # characters of several tokens
    assert not whole or "".join(choice.logprobs.tokens) == choice.text
    for token, logprob, top in zip(
        choice.logprobs.tokens, choice.logprobs.token_logprobs, choice.logprobs.top_logprobs
    ):
        assert top == {token: logprob}
    named = completion(logprobs=2, extra_body={"return_tokens_as_token_ids": True})
    ids = named.choices[0].token_ids
    assert named.choices[0].logprobs.tokens == [f"token_id:{i}" for i in ids]
    assert all(key.startswith("token_id:") for key in named.choices[0].logprobs.top_logprobs[0])
    many = completion(prompt=["hello", "x"], n=2, temperature=1)
    assert [c.index for c in many.choices] == [0, 1, 2, 3]


def prompt_ids():
    asked = {"return_token_ids": True}
    a = completion(prompt=[[1, 2, 3], [4]], extra_body=asked)
    assert [c.prompt_token_ids for c in a.choices] == [[1, 2, 3], [4]]
    assert not hasattr(completion().choices[0], "prompt_token_ids")
    b = chat(extra_body=asked)
    assert len(b.prompt_token_ids) == b.usage.prompt_tokens
    chunks = list(chat(stream=True, extra_body=asked))
    assert chunks[0].prompt_token_ids == b.prompt_token_ids
    assert not any(hasattr(c, "prompt_token_ids") for c in chunks[1:])
    chunks = list(completion(stream=True, extra_body=asked, prompt=[7, 8]))
    assert chunks[0].choices[0].prompt_token_ids == [7, 8]


def chats():
    a = chat(logprobs=True, top_logprobs=2, tool_choice="none", tools=[], store=False)
    assert a.choices[0].message.role == "assistant"
    assert all(len(c.top_logprobs) == 2 for c in a.choices[0].logprobs.content)
    rule = "be short"
    as_developer = chat([{"role": "developer", "content": rule}, *USER])
    as_system = chat([{"role": "system", "content": rule}, *USER])
    assert as_developer.usage.prompt_tokens == as_system.usage.prompt_tokens
    assert as_developer.choices[0].message.content == as_system.choices[0].message.content
    turns = [*USER, {"role": "assistant", "content": "hi", "tool_calls": []}, *USER]
    assert chat(turns).usage.prompt_tokens > a.usage.prompt_tokens


def streams():
    whole = completion(max_tokens=12)
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(completion(max_tokens=12, stream=True, stream_options=options))
    assert "".join(c.choices[0].text for c in chunks if c.choices) == whole.choices[0].text
    seen = 0
    for chunk in chunks:
        assert chunk.usage.prompt_tokens == whole.usage.prompt_tokens
        if chunk.choices:
            seen += len(chunk.choices[0].token_ids)
        assert chunk.usage.completion_tokens == seen
        assert chunk.usage.total_tokens == seen + whole.usage.prompt_tokens
    assert seen == 12 and not chunks[-1].choices
    chunks = list(completion(stream=True, stream_options={"include_usage": True}))
    assert all(c.usage is None for c in chunks[:-1]) and chunks[-1].usage.completion_tokens == 4


def names():
    raw = client.completions.with_raw_response.create
    fields = {"model": MODEL, "prompt": "hello", "max_tokens": 1}
    made = raw(**fields)
    assert len(made.headers["x-request-id"]) == 32
    assert made.parse().id == "cmpl-" + made.headers["x-request-id"]
    given = raw(**fields, extra_headers={"x-request-id": "trace-7"})
    assert given.headers["x-request-id"] == "trace-7"
    assert given.parse()._request_id == "trace-7"
    error = refused(lambda: completion(top_p=7), '"top_p"')
    assert error.request_id and error.param == "top_p"


def formats():
    schema = {"type": "object", "properties": {"sum": {"type": "integer", "minimum": 3, "maximum": 99},
                                               "sure": {"type": "boolean"}},
              "required": ["sum", "sure"], "additionalProperties": False}
    given = {"type": "json_schema", "json_schema": {"name": "sum", "schema": schema, "strict": True}}
    assert chat(response_format=given, max_tokens=50).choices[0].message.content[0] == "{"
    # A random model that may write white space writes little else.
    given = {"structured_outputs": {"json": schema, "disable_any_whitespace": True}}
    for seed in range(5):
        choice = chat(extra_body=given, max_tokens=60, seed=seed).choices[0]
        assert choice.finish_reason == "stop", choice
        value = json.loads(choice.message.content)
        assert list(value) == ["sum", "sure"] and 3 <= value["sum"] <= 99, value


def refusals():
    words = "maximum context length"
    refused(lambda: completion(prompt=[1] * 600), words, "600", code="context_length_exceeded")
    refused(lambda: completion(max_tokens=600), words, "512", code="context_length_exceeded")
    refused(lambda: chat(max_tokens=600), words, code="context_length_exceeded")
    refused(lambda: completion(best_of=2), "best_of")
    refused(lambda: chat(tools=[{"type": "function"}], tool_choice="required"), "tool")
    refused(lambda: chat(tool_choice="required"), '"tool_choice"')
    refused(lambda: chat(store=True), '"store"')
    refused(lambda: chat(response_format={"type": "grammar"}), '"response_format"')
    refused(lambda: completion(extra_body={"temprature": 0}), '"temprature"')
    refused(lambda: completion(stream_options={"include_usage": True}), '"stream_options"')


for test in (models, completions, prompt_ids, chats, streams, names, formats, refusals):
    test()
    print("ok", test.__name__)
