"""python -m commonweight.data with the real `datasets`: data.py FOLDER. Parquet files, a folder of them, and
what it refuses; the first thing that is not as it should be ends this with a traceback."""

import json
import os
import pathlib
import subprocess
import sys

import datasets

folder = pathlib.Path(sys.argv[1])
python = str(pathlib.Path(__file__).parents[2] / "python")
environment = {**os.environ, "PYTHONPATH": python, "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "home")}
rows = [{"prompt": f"{a}+1=", "answer": str(a + 1), "messages": [{"role": "user", "content": "ä\n"}]} for a in range(9)]
(folder / "set").mkdir()
for name, some in (("train-0", rows[:5]), ("train-1", rows[5:]), ("test-0", rows[:2])):
    datasets.Dataset.from_list(some).to_parquet(folder / f"set/{name}.parquet")
(folder / "notes.txt").write_text("none")


def run(*words):
    command = [sys.executable, "-m", "commonweight.data", *words]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def converted(*words):
    done = run(*words)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


assert converted("set/train-0.parquet", "set/train-1.parquet") == rows
assert converted("set") == rows
assert converted("set", "--split", "test") == rows[:2]
for words, sentence in ((["notes.txt"], "ends with none of parquet"), (["a/b", "c/d"], "a/b is no file")):
    done = run(*words)
    assert done.returncode == 1 and sentence in done.stderr and not done.stdout, done
print("data: PASS")
