"""What of a run is at addresses: looked at before anything is started, and kept up to date while it lasts."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from skyrl_train.config.machine import data_sources, model_paths, why_not_writable
from skyrl_train.config.predicates import Uses
from skyrl_train.config.problems import Problem, raise_all
from skyrl_train.config.run_folder import identity
from skyrl_train.config.schema import Config
from skyrl_train.config.sources import is_address, split_of
from skyrl_train.errors import StorageError
from skyrl_train.report.phases import phase
from skyrl_train.storage.folder import StoredFolder
from skyrl_train.storage.mirror import Mirror
from skyrl_train.storage.places import working_folder
from skyrl_train.trainer.checkpoints import IDENTITY_FILE, RunDirectory, refuse_other_run

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Mirrors:
    """The mirrors of a run's two folders, for those that are at addresses."""

    run: Mirror | None = None
    exports: Mirror | None = None

    async def enter(self, stack: AsyncExitStack, directory: RunDirectory) -> RunDirectory:
        """Enter the run's folder beside the event loop, which hears signals meanwhile.

        Whether a process that has claimed the address still lives takes a while to see, and so do downloads.
        """
        entering = asyncio.ensure_future(asyncio.to_thread(stack.enter_context, directory))
        try:
            return await asyncio.shield(entering)
        except asyncio.CancelledError:
            if self.run is not None:
                self.run.stop()
            await asyncio.wait([entering])  # what it has entered, `stack` leaves
            raise

    @asynccontextmanager
    async def kept(self, deadline_s: float) -> AsyncIterator[None]:
        """Inside, they are kept up to date; on exit the last uploads are waited for.

        Raises StorageError for what could not be uploaded within `deadline_s`, unless something else went wrong before.
        """
        mirrors = [mirror for mirror in (self.run, self.exports) if mirror is not None]
        try:
            for mirror in mirrors:
                await asyncio.to_thread(mirror.start)
        except BaseException:
            for mirror in mirrors:
                mirror.stop()
            raise
        failed = True
        try:
            yield
            failed = False
        finally:
            deadline = time.monotonic() + deadline_s
            try:
                for mirror in mirrors:
                    with phase("upload", mirror.waits_for):
                        await asyncio.to_thread(mirror.finish, max(0.0, deadline - time.monotonic()))
            except StorageError as error:
                if not failed:
                    raise
                _log.error("%s", error)
            except asyncio.CancelledError:
                _log.warning("The last uploads were not waited for: the same command finishes them.")
                raise
            finally:
                for mirror in mirrors:
                    await asyncio.to_thread(mirror.stop)


NO_MIRRORS = Mirrors()


def mirrors_of(cfg: Config, run_folder: Path) -> Mirrors:
    """Those of a run that works in `run_folder`, which is that of trainer.ckpt_path or below it."""
    trainer = cfg.trainer
    run = exports = None
    if is_address(trainer.ckpt_path):
        below = run_folder.relative_to(working_folder(trainer.ckpt_path)).as_posix()
        address = trainer.ckpt_path.rstrip("/") + ("" if below == "." else f"/{below}")
        run = Mirror(run_folder, address, trainer.max_ckpts_to_keep)
    if is_address(trainer.export_path):
        exports = Mirror(working_folder(trainer.export_path), trainer.export_path, run=run)
    return Mirrors(run, exports)


def check_addresses(cfg: Config, uses: Uses) -> None:
    """Look whether data, models and the run's folder can be reached, before anything is started.

    Raises ConfigError for what is not there and for a folder of another run, StorageError for storage that refuses.
    """
    problems = []
    for key, source in data_sources(cfg, uses):
        if is_address(source):
            store = StoredFolder(split_of(source)[0])
            if store.itself() is None and not store.find():
                problems.append(Problem(key, source, "a file or a folder that exists", "Nothing is at this address."))
    for key, path in model_paths(cfg, uses):
        if is_address(path) and StoredFolder(path).read("config.json") is None:
            problems.append(Problem(key, path, "a model's folder", "There is no config.json at this address."))
    for name in ("ckpt_path", "export_path") if uses.learner else ():
        path = getattr(cfg.trainer, name)
        if not is_address(path):
            continue
        if (reason := why_not_writable(working_folder(path))) is not None:
            advice = f"{reason} Set SKYRL_CACHE to a folder that can be written."
            problems.append(Problem(f"trainer.{name}", path, "an address whose copy here can be written", advice))
        elif not StoredFolder(path).has_bucket():
            problems.append(Problem(f"trainer.{name}", path, "an address in a bucket that exists", "Make the bucket."))
    raise_all(problems)
    if uses.learner and is_address(cfg.trainer.ckpt_path):
        stored = StoredFolder(cfg.trainer.ckpt_path).read(IDENTITY_FILE)
        if stored is not None:
            refuse_other_run(cfg.trainer.ckpt_path, identity(cfg), stored)
