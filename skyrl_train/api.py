"""What a program of your own does with this package: load_config, check, train, session, read_rollouts, engine."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import logging
import os
import re
import signal
from collections.abc import AsyncIterator, Coroutine, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING, Any, TypeVar

from hydra.core.override_parser.types import Quote, QuotedString

from skyrl_train.config.choices import ENGINES
from skyrl_train.config.local_checks import INSTALL_COMMANDS, find_missing_resources
from skyrl_train.config.prepare import prepare_config
from skyrl_train.config.problems import raise_problems
from skyrl_train.config.schema import Config
from skyrl_train.errors import ConfigError, DataError, RunInterrupted
from skyrl_train.experiment.base import Experiment, Session, raise_root_cause, required_components
from skyrl_train.experiment.driver import run_until_signaled
from skyrl_train.experiment.plugins import check_plugins
from skyrl_train.registry import load_object, unknown_name_message
from skyrl_train.report.jsonl import METRICS_FILE, read_metrics

if TYPE_CHECKING:
    from skyrl_train.engines.base import InferenceEngine

log = logging.getLogger("skyrl_train")

T = TypeVar("T")
_THREAD_START_S = 5.0
"""A thread that has not begun by then was interrupted before it was made."""


@dataclass(frozen=True)
class TrainingResult:
    """What `train` leaves."""

    directory: Path
    """The run's folder on this machine (trainer.ckpt_path, if that is no address): checkpoints, metrics.jsonl,
    samples.jsonl, config.yaml."""
    step: int
    """Finished training steps, those of earlier starts of the same run included."""

    def metrics(self) -> list[dict[str, Any]]:
        """The run's records: {"step": 3, "reward/mean": 0.5, ...} per step."""
        return read_metrics(self.directory / METRICS_FILE)

    def rollouts(self, steps: Iterable[int] | None = None, columns: Sequence[str] | None = None) -> Any:
        """The rollouts that the run has kept as a `datasets.Dataset`, see `skyrl_train.read_rollouts`."""
        return read_rollouts(self.directory, steps, columns)


def read_rollouts(
    run: str | PathLike[str], steps: Iterable[int] | None = None, columns: Sequence[str] | None = None
) -> Any:
    """What a run kept of its rollouts (`trainer.keep_rollouts`) as a `datasets.Dataset`, one row each.

    Args:
        run: Its folder, of a run that is under way or has ended, or a copy of it.
        steps: All that are there by default.
        columns: Of those in docs/rollouts.md; all by default. A few are read much faster.

    Raises:
        ConfigError: for a column that there is not.
        DataError: for a folder without rollouts, or with a file that cannot be read.
    """
    from skyrl_train.data.dataset import to_hf_dataset
    from skyrl_train.report.rollout_files import RolloutReader

    files = RolloutReader(Path(run))
    if not files.steps():
        raise DataError(f"{run}: no rollouts are kept here: a run's folder has some with trainer.keep_rollouts.")
    try:
        return to_hf_dataset(files.table(steps, columns))
    except OSError as error:
        raise DataError(f"{run}: its rollouts cannot be read: {error}") from error
    except ValueError as error:
        raise ConfigError(str(error)) from error


def load_config(
    overrides: Mapping[str, Any] | Sequence[str] = (), *, preset: str | None = None, config_dir: str | None = None
) -> Config:
    """A checked configuration, frozen, fitted to this machine's device.

    Names that the program has registered (`skyrl_train.register`) are accepted, and so are keys of its own below
    `generator` and `environment` if they begin with a plus. Notes (a default was fitted to the device) and warnings
    (a key has no effect here) go to the logger "skyrl_train". Texts are resolved as on the command line, where "${...}"
    refers to another key or to the environment. Imports neither torch nor Ray.

    Args:
        overrides: {"trainer.max_steps": 20, ...}, or the command line's ["trainer.max_steps=20", ...].
        preset: Name of a YAML file in `config_dir`, or of one that this package brings; None is the defaults.
        config_dir: A folder with YAML files of your own.

    Raises:
        ConfigError: lists every problem at once, each with key, value and what is allowed.
    """
    if isinstance(overrides, Mapping):
        overrides = [f"{key}={_hydra_text(key, value)}" for key, value in overrides.items()]
    overrides = [overrides] if isinstance(overrides, str) else list(overrides)
    for override in overrides:
        if not isinstance(override, str) or override.startswith("-"):
            raise ConfigError(f"{override!r}: must be text, key=value; flags are arguments here: preset, config_dir.")
    flags = {"--config-name": preset, "--config-dir": config_dir}
    prepared = prepare_config(
        [*overrides, *(f"{flag}={value}" for flag, value in flags.items() if value)], has_user_code=True
    )
    for note in prepared.notes:
        log.info(note)
    for warning in prepared.warnings:
        log.warning(warning)
    return prepared.config


def check(cfg: Config, experiment: type[Experiment] = Experiment) -> None:
    """Look for everything that a run needs on this machine, without starting it.

    Data, models, the engine's package, slots, folders and tokens; then plugins and registered names; then whether the
    models can be trained and served, and tokenizer and data fit them. `train` and `session` do it by themselves.

    Raises:
        ConfigError: Lists everything that is missing at once.
        StorageError: An address cannot be reached.
    """
    from skyrl_train.experiment.preflight import check_run

    components = required_components(experiment)
    raise_problems(find_missing_resources(cfg, components))
    check_plugins(cfg)
    check_run(cfg, components)


