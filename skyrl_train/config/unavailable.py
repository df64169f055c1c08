"""What SkyRL has and this version does not do yet: refused by name. Work that adds one deletes its row."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from skyrl_train.config.keys import value_at
from skyrl_train.config.problems import Problem, show
from skyrl_train.config.schema import Config

NAMES: dict[str, dict[str, str]] = {
    f"trainer.{role}.model.lora.init_method": {
        name: f"{name} is not available in this version: it changes the frozen weights, or reads data first."
        for name in ("pissa", "olora", "loftq", "corda", "eva", "lora_ga")
    }
    for role in ("policy", "critic")
}
"""Known names of choices that cannot be made: key -> name -> what to do."""

_DROPOUT = "Log-probs must not depend on chance: those of the update and of the rollouts would differ for nothing."
_PROXY = "A router of another project cannot take weights: name the servers behind it in external_server_urls."

VALUES: dict[str, tuple[tuple[Any, ...], str]] = {
    "trainer.fully_async.enabled": ((False,), "Only synchronous training is available in this version."),
    "trainer.policy.model.lora.dropout": ((0.0,), _DROPOUT),
    "trainer.critic.model.lora.dropout": ((0.0,), _DROPOUT),
    "generator.external_proxy_url": ((None,), _PROXY),
}
"""Key -> the values it may have, and why or what to do instead."""


def unavailable(config: Config) -> Iterator[Problem]:
    """Settings that this version knows and does not do. Names of choices are checked in validate."""
    for key, (allowed, advice) in VALUES.items():
        if (value := value_at(config, key)) not in allowed:
            yield Problem(key, value, " or ".join(show(item) for item in allowed), advice)
