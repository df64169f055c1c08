"""A checkpoint that somebody names, whole and as files of this machine, with what its run says about itself."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skyrl_train.config.hydra import CONFIG_FILE
from skyrl_train.config.sources import is_address
from skyrl_train.errors import CheckpointError, ConfigError
from skyrl_train.report.jsonl import METRICS_FILE
from skyrl_train.storage.folder import StoredFolder
from skyrl_train.storage.manifests import MANIFEST_FILE, fetch_part
from skyrl_train.storage.places import cache_folder, check_address
from skyrl_train.trainer.checkpoints import STATE_FILE, Checkpoints, verify

_STEP = re.compile(r"global_step_(\d+)")


@dataclass(frozen=True)
class FoundCheckpoint:
    """Where a checkpoint's files are, and those of its run."""

    folder: Path
    run: Path
    """Has config.yaml and metrics.jsonl, if the run has left them."""
    state: dict[str, Any]
    """The contents of trainer_state.json."""

    @property
    def step(self) -> int:
        return int(self.state["global_step"])


@contextmanager
def checkpoint_at(place: str, parts: tuple[str, ...]) -> Iterator[FoundCheckpoint]:
    """The checkpoint RUN/global_step_N of a folder or an address, verified by SHA-256.

    Of one at an address only `parts`, the folders of its models, are downloaded, and deleted on exit. Raises
    ConfigError for a place that is no checkpoint, CheckpointError for a damaged one, StorageError.
    """
    if is_address(place):
        check_address(place)
        cache_folder().mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache_folder(), prefix="checkpoint-") as copy:
            yield _fetched(place.rstrip("/"), parts, Path(copy))
        return
    folder = Path(place).absolute()
    if not (folder / MANIFEST_FILE).is_file():
        raise _no_checkpoint(place, Checkpoints(folder).steps())
    if (damage := verify(folder)) is not None:
        raise CheckpointError(f"{folder} is damaged: {damage}. Name another checkpoint.")
    yield FoundCheckpoint(folder, folder.parent, _state_of(folder))


def _fetched(address: str, parts: tuple[str, ...], copy: Path) -> FoundCheckpoint:
    run, _, name = address.rpartition("/")
    store = StoredFolder(run)
    if store.read(f"{name}/{MANIFEST_FILE}") is None:
        whole = {file.removesuffix(f"/{MANIFEST_FILE}") for file in StoredFolder(address).find()}
        raise _no_checkpoint(address, sorted(int(match[1]) for file in whole if (match := _STEP.fullmatch(file))))
    below = (STATE_FILE, *(f"{part}/" for part in parts))
    if (problem := fetch_part(store, name, below, copy / name)) is not None:
        raise CheckpointError(f"{problem}. Name another checkpoint.")
    for file in (CONFIG_FILE, METRICS_FILE):
        store.get(file, copy / file)
    return FoundCheckpoint(copy / name, copy, _state_of(copy / name))


def _state_of(folder: Path) -> dict[str, Any]:
    """Return what the checkpoint says, which has a step, whatever its folder is called."""
    try:
        state: dict[str, Any] = json.loads((folder / STATE_FILE).read_text())
        return state | {"global_step": int(state["global_step"])}
    except (OSError, LookupError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise CheckpointError(f"{folder / STATE_FILE} does not say which step it is of ({error!r}).") from error


def _no_checkpoint(place: str, steps: list[int]) -> ConfigError:
    there = ", ".join(f"global_step_{step}" for step in steps)
    return ConfigError(
        f"{place!r} is no checkpoint: give RUN/global_step_N of a finished save. "
        + (f"There are {there}." if there else "There is none in it either.")
    )
