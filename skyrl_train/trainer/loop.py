"""What every training loop does: steps that are whole, recorded once, and saved whatever ends the run."""

from __future__ import annotations

import logging
import sys
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass

from skyrl_train import trace
from skyrl_train.data.batch import TrainBatch
from skyrl_train.errors import NonFiniteUpdate, NonFiniteWeights
from skyrl_train.learner.learner import Learner
from skyrl_train.metrics import Metrics
from skyrl_train.report.phases import Phases, Silent
from skyrl_train.report.protocol import SampleRow
from skyrl_train.report.trackers import Trackers
from skyrl_train.tasks import to_its_end
from skyrl_train.trainer.guards import Guards
from skyrl_train.trainer.run_state import RunState, Unfinished
from skyrl_train.trainer.schedule import StepSchedule
from skyrl_train.trainer.step_profiles import StepProfiles

_ANSWER_S = 30.0
"""Within this time every rank that lives and is not hung answers a call that does nothing."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Intervals:
    """How many steps apart each action is; 0 or less disables it. Enabled actions also run after the last step."""

    eval_interval: int
    ckpt_interval: int
    hf_save_interval: int
    eval_before_train: bool
    total_steps: int

    def due(self, interval: int, step: int) -> bool:
        """Whether an action with this interval runs after `step` finished steps."""
        return interval > 0 and (step % interval == 0 or step == self.total_steps)


class TrainingLoop(ABC):
    """Takes steps until there are no more, and leaves in good order.

    `step` is the number of finished steps: of updates whose weights all ranks hold. A step is logged exactly once.
    Whatever ends the run, the last whole step is recorded and saved, unless its weights are lost: an update ended in
    its middle, they are not finite, or a rank that holds them died or hangs. What was still to be done about that step
    is saved with it, and done first when the run is resumed.
    """

    def __init__(
        self,
        *,
        schedule: StepSchedule,
        intervals: Intervals,
        learner: Learner,
        state: RunState,
        trackers: Trackers,
        guards: Guards | None = None,
        release: Callable[[], Awaitable[None]] | None = None,
        phases: Phases | None = None,
        profiles: StepProfiles | None = None,
    ):
        """`release`: ends what else takes part in calls of the ranks, before the last step is saved. `phases`: where
        what people wait for is said; None is nowhere. `profiles`: of some steps."""
        self.schedule = schedule
        self.intervals = intervals
        self.learner = learner
        self.state = state
        self.trackers = trackers
        self.guards = guards
        self.release = release
        self.phases = phases or Silent()
        self.profiles = profiles
        self.metrics = Metrics()
        self.step = 0
        self.restarts = 0
        """How often the ranks were started again in this run; then each row says so, and how many ranks there are."""
        self._whole = True
        """Whether the ranks hold the weights of `step`; False during an update."""
        self._to_do: list[str] = []
        """What is still to be done about `step`: "reference", "publish", "evaluate", "log", "export", in this order."""
        self._samples: Sequence[SampleRow] = ()
        self._table: Sequence[SampleRow] = ()

    async def fit(self) -> None:
        """Train up to the last step, from the checkpoint to resume or else from the start."""
        self._whole, self._to_do = True, []
        try:
            await self._start()
        except Exception as error:
            await self.learner.explain(error)
            raise
        started_at = self.step
        try:
            while self.step < self.schedule.total_steps:
                await self._next_step(f"step {self.step + 1}")
            await self.state.written()
            if self.intervals.ckpt_interval > 0 and self.step > started_at:
                await self.state.finish(self.step)
        except BaseException as error:
            await to_its_end(self._leave(error, started_at))
            raise

    async def _next_step(self, name: str) -> None:
        profiled = self.profiles.of(self.step + 1) if self.profiles else nullcontext()
        try:
            with self.phases.waiting(name, self._doing), trace.span(name):
                async with profiled:
                    await self._step()
        except Exception as error:
            with suppress(Exception):  # a class of exceptions may take none
                total = self.schedule.total_steps
                error.add_note(f"It ended in {name} of {total}." if total < sys.maxsize else f"It ended in {name}.")
            raise

    @abstractmethod
    async def _start(self) -> None:
        """Resume."""

    @abstractmethod
    async def _step(self) -> None:
        """Take one step."""

    @abstractmethod
    def _num_tokens(self, values: Mapping[str, float]) -> float:
        """The tokens of the step with these metrics."""

    def _doing(self) -> str:
        """What the step is at: asked by another thread."""
        if self.metrics.under_way == "update" and (progress := self.learner.progress) is not None:
            return "update, {} of {} optimizer steps".format(*progress)
        return self.metrics.under_way or "checkpoints and records"

    def _derived(self, values: Mapping[str, float]) -> dict[str, float]:
        """More numbers that follow from those of a step."""
        return {}

    async def _update(self, batch: TrainBatch) -> None:
        """Take a step's optimizer steps, after which it counts; to its end, even if the run is asked to stop."""
        with self.metrics.timed("update"):
            await to_its_end(self._take_updates(batch))

    async def _take_updates(self, batch: TrainBatch) -> None:
        self._whole = False
        try:
            values = await self.learner.update(batch)
        except NonFiniteUpdate as error:
            raise NonFiniteUpdate(f"{error} {self._last_good()}") from error
        self.step += 1
        self.state.skipped.note(self.step, values)
        self.state.mark()
        self._whole = True
        self._to_do = self._due()
        self._add(values)
        if self.schedule.ends_epoch(self.step):
            self._to_do.insert(0, "reference")
            await self.state.update_reference()
            self._done("reference")

    def _due(self) -> list[str]:
        """What is to be done about a step that was just learnt."""
        exports = self.intervals.due(self.intervals.hf_save_interval, self.step)
        return ["log", *(["export"] if exports else [])]

    def _last_good(self) -> str:
        """Names the newest checkpoint whose weights are known to be good: an update of theirs was finite."""
        first_bad = self.step + 1 if self.state.skipped.since is None else self.state.skipped.since
        found = self.state.newest_saved(first_bad - 1)
        if found is None:
            return "There is no checkpoint from before that."
        return f"The newest checkpoint from before that is {found}: resume from it with trainer.resume_mode=from_path."

    def _log_step(self) -> None:
        """Give the step's numbers and completions to the trackers."""
        values = self.metrics.flush()
        values["throughput/tokens_per_s"] = self._num_tokens(values) / values["timing/step_s"]
        values |= self._derived(values)
        if self.restarts:
            values |= {"trainer/restarts": float(self.restarts), "trainer/ranks": float(len(self.learner.policy))}
        self._record(values)
        if self.guards is not None:
            self.guards.check(values, self.step)
            self.state.mark()  # guards, too, count this step

    def _record(self, values: Mapping[str, float]) -> None:
        self.trackers.log(values, self.step)
        self.trackers.samples(self._samples, self.step)
        self.trackers.table(self._table, self.step)
        self._done("log")

    async def _export_and_save(self) -> None:
        """Export first: a run killed in between does it again, while one that saved its last step has nothing to do."""
        if "export" in self._to_do:
            await to_its_end(self.state.export(self.step))
            self._done("export")
        if self.intervals.due(self.intervals.ckpt_interval, self.step):
            await self.state.save(self.step)

    def _done(self, action: str) -> None:
        if action in self._to_do:
            self._to_do.remove(action)

    async def _leave(self, error: BaseException, started_at: int) -> None:
        """Record and save the last whole step of a run that ends early."""
        await self.learner.explain(error)
        if self.release is not None:
            await self.release()
        # A rank that writes in the background takes other calls: one that is stopped would hold up the writing.
        if self.state.async_checkpoint and not await self.learner.answers(_ANSWER_S):
            await self.state.give_up()
        try:
            await self.state.written()
        except Exception as failure:
            _log.error("The last checkpoint could not be written: %s", failure)
        row: dict[str, float] = {}
        if "log" in self._to_do:
            row = {name: float(value) for name, value in self.metrics.flush().items()}
            self._record(row)
        if self.step == started_at or (self.step == self.state.saved_step and not self._to_do):
            return
        if not self._whole or isinstance(error, NonFiniteWeights):
            return  # nobody has the weights of this step
        # Asked also of a run that is told to end: with a rank that is stopped a save would pass its deadline, and a
        # scheduler kills long before that. None is merely busy: scores, updates and exports are taken to their end.
        if not await self.learner.answers(_ANSWER_S):
            _log.error("Step %d is not saved: a rank of the trainer does not answer.", self.step)
            return
        try:
            await self.state.save(self.step, Unfinished(tuple(self._to_do), row))
            await self.state.written()
        except Exception as failure:
            _log.error("Step %d, the last whole one, could not be saved: %s", self.step, failure)

    def _add(self, values: dict[str, float]) -> None:
        for name, value in values.items():
            self.metrics.add(name, value)
