"""Metrics of a step's rollouts, and sample texts for the console and trackers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain, islice
from statistics import stdev

from skyrl_train.data.trajectory import MIN_PASS_REWARD, OK, Trajectory, TrajectoryGroup
from skyrl_train.environments.tools.base import truncate_middle
from skyrl_train.metrics import Metrics
from skyrl_train.report.protocol import SampleRow

NUM_SAMPLES = 4
"""Number of completions shown per step."""
TABLE_ROWS, TABLE_CHARACTERS = 32, 65_536
"""Limits of a step's table for trackers, which store a table per step: about 70 MB of ASCII text in 1,000 steps."""


def add_rollout_metrics(groups: Sequence[TrajectoryGroup], version: int, metrics: Metrics) -> None:
    """Add the metrics of rewards, responses, episodes, environments, programs and rollouts of a step.

    All except agent/*, rollouts/tokens and rollouts/trajectories cover only trajectories with status ok. A group that
    dynamic sampling repeats counts once.

    Args:
        groups: The groups that the step trains on.
        version: The current version of the weights, from which staleness is counted.
        metrics: The metrics to add to.
    """
    groups = list({id(group): group for group in groups}.values())
    trajectories = list(chain.from_iterable(group.trajectories for group in groups))
    succeeded = [item for item in trajectories if item.status == OK]
    metrics.count("rollouts/tokens", sum(item.sampled_tokens for item in trajectories))
    metrics.count("rollouts/trajectories", len(trajectories))
    for item in trajectories:
        if item.session is not None:
            _add_session_metrics(item.session["statistics"], metrics)
    for item in succeeded:
        metrics.add("reward/mean", item.reward)
        if item.raw_reward is not None:
            metrics.add("reward/length_penalty", item.raw_reward - item.reward)
        metrics.add("response/mean_tokens", item.sampled_tokens)
        metrics.add("response/truncated_fraction", item.stop_reason == "length")
        metrics.update_max("response/max_tokens", item.sampled_tokens)
        metrics.add("response/observation_tokens", len(item.response_ids) - item.sampled_tokens)
        metrics.add("timing/response_s", sum(turn.running_s for turn in item.turns))
        metrics.add("episode/turns", len(item.turns))
        metrics.update_max("episode/max_turns", len(item.turns))
        metrics.add("episode/sequences", 1 + len(item.restarts))
        if item.sampled_turns:
            metrics.update_max("rollouts/max_staleness", version - item.min_version)
        for name, value in item.env_metrics.items():
            metrics.add(f"environment/{name}", value)
    if len(succeeded) > 1:
        metrics.add("reward/std", stdev(item.reward for item in succeeded))
    for group in groups:
        valid = [item for item in group.trajectories if item.status == OK]
        if valid:
            metrics.add("reward/zero_variance_groups", len({item.reward for item in valid}) == 1)
            metrics.add(
                f"reward/pass_at_{len(group.trajectories)}", any(item.outcome >= MIN_PASS_REWARD for item in valid)
            )


def _add_session_metrics(statistics: Mapping[str, int], metrics: Metrics) -> None:
    for name in ("calls", "branches", "read_tokens"):
        metrics.add(f"agent/{name}", statistics[name])
    for name in ("retokenized_messages", "malformed_calls", "overridden_parameters"):
        metrics.count(f"agent/{name}", statistics[name])


def sample_rows(groups: Sequence[TrajectoryGroup]) -> list[SampleRow]:
    """Return the first trajectory of each of the first NUM_SAMPLES groups, as readable rows. Skips empty groups."""
    return [sample_row(group.trajectories[0]) for group in groups[:NUM_SAMPLES] if group.trajectories]


def table_rows(groups: Sequence[TrajectoryGroup]) -> list[SampleRow]:
    """Return the first TABLE_ROWS trajectories as rows of a tracker's table.

    Removes the middle of the longest texts if all texts together exceed TABLE_CHARACTERS.
    """
    items = islice(chain.from_iterable(group.trajectories for group in groups), TABLE_ROWS)
    rows = [sample_row(item) for item in items]
    max_length = _max_text_length([len(text) for row in rows for text in (row.prompt, row.response)], TABLE_CHARACTERS)
    return [
        replace(row, prompt=truncate_middle(row.prompt, max_length), response=truncate_middle(row.response, max_length))
        for row in rows
    ]


def _max_text_length(lengths: Sequence[int], max_total: int) -> int:
    """Return the length to truncate texts to, so that together they have at most `max_total` characters.

    Shorter texts leave the rest of their share to longer ones.
    """
    for remaining, length in zip(range(len(lengths), 0, -1), sorted(lengths), strict=True):
        if length * remaining > max_total:
            return max_total // remaining
        max_total -= length
    return max(lengths, default=0)


def sample_row(item: Trajectory) -> SampleRow:
    """Return a trajectory as a readable row; its prompt is the last message of the conversation."""
    content = item.prompt.messages[-1]["content"] if item.prompt.messages else ""
    return SampleRow(
        prompt=str(content),
        response=item.text,
        reward=item.reward,
        stop_reason=item.stop_reason,
        uid=str(item.prompt.uid),
        status=item.status,
        turns=len(item.turns),
        tokens=item.sampled_tokens,
        version=item.max_version,
        sample=item.sample,
    )
