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
_MEGATRON = "Of Megatron's parallelism only that of tensors is available; fsdp2 shards over the other ranks."
_COPIES = "Copies of a model are engines of their own here: raise generator.num_inference_engines."
_PROXY = "A router of another project cannot take weights: name the servers behind it in external_server_urls."

VALUES: dict[str, tuple[tuple[Any, ...], str]] = {
    "trainer.fully_async.enabled": ((False,), "Only synchronous training is available in this version."),
    "trainer.policy.model.lora.dropout": ((0.0,), _DROPOUT),
    "trainer.critic.model.lora.dropout": ((0.0,), _DROPOUT),
    **{
        f"trainer.{role}.megatron_config.{kind}_parallel_size": ((1, None) if "expert_t" in kind else (1,), _MEGATRON)
        for role in ("policy", "ref")
        for kind in ("pipeline_model", "context", "expert_model", "expert_tensor")
    },
    "generator.inference_engine_data_parallel_size": ((1,), _COPIES),
    "generator.external_proxy_url": ((None,), _PROXY),
}
"""Key -> the values it may have, and why or what to do instead."""


def unavailable(config: Config) -> Iterator[Problem]:
    """Settings that this version knows and does not do. Names of choices are checked in validate."""
    for key, (allowed, advice) in VALUES.items():
        if (value := value_at(config, key)) not in allowed:
            yield Problem(key, value, " or ".join(show(item) for item in allowed), advice)
