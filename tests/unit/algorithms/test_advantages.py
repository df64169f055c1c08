"""Compares every estimator with its paper, in plain Python over rows and tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from statistics import fmean

import pytest
import torch

from skyrl_train.algorithms import advantages, registry
from skyrl_train.algorithms.advantages import AdvantageCalculator, batch_normalize, grpo, maxrl, suffix_sums
from skyrl_train.config.choices import ADVANTAGE_ESTIMATORS
from skyrl_train.data.batch import TrainBatch
from skyrl_train.metrics import Metrics
from tests.support.edge_case_batches import SHAPES, edge_case_batch, select_masked, with_garbage
from tests.support.tensor_size_mode import LargestTensor

GAMMA, LAMBDA = 0.9, 0.8


@dataclass
class Row:
    """One sample; lists are over its sampled tokens."""

    group: int
    reward: float
    token_rewards: list[float]
    values: list[float]
    old: list[float]
    ref: list[float]
    others: list[Row] = field(default_factory=list)
    """All valid samples of its prompt, including itself."""


Result = tuple[list[list[float]], list[list[float]] | None]
"""Advantages and returns of the tokens of every row."""


def to_rows(batch: TrainBatch) -> list[Row]:
    """Return the valid samples as rows."""
    names = ("token_rewards", "values", "old_logprobs", "ref_logprobs")
    columns = [select_masked(batch, getattr(batch, name)) for name in names]
    groups, rewards = batch.group_ids.tolist(), batch.rewards.tolist()
    valid = batch.status.nonzero().flatten().tolist()
    rows = [Row(groups[i], rewards[i], *(column[i] for column in columns)) for i in valid]
    for row in rows:
        row.others = [other for other in rows if other.group == row.group]
    return rows


def per_row(equation: Callable[[Row, list[float]], float]) -> Callable[[list[Row]], Result]:
    """Return a reference from equation(row, rewards of its group), the advantage of all tokens of a row."""
    return lambda rows: (
        [[equation(row, [o.reward for o in row.others])] * len(row.values) for row in rows],
        None,
    )


def grpo_advantage(row: Row, rewards: list[float]) -> float:
    if len(rewards) == 1:
        return 0.0
    mean = fmean(rewards)
    std = (sum((r - mean) ** 2 for r in rewards) / (len(rewards) - 1)) ** 0.5
    return (row.reward - mean) / (std + 1e-6)


def rloo_advantage(row: Row, rewards: list[float]) -> float:
    others = [other.reward for other in row.others if other is not row]
    return row.reward - fmean(others) if others else 0.0


def opo_advantage(row: Row, rewards: list[float]) -> float:
    lengths = [len(other.values) for other in row.others]
    return row.reward - sum(n * r for n, r in zip(lengths, rewards, strict=True)) / sum(lengths)


def whiten(rows: list[list[float]], correction: int = 1) -> list[list[float]]:
    flat = [x for row in rows for x in row]
    if not flat:
        return rows
    mean = fmean(flat)
    variance = max(sum((x - mean) ** 2 for x in flat) / max(len(flat) - correction, 1), 1e-8)
    return [[(x - mean) / variance**0.5 for x in row] for row in rows]


def reinforce_pp(rows: list[Row]) -> Result:
    returns = [
        [
            sum(GAMMA ** (k - t) * row.token_rewards[k] for k in range(t, len(row.token_rewards)))
            for t in range(len(row.token_rewards))
        ]
        for row in rows
    ]
    return whiten(returns), returns


def reinforce_pp_baseline(rows: list[Row]) -> Result:
    centered = [[row.reward - fmean(o.reward for o in row.others)] * len(row.values) for row in rows]
    return whiten(centered), None


def gae(rows: list[Row]) -> Result:
    """Evaluate eq. 16 as an explicit sum."""
    result, returns = [], []
    for row in rows:
        n = len(row.values)
        next_values = [*row.values[1:], 0.0]
        deltas = [row.token_rewards[t] + GAMMA * next_values[t] - row.values[t] for t in range(n)]
        row_advantages = [sum((GAMMA * LAMBDA) ** (k - t) * deltas[k] for k in range(t, n)) for t in range(n)]
        result.append(row_advantages)
        returns.append([a + v for a, v in zip(row_advantages, row.values, strict=True)])
    return whiten(result), returns


REFERENCES: dict[str, Callable[[list[Row]], Result]] = {
    "grpo": per_row(grpo_advantage),
    "dr_grpo": per_row(lambda row, rewards: row.reward - fmean(rewards)),
    "rloo": per_row(rloo_advantage),
    "maxrl": per_row(lambda row, rewards: (row.reward - fmean(rewards)) / max(fmean(rewards), 1 / len(rewards))),
    "opo": per_row(opo_advantage),
    "reinforce++": reinforce_pp,
    "reinforce++_baseline": reinforce_pp_baseline,
    "gae": gae,
    "distillation": lambda rows: ([[b - a for a, b in zip(row.old, row.ref, strict=True)] for row in rows], None),
}
GROUP_ESTIMATORS = ["grpo", "dr_grpo", "rloo", "maxrl", "opo", "reinforce++_baseline"]


def make_calculator(name: str, *, grpo_norm_by_std: bool = True) -> AdvantageCalculator:
    settings = {"gamma": GAMMA, "lambd": LAMBDA, "grpo_norm_by_std": grpo_norm_by_std}
    return AdvantageCalculator(
        registry.bind_settings(registry.advantage_estimators.get(name), name, settings, advantages.ESTIMATOR_TENSORS)
    )


def make_batches() -> list[TrainBatch]:
    random_batches = [edge_case_batch(shape, seed) for seed, shape in enumerate([*SHAPES, *SHAPES])]
    binary = [replace(batch, rewards=(batch.rewards > 0.8).double()) for batch in random_batches]
    return [
        *random_batches,
        *binary,
        *(replace(batch, rewards=torch.ones_like(batch.rewards) / 3) for batch in random_batches),
    ]


@pytest.mark.parametrize("name", ADVANTAGE_ESTIMATORS)
def test_advantages_and_returns_match_the_paper(name: str):
    for batch in make_batches():
        expected = REFERENCES[name](to_rows(batch))
        for garbage in (0.0, torch.nan, 1e30):  # in failed samples and outside the mask
            result = make_calculator(name)(with_garbage(batch, garbage), Metrics())
            for actual, reference in zip((result.token_advantages, result.returns), expected, strict=True):
                if reference is None:
                    assert actual is None
                    continue
                assert actual is not None
                flat = torch.tensor([x for row in reference for x in row], dtype=torch.float64)
                torch.testing.assert_close(actual[batch.loss_mask], flat, rtol=1e-10, atol=1e-11)
                assert (actual[~batch.loss_mask] == 0).all()


def test_grpo_without_std_equals_dr_grpo():
    for batch in make_batches():
        grpo_calculator, dr_grpo_calculator = (
            make_calculator("grpo", grpo_norm_by_std=False),
            make_calculator("dr_grpo"),
        )
        grpo_advantages = grpo_calculator(batch, Metrics()).token_advantages
        dr_grpo_advantages = dr_grpo_calculator(batch, Metrics()).token_advantages
        assert grpo_advantages is not None and dr_grpo_advantages is not None
        assert torch.equal(grpo_advantages, dr_grpo_advantages)


@pytest.mark.parametrize("name", ADVANTAGE_ESTIMATORS)
def test_advantages_ignore_row_order(name: str):
    batch = edge_case_batch("failed rows")
    order = [3, 0, 6, 2, 5, 1, 4]
    expected = make_calculator(name)(batch, Metrics()).select(order)
    shuffled = make_calculator(name)(batch.select(order), Metrics())
    torch.testing.assert_close(shuffled.token_advantages, expected.token_advantages, rtol=1e-12, atol=1e-13)


@pytest.mark.fault("F12")
@pytest.mark.parametrize("name", GROUP_ESTIMATORS)
@pytest.mark.parametrize("reward", [0.0, 0.1, 1 / 3, -7.7])
def test_equal_rewards_have_zero_advantage(name: str, reward: float):
    for shape in SHAPES:
        batch = edge_case_batch(shape)
        equal = replace(batch, rewards=torch.full((len(batch),), reward))
        assert not make_calculator(name)(equal, Metrics()).token_advantages.any()  # type: ignore[union-attr]


@pytest.mark.fault("F12")
@pytest.mark.parametrize("name", [name for name in GROUP_ESTIMATORS if name != "reinforce++_baseline"])
def test_groups_without_comparison_have_zero_advantage(name: str):
    batch = edge_case_batch("one-sample groups")
    has_no_comparison = batch.expand_to_tokens(batch.group_ids < 6)
    token_advantages = make_calculator(name)(batch, Metrics()).token_advantages
    assert token_advantages is not None
    assert not token_advantages[has_no_comparison].any()
    assert token_advantages[~has_no_comparison].any()


def test_group_advantages_sum_to_zero():
    batch = edge_case_batch("failed rows")
    for name in ("grpo", "dr_grpo", "rloo", "maxrl"):
        estimator = make_calculator(name).estimator
        values = estimator(batch.rewards, batch.group_ids, batch.status)
        assert isinstance(values, torch.Tensor)
        for group in batch.group_ids.unique():
            assert float(values[batch.group_ids == group].sum()) == pytest.approx(0, abs=1e-12)


def test_grpo_divides_by_unbiased_std():
    rewards, groups = torch.tensor([1.0, 0.0, 0.0, 4.0, 2.0]), torch.tensor([7, 7, 7, 3, 3])
    expected = torch.cat(
        [
            (rewards_of_group - rewards_of_group.mean()) / (rewards_of_group.std() + 1e-6)
            for rewards_of_group in (rewards[:3], rewards[3:])
        ]
    )
    torch.testing.assert_close(grpo(rewards, groups, torch.ones(5).bool(), grpo_norm_by_std=True), expected)


def test_batch_normalize_standardizes_over_the_mask():
    generator = torch.Generator().manual_seed(1)
    advantages = torch.randn(50, generator=generator) * 3 + 2
    mask = torch.rand(50, generator=generator) > 0.4
    advantages[~mask] = torch.nan
    normalized = batch_normalize(advantages, mask)
    torch.testing.assert_close(normalized[mask].mean(), torch.tensor(0.0), atol=1e-6, rtol=0)
    torch.testing.assert_close(normalized[mask].var(correction=0), torch.tensor(1.0))
    assert (normalized[~mask] == 0).all()
    assert batch_normalize(torch.full((3,), 2.0), torch.zeros(3, dtype=torch.bool)).tolist() == [0.0] * 3


def test_batch_normalize_ignores_prompt_tokens():
    batch = edge_case_batch("regular")
    calculator = make_calculator("dr_grpo")
    unnormalized = calculator(batch, Metrics()).token_advantages
    assert unnormalized is not None
    (expected,) = whiten([unnormalized[batch.loss_mask].tolist()], correction=0)
    calculator.advantage_batch_normalize = True
    normalized = calculator(batch, Metrics()).token_advantages
    assert normalized is not None
    assert normalized[batch.loss_mask].tolist() == pytest.approx(expected)


def test_maxrl_keeps_sign_with_negative_mean():
    rewards, group = torch.tensor([0.7, -0.3, -0.3, -0.3]), torch.zeros(4, dtype=torch.int64)
    advantages = maxrl(rewards, group, torch.ones(4, dtype=torch.bool))
    torch.testing.assert_close(advantages, torch.tensor([3.0, -1.0, -1.0, -1.0]))


def test_many_equal_advantages_normalize_to_zero():
    normalized = batch_normalize(torch.full((100_000,), 0.7), torch.ones(100_000, dtype=torch.bool))
    assert normalized.abs().max() < 1e-9


@pytest.mark.defect("one-long-response-pads-all")
def test_suffix_sums_bound_padding(monkeypatch: pytest.MonkeyPatch):
    lengths = torch.tensor([50] * 200 + [8000] + [3] * 100)
    rows = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    values, factor = torch.randn(len(rows), generator=torch.Generator().manual_seed(0)).double(), 0.9
    with LargestTensor() as largest:
        sums = suffix_sums(values, rows, factor)
    assert largest.max_elements <= 2 * len(rows)
    monkeypatch.setattr(advantages, "MAX_PADDED_ELEMENTS", 64)  # nearly every sequence is summed separately
    assert torch.equal(suffix_sums(values, rows, factor), sums)
    expected = values.clone()
    for index in range(len(rows) - 2, -1, -1):
        if rows[index] == rows[index + 1]:
            expected[index] += factor * expected[index + 1]
    assert torch.equal(sums, expected)
