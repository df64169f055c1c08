from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from skyrl_train.algorithms.registry import advantage_estimators
from skyrl_train.algorithms.value_objective import ValueObjective
from skyrl_train.config.hydra import load_preset
from skyrl_train.errors import ConfigError
from skyrl_train.experiment.algorithm import build_critic_objective


def needs(rewards: Any, group_ids: Any, valid: Any, *, values: Any) -> None: ...


def may_use(rewards: Any, group_ids: Any, valid: Any, *, values: Any = None) -> None: ...


def skyrl_style(token_level_rewards: Any, response_mask: Any, values: Any, gamma: float, **others: Any) -> None: ...


def objective(monkeypatch: pytest.MonkeyPatch, estimator: str | Callable[..., Any], path: str) -> ValueObjective | None:
    name = estimator if isinstance(estimator, str) else "mine"
    if not isinstance(estimator, str):
        monkeypatch.setitem(advantage_estimators.loaded, name, estimator)
    keys = ["trainer.algorithm.value_clip=0.3", f"trainer.critic.model.path={path}"]
    return build_critic_objective(load_preset([f"trainer.algorithm.advantage_estimator={name}", *keys]).trainer)


@pytest.mark.parametrize("estimator", ["gae", needs, may_use, skyrl_style])
def test_estimator_with_values_gets_critic(
    monkeypatch: pytest.MonkeyPatch, estimator: str | Callable[..., Any]
) -> None:
    assert objective(monkeypatch, estimator, "/x") == ValueObjective(0.3)


@pytest.mark.parametrize(("estimator", "path"), [("grpo", "/x"), ("grpo", "null"), (may_use, "null")])
def test_optional_values_need_configured_critic(
    monkeypatch: pytest.MonkeyPatch, estimator: str | Callable[..., Any], path: str
) -> None:
    assert objective(monkeypatch, estimator, path) is None


@pytest.mark.parametrize("estimator", ["gae", needs, skyrl_style])
def test_required_values_without_critic_are_refused(
    monkeypatch: pytest.MonkeyPatch, estimator: str | Callable[..., Any]
) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.critic\.model\.path=null: must be .* takes values"):
        objective(monkeypatch, estimator, "null")


@pytest.mark.parametrize(("key", "clip"), [("0.3", 0.3), ("null", math.inf)])
def test_null_clip_is_infinite(key: str, clip: float) -> None:
    keys = ["algorithm.advantage_estimator=gae", "critic.model.path=/x", f"algorithm.value_clip={key}"]
    assert build_critic_objective(load_preset([f"trainer.{one}" for one in keys]).trainer) == ValueObjective(clip)
