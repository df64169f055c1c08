"""Metrics of a step's rollouts, and the sample texts for users."""

from __future__ import annotations

import pytest

from skyrl_train.data.messages import Prompt
from skyrl_train.data.trajectory import Trajectory, TrajectoryGroup, Turn
from skyrl_train.metrics import Metrics
from skyrl_train.trainer.rollout_metrics import (
    TABLE_CHARACTERS,
    TABLE_ROWS,
    add_rollout_metrics,
    sample_rows,
    table_rows,
)
from tests.support.trajectories import trajectory_from


def groups_of(*lengths: int, count: int, prompt: str = "what?") -> list[TrajectoryGroup]:
    """Return `count` groups, each with samples whose texts have these lengths."""
    groups = []
    for number in range(count):
        question = Prompt(str(number), [{"role": "user", "content": prompt}], "toy")
        items = [Trajectory.empty(question, sample, 1.0) for sample in range(len(lengths))]
        for item, length in zip(items, lengths, strict=True):
            item.text = f"{number}.{item.sample}".ljust(length, ".")
        groups.append(TrajectoryGroup(question, items))
    return groups


def test_table_rows_have_all_samples_of_first_groups():
    groups = groups_of(*[10] * 6, count=9)
    rows = table_rows(groups)
    assert len(rows) == TABLE_ROWS == 32
    assert [(row.uid, row.sample) for row in rows] == [(str(n // 6), n % 6) for n in range(32)]
    assert [row.response.rstrip(".") for row in rows] == [f"{n // 6}.{n % 6}" for n in range(32)]
    assert [(row.uid, row.sample) for row in sample_rows(groups)] == [(str(n), 0) for n in range(4)]
    assert table_rows([]) == [] and len(table_rows(groups[:1])) == 6


@pytest.mark.parametrize(("lengths", "count"), [((100_000,) * 8, 4), ((50, 200_000, 300), 3), ((65_531,), 1)])
def test_longest_table_texts_are_truncated(lengths: tuple[int, ...], count: int):
    groups = groups_of(*lengths, count=count)
    rows = table_rows(groups)
    total = 0
    for row, item in zip(rows, (item for group in groups for item in group.trajectories), strict=True):
        assert row.prompt == "what?"
        start, mark, end = row.response.partition("\n[... ")
        removed = int(end.partition(" ")[0]) if mark else 0
        total += len(row.prompt) + len(item.text) - removed
        assert item.text.startswith(start) and (mark or start == item.text)
        assert bool(mark) == (len(item.text) > 1000 and sum(lengths) * count + 5 > TABLE_CHARACTERS)
    assert TABLE_CHARACTERS - 64 < total <= TABLE_CHARACTERS or not any("[... " in row.response for row in rows)
    assert sample_rows(groups)[0].response == groups[0].trajectories[0].text, "the samples are not truncated"


def test_lengths_count_sampled_tokens():
    prompt = Prompt("0", [{"role": "user", "content": "?"}], "toy")
    masks = [1] * 4 + [0] * 500 + [1] * 4, [1, 1]
    turns = [[Turn(0, 4, 0.0, "stop", 1, 1), Turn(504, 508, 1.0, "stop", 1, 1)], [Turn(0, 2, 1.0, "stop", 1, 1)]]
    items = [
        trajectory_from(prompt, sample, [1], mask, mask, [0.0] * len(mask), turns[sample], 1.0, "stop", 1.0)
        for sample, mask in enumerate(masks)
    ]
    metrics = Metrics()
    add_rollout_metrics([TrajectoryGroup(prompt, items)], 1, metrics)
    tokens = {name: value for name, value in metrics.flush().items() if "tokens" in name}
    assert tokens == {
        "rollouts/tokens": 10,
        "response/mean_tokens": 5,
        "response/max_tokens": 8,
        "response/observation_tokens": 250,
    }
    assert [row.tokens for row in table_rows([TrajectoryGroup(prompt, items)])] == [8, 2]
