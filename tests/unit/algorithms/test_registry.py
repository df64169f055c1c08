from __future__ import annotations

import pytest

from skyrl_train.algorithms import registry
from skyrl_train.algorithms.advantages import grpo
from skyrl_train.algorithms.kl import k3
from skyrl_train.algorithms.losses import clipped_surrogate
from skyrl_train.errors import ConfigError

ALL = (
    registry.advantage_estimators,
    registry.policy_losses,
    registry.kl_estimators,
    registry.reductions,
    registry.sft_losses,
)


@pytest.mark.parametrize("choices", ALL, ids=lambda choices: choices.kind)
def test_every_listed_name_loads(choices):
    assert choices.names()
    assert all(callable(choices.get(name)) for name in choices.names())


def test_skyrl_names_select_the_right_functions():
    assert registry.advantage_estimators.get("grpo") is grpo
    assert registry.policy_losses.get("regular") is clipped_surrogate
    assert registry.kl_estimators.get("k3") is k3


def test_custom_loss_cannot_replace_a_builtin():
    @registry.policy_losses.register("mine_for_this_test")
    def mine(logprobs, advantages, mask, *, eps_clip_low, eps_clip_high):
        return -logprobs * advantages * mask, mask.float()

    assert registry.policy_losses.get("mine_for_this_test") is mine
    with pytest.raises(ConfigError, match="regular"):
        registry.policy_losses.register("regular")(mine)
    with pytest.raises(ConfigError, match=r"regulr.*Did you mean 'regular'"):
        registry.policy_losses.get("regulr")


def test_bind_settings_leaves_tensors_to_the_caller():
    def loss(logprobs, *, eps_clip_low, rollout_logprobs, selected=None):
        return logprobs, eps_clip_low, rollout_logprobs, selected

    bound = registry.bind_settings(
        loss, "test", {"eps_clip_low": 0.2, "other": 1}, frozenset({"rollout_logprobs", "selected"})
    )
    tensors = {"rollout_logprobs": 5, "selected": 6, "unused": 7}
    assert bound(1, **registry.select_keyword_arguments(bound, tensors)) == (1, 0.2, 5, 6)


def test_unknown_keyword_parameter_raises_config_error():
    def loss(logprobs, *, eps_clip_low, temprature, optional=None):
        return logprobs

    with pytest.raises(
        ConfigError, match=r"my loss requires temprature, which is neither .*eps_clip_low.*old_logprobs"
    ):
        registry.bind_settings(loss, "my loss", {"eps_clip_low": 0.2}, frozenset({"old_logprobs"}))


def test_deprecated_keywords_are_bound():
    def loss(logprobs, *, eps_low, norm_by_std):
        return logprobs, eps_low, norm_by_std

    bound = registry.bind_settings(loss, "test", {"eps_clip_low": 0.2, "grpo_norm_by_std": False}, frozenset())
    assert bound(1) == (1, 0.2, False)
