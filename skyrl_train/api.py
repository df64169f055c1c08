"""Entry points for your own programs: load_config, check, train, session, read_rollouts, engine."""

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
"""Seconds after which a thread that has not started was interrupted before it was created."""


@dataclass(frozen=True)
class TrainingResult:
    """Result of `train`: the run's folder and its last step."""

    directory: Path
    """The run's folder on this machine, with checkpoints, metrics.jsonl, samples.jsonl and config.yaml. It is
    trainer.ckpt_path, unless that is a URI.
    """
    step: int
    """Completed training steps, including those of earlier starts of the same run."""

    def metrics(self) -> list[dict[str, Any]]:
        """Read the metrics of the run: {"step": 3, "reward/mean": 0.5, ...} per step.

        Raises:
            OSError: metrics.jsonl is missing or cannot be read.
        """
        return read_metrics(self.directory / METRICS_FILE)

    def rollouts(self, steps: Iterable[int] | None = None, columns: Sequence[str] | None = None) -> Any:
        """Read the rollouts that the run has kept, as `skyrl_train.read_rollouts` does.

        Args:
            steps: Steps to read; None for all.
            columns: Columns to read; None for all.

        Returns:
            A `datasets.Dataset` with one row per rollout.

        Raises:
            DataError: The run kept no rollouts, or they cannot be read.
            ConfigError: A column is unknown.
        """
        return read_rollouts(self.directory, steps, columns)


def read_rollouts(
    run: str | PathLike[str], steps: Iterable[int] | None = None, columns: Sequence[str] | None = None
) -> Any:
    """Read the rollouts that a run has kept (`trainer.keep_rollouts`).

    Args:
        run: Folder of the run, which may still be running, or a copy of it.
        steps: Steps to read; all by default.
        columns: Columns to read, from those in docs/guides/rollouts.md; all by default. Reading a few is much faster.

    Returns:
        A `datasets.Dataset` with one row per rollout.

    Raises:
        ConfigError: A column does not exist.
        DataError: The folder has no rollouts, or a file cannot be read.
    """
    from skyrl_train.data.dataset import to_hf_dataset
    from skyrl_train.report.rollout_files import RolloutReader

    files = RolloutReader(Path(run))
    if not files.steps():
        raise DataError(f"{run}: this folder has no rollouts. A run keeps them if trainer.keep_rollouts is set.")
    try:
        return to_hf_dataset(files.table(steps, columns))
    except OSError as error:
        raise DataError(f"{run}: its rollouts cannot be read: {error}") from error
    except ValueError as error:
        raise ConfigError(str(error)) from error


def load_config(
    overrides: Mapping[str, Any] | Sequence[str] = (), *, preset: str | None = None, config_dir: str | None = None
) -> Config:
    """Return a checked, frozen configuration, adapted to this machine's device.

    Names that the program has registered (`skyrl_train.register`) are allowed, and so are its own keys below
    `generator` and `environment` if they begin with a plus. Notes (a default was adapted to the device) and warnings
    (a key has no effect) go to the logger "skyrl_train". "${...}" in strings refers to another key or to the
    environment, as on the command line. Imports neither torch nor Ray.

    Args:
        overrides: {"trainer.max_steps": 20, ...}, or arguments as on the command line, ["trainer.max_steps=20", ...].
        preset: Name of a YAML file in `config_dir` or of a preset of this package. None means the defaults.
        config_dir: Folder with your own YAML files; None uses only the package's presets.

    Raises:
        ConfigError: Lists all problems at once, each with key, value and what is allowed.
    """
    if isinstance(overrides, Mapping):
        overrides = [f"{key}={_hydra_text(key, value)}" for key, value in overrides.items()]
    overrides = [overrides] if isinstance(overrides, str) else list(overrides)
    for override in overrides:
        if not isinstance(override, str) or override.startswith("-"):
            raise ConfigError(
                f"{override!r}: must be a string of the form key=value. Pass flags as arguments: preset, config_dir."
            )
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
    """Check everything that a run needs on this machine, without starting the run.

    Checks data, models, the engine's package, GPUs, folders and tokens; then plugins and registered names; then if the
    models can be trained and served, and if tokenizer and data fit them. `train` and `session` run these checks
    themselves.

    Args:
        cfg: Configuration of the run.
        experiment: Experiment class of the run.

    Raises:
        ConfigError: Lists everything that is missing at once.
        StorageError: Remote storage cannot be reached.
    """
    from skyrl_train.experiment.preflight import check_run

    components = required_components(experiment)
    raise_problems(find_missing_resources(cfg, components))
    check_plugins(cfg)
    check_run(cfg, components)


