"""MCAdvantage and TopKRewardSelector: groups of whole trajectories, with the trainer's advantages."""

from __future__ import annotations

import pickle
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from tensordict import NonTensorData, TensorDict, TensorDictBase, lazy_stack
from torchrl.envs import StepCounter, Transform

from skyrl_train.algorithms.advantages import AdvantageCalculator, grpo
from skyrl_train.algorithms.losses import clipped_surrogate
from skyrl_train.algorithms.policy_objective import PolicyObjective
from skyrl_train.algorithms.reductions import assign_loss_weights, token_mean
from skyrl_train.metrics import Metrics
from skyrl_train.tensordict.collectors.llm_collector import LLMCollector
from skyrl_train.tensordict.envs.chat import DatasetChatEnv
from skyrl_train.tensordict.losses.grpo import GRPOLoss
from skyrl_train.tensordict.losses.mc_advantage import MCAdvantage
from skyrl_train.tensordict.losses.top_k import TopKRewardSelector
from tests.support.edge_case_batches import current_logprobs, edge_case_batch
from tests.support.tensordict_batches import TablePolicy, as_tensordict, replay_buffer


def trajectory(prompt: object, *rewards: float, version: int | None = None, done: bool = True) -> TensorDictBase:
    """Steps [T] with one reward each, the last one done."""
    steps = []
    for index, reward in enumerate(rewards):
        step = TensorDict({"query": prompt, "text": {"prompt": prompt}, "place": torch.tensor(index)})
        step["next"] = {
            "reward": torch.full((1, 1), float(reward)),
            "done": torch.full((1, 1), done and index == len(rewards) - 1),
        }
        if version is not None:
            step["policy_version"] = torch.tensor(version)
        steps.append(step)
    return lazy_stack(steps)


def advantages(found: TensorDictBase | None) -> list[float]:
    assert found is not None
    return [round(float(row["advantage"]), 4) for row in found.unbind(0)]


def rewards(found: TensorDictBase | None) -> list[float]:
    assert found is not None
    return [float(row["next", "reward"]) for row in found.unbind(0)]


def test_from_rewards_to_the_loss_the_numbers_are_the_trainers():
    batch = edge_case_batch("regular")
    batch = replace(batch, rewards=torch.tensor([1.0, 0.25, 0.0, 0.5, 0.125]), token_rewards=None)
    step = AdvantageCalculator(partial(grpo, grpo_norm_by_std=True))
    expected = step(batch, Metrics())
    buffers = [replay_buffer(8, transform=MCAdvantage(size), shuffle=False, batch_size=size) for size in (3, 2)]
    data = as_tensordict(batch, "left prompt, right response")
    rows = [row.exclude("advantage") for row in data.unbind(0)]
    for index, row in enumerate(rows):
        group = int(batch.group_ids[index])
        row["query"] = torch.tensor(group)
        row["next", "reward"] = batch.rewards[index].reshape(1, 1)
        row["next", "done"] = torch.ones(1, 1, dtype=torch.bool)
        buffers[min(group, 1)].extend(row.unsqueeze(0))
    stored: Any = torch.cat([buffer.sample() for buffer in buffers])  # type: ignore[misc]
    assert expected.token_advantages is not None
    per_row = torch.stack([expected.token_advantages[batch.loss_mask & (batch.sequence_ids == i)][0] for i in range(5)])
    assert torch.equal(stored["advantage"].flatten(), per_row.float())
    logprobs = current_logprobs(batch)
    objective = PolicyObjective(partial(clipped_surrogate, eps_clip_low=0.2, eps_clip_high=0.2))
    trainers = objective(
        assign_loss_weights(expected, partial(token_mean, max_seq_len=1)), logprobs, None, 1, Metrics()
    )
    ours = GRPOLoss(TablePolicy(logprobs), entropy_bonus=False, masking_strategy="rlhf")(stored).loss
    assert ours.item() == trainers.item()


def test_a_group_is_stored_when_it_is_complete():
    transform = MCAdvantage(2)
    assert transform.inv(trajectory("a", 0)) is None
    assert transform.inv(trajectory("b", 1)) is None
    found = transform.inv(trajectory("a", 1))
    assert advantages(found) == [-0.7071, 0.7071]
    assert found is not None and found["advantage"].shape == (2, 1, 1)
    assert list(transform.queues) == ["b"]
    assert advantages(transform.inv(torch.cat([trajectory("c", 3), trajectory("c", 3)]))) == [0, 0]
    assert advantages(MCAdvantage(1).inv(trajectory("a", 5))) == [0]  # nothing to compare with, and no NaN


