"""SkyRL's built-in generator: this package runs the episodes of registered environments."""

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
    """A generator that runs episodes of registered environments.

    A subclass may replace `generate`, or change its input and output around `super().generate`. Overriding another
    method of SkyRL's generator raises ConfigError when the class is defined, unless the subclass's own `generate`
    calls it.
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
        """Create the generator with the arguments of SkyRL's class.

        Args:
            generator_cfg: The `generator` section of the configuration.
            skyrl_gym_cfg: The `environment.skyrl_gym` section.
            inference_engine_client: The client of the run's engines, for subclasses.
            tokenizer: The tokenizer of the policy.
            model_name: The name or path of the policy's model.
            policy_model_name: The same, under the name that newer versions of SkyRL use.
        """
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
        """True if no subclass overrides `generate`; the run then runs episodes without this adapter."""
        return type(self).generate is SkyRLGymGenerator.generate

    def connect(self, conversation_generators: Mapping[TrainingPhase, ConversationGenerator]) -> None:
        """Set the generators that run episodes, for "train" and for "eval"."""
        self._conversation_generators = dict(conversation_generators)

    @contextmanager
    def bind_rows(self, rows: Sequence[tuple[Prompt, int]]) -> Iterator[list[Trajectory]]:
        """Let `generate` run episodes of these rows while the context is open.

        Args:
            rows: The prompts, each with its position in the order of the run.

        Yields:
            The list to which `generate` appends the episodes that it runs, in the order of its output.
        """
        batch = _Batch(list(rows))
        token = _current_batch.set(batch)
        try:
            yield batch.episodes
        finally:
            _current_batch.reset(token)

    async def generate(self, input_batch: GeneratorInput, disable_tqdm: bool = True) -> GeneratorOutput:
        """Run an episode for each sample of the rows that the run requests.

        A caller may have changed messages, environments and extras of the input. The samples of a row must be complete
        and adjacent, as in the run's input.

        Args:
            input_batch: The input of the run.
            disable_tqdm: Ignored; accepted for compatibility with SkyRL.

        Raises:
            RuntimeError: The run has not called the generator.
            ValueError: The input has rows that the run did not request, or incomplete samples or ids.
        """
        batch, metadata = _current_batch.get(), input_batch.get("batch_metadata")
        if batch is None:
            raise RuntimeError(
                "SkyRLGymGenerator.generate: only the run can call it. Return the generator, or a subclass of it, from "
                "get_generator of the experiment."
            )
        ids = input_batch.get("trajectory_ids") or []
        if len(ids) != len(input_batch["prompts"]):
            raise ValueError(
                f"trajectory_ids: {len(ids)} for {len(input_batch['prompts'])} prompts. Keep those of the run's input."
            )
        generator = self._conversation_generators[metadata.training_phase if metadata is not None else "train"]
        rows = [
            (entry, batch.pop_row(trajectory_id.instance_id))
            for entry, trajectory_id in enumerate(ids)
            if trajectory_id.repetition_id == 0
        ]
        if not rows:
            raise ValueError(
                "trajectory_ids: no row has its sample 0. The samples of a row must be complete, as in the run's input."
            )
        groups = await gather_all(
            generator.rollout(_with_input_fields(prompt, input_batch, entry), position)
            for entry, (prompt, position) in rows
        )
        return self._to_output(groups, batch)

    def _to_output(self, groups: Sequence[TrajectoryGroup], batch: _Batch) -> GeneratorOutput:
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
        """Remove and return the first row with that uid. A batch that spans two epochs may have a row twice.

        Raises:
            ValueError: No row with that uid is left.
        """
        for index, (prompt, _) in enumerate(self.rows):
            if prompt.uid == uid:
                return self.rows.pop(index)
        raise ValueError(
            f"trajectory_ids: {uid!r} is not a row of the run's input, or `generate` has already run its episodes."
        )


_current_batch: ContextVar[_Batch | None] = ContextVar("current_batch", default=None)


def _with_input_fields(prompt: Prompt, input_batch: GeneratorInput, entry: int) -> Prompt:
    """Return the prompt with the messages, environment and extras of its entry in the input."""
    extras = input_batch.get("env_extras")
    return replace(
        prompt,
        messages=list(input_batch["prompts"][entry]),
        env_class=input_batch["env_classes"][entry] or prompt.env_class,
        env_extras=prompt.env_extras if extras is None else dict(extras[entry]),
    )


def copy_episode_fields(item: Trajectory, played: Trajectory) -> None:
    """Copy the fields of an episode that a GeneratorOutput cannot hold to the sample made from that output.

    These are texts, metrics, turns, routing and, for a failed episode, its status and tokens. Changes in place.

    Args:
        item: The sample that was made from the output.
        played: The episode that the built-in generator ran for it.
    """
    item.env_metrics, item.text, item.messages = played.env_metrics, played.text, played.messages
    if (
        item.reward != played.reward and item.token_rewards is None
    ):  # otherwise the old rewards of the turns would count
        item.token_rewards = [0.0] * (len(item.response_ids) - 1) + [item.reward]
    if np.array_equal(item.response_ids, played.response_ids):
        item.turns, item.routing, item.restarts = played.turns, played.routing, played.restarts
    if played.status != OK:
        item.response_ids, item.loss_spans, item.logprobs = played.response_ids, played.loss_spans, played.logprobs
        item.prompt_ids, item.turns, item.restarts = played.prompt_ids, played.turns, played.restarts
        item.token_rewards = None
        item.fail(str(played.error), played.detail)
