"""The agent environment: checks of its settings and rows. `skyrl_train.agents` runs its episodes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from skyrl_train.config.problems import Problem, raise_problems
from skyrl_train.environments.agent_bubblewrap import KEY, check_bubblewrap
from skyrl_train.environments.agent_registry import find_agent
from skyrl_train.environments.base import StepOutput, TextEnv
from skyrl_train.environments.placeholders import ALLOWED, find_column, find_placeholders, is_placeholder
from skyrl_train.errors import ConfigError, DataError
from skyrl_train.listeners import Listener

NAME = "agent"
CONSENT = "i_know_this_runs_model_code_on_this_machine"
LISTENER = Listener("the server of agents' sessions", f"{KEY}.host", f"{KEY}.port")
LOOPBACK = "127.0.0.1"
SANDBOXES = ("bubblewrap", "docker", "none")
FILE_COLUMNS = ("files", "grader_files")
"""Columns of a row with files for the agent's working folder: {relative path: text}, also as JSON. The second is
written only before the grader runs."""
_IMPORT_PACKAGE = f"""
import importlib.util, os.path, sys
folder = sys.argv.pop(1)
spec = importlib.util.spec_from_file_location(
    {__name__.partition(".")[0]!r}, os.path.join(folder, "__init__.py"), submodule_search_locations=[folder]
)
sys.modules[spec.name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules[spec.name])
"""
"""Code that imports a package from the folder in the first argument."""


class AgentEnv(TextEnv):
    """An environment whose episodes are runs of a program that calls a chat API.

    The program, not this class, holds the conversation. `skyrl_train.agents.generator` runs it.
    """

    @classmethod
    def check(cls, env_config: Mapping[str, Any]) -> None:
        """Check the settings and the programs that they need on this machine.

        Raises:
            ConfigError: A setting is missing or invalid, two settings contradict each other, or a program is missing.
        """
        raise_problems(_find_problems(env_config))
        if env_config.get("python"):
            _check_interpreter(env_config["python"], env_config["run"])
        elif env_config.get("run"):
            find_agent(env_config["run"])
        else:
            _check_sandbox(env_config)

    @classmethod
    def parse_row(cls, extras: Mapping[str, Any]) -> dict[str, dict[str, str]]:
        """Return the row's files for the agent and for the grader, by column.

        Raises:
            ValueError: A column does not map relative paths to text.
        """
        return {column: _parse_files(column, extras.get(column)) for column in FILE_COLUMNS}

    def step(self, action: str) -> StepOutput:
        raise ConfigError(
            "environment agent runs a program that holds the conversation itself, so it cannot be stepped with a text. "
            "Run it with the entrypoints main_base and main_generate."
        )


def check_columns(env_config: Mapping[str, Any], rows: Iterable[tuple[str, Mapping[str, Any]]]) -> None:
    """Check that every row has the columns that the placeholders of the settings name.

    Args:
        env_config: Settings of the agent environment.
        rows: Pairs of a row's location and its extras.

    Raises:
        DataError: A row lacks a column.
    """
    used = {
        name.removeprefix("row."): key
        for key, value in _values_with_placeholders(env_config)
        for name in find_placeholders(value)
        if name.startswith("row.")
    }
    for where, row in rows:
        for path, key in sorted(used.items()):
            try:
                find_column(row, path)
            except KeyError as missing:
                raise DataError(
                    f"{where}: has no column {missing.args[0]!r}, which {{row.{path}}} in {key} needs. Add it, or "
                    f"correct the placeholder. The row has the columns {', '.join(sorted(row)) or '(none)'}."
                ) from None


def _values_with_placeholders(config: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return the keys whose values may contain placeholders, with the values."""
    sandbox = config.get("sandbox") or {}
    return [(f"{KEY}.{name}", config.get(name)) for name in ("command", "env", "grader")] + [
        (f"{KEY}.sandbox.{name}", sandbox.get(name)) for name in ("image", "settings")
    ]


def _find_problems(config: Mapping[str, Any]) -> Iterator[Problem]:
    command, run = config.get("command"), config.get("run")
    if bool(command) == bool(run):
        advice = "Name the program that is the agent, or a coroutine `async def run(session, row)`."
        yield Problem(f"{KEY}.command", command, f"set if {KEY}.run is null, and null if it is set", advice)
    for name in ("env", "grader") if run else ():
        if config.get(name):
            advice = "A coroutine returns its reward, and reads its own variables."
            yield Problem(f"{KEY}.{name}", config[name], f"left out with {KEY}.run", advice)
    if config.get("python") and ":" not in (run or ""):
        advice = "Another interpreter can only import an agent."
        yield Problem(f"{KEY}.python", config["python"], f"null unless {KEY}.run is module:function", advice)
    if config.get("grader") and config.get("reward"):
        yield Problem(
            f"{KEY}.reward", config["reward"], f"null with {KEY}.grader", "Only one of them can be the reward."
        )
    if config.get("reward") == NAME:
        yield Problem(f"{KEY}.reward", NAME, "a registered reward function or a single-turn environment")
    sandbox = config.get("sandbox") or {}
    for key, value in _values_with_placeholders(config):
        for placeholder in find_placeholders(value):
            if not is_placeholder(placeholder):
                advice = f"{{{placeholder}}} is not a placeholder. Write {{{{{placeholder}}}}} for braces in a text."
                yield Problem(key, value, f"a text whose placeholders are {ALLOWED}", advice)
    if command:
        yield from _find_sandbox_problems(sandbox)
        if sandbox.get("kind", "bubblewrap") == "bubblewrap":
            advice = "A command in bubblewrap has no network. It reaches only the session, at a loopback address."
            if (host := config.get("host", LOOPBACK)) != LOOPBACK:
                yield Problem(f"{KEY}.host", host, f"{LOOPBACK} with {KEY}.sandbox.kind=bubblewrap", advice)
            if url := config.get("public_url"):
                yield Problem(f"{KEY}.public_url", url, f"null with {KEY}.sandbox.kind=bubblewrap", advice)


