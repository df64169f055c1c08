"""Profiles of the steps that trainer.profile_steps names, of every process that computes."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from skyrl_train.log_files import set_attempt_apart
from skyrl_train.tasks import gather_all

TABLE_FILE = "slowest.txt"
_log = logging.getLogger(__name__)


class StepProfiles:
    """Has processes profile themselves during some steps.

    `processes`: those of a moment; objects with a `name` and the coroutines `start_profile()` and `stop_profile(file)`,
    which returns a table. What goes wrong with a profile is a warning: the run goes on without it.
    """

    def __init__(self, steps: Collection[int], folder: Path, processes: Callable[[], Sequence[Any]]):
        """`steps`: as metrics.jsonl counts them, 1 is the first; `folder` gets a folder for each."""
        self._steps = frozenset(steps)
        self._folder = folder
        self._processes = processes

    @asynccontextmanager
    async def of(self, step: int) -> AsyncIterator[None]:
        """Inside, `step` is taken; it is profiled if it is one of those. If it raises, there is no profile of it."""
        folder = self._folder / f"step_{step}"
        if step not in self._steps or not _made(folder):
            yield
            return
        processes = self._processes()
        await gather_all(_profile_of(one, one.start_profile()) for one in processes)
        yield
        files = [folder.absolute() / f"{one.name.replace(' ', '_')}.json.gz" for one in processes]
        stops = [_profile_of(one, one.stop_profile(str(file))) for one, file in zip(processes, files, strict=True)]
        tables = await gather_all(stops)
        sections = [f"{one.name}\n{table}\n" for one, table in zip(processes, tables, strict=True) if table]
        try:
            (folder / TABLE_FILE).write_text("\n".join(sections))
        except OSError as error:
            _log.warning("%s cannot be written (%s).", folder / TABLE_FILE, error.strerror)


def _made(folder: Path) -> bool:
    """Whether there is a folder for a profile; one of an earlier attempt at the step is set apart."""
    try:
        set_attempt_apart(folder)
    except OSError as error:
        _log.warning("%s cannot be written (%s): there is no profile of this step.", folder, error.strerror)
        return False
    return True


async def _profile_of(process: Any, call: Awaitable[Any]) -> Any:
    """The result of a call; None if it fails, as where the process died or the disk is full."""
    try:
        return await call
    except Exception as error:
        _log.warning("%s has no profile of this step (%s: %s).", process.name, type(error).__name__, error)
        return None
