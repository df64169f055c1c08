"""Every estimator against its paper, in plain Python over rows and tokens."""

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
    """All valid samples of its prompt, itself included."""


Result = tuple[list[list[float]], list[list[float]] | None]
"""Advantages, and returns, of every row's tokens."""


def to_rows(batch: TrainBatch) -> list[Row]:
    """The valid ones."""
    names = ("token_rewards", "values", "old_logprobs", "ref_logprobs")
    columns = [select_masked(batch, getattr(batch, name)) for name in names]
    groups, rewards = batch.group_ids.tolist(), batch.rewards.tolist()
    valid = batch.status.nonzero().flatten().tolist()
    rows = [Row(groups[i], rewards[i], *(column[i] for column in columns)) for i in valid]
    for row in rows:
        row.others = [other for other in rows if other.group == row.group]
    return rows


def per_row(equation: Callable[[Row, list[float]], float]) -> Callable[[list[Row]], Result]:
    """equation(row, rewards of its group) -> the advantage of all its tokens."""
    return lambda rows: (
        [[equation(row, [o.reward for o in row.others])] * len(row.values) for row in rows],
        None,
    )


def plain_grpo(row: Row, rewards: list[float]) -> float:
    if len(rewards) == 1:
        return 0.0
    mean = fmean(rewards)
    std = (sum((r - mean) ** 2 for r in rewards) / (len(rewards) - 1)) ** 0.5
    return (row.reward - mean) / (std + 1e-6)


def leave_one_out(row: Row, rewards: list[float]) -> float:
    others = [other.reward for other in row.others if other is not row]
    return row.reward - fmean(others) if others else 0.0


def optimal_baseline(row: Row, rewards: list[float]) -> float:
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
    plain = [[row.reward - fmean(o.reward for o in row.others)] * len(row.values) for row in rows]
    return whiten(plain), None


def gae(rows: list[Row]) -> Result:
    """Eq. 16 as the sum it abbreviates."""
    result, returns = [], []
    for row in rows:
        n = len(row.values)
        after = [*row.values[1:], 0.0]
        deltas = [row.token_rewards[t] + GAMMA * after[t] - row.values[t] for t in range(n)]
        of_row = [sum((GAMMA * LAMBDA) ** (k - t) * deltas[k] for k in range(t, n)) for t in range(n)]
        result.append(of_row)
        returns.append([a + v for a, v in zip(of_row, row.values, strict=True)])
    return whiten(result), returns


REFERENCES: dict[str, Callable[[list[Row]], Result]] = {
    "grpo": per_row(plain_grpo),
    "dr_grpo": per_row(lambda row, rewards: row.reward - fmean(rewards)),
    "rloo": per_row(leave_one_out),
    "maxrl": per_row(lambda row, rewards: (row.reward - fmean(rewards)) / max(fmean(rewards), 1 / len(rewards))),
    "opo": per_row(optimal_baseline),
    "reinforce++": reinforce_pp,
    "reinforce++_baseline": reinforce_pp_baseline,
    "gae": gae,
    "distillation": lambda rows: ([[b - a for a, b in zip(row.old, row.ref, strict=True)] for row in rows], None),
}
ONE_VALUE_A_GROUP = ["grpo", "dr_grpo", "rloo", "maxrl", "opo", "reinforce++_baseline"]


def make_calculator(name: str, *, grpo_norm_by_std: bool = True) -> AdvantageCalculator:
    settings = {"gamma": GAMMA, "lambd": LAMBDA, "grpo_norm_by_std": grpo_norm_by_std}
    return AdvantageCalculator(
        registry.bind_settings(registry.advantage_estimators.get(name), name, settings, advantages.ESTIMATOR_TENSORS)
    )


def batches() -> list[TrainBatch]:
    drawn = [edge_case_batch(shape, seed) for seed, shape in enumerate([*SHAPES, *SHAPES])]
    right_or_wrong = [replace(batch, rewards=(batch.rewards > 0.8).double()) for batch in drawn]
    return [*drawn, *right_or_wrong, *(replace(batch, rewards=torch.ones_like(batch.rewards) / 3) for batch in drawn)]


@pytest.mark.parametrize("name", ADVANTAGE_ESTIMATORS)
def test_advantages_and_returns_are_those_of_the_paper(name: str):
    for batch in batches():
        expected = REFERENCES[name](to_rows(batch))
        for garbage in (0.0, torch.nan, 1e30):  # failed samples and whatever is not sampled have no influence
            result = make_calculator(name)(with_garbage(batch, garbage), Metrics())
            for found, wanted in zip((result.token_advantages, result.returns), expected, strict=True):
                if wanted is None:
                    assert found is None
                    continue
                assert found is not None
                flat = torch.tensor([x for row in wanted for x in row], dtype=torch.float64)
                torch.testing.assert_close(found[batch.loss_mask], flat, rtol=1e-10, atol=1e-11)
                assert (found[~batch.loss_mask] == 0).all()


def test_grpo_without_the_standard_deviation_is_dr_grpo():
    for batch in batches():
        one, other = make_calculator("grpo", grpo_norm_by_std=False), make_calculator("dr_grpo")
        assert torch.equal(one(batch, Metrics()).token_advantages, other(batch, Metrics()).token_advantages)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ADVANTAGE_ESTIMATORS)