def train(cfg: Config, experiment: type[Experiment] = Experiment) -> TrainingResult:
    """Start everything, train to the last step, stop everything; from a script or from a notebook's cell.

    Blocks, also where an event loop is running; `session` is for programs that do other things meanwhile. Ctrl-C (also
    in a notebook), SIGTERM and SIGHUP save the last whole step and stop everything. In a script a second one ends the
    process at once; in a notebook's cell it is not heard until everything has stopped.

    Args:
        experiment: A subclass of Experiment for runs with parts of their own.

    Raises:
        ConfigError: for what is wrong or missing; most of it is known before anything is started.
        SkyRLError: why a run had to stop; Stopped after SIGTERM or SIGHUP. Whatever is raised, nothing is left running.
        KeyboardInterrupt: after Ctrl-C.
    """
    _check_is_training(experiment)
    raise_problems(find_missing_resources(cfg, required_components(experiment)))
    run = experiment(cfg)
    try:
        with raise_root_cause(run):
            return _run_blocking(run_until_signaled(_train(run), run.cluster.wait_until_lost()))
    except RunInterrupted as stopped:
        if stopped.signal == signal.SIGINT:
            raise KeyboardInterrupt from stopped
        raise


def _check_is_training(experiment: type[Experiment]) -> None:
    if experiment.run is not Experiment.run or experiment._run is not Experiment._run:
        raise ConfigError(
            f"{experiment.__name__} has a run of its own, which is no training with rewards: start it with "
            f"run_experiment({experiment.__name__}, argv), or override the get_* methods instead."
        )


async def _train(experiment: Experiment) -> TrainingResult:
    async with experiment.session() as run:
        await experiment.fit(run)
        return TrainingResult(run.directory, run.trainer.step)


@asynccontextmanager
async def session(cfg: Config, experiment: type[Experiment] = Experiment) -> AsyncIterator[Session]:
    """A run that has started and is yours to drive: its client, learner, trainer, environments and tokenizer.

    `await run.trainer.fit()` trains. On exit everything that was started is stopped. Ray and the data are started
    before the first `await`, in the caller's thread, which must be the main one.

    Raises:
        ConfigError: for what is wrong or missing, with nothing left running.
    """
    _check_is_training(experiment)
    raise_problems(find_missing_resources(cfg, required_components(experiment)))
    async with experiment(cfg).session() as run:
        yield run


@asynccontextmanager
async def engine(model: str, backend: str = "transformers", **options: Any) -> AsyncIterator[InferenceEngine]:
    """An inference engine in this process, without Ray: to sample and score by token ids.

    Args:
        model: A Hugging Face model: a folder, or a name on the hub.
        backend: transformers, vllm or sglang.
        options: What the engine's class takes: device ("cpu", "cuda"), dtype, max_num_seqs, max_model_len, ...

    Raises:
        ConfigError: for an unknown backend, or one that is not installed.
    """
    if backend not in ENGINES:
        raise ConfigError(unknown_name_message("engine", backend, sorted(ENGINES)))
    if backend in INSTALL_COMMANDS and importlib.util.find_spec(backend) is None:
        raise ConfigError(f"backend={backend!r} is not installed: {INSTALL_COMMANDS[backend]}.")
    made: InferenceEngine = load_object(ENGINES[backend])(model=model, **options)
    try:
        yield made
    finally:
        await made.close()


def _hydra_text(key: str, value: Any) -> str:
    """A value as it stands on a command line that Hydra reads. Raises ConfigError for what it cannot write there."""
    if hasattr(value, "tolist"):  # numpy's and torch's numbers and arrays
        value = value.tolist()
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, str | PathLike):
        return QuotedString(os.fspath(value), Quote.single).with_quotes()
    if isinstance(value, int | float):
        return repr(value + 0)  # an IntEnum as its number
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{_hydra_key(key, name)}:{_hydra_text(key, item)}" for name, item in value.items()) + "}"
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        return "[" + ",".join(_hydra_text(key, item) for item in value) + "]"
    raise ConfigError(
        f"{key}={value!r}: must be a number, text, path, bool, None, a list or a mapping, not {type(value).__name__}."
    )


def _hydra_key(key: str, name: Any) -> str:
    if not isinstance(name, str) or not re.fullmatch(r"[\w.+@/-]+", name):
        raise ConfigError(f"{key}: the name {name!r} in its mapping must be a text of letters, digits and _ . + @ / -.")
    return name


def _run_blocking(task: Coroutine[Any, Any, T]) -> T:
    """The result, from a thread of its own if this one has a running event loop (a notebook's cell)."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        inside_a_loop = False
    else:
        inside_a_loop = True
    return _in_another_thread(task) if inside_a_loop else asyncio.run(task)


def _in_another_thread(task: Coroutine[Any, Any, T]) -> T:
    """Whatever interrupts the waiting (Ctrl-C, a time limit of the cell) cancels the task, and waits for its end."""
    loop = asyncio.new_event_loop()
    running = loop.create_task(task)
    begun, ended = Event(), Event()  # not Thread.join: a join that an exception interrupts takes the thread for ended

    def run() -> None:
        begun.set()
        try:
            with suppress(BaseException):  # it is the task's, for the thread that waits
                loop.run_until_complete(running)
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.run_until_complete(loop.shutdown_default_executor())
        finally:
            loop.close()
            ended.set()

    try:
        Thread(target=run, name="skyrl-train").start()
        while not ended.wait(0.1):  # a wait without an end would not hear a signal
            pass
    except BaseException:
        with suppress(RuntimeError):  # it has just ended
            loop.call_soon_threadsafe(running.cancel)
        # Another interruption would leave the run behind, which goes on closing what the next one may be using.
        while not ended.is_set():
            with suppress(KeyboardInterrupt):
                if not begun.wait(_THREAD_START_S):
                    break
                ended.wait(0.1)
        raise
    return running.result()
