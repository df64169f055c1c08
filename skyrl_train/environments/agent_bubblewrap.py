"""Bubblewrap around commands of agents: its arguments, and a check that it runs them on this machine."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from skyrl_train.config.problems import Problem, raise_problems
from skyrl_train.environments.placeholders import find_placeholders
from skyrl_train.environments.tools.sandbox import unprivileged_user
from skyrl_train.errors import ConfigError

KEY = "environment.skyrl_gym.agent"
PATHS_KEY = f"{KEY}.sandbox.paths"
PATH = "/usr/local/bin:/usr/bin:/bin"
"""Variable PATH of commands, unless their settings replace it."""
PYTHON = "/usr/bin/python3"
_LINKS = ("bin", "lib", "lib64", "sbin")
"""Folders of / that are links into /usr."""
_SYSTEM = ("/etc/ssl", "/etc/ld.so.cache", "/etc/alternatives")
_MAX_LINKS = 40
"""Links of a path that Linux follows."""
_FIND_MISSING = """
import json, os, shutil, sys
missing = {}
for program in sys.argv[1:]:
    found = shutil.which(program)
    words = []
    if found:
        try:
            with open(found, "rb") as file:
                line = file.readline(500)
            words = line[2:].split() if line.startswith(b"#!") else []
        except OSError:
            pass
    if not found or (words and not os.access(words[0], os.X_OK)):
        missing[program] = os.fsdecode(words[0]) if words else program
