"""SkyRL's own generator by its name: episodes of registered environments, played by this package."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from skyrl_train.aio import gather_all
from skyrl_train.data.messages import Prompt
from skyrl_train.data.trajectory import OK, Trajectory, TrajectoryGroup
from skyrl_train.skyrl.generator_outputs import to_generator_output
from skyrl_train.skyrl.interface import GeneratorInput, GeneratorInterface, GeneratorOutput, TrainingPhase
from skyrl_train.skyrl.metrics import get_rollout_metrics
from skyrl_train.skyrl.unsupported import GENERATOR_REPLACEMENTS, referenced_names, reject_overrides

if TYPE_CHECKING:
    from skyrl_train.rollouts.conversation import ConversationGenerator


class SkyRLGymGenerator(GeneratorInterface):
    """Subclasses may override `generate` altogether, or change what goes into it and comes out of it.

    Overriding another method of SkyRL's generator raises ConfigError when the class is defined, unless the subclass
    calls it in a `generate` of its own.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        own = cls.__mro__[: cls.__mro__.index(SkyRLGymGenerator)]
        called = set().union(*map(referenced_names, own)) if cls.generate is not SkyRLGymGenerator.generate else set()
        reject_overrides(
            cls,
            SkyRLGymGenerator,
            {name: GENERATOR_REPLACEMENTS[name] for name in GENERATOR_REPLACEMENTS.keys() - called},
        )

    def __init__(
        self,
        generator_cfg: Any,
        skyrl_gym_cfg: Any,
        inference_engine_client: Any,
        tokenizer: Any,
        model_name: str | None = None,
        policy_model_name: str | None = None,
    ):
        """Take what SkyRL's generator takes; `policy_model_name` is today's name of `model_name`."""
        self.generator_cfg = generator_cfg
        self.skyrl_gym_cfg = skyrl_gym_cfg
        self.inference_engine_client = inference_engine_client
        self.tokenizer = tokenizer
        self.model_name = self.policy_model_name = policy_model_name or model_name
        self.max_turns = generator_cfg.max_turns
        self.batched = generator_cfg.batched
        self.use_conversation_multi_turn = generator_cfg.use_conversation_multi_turn
        self._conversation_generators: dict[TrainingPhase, ConversationGenerator] = {}

    @property
    def is_builtin(self) -> bool:
        """Whether no subclass has replaced `generate`: the run then plays episodes without a detour."""
        return type(self).generate is SkyRLGymGenerator.generate

    def connect(self, conversation_generators: Mapping[TrainingPhase, ConversationGenerator]) -> None:
        """Give it what plays episodes, for training and for evaluation."""
        self._conversation_generators = dict(conversation_generators)

    @contextmanager
    def bind_rows(self, rows: Sequence[tuple[Prompt, int]]) -> Iterator[list[Trajectory]]:
        """While inside, `generate` is for these rows, each with its position in the run's order.

        Yields the episodes that it plays, in the order of its output.
        """
        batch = _Batch(list(rows))
        token = _playing.set(batch)
        try:
            yield batch.episodes
        finally:
            _playing.reset(token)

    async def generate(self, input_batch: GeneratorInput, disable_tqdm: bool = True) -> GeneratorOutput:
        """Play an episode for every sample of rows that the run has asked for.

        Messages, environments and extras may have been changed; the samples of a row must be adjacent and complete, as
        they came. Raises ValueError for rows that nobody asked for.
        """
        batch, metadata = _playing.get(), input_batch.get("batch_metadata")
        if batch is None:
            raise RuntimeError(
                "SkyRLGymGenerator.generate: it plays rows that the run asks for; return it, or a subclass of it, from "
                "get_generator instead of calling it from elsewhere."
            )
        ids = input_batch.get("trajectory_ids") or []
        if len(ids) != len(input_batch["prompts"]):
            raise ValueError(f"trajectory_ids: {len(ids)} of {len(input_batch['prompts'])} prompts; pass them on.")
        player = self._conversation_generators[metadata.training_phase if metadata is not None else "train"]
        rows = [(entry, batch.pop_row(one.instance_id)) for entry, one in enumerate(ids) if one.repetition_id == 0]
        if not rows:
            raise ValueError("trajectory_ids: no sample 0 of any row; the samples of a row must be complete.")
        groups = await gather_all(
            player.rollout(_changed(prompt, input_batch, entry), position) for entry, (prompt, position) in rows
        )
        return self._answer(groups, batch)

    def _answer(self, groups: Sequence[TrajectoryGroup], batch: _Batch) -> GeneratorOutput:
        items = [item for group in groups for item in group.trajectories]
        batch.episodes += items
        output, _ = to_generator_output(groups, self._placeholder_token_id)
        if output.get("is_last_step") is None and self.max_turns == 1:
            output["rewards"] = [item.reward for item in items]
        output["rollout_metrics"] = get_rollout_metrics(
            output["response_ids"],
            output["rewards"],
            [item.env_metrics for item in items],
            [item.prompt.env_class for item in items],
        )
        return output

    @property
    def _placeholder_token_id(self) -> int:
        return self.tokenizer.pad_token_id or self.tokenizer.eos_token_id or 0


@dataclass
class _Batch:
    rows: list[tuple[Prompt, int]]
    episodes: list[Trajectory] = field(default_factory=list)

    def pop_row(self, uid: str) -> tuple[Prompt, int]:
        """The first row of that name that is left; a batch at the border of two epochs may have one twice."""
        for index, (prompt, _) in enumerate(self.rows):
            if prompt.uid == uid:
                return self.rows.pop(index)
        raise ValueError(f"trajectory_ids: {uid!r} is no row of the input that `generate` got, or was played already.")


_playing: ContextVar[_Batch | None] = ContextVar("playing", default=None)


def _changed(prompt: Prompt, given: GeneratorInput, entry: int) -> Prompt:
    """The row with what the input says of it."""
    extras = given.get("env_extras")
    return replace(
        prompt,
        messages=list(given["prompts"][entry]),
        env_class=given["env_classes"][entry] or prompt.env_class,
        env_extras=prompt.env_extras if extras is None else dict(extras[entry]),
    )


def copy_episode_fields(item: Trajectory, played: Trajectory) -> None:
    """Give a sample what an output has no field for: status, texts, metrics and versions of the episode it is."""
    item.env_metrics, item.text, item.messages = played.env_metrics, played.text, played.messages
    if item.reward != played.reward and item.token_rewards is None:  # else its turns' rewards would be the old ones
        item.token_rewards = [0.0] * (len(item.response_ids) - 1) + [item.reward]
    if np.array_equal(item.response_ids, played.response_ids):
        item.turns, item.routing, item.restarts = played.turns, played.routing, played.restarts
    if played.status != OK:
        item.response_ids, item.loss_spans, item.logprobs = played.response_ids, played.loss_spans, played.logprobs
        item.prompt_ids, item.turns, item.restarts = played.prompt_ids, played.turns, played.restarts
        item.token_rewards = None
        item.fail(str(played.error), played.detail)
