"""Episodes of several sequences: splitting an episode changes neither loss weights nor advantages of its tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from skyrl_train.algorithms.advantages import AdvantageCalculator, KLInReward, gae, grpo, opo, reinforce_pp, rloo
from skyrl_train.algorithms.corrections import OffPolicyCorrection
from skyrl_train.algorithms.kl import AdaptiveKLController, FixedKLController, k1
from skyrl_train.algorithms.reductions import (
    assign_loss_weights,
    prompt_mean,
    seq_mean_token_sum_norm,
    sequence_mean,
    token_mean,
)
from skyrl_train.config.algorithm import OffPolicyCorrectionConfig
from skyrl_train.data.batch import TrainBatch, collate
from skyrl_train.data.messages import Prompt
from skyrl_train.data.token_arrays import to_logprob_array, to_token_array
from skyrl_train.data.trajectory import Restart, Trajectory, TrajectoryGroup, Turn
from skyrl_train.metrics import Metrics
from tests.support.trajectories import trajectory_from


def episode(sample: int, lengths: list[int], rewards: list[float], *, split: bool, failed: bool = False) -> Trajectory:
    """Return an episode with turns of these lengths; with `split` each turn is a separate sequence."""
    total = sum(lengths)
    starts = [sum(lengths[:turn]) for turn in range(len(lengths))]
    item = trajectory_from(
        Prompt("0", [], "toy"), sample, [5, 6], list(range(10, 10 + total)), [1] * total, [], [], 0, "stop", 1.0
    )
    item.logprobs = to_logprob_array([-0.1 * (sample + 1) - 0.01 * place for place in range(total)])
    item.turns = [Turn(s, s + n, r, "stop", 0, 0) for s, n, r in zip(starts, lengths, rewards, strict=True)]
    item.reward = sum(rewards)
    if failed:
        item.fail("timeout", "")
    if split:
        item.restarts = [Restart(start, to_token_array([5, 6, 7, turn])) for turn, start in enumerate(starts) if turn]
    return item


def batch(split: bool) -> TrainBatch:
    """Return a batch of two groups. Sampled tokens are in the same order whether episodes are split or not."""
    groups = [
        [([3, 2, 4], [0.0, 0.5, 1.0]), ([2], [0.25])],
        [([1, 5], [0.0, 1.0]), ([2, 2], [0.0, 0.0]), ([4], [1.0])],
    ]
    trajectory_groups = [
        TrajectoryGroup(
            Prompt(str(index), [], "toy"),
            [
                episode(n, lengths, rewards, split=split, failed=(index, n) == (1, 1))
                for n, (lengths, rewards) in enumerate(group)
            ],
        )
        for index, group in enumerate(groups)
    ]
    flat = collate(trajectory_groups)
    sampled = torch.zeros(len(flat.input_ids))
    sampled[flat.loss_mask] = torch.linspace(-0.5, 0.5, int(flat.loss_mask.sum()))
    old = torch.where(flat.loss_mask, flat.rollout_logprobs + 0.3 * sampled, 0.0)  # type: ignore[operator]
    return flat.with_tokens(old_logprobs=old, ref_logprobs=old - 0.2 * sampled, values=sampled)


WHOLE, SPLIT = batch(split=False), batch(split=True)


def test_sequences_of_an_episode_are_adjacent_rows():
    assert (len(WHOLE), len(SPLIT)) == (5, 9)
    assert WHOLE.episode_ids is None and SPLIT.episode_ids is not None
    assert SPLIT.episode_ids.tolist() == [0, 0, 0, 1, 2, 2, 3, 3, 4]
    assert SPLIT.episodes.num_episodes == WHOLE.episodes.num_episodes == 5
    assert SPLIT.prompt_lengths.tolist() == [2, 4, 4, 2, 2, 4, 2, 4, 2]


@pytest.mark.parametrize(
    "estimator",
    [
        partial(grpo, grpo_norm_by_std=True),
        rloo,
        opo,
        partial(reinforce_pp, gamma=0.9),
        partial(gae, gamma=0.9, lambd=0.8),
    ],
)
@pytest.mark.parametrize("kl", [False, True])
def test_advantages_do_not_depend_on_splitting(estimator: object, kl: bool):
    penalty = KLInReward(k1, FixedKLController(0.5)) if kl else None
    step, seen = AdvantageCalculator(estimator, kl=penalty), (Metrics(), Metrics())  # type: ignore[arg-type]
    whole, split = step(WHOLE, seen[0]), step(SPLIT, seen[1])
    assert torch.allclose(split.token_advantages[SPLIT.loss_mask], whole.token_advantages[WHOLE.loss_mask], atol=1e-6)  # type: ignore[index]
    assert seen[0].flush() == pytest.approx(seen[1].flush(), abs=1e-6)


@pytest.mark.parametrize("reduction", [token_mean, sequence_mean, seq_mean_token_sum_norm, prompt_mean])
def test_loss_weights_do_not_depend_on_splitting(reduction: Callable[..., Any]):
    reduce = partial(reduction, max_seq_len=16)
    whole, split = (assign_loss_weights(variant, reduce).token_weights for variant in (WHOLE, SPLIT))
    assert torch.equal(split[SPLIT.loss_mask], whole[WHOLE.loss_mask])  # type: ignore[index]


@pytest.mark.parametrize(
    "settings",
    [
        {"tis_ratio_type": "sequence", "sequence_tis_ratio_clip_high": 1.1},
        {"sequence_mask_metric": "product", "product_mask_low": 0.8, "product_mask_high": 1.1},
        {"outlier_token_is_threshold_high": 1.1},
    ],
)
def test_sequence_corrections_cover_the_whole_episode(settings: dict[str, Any]):
    step = OffPolicyCorrection(replace(OffPolicyCorrectionConfig(), **settings))
    whole, split = step(WHOLE, Metrics()), step(SPLIT, Metrics())
    assert torch.equal(split.loss_mask[SPLIT.loss_mask], whole.loss_mask[WHOLE.loss_mask])
    if whole.importance_weights is not None and split.importance_weights is not None:
        assert torch.allclose(split.importance_weights[SPLIT.loss_mask], whole.importance_weights[WHOLE.loss_mask])


def test_selected_rows_keep_their_episodes():
    part = SPLIT.select([4, 1, 0, 2])
    assert part.episodes.num_episodes == 2
    assert part.episodes.sequence_to_episode.tolist() == [1, 0, 0, 0]


def test_adaptive_kl_counts_episodes():
    coefficients = []
    for variant in (WHOLE, SPLIT):
        controller = AdaptiveKLController(0.5, kl_target=0.001, horizon=100)
        AdvantageCalculator(rloo, kl=KLInReward(k1, controller))(variant, Metrics())
        coefficients.append(controller.coef)
    assert coefficients[0] == coefficients[1] != 0.5
