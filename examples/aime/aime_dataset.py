"""DAPO-Math-17k for training and AIME 2024 for validation, in SkyRL's row format.

python examples/aime/aime_dataset.py --output ~/data/aime                    from the hub
python examples/aime/aime_dataset.py --input FOLDER --output ~/data/aime     from FOLDER/train.parquet, test.parquet

Both repeat their rows (DAPO's file a hundred times): repeated problems are left out, as are those whose answer is
neither a number nor a fraction. Rows are verl's: prompt (messages that ask for "Answer: ..."),
reward_model.ground_truth.
"""

from __future__ import annotations

import hashlib
from typing import Any

from skyrl_train.data.conversion import conversion_main
from skyrl_train.environments.graders.numbers import parse_fraction, parse_number
from skyrl_train.errors import DataError

HUB = {"train": "BytedTsinghua-SIA/DAPO-Math-17k:train", "test": "BytedTsinghua-SIA/AIME-2024:train"}
SEEN: set[tuple[str, bytes]] = set()


def convert(where: str, row: dict[str, Any], split: str, index: int) -> dict[str, Any] | None:
    """A row of the source as one of SkyRL's; None for a repetition, and an answer that is no number or fraction."""
    prompt, spec = row.get("prompt"), row.get("reward_model") or row.get("reward_spec")
    if not isinstance(prompt, list) or not isinstance(spec, dict) or spec.get("ground_truth") is None:
        raise DataError(f"{where}: needs prompt (messages) and reward_model.ground_truth, got {row!r:.120}.")
    problem = (split, hashlib.sha256(repr(prompt).encode()).digest())
    text = str(spec["ground_truth"])
    truth = text if parse_fraction(text) is not None else parse_number(text)
    if problem in SEEN or truth is None:
        return None
    SEEN.add(problem)
    return {
        "data_source": str(row.get("data_source") or "aime"),
        "prompt": prompt,
        "env_class": "aime",
        "reward_spec": {"method": "rule", "ground_truth": truth},
        "extra_info": {"split": split, "index": index},
    }


if __name__ == "__main__":
    conversion_main(convert, doc=__doc__, hub=HUB)
