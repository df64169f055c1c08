"""Rollouts whose reward is the environment's plus a reward model's score."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from skyrl_train.data.reasoning import final_answer
from skyrl_train.data.trajectory import OK, Message, Prompt, Trajectory, TrajectoryGroup
from skyrl_train.errors import ConfigError, EnvironmentFailure

log = logging.getLogger(__name__)

Rollout = Callable[[Prompt, int], Awaitable[TrajectoryGroup]]
Judge = Callable[[Sequence[Sequence[Message]]], Awaitable[Sequence[float | EnvironmentFailure]]]
"""Conversations -> for each its score, or the reason why it has none."""
METRIC = "reward_model_score"


class JudgedRollout:
    """Wraps a rollout and adds `coef` times the judge's score to every reward.

    The judge reads the model's messages without their reasoning (`reasoning.final_answer`). A group is judged in one
    call, after all of its episodes have ended. Failed episodes are left as they are; an episode that the judge cannot
    score becomes a failed one.
    """

    def __init__(self, rollout: Rollout, judge: Judge, coef: float):
        self._rollout = rollout
        self._judge = judge
        self._coef = coef

    async def __call__(self, prompt: Prompt, position: int) -> TrajectoryGroup:
        group = await self._rollout(prompt, position)
        answered = [item for item in group.trajectories if item.status == OK]
        if any(not item.messages for item in answered):
            raise ConfigError(
                f"trainer.reward.model.path: a trajectory of prompt {prompt.uid} has no messages to score; a generator "
                "of your own must fill Trajectory.messages with the whole conversation."
            )
        if answered:
            scores = await self._judge([_without_reasoning(item.messages) for item in answered])
            for item, score in zip(answered, scores, strict=True):
                self._apply(item, score)
        return group

    def _apply(self, item: Trajectory, score: float | EnvironmentFailure) -> None:
        if isinstance(score, EnvironmentFailure):
            log.warning("A rollout of prompt %s cannot be scored: %s", item.prompt.uid, score)
            item.fail(score.kind, score.detail)
            return
        add_score(item, self._coef, score)


def _without_reasoning(messages: Sequence[Message]) -> list[Message]:
    return [
        {**message, "content": final_answer(message["content"])}
        if message["role"] == "assistant" and isinstance(message["content"], str)
        else message
        for message in messages
    ]


def add_score(item: Trajectory, coef: float, score: float) -> None:
    """Add `coef` times the judge's score to the trajectory's reward."""
    item.reward += coef * score
    if item.turns:  # the score of the whole conversation is known at its end
        item.turns[-1] = replace(item.turns[-1], reward=item.turns[-1].reward + coef * score)
    item.env_metrics[METRIC] = score
