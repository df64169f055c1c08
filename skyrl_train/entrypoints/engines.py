"""skyrl-train engines add N FOLDER | remove N FOLDER: change the number of engines of a running run.

FOLDER is the run's folder (trainer.ckpt_path). New engines are started on free slots of the run's Ray cluster and get
the current weights before any request. Engines that leave answer the requests that they have. The run prints when each
engine has joined or left; `engines/count` is their number. The command writes engines.json in the folder, which can
also be edited by hand. A run that is resumed starts with the number of its configuration again; one that restarts its
ranks by itself (trainer.restarts) keeps the last number.
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
    """Run the command with these arguments, by default those of the process.

    Raises:
        SystemExit: With 2 for wrong arguments, or if the number of engines cannot be changed.
    """
    argv = list(sys.argv[1:] if arguments is None else arguments)
    if {"-h", "--help"} & set(argv):
        print(__doc__)
        return
    try:
        action, number, folder = _parse_arguments(argv)
        before, after = change_target_count(folder, number if action == "add" else -number)
    except ConfigError as error:
        print_stderr(f"skyrl-train engines: {error}")
        sys.exit(2)
    print(f"Target number of engines: {before} -> {after}. The run prints when they have joined or left.")


def change_target_count(folder: Path, change: int) -> tuple[int, int]:
    """Add `change` to the target number of engines of the run in `folder`.

    Returns:
        The target number before and after.

    Raises:
        ConfigError: The folder is not a run's, the run is not running or has not started its engines, its number of
            engines is fixed, or less than one engine would be left.
    """
    file = folder / _CONFIG_FILE
    if not file.is_file():
        raise ConfigError(
            f"{str(folder)!r} is not a run's folder: it has no {_CONFIG_FILE}. Give the run's trainer.ckpt_path."
        )
    if not _is_running(folder):
        raise ConfigError(
            f"no run is running in {str(folder)!r}. Start it with generator.num_inference_engines=N instead."
        )
    if (reason := _fixed_count_reason(yaml.safe_load(file.read_text()))) is not None:
        raise ConfigError(f"The number of engines of the run in {str(folder)!r} is fixed: {reason}")
    with lock_target_file(folder):
        try:
            before = read_target(folder)
        except FileNotFoundError:
            raise ConfigError(
                f"The run in {str(folder)!r} has no {ENGINES_FILE}: it is still starting, or does not train with "
                "engines. Try again when it has printed its first step."
            ) from None
        if before + change < 1:
            raise ConfigError(
                f"remove {-change}: the target is {before} engines, and a run needs at least one. Remove at most "
                f"{before - 1}."
            )
        write_target(folder, before + change)
    return before, before + change


def _parse_arguments(argv: Sequence[str]) -> tuple[str, int, Path]:
    """Return the action, the number of engines and the folder. Raises ConfigError for anything else."""
    if len(argv) == 3 and argv[0] in ("add", "remove"):
        with suppress(ValueError):
            if (number := int(argv[1])) >= 1:
                return argv[0], number, resolve_local_folder(argv[2])
    raise ConfigError(
        f"got {' '.join(argv)!r}. Give 'add N FOLDER' or 'remove N FOLDER': N is the number of engines to add or "
        "remove, at least 1, and FOLDER is the folder of the run."
    )


def _is_running(folder: Path) -> bool:
    """True if a run has locked its folder."""
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
