"""Write GSM8K for multi-turn episodes as train.parquet and validation.parquet in SkyRL's row format.

python examples/gsm8k_multi_turn/gsm8k_multi_turn_dataset.py --output ~/data/gsm8k_multi_turn     from the hub
... --input FOLDER --output ~/data/gsm8k_multi_turn                     from FOLDER/train.jsonl, test.jsonl
"""

from __future__ import annotations

from typing import Any

from skyrl_train.data.conversion import conversion_main, text_column
from skyrl_train.environments.graders.numbers import parse_number
from skyrl_train.errors import DataError

HUB_NAME = "openai/gsm8k"
INSTRUCTION = (
    'Let\'s think step by step and give your answer after "####" at the end of every message. '
    "You are told when it is wrong, and can try again."
)


def convert(where: str, row: dict[str, Any], split: str, index: int) -> dict[str, Any]:
    """Convert a source row (question, answer) to SkyRL's format.

    Raises:
        DataError: The row has no question, or no answer that ends in "#### <number>".
    """
    question, answer = text_column(where, row, "question"), text_column(where, row, "answer")
    final = parse_number(answer.rpartition("####")[2])
    if final is None or "####" not in answer:
        raise DataError(f"{where}: needs an answer that ends in '#### <number>', got {answer[-120:]!r}.")
    return {
        "data_source": HUB_NAME,
        "prompt": [{"role": "user", "content": f"{question} {INSTRUCTION}"}],
        "env_class": "gsm8k_multi_turn",
        "reward_spec": {"method": "rule", "ground_truth": final},
        "extra_info": {"split": split, "index": index, "question": question, "answer": answer},
    }


if __name__ == "__main__":
    conversion_main(convert, doc=__doc__, hub=HUB_NAME, hub_config="main")
