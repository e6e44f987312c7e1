"""The cases of math-verify's own tests, one JSON list a line: answer, completion, expected (0 or 1).

    math_verify_cases.py DIR    the source of a release, with its tests/

Cases of settings that the scorer does not have are left out: another precision, relations as sets whatever the
answer, letters that do not matter, formulas or numbers alone.
"""
import importlib
import json
import os
import sys

root = sys.argv[1]
sys.path.insert(0, root)
OTHER = ("test_latex_notation", "test_strict_variable_comparison")
for name in sorted(os.listdir(os.path.join(root, "tests"))):
    if not (name.startswith("test_") and name.endswith(".py")):
        continue
    for function in list(vars(importlib.import_module("tests." + name[:-3])).values()):
        for mark in getattr(function, "pytestmark", []):
            if mark.name != "parametrize" or function.__name__ in OTHER:
                continue
            names = mark.args[0] if isinstance(mark.args[0], list) else mark.args[0].replace(" ", "").split(",")
            for values in mark.args[1]:
                case = dict(zip(names, values))
                if "gold" not in case or case.get("precision", 6) != 6 or case.get("allow_set_relation_comp"):
                    continue
                print(json.dumps([case["gold"], case["pred"], int(case.get("expected", case.get("result")))]))
