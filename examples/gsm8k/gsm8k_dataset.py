"""Write GSM8K as train.parquet and validation.parquet in SkyRL's row format.

python examples/gsm8k/gsm8k_dataset.py --output ~/data/gsm8k                        from the hub
python examples/gsm8k/gsm8k_dataset.py --input FOLDER --output ~/data/gsm8k         from FOLDER/train.jsonl, test.jsonl
"""

from __future__ import annotations

import re
from typing import Any

from skyrl_train.data.conversion import conversion_main
from skyrl_train.errors import DataError

HUB_NAME = "openai/gsm8k"
INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
FINAL_ANSWER = re.compile(r"#### (-?[0-9.,]+)")


def convert(where: str, row: dict[str, Any], split: str, index: int) -> dict[str, Any]:
    """Convert a source row (question, answer) to SkyRL's format.

    Raises:
        DataError: The row has no question, or no answer that ends in "#### <number>".
    """
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


if __name__ == "__main__":
    conversion_main(convert, doc=__doc__, hub=HUB_NAME, hub_config="main")