def test_prompts_may_be_tensors_and_nothing_else_than_text():
    transform = MCAdvantage(2)
    assert transform.inv(trajectory(torch.tensor([1, 2]), 0)) is None
    assert transform.inv(trajectory(torch.tensor([[1], [2]]), 0)) is None
    assert transform.inv(trajectory(torch.tensor([1, 2]), 1)) is not None
    with pytest.raises(TypeError, match="str, messages or a tensor"):
        transform.inv(trajectory({"role": "user"}, 0))
    with pytest.raises(KeyError, match="prompt_key"):
        MCAdvantage(2, prompt_key="question").inv(trajectory("a", 0))


def test_a_trajectory_that_is_not_done_is_refused_and_leaves_nothing_behind():
    transform = MCAdvantage(2)
    with pytest.raises(RuntimeError, match="not done"):
        transform.inv(torch.cat([trajectory("a", 1), trajectory("a", 1, 2, done=False)]))
    assert not transform.queues


@pytest.mark.defect("D26")
def test_every_trajectory_counts_once_however_many_steps_it_has():
    transform = MCAdvantage(2)
    assert transform.inv(trajectory("a", 0, 0, 1)) is None
    assert advantages(transform.inv(trajectory("a", 0))) == [0.7071, 0.7071, 0.7071, -0.7071]
    returns = {"sum": [0.0, 0.0], "max": [0.7071, -0.7071], "mean": [-0.7071, 0.7071]}
    for kind, expected in returns.items():
        transform = MCAdvantage(2, trajectory_return=kind)
        assert transform.inv(trajectory("a", 2, 0, 0)) is None
        found = advantages(transform.inv(trajectory("a", 1, 1)))
        assert [found[0], found[-1]] == expected, kind


@pytest.mark.defect("D26")
def test_groups_neither_wait_forever_nor_mix_policies_of_distant_versions():
    transform = MCAdvantage(2)
    assert transform.inv(trajectory("a", 0, version=3)) is None
    assert transform.inv(trajectory("b", 0, version=4)) is None
    assert transform.inv(trajectory("b", 1, version=5)) is not None  # one update in between
    assert transform.queues == {} and transform.abandoned == 1
    assert transform.inv(trajectory("a", 1, version=5)) is None  # of another epoch: a new group
    assert transform.flush() == 1
    bounded = MCAdvantage(2, max_pending=3)
    for prompt in "abcde":
        assert bounded.inv(trajectory(prompt, 0)) is None
    assert list(bounded.queues) == ["c", "d", "e"] and bounded.abandoned == 2


@pytest.mark.defect("D26")
def test_newest_version_decides_which_groups_are_dropped(caplog: pytest.LogCaptureFixture):
    transform = MCAdvantage(2)
    assert transform.inv(trajectory("b", 0, version=10)) is None
    assert transform.inv(trajectory("a", 0, version=3)) is None
    assert transform.inv(trajectory("b", 1, version=3)) is None  # too late for a group of version 10
    assert [int(e[0]["policy_version"]) for e in transform.queues["b"]] == [10] and list(transform.queues) == ["b"]
    assert transform.abandoned == 2
    assert [record.getMessage()[:22] for record in caplog.records] == ["dropped 1 trajectories"]
    transform = MCAdvantage(3)
    for version in (5, 4, 6):  # the oldest is not the first
        assert transform.inv(trajectory("a", 0, version=version)) is None
    assert [int(e[0]["policy_version"]) for e in transform.queues["a"]] == [6] and transform.abandoned == 2
    assert transform.flush() == 1 and transform.abandoned == 3
    assert transform.inv(trajectory("a", 0, version=0)) is None and len(transform.queues["a"]) == 1  # a new count


