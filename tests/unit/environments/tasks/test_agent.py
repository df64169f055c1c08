"""Checks of the agent environment before a run starts."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from skyrl_train.config.environment import AgentConfig
from skyrl_train.config.hydra import to_dict
from skyrl_train.environments.tasks.agent import KEY, AgentEnv, check_columns
from skyrl_train.errors import ConfigError, DataError
from tests.support import fake_docker

UNSAFE = {"kind": "none", "i_know_this_runs_model_code_on_this_machine": True}
COMMAND = {"command": ["sh", "-c", "true"], "sandbox": UNSAFE}
needs_bubblewrap = pytest.mark.skipif(shutil.which("bwrap") is None, reason="needs bubblewrap")
RUN = {"run": "tests.support.coroutine_agents:run"}


def settings(**changes: Any) -> dict[str, Any]:
    defaults = to_dict(AgentConfig())
    sandbox = defaults["sandbox"] | changes.pop("sandbox", {})
    return {**defaults, **changes, "sandbox": sandbox}


@pytest.mark.parametrize(
    "changes",
    [
        COMMAND,
        RUN,
        {**COMMAND, "grader": ["test", "-f", "{row.path}"]},
        {**COMMAND, "reward": "gsm8k"},
        {**RUN, "reward": "gsm8k"},
        {**COMMAND, "command": ["{row.program}"]},
        {**COMMAND, "sandbox": {"kind": "module:Class", "settings": {"image": "{row.image}"}}},
    ],
    ids=str,
)
def test_valid_settings_pass(changes: dict[str, Any]):
    AgentEnv.check(settings(**changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "agent.command=null: must be set if environment.skyrl_gym.agent.run is null"),
        ({**COMMAND, **RUN}, "and null if it is set"),
        ({**RUN, "grader": ["true"]}, "agent.grader=.*must be left out with environment.skyrl_gym.agent.run"),
        ({**RUN, "env": {"A": "1"}}, "agent.env=.*must be left out with environment.skyrl_gym.agent.run"),
        ({**COMMAND, "grader": ["true"], "reward": "gsm8k"}, "agent.reward=gsm8k: must be null with"),
        ({**COMMAND, "reward": "agent"}, "agent.reward=agent: must be a registered reward function"),
        ({**COMMAND, "command": ["sh", "{promt}"]}, "{promt} is not a placeholder. Write {{promt}} for braces"),
        ({**COMMAND, "grader": ["sh", "{row.}"]}, "{row.} is not a placeholder"),
        ({**COMMAND, "sandbox": {"kind": "none"}}, "kind=none: must be another kind. Without a sandbox"),
        ({**COMMAND, "sandbox": {"kind": "podman"}}, "must be one of bubblewrap, docker, none, or module:Class"),
        ({**COMMAND, "sandbox": {"kind": "docker"}}, "sandbox.image=null: must be set with kind=docker"),
        ({**COMMAND, "sandbox": {**UNSAFE, "image": "a"}}, "sandbox.image=a: must be left out unless"),
        ({**COMMAND, "sandbox": {**UNSAFE, "paths": ["/a"]}}, "sandbox.paths=.*must be left out unless"),
        ({**COMMAND, "sandbox": {**UNSAFE, "settings": {"a": 1}}}, "sandbox.settings=.*must be left out unless"),
        ({**COMMAND, "host": "0.0.0.0", "sandbox": {}}, "agent.host=0.0.0.0: must be 127.0.0.1 with"),
        ({**COMMAND, "public_url": "http://a", "sandbox": {}}, "agent.public_url=http://a: must be null with"),
        ({**COMMAND, "command": ["no-such-program"]}, "the program 'no-such-program' is not installed"),
        ({"run": "tests.support.coroutine_agents:not_a_coroutine"}, "is not a coroutine function"),
        ({"run": "no_module:run"}, "agent.run=no_module:run cannot be imported"),
    ],
    ids=str,
)
def test_invalid_settings_are_rejected(changes: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message.replace("{", r"\{")):
        AgentEnv.check(settings(**changes))


@needs_bubblewrap
def test_bubblewrap_is_tried(monkeypatch: pytest.MonkeyPatch):
    changes = {**COMMAND, "sandbox": {"kind": "bubblewrap"}}
    AgentEnv.check(settings(**changes))
    with tempfile.TemporaryDirectory() as folder:  # in which another user can run the program
        program = Path(folder, "bwrap")
        program.write_text("#!/bin/sh\necho 'No permissions to create a new namespace' >&2\nexit 1\n")
        for path in (program, program.parent):
            path.chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
        with pytest.raises(ConfigError, match="cannot run programs here: No permissions to create a new namespace"):
            AgentEnv.check(settings(**changes))


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that other users can read, which pytest's are not."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        yield Path(name)


@needs_bubblewrap
def test_programs_must_be_visible_in_bubblewrap(folder: Path):
    """A virtual environment whose interpreter is a link out of it, as those of uv and pyenv are."""
    pythons, environment, script = folder / "pythons" / "3.11", folder / "venv", folder / "venv" / "bin" / "agent"
    for path in (pythons / "bin", environment / "bin"):
        path.mkdir(parents=True)
    shutil.copy("/bin/sh", pythons / "bin" / "python3.11")
    (pythons / "bin" / "python").symlink_to("python3.11")
    python = environment / "bin" / "python"
    python.symlink_to(pythons / "bin" / "python")
    script.write_text(f"#!{python} -I\n")
    script.chmod(0o755)

    def check(*program: str, **changes: Any) -> None:
        sandbox = {"paths": [str(path) for path in changes.pop("paths", [environment])]}
        AgentEnv.check(settings(command=[*program], sandbox=sandbox, **changes))

    target = rf"It is a link to {pythons}/bin/python3.11. Add {pythons} to {KEY}.sandbox.paths\."
    with pytest.raises(ConfigError, match=rf"{KEY}.command: the program '{python}' cannot .* {target}$"):
        check(str(python), "main.py")
    with pytest.raises(ConfigError, match=rf"'{script}' cannot .* names the interpreter {python}. {target}$"):
        check(str(script))
    with pytest.raises(ConfigError, match=rf"{KEY}.grader: .* Add {environment}, {pythons} to"):
        check("sh", grader=[str(python)], paths=[])
    with pytest.raises(ConfigError, match="the program 'no-such-program' is not installed"):
        check("no-such-program")
    for program in (str(python), str(script), "agent", "./from_the_row", "{row.program}"):
        check(program, paths=[environment, pythons], env={"PATH": f"{environment}/bin:/usr/bin"})


@needs_bubblewrap
def test_paths_of_bubblewrap_must_exist(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(folder)
    (folder / "data").mkdir()
    AgentEnv.check(settings(command=["sh"], sandbox={"paths": ["data"]}))
    with pytest.raises(ConfigError, match=rf"{KEY}.sandbox.paths=\['nope'\]: must be folders and files that exist"):
        AgentEnv.check(settings(command=["sh"], sandbox={"paths": ["data", "nope"]}))


@needs_bubblewrap
@pytest.mark.skipif(os.geteuid() != 0, reason="other users keep their own rights in the sandbox")
def test_root_is_told_of_paths_of_its_own(folder: Path):
    (folder / "private" / "data").mkdir(parents=True)
    (folder / "private").chmod(0o700)
    with pytest.raises(ConfigError, match=rf"bubblewrap cannot show them.*who cannot enter {folder}/private\."):
        AgentEnv.check(settings(command=["sh"], sandbox={"paths": [str(folder / "private" / "data")]}))


def test_docker_that_does_not_answer_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    changes = {**COMMAND, "sandbox": {"kind": "docker", "image": "python"}}
    fake_docker.install(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    AgentEnv.check(settings(**changes))
    (tmp_path / "bin" / "docker").write_text("#!/bin/sh\necho 'Cannot connect to the Docker daemon' >&2\nexit 1\n")
    with pytest.raises(ConfigError, match="`docker version` failed: Cannot connect to the Docker daemon"):
        AgentEnv.check(settings(**changes))


def test_rows_need_the_columns_of_placeholders():
    config = settings(**COMMAND | {"grader": ["check", "{row.tests.main}"], "env": {"Q": "{row.question}"}})
    row = {"question": "2 + 3", "tests": {"main": "x"}}
    check_columns(config, [("data.jsonl, line 1", row)])
    with pytest.raises(
        DataError, match=r"data.jsonl, line 2: has no column 'tests', which \{row.tests.main\} in \S*\.grader"
    ):
        check_columns(config, [("data.jsonl, line 1", row), ("data.jsonl, line 2", {"question": "1"})])


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (None, {}),
        ({"a/b.py": "x", "other.py": None}, {"a/b.py": "x"}),
        ('{"a.py": "x"}', {"a.py": "x"}),
    ],
)
def test_files_of_rows_are_parsed(files: Any, expected: dict[str, str]):
    assert AgentEnv.parse_row({"files": files}) == {"files": expected, "grader_files": {}}


@pytest.mark.parametrize("files", [{"/a": "x"}, {"../a": "x"}, {"a": 3}, ["a"], "no JSON", {"": "x"}], ids=str)
def test_malformed_files_are_rejected(files: Any):
    with pytest.raises(ValueError, match=r"files (must be|is text)"):
        AgentEnv.parse_row({"files": files})


def test_agent_is_not_stepped():
    with pytest.raises(ConfigError, match="holds the conversation itself"):
        AgentEnv().step("text")
