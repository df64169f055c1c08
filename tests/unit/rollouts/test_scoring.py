from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from skyrl_train.data.messages import Message, Prompt
from skyrl_train.data.trajectory import FAILED, OK, Trajectory, TrajectoryGroup, Turn
from skyrl_train.errors import ConfigError, EnvironmentFailure
from skyrl_train.rollouts.scoring import FirstRolloutLogger, RewardModelScorer
from tests.support.trajectories import trajectory_from

PROMPT = Prompt("7", [{"role": "user", "content": "hi"}], "chat")


def trajectory(text: str, reward: float = 1.0) -> Trajectory:
    turns = [Turn(0, 1, 0.25, "stop", 0, 0), Turn(1, 2, reward - 0.25, "stop", 0, 0)]
    row = trajectory_from(PROMPT, 0, [1], [2, 3], [1, 1], [-0.5, -0.5], turns, reward, "stop", 1.0, {"length": 4.0})
    row.text = text
    row.messages = [*PROMPT.messages, {"role": "assistant", "content": text}]
    return row


class LengthScorer:
    """A score function that returns the length of the answer, or a failure for the answer "bad"."""

    def __init__(self) -> None:
        self.calls: list[list[str]] = []

    async def __call__(self, conversations: Sequence[Sequence[Message]]) -> list[float | EnvironmentFailure]:
        texts = [messages[-1]["content"] for messages in conversations]
        self.calls.append(texts)
        return [EnvironmentFailure("bad_reward", "nan") if text == "bad" else float(len(text)) for text in texts]


def score(*rows: Trajectory, coef: float = 0.5) -> tuple[list[Trajectory], LengthScorer]:
    scorer = LengthScorer()

    async def rollout(prompt: Prompt, position: int) -> TrajectoryGroup:
        assert (prompt, position) == (PROMPT, 3)
        return TrajectoryGroup(prompt, list(rows))

    group = asyncio.run(RewardModelScorer(rollout, score_fn=scorer, coef=coef)(PROMPT, 3))
    return group.trajectories, scorer


def test_score_is_added_to_reward_and_last_turn():
    (short, long), scorer = score(trajectory("ab"), trajectory("abcdef", reward=0.0), coef=0.5)
    assert (short.reward, long.reward) == (2.0, 3.0)
    assert [turn.reward for turn in short.turns] == [0.25, 1.75]
    assert [turn.reward for turn in long.turns] == [0.25, 2.75]
    assert short.env_metrics == {"length": 4.0, "reward_model_score": 2.0}
    assert scorer.calls == [["ab", "abcdef"]], "one call per group"


def test_answers_are_scored_without_reasoning():
    (item,), scorer = score(trajectory("<think>long</think>ab"))
    assert scorer.calls == [["ab"]] and item.reward == 2.0
    assert item.messages[-1]["content"] == "<think>long</think>ab"


def test_failed_episodes_are_not_scored():
    failed = trajectory("lost")
    failed.fail("timeout", "")
    (unscored, scored), scorer = score(failed, trajectory("ok"))
    assert (unscored.status, unscored.error, unscored.reward, unscored.env_metrics) == (FAILED, "timeout", 0.0, {})
    assert [turn.reward for turn in unscored.turns] == [0.25, 0.75]
    assert (scored.status, scorer.calls) == (OK, [["ok"]])


def test_group_without_answers_is_not_scored():
    failed = trajectory("lost")
    failed.fail("timeout", "")
    assert score(failed)[1].calls == []


def test_unscored_answer_fails_with_its_reason():
    (bad, good), _ = score(trajectory("bad"), trajectory("ok"))
    assert (bad.status, bad.error, bad.reward, bad.env_metrics) == (FAILED, "bad_reward", 0.0, {})
    assert (good.status, good.reward) == (OK, 2.0)


def test_trajectory_without_messages_raises():
    row = trajectory("ab")
    row.messages = []
    with pytest.raises(ConfigError, match=r"prompt 7 has no messages.*Trajectory\.messages"):
        score(row)


def _group(uid: str, *statuses: str) -> TrajectoryGroup:
    prompt = Prompt(uid, [{"role": "user", "content": uid}], "none", {})
    items = []
    for sample, status in enumerate(statuses):
        items.append(trajectory_from(prompt, sample, [1], [2], [1], [-0.5], [], 0.0, "stop", 1.0))
        if status != "ok":
            items[-1].fail(status, "")
    return TrajectoryGroup(prompt, items)


def test_first_successful_trajectory_is_shown_once():
    shown: list[tuple[str, int, float]] = []
    first = FirstRolloutLogger(lambda item, seconds: shown.append((item.prompt.uid, item.sample, seconds)))
    groups = {
        "slow": (0.2, _group("slow", "ok")),
        "bad": (0.0, _group("bad", "engine")),
        "mixed": (0.05, _group("mixed", "engine", "ok")),
    }

    async def rollout(prompt: str, position: int) -> TrajectoryGroup:
        seconds, group = groups[prompt]
        await asyncio.sleep(seconds)
        return group

    async def main() -> None:
        train, evaluate = (RewardModelScorer(rollout, first=first) for _ in range(2))  # type: ignore[arg-type]
        results = await asyncio.gather(train("slow", 0), train("bad", 1), evaluate("mixed", 2))  # type: ignore[arg-type]
        assert list(results) == [group for _, group in groups.values()]

    asyncio.run(main())
    assert [call[:2] for call in shown] == [("mixed", 1)] and shown[0][2] > 0.04
