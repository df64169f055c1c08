"""What a program of your own does with this package: load_config, check, train, session, engine."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import logging
import os
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any, TypeVar

from hydra.core.override_parser.types import Quote, QuotedString

from skyrl_train.config.choices import ENGINES
from skyrl_train.config.prepare import prepare
from skyrl_train.config.presence import INSTALL, missing
from skyrl_train.config.problems import raise_all
from skyrl_train.config.schema import Config
from skyrl_train.entrypoints.main_base import BasePPOExp, Session, used_by
from skyrl_train.errors import ConfigError
from skyrl_train.registry import load_object, unknown
from skyrl_train.report.jsonl import METRICS_FILE, read_jsonl

if TYPE_CHECKING:
    from skyrl_train.engines.base import InferenceEngine

log = logging.getLogger("skyrl_train")

T = TypeVar("T")


@dataclass(frozen=True)
class TrainingResult:
    """What `train` leaves."""

    directory: Path
    """The run's folder (trainer.ckpt_path): checkpoints, metrics.jsonl, samples.jsonl, config.yaml."""
    step: int
    """Finished training steps, those of earlier starts of the same run included."""

    def metrics(self) -> list[dict[str, Any]]:
        """The run's records: {"step": 3, "reward/mean": 0.5, ...} per step."""
        return read_jsonl(self.directory / METRICS_FILE)


def load_config(
    overrides: Mapping[str, Any] | Sequence[str] = (), *, preset: str | None = None, config_dir: str | None = None
) -> Config:
    """A checked configuration, frozen, fitted to this machine's device.

    Names that the program has registered (`skyrl_train.register`) are accepted, and so are keys of its own below
    `generator` and `environment` if they begin with a plus. Notes (a default was fitted to the device) and warnings
    (a key has no effect here) go to the logger "skyrl_train". Imports neither torch nor Ray.

    Args:
        overrides: {"trainer.max_steps": 20, ...}, or the command line's ["trainer.max_steps=20", ...].
        preset: Name of a YAML file in `config_dir`, or of one that this package brings; None is the defaults.
        config_dir: A folder with YAML files of your own.

    Raises:
        ConfigError: lists every problem at once, each with key, value and what is allowed.
    """
    if isinstance(overrides, Mapping):
        overrides = [f"{key}={_hydra_text(value)}" for key, value in overrides.items()]
    flags = {"--config-name": preset, "--config-dir": config_dir}
    prepared = prepare([*overrides, *(f"{flag}={value}" for flag, value in flags.items() if value)], own_code=True)
    for note in prepared.notes:
        log.info(note)
    for warning in prepared.warnings:
        log.warning(warning)
    return prepared.config


def check(cfg: Config, experiment: type[BasePPOExp] = BasePPOExp) -> None:
    """Look for everything that a run needs on this machine, without starting it.

    Data, models, the engine's package, plugins, registered names, slots. `train` and `session` do it by themselves.

    Raises:
        ConfigError: lists everything that is missing at once.
    """
    from skyrl_train.assembly.names import check_plugins

    raise_all(missing(cfg, used_by(experiment)))
    check_plugins(cfg)


def train(cfg: Config, experiment: type[BasePPOExp] = BasePPOExp) -> TrainingResult:
    """Start everything, train to the last step, stop everything; from a script or from a notebook's cell.

    Blocks. In a program with an event loop of its own, `session` does not.

    Args:
        experiment: A subclass of BasePPOExp for runs with parts of their own.

    Raises:
        ConfigError: before anything is started.
        SkyRLError: why a run had to stop.
    """
    check(cfg, experiment)
    return _wait_for(_train(experiment(cfg)))


async def _train(experiment: BasePPOExp) -> TrainingResult:
    async with experiment.session() as run:
        await run.trainer.fit()
        return TrainingResult(run.directory, run.trainer.step)


@asynccontextmanager
async def session(cfg: Config, experiment: type[BasePPOExp] = BasePPOExp) -> AsyncIterator[Session]:
    """A run that has started and is yours to drive: its client, learner, trainer, environments and tokenizer.

    `await run.trainer.fit()` trains. On exit everything that was started is stopped.

    Raises:
        ConfigError: before anything is started.
    """
    check(cfg, experiment)
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
        raise ConfigError(unknown("engine", backend, sorted(ENGINES)))
    if backend in INSTALL and importlib.util.find_spec(backend) is None:
        raise ConfigError(f"backend={backend!r} is not installed: {INSTALL[backend]}.")
    made: InferenceEngine = load_object(ENGINES[backend])(model=model, **options)
    try:
        yield made
    finally:
        await made.close()


def _hydra_text(value: Any) -> str:
    """A value as it stands on a command line that Hydra reads."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, str | PathLike):
        return QuotedString(os.fspath(value), Quote.single).with_quotes()
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{_hydra_text(item)}" for key, item in value.items()) + "}"
    if isinstance(value, Sequence):
        return "[" + ",".join(map(_hydra_text, value)) + "]"
    return repr(value)


def _wait_for(task: Coroutine[Any, Any, T]) -> T:
    """The result, from a thread of its own where this one has a running event loop (a notebook's cell)."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(task)
    return _in_another_thread(task)


def _in_another_thread(task: Coroutine[Any, Any, T]) -> T:
    result: Future[T] = Future()
    started: Future[tuple[asyncio.AbstractEventLoop, asyncio.Task[T]]] = Future()

    async def supervised() -> T:
        current = asyncio.current_task()
        assert current is not None
        started.set_result((asyncio.get_running_loop(), current))
        return await task

    def run() -> None:
        try:
            result.set_result(asyncio.run(supervised()))
        except BaseException as error:
            result.set_exception(error)

    thread = Thread(target=run, name="skyrl-train")
    thread.start()
    try:
        return result.result()
    except KeyboardInterrupt:  # the cell was interrupted: the run ends as it does on Ctrl-C, then the cell
        loop, running = started.result()
        loop.call_soon_threadsafe(running.cancel)
        raise
    finally:
        thread.join()
