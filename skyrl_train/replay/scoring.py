"""Kept episodes scored anew: by the run's environments, by another one, or by a function; in killable processes."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from skyrl_train.assembly.collector import build_samplers
from skyrl_train.assembly.environments import environment_settings, host_settings
from skyrl_train.config.schema import Config
from skyrl_train.config.secrets import redact
from skyrl_train.data.chat import plain_text
from skyrl_train.data.dataset import load_prompts, max_turns_of
from skyrl_train.data.trajectory import OK, Prompt, Trajectory, TrajectoryGroup
from skyrl_train.environments import registry
from skyrl_train.environments.host import EnvironmentHost
from skyrl_train.environments.own_classes import pack_own
from skyrl_train.environments.pool import EnvironmentPool
from skyrl_train.errors import DataError, EnvironmentFailure
from skyrl_train.replay import reward_function
from skyrl_train.replay.rows import answers_of
from skyrl_train.rollouts.dynamic_sampling import has_variance
from skyrl_train.rollouts.reward_model import METRIC, add_score
from skyrl_train.rollouts.reward_shaping import mask_group

OWN = "own"
"""The reward of the run itself."""
AT_ONCE = 64
"""Episodes under way; each may hold an environment."""
UNREADABLE = "unreadable_messages"
"""The kind of failure of an episode whose messages do not tell the model's turns."""
_NO_LIMIT = 2**40


@dataclass(frozen=True)
class Score:
    """What an episode got."""

    turn_rewards: list[float]
    failure: EnvironmentFailure | None = None
    differs: bool = False
    """Whether the environment said something else than in the run, or ended at another turn."""


class Scorer(Protocol):
    """Scores one kept episode."""

    async def __call__(self, trajectory: Trajectory) -> Score:
        """Never raises for what goes wrong with one episode: that is its `failure`."""


@asynccontextmanager
async def scorer_of(reward: str, cfg: Config) -> AsyncIterator[Scorer]:
    """What scores: `own`, the name of an environment, or "module:function".

    Raises ConfigError for a function or an environment that is not there.
    """
    if ":" in reward:
        reward_function.check(reward)
        packed = {
            "kind": "environment",
            "name": reward_function.NAME,
            "target": f"{reward_function.__name__}:{reward_function.KeptEpisode.__name__}",
        }
        configs = {reward_function.NAME: {"function": reward}}
        async with EnvironmentHost(
            **{**host_settings(cfg), "env_configs": configs, "own": [*pack_own(), packed]}
        ) as host:
            yield FunctionScorer(host)
        return
    env_class = None if reward == OWN else reward
    if env_class is not None:
        registry.check_environments([env_class], environment_settings(cfg))
    async with EnvironmentHost(**host_settings(cfg)) as host:
        yield EnvironmentScorer(host, env_class, cfg.generator.max_turns, prompts_of(cfg))


async def score_all(scorer: Scorer, trajectories: Sequence[Trajectory]) -> list[Score | None]:
    """A score for each; None for one that failed in the run, of which there is nothing to score."""
    room = asyncio.Semaphore(AT_ONCE)

    async def score(one: Trajectory) -> Score | None:
        async with room:
            return await scorer(one) if one.status == OK else None

    return list(await asyncio.gather(*map(score, trajectories)))


@dataclass(frozen=True)
class FunctionScorer:
    """Gives the whole episode to a function, whose value is the reward of its last turn."""

    host: EnvironmentPool

    async def __call__(self, trajectory: Trajectory) -> Score:
        item, prompt = trajectory, trajectory.prompt
        spec = prompt.env_extras.get("reward_spec")
        known = {
            "prompt": prompt.messages,
            "extras": prompt.env_extras,
            "ground_truth": spec.get("ground_truth") if isinstance(spec, Mapping) else None,
            "messages": item.messages,
            "answers": [plain_text(item.messages[index]) for index in answers_of(item)],
            "env_metrics": item.env_metrics,
            "data_source": prompt.data_source,
            "env_class": prompt.env_class,
            "stop_reason": item.stop_reason,
            "turn_rewards": [turn.reward for turn in item.turns],
            "response_tokens": len(item.response_ids),
        }
        turns = max(len(item.turns), 1)
        try:
            episode = await self.host.start(reward_function.NAME, replace(prompt, messages=[], env_extras=known))
            try:
                output = await episode.step(item.text)
            finally:
                await episode.close()
        except EnvironmentFailure as failure:
            return Score([0.0] * turns, failure)
        return Score([*([0.0] * (turns - 1)), output.reward])