def test_advantages_do_not_depend_on_the_order_of_rows(name: str):
    batch = edge_case_batch("failed rows")
    order = [3, 0, 6, 2, 5, 1, 4]
    straight = make_calculator(name)(batch, Metrics()).select(order)
    shuffled = make_calculator(name)(batch.select(order), Metrics())
    torch.testing.assert_close(shuffled.token_advantages, straight.token_advantages, rtol=1e-12, atol=1e-13)


@pytest.mark.fault("F12")
@pytest.mark.parametrize("name", ONE_VALUE_A_GROUP)
@pytest.mark.parametrize("reward", [0.0, 0.1, 1 / 3, -7.7])
def test_equal_rewards_give_exactly_zero(name: str, reward: float):
    for shape in SHAPES:
        batch = edge_case_batch(shape)
        equal = replace(batch, rewards=torch.full((len(batch),), reward))
        assert not make_calculator(name)(equal, Metrics()).token_advantages.any()  # type: ignore[union-attr]


@pytest.mark.fault("F12")
@pytest.mark.parametrize("name", [name for name in ONE_VALUE_A_GROUP if name != "reinforce++_baseline"])
def test_a_group_with_one_valid_row_or_none_gives_zero_and_no_nan(name: str):
    batch = edge_case_batch("one-sample groups")
    alone = batch.expand_to_tokens(batch.group_ids < 6)
    found = make_calculator(name)(batch, Metrics()).token_advantages
    assert found is not None
    assert not found[alone].any()
    assert found[~alone].any()


def test_a_whole_group_s_advantages_add_up_to_zero_whatever_its_size():
    batch = edge_case_batch("failed rows")
    for name in ("grpo", "dr_grpo", "rloo", "maxrl"):
        estimator = make_calculator(name).estimator
        values = estimator(batch.rewards, batch.group_ids, batch.status)
        assert isinstance(values, torch.Tensor)
        for group in batch.group_ids.unique():
            assert float(values[batch.group_ids == group].sum()) == pytest.approx(0, abs=1e-12)


def test_grpo_is_the_distance_from_the_groups_mean_over_its_unbiased_std():
    rewards, groups = torch.tensor([1.0, 0.0, 0.0, 4.0, 2.0]), torch.tensor([7, 7, 7, 3, 3])
    expected = torch.cat([(part - part.mean()) / (part.std() + 1e-6) for part in (rewards[:3], rewards[3:])])
    torch.testing.assert_close(grpo(rewards, groups, torch.ones(5).bool(), grpo_norm_by_std=True), expected)


def test_batch_normalised_has_mean_zero_and_variance_one_over_the_mask():
    generator = torch.Generator().manual_seed(1)
    advantages = torch.randn(50, generator=generator) * 3 + 2
    mask = torch.rand(50, generator=generator) > 0.4
    advantages[~mask] = torch.nan
    normalised = batch_normalize(advantages, mask)
    torch.testing.assert_close(normalised[mask].mean(), torch.tensor(0.0), atol=1e-6, rtol=0)
    torch.testing.assert_close(normalised[mask].var(correction=0), torch.tensor(1.0))
    assert (normalised[~mask] == 0).all()
    assert batch_normalize(torch.full((3,), 2.0), torch.zeros(3, dtype=torch.bool)).tolist() == [0.0] * 3


def test_batch_normalisation_is_the_same_however_much_padding_or_how_many_prompts_there_are():
    batch = edge_case_batch("regular")
    step = make_calculator("dr_grpo")
    plain = step(batch, Metrics()).token_advantages
    assert plain is not None
    (expected,) = whiten([plain[batch.loss_mask].tolist()], correction=0)
    step.advantage_batch_normalize = True
    found = step(batch, Metrics()).token_advantages
    assert found is not None
    assert found[batch.loss_mask].tolist() == pytest.approx(expected)


def test_maxrl_keeps_its_sign_where_penalties_make_the_mean_negative():
    rewards, group = torch.tensor([0.7, -0.3, -0.3, -0.3]), torch.zeros(4, dtype=torch.int64)
    advantages = maxrl(rewards, group, torch.ones(4, dtype=torch.bool))
    torch.testing.assert_close(advantages, torch.tensor([3.0, -1.0, -1.0, -1.0]))


def test_many_equal_advantages_are_normalised_to_nothing():
    normal = batch_normalize(torch.full((100_000,), 0.7), torch.ones(100_000, dtype=torch.bool))
    assert normal.abs().max() < 1e-9


@pytest.mark.defect("one-long-answer-made-all-long")
def test_one_long_answer_does_not_make_all_long(monkeypatch: pytest.MonkeyPatch):
    lengths = torch.tensor([50] * 200 + [8000] + [3] * 100)
    rows = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    values, factor = torch.randn(len(rows), generator=torch.Generator().manual_seed(0)).double(), 0.9
    with LargestTensor() as largest:
        found = suffix_sums(values, rows, factor)
    assert largest.max_elements <= 2 * len(rows)
    monkeypatch.setattr(advantages, "MAX_PADDED_ELEMENTS", 64)  # hardly any two side by side
    assert torch.equal(suffix_sums(values, rows, factor), found)
    last = values.clone()
    for at in range(len(rows) - 2, -1, -1):
        if rows[at] == rows[at + 1]:
            last[at] += factor * last[at + 1]
    assert torch.equal(found, last)