def _find_sandbox_problems(sandbox: Mapping[str, Any]) -> Iterator[Problem]:
    kind, key = sandbox.get("kind", "bubblewrap"), f"{KEY}.sandbox"
    if kind not in SANDBOXES and ":" not in kind:
        yield Problem(f"{key}.kind", kind, f"one of {', '.join(SANDBOXES)}, or module:Class")
    if kind == "none" and not sandbox.get(CONSENT):
        advice = (
            "Without a sandbox the agent, and what the model makes it do, runs on this machine with your files and "
            f"your network. Choose bubblewrap or docker, or set {key}.{CONSENT}=true as well."
        )
        yield Problem(f"{key}.kind", kind, "another kind", advice)
    needs = {"image": "docker", "run_args": "docker", "paths": "bubblewrap"}
    for name, needed in needs.items():
        if sandbox.get(name) and kind != needed:
            yield Problem(f"{key}.{name}", sandbox[name], f"left out unless {key}.kind={needed}")
    if sandbox.get("settings") and ":" not in kind:
        yield Problem(f"{key}.settings", sandbox["settings"], f"left out unless {key}.kind is module:Class")
    if kind == "docker" and not sandbox.get("image"):
        advice = 'Name the image, or write "{row.COLUMN}" if the rows name theirs.'
        yield Problem(f"{key}.image", sandbox.get("image"), "set with kind=docker", advice)


def _check_sandbox(config: Mapping[str, Any]) -> None:
    """Raise ConfigError if this machine lacks the program of the sandbox, or the program of an agent without one."""
    kind = (config.get("sandbox") or {}).get("kind", "bubblewrap")
    program = {"docker": "docker", "bubblewrap": "bwrap", "none": str(config["command"][0])}.get(kind)
    if program is None or any(find_placeholders(program)):
        return
    found = shutil.which(program)
    if found is None:
        key = f"{KEY}.command" if kind == "none" else f"{KEY}.sandbox.kind={kind}"
        raise ConfigError(f"{key}: the program {program!r} is not installed on this machine, or not executable.")
    if kind == "bubblewrap":
        check_bubblewrap(found, config)
    if kind == "docker":
        answer = subprocess.run([found, "version"], capture_output=True, text=True, check=False)
        if answer.returncode:
            raise ConfigError(f"{KEY}.sandbox.kind=docker: `docker version` failed: {answer.stderr.strip()[-500:]}")


def _check_interpreter(python: str, run: str) -> None:
    """Raise ConfigError if an interpreter does not exist, or cannot import the agent."""
    program = f"from {find_agent.__module__} import find_agent; find_agent({run!r})"
    try:
        answer = subprocess.run(
            interpreter_command(python, program),
            capture_output=True,
            text=True,
            check=False,
            env=os.environ | {"PYTHONPATH": interpreter_path()},
        )
    except OSError as error:
        raise ConfigError(f"{KEY}.python={python} cannot be started: {error.strerror}.") from error
    if answer.returncode:
        last = answer.stderr.strip().rpartition("\n")[2]
        raise ConfigError(f"{KEY}.python={python} cannot import {KEY}.run={run}: {last}")


def interpreter_command(python: str, program: str, *arguments: str) -> list[str]:
    """Return a command that runs a program in another interpreter, in which it can import this package.

    Only this package is added: the other packages beside it are for this interpreter.

    Args:
        python: The interpreter.
        program: Python code.
        arguments: Its arguments, which are in `sys.argv[1:]`.
    """
    return [python, "-P", "-c", _IMPORT_PACKAGE + program, str(Path(__file__).parents[2]), *arguments]


def interpreter_path() -> str:
    """Return a PYTHONPATH for another interpreter: the user's PYTHONPATH and the current folder."""
    return os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), os.getcwd()]))


def _parse_files(column: str, files: Any) -> dict[str, str]:
    if isinstance(files, str):
        try:
            files = json.loads(files)
        except ValueError:
            raise ValueError(f"{column} is text, but not a JSON object: {files!r:.80}") from None
    if isinstance(files, Mapping):  # in a table, each row has the keys of all rows
        files = {path: text for path, text in files.items() if text is not None}
    if files is None:
        return {}
    is_valid = isinstance(files, Mapping) and all(isinstance(text, str) for text in files.values())
    if not is_valid or not all(_is_relative(path) for path in files):
        raise ValueError(f'{column} must be {{"relative path": "text", ...}}, got {files!r:.80}')
    return dict(files)


def _is_relative(path: str) -> bool:
    parts = PurePosixPath(path).parts
    return bool(parts) and not path.startswith("/") and ".." not in parts and "\0" not in path