@dataclass(frozen=True)
class EnvironmentScorer:
    """Plays the model's recorded texts to an environment, turn by turn."""

    host: EnvironmentPool
    env_class: str | None
    """None: that of the row."""
    max_turns: int
    prompts: Mapping[str, Prompt]
    """The rows of the data by uid, as far as they are here."""

    async def __call__(self, trajectory: Trajectory) -> Score:
        answers = answers_of(trajectory)
        if len(answers) < len(trajectory.turns):
            told = f"{len(answers)} answers in its messages, {len(trajectory.turns)} turns"
            return Score([], EnvironmentFailure(UNREADABLE, told))
        try:
            return await self._play(trajectory, answers)
        except EnvironmentFailure as failure:
            return Score([0.0] * len(trajectory.turns), failure)
        except DataError as error:
            return Score([0.0] * len(trajectory.turns), EnvironmentFailure("bad_row", str(error)))

    async def _play(self, item: Trajectory, answers: Sequence[int]) -> Score:
        prompt = self._prompt_of(item)
        episode = await self.host.start(self.env_class or prompt.env_class, prompt)
        ends = [*answers[1:], len(item.messages)]
        rewards = [0.0] * len(answers)
        try:
            differs = redact(episode.messages) != item.messages[: answers[0]] if answers else False
            for turn, (answer, end) in enumerate(zip(answers, ends, strict=True)):
                output = await episode.step(plain_text(item.messages[answer]))
                rewards[turn] = output.reward
                differs = differs or redact(output.observations) != item.messages[answer + 1 : end]
                if output.done:
                    differs = differs or turn + 1 < len(answers)
                    break
        finally:
            await episode.close()
        return Score(rewards, differs=differs)

    def _prompt_of(self, item: Trajectory) -> Prompt:
        """With the row's own messages, where the data is here and the row is the same; else with the opening's."""
        kept = item.prompt
        row = self.prompts.get(kept.uid)
        messages = row.messages if row is not None and redact(row.env_extras) == kept.env_extras else kept.messages
        own = max_turns_of(f"row {kept.uid}", kept.env_extras)
        turns = self.max_turns if own is None else min(own, self.max_turns)
        return replace(kept, messages=messages, env_extras={**kept.env_extras, "max_turns": turns})


def prompts_of(cfg: Config) -> dict[str, Prompt]:
    """The rows of the training data by uid; none if its files are not on this machine any more."""
    sources = cfg.data.train_data
    if not sources or not all(Path(source).expanduser().exists() for source in sources):
        return {}
    try:
        dataset = load_prompts(sources, lambda prompt: 0, _NO_LIMIT, cfg.environment.env_class)
    except DataError:
        return {}
    return {prompt.uid: prompt for prompt in dataset.prompts}


def rescored(groups: Sequence[TrajectoryGroup], scores: Sequence[Score | None], cfg: Config) -> list[TrajectoryGroup]:
    """Copies of the groups with these rewards, and with all that training does to rewards before it learns.

    That is the reward model's score, which was kept, length penalties, and the masks that depend on rewards.
    """
    given = iter(scores)
    samplers = build_samplers(cfg, ahead=False)
    made = []
    for group in groups:
        items = [_rescored(item, next(given), cfg.trainer.reward.coef) for item in group.trajectories]
        changed = samplers.shaping(TrajectoryGroup(group.prompt, items))
        if samplers.mask_equal_rewards and not has_variance(changed):
            mask_group(changed)
        made.append(changed)
    return made


def _rescored(item: Trajectory, score: Score | None, coef: float) -> Trajectory:
    copy = replace(item, raw_reward=None, env_metrics=dict(item.env_metrics), token_rewards=None)
    if score is None:
        return copy
    if score.failure is not None:
        copy.fail(score.failure.kind, score.failure.detail)
        return copy
    copy.turns = [replace(turn, reward=one) for turn, one in zip(item.turns, score.turn_rewards, strict=False)]
    copy.reward = math.fsum(score.turn_rewards)
    copy.loss_spans = item.loss_spans or _sampled(item)
    if METRIC in copy.env_metrics:
        add_score(copy, coef, copy.env_metrics[METRIC])
    return copy


def _sampled(item: Trajectory) -> list[tuple[int, int]]:
    """The stretches of sampled tokens of an episode that the run kept out of its loss."""
    return [(turn.start, turn.stop) for turn in item.turns if turn.start < turn.stop]