print(json.dumps(missing))
"""
"""Prints the programs that cannot be started in the sandbox, with the file that is missing: it or its interpreter."""


def visible_paths(sandbox: Mapping[str, Any]) -> list[str]:
    """Return the absolute paths that are visible in addition to the system's.

    Args:
        sandbox: The section `environment.skyrl_gym.agent.sandbox`.
    """
    return [os.path.abspath(path) for path in sandbox.get("paths") or ()]


def isolation_arguments(paths: Sequence[str]) -> list[str]:
    """Return the arguments of bubblewrap that isolate a command, and show /usr and these paths.

    Args:
        paths: Absolute paths, which must exist.
    """
    links = [
        word for name in _LINKS if Path("/usr", name).exists() for word in ("--symlink", f"usr/{name}", f"/{name}")
    ]
    system = [name for name in _SYSTEM if os.path.exists(name)]
    return [
        *("--unshare-all", "--unshare-user", "--disable-userns", "--die-with-parent", "--new-session"),
        *("--cap-drop", "ALL", "--hostname", "sandbox", "--ro-bind", "/usr", "/usr", *links),
        *("--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"),
        *(word for path in (*system, *paths) for word in ("--ro-bind", path, path)),
    ]


def check_bubblewrap(bwrap: str, config: Mapping[str, Any]) -> None:
    """Run bubblewrap as the user that commands of agents have, and look for the agent's program and the grader's in it.

    Args:
        bwrap: Path of bubblewrap.
        config: The section `environment.skyrl_gym.agent`.

    Raises:
        ConfigError: Bubblewrap does not work here, a path cannot be shown, or a program is not visible in the sandbox.
    """
    paths = visible_paths(config["sandbox"])
    missing = [
        given
        for given, path in zip(config["sandbox"].get("paths") or (), paths, strict=True)
        if not os.path.exists(path)
    ]
    if missing:
        advice = f"Correct {missing[0]}, or leave it out."
        raise_problems([Problem(PATHS_KEY, missing, "folders and files that exist on this machine", advice)])
    answer = _run(bwrap, (), "")
    if answer.returncode:
        raise ConfigError(
            f"{KEY}.sandbox.kind=bubblewrap cannot run programs here: {answer.stderr.strip()[-500:]}. It needs Linux "
            f"that lets users create user namespaces, bubblewrap 0.8 or later and {PYTHON}. Or choose docker."
        )
    variables = config.get("env") or {}
    search = variables.get("PATH") or PATH
    answer = _run(bwrap, paths, _FIND_MISSING, _programs(config, search), search)
    if answer.returncode:
        reason = answer.stderr.strip()[-500:]
        blocked = next(filter(None, map(_blocked_folder, paths)), None)
        raise ConfigError(f"{PATHS_KEY}={paths}: bubblewrap cannot show them: {reason}.{_advice_for_root(blocked)}")
    problems = []
    for program, file in json.loads(answer.stdout).items():
        key = f"{KEY}.command" if program == config["command"][0] else f"{KEY}.grader"
        problems.append(ConfigError(f"{key}: {_describe_hidden(program, file, paths)}"))
    raise_problems(problems)


def _run(
    bwrap: str, paths: Sequence[str], script: str, arguments: Sequence[str] = (), search: str = PATH
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [bwrap, *isolation_arguments(paths), "--", PYTHON, "-I", "-c", script, *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd="/",
        env={"PATH": search},
        **unprivileged_user(),
    )


def _programs(config: Mapping[str, Any], search: str) -> list[str]:
    """Return the programs of the agent and the grader, except those that only an episode has."""
    programs = [command[0] for name in ("command", "grader") if (command := config.get(name))]
    if any(find_placeholders(search)):
        programs = [program for program in programs if "/" in program]
    return [
        program
        for program in programs
        if not any(find_placeholders(program)) and (os.path.isabs(program) or "/" not in program)
    ]


def _describe_hidden(program: str, file: str, paths: Sequence[str]) -> str:
    """Describe why a program cannot be started in the sandbox, and what to set.

    Args:
        program: The program.
        file: It, or the interpreter in its first line.
        paths: The paths that are visible.
    """
    interpreter = "" if file == program else f" Its first line names the interpreter {file}."
    found = shutil.which(file)
    if found is None:
        return f"the program {program!r} is not installed on this machine, or not executable.{interpreter}"
    steps = list(_follow_links(found))
    folders = list(dict.fromkeys(_installation(step) for step in steps if not _is_visible(step, paths)))
    links = f" It is a link to {steps[-1]}." if len(steps) > 1 else ""
    problem = f"the program {program!r} cannot be started in the sandbox (kind=bubblewrap).{interpreter}{links}"
    if not folders:
        place = f" On this machine it is {found}: write the whole path." if "/" not in file else ""
        return f"{problem}{place} The user of the sandbox must be able to execute it."
    blocked = next(filter(None, map(_blocked_folder, folders)), None)
    is_bare = " and write the whole path of the program" if "/" not in file else ""
    return f"{problem} Add {', '.join(folders)} to {PATHS_KEY}{is_bare}.{_advice_for_root(blocked)}"


def _follow_links(path: str) -> Iterator[str]:
    """Yield a path and the paths to which it is a link, one after the other."""
    for _ in range(_MAX_LINKS):
        yield path
        if not os.path.islink(path):
            return
        path = os.path.normpath(os.path.join(os.path.dirname(path), os.readlink(path)))


def _is_visible(path: str, paths: Sequence[str]) -> bool:
    roots = ["/usr", *(f"/{name}" for name in _LINKS), *_SYSTEM, *paths]
    return any(Path(path).is_relative_to(root) for root in roots)


def _installation(program: str) -> str:
    """Return the folder with a program and its libraries: that above `bin`, or the program's own."""
    folder = os.path.dirname(program)
    return os.path.dirname(folder) if os.path.basename(folder) == "bin" else folder


def _blocked_folder(path: str) -> str | None:
    """Return the outermost folder of a path that other users cannot enter; None if there is none."""
    for folder in reversed(Path(path).resolve().parents):
        if not folder.stat().st_mode & 0o001:
            return str(folder)
    return None


def _advice_for_root(blocked: str | None) -> str:
    if blocked is None or os.geteuid() != 0:
        return ""
    return (
        f" The run is root, so commands have an unprivileged user, who cannot enter {blocked}. Install the program "
        "elsewhere, for example below /opt, or start the run as another user."
    )
