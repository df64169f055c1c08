from __future__ import annotations

import re

import pytest

from skyrl_train.config.keys import leaves
from skyrl_train.config.prepare import prepare
from skyrl_train.config.unusual import _USUAL


def warnings(*overrides: str) -> list[str]:
    return [line for line in prepare(["device=cpu", *overrides]).warnings if "unusual" in line]


@pytest.mark.parametrize(
    "override",
    [
        "trainer.policy.optimizer_config.lr=1e6",
        "trainer.policy.optimizer_config.lr=1",
        "trainer.policy.optimizer_config.max_grad_norm=1e5",
        "trainer.algorithm.kl_loss_coef=100",
        "generator.sampling_params.temperature=10",
        "generator.sampling_params.max_generate_length=1",
        "generator.n_samples_per_prompt=5000",
        "trainer.timeouts.rollout_s=0.1",
    ],
)
def test_a_value_that_hardly_anybody_means_is_said_with_what_is_usual(override: str):
    (line,) = warnings(override)
    assert re.search(r"=\S+ is unusual: .*, and \S+ to \S+ is what runs have\.$", line), line


@pytest.mark.parametrize(
    "override",
    [
        "trainer.policy.optimizer_config.lr=0",  # nothing is learnt, on purpose
        "trainer.policy.optimizer_config.lr=0.01",
        "trainer.policy.optimizer_config.max_grad_norm=0",
        "generator.sampling_params.temperature=0.6",
        "trainer.critic.optimizer_config.lr=1e6",  # no effect: said by another line
    ],
)
def test_a_usual_value_is_not_named(override: str):
    assert warnings(override) == []


def test_every_key_exists_and_its_default_is_usual():
    for name, usual in _USUAL.items():
        default = leaves()[name].default
        assert not default or usual.low <= default <= usual.high, name
