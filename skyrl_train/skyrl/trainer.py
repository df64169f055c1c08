"""SkyRL's trainer: what published subclasses of it override, as steps of the loop of this package."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

import torch

from skyrl_train.aio import finish_despite_cancellation
from skyrl_train.algorithms.advantages import AdvantageCalculator, batch_normalize, record_advantage_metrics
from skyrl_train.data.batch import TrainBatch
from skyrl_train.data.trajectory import TrajectoryGroup
from skyrl_train.errors import ConfigError
from skyrl_train.metrics import Metrics
from skyrl_train.skyrl.batches import (
    PaddedLayout,
    TrainingInputBatch,
    apply_changes,
    set_from_output,
    to_training_input,
    with_token_rewards,
)
from skyrl_train.skyrl.generator_outputs import (
    PostprocessedOutput,
    to_generator_output,
    update_trajectories,
    validate_entries,
)
from skyrl_train.skyrl.interface import GeneratorInput, GeneratorOutput
from skyrl_train.skyrl.unsupported import (
    DOCS_PAGE,
    READ_ONLY_ATTRIBUTES,
    TRAINER_REPLACEMENTS,
    raise_unsupported_attribute,
    reject_coroutines,
    reject_custom_loop,
    reject_misspelled_overrides,
    reject_overrides,
)
from skyrl_train.storage.uris import resolve_local_folder
from skyrl_train.trainer.checkpoint_manager import PendingActions
from skyrl_train.trainer.trainer import Trainer

_REWARD_READING_METHODS = (
    "convert_to_training_input",
    "fwd_logprobs_values_reward",
    "apply_reward_kl_penalty",
    "compute_advantages_and_returns",
)
"""Overrides that may read the rewards of tokens, with which a batch is made only where something reads them."""
_IN_STEP_METHODS = ("fwd_logprobs_values_reward", "train_critic_and_policy")


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


class RayPPOTrainer:
    """SkyRL's trainer over the loop of this package; made by `BasePPOExp.get_trainer`.

    A subclass may override these methods, each with `super()`. The loop calls them in this order:

    - `train`: around the whole of training.
    - `load_checkpoints`: when a run may resume.
    - `generate`: for the training rollouts of a step.
    - `postprocess_generator_output`: to change rewards and loss masks.
    - `convert_to_training_input`: to change the batch before it is scored.
    - `fwd_logprobs_values_reward`: around the scoring of log-probs and values.
    - `apply_reward_kl_penalty`: to change the rewards of tokens, if use_kl_in_reward is on.
    - `compute_advantages_and_returns`.
    - `dump_data`: if trainer.dump_data_batch is on.
    - `train_critic_and_policy`: around the update.
    - `update_ref_with_policy`, `eval`, `save_models` and `save_checkpoints`: when they are due.

    A method that is not overridden costs nothing: the loop then computes on ragged batches. One TrainingInputBatch goes
    through a step, so tensors and metadata that one method adds are there in the next ones. Numbers put into
    `all_metrics` and `all_timings` are logged with the step's.

    Overriding a method that the loop does not call raises ConfigError when the class is defined.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        reject_overrides(cls, RayPPOTrainer, TRAINER_REPLACEMENTS)
        reject_custom_loop(cls)
        reject_coroutines(cls, RayPPOTrainer)
        reject_misspelled_overrides(cls, RayPPOTrainer)

    def __init__(
        self,
        cfg: Any,
        tracker: Any,
        tokenizer: Any,
        train_dataset: Any,
        inference_engine_client: Any,
        generator: Any,
        colocate_pg: Any = None,
        eval_dataset: Any = None,
        callbacks: Any = None,
    ):
        """Take what SkyRL's trainer takes. Raises ConfigError for `callbacks`, which must be None or empty."""
        if callbacks:
            raise ConfigError(
                f"{type(self).__name__}: callbacks must be empty. Instead: {TRAINER_REPLACEMENTS['add_callback']}."
            )
        self.cfg = cfg
        self.tracker = tracker
        if isinstance(tracker, StepMetricsTracker):
            tracker.trainer = self
        self.tokenizer = tokenizer
        self.train_dataset = train_dataset
        self.eval_dataset = eval_dataset
        self.inference_engine_client = inference_engine_client
        self.generator = generator
        self.colocate_pg = colocate_pg
        self.colocate_all = cfg.trainer.placement.colocate_all
        self.all_metrics: dict[str, float] = {}
        self.all_timings: dict[str, float] = {}
        self._loop: Trainer | None = None
        self._advantages: AdvantageCalculator | None = None
        self._thread_loop: asyncio.AbstractEventLoop | None = None
        self._fit_task: asyncio.Task[None] | None = None
        self._is_cancelled = False
        self._base_eval: Callable[[int], Awaitable[dict[str, float]]] | None = None
        """What super() of `eval` does."""
        self._between_steps = False
        """True during an evaluation, a save and a load, when `loop.step` is the step that they are about."""
        self._output: tuple[GeneratorOutput, list[str]] | None = None
        """What is converted next, if convert_to_training_input is overridden."""
        self._batch: TrainBatch | None = None
        """The ragged batch of the step under way."""
        self._data: TrainingInputBatch | None = None
        """The same as subclasses see it."""
        self._super_calls: dict[str, Callable[..., Awaitable[Any]]] = {}
        """What super() has to do in the override of that name that is running."""

    # -- what subclasses override ------------------------------------------------------------------------------------

    def train(self) -> Any:
        """Train to the last step. In a coroutine, this returns an awaitable: `await super().train()`.

        Raises ConfigError before `run()` of the experiment has been called.
        """
        loop = self._thread_loop
        if loop is None:
            raise ConfigError("RayPPOTrainer.train: it is called by `run()` of the experiment that made the trainer.")
        if _running_loop() is loop:
            return self._fit()
        return asyncio.run_coroutine_threadsafe(self._fit(), loop).result()

    async def eval(self, vllm_metrics_scraper: Any = None) -> dict[str, float]:
        """Evaluate the weights of the last finished step: numbers by name. The argument is always None."""
        step, evaluate = self._attached_loop.step, self._base_eval
        assert evaluate is not None
        return await evaluate(step)

    async def generate(self, input_batch: GeneratorInput) -> GeneratorOutput:
        """Return the generator's output for the training rollouts of a step."""
        output: GeneratorOutput = await self.generator.generate(input_batch)
        return output

    def postprocess_generator_output(
        self,
        generator_output: GeneratorOutput,
        uids: list[str],
        metrics_generator_output: GeneratorOutput | None = None,
        metrics_uids: list[str] | None = None,
    ) -> PostprocessedOutput:
        """Turn rewards of responses into rewards of their tokens, on the last one.

        Returns the pair (output, uids), which can also be indexed like the output alone. An override may return either.
        The last two arguments are always None: reward metrics are those of all rollouts.
        """
        rewards: list[Any] = list(generator_output["rewards"])
        for entry, response in enumerate(generator_output["response_ids"]):
            if not isinstance(rewards[entry], list):
                rewards[entry] = [0.0] * (len(response) - 1) + [float(rewards[entry])]
        generator_output["rewards"] = rewards
        return PostprocessedOutput((generator_output, uids))

    def convert_to_training_input(self, generator_output: GeneratorOutput, uids: list[str]) -> TrainingInputBatch:
        """Return the step's batch, (B, P + R) for sequences and (B, R) for responses, before log-probs are scored.

        Rewards, loss masks and log-probs are those of `generator_output`; an override may change them there, or in
        what this returns. Raises ConfigError for an output with other rows than the step's.
        """
        name = self._name("convert_to_training_input")
        validate_entries(generator_output, name)
        return set_from_output(self._build_training_input(), generator_output, name)

    def fwd_logprobs_values_reward(self, training_input: TrainingInputBatch) -> TrainingInputBatch:
        """Add `action_log_probs`, `base_action_log_probs` and `values`, (B, R): None where nothing reads them."""
        name = "fwd_logprobs_values_reward"
        self._batch = self._call_base(name, self._apply_changes(training_input, name, scored=False))
        return self._merge_computed(training_input)

    def apply_reward_kl_penalty(self, data: TrainingInputBatch) -> TrainingInputBatch:
        """Subtract the KL penalty of the configuration from `data["rewards"]`, (B, R)."""
        step, batch = self._advantages, self._batch
        assert step is not None and step.kl is not None and batch is not None
        metrics = Metrics()
        penalty = PaddedLayout(batch).to_padded_responses(step.kl_penalty(step.kl, batch, metrics))
        self.all_metrics.update(metrics.flush())
        data["rewards"] = data["rewards"] - penalty.to(data["rewards"].dtype)
        return data

    def compute_advantages_and_returns(self, data: TrainingInputBatch) -> TrainingInputBatch:
        """Add `advantages` and `returns`, (B, R), by the configured estimator from `data["rewards"]`."""
        step, name = self._advantages, "compute_advantages_and_returns"
        assert step is not None
        self._batch = batch = self._apply_changes(data, name, rewards=False)
        rectangles = PaddedLayout(batch)
        rewarded = with_token_rewards(batch, rectangles, data["rewards"])
        done = replace(step, kl=None, advantage_batch_normalize=False)(rewarded, Metrics())
        advantages = done.token_advantages
        assert advantages is not None
        data["advantages"] = rectangles.to_padded_responses(advantages)
        data["returns"] = data["advantages"] if done.returns is None else rectangles.to_padded_responses(done.returns)
        return data

    def dump_data(self, data: TrainingInputBatch, file_name: str) -> None:
        """Write `data` to dumped_data/<file_name>.pkl in trainer.export_path; read it with `TrainingInputBatch.load`.

        Without an override, a run writes safetensors there instead.
        """
        folder = resolve_local_folder(self.cfg.trainer.export_path) / "dumped_data"
        folder.mkdir(parents=True, exist_ok=True)
        data.save(folder / f"{file_name}.pkl")

    def train_critic_and_policy(self, data: TrainingInputBatch) -> dict[str, float]:
        """Take the optimizer steps of this step on `data`; returns the policy's metrics.

        An override may change loss_mask, advantages, returns and log-probs before, and must call this exactly once. To
        skip an update, set the loss_mask to zeros.
        """
        name = "train_critic_and_policy"
        values = self._call_base(name, self._apply_changes(data, name))
        return {key.removeprefix("policy/"): one for key, one in values.items() if key.startswith("policy/")}

    def save_checkpoints(self) -> str:
        """Write the checkpoint of step `global_step`; returns its folder once it is complete.

        A disk that is full costs a warning, and the folder is then missing. Files that an override adds to the folder
        are kept and deleted with it, but neither verified nor uploaded.
        """
        self._call_base("save_checkpoints")
        return str(resolve_local_folder(self.cfg.trainer.ckpt_path) / f"global_step_{self.global_step}")

    def load_checkpoints(self) -> tuple[int, str | None]:
        """Resume as trainer.resume_mode says; returns the step and the checkpoint's folder, or (0, None)."""
        step, _ = self._call_base("load_checkpoints")
        folder = self._attached_loop.checkpoint_manager.resumed_from
        return step, None if folder is None else str(folder)

    def save_models(self) -> None:
        """Export the policy to global_step_<step>/policy in trainer.export_path."""
        self._call_base("save_models")

    def update_ref_with_policy(self) -> None:
        """Copy the policy's weights to the reference: at the end of an epoch with trainer.update_ref_every_epoch."""
        self._call_base("update_ref_with_policy")

    # -- how they become steps of the loop ---------------------------------------------------------------------------

    def connect(self, loop: Trainer) -> None:
        """Become part of a loop: only what a subclass overrides changes it."""
        self._loop = loop
        after = self._log_numbers
        if self.overrides_rewards or self._overrides("convert_to_training_input"):
            after = self._postprocess
        loop.trajectory_transforms = [*loop.trajectory_transforms, after]
        if any(map(self._overrides, _REWARD_READING_METHODS)):
            loop.batch_transforms = [self._own_advantages(step) for step in loop.batch_transforms]
        if loop.evaluator is not None:
            self._base_eval = loop.evaluator.run
            if self._overrides("eval"):
                loop.evaluator.run = self._evaluate  # type: ignore[method-assign]
        learner, state = loop.learner, loop.checkpoint_manager
        if self._overrides("convert_to_training_input") or self._overrides("fwd_logprobs_values_reward"):
            learner.add_logprobs_and_values = partial(self._score, learner.add_logprobs_and_values)  # type: ignore[method-assign]
        if self._overrides("train_critic_and_policy"):
            learner.update = partial(self._update, learner.update)  # type: ignore[method-assign]
        if self._overrides("dump_data") and loop.batch_dump is not None:
            loop.batch_dump.write = self._dump  # type: ignore[method-assign]
        if self._overrides("save_checkpoints"):
            state.save = partial(self._save, state.save)  # type: ignore[method-assign]
        if self._overrides("load_checkpoints") and self.cfg.trainer.resume_mode not in (None, "none"):
            state.resume = partial(self._resume, state.resume)  # type: ignore[method-assign]
        if self._overrides("save_models"):
            state.export = partial(self._export, state.export)  # type: ignore[method-assign, assignment]
        if self._overrides("update_ref_with_policy") and self.cfg.trainer.update_ref_every_epoch:
            state.update_reference = partial(self._update_reference, state.update_reference)  # type: ignore[method-assign]

    def _overrides(self, method: str) -> bool:
        return getattr(type(self), method) is not getattr(RayPPOTrainer, method)

    def _name(self, method: str) -> str:
        return f"{type(self).__name__}.{method}"

    @property
    def overrides_rewards(self) -> bool:
        """True if a subclass changes rewards before the batch is made."""
        return self._overrides("postprocess_generator_output")

    @property
    def generate_override(self) -> Callable[[GeneratorInput], Awaitable[GeneratorOutput]] | None:
        """`generate`, if a subclass overrides it."""
        return self.generate if self._overrides("generate") else None

    def _own_advantages(self, step: Any) -> Any:
        if not isinstance(step, AdvantageCalculator):
            return step
        self._advantages = step
        return self._add_advantages

    def _log_numbers(self, groups: Sequence[TrajectoryGroup], metrics: Metrics) -> None:
        self._data = None  # that of the step before
        self._log_into(metrics)

    def _postprocess(self, groups: Sequence[TrajectoryGroup], metrics: Metrics) -> None:
        output, uids = to_generator_output(groups, self._placeholder_token_id)
        responses = [list(ids) for ids in output["response_ids"]]
        returned: Any = self.postprocess_generator_output(output, list(uids))
        changed, same = returned if isinstance(returned, tuple) else (returned, uids)
        name = self._name("postprocess_generator_output")
        if changed["response_ids"] != responses or list(same) != uids:
            raise ConfigError(
                f"{name} changed response_ids or uids: only rewards and loss_masks may be changed there. Leave samples "
                "out by masks of zeros."
            )
        validate_entries(changed, name)
        if self.overrides_rewards:
            update_trajectories(groups, changed)
        if self._overrides("convert_to_training_input"):
            self._output = changed, uids
        self._log_numbers(groups, metrics)

    async def _score(self, score: Callable[[TrainBatch], Awaitable[TrainBatch]], batch: TrainBatch) -> TrainBatch:
        """In place of Learner.score."""
        self._batch = batch
        if self._output is not None:
            output, self._output = self._output, None
            data = await finish_despite_cancellation(asyncio.to_thread(self.convert_to_training_input, *output))
            self._batch = self._apply_changes(data, "convert_to_training_input", scored=False)
            self._data = data
        if not self._overrides("fwd_logprobs_values_reward"):
            self._batch = await score(self._batch)
            return self._batch
        name = "fwd_logprobs_values_reward"
        self._data, called = await self._run_override(name, score, self._merge_computed(self._data))
        self._require(name, called, "change what it returns, for example data['base_action_log_probs']")
        self._batch = self._apply_changes(self._data, name)
        return self._batch

    def _add_advantages(self, batch: TrainBatch, metrics: Metrics) -> TrainBatch:
        """In place of the loop's AdvantageStep."""
        step = self._advantages
        assert step is not None
        if not (self._overrides("apply_reward_kl_penalty") or self._overrides("compute_advantages_and_returns")):
            return step(batch, metrics)
        self._batch = batch
        data = self._merge_computed(self._data)
        if step.kl is not None:
            data = self.apply_reward_kl_penalty(data)
        data = self.compute_advantages_and_returns(data)
        batch = self._apply_changes(data, "compute_advantages_and_returns", rewards=False)
        reads_later = self._overrides("dump_data") or self._overrides("train_critic_and_policy")
        self._batch, self._data = None, data if reads_later else None
        advantages, returns = batch.token_advantages, batch.returns
        if advantages is None:
            name = self._name("compute_advantages_and_returns")
            raise ConfigError(f"{name} returned a batch without data['advantages']: must be a tensor, (B, R).")
        if step.advantage_batch_normalize:
            advantages = batch_normalize(advantages, batch.loss_mask)
        batch = replace(batch, sequence_advantages=None)
        batch = batch.with_tokens(advantages=advantages, returns=returns if batch.values is not None else None)
        record_advantage_metrics(batch, metrics)
        self._log_into(metrics)
        return batch

    def _dump(self, step: int, batch: TrainBatch, uids: Sequence[str]) -> None:
        """In place of BatchDump.write."""
        self._batch = batch
        self._data = self._merge_computed(self._data)
        self.dump_data(self._data, file_name=f"global_step_{step}_training_input")

    async def _update(
        self, update: Callable[[TrainBatch], Awaitable[dict[str, float]]], batch: TrainBatch
    ) -> dict[str, float]:
        """In place of Learner.update."""
        self._batch = batch
        values: dict[str, float] = {}

        async def kept(changed: TrainBatch) -> dict[str, float]:
            values.update(await update(changed))
            return values

        data = self._merge_computed(self._data)
        data.metadata["global_step"] = self.global_step
        name = "train_critic_and_policy"
        _, called = await self._run_override(name, kept, data)
        self._require(name, called, "set data['loss_mask'] to zeros before to skip an update")
        self._batch = self._data = None
        return values

    async def _evaluate(self, step: int) -> dict[str, float]:
        """In place of Evaluator.run."""
        self._between_steps = True
        try:
            return dict(await self.eval())
        finally:
            self._between_steps = False
            self._log_into(self._attached_loop.metrics)

    async def _save(
        self, save: Callable[..., Awaitable[None]], step: int, unfinished: PendingActions | None = None
    ) -> None:
        """In place of RunState.save."""

        async def saved() -> None:
            await save(step, unfinished)
            await self._attached_loop.checkpoint_manager.wait_until_written()

        _, called = await self._run_override("save_checkpoints", saved)
        self._require("save_checkpoints", called, "set trainer.ckpt_interval to save less often")

    async def _resume(self, resume: Callable[[], Awaitable[tuple[int, PendingActions]]]) -> tuple[int, PendingActions]:
        """In place of RunState.resume."""
        found = 0, PendingActions((), {})

        async def kept() -> tuple[int, PendingActions]:
            nonlocal found
            found = await resume()
            return found

        returned, _ = await self._run_override("load_checkpoints", kept)
        if not isinstance(returned, tuple) or returned[0] != found[0]:
            raise ConfigError(
                f"{self._name('load_checkpoints')} returned {returned!r}: must be (step, folder), with the step "
                f"{found[0]} that was loaded. Choose a checkpoint with trainer.resume_mode and trainer.resume_path."
            )
        return found

    async def _export(self, export: Callable[[int], Awaitable[Any]], step: int) -> None:
        """In place of RunState.export."""
        await self._run_override("save_models", partial(export, step))

    async def _update_reference(self, update: Callable[[], Awaitable[None]]) -> None:
        """In place of RunState.update_reference."""
        await self._run_override("update_ref_with_policy", update)

    async def _run_override(self, name: str, work: Callable[..., Awaitable[Any]], *given: Any) -> tuple[Any, bool]:
        """Run an override in a thread, whose super() does `work`: what it returns, and whether it called super()."""
        self._event_loop = asyncio.get_running_loop()
        self._super_calls[name] = work
        between, self._between_steps = self._between_steps, name not in _IN_STEP_METHODS
        try:
            result = await finish_despite_cancellation(asyncio.to_thread(getattr(self, name), *given))
            return result, name not in self._super_calls
        finally:
            self._between_steps = between
            self._super_calls.pop(name, None)
            self._log_into(self._attached_loop.metrics)

    def _call_base(self, name: str, *given: Any) -> Any:
        """Do what super() has to do in the override that is running."""
        work = self._super_calls.pop(name, None)
        if work is None:
            raise ConfigError(
                f"{self._name(name)}: the run calls it when it is due, and the override calls super().{name}() once."
            )

        async def done() -> Any:
            return await work(*given)

        return asyncio.run_coroutine_threadsafe(done(), self._event_loop).result()

    def _require(self, name: str, called: bool, advice: str) -> None:
        if not called:
            raise ConfigError(f"{self._name(name)} must call super().{name}() once; {advice} ({DOCS_PAGE}).")

    def _build_training_input(self) -> TrainingInputBatch:
        assert self._batch is not None
        return to_training_input(
            self._batch, PaddedLayout(self._batch), self._attached_loop.sample_ids, self._placeholder_token_id
        )

    def _merge_computed(self, data: TrainingInputBatch | None) -> TrainingInputBatch:
        """Return `data` with what is known now, besides tensors and metadata that subclasses have added."""
        fresh = self._build_training_input()
        if data is None:
            return fresh
        data.update({name: value for name, value in fresh.items() if value is not None or name not in data})
        data.metadata = fresh.metadata | data.metadata
        return data

    def _apply_changes(
        self, data: TrainingInputBatch, name: str, *, scored: bool = True, rewards: bool = True
    ) -> TrainBatch:
        assert self._batch is not None
        if not isinstance(data, TrainingInputBatch):
            raise ConfigError(f"{self._name(name)} returned {type(data).__name__}: must be a TrainingInputBatch.")
        return apply_changes(
            self._batch, data, self._name(name), self._placeholder_token_id, scored=scored, rewards=rewards
        )

    @property
    def _placeholder_token_id(self) -> int:
        """For places of a rectangle that have none."""
        return self.tokenizer.pad_token_id or 0

    def _log_into(self, metrics: Metrics) -> None:
        for name in list(self.all_metrics):  # in a thread: rollouts that run ahead may add others meanwhile
            value = self.all_metrics.pop(name)
            if isinstance(value, int | float) or (isinstance(value, torch.Tensor) and value.numel() == 1):
                metrics.add(name, float(value))
        for name in list(self.all_timings):
            metrics.count(f"timing/{name}", self.all_timings.pop(name))

    # -- the run that it drives --------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Train. What a subclass does around it runs in a thread of its own if it blocks.

        Raises ConfigError if it has not called `super().train()`.
        """
        if not self._overrides("train"):
            await self._fit()
            return
        self._thread_loop = asyncio.get_running_loop()
        if inspect.iscoroutinefunction(inspect.unwrap(self.train)):
            await self.train()
        else:
            thread = asyncio.ensure_future(asyncio.to_thread(self.train))
            try:
                await asyncio.shield(thread)
            except asyncio.CancelledError:
                self._is_cancelled = True
                if self._fit_task is not None:
                    self._fit_task.cancel()
                await asyncio.wait([thread])
                raise
        if self._fit_task is None:
            raise ConfigError(
                f"{type(self).__name__}.train ended without a step: it must call super().train(). There is no other "
                f"loop ({DOCS_PAGE})."
            )

    async def _fit(self) -> None:
        if self._is_cancelled:
            raise asyncio.CancelledError
        self._fit_task = asyncio.current_task()
        await self._attached_loop.fit()

    @property
    def _attached_loop(self) -> Trainer:
        if self._loop is None:
            raise ConfigError(
                f"{type(self).__name__}: it is part of a run once `run()` of the experiment has started it; what needs "
                "a running trainer belongs into its methods, not into its constructor."
            )
        return self._loop

    @property
    def global_step(self) -> int:
        """The step under way, from 1; the finished one during an evaluation and a save; 0 before there is a run."""
        if self._loop is None:
            return 0
        return self._loop.step + (not self._between_steps)

    @property
    def total_training_steps(self) -> int:
        return self._attached_loop.schedule.total_steps

    def __setattr__(self, name: str, value: Any) -> None:
        if name in TRAINER_REPLACEMENTS or name in READ_ONLY_ATTRIBUTES:
            raise_unsupported_attribute("RayPPOTrainer", {**TRAINER_REPLACEMENTS, **READ_ONLY_ATTRIBUTES}, name)
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> NoReturn:
        raise_unsupported_attribute("RayPPOTrainer", TRAINER_REPLACEMENTS, name)


class FullyAsyncRayPPOTrainer(RayPPOTrainer):
    """SkyRL's trainer for rollouts that run ahead: the same one, which the configuration tells to."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        if not self.cfg.trainer.fully_async.enabled:
            raise ConfigError(
                "trainer.fully_async.enabled=false: must be true with FullyAsyncRayPPOTrainer; set it, or return a "
                "RayPPOTrainer from get_trainer."
            )


class StepMetricsTracker:
    """The tracker that a trainer gets: what it logs goes with the numbers of the step under way."""

    def __init__(self) -> None:
        self.trainer: RayPPOTrainer | None = None

    def log(self, data: Mapping[str, Any], step: int | None = None, commit: bool = False) -> None:
        if self.trainer is not None:
            self.trainer.all_metrics |= data
