"""Write questions with reference answers as train.parquet and validation.parquet, for rewards by a language model.

python examples/llm_as_a_judge/judge_dataset.py --output ~/data/judge                   GSM8K from the hub
python examples/llm_as_a_judge/judge_dataset.py --input FOLDER --output ~/data/judge    FOLDER/train.jsonl, test.jsonl

Source rows have `question` and `answer`. In an answer with "#### ", as in GSM8K, the reference is the text after it.
"""

from __future__ import annotations

from typing import Any

from skyrl_train.data.conversion import conversion_main, text_column


def convert(where: str, row: dict[str, Any], split: str, index: int) -> dict[str, Any]:
    """Convert a source row to SkyRL's format.

    Raises:
        DataError: The row has no question or no answer.
    """
    question, answer = text_column(where, row, "question"), text_column(where, row, "answer")
    return {
        "data_source": "llm_as_a_judge",
        "prompt": [{"role": "user", "content": question}],
        "env_class": "llm_as_a_judge",
        "reward_spec": {"method": "judge", "ground_truth": answer.rpartition("#### ")[2].strip()},
        "extra_info": {"split": split, "index": index, "answer": answer},
    }


if __name__ == "__main__":
    conversion_main(convert, doc=__doc__, hub="openai/gsm8k", hub_config="main")
