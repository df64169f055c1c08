"""Software engineering tasks in mini-swe-agent's style: one shell command per turn until the agent submits."""

from __future__ import annotations

import base64
import json
import logging
import re
import secrets
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from skyrl_train.data.messages import Message
from skyrl_train.data.reasoning import final_answer
from skyrl_train.environments.base import StepOutput, TextEnv
from skyrl_train.environments.fenced_blocks import extract_blocks
from skyrl_train.environments.graders.code_tests import outputs_match
from skyrl_train.environments.tools.base import tool_call_record
from skyrl_train.environments.tools.sandbox import PYTHON, Limits, Sandbox, Session
from skyrl_train.errors import ConfigError, EnvironmentFailure
from skyrl_train.terminal import escape_control_chars

SUBMIT = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
"""Mini-swe-agent's marker. A command whose output begins with it submits the repository."""
_INSIDE = Path(__file__).with_name("mini_swe_in_sandbox.py")
_OVERHEAD_S = 10.0
"""Time that the sandbox may take in addition to a command."""
_MAX_FILES, _MAX_BYTES = 500, 1 << 20
"""Maximum number of files and bytes in a row's repository. A submission may have this many more."""
_SYSTEM = """You fix programs with shell commands. Answer every time with a thought and exactly one command:

```bash
COMMAND
```"""
_INSTANCE = """{{ task }}

You are in the folder of a git repository. Each command runs in a new shell there, so `cd` and variables are forgotten;
files stay. Do not change tests. When you are done, submit with this command alone:

```bash
echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT
```"""
_OBSERVATION = """<returncode>{{ output.returncode }}</returncode>
<output>
{{ output.output }}</output>"""
_FORMAT_ERROR = (
    """There must be exactly one command, in a block that begins with ```bash; there were {{ actions | length }}."""
)
TEMPLATES = {
    "system_template": _SYSTEM,
    "instance_template": _INSTANCE,
    "action_observation_template": _OBSERVATION,
    "format_error_template": _FORMAT_ERROR,
}
log = logging.getLogger(__name__)


