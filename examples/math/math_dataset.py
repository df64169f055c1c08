r"""Write MATH as train.parquet and validation.parquet in SkyRL's row format.

python examples/math/math_dataset.py --output ~/data/math                    from the hub
python examples/math/math_dataset.py --input FOLDER --output ~/data/math     from FOLDER/train.jsonl, test.jsonl

The hub's data sets are MATH's 7,500 training problems for training and MATH-500 for validation. Source rows have
problem, and answer or a solution with its answer in \boxed{...}. The script omits rows without an answer.
"""

from __future__ import annotations

from typing import Any

from skyrl_train.data.conversion import conversion_main, text_column
from skyrl_train.environments.graders.boxed import iter_boxed

HUB = {"train": "DigitalLearningGmbH/MATH-lighteval:train", "test": "HuggingFaceH4/MATH-500:test"}
INSTRUCTION = r"Please reason step by step, and put your final answer within \boxed{}."


def convert(where: str, row: dict[str, Any], split: str, index: int) -> dict[str, Any] | None:
    """Convert a source row to SkyRL's format; return None if it has no answer.

    Raises:
        DataError: The row has no problem, or neither an answer nor a solution.
    """
    problem = text_column(where, row, "problem")
    answer = row.get("answer")
    if answer is None:
        *_, answer = ("", *iter_boxed(text_column(where, row, "solution")))
    if not str(answer).strip():
        return None
    return {
        "data_source": "math",
        "prompt": [{"role": "user", "content": f"{problem}\n\n{INSTRUCTION}"}],
        "env_class": "math",
        "reward_spec": {"method": "rule", "ground_truth": str(answer).strip()},
        "extra_info": {"split": split, "index": index, "level": str(row.get("level") or "")},
    }


if __name__ == "__main__":
    conversion_main(convert, doc=__doc__, hub=HUB)
