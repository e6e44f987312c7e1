"""200 JSON schemas as tools and agents have them, lengths bounded, and values that meet them: the
same ones every time.

Each is put together of kinds of parameters, as function-calling programs, agents' plans and
structured extraction use them.
"""

import json
import random

WORDS = ("city query date user_id path limit unit title body email url start end status priority "
         "tags amount currency language model region item count note label color size filter order "
         "page reason score source target version key value").split()
PATTERNS = {  # and texts that match
    r"^[a-z][a-z0-9_]{0,15}$": ["a", "snake_case_9"],
    r"^\d{3}-\d{4}$": ["555-0199"],
    r"^[A-Z]{2,3}$": ["DE", "USA"],
    r"^#[0-9a-f]{6}$": ["#00ff9c"],
    r"^/([a-z]{1,8}/){0,3}[a-z]{1,8}$": ["/etc", "/usr/share/doc"],
}
FORMATS = {
    "date": ["2024-02-29", "1999-12-31"],
    "time": ["23:59:59Z", "08:30:00.25+02:00"],
    "date-time": ["2024-02-29T00:00:00Z", "2031-07-04T12:30:01.5-07:00"],
    "uuid": ["123e4567-e89b-12d3-a456-426614174000"],
    "ipv4": ["127.0.0.1", "255.255.255.0"],
}
LETTERS = "abcxyz ABC019 .,:;!?-_/'\"\\\n\téßñ中😀{}[]<>&%"


def text(r):
    return r.choice([
        {"type": "string", "maxLength": r.randint(1, 60)},
        {"type": "string", "minLength": 1, "maxLength": r.choice([8, 20, 40])},
        {"type": "string", "enum": r.sample(WORDS, r.randint(2, 6))},
        {"type": "string", "format": r.choice(list(FORMATS))},
        {"type": "string", "pattern": r.choice(list(PATTERNS))},
        {"const": r.choice(WORDS)},
    ])


def number(r):
    low = r.randint(-100, 100)
    return r.choice([
        {"type": "integer", "minimum": low, "maximum": low + r.randint(0, 5000)},
        {"type": "integer", "enum": [1, 2, 4, 8, 16]},
        {"type": "integer", "minimum": 0, "exclusiveMaximum": 10 ** r.randint(1, 9)},
    ])


def scalar(r):
    return r.choice([text, text, text, number, lambda _: {"type": "boolean"},
                     lambda _: {"type": ["boolean", "null"]}])(r)


def array(r, depth):
    return {"type": "array", "items": value(r, depth + 1), "minItems": r.randint(0, 2),
            "maxItems": r.randint(2, 4)}


def record(r, depth):
    names = r.sample(WORDS, r.randint(1, 5 if depth else 7))
    return {"type": "object", "properties": {name: value(r, depth + 1) for name in names},
            "required": [name for name in names if r.random() < 0.7],
            "additionalProperties": False}


def union(r, depth):
    if r.random() < 0.5:
        return {"anyOf": [value(r, depth + 1), {"type": "null"}]}
    branches = []
    for kind in r.sample(WORDS, r.randint(2, 3)):
        one = record(r, depth + 1)
        one["properties"] = {"kind": {"const": kind}, **one["properties"]}
        one["required"] = ["kind"] + one["required"]
        branches.append(one)
    return {"oneOf": branches}


def value(r, depth):
    if depth >= 3:
        return scalar(r)
    kinds = [scalar, lambda r: array(r, depth), lambda r: record(r, depth),
             lambda r: union(r, depth)]
    return r.choices(kinds, [6, 1, 1, 1])[0](r)


def tree(r):
    node = {"type": "object", "properties": {"name": text(r), "next": {
        "anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]}},
        "required": ["name", "next"], "additionalProperties": False}
    return {"$defs": {"node": node}, "$ref": "#/$defs/node"}


def call(r):
    """A call: the name of a function, and arguments that depend on it."""
    calls = []
    for name in r.sample(WORDS, r.randint(1, 4)):
        calls.append({"type": "object", "properties": {"name": {"const": name},
                                                       "arguments": record(r, 0)},
                      "required": ["name", "arguments"], "additionalProperties": False})
    return {"anyOf": calls}


def schemas(n=200):
    r = random.Random(37)
    kinds = [lambda r: record(r, 0), call, lambda r: record(r, 0), lambda r: array(r, 0), tree]
    return [r.choice(kinds)(r) for _ in range(n)]


def instance(r, schema, root):
    """A value that meets a schema of those above."""
    if "$ref" in schema:
        return instance(r, root["$defs"]["node"], root)
    for key in ("anyOf", "oneOf"):
        if key in schema:
            return instance(r, r.choice(schema[key]), root)
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        return r.choice(schema["enum"])
    kind = schema["type"]
    if isinstance(kind, list):
        kind = r.choice(kind)
    if kind == "object":
        return {name: instance(r, member, root) for name, member in schema["properties"].items()
                if name in schema["required"] or r.random() < 0.5}
    if kind == "array":
        n = r.randint(schema["minItems"], schema["maxItems"])
        return [instance(r, schema["items"], root) for _ in range(n)]
    if kind == "integer":
        high = schema.get("maximum", schema.get("exclusiveMaximum", 1) - 1)
        return r.choice([schema["minimum"], high, r.randint(schema["minimum"], high)])
    if kind == "string":
        if "pattern" in schema:
            return r.choice(PATTERNS[schema["pattern"]])
        if "format" in schema:
            return r.choice(FORMATS[schema["format"]])
        n = r.randint(schema.get("minLength", 0), schema["maxLength"])
        return "".join(r.choice(LETTERS) for _ in range(n))
    return {"boolean": r.choice([True, False]), "null": None}[kind]


def document(r, schema):
    style = r.choice([{}, {"separators": (",", ":")}, {"indent": 2}, {"indent": "\t"},
                      {"ensure_ascii": False}])
    return json.dumps(instance(r, schema, schema), **style)
