"""Prompts with verifiable instructions as train.parquet and validation.parquet in SkyRL's row format.

python examples/ifeval/ifeval_dataset.py --output ~/data/ifeval                      from the hub
python examples/ifeval/ifeval_dataset.py --input FOLDER --output ~/data/ifeval       from FOLDER/train.jsonl, test.jsonl

From the hub, argilla/ifeval-like-data (its filtered rows) is for training and google/IFEval, the benchmark, for
validation. Rows have prompt, instruction_id_list and kwargs; those with instructions outside IFEval's 25 are left out.
"""

from __future__ import annotations

import json
from typing import Any

from skyrl_train.data.conversion import conversion_main, text_column
from skyrl_train.environments.graders.instructions import parse_instruction_kwargs
from skyrl_train.errors import DataError

HUB = {"train": "argilla/ifeval-like-data:train", "test": "google/IFEval:train"}
HUB_CONFIG = {"train": "filtered"}


def convert(where: str, row: dict[str, Any], split: str, index: int) -> dict[str, Any] | None:
    """A row of the source as one of SkyRL's; None if an instruction cannot be checked."""
    prompt = text_column(where, row, "prompt")
    instructions, kwargs = row.get("instruction_id_list"), row.get("kwargs")
    try:
        kwargs = json.loads(kwargs) if isinstance(kwargs, str) else kwargs
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: kwargs are not JSON: {error}.") from error
    if not isinstance(instructions, list) or not isinstance(kwargs, list) or not len(instructions) == len(kwargs) > 0:
        raise DataError(
            f"{where}: needs instruction_id_list and kwargs, lists of one length, got {instructions!r:.80} and "
            f"{kwargs!r:.80}."
        )
    try:
        given = [parse_instruction_kwargs(id, each, prompt) for id, each in zip(instructions, kwargs, strict=True)]
    except ValueError:
        return None
    truth = {"instruction_id_list": instructions, "kwargs": given}
    return {
        "data_source": "ifeval" if split == "test" else "ifeval_like",
        "prompt": [{"role": "user", "content": prompt}],
        "env_class": "ifeval",
        # JSON: the arguments of different instructions have no common type for a table
        "reward_spec": {"method": "rule", "ground_truth": json.dumps(truth)},
        "extra_info": {"split": split, "index": index},
    }


if __name__ == "__main__":
    conversion_main(convert, doc=__doc__, hub=HUB, hub_config=HUB_CONFIG)
