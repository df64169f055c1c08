"""The program `docker` of the tests. Its containers are folders of FAKE_DOCKER_ROOT; it logs its calls."""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
from contextlib import suppress
from pathlib import Path


def install(folder: Path) -> Path:
    """Write the program to a folder for PATH, and return the folder of its containers."""
    root = folder / "containers"
    root.mkdir(parents=True)
    program = folder / "bin" / "docker"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nFAKE_DOCKER_ROOT={root} exec {sys.executable} -S {__file__} "$@"\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return root


def calls(root: Path) -> list[list[str]]:
    """Return the arguments of all calls."""
    log = root.parent / "calls"
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def main() -> int:
    root, (name, *arguments) = Path(os.environ["FAKE_DOCKER_ROOT"]), sys.argv[1:]
    with (root.parent / "calls").open("a") as log:
        log.write(json.dumps(sys.argv[1:]) + "\n")
    match name:
        case "version":
            return 0
        case "run":
            if "missing-image" in arguments:
                print("Unable to find image 'missing-image' locally", file=sys.stderr)
                return 125
            (root / arguments[arguments.index("--name") + 1] / "work").mkdir(parents=True)
            return 0
        case "exec":
            env = {"PATH": os.environ["PATH"]}
            while arguments[0].startswith("--"):
                option, value, *arguments = arguments
                if option == "--env":
                    env[value] = os.environ[value]
            container, *command = arguments
            process = subprocess.Popen(command, cwd=root / container / "work", env=env, start_new_session=True)
            (root / container / "pid").write_text(str(process.pid))
            return process.wait()
        case "inspect":
            if not (root / arguments[-1]).exists():
                return 1
            print("true")
            return 0
        case "restart":
            _kill(root / arguments[-1])
            return 0
        case "cp":
            source, target = (Path(_resolve(root, word)) for word in arguments)
            if source.name == "." or source.is_dir():
                shutil.copytree(source, target, dirs_exist_ok=True)
            else:
                shutil.copy(source, target)
            return 0
        case "rm":
            folder = root / arguments[-1]
            _kill(folder)
            if not folder.exists():
                return 1
            shutil.rmtree(folder)
            return 0
    return 1


def _resolve(root: Path, word: str) -> str:
    container, _, path = word.partition(":")
    return f"{root}/{container}{path}" if path else word


def _kill(container: Path) -> None:
    if (container / "pid").exists():
        with suppress(ProcessLookupError):
            os.killpg(int((container / "pid").read_text()), signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
