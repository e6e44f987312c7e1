"""A data set as JSONL, an example a line, which is what the programs read.

    python3 -m commonweight.data openai/gsm8k --config main --split train > train.jsonl
    python3 -m commonweight.data part-0.parquet part-1.parquet > train.jsonl

A name of the Hub, a folder, or files (Parquet, Arrow, CSV), through `datasets` (pip install datasets).
"""

import argparse
import json
import os
import sys

FORMATS = {"parquet": "parquet", "arrow": "arrow", "csv": "csv", "json": "json", "jsonl": "json"}


def rows(names, split="train", config=None):
    """The examples of a data set, in its order, as dicts."""
    try:
        import datasets
    except ImportError:
        sys.exit("commonweight.data: wants the package datasets (pip install datasets)")
    if os.path.isfile(names[0]):
        ending = names[0].rsplit(".", 1)[-1].lower()
        if ending not in FORMATS:
            sys.exit(f"commonweight.data: {names[0]} ends with none of {', '.join(FORMATS)}")
        return datasets.load_dataset(FORMATS[ending], data_files={split: names}, split=split)
    if len(names) > 1:
        sys.exit(f"commonweight.data: {names[0]} is no file; of the Hub's names and of folders one at a time")
    return datasets.load_dataset(names[0], config, split=split)


def main():
    parser = argparse.ArgumentParser(prog="python3 -m commonweight.data", description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="+", metavar="ORG/NAME|FOLDER|FILE")
    parser.add_argument("--split", default="train")
    parser.add_argument("--config", help="of a data set that has several")
    args = parser.parse_args()
    for row in rows(args.names, args.split, args.config):
        print(json.dumps(row, ensure_ascii=False, default=str))


if __name__ == "__main__":
    main()