class MiniSWEEnv(TextEnv):
    """An environment that rewards a submitted repository with 1.0 if it passes every test of the row, else with 0.0.

    A row has these columns:

    - `repository`: {path: text}, with at most 500 files and 1 MiB.
    - `protected`: paths of the repository's own tests. Grading uses the row's version of these files.
    - `tests`: a list of {"script", "output"}. A script that imports from the repository must print exactly this output.

    Scripts and outputs are never in the agent's sandbox, and outputs are compared outside of the sandbox. However,
    submitted code runs in the script's process and can print anything. Therefore an output must be a value that only a
    correct program computes, and never "OK", "True" or a count.

    A submission may have 500 files and 1 MiB more than the row. A new file is excluded if Python would import it
    instead of a protected file or a module of the standard library.

    Tests run in order until one fails. Each may take `test_timeout_s`, and all together `grading_timeout_s`. A program
    that hangs fails. The metric `tests_passed` is the fraction of tests before the first failure.

    Commands run in `bash` in the repository, which has one commit. Each may take `command_timeout_s`. In bubblewrap,
    all processes that a command started end with it; in unsafe_local, those that did not leave its process group. Files
    are kept between commands. A turn must have exactly one closed ```bash block. Otherwise the model is informed of the
    error, and the turn counts. Blocks in reasoning are not commands (`reasoning.final_answer`). Templates are Jinja
    templates with the variables `task`, `output.returncode`, `output.output` and `actions`.
    """

    replayable = False
    """False because a replayed command may give another result (dates, $RANDOM) than the transcript has."""

    def __init__(self, env_config: Mapping[str, Any] | None = None, extras: Mapping[str, Any] | None = None):
        super().__init__(env_config, extras)
        settings = self.env_config
        self.files, self.tests, self.protected = self.parse_row(self.extras)
        self.max_turns = int(self.extras.get("max_turns") or 0)
        self.command_timeout_s = float(settings.get("command_timeout_s", 30.0))
        self.test_timeout_s = float(settings.get("test_timeout_s", 10.0))
        self.grading_timeout_s = float(settings.get("grading_timeout_s", 20.0))
        self.max_output = int(settings.get("max_output", 10_000))
        self.sandbox = Sandbox.from_config(settings.get("sandbox"), _limits(self.command_timeout_s + _OVERHEAD_S))
        self._templates = _templates(settings)
        self._session: Session | None = None
        self._turns = self._num_format_errors = 0
        self._steps: list[dict[str, Any]] = []
        self._is_saved = False

    @classmethod
    def parse_row(cls, extras: Mapping[str, Any]) -> tuple[dict[str, str], list[tuple[str, str]], frozenset[str]]:
        """Return the files of the row's repository by path, its tests as (script, expected output), and the protected
        paths.

        Raises:
            ValueError: A column is missing or malformed, there are no tests, or the repository is too large.
        """
        files = _repository(extras.get("repository"))
        return files, _tests(extras.get("tests")), _protected(extras.get("protected"), files)

    @classmethod
    def check(cls, env_config: Mapping[str, Any]) -> None:
        """Check that the sandbox works and has git, and that the templates of the settings can be rendered.

        Raises:
            ConfigError: One of these checks fails.
        """
        sandbox = Sandbox.from_config(env_config.get("sandbox"))
        sandbox.check()
        if sandbox.run({}, ["/usr/bin/git", "--version"]).returncode != 0:
            raise ConfigError("environment mini_swe needs git: install it (Debian, Ubuntu: apt-get install git).")
        for name, template in _templates(env_config).items():
            _rendered(name, template, task="", output={"returncode": 0, "output": ""}, actions=[])

    def init(self, prompt: list[Message]) -> tuple[list[Message], dict[str, Any]]:
        """Start the episode's sandbox, write the row's repository into it, and return the system message and the task.

        Raises:
            EnvironmentFailure: The sandbox or the repository could not be created (kind "sandbox").
        """
        self._session = self.sandbox.session()
        setup = _INSIDE.read_text(encoding="utf-8")
        made = self._session.execute(f"{setup}\ncreate_repository({self.files!r})")
        if made.stdout.strip() != "made":
            raise EnvironmentFailure("sandbox", f"the repository could not be created: {made.stderr.strip()[-500:]}")
        task = "\n".join(str(message.get("content") or "") for message in prompt)
        return [
            {"role": "system", "content": self._render("system_template", task=task)},
            {"role": "user", "content": self._render("instance_template", task=task)},
        ], {}

    def step(self, action: str) -> StepOutput:
        self._turns += 1
        commands = extract_blocks(final_answer(action), ("bash",))
        if len(commands) != 1:
            self._num_format_errors += 1
            self._steps.append({"answer": action})
            return self._continue_episode(self._render("format_error_template", actions=commands))
        output = self._step_after_command(action, commands[0])
        output.tool_calls = [tool_call_record("bash", commands[0])]
        return output

    def _step_after_command(self, action: str, command: str) -> StepOutput:
        """Run the command of an answer and return the step's output."""
        outcome = self._run_command(command)
        self._steps.append({"answer": action, "command": command, **(outcome or {})})
        if outcome is None:  # the sandbox hit a limit, and the repository is lost with it
            return self._finish_episode(0.0, session_lost=True)
        first, _, _ = outcome["output"].lstrip().partition("\n")
        if first.strip() == SUBMIT and outcome["returncode"] == 0:
            passed = self._count_passed_tests()
            return self._finish_episode(
                float(passed == len(self.tests)), submitted=True, tests_passed=passed / len(self.tests)
            )
        return self._continue_episode(self._render("action_observation_template", output=outcome))

    def close(self) -> None:
        if self._session is not None:
            self._session.close()
        if self._steps and not self._is_saved:  # the episode was truncated
            self._save_trajectory(None)

    def _continue_episode(self, text: str) -> StepOutput:
        if self.max_turns and self._turns >= self.max_turns:
            return self._finish_episode(0.0)
        return StepOutput([{"role": "user", "content": text}], 0.0, done=False)

    def _finish_episode(self, reward: float, **metadata: Any) -> StepOutput:
        defaults = {
            "submitted": False,
            "tests_passed": 0.0,
            "session_lost": False,
            "format_errors": self._num_format_errors,
        }
        self._save_trajectory(reward)
        return StepOutput([], reward, done=True, metadata=defaults | {"commands": self._turns} | metadata)

    def _run_command(self, command: str) -> dict[str, Any] | None:
        assert self._session is not None
        outcome = self._session.execute(f"run_command({command!r}, {self.command_timeout_s!r}, {self.max_output!r})")
        return _last_line(outcome.stdout) if self._session.alive else None

    def _count_passed_tests(self) -> int:
        """Return the number of tests that the submission passes before it fails one or the time is over."""
        deadline = time.monotonic() + self.grading_timeout_s
        files = self._read_submission()
        if not files:
            return 0
        files = {name: files[name] for name in _graded_files(files, self.files, self.protected)}
        files |= {name: base64.b64encode(self.files[name].encode()).decode() for name in self.protected}
        for passed, (script, output) in enumerate(self.tests):
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0 or not self._passes(files, script, output, min(self.test_timeout_s, remaining_s)):
                return passed
        return len(self.tests)

    def _read_submission(self) -> dict[str, str]:
        """Return the repository's files, {path: base64}, or an empty dict if they exceed the limits."""
        assert self._session is not None
        limits = len(self.files) + _MAX_FILES, _size(self.files) + _MAX_BYTES
        reply = _last_line(self._session.execute(f"print_files{limits!r}", self.grading_timeout_s).stdout)
        files = (reply or {}).get("files")
        return files if isinstance(files, dict) and self._session.alive else {}

    def _passes(self, files: Mapping[str, str], script: str, output: str, timeout_s: float) -> bool:
        inside = {
            "repository.json": json.dumps(files),
            "unpack.py": f"{_INSIDE.read_text(encoding='utf-8')}\nunpack()",
            "check.py": f"import sys\nsys.path.insert(0, 'repository')\n{script}",
        }
        outcome = self.sandbox.run(inside, [PYTHON, "-I", "unpack.py"], limits=_limits(timeout_s))
        return outcome.returncode == 0 and outputs_match(outcome.stdout, output)

    def _render(self, name: str, **values: Any) -> str:
        return _rendered(name, self._templates[name], **values)

    def _save_trajectory(self, reward: float | None) -> None:
        self._is_saved = True
        folder = self.env_config.get("traj_dir")
        if folder is None:
            return
        name = re.sub(r"[^\w.-]+", "_", str(self.extras.get("instance_id") or "episode"))
        path = Path(folder).expanduser() / f"{name}-{secrets.token_hex(8)}.json"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("x", encoding="utf-8") as file:
                json.dump({"reward": reward, "steps": self._steps}, file, indent=1)
        except OSError as error:
            log.warning("environment.skyrl_gym.mini_swe.traj_dir: %s", escape_control_chars(str(error)))


