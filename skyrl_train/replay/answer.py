"""What a replay found: for all steps, for each of them, and for every sample."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from skyrl_train.data.trajectory import OK, TrajectoryGroup
from skyrl_train.replay.rewards import RewardComparison
from skyrl_train.replay.rows import KeptStep
from skyrl_train.replay.update import Update


@dataclass
class Answer:
    """What a replay found."""

    run: str
    reward: str | None
    own: str
    """The run's algorithm, by the names of its parts."""
    changed: str
    steps: list[int] = field(default_factory=list)
    rewards: RewardComparison | None = None
    old: list[dict[str, float]] = field(default_factory=list)
    """Of every step: the numbers of the run's own algorithm on the run's own rewards."""
    new: list[dict[str, float]] = field(default_factory=list)
    cosines: list[float] = field(default_factory=list)
    tokens: int = 0
    differing_tokens: int = 0
    """Of `tokens`: those whose recomputed advantage is not the run's, bit for bit."""
    recorded: int = 0
    differing_metrics: dict[str, int] = field(default_factory=dict)
    """Of `recorded` numbers in metrics.jsonl: name -> steps in which the replay has another."""
    samples: list[pa.Table] = field(default_factory=list)
    notes: dict[str, str] = field(default_factory=dict)
    """By what they are about."""

    def note(self, about: str, text: str) -> None:
        """Say something once."""
        self.notes.setdefault(about, text)


def samples_of(
    kept: KeptStep,
    groups: Sequence[TrajectoryGroup],
    now: Sequence[TrajectoryGroup] | None,
    old: Update,
    new: Update | None,
) -> pa.Table:
    """A row for each sample: rewards, and what the update makes of its tokens."""
    before = [item for group in groups for item in group.trajectories]
    after = before if now is None else [item for group in now for item in group.trajectories]
    columns: dict[str, Any] = {
        "step": [kept.step] * len(before),
        "uid": [item.prompt.uid for item in before],
        "group": [one.group for one in kept.rollouts],
        "sample": [item.sample for item in before],
        "data_source": [item.prompt.data_source for item in before],
        "env_class": [item.prompt.env_class for item in before],
        "status": [item.status for item in before],
        "reward_old": [item.reward if item.status == OK else None for item in before],
        "reward_new": [item.reward if item.status == OK else None for item in after],
        "error_new": [item.error for item in after],
    }
    types = {"reward_old": pa.float64(), "reward_new": pa.float64(), "error_new": pa.string()}
    for side, update in (("old", old), ("new", new)):
        for name, values in _of_samples(update).items() if update is not None else ():
            columns[f"{name}_{side}"] = values
    return pa.table({name: pa.array(values, types.get(name)) for name, values in columns.items()})


def _of_samples(update: Update) -> dict[str, Any]:
    """By name, [E]: means over the tokens that count, and the sum of their pushes."""
    batch, episodes = update.batch, update.batch.episodes
    counts = batch.loss_mask
    assert batch.token_advantages is not None
    tokens = episodes.sums(counts.double())
    each = tokens.clamp(min=1)
    found = {
        "trained_tokens": tokens.long(),
        "advantage": episodes.sums(torch.where(counts, batch.token_advantages, 0.0).double()) / each,
        "push": episodes.sums(update.pushes.double()),
        "clipped": episodes.sums(torch.where(counts, update.clipped, 0.0).double()) / each,
    }
    if batch.importance_weights is not None:
        found["importance_weight"] = episodes.sums(torch.where(counts, batch.importance_weights, 0.0).double()) / each
    return {name: values.numpy() for name, values in found.items()}


def means(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean over those steps that have a number; in the order of names as they come."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: float(np.mean([row[name] for row in rows if name in row])) for name in names}


def as_json(answer: Answer) -> str:
    """The whole answer; numbers that are not finite are null."""
    steps = [
        {"step": step, "old": old, "new": answer.new[index] if answer.new else None}
        for index, (step, old) in enumerate(zip(answer.steps, answer.old, strict=True))
    ]
    found = {
        "run": answer.run,
        "reward": answer.reward,
        "algorithms": {"old": answer.own, "new": answer.changed},
        "steps": answer.steps,
        "own": {
            "tokens": answer.tokens,
            "differing_tokens": answer.differing_tokens,
            "recorded_metrics": answer.recorded,
            "differing_metrics": answer.differing_metrics,
        },
        "rewards": None if answer.rewards is None else answer.rewards.numbers(),
        "update": {
            "old": means(answer.old),
            "new": means(answer.new) if answer.new else None,
            "cosine": float(np.mean(answer.cosines)) if answer.cosines else None,
        },
        "by_step": steps,
        "notes": list(answer.notes.values()),
    }
    return json.dumps(_finite(found), indent=1, allow_nan=False)


def write_samples(answer: Answer, file: Path) -> None:
    """A row for each sample of all steps, as Parquet."""
    pq.write_table(pa.concat_tables(answer.samples, promote_options="default"), file, compression="zstd")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