def test_steps_of_different_episodes_are_not_one_trajectory():
    def numbered(episode: int, found: TensorDictBase) -> TensorDictBase:
        for step in found.unbind(0):
            step.set("episode", torch.tensor(episode))
        return found

    transform = MCAdvantage(1)
    cut, whole = numbered(1, trajectory("a", 0, 0, done=False)), numbered(2, trajectory("b", 1, 1))
    with pytest.raises(RuntimeError, match="last 2 steps are not done"):
        transform.inv(torch.cat([cut, whole]))
    assert not transform.queues
    assert rewards(transform.inv(torch.cat([whole, numbered(1, trajectory("a", 0, 0))]))) == [1, 1, 0, 0]


def test_a_collector_that_cuts_trajectories_is_refused_by_groups_and_one_that_does_not_is_taken():
    dataset = [{"query": f"{2 * (place % 2) + 1} turns {place // 2}"} for place in range(4)]

    class Ends(Transform):
        def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
            turns = torch.tensor([[int(row["query"][0])] for row in tensordict.unbind(0)])
            next_tensordict.set("reward", turns.unsqueeze(-1).float())
            over = next_tensordict["step_count"] >= turns
            return next_tensordict.set("terminated", over).set("done", over)

    def says_ok(tensordict: TensorDictBase) -> TensorDictBase:
        tensordict["text_response"] = ["ok"] * len(tensordict)
        return tensordict

    def collector(buffer: Any, **settings: Any) -> LLMCollector:
        env = DatasetChatEnv(dataset=list(reversed(dataset)), shuffle=False, num_envs=2)
        env.append_transform(StepCounter()).append_transform(Ends())
        return LLMCollector(env, policy=says_ok, dialog_turns_per_batch=2, replay_buffer=buffer, **settings)

    buffer = replay_buffer(64, transform=MCAdvantage(1))
    with pytest.raises(RuntimeError, match="yield_completed_trajectories=True"):
        next(iter(collector(buffer)))  # row 0 goes on, row 1 is done
    assert len(buffer) == 0
    assert next(iter(collector(buffer, yield_completed_trajectories=True))) is None
    stored = [str(row["query"]) for row in buffer.sample(len(buffer)).unbind(0)]
    assert sorted(stored) == ["1 turns 1"] + ["3 turns 1"] * 3


def test_waiting_groups_can_be_shared(torchrl: Any):
    transform = MCAdvantage(2, max_pending=3).share_memory_()
    assert isinstance(transform, torchrl.objectives.llm.MCAdvantage) and transform.is_shared
    other = pickle.loads(pickle.dumps(transform))
    assert transform.inv(trajectory("a", 0, version=1)) is None
    assert advantages(other.inv(trajectory("a", 1, version=1))) == [-0.7071, 0.7071]
    assert transform.get_stats()["written_groups"] == 1 and transform.newest == 1
    for prompt in "bcde":
        assert other.inv(trajectory(prompt, 0)) is None
    assert transform.queued_groups == 3 and transform.abandoned == 1


def test_groups_that_say_nothing_can_be_left_out():
    transform = MCAdvantage(2, trajectory_return="sum", keep_return_bounds=(0.1, 0.9))
    for prompt, both in (("a", 0), ("b", 1)):
        assert transform.inv(torch.cat([trajectory(prompt, both), trajectory(prompt, both)])) is None
    assert transform.inv(torch.cat([trajectory("c", 0), trajectory("c", 1)])) is not None
    assert not transform.queues
    binary = MCAdvantage(2, trajectory_return="sum", keep_return_bounds=(0, 1))  # the bounds themselves are outside
    assert binary.inv(torch.cat([trajectory("a", 1), trajectory("a", 1)])) is None
    assert rewards(binary.inv(torch.cat([trajectory("a", 1), trajectory("a", 0)]))) == [1, 0]


@pytest.mark.defect("mc-advantage-lacks-statistics")
def test_statistics_say_what_came_what_was_written_and_what_waits():
    transform = MCAdvantage(2, trajectory_return="sum", keep_return_bounds=(0, 1), candidate_group_size=3)
    for prompt, values in (("a", (0, 0, 1)), ("b", (1, 1, 1)), ("c", (0, 1)), ("d", (1,))):
        transform.inv(torch.cat([trajectory(prompt, 0, value) for value in values]))
    found = transform.get_stats()
    assert (found["completed_trajectories"], found["completed_decisions"]) == (9, 18)
    assert (found["trajectory_return_sum"], found["trajectory_return_max"]) == (6, 1)
    assert (found["completed_groups"], found["written_groups"], found["dropped_groups"]) == (3, 2, 1)
    assert (found["rescued_groups"], found["selected_trajectories"], found["unselected_trajectories"]) == (1, 4, 1)
    assert (found["queued_groups"], found["queued_trajectories"]) == (1, 1)
    assert transform.successful_trajectories == 6
    transform.reset_stats()
    assert transform.get_stats()["completed_groups"] == 0 and transform.queued_trajectories == 1
    transform.clear_queues()
    assert transform.max_queued_trajectories_per_group == 0 and transform.abandoned == 1