def _templates(settings: Mapping[str, Any]) -> dict[str, str]:
    return {name: str(settings.get(name) or default) for name, default in TEMPLATES.items()}


def _limits(wall_s: float) -> Limits:
    return Limits(wall_s=wall_s, cpu_s=wall_s, processes=64, open_files=256, output=8 * _MAX_BYTES)


def _rendered(name: str, template: str, **values: Any) -> str:
    try:
        return ImmutableSandboxedEnvironment().from_string(template).render(**values)
    except TemplateError as error:
        raise ConfigError(
            f"environment.skyrl_gym.mini_swe.{name} is not a valid Jinja template: {error}. Correct it."
        ) from error


def _last_line(text: str) -> dict[str, Any] | None:
    """Parse the JSON object on the last line, which other output may precede. Return None if there is none."""
    try:
        reply = json.loads(text.rstrip("\n").rpartition("\n")[2])
    except ValueError:
        return None
    return reply if isinstance(reply, dict) else None


def _graded_files(submitted: Iterable[str], repository: Iterable[str], protected: frozenset[str]) -> Iterator[str]:
    """Yield the submitted files that are graded: unprotected files of the row, and new files that shadow nothing."""
    original, library = frozenset(repository), sys.stdlib_module_names - set(map(_module, repository))
    for name in submitted:
        if name in original:
            counts = name not in protected
        else:
            counts = _module(name) not in library and not any(_shadows(name, path) for path in protected)
        if counts and _is_relative_path(name):
            yield name


