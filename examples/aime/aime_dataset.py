"""Write DAPO-Math-17k (training) and AIME 2024 (validation) in SkyRL's row format.

python examples/aime/aime_dataset.py --output ~/data/aime                    from the hub
python examples/aime/aime_dataset.py --input FOLDER --output ~/data/aime     from FOLDER/train.parquet, test.parquet

Both sources repeat rows (DAPO's file a hundred times). The script omits repeated problems, and problems whose answer is
neither a number nor a fraction. Source rows have verl's format: prompt (messages that ask for "Answer: ...") and
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
    """Convert a source row; None for a repeated problem, or if the answer is neither a number nor a fraction.

    Raises:
        DataError: The row has no messages or no ground truth.
    """
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
