"""SkyRL's trainer: what published subclasses of it override, as steps of the loop of this package."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import torch

from skyrl_train.algorithms.advantage_step import AdvantageStep, describe
from skyrl_train.algorithms.advantages import batch_normalised
from skyrl_train.data.batch import TrainBatch
from skyrl_train.data.trajectory import TrajectoryGroup
from skyrl_train.errors import ConfigError
from skyrl_train.metrics import Metrics
from skyrl_train.skyrl.batches import Rectangles, TrainingInputBatch, training_input, with_token_rewards
from skyrl_train.skyrl.interface import GeneratorOutput
from skyrl_train.skyrl.outputs import check_entries, output_of, take_over
from skyrl_train.skyrl.refusals import TRAINERS, refuse, refuse_overrides
from skyrl_train.trainer.trainer import Trainer


class RayPPOTrainer:
    """Made by `BasePPOExp.get_trainer`. A subclass may override, each with `super()`:

    `train`, around the whole of training; `eval`; `postprocess_generator_output`, to change rewards and loss masks;
    `apply_reward_kl_penalty`, to change the rewards of tokens, called if use_kl_in_reward is on; and
    `compute_advantages_and_returns`. What is not overridden costs nothing: the loop then computes on ragged batches.

    Numbers put into `all_metrics` are logged with the step's.
    """

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
    ):
        self.cfg = cfg
        self.tracker = tracker
        if isinstance(tracker, StepNumbers):
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
        self._advantages: AdvantageStep | None = None
        self._thread_loop: asyncio.AbstractEventLoop | None = None
        self._fitting: asyncio.Task[None] | None = None
        self._told_to_end = self._evaluating = False
        refuse_overrides(type(self), RayPPOTrainer, TRAINERS)
        self._batch: TrainBatch | None = None
        """The one under way, for what a subclass calls by `super()`."""

    # -- what subclasses override ------------------------------------------------------------------------------------

    def train(self) -> None:
        """Train to the last step."""
        loop = self._thread_loop
        if loop is None:
            raise ConfigError("RayPPOTrainer.train: it is called by `run()` of the experiment that made the trainer.")
        asyncio.run_coroutine_threadsafe(self._fit(), loop).result()

    async def eval(self) -> dict[str, float]:
        """Evaluate the weights of the last finished step: numbers by name."""
        assert self._connected.evaluator is not None
        return await self._connected.evaluator.run(self._connected.step)

    def postprocess_generator_output(self, generator_output: GeneratorOutput, uids: list[str]) -> GeneratorOutput:
        """Turn rewards of responses into rewards of their tokens, on the last one."""
        rewards: list[Any] = list(generator_output["rewards"])
        for entry, response in enumerate(generator_output["response_ids"]):
            if not isinstance(rewards[entry], list):
                rewards[entry] = [0.0] * (len(response) - 1) + [float(rewards[entry])]
        generator_output["rewards"] = rewards
        return generator_output

    def apply_reward_kl_penalty(self, data: TrainingInputBatch) -> TrainingInputBatch:
        """Subtract the KL penalty of the configuration from `data["rewards"]`, (B, R)."""
        step, batch = self._advantages, self._batch
        assert step is not None and step.kl is not None and batch is not None
        metrics = Metrics()
        penalty = Rectangles(batch).responses(step.kl_penalty(step.kl, batch, metrics))
        self.all_metrics.update(metrics.flush())
        data["rewards"] = data["rewards"] - penalty.to(data["rewards"].dtype)
        return data

    def compute_advantages_and_returns(self, data: TrainingInputBatch) -> TrainingInputBatch:
        """Add `advantages` and `returns`, (B, R), by the configured estimator from `data["rewards"]`."""
        step, batch = self._advantages, self._batch
        assert step is not None and batch is not None
        rectangles = Rectangles(batch)
        rewarded = with_token_rewards(batch, rectangles, data["rewards"])
        done = replace(step, kl=None, normalise_batch=False)(rewarded, Metrics())
        advantages = done.token_advantages
        assert advantages is not None
        data["advantages"] = rectangles.responses(advantages)
        data["returns"] = data["advantages"] if done.returns is None else rectangles.responses(done.returns)
        return data

    # -- how they become steps of the loop ---------------------------------------------------------------------------

    def connect(self, loop: Trainer) -> None:
        """Become part of a loop: only what a subclass overrides changes it."""
        self._loop = loop
        after = self._postprocess if self._overrides("postprocess_generator_output") else self._log_numbers
        loop.group_steps = [*loop.group_steps, after]
        if self._overrides("apply_reward_kl_penalty") or self._overrides("compute_advantages_and_returns"):
            loop.batch_steps = [self._as_rectangles(step) for step in loop.batch_steps]
        if self._overrides("eval") and loop.evaluator is not None:
            loop.evaluator = _OwnEvaluation(self, loop.evaluator)  # type: ignore[assignment]

    def _overrides(self, method: str) -> bool:
        return getattr(type(self), method) is not getattr(RayPPOTrainer, method)

    @property
    def changes_rewards(self) -> bool:
        """Whether a subclass has a say in them before the batch is made."""
        return self._overrides("postprocess_generator_output")

    def _as_rectangles(self, step: Any) -> Any:
        if not isinstance(step, AdvantageStep):
            return step
        self._advantages = step
        return self._learn_from

    def _log_numbers(self, groups: Sequence[TrajectoryGroup], metrics: Metrics) -> None:
        self._log_into(metrics)

    def _postprocess(self, groups: Sequence[TrajectoryGroup], metrics: Metrics) -> None:
        output, uids = output_of(groups, self._a_token)
        responses = [list(ids) for ids in output["response_ids"]]
        changed = self.postprocess_generator_output(output, uids)
        name = f"{type(self).__name__}.postprocess_generator_output"
        if changed["response_ids"] != responses:
            raise ConfigError(
                f"{name} changed response_ids: only rewards and loss_masks may be changed there. Leave samples out by "
                "masks of zeros."
            )
        check_entries(changed, name)
        take_over(groups, changed)
        self._log_into(metrics)

    def _learn_from(self, batch: TrainBatch, metrics: Metrics) -> TrainBatch:
        """In place of the loop's AdvantageStep."""
        step = self._advantages
        assert step is not None
        self._batch, rectangles = batch, Rectangles(batch)
        data = training_input(batch, rectangles, self._connected.samples_of_rows, self._a_token)
        if step.kl is not None:
            data = self.apply_reward_kl_penalty(data)
        data = self.compute_advantages_and_returns(data)
        self._batch = None
        advantages, returns = (
            rectangles.flat(data[name].to(batch.rewards.dtype)) for name in ("advantages", "returns")
        )
        advantages = torch.where(batch.loss_mask, advantages, 0.0)
        if step.normalise_batch:
            advantages = batch_normalised(advantages, batch.loss_mask)
        batch = batch.with_tokens(advantages=advantages, returns=returns if batch.values is not None else None)
        describe(batch, metrics)
        self._log_into(metrics)
        return batch

    @property
    def _a_token(self) -> int:
        """For places of a rectangle that have none."""
        return self.tokenizer.pad_token_id or 0

    def _log_into(self, metrics: Metrics) -> None:
        for name in list(self.all_metrics):  # in a thread: rollouts that run ahead may add others meanwhile
            value = self.all_metrics.pop(name)
            if isinstance(value, int | float) or (isinstance(value, torch.Tensor) and value.numel() == 1):
                metrics.add(name, float(value))

    # -- the run that it drives --------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Train. What a subclass does around it runs in a thread of its own if it blocks.

        Raises ConfigError if it has not called `super().train()`.
        """
        if not self._overrides("train"):
            await self._fit()
            return
        self._thread_loop = asyncio.get_running_loop()
        if inspect.iscoroutinefunction(self.train):
            await self.train()
        else:
            thread = asyncio.ensure_future(asyncio.to_thread(self.train))
            try:
                await asyncio.shield(thread)
            except asyncio.CancelledError:
                self._told_to_end = True
                if self._fitting is not None:
                    self._fitting.cancel()
                await asyncio.wait([thread])
                raise
        if self._fitting is None:
            raise ConfigError(
                f"{type(self).__name__}.train ended without a step: it must call super().train(). There is no other "
                "loop (docs/from_skyrl.md)."
            )

    async def _fit(self) -> None:
        if self._told_to_end:
            raise asyncio.CancelledError
        self._fitting = asyncio.current_task()
        await self._connected.fit()

    @property
    def _connected(self) -> Trainer:
        if self._loop is None:
            raise ConfigError(
                f"{type(self).__name__}: it is part of a run once `run()` of the experiment has started it; what needs "
                "a running trainer belongs into its methods, not into its constructor."
            )
        return self._loop

    @property
    def global_step(self) -> int:
        """The step under way, from 1; the last finished one during an evaluation, and 0 before there is a run."""
        if self._loop is None:
            return 0
        return self._loop.step + (not self._evaluating)

    @property
    def total_training_steps(self) -> int:
        return self._connected.schedule.total_steps

    def __getattr__(self, name: str) -> NoReturn:
        refuse("RayPPOTrainer", name)


class FullyAsyncRayPPOTrainer(RayPPOTrainer):
    """SkyRL's trainer for rollouts that run ahead: the same one, which the configuration tells to."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        if not self.cfg.trainer.fully_async.enabled:
            raise ConfigError(
                "trainer.fully_async.enabled=false: must be true with FullyAsyncRayPPOTrainer; set it, or return a "
                "RayPPOTrainer from get_trainer."
            )

    async def train(self) -> None:  # type: ignore[override]
        """Train to the last step; a coroutine, as in SkyRL."""
        await self._fit()


class StepNumbers:
    """The tracker that a trainer gets: what it logs goes with the numbers of the step under way."""

    def __init__(self) -> None:
        self.trainer: RayPPOTrainer | None = None

    def log(self, data: Mapping[str, Any], step: int | None = None, commit: bool = False) -> None:
        if self.trainer is not None:
            self.trainer.all_metrics |= data


class _OwnEvaluation:
    """A subclass's `eval` in the place of the loop's evaluator."""

    def __init__(self, trainer: RayPPOTrainer, usual: Any):
        self._trainer = trainer
        self._usual = usual

    @property
    def progress(self) -> tuple[int, int]:
        done, wanted = self._usual.progress
        return done, wanted

    async def run(self, step: int) -> dict[str, float]:
        loop = self._trainer._loop
        assert loop is not None
        loop.evaluator, mine = self._usual, self  # what `super().eval()` asks
        self._trainer._evaluating = True
        try:
            return dict(await self._trainer.eval())
        finally:
            self._trainer._evaluating = False
            self._trainer._log_into(loop.metrics)
            loop.evaluator = mine  # type: ignore[assignment]