def _shadows(name: str, protected: str) -> bool:
    """True if a new file would replace a protected one, or would be imported instead of it."""
    for new, original in zip(PurePosixPath(name).parts, PurePosixPath(protected).parts, strict=False):
        if new != original:  # tests.py next to tests/, or a package next to a module
            return protected.endswith(".py") and _module(new) == _module(original)
    return True  # one path would be a folder of the other


def _module(name: str) -> str:
    """Return the name under which Python would import the first component of a path."""
    return name.partition("/")[0].partition(".")[0]


def _is_relative_path(name: str) -> bool:
    path = PurePosixPath(name)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts


def _size(files: Mapping[str, str]) -> int:
    return sum(len(text.encode()) for text in files.values())


def _parsed(column: Any) -> Any:
    """Return a column of a row, parsed if it is JSON text. Return None for other text."""
    if not isinstance(column, str):
        return column
    try:
        return json.loads(column)
    except ValueError:
        return None


def _repository(column: Any) -> dict[str, str]:
    """Parse a row's repository. Raise ValueError if it does not map relative paths to text, or is too large."""
    files = _parsed(column)
    is_valid = isinstance(files, Mapping) and files and all(isinstance(text, str) for text in files.values())
    if column is None:
        raise ValueError(
            "the row has no column repository. If its repository is a container image, as in SWE-bench and SWE-Gym, "
            "run an agent in it: env_class=agent with environment.skyrl_gym.agent.sandbox.kind=docker"
        )
    if not is_valid or not all(map(_is_relative_path, files)):
        raise ValueError(
            f'the row needs repository={{"relative path": "text", ...}} with at least one file, got {column!r:.80}'
        )
    if len(files) > _MAX_FILES or _size(files) > _MAX_BYTES:
        raise ValueError(
            f"the row's repository has {len(files)} files and {_size(files)} bytes; at most {_MAX_FILES} files and "
            f"{_MAX_BYTES} bytes can be graded. Remove files that no test needs"
        )
    return {str(PurePosixPath(name)): text for name, text in files.items()}


def _protected(column: Any, repository: Mapping[str, str]) -> frozenset[str]:
    """Parse a row's protected paths. Raise ValueError if they are not paths of files in the repository."""
    paths = [] if column is None else _parsed(column)
    if isinstance(paths, list | tuple) and all(isinstance(path, str) for path in paths):
        names = frozenset(str(PurePosixPath(path)) for path in paths)
        if names <= repository.keys():
            return names
    raise ValueError(f'protected={column!r:.80} must be ["path", ...], files of the row\'s repository')


def _tests(column: Any) -> list[tuple[str, str]]:
    """Parse a row's tests. Raise ValueError if there are none or one is malformed."""
    try:
        tests = [(str(test["script"]), str(test["output"])) for test in _parsed(column)]
    except (TypeError, KeyError) as error:
        raise ValueError(f'the row needs tests=[{{"script": ..., "output": ...}}], got {column!r:.80}') from error
    if not tests:
        raise ValueError("the row has no tests, so every repository would pass. Add tests or remove the row")
    return tests
