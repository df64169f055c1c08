"""Measures a few steps of a real run without leaving files behind: `check_config --plan --probe`.

The run's own Trainer takes the steps with its engines, learner, environments and data, so its clocks measure what the
run's will. Then the batch of the last step is scored and trained on again with other micro-batch sizes.
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
from skyrl_train.experiment.data import num_eval_answers
from skyrl_train.experiment.memory_tuning import as_out_of_memory, fits_in_memory
from skyrl_train.experiment.run_resources import RolloutResources
from skyrl_train.learner.learner import BatchSizes
from skyrl_train.metrics import Metrics
from skyrl_train.report.progress_log import print_status
from skyrl_train.report.trackers import Trackers
from skyrl_train.trainer.trainer import StepSchedule, Trainer

STEPS_S, TIMINGS_S = 12.0, 8.0
"""Seconds for measuring steps and for timing micro-batch sizes. The minimum of steps is taken however long it takes."""
MIN_STEPS, MAX_STEPS = 3, 30
"""Numbers of complete steps that are measured."""
_FIRST_STEP_DIVISOR = 8
"""The first step has this fraction of the prompts. It is slow for reasons of its own and shows the order of a step's
time."""
MAX_SIZES = 5
_ROUNDS = 3
LIMIT = "trainer.max_tokens_per_microbatch"
_PEAKS = ("memory/learner_peak_gib", "memory/learner_peak_rss_gib")
"""Metrics of the peak memory of the accelerator, else of the host."""
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
"""Settings that a probe overrides, for files and for guards about training progress. The HTTP endpoint stays on because
environments may call it."""


@dataclass(frozen=True)
class ProbeSchedule(StepSchedule):
    """A schedule that chooses the number of prompts of each step from the measured time.

    The first step has a part of the prompts. Then follow complete steps if they fit the time, else steps of growing
    size. The size of a step is fixed when it is first requested, which is when the step before it has published its
    weights. A size of 0 means that the probe has ended.
    """

    max_staleness_steps: int = 0
    """Number of steps by which rollouts run ahead."""
    full_steps_only: bool = False
    """True if every step has all prompts, as steps do where rollouts run ahead."""
    clock: Callable[[], float] = time.monotonic
    requested_sizes: list[tuple[float, int]] = field(default_factory=list)
    """For each step the time when its size was requested, and the size; 0 after the last step."""

    @property
    def prompts(self) -> int:
        """Number of prompts of a complete step."""
        return min(self.train_batch_size, self.num_prompts)

    @property
    def total_steps(self) -> int:
        ended = bool(self.requested_sizes) and self.requested_sizes[-1][1] == 0
        return self._finished if ended else sys.maxsize

    @property
    def _finished(self) -> int:
        """Number of finished steps when the last size was requested.

        The size of step s is requested when step s - 1 - max_staleness_steps has ended.
        """
        return max(0, len(self.requested_sizes) - 1 - self.max_staleness_steps)

    def num_prompts_in_step(self, step: int) -> int:
        while len(self.requested_sizes) <= step:
            self.requested_sizes.append((self.clock(), 0))
            ended = len(self.requested_sizes) > 1 and self.requested_sizes[-2][1] == 0
            self.requested_sizes[-1] = (self.requested_sizes[-1][0], 0 if ended else self._next())
        return self.requested_sizes[step][1]

    def measured(self) -> list[int]:
        """Return the indices of the steps that count, from 0.

        These are the complete steps without the first one and without those in which rollouts get ahead. If there is
        none, all steps except the first; if there is only one step, that one.
        """
        complete = [step for step in range(self._finished) if self.requested_sizes[step][1] == self.prompts][
            1 + self.max_staleness_steps :
        ]
        # Rollouts that run ahead come in bursts: a slow step, then as many fast ones as they are ahead.
        burst = 1 + self.max_staleness_steps
        incomplete_burst = len(complete) % burst if len(complete) > burst else 0
        return complete[incomplete_burst:] or [*range(1, self._finished)] or [*range(self._finished)]

    def _next(self) -> int:
        """Return the number of prompts of the step that is being requested; 0 to end the probe."""
        finished, (now, _) = self._finished, self.requested_sizes[-1]
        if finished == 0:
            return (
                self.prompts
                if self.full_steps_only or self.max_staleness_steps
                else -(-self.prompts // _FIRST_STEP_DIVISOR)
            )
        elapsed = now - self.requested_sizes[0][0]
        sizes = [size for _, size in self.requested_sizes[:finished]]
        num_complete = sizes.count(self.prompts)
        if num_complete:
            num_counted = num_complete - 1 - self.max_staleness_steps
            has_enough = num_counted >= max(MIN_STEPS, 1 + self.max_staleness_steps) and elapsed >= STEPS_S
            is_late = num_counted >= 1 and elapsed >= 3 * STEPS_S
            return 0 if has_enough or is_late or num_counted >= MAX_STEPS else self.prompts
        took_s, last = now - self.requested_sizes[-2][0], sizes[-1]
        total_s = STEPS_S + TIMINGS_S
        if took_s * self.prompts / last * (MIN_STEPS + 1) <= total_s:
            return self.prompts
        if finished == 1:  # the first step was slow for reasons of its own
            return last
        # At least two sizes, however long they take: a single one does not show how the time of a step grows.
        return min(self.prompts, 2 * last) if finished == 2 or elapsed + 2 * took_s <= total_s else 0


@dataclass(frozen=True)
class MicroBatchTiming:
    """The time of scoring and updating with one micro-batch size."""

    limit: int | None
    """Tokens of a micro-batch; None for the configured size."""
    seconds: float
    """Shortest time of scoring and updating the batch, in seconds; infinite if memory ran out."""
    peak_gib: float | None
    """Peak memory until then of the rank that needed the most (memory/learner_peak_*); None if memory ran out."""


@dataclass(frozen=True)
class ProbeResult:
    """The measurements of a probe."""

    steps: list[MeasuredStep]
    """The steps that count."""
    num_steps: int
    """Number of all steps."""
    steps_took_s: float
    start_s: float
    """Seconds until the first step could begin."""
    prompts: int
    """Number of prompts of a complete step."""
    dataset: PromptDataset
    eval_answers: int
    """Number of answers that an evaluation samples."""
    responses: list[int]
    """Number of tokens of every response of the last step."""
    timed_tokens: int
    """Number of tokens of the batch that was timed with every size."""
    timings: list[MicroBatchTiming] = field(default_factory=list)


class ProbeExp(Experiment):
    """An experiment that takes a few measured steps. The run's files go to `folder`."""

    def __init__(self, cfg: Config, folder: Path):
        self.original_config, self._begun, self._start_s = cfg, time.monotonic(), 0.0
        self._rows: list[Mapping[str, float]] = []
        self._batch: TrainBatch | None = None
        self._schedule: ProbeSchedule | None = None
        self.result: ProbeResult | None = None
        super().__init__(as_temporary_run(cfg, folder))

    def get_eval_dataset(self) -> PromptDataset | None:
        probe_config, self.config = self.config, self.original_config
        try:
            return super().get_eval_dataset()
        finally:
            self.config = probe_config

    def build_tracker(self, directory: Path) -> Trackers:
        return Trackers({"probe": _Rows(self)})

    def build_trainer(self, running: RolloutResources, schedule: StepSchedule | None = None) -> Trainer:
        trainer = self.config.trainer
        self._schedule = ProbeSchedule(
            len(self.train_dataset),
            trainer.train_batch_size,
            epochs=1,
            max_staleness_steps=max_staleness_steps(trainer),
            # Dynamic sampling draws a number of groups that depends on the step's size.
            full_steps_only=trainer.algorithm.dynamic_sampling.type is not None,
        )
        built = super().build_trainer(running, self._schedule)
        built.batch_transforms = [*built.batch_transforms, self._record_batch]
        built.checkpoint_manager.save = _save_nothing  # type: ignore[method-assign]  # a run that ends early would save
        learner, steps = built.learner, trainer.update_epochs_per_batch
        if (
            learner.needs_old_logprobs is None
            and -(-self._schedule.prompts // trainer.policy_mini_batch_size) * steps > 1
        ):
            learner.needs_old_logprobs = True  # as in complete steps, although a part may be a single mini-batch
        return built

    def begins(self) -> None:
        """Record that everything has started, and print that steps follow."""
        self._start_s = time.monotonic() - self._begun
        print_status("probe", f"steps, for about {STEPS_S:g} s")

    def add(self, row: Mapping[str, float]) -> None:
        """Record the metrics of a step."""
        self._rows.append(row)

    def _record_batch(self, batch: TrainBatch, metrics: Metrics) -> TrainBatch:
        self._batch = batch
        return batch

    async def _run(self) -> None:
        async with self.session() as session:
            await session.trainer.fit()
            await session.trainer.collector.close()  # no rollout of a later step may disturb the timings
            batch, schedule = self._batch, self._schedule
            assert batch is not None and schedule is not None and self._rows
            print_status("probe", f"micro-batch sizes, for about {TIMINGS_S:g} s")
            row = self._rows[-1]
            part, timings = await _time_micro_batches(
                self.config, session, batch, row.get("timing/score_s", 0.0) + row["timing/update_s"]
            )
        self.result = ProbeResult(
            steps=[MeasuredStep(schedule.num_prompts_in_step(step), self._rows[step]) for step in schedule.measured()],
            num_steps=len(self._rows),
            steps_took_s=sum(row["timing/step_s"] for row in self._rows),
            start_s=self._start_s,
            prompts=schedule.prompts,
            dataset=self.train_dataset,
            eval_answers=num_eval_answers(self.config.generator, self.eval_dataset),
            responses=response_lengths(batch),
            timed_tokens=len(part.input_ids),
            timings=timings,
        )


class _Rows:
    """A tracker that passes the metrics of steps to a probe."""

    def __init__(self, experiment: ProbeExp):
        self._experiment = experiment

    def begin(self, step: int, total_steps: int) -> None:
        self._experiment.begins()

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        if step:
            self._experiment.add(metrics)

    def samples(self, rows: Sequence[Any], step: int) -> None:
        """Ignore samples."""

    def close(self) -> None:
        """Do nothing: there is nothing to close."""


def as_temporary_run(cfg: Config, folder: Path) -> Config:
    """Return the configuration with all files in `folder`, and without checkpoints, exports and evaluations."""
    changes = dict(_DISABLED_KEYS)
    changes |= {"trainer.ckpt_path": str(folder / "run"), "trainer.export_path": str(folder / "exports")}
    if cfg.generator.weight_sync_folder:  # engines on other machines may only reach this folder
        changes["generator.weight_sync_folder"] = os.path.join(cfg.generator.weight_sync_folder, folder.name)
    for key, value in changes.items():
        cfg = replace_value(cfg, key, value)
    return cfg


def probe(cfg: Config) -> ProbeResult:
    """Run the configuration in a temporary folder for a few steps, measure it and stop it.

    Blocks for the start of the run and about 20 s. The folder is deleted, unless the probe failed and its logs may say
    why.

    Raises:
        ConfigError: The engines are not the run's own (generator.run_engines_locally=false), or as a run raises it.
        SkyRLError: As a run raises it.
    """
    if not cfg.generator.run_engines_locally:
        raise ConfigError(
            "generator.run_engines_locally=false: a probe trains a few steps and would leave their weights in servers "
            "that others may use. Set it to true for the probe, or leave --probe out."
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
    """Yield a folder that is deleted on exit, unless the body failed and left a run's logs, which errors name."""
    folder, keeps_folder = Path(tempfile.mkdtemp(prefix="skyrl-probe-")), False
    try:
        yield folder
    except Exception as error:
        keeps_folder = not isinstance(error, RunInterrupted) and (folder / "run" / "logs").exists()
        raise
    finally:
        if not keeps_folder:
            shutil.rmtree(folder, ignore_errors=True)


async def _save_nothing(step: int, unfinished: Any = None) -> None:
    """Replace the saving of checkpoints."""


def response_lengths(batch: TrainBatch) -> list[int]:
    """Return the number of tokens of each response that the loss counts; of a masked response, all after the prompt."""
    counted = batch.num_loss_tokens
    return torch.where(counted > 0, counted, batch.lengths - batch.prompt_lengths).tolist()


async def _time_micro_batches(
    cfg: Config, session: Session, batch: TrainBatch, took_s: float
) -> tuple[TrainBatch, list[MicroBatchTiming]]:
    """Time several micro-batch sizes on the batch, or a part of it that fits the time.

    Only the configured size is timed if the update depends on the size.

    Args:
        cfg: The configuration.
        session: The started run.
        batch: The batch of the last step.
        took_s: Seconds that scoring and updating took in that step.

    Returns:
        The timed part of the batch, and the timings with the configured size first.
    """
    trainer, learner = session.trainer, session.learner
    groups, configured = batch.group_ids.unique_consecutive(), learner.sizes
    num_groups = int(len(groups) * TIMINGS_S / max(1e-6, took_s * (MAX_SIZES + 1)))
    part = _first_groups(batch, min(len(groups), max(1, num_groups)))
    mini = _first_groups(part, configured.policy_mini_batch_size)
    max_tokens = len(mini.input_ids) / learner.policy.data_parallel_size
    limits = []
    if not _depends_on_sizes(cfg) and bool(part.loss_mask.any()):
        limits = sizes_that_fit(cfg, sizes_between(int(batch.lengths.max()), max_tokens))
    other_limits = (limit for limit in limits if limit != configured.max_tokens_per_microbatch)
    sizes = {None: configured} | {limit: replace(configured, max_tokens_per_microbatch=limit) for limit in other_limits}
    async with trainer.offload_manager.training():
        return part, await _rounds(cfg, session, part, sizes)


async def _rounds(
    cfg: Config, session: Session, batch: TrainBatch, sizes: Mapping[int | None, BatchSizes]
) -> list[MicroBatchTiming]:
    learner = session.learner
    timings: dict[int | None, MicroBatchTiming] = {}
    begun, rounds = time.monotonic(), 0
    while not rounds or (rounds < _ROUNDS and (time.monotonic() - begun) * (rounds + 1) / rounds <= TIMINGS_S):
        for limit, batch_sizes in sizes.items():
            learner.sizes, at = batch_sizes, time.monotonic()
            try:
                values = await learner.update(await learner.add_logprobs_and_values(batch))
            except Exception as error:
                if as_out_of_memory(error, cfg) is None or limit is None:
                    raise
                timings[limit] = MicroBatchTiming(limit, float("inf"), None)
                return [*timings.values()]
            seconds = time.monotonic() - at
            peak = next((values[name] for name in _PEAKS if name in values), 0.0)
            first = timings.setdefault(limit, MicroBatchTiming(limit, seconds, peak))
            timings[limit] = replace(first, seconds=min(seconds, first.seconds))
        rounds += 1
    return [*timings.values()]


def _first_groups(batch: TrainBatch, count: int) -> TrainBatch:
    ids = batch.group_ids.unique_consecutive()[:count]
    return batch.select(torch.isin(batch.group_ids, ids).nonzero().flatten())


def _depends_on_sizes(cfg: Config) -> bool:
    """True if the loss has SkyRL's signature, whose mean is over a micro-batch."""
    return has_skyrl_signature(policy_losses.get(cfg.trainer.algorithm.policy_loss_type))


def sizes_between(longest: int, max_tokens: float) -> list[int]:
    """Return at most MAX_SIZES powers of two for the tokens of a micro-batch.

    Args:
        longest: Tokens of the longest sequence, which the smallest size holds.
        max_tokens: Tokens of a mini-batch on one rank, which the largest size holds.
    """
    sizes = [1 << (longest - 1).bit_length()]
    while sizes[-1] < max_tokens:
        sizes.append(2 * sizes[-1])
    stride = -(-len(sizes) // MAX_SIZES)
    return sizes[::-1][::stride][::-1]


def sizes_that_fit(cfg: Config, sizes: Sequence[int]) -> list[int]:
    """Return the sizes that fit memory by the memory plan; all of them if there is no plan."""
    return [limit for limit in sizes if fits_in_memory(replace_value(cfg, LIMIT, limit))]
