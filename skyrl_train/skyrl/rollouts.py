"""A generator of SkyRL's as the run's rollouts: prompts that begin together are one call of `generate`, as in SkyRL."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
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
    """What is the same for all batches of training, or of evaluation."""

    n_samples_per_prompt: int
    sampling_params: Mapping[str, Any]
    """With vLLM's names, as SkyRL passes them on."""
    temperature: float
    phase: TrainingPhase
    one_prompt_per_call: bool = False
    """Whether each prompt is a call of its own, as where rollouts run ahead."""
    needs_logprobs: bool = False
    """Whether the algorithm reads the engine's log-probs."""


@dataclass(eq=False, slots=True)
class _PendingPrompt:
    prompt: Prompt
    position: int
    group: asyncio.Future[TrajectoryGroup]
    batch: asyncio.Task[None] | None = None


class GeneratorInterfaceRollouts:
    """`rollout(prompt, position)` for a GeneratorInterface.

    Calls made before the event loop turns are one batch, in the order of the data: all prompts of a synchronous step.
    With `one_by_one` each is a batch. What `generate` raises ends the run, as nobody knows which sample it concerns; a
    sample that is to be left out has a loss mask of zeros.
    """

    def __init__(
        self,
        generator: GeneratorInterface,
        settings: GenerateSettings,
        tokenizer: Any,
        generate: Callable[[GeneratorInput], Awaitable[GeneratorOutput]] | None = None,
    ):
        """`generate`: called in place of the generator's, which it calls."""
        self._generator = generator
        self._generate_batch = generate or generator.generate
        self._settings = settings
        self._tokenizer = tokenizer
        self._loop: TrainingLoop | None = None
        self._waiting: list[_PendingPrompt] = []

    def connect(self, loop: TrainingLoop) -> None:
        """Be told of the loop that the rollouts are for: it counts steps and takes `rollout_metrics`."""
        self._loop = loop

    def _step(self) -> int:
        """The number of finished steps."""
        return 0 if self._loop is None else self._loop.step

    async def rollout(self, prompt: Prompt, position: int) -> TrajectoryGroup:
        """The group of `prompt`. Raises RolloutsFailed for an output that is not one.

        When this is cancelled for all prompts of a batch, their call has ended.
        """
        loop = asyncio.get_running_loop()
        one = _PendingPrompt(prompt, position, loop.create_future())
        if self._settings.one_prompt_per_call:
            return (await self._groups([one]))[0]
        if not self._waiting:
            loop.call_soon(self._begin)
        self._waiting.append(one)
        try:
            return await one.group
        finally:
            if one.group.cancelled() and one.batch is not None:
                await asyncio.wait([one.batch])

    def _begin(self) -> None:
        batch, self._waiting = sorted(self._waiting, key=lambda one: one.position), []
        batch = [one for one in batch if not one.group.done()]
        if not batch:
            return
        task = asyncio.get_running_loop().create_task(self._generate(batch))

        def forsaken(_: object) -> None:
            if all(one.group.cancelled() for one in batch):
                task.cancel()

        for one in batch:
            one.batch = task
            one.group.add_done_callback(forsaken)

    async def _generate(self, batch: list[_PendingPrompt]) -> None:
        try:
            groups = await self._groups(batch)
        except Exception as error:
            for one in batch:
                if not one.group.done():
                    one.group.set_exception(error)
            return
        except asyncio.CancelledError:
            for one in batch:
                one.group.cancel()
            raise
        for one, group in zip(batch, groups, strict=True):
            if not one.group.done():
                one.group.set_result(group)

    async def _groups(self, batch: list[_PendingPrompt]) -> list[TrajectoryGroup]:
        count, step = self._settings.n_samples_per_prompt, self._step()
        prompts = [one.prompt for one in batch for _ in range(count)]
        ids = [TrajectoryID(one.prompt.uid, sample) for one in batch for sample in range(count)]
        given, name = self._input(prompts, ids, step), type(self._generator).__name__
        played: list[Trajectory] = []
        # Seeds are those of these rollouts whatever else is under way: an evaluation, or other steps' rollouts.
        with seed_scope(f"{self._settings.phase}.{batch[0].position if self._settings.one_prompt_per_call else step}"):
            if isinstance(self._generator, SkyRLGymGenerator):
                with self._generator.bind_rows([(one.prompt, one.position) for one in batch]) as played:
                    output = await self._generate_batch(given)
            else:
                output = await self._generate_batch(given)
        validate_output(output, ids, name)
        if self._settings.needs_logprobs and output.get("rollout_logprobs") is None:
            raise RolloutsFailed(
                f"{name}.generate returned no rollout_logprobs, which the configured loss or off-policy correction "
                "reads: return those of the engines, or turn the correction off."
            )
        versions = step, self._step()
        items = to_trajectories(output, prompts, ids, temperature=self._settings.temperature, versions=versions)
        for item in items:
            continued = continues_last_message(item.prompt.messages)
            opened = "" if continued else get_reasoning_opening(self._tokenizer, item.prompt_ids.tolist())
            text = opened + decode_response(self._tokenizer, item.response_ids)
            item.messages = append_assistant_text(item.prompt.messages, text)
            item.text = str(item.messages[-1]["content"])
        if len(played) == len(items):
            for item, episode in zip(items, played, strict=True):
                copy_episode_fields(item, episode)
        self._add_metrics(output.get("rollout_metrics"))
        starts = range(0, len(items), count)
        return [
            TrajectoryGroup(one.prompt, items[start : start + count]) for one, start in zip(batch, starts, strict=True)
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
    """Those of training or of evaluation."""
    generator = config.generator
    params = generator.eval_sampling_params if evaluation else generator.sampling_params
    return GenerateSettings(
        n_samples_per_prompt=generator.eval_n_samples_per_prompt if evaluation else generator.n_samples_per_prompt,
        sampling_params=to_vllm_sampling_params(to_dict(params)),
        temperature=params.temperature or 1.0,  # greedy samples are scored at 1, as there is no log-prob at 0
        phase="eval" if evaluation else "train",
        one_prompt_per_call=config.trainer.fully_async.enabled and not evaluation,
        needs_logprobs=needs_logprobs and not evaluation,
    )


def to_vllm_sampling_params(params: Mapping[str, Any]) -> dict[str, Any]:
    """Sampling parameters as SkyRL passes them to generators: with vLLM's names."""
    named = {name: value for name, value in params.items() if name != "max_generate_length"}
    named["max_tokens"] = params["max_generate_length"]
    return named | {"skip_special_tokens": True, "include_stop_str_in_output": True}
