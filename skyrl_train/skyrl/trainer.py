"""SkyRL's trainer: the methods that its subclasses override become steps of this package's training loop.

Legend: B sequences, P tokens of the longest prompt, R tokens of the longest response.
"""

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
"""Overrides that may read token rewards; a batch has token rewards only if something reads them."""
_IN_STEP_METHODS = ("fwd_logprobs_values_reward", "train_critic_and_policy")


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


class RayPPOTrainer:
    """SkyRL's trainer, an adapter over this package's training loop. `BasePPOExp.get_trainer` creates it.

    A subclass may override these methods, and each override calls `super()`. The loop calls them in this order:

    - `train`: around all of training.
    - `load_checkpoints`: when a run may resume.
    - `generate`: for the training rollouts of a step.
    - `postprocess_generator_output`: to change rewards and loss masks.
    - `convert_to_training_input`: to change the batch before log-probs are computed.
    - `fwd_logprobs_values_reward`: around the computation of log-probs and values.
    - `apply_reward_kl_penalty`: to change token rewards, if use_kl_in_reward is on.
    - `compute_advantages_and_returns`: to change advantages and returns.
    - `dump_data`: if trainer.dump_data_batch is on.
    - `train_critic_and_policy`: around the update.
    - `update_ref_with_policy`, `eval`, `save_models` and `save_checkpoints`: when they are due.

    A method that is not overridden costs nothing, because the loop then computes on ragged batches. One
    TrainingInputBatch passes through a step, so later methods see the tensors and metadata that an earlier one adds.
    Numbers in `all_metrics` and `all_timings` are logged with the metrics of the step. Overrides that are not
    coroutines may run in a thread of their own.

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
        """Create the trainer with the arguments of SkyRL's class; `get_trainer` of the experiment describes them.

        Raises:
            ConfigError: `callbacks` is neither None nor empty.
        """
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
        """The loop's evaluation, which `super().eval()` runs."""
        self._between_steps = False
        """True during an evaluation, a save and a load: they concern `loop.step`, not the step after it."""
        self._output: tuple[GeneratorOutput, list[str]] | None = None
        """The output to convert next, with its uids, if convert_to_training_input is overridden."""
        self._batch: TrainBatch | None = None
        """The ragged batch of the current step."""
        self._data: TrainingInputBatch | None = None
        """The same batch in the form that subclasses see."""
        self._super_calls: dict[str, Callable[..., Awaitable[Any]]] = {}
        """Method name -> the loop's function that super() calls in the override that is running."""

    # -- methods that subclasses override ----------------------------------------------------------------------------

    def train(self) -> Any:
        """Train until the last step.

        In a coroutine of the run's event loop this returns an awaitable: `await super().train()`. In a thread it blocks
        until training has ended.

        Raises:
            ConfigError: `run()` of the experiment has not started the run.
        """
        loop = self._thread_loop
        if loop is None:
            raise ConfigError(
                "RayPPOTrainer.train: the run has not started. Call `run()` of the experiment that created the "
                "trainer; it calls `train`."
            )
        if _running_loop() is loop:
            return self._fit()
        return asyncio.run_coroutine_threadsafe(self._fit(), loop).result()

    async def eval(self, vllm_metrics_scraper: Any = None) -> dict[str, float]:
        """Evaluate the weights of the last finished step, and return metrics by name.

        Args:
            vllm_metrics_scraper: Ignored; the run passes None. SkyRL's method has this argument.
        """
        step, evaluate = self._attached_loop.step, self._base_eval
        assert evaluate is not None
        return await evaluate(step)

    async def generate(self, input_batch: GeneratorInput) -> GeneratorOutput:
        """Call the generator for training rollouts and return its output. Evaluations do not call this method."""
        output: GeneratorOutput = await self.generator.generate(input_batch)
        return output

    def postprocess_generator_output(
        self,
        generator_output: GeneratorOutput,
        uids: list[str],
        metrics_generator_output: GeneratorOutput | None = None,
        metrics_uids: list[str] | None = None,
    ) -> PostprocessedOutput:
        """Convert rewards of responses to token rewards, with the reward on the last token, in place.

        Args:
            generator_output: The rollouts of a step.
            uids: The prompt's uid for each entry.
            metrics_generator_output: Always None; reward metrics cover all rollouts.
            metrics_uids: Always None.

        Returns:
            The pair (output, uids), which also accepts the output's keys as indices. An override may return the pair or
            the output alone. It may change only rewards and loss masks; other changes raise ConfigError in the run.
        """
        rewards: list[Any] = list(generator_output["rewards"])
        for entry, response in enumerate(generator_output["response_ids"]):
            if not isinstance(rewards[entry], list):
                rewards[entry] = [0.0] * (len(response) - 1) + [float(rewards[entry])]
        generator_output["rewards"] = rewards
        return PostprocessedOutput((generator_output, uids))

    def convert_to_training_input(self, generator_output: GeneratorOutput, uids: list[str]) -> TrainingInputBatch:
        """Return the batch of the step before log-probs are computed.

        An override may change rewards, loss masks and the engine's log-probs in `generator_output`, or in the result.

        Args:
            generator_output: The output of the step's rollouts, after postprocessing.
            uids: The prompt's uid for each entry.

        Returns:
            The batch: tensors of sequences are [B, P + R], those of responses [B, R].

        Raises:
            ConfigError: The output has another number of entries than the step has samples.
            RolloutsFailed: A field of the output has a wrong length or a value that is not finite.
        """
        name = self._name("convert_to_training_input")
        validate_entries(generator_output, name)
        return set_from_output(self._build_training_input(), generator_output, name)

    def fwd_logprobs_values_reward(self, training_input: TrainingInputBatch) -> TrainingInputBatch:
        """Compute `action_log_probs`, `base_action_log_probs` and `values`, [B, R], and add them to the batch.

        A tensor that nothing reads is None. Blocks until the ranks have finished; only the run may call this.

        Raises:
            ConfigError: The run has not called this method, an override calls `super()` twice, or rows or tokens of
                `training_input` have changed.
        """
        name = "fwd_logprobs_values_reward"
        self._batch = self._call_base(name, self._apply_changes(training_input, name, scored=False))
        return self._merge_computed(training_input)

    def apply_reward_kl_penalty(self, data: TrainingInputBatch) -> TrainingInputBatch:
        """Subtract the configured KL penalty from `data["rewards"]`, [B, R], and return `data`."""
        step, batch = self._advantages, self._batch
        assert step is not None and step.kl is not None and batch is not None
        metrics = Metrics()
        penalty = PaddedLayout(batch).to_padded_responses(step.kl_penalty(step.kl, batch, metrics))
        self.all_metrics.update(metrics.flush())
        data["rewards"] = data["rewards"] - penalty.to(data["rewards"].dtype)
        return data

    def compute_advantages_and_returns(self, data: TrainingInputBatch) -> TrainingInputBatch:
        """Compute `advantages` and `returns`, [B, R], from `data["rewards"]` with the configured estimator.

        Returns:
            `data`, with both tensors added. `returns` are the advantages if the estimator has no returns.

        Raises:
            ConfigError: Rows or tokens of `data` have changed, or its loss mask has new tokens.
        """
        step, name = self._advantages, "compute_advantages_and_returns"
        assert step is not None
        self._batch = batch = self._apply_changes(data, name, rewards=False)
        layout = PaddedLayout(batch)
        rewarded = with_token_rewards(batch, layout, data["rewards"])
        computed = replace(step, kl=None, advantage_batch_normalize=False)(rewarded, Metrics())
        advantages = computed.token_advantages
        assert advantages is not None
        data["advantages"] = layout.to_padded_responses(advantages)
        data["returns"] = (
            data["advantages"] if computed.returns is None else layout.to_padded_responses(computed.returns)
        )
        return data

    def dump_data(self, data: TrainingInputBatch, file_name: str) -> None:
        """Write `data` to dumped_data/<file_name>.pkl in trainer.export_path, which `TrainingInputBatch.load` reads.

        The run writes safetensors instead if no subclass overrides this method.
        """
        folder = resolve_local_folder(self.cfg.trainer.export_path) / "dumped_data"
        folder.mkdir(parents=True, exist_ok=True)
        data.save(folder / f"{file_name}.pkl")

    def train_critic_and_policy(self, data: TrainingInputBatch) -> dict[str, float]:
        """Run the optimizer steps of this training step on `data`, and return the policy's metrics without "policy/".

        An override must call this exactly once. Before that, it may change loss mask, advantages, returns and
        log-probs. A loss mask of zeros skips the update. Blocks until the ranks have finished.

        Raises:
            ConfigError: The run has not called this method, an override calls `super()` twice, or rows or tokens of
                `data` have changed.
        """
        name = "train_critic_and_policy"
        values = self._call_base(name, self._apply_changes(data, name))
        return {key.removeprefix("policy/"): one for key, one in values.items() if key.startswith("policy/")}

    def save_checkpoints(self) -> str:
        """Write the checkpoint of step `global_step`, and return its folder once it is complete.

        If the disk is full, the run logs a warning and the folder does not exist. Files that an override adds to the
        folder are deleted with it, but they are neither verified nor uploaded.
        """
        self._call_base("save_checkpoints")
        return str(resolve_local_folder(self.cfg.trainer.ckpt_path) / f"global_step_{self.global_step}")

    def load_checkpoints(self) -> tuple[int, str | None]:
        """Resume as trainer.resume_mode says, and return the step and the checkpoint's folder, or (0, None)."""
        step, _ = self._call_base("load_checkpoints")
        folder = self._attached_loop.checkpoint_manager.resumed_from
        return step, None if folder is None else str(folder)

    def save_models(self) -> None:
        """Export the policy to global_step_<step>/policy in trainer.export_path."""
        self._call_base("save_models")

    def update_ref_with_policy(self) -> None:
        """Copy the policy's weights to the reference model, after each epoch with trainer.update_ref_every_epoch."""
        self._call_base("update_ref_with_policy")

    # -- connecting the overrides to the loop ------------------------------------------------------------------------

    def connect(self, loop: Trainer) -> None:
        """Replace the steps of the loop that a subclass overrides; the other steps stay as they are."""
        self._loop = loop
        transform = self._log_metrics
        if self.overrides_rewards or self._overrides("convert_to_training_input"):
            transform = self._postprocess
        loop.trajectory_transforms = [*loop.trajectory_transforms, transform]
        if any(map(self._overrides, _REWARD_READING_METHODS)):
            loop.batch_transforms = [self._replace_advantages(transform) for transform in loop.batch_transforms]
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
        """True if a subclass overrides `postprocess_generator_output`, which changes rewards."""
        return self._overrides("postprocess_generator_output")

    @property
    def generate_override(self) -> Callable[[GeneratorInput], Awaitable[GeneratorOutput]] | None:
        """The `generate` of a subclass; None if no subclass overrides it."""
        return self.generate if self._overrides("generate") else None

    def _replace_advantages(self, transform: Any) -> Any:
        if not isinstance(transform, AdvantageCalculator):
            return transform
        self._advantages = transform
        return self._add_advantages

    def _log_metrics(self, groups: Sequence[TrajectoryGroup], metrics: Metrics) -> None:
        self._data = None  # forget the batch of the previous step
        self._log_into(metrics)

    def _postprocess(self, groups: Sequence[TrajectoryGroup], metrics: Metrics) -> None:
        output, uids = to_generator_output(groups, self._placeholder_token_id)
        responses = [list(ids) for ids in output["response_ids"]]
        returned: Any = self.postprocess_generator_output(output, list(uids))
        changed, returned_uids = returned if isinstance(returned, tuple) else (returned, uids)
        name = self._name("postprocess_generator_output")
        if changed["response_ids"] != responses or list(returned_uids) != uids:
            raise ConfigError(
                f"{name} changed response_ids or uids, but it may change only rewards and loss_masks. Exclude samples "
                "with loss_masks of zeros."
            )
        validate_entries(changed, name)
        if self.overrides_rewards:
            update_trajectories(groups, changed)
        if self._overrides("convert_to_training_input"):
            self._output = changed, uids
        self._log_metrics(groups, metrics)

    async def _score(self, score: Callable[[TrainBatch], Awaitable[TrainBatch]], batch: TrainBatch) -> TrainBatch:
        """Replace `add_logprobs_and_values` of the learner."""
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
        """Replace the loop's AdvantageCalculator."""
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
            raise ConfigError(
                f"{name} returned a batch without data['advantages']. Set it to a tensor [sequences, response length]."
            )
        if step.advantage_batch_normalize:
            advantages = batch_normalize(advantages, batch.loss_mask)
        batch = replace(batch, sequence_advantages=None)
        batch = batch.with_tokens(advantages=advantages, returns=returns if batch.values is not None else None)
        record_advantage_metrics(batch, metrics)
        self._log_into(metrics)
        return batch

    def _dump(self, step: int, batch: TrainBatch, uids: Sequence[str]) -> None:
        """Replace `BatchDump.write`."""
        self._batch = batch
        self._data = self._merge_computed(self._data)
        self.dump_data(self._data, file_name=f"global_step_{step}_training_input")

    async def _update(
        self, update: Callable[[TrainBatch], Awaitable[dict[str, float]]], batch: TrainBatch
    ) -> dict[str, float]:
        """Replace `update` of the learner."""
        self._batch = batch
        values: dict[str, float] = {}

        async def update_and_store(changed: TrainBatch) -> dict[str, float]:
            values.update(await update(changed))
            return values

        data = self._merge_computed(self._data)
        data.metadata["global_step"] = self.global_step
        name = "train_critic_and_policy"
        _, called = await self._run_override(name, update_and_store, data)
        self._require(name, called, "to skip an update, set data['loss_mask'] to zeros before the call")
        self._batch = self._data = None
        return values

    async def _evaluate(self, step: int) -> dict[str, float]:
        """Replace `Evaluator.run`."""
        self._between_steps = True
        try:
            return dict(await self.eval())
        finally:
            self._between_steps = False
            self._log_into(self._attached_loop.metrics)

    async def _save(
        self, save: Callable[..., Awaitable[None]], step: int, unfinished: PendingActions | None = None
    ) -> None:
        """Replace `CheckpointManager.save`."""

        async def save_and_wait() -> None:
            await save(step, unfinished)
            await self._attached_loop.checkpoint_manager.wait_until_written()

        _, called = await self._run_override("save_checkpoints", save_and_wait)
        self._require("save_checkpoints", called, "set trainer.ckpt_interval to save less often")

    async def _resume(self, resume: Callable[[], Awaitable[tuple[int, PendingActions]]]) -> tuple[int, PendingActions]:
        """Replace `CheckpointManager.resume`."""
        resumed = 0, PendingActions((), {})

        async def resume_and_store() -> tuple[int, PendingActions]:
            nonlocal resumed
            resumed = await resume()
            return resumed

        returned, _ = await self._run_override("load_checkpoints", resume_and_store)
        if not isinstance(returned, tuple) or returned[0] != resumed[0]:
            raise ConfigError(
                f"{self._name('load_checkpoints')} returned {returned!r}. It must return (step, folder), with "
                f"the loaded step {resumed[0]}. Choose a checkpoint with trainer.resume_mode and trainer.resume_path."
            )
        return resumed

    async def _export(self, export: Callable[[int], Awaitable[Any]], step: int) -> None:
        """Replace `CheckpointManager.export`."""
        await self._run_override("save_models", partial(export, step))

    async def _update_reference(self, update: Callable[[], Awaitable[None]]) -> None:
        """Replace `CheckpointManager.update_reference`."""
        await self._run_override("update_ref_with_policy", update)

    async def _run_override(self, name: str, work: Callable[..., Awaitable[Any]], *args: Any) -> tuple[Any, bool]:
        """Run an override in a thread. Its super() runs `work` in the event loop.

        Returns:
            The override's result, and True if it called super().
        """
        self._event_loop = asyncio.get_running_loop()
        self._super_calls[name] = work
        between, self._between_steps = self._between_steps, name not in _IN_STEP_METHODS
        try:
            result = await finish_despite_cancellation(asyncio.to_thread(getattr(self, name), *args))
            return result, name not in self._super_calls
        finally:
            self._between_steps = between
            self._super_calls.pop(name, None)
            self._log_into(self._attached_loop.metrics)

    def _call_base(self, name: str, *args: Any) -> Any:
        """Run the loop's function for super() of the override that is running, and block until it has finished."""
        work = self._super_calls.pop(name, None)
        if work is None:
            raise ConfigError(
                f"{self._name(name)}: only the run calls this method, and an override must call super().{name}() "
                "exactly once."
            )

        async def run_work() -> Any:
            return await work(*args)

        return asyncio.run_coroutine_threadsafe(run_work(), self._event_loop).result()

    def _require(self, name: str, called: bool, advice: str) -> None:
        if not called:
            raise ConfigError(f"{self._name(name)} must call super().{name}() once; {advice} ({DOCS_PAGE}).")

    def _build_training_input(self) -> TrainingInputBatch:
        assert self._batch is not None
        return to_training_input(
            self._batch, PaddedLayout(self._batch), self._attached_loop.sample_ids, self._placeholder_token_id
        )

    def _merge_computed(self, data: TrainingInputBatch | None) -> TrainingInputBatch:
        """Update `data` with the tensors of the current batch; tensors and metadata that subclasses added stay."""
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
            raise ConfigError(f"{self._name(name)} returned {type(data).__name__}. Return a TrainingInputBatch.")
        return apply_changes(
            self._batch, data, self._name(name), self._placeholder_token_id, scored=scored, rewards=rewards
        )

    @property
    def _placeholder_token_id(self) -> int:
        """The token in padded places."""
        return self.tokenizer.pad_token_id or 0

    def _log_into(self, metrics: Metrics) -> None:
        for name in list(self.all_metrics):  # other threads may add metrics at the same time
            value = self.all_metrics.pop(name)
            if isinstance(value, int | float) or (isinstance(value, torch.Tensor) and value.numel() == 1):
                metrics.add(name, float(value))
        for name in list(self.all_timings):
            metrics.count(f"timing/{name}", self.all_timings.pop(name))

    # -- running the loop --------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Train until the last step. An overridden `train` that is not a coroutine runs in a thread of its own.

        Raises:
            ConfigError: The trainer is not connected to a loop, or `train` has not called `super().train()`.
            CancelledError: The run was cancelled. The thread of `train` has then ended.
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
                f"{type(self).__name__}.train ended without a training step: it must call super().train(), which runs "
                f"the training loop ({DOCS_PAGE})."
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
                f"{type(self).__name__}: the trainer is not connected to a run yet. `run()` of the experiment connects "
                "it; move code that needs the run from the constructor to another method."
            )
        return self._loop

    @property
    def global_step(self) -> int:
        """The current training step, from 1; the last finished one during an evaluation or a save; 0 before a run."""
        if self._loop is None:
            return 0
        return self._loop.step + (not self._between_steps)

    @property
    def total_training_steps(self) -> int:
        """The number of the run's training steps. Raises ConfigError before the run has started."""
        return self._attached_loop.schedule.total_steps

    def __setattr__(self, name: str, value: Any) -> None:
        if name in TRAINER_REPLACEMENTS or name in READ_ONLY_ATTRIBUTES:
            raise_unsupported_attribute("RayPPOTrainer", {**TRAINER_REPLACEMENTS, **READ_ONLY_ATTRIBUTES}, name)
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> NoReturn:
        raise_unsupported_attribute("RayPPOTrainer", TRAINER_REPLACEMENTS, name)


class FullyAsyncRayPPOTrainer(RayPPOTrainer):
    """SkyRL's fully asynchronous trainer: a RayPPOTrainer whose configuration enables asynchronous rollouts.

    Raises:
        ConfigError: `trainer.fully_async.enabled` is false.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        if not self.cfg.trainer.fully_async.enabled:
            raise ConfigError(
                "trainer.fully_async.enabled=false: must be true with FullyAsyncRayPPOTrainer. Set it, or return a "
                "RayPPOTrainer from get_trainer."
            )


class StepMetricsTracker:
    """The tracker of a trainer without a tracker of its own; it logs with the metrics of the current step."""

    def __init__(self) -> None:
        self.trainer: RayPPOTrainer | None = None

    def log(self, data: Mapping[str, Any], step: int | None = None, commit: bool = False) -> None:
        """Add `data` to the metrics of the current step, replacing equal names. `step` and `commit` are ignored."""
        if self.trainer is not None:
            self.trainer.all_metrics |= data
