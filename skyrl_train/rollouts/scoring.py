"""What happens to a group once its generator has made it: a reward model adds its score, and the first one is shown."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from skyrl_train.clock import now
from skyrl_train.data.messages import Message, Prompt
from skyrl_train.data.reasoning import final_answer
from skyrl_train.data.trajectory import OK, Trajectory, TrajectoryGroup
from skyrl_train.errors import ConfigError, EnvironmentFailure
from skyrl_train.rollouts.collector import Rollout

log = logging.getLogger(__name__)

ScoreFunction = Callable[[Sequence[Sequence[Message]]], Awaitable[Sequence[float | EnvironmentFailure]]]
"""Conversations -> for each its score, or the reason why it has none."""
REWARD_MODEL_METRIC = "reward_model_score"


class FirstRolloutLogger:
    """Shows one trajectory of the first group that is offered and has one that did not fail."""

    def __init__(self, show: Callable[[Trajectory, float], None]):
        """`show` gets the trajectory, and how many seconds its group took."""
        self._show: Callable[[Trajectory, float], None] | None = show

    def offer(self, group: TrajectoryGroup, seconds: float) -> None:
        """Show a trajectory of this group unless one has been shown: a step of many may end minutes later."""
        shown = next((item for item in group.trajectories if item.status == OK), None)
        if self._show is None or shown is None:
            return
        show, self._show = self._show, None
        try:
            show(shown, seconds)
        except Exception as error:  # a generator of the user's own may have filled it with anything
            log.warning("The first rollout cannot be shown (%s: %s).", type(error).__name__, error)


class RewardModelScorer:
    """The rollouts of a generator, with `coef` times the judge's score added to every reward if there is a judge.

    The judge reads the model's messages without their reasoning (`reasoning.final_answer`). A group is judged in one
    call, after all of its episodes have ended. Failed episodes are left as they are; an episode that the judge cannot
    score becomes a failed one.
    """

    def __init__(
        self,
        rollout: Rollout,
        *,
        score_fn: ScoreFunction | None = None,
        coef: float = 1.0,
        first: FirstRolloutLogger | None = None,
    ):
        """`first`: is offered every group, as soon as it exists."""
        self._rollout = rollout
        self._score_fn = score_fn
        self._coef = coef
        self._first = first

    async def __call__(self, prompt: Prompt, position: int) -> TrajectoryGroup:
        begun = now()
        group = await self._rollout(prompt, position)
        if self._score_fn is not None:
            await self._score(self._score_fn, group)
        if self._first is not None:
            self._first.offer(group, now() - begun)
        return group

    async def _score(self, score_fn: ScoreFunction, group: TrajectoryGroup) -> None:
        answered = [item for item in group.trajectories if item.status == OK]
        if any(not item.messages for item in answered):
            raise ConfigError(
                f"trainer.reward.model.path: a trajectory of prompt {group.prompt.uid} has no messages to score; a "
                "generator of your own must fill Trajectory.messages with the whole conversation."
            )
        if not answered:
            return
        scores = await score_fn([_without_reasoning(item.messages) for item in answered])
        for item, score in zip(answered, scores, strict=True):
            if isinstance(score, EnvironmentFailure):
                log.warning("A rollout of prompt %s cannot be scored: %s", item.prompt.uid, score)
                item.fail(score.kind, score.detail)
                continue
            item.reward += self._coef * score
            if item.turns:  # the score of the whole conversation is known at its end
                item.turns[-1] = replace(item.turns[-1], reward=item.turns[-1].reward + self._coef * score)
            item.env_metrics[REWARD_MODEL_METRIC] = score


def _without_reasoning(messages: Sequence[Message]) -> list[Message]:
    return [
        {**message, "content": final_answer(message["content"])}
        if message["role"] == "assistant" and isinstance(message["content"], str)
        else message
        for message in messages
    ]