def train(cfg: Config, experiment: type[Experiment] = Experiment) -> TrainingResult:
    """Train to the last step, from a script or a notebook's cell, and stop everything that was started.

    Blocks, even if an event loop is running; use `session` for programs that do other things at the same time. Ctrl-C
    (also in a notebook), SIGTERM and SIGHUP save the last complete step and stop everything. In a script a second
    signal ends the process immediately; in a notebook's cell it has no effect until everything has stopped.

    Args:
        cfg: Configuration of the run.
        experiment: Subclass of Experiment that replaces parts of the run.

    Returns:
        The run's folder and its last step.

    Raises:
        ConfigError: Something is wrong or missing; most of it is found before anything is started.
        SkyRLError: The run had to stop; RunInterrupted after SIGTERM or SIGHUP. Nothing is left running, whatever is
            raised.
        KeyboardInterrupt: After Ctrl-C.
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
            f"{experiment.__name__} overrides run, so it is not a training with rewards. Start it with "
            f"run_experiment({experiment.__name__}, argv), or override the get_* methods instead."
        )


async def _train(experiment: Experiment) -> TrainingResult:
    async with experiment.session() as run:
        await experiment.fit(run)
        return TrainingResult(run.directory, run.trainer.step)


@asynccontextmanager
async def session(cfg: Config, experiment: type[Experiment] = Experiment) -> AsyncIterator[Session]:
    """Start a run that the caller drives: its client, learner, trainer, environments and tokenizer.

    `await run.trainer.fit()` trains. Everything that was started is stopped on exit. Ray and the data are started
    before the first `await`, in the caller's thread, which must be the main thread.

    Args:
        cfg: Configuration of the run.
        experiment: Subclass of Experiment that replaces parts of the run.

    Raises:
        ConfigError: Something is wrong or missing. Nothing is left running.
    """
    _check_is_training(experiment)
    raise_problems(find_missing_resources(cfg, required_components(experiment)))
    async with experiment(cfg).session() as run:
        yield run


@asynccontextmanager
async def engine(model: str, backend: str = "transformers", **options: Any) -> AsyncIterator[InferenceEngine]:
    """Start an inference engine in this process, without Ray, to sample and score token ids. It is closed on exit.

    Args:
        model: Hugging Face model: a folder, or a name on the hub.
        backend: transformers, vllm or sglang.
        options: Arguments of the engine's class: device ("cpu", "cuda"), dtype, max_num_seqs, max_model_len, ...

    Raises:
        ConfigError: The backend is unknown or not installed.
    """
    if backend not in ENGINES:
        raise ConfigError(unknown_name_message("engine", backend, sorted(ENGINES)))
    if backend in INSTALL_COMMANDS and importlib.util.find_spec(backend) is None:
        raise ConfigError(f"backend={backend!r} is not installed: {INSTALL_COMMANDS[backend]}.")
    instance: InferenceEngine = load_object(ENGINES[backend])(model=model, **options)
    try:
        yield instance
    finally:
        await instance.close()


def _hydra_text(key: str, value: Any) -> str:
    """Return a value as Hydra reads it on a command line.

    Raises:
        ConfigError: The value has a type that Hydra cannot read.
    """
    if hasattr(value, "tolist"):  # numbers and arrays of numpy and torch
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
        f"{key}={value!r}: must be a number, string, path, bool, None, list or mapping, not {type(value).__name__}."
    )


def _hydra_key(key: str, name: Any) -> str:
    if not isinstance(name, str) or not re.fullmatch(r"[\w.+@/-]+", name):
        raise ConfigError(
            f"{key}: the name {name!r} in its mapping must be a string of letters, digits and _ . + @ / -."
        )
    return name


def _run_blocking(task: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine and return its result, in another thread if this one has a running event loop (a notebook's
    cell).
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        has_running_loop = False
    else:
        has_running_loop = True
    return _run_in_thread(task) if has_running_loop else asyncio.run(task)


def _run_in_thread(task: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in another thread. An interruption of the wait (Ctrl-C, a time limit of the cell) cancels it and
    waits for its end.
    """
    loop = asyncio.new_event_loop()
    running = loop.create_task(task)
    # Events instead of Thread.join: an interrupted join takes the thread for ended.
    started, ended = Event(), Event()

    def run() -> None:
        started.set()
        try:
            with suppress(BaseException):  # the waiting thread raises it from the task
                loop.run_until_complete(running)
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.run_until_complete(loop.shutdown_default_executor())
        finally:
            loop.close()
            ended.set()

    try:
        Thread(target=run, name="skyrl-train").start()
        while not ended.wait(0.1):  # a wait without a limit would block signals
            pass
    except BaseException:
        with suppress(RuntimeError):  # the loop has just been closed
            loop.call_soon_threadsafe(running.cancel)
        # Another interruption must not abandon the run, which still closes things that the next run may use.
        while not ended.is_set():
            with suppress(KeyboardInterrupt):
                if not started.wait(_THREAD_START_S):
                    break
                ended.wait(0.1)
        raise
    return running.result()
