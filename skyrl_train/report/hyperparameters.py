"""A configuration as flat names and plain values, for trackers that compare runs by them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from skyrl_train.messages import visible


def flattened(config: Mapping[str, Any], prefix: str = "") -> dict[str, bool | int | float | str]:
    """`trainer.policy.optimizer_config.lr` -> 1e-6: every value that is no mapping. Lists are JSON, None is "null"."""
    flat: dict[str, bool | int | float | str] = {}
    for key, value in config.items():
        name = prefix + visible(str(key))
        if isinstance(value, Mapping):
            flat |= flattened(value, f"{name}.")
        elif isinstance(value, (bool, int, float)):
            flat[name] = value
        else:
            flat[name] = visible(value if isinstance(value, str) else json.dumps(value, default=str))
    return flat
