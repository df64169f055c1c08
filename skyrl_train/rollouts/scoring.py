"""Steps that follow the generation of a group: a reward model adds its scores, and the first trajectory is logged."""

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
"""A coroutine that returns, for each conversation, its score or the reason why it has none."""
REWARD_MODEL_METRIC = "reward_model_score"


class FirstRolloutLogger:
    """Shows the first successful trajectory of a run, because the first step may end minutes later."""

    def __init__(self, show: Callable[[Trajectory, float], None]):
        """Create the logger; `show` receives the trajectory and the seconds that its group took."""
        self._show: Callable[[Trajectory, float], None] | None = show

    def offer(self, group: TrajectoryGroup, seconds: float) -> None:
        """Show the first successful trajectory of `group`, unless one has been shown or there is none.

        Logs a warning if it cannot be shown.

        Args:
            group: A finished group.
            seconds: The time that the group took.
        """
        trajectory = next((item for item in group.trajectories if item.status == OK), None)
        if self._show is None or trajectory is None:
            return
        show, self._show = self._show, None
        try:
            show(trajectory, seconds)
        except Exception as error:  # a custom generator may have put any values into it
            log.warning("The first rollout cannot be shown (%s: %s).", type(error).__name__, error)


class RewardModelScorer:
    """A rollout function that runs another one and adds the score of a reward model, if there is one, to each reward.

    The reward model reads the assistant's messages without their reasoning (`reasoning.final_answer`). It scores a
    group in one call, after all episodes of the group have ended. Failed episodes are not scored. An episode that
    cannot be scored is marked as failed.
    """

    def __init__(
        self,
        rollout: Rollout,
        *,
        score_fn: ScoreFunction | None = None,
        coef: float = 1.0,
        first: FirstRolloutLogger | None = None,
    ):
        """Create the rollout function.

        Args:
            rollout: Generates the group of a prompt.
            score_fn: Scores conversations; None adds no scores.
            coef: Factor of the score in the reward.
            first: Receives every finished group; None for no logging.
        """
        self._rollout = rollout
        self._score_fn = score_fn
        self._coef = coef
        self._first = first

    async def __call__(self, prompt: Prompt, position: int) -> TrajectoryGroup:
        """Generate and score the group of `prompt`, which is at `position` in the run's order of prompts.

        Raises ConfigError if a trajectory has no messages to score, and whatever the generator or the reward model
        raises.
        """
        started_at = now()
        group = await self._rollout(prompt, position)
        if self._score_fn is not None:
            await self._score(self._score_fn, group)
        if self._first is not None:
            self._first.offer(group, now() - started_at)
        return group

    async def _score(self, score_fn: ScoreFunction, group: TrajectoryGroup) -> None:
        succeeded = [item for item in group.trajectories if item.status == OK]
        if any(not item.messages for item in succeeded):
            raise ConfigError(
                f"trainer.reward.model.path: a trajectory of prompt {group.prompt.uid} has no messages to score. A "
                "custom generator must fill Trajectory.messages with the complete conversation."
            )
        if not succeeded:
            return
        scores = await score_fn([_without_reasoning(item.messages) for item in succeeded])
        for item, score in zip(succeeded, scores, strict=True):
            if isinstance(score, EnvironmentFailure):
                log.warning("A rollout of prompt %s cannot be scored: %s", item.prompt.uid, score)
                item.fail(score.kind, score.detail)
                continue
            item.reward += self._coef * score
            if item.turns:  # the score of the conversation counts for its last turn
                item.turns[-1] = replace(item.turns[-1], reward=item.turns[-1].reward + self._coef * score)
            item.env_metrics[REWARD_MODEL_METRIC] = score


def _without_reasoning(messages: Sequence[Message]) -> list[Message]:
    return [
        {**message, "content": final_answer(message["content"])}
        if message["role"] == "assistant" and isinstance(message["content"], str)
        else message
        for message in messages
    ]
