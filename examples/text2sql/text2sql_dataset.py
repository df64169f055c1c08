"""Write questions about databases as train.parquet and validation.parquet in SkyRL's row format.

python examples/text2sql/text2sql_dataset.py --output ~/data/sql                     from the hub
python examples/text2sql/text2sql_dataset.py --input FOLDER --output ~/data/sql      from train.jsonl, validation.jsonl

Source rows have schema, question, external_knowledge, sql, db_id and data (synsql, spider or bird). The hub's data set,
NovaSky-AI/SkyRL-SQL-653-data-newfmt, already has SkyRL's format.
"""

from __future__ import annotations

from typing import Any

from skyrl_train.data.conversion import conversion_main, text_column
from skyrl_train.errors import DataError

HUB_NAME = "NovaSky-AI/SkyRL-SQL-653-data-newfmt"
INSTRUCTIONS = """You answer a question with one SQLite query. You are given the database's schema.

- Think inside <think>...</think> before every query.
- To look at the data, write one query inside <sql>...</sql>; its rows come back inside \
<observation>...</observation>. Long results are cut, and the number of turns is limited.
- When you know the answer, write the final query inside <solution>...</solution>, once. It must return what the \
question asks for and nothing else.

Example:
Schema: CREATE TABLE animals (id INTEGER PRIMARY KEY, species TEXT, age INTEGER)
Question: How many pigs are there?
<think>I count the rows of pigs. First I see how species are written.</think>
<sql>SELECT DISTINCT species FROM animals</sql>
<observation>
species
pig
hen
(2 rows)
</observation>
<think>They are written in small letters.</think>
<solution>SELECT COUNT(*) FROM animals WHERE species = 'pig'</solution>"""


def convert(where: str, row: dict[str, Any], split: str, index: int) -> dict[str, Any]:
    """Convert a source row to SkyRL's format, and keep its prompt and ground truth if it has them.

    Raises:
        DataError: The row has no gold query, database id, or (without a prompt) schema or question.
    """
    spec = row.get("reward_spec")
    gold = spec.get("ground_truth") if isinstance(spec, dict) else row.get("sql")
    if not isinstance(gold, str) or not gold.strip():
        raise DataError(f"{where}: needs the gold query in sql, or in reward_spec's ground_truth, got {gold!r:.120}.")
    prompt = row.get("prompt")
    if not isinstance(prompt, list):
        knowledge = row.get("external_knowledge") or "none"
        question = (
            f"Schema: {text_column(where, row, 'schema')}\nExternal knowledge: {knowledge}\n"
            f"Question: {text_column(where, row, 'question')}"
        )
        prompt = [{"role": "system", "content": INSTRUCTIONS}, {"role": "user", "content": question}]
    return {
        "data_source": row.get("data_source") or row.get("data") or "sql",
        "prompt": prompt,
        "env_class": "text2sql",
        "reward_spec": {"method": "rule", "ground_truth": gold},
        "db_id": text_column(where, row, "db_id"),
        "data": row.get("data"),
        "extra_info": {"split": split, "index": index},
    }


if __name__ == "__main__":
    splits = {"train": "train", "validation": "validation"}
    conversion_main(convert, doc=__doc__, hub=HUB_NAME, splits=splits)
