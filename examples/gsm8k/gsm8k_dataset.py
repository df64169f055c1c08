"""GSM8K as train.parquet and validation.parquet in SkyRL's row format.

python examples/gsm8k/gsm8k_dataset.py --output ~/data/gsm8k                        from the hub
python examples/gsm8k/gsm8k_dataset.py --input FOLDER --output ~/data/gsm8k         from FOLDER/train.jsonl, test.jsonl
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from datasets import Dataset, disable_progress_bars, load_dataset

from skyrl_train.data.rows import read_rows
from skyrl_train.errors import DataError

HUB_NAME = "openai/gsm8k"
INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
FINAL_ANSWER = re.compile(r"#### (-?[0-9.,]+)")


def convert(where: str, row: dict[str, Any], split: str, index: int) -> dict[str, Any]:
    """A row of the source (question, answer) as one of SkyRL's. Raises DataError for a row without an answer."""
    question, answer = row.get("question"), row.get("answer")
    final = FINAL_ANSWER.search(answer) if isinstance(answer, str) else None
    if not isinstance(question, str) or final is None:
        raise DataError(f"{where}: needs a question and an answer that ends in '#### <number>', got {row!r:.120}.")
    return {
        "data_source": HUB_NAME,
        "prompt": [{"role": "user", "content": f"{question} {INSTRUCTION}"}],
        "env_class": "gsm8k",
        "reward_spec": {"method": "rule", "ground_truth": final[1].replace(",", "")},
        "extra_info": {"split": split, "index": index, "question": question, "answer": answer},
    }


def source_rows(source: str, split: str) -> Iterable[tuple[str, dict[str, Any]]]:
    """(where, row) of one split: `source` is a folder with <split>.jsonl, or a name on the hub."""
    if Path(source).expanduser().is_dir():
        return read_rows(str(Path(source).expanduser() / f"{split}.jsonl"))
    rows = load_dataset(source, "main", split=split)
    return ((f"{source} {split}, row {number}", row) for number, row in enumerate(rows, 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input", default=HUB_NAME, help="folder with train.jsonl and test.jsonl, or a hub name")
    parser.add_argument("--output", required=True, type=Path, help="folder for the two parquet files")
    parser.add_argument("--limit", type=int, help="rows of each split at most")
    arguments = parser.parse_args()
    output = arguments.output.expanduser()
    disable_progress_bars()
    output.mkdir(parents=True, exist_ok=True)
    try:
        for split, name in (("train", "train"), ("test", "validation")):
            source = source_rows(arguments.input, split)
            rows = [convert(where, row, split, index) for index, (where, row) in enumerate(source)][: arguments.limit]
            path = output / f"{name}.parquet"
            Dataset.from_list(rows).to_parquet(path)
            print(f"{path}: {len(rows)} rows")
    except DataError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
