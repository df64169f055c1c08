"""Write prompts with verifiable instructions as train.parquet and validation.parquet in SkyRL's row format.

python examples/ifeval/ifeval_dataset.py --output ~/data/ifeval                      from the hub
python examples/ifeval/ifeval_dataset.py --input FOLDER --output ~/data/ifeval       from FOLDER/train.jsonl, test.jsonl

The hub's data sets are argilla/ifeval-like-data (its filtered rows) for training and google/IFEval, the benchmark, for
validation. Source rows have prompt, instruction_id_list and kwargs. The script omits rows with instructions outside
IFEval's 25.
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
    """Convert a source row to SkyRL's format; None if an instruction cannot be checked.

    Raises:
        DataError: A field is missing or has the wrong type.
    """
    prompt = text_column(where, row, "prompt")
    instructions, kwargs = row.get("instruction_id_list"), row.get("kwargs")
    try:
        kwargs = json.loads(kwargs) if isinstance(kwargs, str) else kwargs
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: kwargs are not JSON: {error}.") from error
    if not isinstance(instructions, list) or not isinstance(kwargs, list) or not len(instructions) == len(kwargs) > 0:
        raise DataError(
            f"{where}: needs instruction_id_list and kwargs, lists of equal length, got {instructions!r:.80} and "
            f"{kwargs!r:.80}."
        )
    try:
        parsed = [
            parse_instruction_kwargs(name, options, prompt) for name, options in zip(instructions, kwargs, strict=True)
        ]
    except ValueError:
        return None
    truth = {"instruction_id_list": instructions, "kwargs": parsed}
    return {
        "data_source": "ifeval" if split == "test" else "ifeval_like",
        "prompt": [{"role": "user", "content": prompt}],
        "env_class": "ifeval",
        # JSON, because arguments of different instructions have no common column type
        "reward_spec": {"method": "rule", "ground_truth": json.dumps(truth)},
        "extra_info": {"split": split, "index": index},
    }


if __name__ == "__main__":
    conversion_main(convert, doc=__doc__, hub=HUB, hub_config=HUB_CONFIG)
