"""Write questions for a search engine as train.parquet and validation.parquet in SkyRL's row format.

python examples/search/search_dataset.py --output ~/data/search                      from the hub
python examples/search/search_dataset.py --input FOLDER --output ~/data/search       from FOLDER/train.jsonl, test.jsonl

Source rows have `question` and `golden_answers`, a list of strings, as in Search-R1 (Natural Questions, HotpotQA).
"""

from __future__ import annotations

from typing import Any

from skyrl_train.data.conversion import conversion_main, text_column
from skyrl_train.errors import DataError

HUB_NAME = "PeterJinGo/nq_hotpotqa_train"
INSTRUCTION = """Answer the question. Think first, inside <think> and </think>, whenever you have new information. \
When you need to know something, write <search>a query</search>: you will be shown what was found between \
<information> and </information>. You may search more than once. When you know the answer, write it \
inside <answer> and </answer>, without an explanation, for example <answer>Beijing</answer>.

Question: """


def convert(where: str, row: dict[str, Any], split: str, index: int) -> dict[str, Any]:
    """Convert a source row to SkyRL's format.

    Raises:
        DataError: The row has no question or no answers.
    """
    question, answers = text_column(where, row, "question"), row.get("golden_answers")
    if not isinstance(answers, list) or not answers or not all(isinstance(answer, str) for answer in answers):
        raise DataError(f"{where}: golden_answers must be a list of strings, got {answers!r:.120}.")
    return {
        "data_source": str(row.get("data_source", "search")),
        "prompt": [{"role": "user", "content": f"{INSTRUCTION}{question.strip()}"}],
        "env_class": "search",
        "reward_spec": {"method": "rule", "ground_truth": {"target": answers}},
        "extra_info": {"split": split, "index": index, "question": question},
    }


if __name__ == "__main__":
    conversion_main(convert, doc=__doc__, hub=HUB_NAME)
