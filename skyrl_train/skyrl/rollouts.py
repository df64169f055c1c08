"""Adapter that uses a SkyRL generator for rollouts: prompts that start together become one call of `generate`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from skyrl_train.config.hydra import to_dict
from skyrl_train.config.schema import Config
from skyrl_train.data.chat import decode_response, get_reasoning_opening
from skyrl_train.data.messages import Prompt, append_assistant_text, continues_last_message
from skyrl_train.data.trajectory import Trajectory, TrajectoryGroup
from skyrl_train.errors import RolloutsFailed
from skyrl_train.skyrl.generator_outputs import to_trajectories, validate_output
from skyrl_train.skyrl.gym_generator import SkyRLGymGenerator, copy_episode_fields
from skyrl_train.skyrl.interface import (
    BatchMetadata,
    GeneratorInput,
    GeneratorInterface,
    GeneratorOutput,
    TrainingPhase,
    TrajectoryID,
)
from skyrl_train.skyrl.seed_scope import seed_scope
from skyrl_train.trainer.trainer import TrainingLoop


@dataclass(frozen=True)
class GenerateSettings:
    """The settings that all batches of training, or of evaluation, have in common."""

    n_samples_per_prompt: int
    sampling_params: Mapping[str, Any]
    """Sampling parameters under vLLM's names, as SkyRL passes them to generators."""
    temperature: float
    phase: TrainingPhase
    one_prompt_per_call: bool = False
    """True if `generate` is called once per prompt, as in fully asynchronous training."""
    needs_logprobs: bool = False
    """True if the algorithm reads the engine's log-probs."""
    n_samples_by_data_source: Mapping[str, int] = field(default_factory=dict)
    """Number of samples of prompts with these values of `data_source`, instead of `n_samples_per_prompt`."""

    def num_samples(self, prompt: Prompt) -> int:
        """Return the number of episodes of a prompt."""
        return self.n_samples_by_data_source.get(prompt.data_source, self.n_samples_per_prompt)


@dataclass(eq=False, slots=True)
class _PendingPrompt:
    prompt: Prompt
    position: int
    group: asyncio.Future[TrajectoryGroup]
    batch: asyncio.Task[None] | None = None


