from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import pytest
import torch

import skyrl_train as sk
from skyrl_train.algorithms import advantages, policy_objective as policy, registry
from skyrl_train.algorithms.advantages import AdvantageCalculator
from skyrl_train.algorithms.policy_objective import PolicyObjective
from skyrl_train.algorithms.reductions import assign_loss_weights, token_mean
from skyrl_train.config.algorithm import AlgorithmConfig
from skyrl_train.data.batch import TrainBatch
from skyrl_train.environments.registry import environments
from skyrl_train.experiment.algorithm import algorithm_keywords
from skyrl_train.metrics import Metrics

PAGE = Path(__file__).parents[3] / "docs" / "concepts" / "algorithms.md"
ARCHITECTURE = PAGE.with_name("architecture.md")


def test_page_lists_every_algorithm():
    text = PAGE.read_text()
    for choices in (
        registry.advantage_estimators,
        registry.policy_losses,
        registry.kl_estimators,
        registry.reductions,
        registry.sft_losses,
    ):
        missing = [name for name in choices.table if f"| `{name}` |" not in text]
        assert not missing, f"{choices.kind}: {missing}"


def small_batch() -> TrainBatch:
    """Return sequences (5 6 | 7 2) with reward 1 and (5 6 | 8) with reward 0."""
    twos, tokens = torch.tensor([2, 2]), torch.tensor([5, 6, 7, 2, 5, 6, 8])
    return TrainBatch(
        input_ids=tokens,
        loss_mask=torch.tensor([0, 0, 1, 1, 0, 0, 1], dtype=torch.bool),
        offsets=torch.tensor([0, 4, 7]),
        prompt_lengths=twos,
        group_ids=torch.zeros(2, dtype=torch.int64),
        rewards=torch.tensor([1.0, 0.0]),
        temperature=torch.ones(2),
        status=torch.ones(2, dtype=torch.bool),
        min_versions=twos,
        max_versions=twos,
    )


def test_page_example_trains(monkeypatch: pytest.MonkeyPatch):
    for names in (registry.policy_losses, registry.advantage_estimators):
        monkeypatch.setattr(names, "loaded", dict(names.loaded))
    batch = small_batch()
    (example,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.S)
    exec(compile(example, str(PAGE), "exec"), {"__name__": "my_losses"})
    known = algorithm_keywords(AlgorithmConfig())
    estimator = registry.advantage_estimators.get("plain_reward")
    step = AdvantageCalculator(registry.bind_settings(estimator, "plain_reward", known, advantages.ESTIMATOR_TENSORS))
    batch = assign_loss_weights(step(batch, Metrics()), partial(token_mean, max_seq_len=1))
    loss = registry.bind_settings(
        registry.policy_losses.get("reinforce"), "reinforce", known, policy.POLICY_LOSS_TENSORS
    )
    logprobs = torch.full((7,), -1.0, requires_grad=True)
    PolicyObjective(loss)(batch, logprobs, None, 3, Metrics()).backward()
    assert logprobs.grad is not None
    torch.testing.assert_close(logprobs.grad, torch.tensor([0, 0, -1 / 3, -1 / 3, 0, 0, 0]))


def test_architecture_page_examples_run(monkeypatch: pytest.MonkeyPatch):
    for names in (registry.policy_losses, environments):
        monkeypatch.setattr(names, "loaded", dict(names.loaded))
    for example in re.findall(r"```python\n(.*?)```", ARCHITECTURE.read_text(), flags=re.S):
        exec(compile(example, str(ARCHITECTURE), "exec"), {"__name__": "my_parts", "sk": sk})
    known = algorithm_keywords(AlgorithmConfig(eps_clip_low=0.2))
    loss = registry.bind_settings(registry.policy_losses.get("my_loss"), "my_loss", known, policy.POLICY_LOSS_TENSORS)
    values, was_clipped = loss(
        torch.tensor([-1.0, -2.0, -1.0]),
        torch.ones(3),
        torch.tensor([True, True, False]),
        old_logprobs=torch.tensor([-1.0, -1.0, -3.0]),
    )
    torch.testing.assert_close(values, torch.tensor([-1.0, -0.8, 0.0]))
    assert was_clipped.tolist() == [False, True, False]
    assert environments.get("is_short") is not None
