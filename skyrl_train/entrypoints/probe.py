"""Takes a few steps of a run with everything real, and leaves nothing: `check_config --plan --probe`.

The steps are those of the run's own Trainer over its own engines, learner, environments and data, so what their clocks
say is what the run's will. Then the batch of the last one is scored and learnt again with other sizes of micro-batches.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from skyrl_train.algorithms.registry import policy_losses
from skyrl_train.algorithms.skyrl_adapters import has_skyrl_signature
from skyrl_train.config.keys import replace_value
from skyrl_train.config.predicates import max_staleness_steps
from skyrl_train.config.schema import Config
from skyrl_train.data.batch import TrainBatch
from skyrl_train.data.dataset import PromptDataset
from skyrl_train.entrypoints.probe_estimate import MeasuredStep
from skyrl_train.errors import ConfigError, RunInterrupted
from skyrl_train.experiment.base import Experiment, Session, raise_root_cause
from skyrl_train.experiment.memory_tuning import as_out_of_memory, fits_in_memory
from skyrl_train.experiment.run_resources import RolloutResources
from skyrl_train.learner.learner import BatchSizes
from skyrl_train.metrics import Metrics
from skyrl_train.report.progress_log import print_status
from skyrl_train.report.trackers import Trackers
from skyrl_train.trainer.trainer import StepSchedule, Trainer

STEPS_S, TIMINGS_S = 12.0, 8.0
"""Seconds to measure steps for, and the sizes of micro-batches. Of slow models the least is taken, however long."""
MIN_STEPS, MAX_STEPS = 3, 30
"""Whole steps that are measured."""
_FIRST_STEP_DIVISOR = 8
"""The first step has so small a part of the prompts: it is slow for reasons of its own, and shows what a step takes."""
MAX_SIZES = 5
_ROUNDS = 3
LIMIT = "trainer.max_tokens_per_microbatch"
_PEAKS = ("memory/learner_peak_gib", "memory/learner_peak_rss_gib")
"""Of the accelerator, else of the host."""
_DISABLED_KEYS: Mapping[str, Any] = {
    "trainer.resume_mode": "none",
    "trainer.resume_path": None,
    "trainer.ckpt_interval": 0,
    "trainer.hf_save_interval": 0,
    "trainer.eval_interval": 0,
    "trainer.eval_before_train": False,
    "trainer.dump_data_batch": False,
    "trainer.dump_eval_results": False,
    "trainer.policy.record_memory": False,
    "trainer.profile_steps": [],
    "trainer.trace": False,
    "trainer.metrics_port": None,
    "trainer.guards.equal_rewards_steps": None,
    "trainer.guards.max_ratio": None,
    "trainer.guards.max_cut_fraction": None,
    "trainer.guards.stop": [],
}
"""What a probe does without: files, and judgements of what is learnt. The endpoint stays: environments may call it."""


@dataclass(frozen=True)
class ProbeSchedule(StepSchedule):
    """The prompts of each step as the clock allows: first a part, then all of them; or more of them each time.

    A step's size is settled when it is first asked for, which is when the step before it has published its weights;
    nothing is left to be measured where it is 0.
    """

    max_staleness_steps: int = 0
    """How far rollouts run ahead."""
    full_steps_only: bool = False
    """Whether all steps have all prompts, as they do where rollouts run ahead."""
    clock: Callable[[], float] = time.monotonic
    requested_sizes: list[tuple[float, int]] = field(default_factory=list)
    """When each step's size was asked for, and what it is; 0 after the last one."""

    @property
    def prompts(self) -> int:
        """Those of a whole step."""
        return min(self.train_batch_size, self.num_prompts)

    @property
    def total_steps(self) -> int:
        ended = bool(self.requested_sizes) and self.requested_sizes[-1][1] == 0
        return self._finished if ended else sys.maxsize

    @property
    def _finished(self) -> int:
        """Steps, when the last size was asked for: for step s, when step s - 1 - max_staleness_steps has ended."""
        return max(0, len(self.requested_sizes) - 1 - self.max_staleness_steps)

    def num_prompts_in_step(self, step: int) -> int:
        while len(self.requested_sizes) <= step:
            self.requested_sizes.append((self.clock(), 0))
            ended = len(self.requested_sizes) > 1 and self.requested_sizes[-2][1] == 0
            self.requested_sizes[-1] = (self.requested_sizes[-1][0], 0 if ended else self._next())
        return self.requested_sizes[step][1]

    def measured(self) -> list[int]:
        """The steps that count, from 0: whole ones but for the first, and those in which rollouts get ahead; if there
        is none, all but the first."""
        whole = [step for step in range(self._finished) if self.requested_sizes[step][1] == self.prompts][
            1 + self.max_staleness_steps :
        ]
        # Rollouts that run ahead come in bursts: a slow step, then as many fast ones as they run ahead.
        burst = 1 + self.max_staleness_steps
        spare = len(whole) % burst if len(whole) > burst else 0
        return whole[spare:] or [*range(1, self._finished)] or [*range(self._finished)]

    def _next(self) -> int:
        """The prompts of the step that is being asked for."""
        finished, (now, _) = self._finished, self.requested_sizes[-1]
        if finished == 0:
            return (
                self.prompts
                if self.full_steps_only or self.max_staleness_steps
                else -(-self.prompts // _FIRST_STEP_DIVISOR)
            )
        elapsed = now - self.requested_sizes[0][0]
        sizes = [size for _, size in self.requested_sizes[:finished]]
        whole = sizes.count(self.prompts)
        if whole:
            counted = whole - 1 - self.max_staleness_steps
            enough = counted >= max(MIN_STEPS, 1 + self.max_staleness_steps) and elapsed >= STEPS_S
            late = counted >= 1 and elapsed >= 3 * STEPS_S
            return 0 if enough or late or counted >= MAX_STEPS else self.prompts
        took, last = now - self.requested_sizes[-2][0], sizes[-1]
        together = STEPS_S + TIMINGS_S
        if took * self.prompts / last * (MIN_STEPS + 1) <= together:
            return self.prompts
        if finished == 1:  # that was slow for reasons of its own
            return last
        # Two sizes at least, however long: one says what a step takes, not how that grows.
        return min(self.prompts, 2 * last) if finished == 2 or elapsed + 2 * took <= together else 0


@dataclass(frozen=True)
class MicroBatchTiming:
    """Scoring and updating with one size of micro-batches."""

    limit: int | None
    """Tokens of a micro-batch; None is what is configured."""
    seconds: float
    """Of scoring and updating the batch, the fastest of some times."""
    peak_gib: float | None
    """memory/learner_peak_*: of the rank that needed most until then. None if it ran out of memory."""


@dataclass(frozen=True)
class ProbeResult:
    """What a probe found."""

    steps: list[MeasuredStep]
    """Those that count."""
    num_steps: int
    """How many steps there were."""
    steps_took_s: float
    start_s: float
    """Until the first step could begin."""
    prompts: int
    """Of a whole step."""
    dataset: PromptDataset
    eval_prompts: int
    responses: list[int]
    """Tokens of every response of the last step."""
    timed_tokens: int
    """Of the batch that was passed with every size."""
    timings: list[MicroBatchTiming] = field(default_factory=list)


class ProbeExp(Experiment):
    """An experiment that is measured and leaves nothing; `folder` is for what a run writes."""

    def __init__(self, cfg: Config, folder: Path):
        self.original_config, self._begun, self._start_s = cfg, time.monotonic(), 0.0
        self._rows: list[Mapping[str, float]] = []
        self._batch: TrainBatch | None = None
        self._schedule: ProbeSchedule | None = None
        self.result: ProbeResult | None = None
        super().__init__(as_temporary_run(cfg, folder))

    def get_eval_dataset(self) -> PromptDataset | None:
        mine, self.config = self.config, self.original_config
        try:
            return super().get_eval_dataset()
        finally:
            self.config = mine

    def build_tracker(self, directory: Any) -> Any:
        return Trackers({"probe": _Rows(self)})

    def build_trainer(self, running: RolloutResources, schedule: StepSchedule | None = None) -> Trainer:
        trainer = self.config.trainer
        self._schedule = ProbeSchedule(
            len(self.train_dataset),
            trainer.train_batch_size,
            epochs=1,
            max_staleness_steps=max_staleness_steps(trainer),
            # What these draw for a step depends on its size.
            full_steps_only=trainer.algorithm.dynamic_sampling.type is not None,
        )
        built = super().build_trainer(running, self._schedule)
        built.batch_transforms = [*built.batch_transforms, self._keep]
        built.checkpoint_manager.save = _save_nothing  # type: ignore[method-assign]  # as a run that ends early would
        learner, steps = built.learner, trainer.update_epochs_per_batch
        if (
            learner.needs_old_logprobs is None
            and -(-self._schedule.prompts // trainer.policy_mini_batch_size) * steps > 1
        ):
            learner.needs_old_logprobs = True  # as for whole steps; a part may be a single mini-batch
        return built

    def begins(self) -> None:
        """Everything has started."""
        self._start_s = time.monotonic() - self._begun
        print_status("probe", f"steps, for about {STEPS_S:g} s")

    def add(self, row: Mapping[str, float]) -> None:
        """Take in the metrics of a step."""
        self._rows.append(row)

    def _keep(self, batch: TrainBatch, metrics: Metrics) -> TrainBatch:
        self._batch = batch
        return batch

    async def _run(self) -> None:
        async with self.session() as session:
            await session.trainer.fit()
            await session.trainer.collector.close()  # no rollout of a later step runs beside what follows
            batch, pace = self._batch, self._schedule
            assert batch is not None and pace is not None and self._rows
            print_status("probe", f"micro-batches, for about {TIMINGS_S:g} s")
            row = self._rows[-1]
            part, passes = await _time_micro_batches(
                self.config, session, batch, row.get("timing/score_s", 0.0) + row["timing/update_s"]
            )
        self.result = ProbeResult(
            steps=[MeasuredStep(pace.num_prompts_in_step(step), self._rows[step]) for step in pace.measured()],
            num_steps=len(self._rows),
            steps_took_s=sum(row["timing/step_s"] for row in self._rows),
            start_s=self._start_s,
            prompts=pace.prompts,
            dataset=self.train_dataset,
            eval_prompts=len(self.eval_dataset or ()),
            responses=response_lengths(batch),
            timed_tokens=len(part.input_ids),
            timings=passes,
        )


class _Rows:
    """A tracker for a probe."""

    def __init__(self, experiment: ProbeExp):
        self._experiment = experiment

    def begin(self, step: int, total_steps: int) -> None:
        self._experiment.begins()

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        if step:
            self._experiment.add(metrics)

    def samples(self, rows: Sequence[Any], step: int) -> None:
        """Nobody reads them."""

    def close(self) -> None:
        """There is nothing to close."""


def as_temporary_run(cfg: Config, folder: Path) -> Config:
    """The configuration with `folder` for all that a run writes, and without what it would keep."""
    changes = dict(_DISABLED_KEYS)
    changes |= {"trainer.ckpt_path": str(folder / "run"), "trainer.export_path": str(folder / "exports")}
    if cfg.generator.weight_sync_folder:  # engines on other machines may reach no other one
        changes["generator.weight_sync_folder"] = os.path.join(cfg.generator.weight_sync_folder, folder.name)
    for key, value in changes.items():
        cfg = replace_value(cfg, key, value)
    return cfg


def probe(cfg: Config) -> ProbeResult:
    """Start the configuration's run in a temporary folder, measure it, stop it.

    Raises ConfigError for engines that are not the run's own, and what a run raises.
    """
    if not cfg.generator.run_engines_locally:
        raise ConfigError(
            "generator.run_engines_locally=false: a probe trains a few steps, and would leave their weights in servers "
            "that others may use; probe with engines of its own (true), or without --probe."
        )
    with ExitStack() as stack:
        experiment = ProbeExp(cfg, stack.enter_context(temporary_folder()))
        if (shared := experiment.config.generator.weight_sync_folder) is not None:
            stack.callback(shutil.rmtree, shared, ignore_errors=True)
        with raise_root_cause(experiment):
            experiment.run()
        assert experiment.result is not None
        return experiment.result


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """A folder that goes, unless what failed may be explained by the logs of a run in it, which errors name."""
    folder, kept = Path(tempfile.mkdtemp(prefix="skyrl-probe-")), False
    try:
        yield folder
    except Exception as error:
        kept = not isinstance(error, RunInterrupted) and (folder / "run" / "logs").exists()
        raise
    finally:
        if not kept:
            shutil.rmtree(folder, ignore_errors=True)


async def _save_nothing(step: int, unfinished: Any = None) -> None:
    """In place of a checkpoint."""


def response_lengths(batch: TrainBatch) -> list[int]:
    """The tokens of each answer that count; of one that is masked, all after the prompt."""
    counted = batch.num_loss_tokens
    return torch.where(counted > 0, counted, batch.lengths - batch.prompt_lengths).tolist()


async def _time_micro_batches(
    cfg: Config, session: Session, batch: TrainBatch, took_s: float
) -> tuple[TrainBatch, list[MicroBatchTiming]]:
    """Score and update (a part of) the batch with several sizes of micro-batches, if they do not change what is learnt.

    `took_s`: what that took in the step. Returns the part, and the configured size first.
    """
    trainer, learner = session.trainer, session.learner
    groups, asked = batch.group_ids.unique_consecutive(), learner.sizes
    fits = int(len(groups) * TIMINGS_S / max(1e-6, took_s * (MAX_SIZES + 1)))
    part = _first_groups(batch, min(len(groups), max(1, fits)))
    mini = _first_groups(part, asked.policy_mini_batch_size)
    most = len(mini.input_ids) / learner.policy.data_parallel_size
    limits = []
    if not _depends_on_sizes(cfg) and bool(part.loss_mask.any()):
        limits = sizes_that_fit(cfg, sizes_between(int(batch.lengths.max()), most))
    others = (limit for limit in limits if limit != asked.max_tokens_per_microbatch)
    tried = {None: asked} | {limit: replace(asked, max_tokens_per_microbatch=limit) for limit in others}
    async with trainer.offload_manager.generating(before_sync=True):
        pass  # the engines leave, as they do before a step's update
    async with trainer.offload_manager.training():
        return part, await _rounds(cfg, session, part, tried)


async def _rounds(
    cfg: Config, session: Session, batch: TrainBatch, tried: Mapping[int | None, BatchSizes]
) -> list[MicroBatchTiming]:
    learner = session.learner
    found: dict[int | None, MicroBatchTiming] = {}
    begun, rounds = time.monotonic(), 0
    while not rounds or (rounds < _ROUNDS and (time.monotonic() - begun) * (rounds + 1) / rounds <= TIMINGS_S):
        for limit, sizes in tried.items():
            learner.sizes, at = sizes, time.monotonic()
            try:
                values = await learner.update(await learner.add_logprobs_and_values(batch))
            except Exception as error:
                if as_out_of_memory(error, cfg) is None or limit is None:
                    raise
                found[limit] = MicroBatchTiming(limit, float("inf"), None)
                return [*found.values()]
            seconds = time.monotonic() - at
            peak = next((values[name] for name in _PEAKS if name in values), 0.0)
            first = found.setdefault(limit, MicroBatchTiming(limit, seconds, peak))
            found[limit] = replace(first, seconds=min(seconds, first.seconds))
        rounds += 1
    return [*found.values()]


def _first_groups(batch: TrainBatch, count: int) -> TrainBatch:
    chosen = batch.group_ids.unique_consecutive()[:count]
    return batch.select(torch.isin(batch.group_ids, chosen).nonzero().flatten())


def _depends_on_sizes(cfg: Config) -> bool:
    """Whether the loss is one with SkyRL's signature, whose mean is over a micro-batch."""
    return has_skyrl_signature(policy_losses.get(cfg.trainer.algorithm.policy_loss_type))


def sizes_between(longest: int, most: float) -> list[int]:
    """At most MOST_SIZES powers of two, from the longest sequence to `most` tokens, with which there is one pass."""
    sizes = [1 << (longest - 1).bit_length()]
    while sizes[-1] < most:
        sizes.append(2 * sizes[-1])
    every = -(-len(sizes) // MAX_SIZES)
    return sizes[::-1][::every][::-1]


def sizes_that_fit(cfg: Config, sizes: Sequence[int]) -> list[int]:
    """Those with which the memory plan leaves room; all if there is no plan."""
    return [limit for limit in sizes if fits_in_memory(replace_value(cfg, LIMIT, limit))]
