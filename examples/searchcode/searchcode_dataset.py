"""Write questions for searches and programs as train.parquet and validation.parquet in SkyRL's row format.

python examples/searchcode/searchcode_dataset.py --output ~/data/searchcode                    GSM8K from the hub
python examples/searchcode/searchcode_dataset.py --input FOLDER --output ~/data/searchcode     train.jsonl, test.jsonl

Source rows have `question` and `answer`, which ends in "#### <number>".
"""

from __future__ import annotations

import re
from typing import Any

from skyrl_train.data.conversion import conversion_main, text_column
from skyrl_train.errors import DataError

FINAL_ANSWER = re.compile(r"#### (-?[0-9.,]+)")
INSTRUCTION = """Answer the question with the help of tools, one in a message: \
<tool><search>a query</search></tool> shows you passages of text, <tool><python>code</python></tool> shows you what \
the code prints. When you know the answer, write <solution>#### the number</solution>.

Question: """


def convert(where: str, row: dict[str, Any], split: str, index: int) -> dict[str, Any]:
    """Convert a source row to SkyRL's format.

    Raises:
        DataError: The row has no question, or no answer that ends in "#### <number>".
    """
    question, answer = text_column(where, row, "question"), text_column(where, row, "answer")
    final = FINAL_ANSWER.search(answer)
    if final is None:
        raise DataError(f"{where}: needs an answer that ends in '#### <number>', got {answer!r:.120}.")
    return {
        "data_source": "searchcode",
        "prompt": [{"role": "user", "content": f"{INSTRUCTION}{question}"}],
        "env_class": "searchcode",
        "reward_spec": {"method": "rule", "ground_truth": final[1].replace(",", "")},
        "extra_info": {"split": split, "index": index, "question": question},
    }


if __name__ == "__main__":
    conversion_main(convert, doc=__doc__, hub="openai/gsm8k", hub_config="main")