@pytest.mark.defect("mc-advantage-lacks-statistics")
def test_conversations_are_prompts_too():
    transform = MCAdvantage(2)
    opening = [{"role": "user", "content": "hi"}]
    steps = [trajectory("x", value) for value in (0, 1)]
    for step in steps:
        step[0].set("query", NonTensorData(opening))
    assert transform.inv(steps[0]) is None
    assert rewards(transform.inv(steps[1])) == [0, 1]


def test_a_group_can_be_picked_from_more_candidates():
    transform = MCAdvantage(2, trajectory_return="sum", candidate_group_size=4)
    assert transform.inv(trajectory("a", 0)) is None
    assert transform.inv(trajectory("a", 0)) is None
    assert rewards(transform.inv(trajectory("a", 1))) == [0, 1]
    for _ in range(4):
        assert transform.inv(trajectory("b", 1)) is None
    assert not transform.queues  # four came, none differed
    largest = MCAdvantage(
        2,
        trajectory_return="sum",
        candidate_group_size=3,
        candidate_selection_min_size=3,
        candidate_selector=lambda returns, size: returns.topk(size).indices.tolist(),
    )
    assert rewards(largest.inv(torch.cat([trajectory("a", r) for r in (1, 3, 2)]))) == [3, 2]


@pytest.mark.parametrize(
    "settings",
    [
        {"grpo_size": 0},
        {"grpo_size": 2, "trajectory_return": "last"},
        {"grpo_size": 4, "candidate_group_size": 2},
        {"grpo_size": 2, "trajectory_return": "sum", "candidate_group_size": 4, "candidate_selection_min_size": 5},
        {"grpo_size": 2, "trajectory_return": "sum", "keep_return_bounds": (0.9, 0.1)},
        {"grpo_size": 2, "keep_return_bounds": (0.1, 0.9)},
        {"grpo_size": 2, "candidate_selector": "uniform"},
    ],
)
def test_impossible_groups_are_refused(settings: dict):
    with pytest.raises(ValueError, match=r"grpo_size|trajectory_return|keep_return_bounds|candidate_"):
        MCAdvantage(**settings)


@pytest.mark.defect("D27")
@pytest.mark.parametrize(
    ("group", "k", "expected"),
    [((1, 1, 1, 0), 3, [1, 1, 1]), ((1, 2, 3, 4, 5), 4, [5, 4, 3, 2]), ((1, 0, 1, 0), 1, [1])],
)
def test_the_k_best_are_kept_also_at_the_median(group: tuple[float, ...], k: int, expected: list[float]):
    selector = TopKRewardSelector(len(group), k)
    assert rewards(selector.inv(torch.cat([trajectory("a", reward) for reward in group]))) == expected


@pytest.mark.defect("D27")
def test_whole_trajectories_are_selected_from_a_batch_of_them():
    selector = TopKRewardSelector(2, 1)
    batch = lazy_stack([trajectory("a", 0, 0, 0), trajectory("a", 0.5, 0.25, 0.25)])
    assert batch.batch_size == (2, 3)
    found = selector.inv(batch)
    assert rewards(found) == [0.5, 0.25, 0.25]
    assert found is not None and [int(row["place"]) for row in found.unbind(0)] == [0, 1, 2]


def test_equal_groups_are_dropped_and_sizes_are_checked():
    selector = TopKRewardSelector(2, 1, verbose=False)
    assert selector.inv(torch.cat([trajectory("a", 1), trajectory("a", 1)])) is None
    assert not selector.queues
    for k in (0, 3):
        with pytest.raises(ValueError, match="topk_size"):
            TopKRewardSelector(2, k)
