"""Runs the code cells of a notebook, in their order, as one program: notebook.py FILE NAME=LEAST ...

At the end each NAME must be at least LEAST, a number or another name."""

import json
import sys

names = {}
for cell in json.load(open(sys.argv[1]))["cells"]:
    if cell["cell_type"] == "code":
        exec(compile("".join(cell["source"]), sys.argv[1], "exec"), names)
for word in sys.argv[2:]:
    name, least = word.split("=")
    assert names[name] >= eval(least, names), f"{name} is {names[name]}, less than {least}"
print("notebook: PASS")
