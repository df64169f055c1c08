"""Outputs of SkyRL's generators: validation, and conversion to trajectories and back."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from skyrl_train.data.batch import collate
from skyrl_train.data.messages import Prompt
from skyrl_train.data.trajectory import Trajectory, TrajectoryGroup
from skyrl_train.errors import ConfigError, RolloutsFailed
from skyrl_train.metrics import Metrics
from skyrl_train.skyrl.batches import PaddedLayout, to_training_input
from skyrl_train.skyrl.generator_outputs import (
    to_generator_output,
    to_trajectories,
    update_trajectories,
    validate_output,
)
from skyrl_train.skyrl.interface import TrajectoryID
from skyrl_train.skyrl.trainer import RayPPOTrainer

PROMPTS = [Prompt(name, [{"role": "user", "content": name}], "mine") for name in ("a", "a", "b", "b")]
IDS = [TrajectoryID("a", 0), TrajectoryID("a", 1), TrajectoryID("b", 0), TrajectoryID("b", 1)]


def output(**fields: Any) -> dict[str, Any]:
    return {
        "prompt_token_ids": [[1, 2], [1, 2], [3], [3]],
        "response_ids": [[5, 6], [7], [8, 9, 10], [11]],
        "rewards": [1.0, 0.0, 0.5, -1.0],
        "loss_masks": [[1, 1], [1], [1, 0, 1], [0]],
        "stop_reasons": ["stop", "length", "stop", "stop"],
        "rollout_metrics": None,
        "rollout_logprobs": [[-0.1, -0.2], [-0.3], [-0.4, 0.0, -0.5], [-0.6]],
    } | fields


def groups_of(generated: dict[str, Any]) -> list[TrajectoryGroup]:
    validate_output(generated, IDS, "Mine")
    items = to_trajectories(generated, PROMPTS, IDS, temperature=0.7, versions=(3, 4))  # type: ignore[arg-type]
    return [TrajectoryGroup(PROMPTS[0], items[:2]), TrajectoryGroup(PROMPTS[2], items[2:])]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda original: [], "list, not a GeneratorOutput"),
        (lambda original: {name: value for name, value in original.items() if name != "rewards"}, "no 'rewards'"),
        (lambda original: original | {"response_ids": original["response_ids"][:3]}, "3 response_ids for 4 samples"),
        (lambda original: original | {"stop_reasons": ["stop"]}, "1 stop_reasons for 4"),
        (
            lambda original: original | {"response_ids": [[5, 6], [], [8, 9, 10], [11]]},
            "entry 1 with no token in its response",
        ),
        (lambda original: original | {"prompt_token_ids": [[1], [1], [], [3]]}, "entry 2 with no token in its prompt"),
        (
            lambda original: original | {"loss_masks": [[1, 1], [1], [1, 1], [0]]},
            r"loss_masks\[2\] with 2 instead of 3 values",
        ),
        (
            lambda original: original | {"rollout_logprobs": [[0.0] * 2, [0.0], None, [0.0]]},
            r"rollout_logprobs\[2\] with None",
        ),
        (lambda original: original | {"rewards": [1.0, float("nan"), 0.0, 0.0]}, r"rewards\[1\]=nan"),
        (lambda original: original | {"rewards": [1.0, None, 0.0, 0.0]}, r"rewards\[1\]=None"),
        (
            lambda original: original | {"rewards": [[1.0, 0.0], [0.0], [0.0], [0.0]]},
            r"rewards\[2\] with 1 instead of 3",
        ),
        (lambda original: original | {"is_last_step": [True] * 4}, "'is_last_step' without 'trajectory_ids'"),
        (
            lambda original: original | {"is_last_step": [False, True, False, True], "trajectory_ids": IDS},
            "before the last step of 'a_0'",
        ),
        (
            lambda original: (
                original | {"is_last_step": [True] * 4, "trajectory_ids": [IDS[1], IDS[0], IDS[2], IDS[3]]}
            ),
            "in another order than the input",
        ),
        (
            lambda original: original | {"rollout_logprobs": [[-0.1, None], *original["rollout_logprobs"][1:]]},
            r"rollout_logprobs\[0\]=\[-0.1, None\], which must be finite",
        ),
    ],
)
def test_invalid_output_error_names_field_and_entry(change: Callable[[Any], Any], message: str):
    with pytest.raises(RolloutsFailed, match=rf"Mine.generate returned .*{message}"):
        validate_output(change(output()), IDS, "Mine")


def test_output_converts_to_batch():
    batch = collate(groups_of(output()))
    assert batch.input_ids.tolist() == [1, 2, 5, 6, 1, 2, 7, 3, 8, 9, 10, 3, 11]
    assert batch.prompt_lengths.tolist() == [2, 2, 1, 1]
    assert batch.loss_mask.int().tolist() == [0, 0, 1, 1, 0, 0, 1, 0, 1, 0, 1, 0, 0]
    assert batch.rewards.tolist() == [1.0, 0.0, 0.5, -1.0]
    assert batch.token_rewards is not None and batch.rollout_logprobs is not None
    assert batch.token_rewards.tolist() == [0, 0, 0, 1.0, 0, 0, 0, 0, 0, 0, 0.5, 0, 0]
    torch.testing.assert_close(
        batch.rollout_logprobs, torch.tensor([0, 0, -0.1, -0.2, 0, 0, -0.3, 0, -0.4, 0.0, -0.5, 0, -0.6])
    )
    assert (batch.min_versions.tolist(), batch.max_versions.tolist()) == ([3] * 4, [4] * 4)
    assert batch.group_ids.tolist() == [0, 0, 1, 1] and batch.temperature[0] == pytest.approx(0.7)


def test_masked_tokens_of_a_turn_are_not_sampled_tokens():
    groups = groups_of(output())
    assert [item.sampled_tokens for group in groups for item in group.trajectories] == [2, 1, 2, 1]


def test_generator_may_reuse_its_buffers():
    stepwise = output()
    ids = np.array(stepwise["response_ids"][0], np.int32)
    groups = groups_of(stepwise | {"response_ids": [ids, *stepwise["response_ids"][1:]]})
    ids[:] = 0
    assert groups[0].trajectories[0].response_ids.tolist() == [5, 6]


def test_without_log_probs_the_batch_has_none():
    assert collate(groups_of(output(rollout_logprobs=None))).rollout_logprobs is None


def test_token_rewards_move_to_last_sampled_token():
    by_token = [[0.25, 0.5], [0.0], [0.0, 2.0, 1.0], [0.0]]
    batch = collate(groups_of(output(rewards=by_token)))
    assert batch.token_rewards is not None
    assert batch.rewards.tolist() == [0.75, 0.0, 3.0, 0.0]
    assert batch.token_rewards.tolist() == [0, 0, 0.25, 0.5, 0, 0, 0, 0, 2.0, 0, 1.0, 0, 0]


def test_stepwise_output_uses_last_reward_of_episode():
    stepwise = output(
        prompt_token_ids=[[1], [1, 5, 2], [1], [3], [3]],
        response_ids=[[5], [6, 7], [8], [9], [10]],
        rewards=[9.0, 1.0, 0.0, 0.5, 0.25],
        loss_masks=[[1], [1, 1], [1], [1], [1]],
        stop_reasons=["stop"] * 5,
        rollout_logprobs=None,
        is_last_step=[False, True, True, True, True],
        trajectory_ids=[IDS[0], IDS[0], IDS[1], IDS[2], IDS[3]],
    )
    groups = groups_of(stepwise)
    batch = collate(groups)
    assert batch.input_ids.tolist() == [1, 5, 1, 5, 2, 6, 7, 1, 8, 3, 9, 3, 10]
    assert batch.episode_ids is not None and batch.episode_ids.tolist() == [0, 0, 1, 2, 3]
    assert batch.rewards.tolist() == [1.0, 1.0, 0.0, 0.5, 0.25]
    converted, uids = to_generator_output(groups, 0)
    assert converted["is_last_step"] == stepwise["is_last_step"] and uids == ["a", "a", "a", "b", "b"]
    assert (
        converted["response_ids"] == stepwise["response_ids"]
        and converted["prompt_token_ids"] == stepwise["prompt_token_ids"]
    )
    before = collate(groups)
    update_trajectories(groups, converted)
    assert torch.equal(collate(groups).rewards, before.rewards)
    converted["rewards"] = [7.0, 2.0, 0.0, 0.5, 0.25]  # one for each step; the last is the reward of the episode
    update_trajectories(groups, converted)
    assert collate(groups).rewards.tolist() == [2.0, 2.0, 0.0, 0.5, 0.25]


def test_only_changed_output_fields_update_trajectories():
    groups = groups_of(output())
    before = collate(groups)
    converted, uids = to_generator_output(groups, 0)
    assert uids == ["a", "a", "b", "b"]
    update_trajectories(groups, converted)
    for name in ("loss_mask", "rewards", "token_rewards"):
        assert torch.equal(getattr(collate(groups), name), getattr(before, name))
    assert converted["rewards"] == [1.0, 0.0, 0.5, -1.0]  # numbers stay numbers, not lists
    converted["rewards"] = [3.0, *converted["rewards"][1:]]  # type: ignore[assignment]
    converted["loss_masks"][2] = [0, 0, 0]
    update_trajectories(groups, converted)
    after = collate(groups)
    assert after.rewards.tolist() == [3.0, 0.0, 0.5, -1.0]
    assert after.loss_mask.int().tolist() == [0, 0, 1, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0]
    assert groups[0].trajectories[0].outcome == 1.0  # the environment's reward


def test_failed_sample_without_tokens_keeps_its_row():
    groups = groups_of(output())
    failed = groups[1].trajectories[1]  # the last one of the batch
    empty = Trajectory.empty(failed.prompt, failed.sample, 1.0)
    failed.prompt_ids, failed.response_ids, failed.logprobs = empty.prompt_ids, empty.response_ids, empty.logprobs
    failed.loss_spans, failed.turns = [], []
    failed.fail("start", "no such file")
    converted, uids = to_generator_output(groups, 99)
    assert uids == ["a", "a", "b", "b"] and converted["response_ids"][3] == [99] and converted["loss_masks"][3] == [0]
    converted["rewards"] = [7.0, 0.0, 0.5, 8.0]
    update_trajectories(groups, converted)
    batch = collate(groups)
    assert batch.rewards.tolist() == [7.0, 0.0, 0.5, 0.0] and not len(failed.response_ids)
    layout = PaddedLayout(batch)
    data = to_training_input(batch, layout, [("a", 0), ("a", 1), ("b", 0), ("b", 1)], 99)
    assert len(data) == 4 and data["rewards"].sum(1).tolist() == [7.0, 0.0, 0.5, 0.0]
    assert not data["attention_mask"][3].any() and data.metadata["trajectory_ids"][3] == "b_1"
    assert batch.token_rewards is not None and torch.equal(layout.to_ragged(data["rewards"]), batch.token_rewards)


def test_failed_samples_are_masked_and_stay_failed():
    groups = groups_of(output())
    groups[0].trajectories[0].fail("timeout", "too slow")
    converted, _ = to_generator_output(groups, 0)
    assert converted["loss_masks"][0] == [0, 0] and converted["rewards"][0] == 0.0
    converted["rewards"][0] = 5.0  # type: ignore[call-overload]
    update_trajectories(groups, converted)
    assert collate(groups).status.tolist() == [False, True, True, True]
    assert collate(groups).rewards[0] == 0


def test_masked_sample_keeps_added_reward():
    groups = groups_of(output())
    converted, _ = to_generator_output(groups, 0)
    assert converted["rewards"][3] == -1.0 and converted["loss_masks"][3] == [0]
    converted["rewards"][3] += 0.5  # type: ignore[operator]
    update_trajectories(groups, converted)
    assert groups[1].trajectories[1].reward == -0.5


def test_responses_may_not_be_changed_with_rewards():
    class Shorter(RayPPOTrainer):
        def postprocess_generator_output(self, generator_output: Any, uids: list[str], *args: Any) -> Any:
            return generator_output | {"response_ids": generator_output["response_ids"][1:]}

    cfg = SimpleNamespace(trainer=SimpleNamespace(placement=SimpleNamespace(colocate_all=False)))
    loop = SimpleNamespace(
        trajectory_transforms=[], batch_transforms=[], evaluator=None, learner=None, checkpoint_manager=None
    )
    Shorter(cfg, None, SimpleNamespace(pad_token_id=0), None, None, None).connect(loop)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="changed response_ids or uids"):
        loop.trajectory_transforms[0](groups_of(output()), Metrics())
