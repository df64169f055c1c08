"""Write Countdown problems as train.parquet and validation.parquet in SkyRL's row format.

python examples/countdown/countdown_dataset.py --output ~/data/countdown         from the hub
... --input FOLDER --output ~/data/countdown                                     from FOLDER/train.jsonl, test.jsonl

The first 1,024 rows of the hub's data set are for validation and the rest for training. Source rows have target and
nums.
"""

from __future__ import annotations

from typing import Any

from skyrl_train.data.conversion import conversion_main
from skyrl_train.errors import DataError

HUB_NAME = "Jiayi-Pan/Countdown-Tasks-3to4"
HUB = {"train": f"{HUB_NAME}:train[1024:]", "test": f"{HUB_NAME}:train[:1024]"}
QUESTION = (
    "Using the numbers {numbers}, write an expression that equals {target}. You can use + - * / and parentheses, and "
    "each number exactly once. Think step by step, and give the final expression in <answer> </answer> tags, for "
    "example <answer>(1 + 2) / 3</answer>."
)


def convert(where: str, row: dict[str, Any], split: str, index: int) -> dict[str, Any]:
    """Convert a source row to SkyRL's format.

    Raises:
        DataError: The row has no numbers or no target.
    """
    target, numbers = row.get("target"), row.get("nums")
    if not isinstance(target, int) or not isinstance(numbers, list) or not all(isinstance(n, int) for n in numbers):
        raise DataError(f"{where}: needs target (an integer) and nums (a list of integers), got {row!r:.120}.")
    return {
        "data_source": "countdown",
        "prompt": [{"role": "user", "content": QUESTION.format(numbers=numbers, target=target)}],
        "env_class": "countdown",
        "reward_spec": {"method": "rule", "ground_truth": {"target": target, "numbers": numbers}},
        "extra_info": {"split": split, "index": index},
    }


if __name__ == "__main__":
    conversion_main(convert, doc=__doc__, hub=HUB)