class GeneratorInterfaceRollouts:
    """An adapter that generates groups with a GeneratorInterface.

    All calls of `rollout` in one iteration of the event loop become one batch, in the order of the data. These are the
    prompts of a synchronous step. With `one_prompt_per_call`, each call is a batch. An exception of `generate` ends the
    run, because it does not tell which sample failed. A loss mask of zeros excludes a sample instead.
    """

    def __init__(
        self,
        generator: GeneratorInterface,
        settings: GenerateSettings,
        tokenizer: Any,
        generate: Callable[[GeneratorInput], Awaitable[GeneratorOutput]] | None = None,
    ):
        """Create the adapter.

        Args:
            generator: The program's generator.
            settings: The settings of training or of evaluation.
            tokenizer: The tokenizer of the policy.
            generate: The trainer's `generate`, to call instead of the generator's; None calls the generator's.
        """
        self._generator = generator
        self._generate_batch = generate or generator.generate
        self._settings = settings
        self._tokenizer = tokenizer
        self._loop: TrainingLoop | None = None
        self._waiting: list[_PendingPrompt] = []

    def connect(self, loop: TrainingLoop) -> None:
        """Set the training loop, which counts steps and receives `rollout_metrics`."""
        self._loop = loop

    def _step(self) -> int:
        """Return the number of finished steps."""
        return 0 if self._loop is None else self._loop.step

    async def rollout(self, prompt: Prompt, position: int) -> TrajectoryGroup:
        """Generate the group of a prompt.

        The call of `generate` is cancelled once `rollout` is cancelled for all prompts of its batch. It has ended when
        the last of these calls of `rollout` returns. Exceptions of `generate` are raised here, for every prompt of the
        batch.

        Args:
            prompt: The prompt.
            position: Its position in the order of the run.

        Raises:
            RolloutsFailed: The generator's output is not valid for the requested samples, or has no log-probs although
                the algorithm reads them.
        """
        loop = asyncio.get_running_loop()
        pending = _PendingPrompt(prompt, position, loop.create_future())
        if self._settings.one_prompt_per_call:
            return (await self._groups([pending]))[0]
        if not self._waiting:
            loop.call_soon(self._begin)
        self._waiting.append(pending)
        try:
            return await pending.group
        finally:
            if pending.group.cancelled() and pending.batch is not None:
                await asyncio.wait([pending.batch])

    def _begin(self) -> None:
        batch, self._waiting = sorted(self._waiting, key=lambda pending: pending.position), []
        batch = [pending for pending in batch if not pending.group.done()]
        if not batch:
            return
        task = asyncio.get_running_loop().create_task(self._generate(batch))

        def cancel_if_unused(_: object) -> None:
            if all(pending.group.cancelled() for pending in batch):
                task.cancel()

        for pending in batch:
            pending.batch = task
            pending.group.add_done_callback(cancel_if_unused)

    async def _generate(self, batch: list[_PendingPrompt]) -> None:
        try:
            groups = await self._groups(batch)
        except Exception as error:
            for pending in batch:
                if not pending.group.done():
                    pending.group.set_exception(error)
            return
        except asyncio.CancelledError:
            for pending in batch:
                pending.group.cancel()
            raise
        for pending, group in zip(batch, groups, strict=True):
            if not pending.group.done():
                pending.group.set_result(group)

    async def _groups(self, batch: list[_PendingPrompt]) -> list[TrajectoryGroup]:
        step, counts = self._step(), [self._settings.num_samples(pending.prompt) for pending in batch]
        prompts = [pending.prompt for pending, count in zip(batch, counts, strict=True) for _ in range(count)]
        ids = [
            TrajectoryID(pending.prompt.uid, sample)
            for pending, count in zip(batch, counts, strict=True)
            for sample in range(count)
        ]
        input_batch, name = self._input(prompts, ids, step), type(self._generator).__name__
        episodes: list[Trajectory] = []
        # Seeds must not depend on what else runs at the same time: an evaluation, or rollouts of other steps.
        with seed_scope(f"{self._settings.phase}.{batch[0].position if self._settings.one_prompt_per_call else step}"):
            if isinstance(self._generator, SkyRLGymGenerator):
                with self._generator.bind_rows([(pending.prompt, pending.position) for pending in batch]) as episodes:
                    output = await self._generate_batch(input_batch)
            else:
                output = await self._generate_batch(input_batch)
        validate_output(output, ids, name)
        if self._settings.needs_logprobs and output.get("rollout_logprobs") is None:
            raise RolloutsFailed(
                f"{name}.generate returned no rollout_logprobs, which the configured loss or off-policy correction "
                "reads. Return the log-probs of the engines, or disable the correction."
            )
        versions = step, self._step()
        items = to_trajectories(output, prompts, ids, temperature=self._settings.temperature, versions=versions)
        for item in items:
            continued = continues_last_message(item.prompt.messages)
            opened = "" if continued else get_reasoning_opening(self._tokenizer, item.prompt_ids.tolist())
            text = opened + decode_response(self._tokenizer, item.response_ids)
            item.messages = append_assistant_text(item.prompt.messages, text)
            item.text = str(item.messages[-1]["content"])
        if len(episodes) == len(items):
            for item, episode in zip(items, episodes, strict=True):
                copy_episode_fields(item, episode)
        self._add_metrics(output.get("rollout_metrics"))
        remaining = iter(items)
        return [
            TrajectoryGroup(pending.prompt, list(islice(remaining, count)))
            for pending, count in zip(batch, counts, strict=True)
        ]

    def _input(self, prompts: list[Prompt], ids: list[TrajectoryID], step: int) -> GeneratorInput:
        training = self._settings.phase == "train"
        return GeneratorInput(
            prompts=[[dict(message) for message in prompt.messages] for prompt in prompts],
            env_classes=[prompt.env_class for prompt in prompts],
            env_extras=[dict(prompt.env_extras) for prompt in prompts],
            sampling_params=dict(self._settings.sampling_params),
            trajectory_ids=ids,
            batch_metadata=BatchMetadata(step + training, self._settings.phase),
        )

    def _add_metrics(self, values: Mapping[str, Any] | None) -> None:
        if self._loop is None or self._settings.phase != "train":
            return
        for name, value in (values or {}).items():
            if isinstance(value, int | float):
                self._loop.metrics.add(name, float(value))


def generate_settings(config: Config, *, evaluation: bool, needs_logprobs: bool) -> GenerateSettings:
    """Return the settings of training or of evaluation.

    Args:
        config: The configuration of the run.
        evaluation: True for evaluation, False for training.
        needs_logprobs: True if the algorithm reads the engine's log-probs. Evaluation never needs them.
    """
    generator = config.generator
    params = generator.eval_sampling_params if evaluation else generator.sampling_params
    return GenerateSettings(
        n_samples_per_prompt=generator.eval_n_samples_per_prompt if evaluation else generator.n_samples_per_prompt,
        sampling_params=to_vllm_sampling_params(to_dict(params)),
        temperature=params.temperature or 1.0,  # log-probs do not exist at temperature 0: greedy samples use 1
        phase="eval" if evaluation else "train",
        one_prompt_per_call=config.trainer.fully_async.enabled and not evaluation,
        needs_logprobs=needs_logprobs and not evaluation,
        n_samples_by_data_source=generator.eval_n_samples_by_data_source if evaluation else {},
    )


def to_vllm_sampling_params(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return sampling parameters under vLLM's names, as SkyRL passes them to generators.

    Raises:
        KeyError: `max_generate_length` (tokens) is missing.
    """
    named = {name: value for name, value in params.items() if name != "max_generate_length"}
    named["max_tokens"] = params["max_generate_length"]
    return named | {"skip_special_tokens": True, "include_stop_str_in_output": True}
