#!/usr/bin/env python3
"""Writes cases.jsonl: what transformers' own renderer makes of each line of templates.jsonl (a template
as a JSON string), with variables.json and a clock that stands at 2025-01-02 03:04:05. A line is
{"template", "text"}, or {"template", "error"} where rendering ends in an exception. Needs transformers
and jinja2, which nothing else here does."""
import datetime
import json
import pathlib

import transformers.utils.chat_template_utils as renderer

HERE = pathlib.Path(__file__).parent


class StandingClock(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return cls(2025, 1, 2, 3, 4, 5)


def lines(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


def case(template, variables):
    try:
        return {"template": template, "text": renderer._compile_jinja_template(template).render(**variables)}
    except Exception as e:
        return {"template": template, "error": f"{type(e).__name__}: {e}"}


renderer.datetime = StandingClock
variables = json.loads((HERE / "variables.json").read_text(encoding="utf-8"))
cases = [case(template, variables) for template in lines(HERE / "templates.jsonl")]
with open(HERE / "cases.jsonl", "w", encoding="utf-8") as out:
    for one in cases:
        out.write(json.dumps(one, ensure_ascii=False) + "\n")
print(f"{len(cases)} cases, {sum('error' in c for c in cases)} of them errors")
