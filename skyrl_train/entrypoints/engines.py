"""skyrl-train engines add N FOLDER | remove N FOLDER: more or fewer engines for a run under way.

FOLDER is the run's (trainer.ckpt_path). Newcomers are started beside the run, on free slots of its Ray cluster, and get
the current weights before any request; those that leave answer what they have. The run says when each has come or
gone; `engines/count` is their number. It is what a file in the folder asks for, engines.json, which can be written by
hand, too. A run that is resumed has the number of its configuration again; one that starts its ranks
again by itself (trainer.restarts) has the number that was asked for last.
"""

from __future__ import annotations

import fcntl
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from skyrl_train.engines.target_count import (
    ENGINES_FILE,
    fixed_count_reason,
    lock_target_file,
    read_target,
    write_target,
)
from skyrl_train.errors import ConfigError
from skyrl_train.storage.uris import resolve_local_folder
from skyrl_train.terminal import print_stderr

_LOCK_FILE, _CONFIG_FILE = ".lock", "config.yaml"


def main(arguments: Sequence[str] | None = None) -> None:
    given = list(sys.argv[1:] if arguments is None else arguments)
    if {"-h", "--help"} & set(given):
        print(__doc__)
        return
    try:
        action, by, folder = _parse_arguments(given)
        before, after = change_target_count(folder, by if action == "add" else -by)
    except ConfigError as error:
        print_stderr(f"skyrl-train engines: {error}")
        sys.exit(2)
    print(f"{before} -> {after} engines are wanted; the run says when they have come or gone.")


def change_target_count(folder: Path, by: int) -> tuple[int, int]:
    """Ask the run in `folder` for so many engines more; returns the number wanted before and now.

    Raises ConfigError if there is no such run, none under way, one whose engines are fixed, or too few would be left.
    """
    file = folder / _CONFIG_FILE
    if not file.is_file():
        raise ConfigError(f"{str(folder)!r} is no run's folder: it has no {_CONFIG_FILE}. Give a trainer.ckpt_path.")
    if not _is_running(folder):
        raise ConfigError(
            f"no run is under way in {str(folder)!r}. Start it with generator.num_inference_engines=N instead."
        )
    if (fixed := _fixed_count_reason(yaml.safe_load(file.read_text()))) is not None:
        raise ConfigError(f"the number of engines of the run in {str(folder)!r} is fixed: {fixed}")
    with lock_target_file(folder):
        try:
            before = read_target(folder)
        except FileNotFoundError:
            raise ConfigError(
                f"the run in {str(folder)!r} has no {ENGINES_FILE}: it is only starting, or does not train with "
                "engines. Ask again when it has said its first step."
            ) from None
        if before + by < 1:
            raise ConfigError(
                f"remove {-by}: {before} are wanted now, and a run has at least one. Remove at most {before - 1}."
            )
        write_target(folder, before + by)
    return before, before + by


def _parse_arguments(given: Sequence[str]) -> tuple[str, int, Path]:
    """What to do, with how many, where. Raises ConfigError."""
    if len(given) == 3 and given[0] in ("add", "remove"):
        with suppress(ValueError):
            if (number := int(given[1])) >= 1:
                return given[0], number, resolve_local_folder(given[2])
    raise ConfigError(
        f"got {' '.join(given)!r}. It takes add N FOLDER or remove N FOLDER: a whole number of at least 1, and the "
        "folder of the run."
    )


def _is_running(folder: Path) -> bool:
    """Whether a run has locked its folder."""
    try:
        with (folder / _LOCK_FILE).open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False
    return False


def _fixed_count_reason(config: Mapping[str, Any]) -> str | None:
    return fixed_count_reason(
        colocate_all=config["trainer"]["placement"]["colocate_all"],
        run_engines_locally=config["generator"]["run_engines_locally"],
    )


if __name__ == "__main__":
    main()
