"""Mending a repository by shell commands, as mini-swe-agent does it: one command a turn, until the agent submits."""

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
"""What the last command prints first: mini-swe-agent's marker."""
_INSIDE = Path(__file__).with_name("mini_swe_in_sandbox.py")
_OVERHEAD_S = 10.0
"""Time for what is around a command."""
_MAX_FILES, _MAX_BYTES = 500, 1 << 20
"""Of a row's repository, and of what a submission may have more."""
_SYSTEM = """You mend programs by shell commands. Answer every time with a thought and exactly one command:

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
    """One task. The reward is 1.0 if the agent submits a repository that passes every test of the row, else 0.0.

    A row has `repository`, {path: text}, of at most 500 files and 1 MiB; `protected`, the paths of its own tests, which
    count as they were; and `tests`, a list of {"script", "output"}: a script that imports from the repository must
    print exactly that output. Scripts and outputs are never where the agent works, and outputs are compared outside of
    the sandbox. But submitted code runs in the script's own process and can print what it likes: an output must be a
    value that only a right program computes, never "OK", "True" or a count.

    A submission may have 500 files and 1 MiB more than the row. A new file that would be imported instead of a
    protected one or of the standard library is left out.

    Tests run in order until one fails, each for at most `test_timeout_s` and all for at most `grading_timeout_s`: a
    program that hangs has failed. The metric `tests_passed` is the share before the first failure.

    Commands run in `bash` in the repository, which has one commit, each for at most `command_timeout_s`; in bubblewrap
    all that they started ends with them, in unsafe_local what did not leave their process group. Files stay. A turn
    with another number of closed ```bash blocks than one is told so, and counts. Blocks in reasoning are not commands
    (`reasoning.final_answer`).
    Templates are Jinja, with `task`, `output.returncode`, `output.output` and `actions`.
    """

    replayable = False
    """Commands give other results the second time (dates, $RANDOM): files would not be those of the transcript."""

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
        """Return the repository's files, the tests, and the names of the protected files."""
        files = _repository(extras.get("repository"))
        return files, _tests(extras.get("tests")), _protected(extras.get("protected"), files)

    @classmethod
    def check(cls, env_config: Mapping[str, Any]) -> None:
        sandbox = Sandbox.from_config(env_config.get("sandbox"))
        sandbox.check()
        if sandbox.run({}, ["/usr/bin/git", "--version"]).returncode != 0:
            raise ConfigError("environment mini_swe needs git: install it (Debian, Ubuntu: apt-get install git).")
        for name, template in _templates(env_config).items():
            _rendered(name, template, task="", output={"returncode": 0, "output": ""}, actions=[])

    def init(self, prompt: list[Message]) -> tuple[list[Message], dict[str, Any]]:
        self._session = self.sandbox.session()
        setup = _INSIDE.read_text(encoding="utf-8")
        made = self._session.execute(f"{setup}\ncreate_repository({self.files!r})")
        if made.stdout.strip() != "made":
            raise EnvironmentFailure("sandbox", f"no repository could be made: {made.stderr.strip()[-500:]}")
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
        """Run the command of an answer."""
        answer = self._run_command(command)
        self._steps.append({"answer": action, "command": command, **(answer or {})})
        if answer is None:  # a limit on everything inside: the repository is gone
            return self._finish_episode(0.0, session_lost=True)
        first, _, _ = answer["output"].lstrip().partition("\n")
        if first.strip() == SUBMIT and answer["returncode"] == 0:
            passed = self._count_passed_tests()
            return self._finish_episode(
                float(passed == len(self.tests)), submitted=True, tests_passed=passed / len(self.tests)
            )
        return self._continue_episode(self._render("action_observation_template", output=answer))

    def close(self) -> None:
        if self._session is not None:
            self._session.close()
        if self._steps and not self._is_saved:  # it was cut
            self._save_trajectory(None)

    def _continue_episode(self, text: str) -> StepOutput:
        if self.max_turns and self._turns >= self.max_turns:
            return self._finish_episode(0.0)
        return StepOutput([{"role": "user", "content": text}], 0.0, done=False)

    def _finish_episode(self, reward: float, **metadata: Any) -> StepOutput:
        told = {
            "submitted": False,
            "tests_passed": 0.0,
            "session_lost": False,
            "format_errors": self._num_format_errors,
        }
        self._save_trajectory(reward)
        return StepOutput([], reward, done=True, metadata=told | {"commands": self._turns} | metadata)

    def _run_command(self, command: str) -> dict[str, Any] | None:
        assert self._session is not None
        outcome = self._session.execute(f"run_command({command!r}, {self.command_timeout_s!r}, {self.max_output!r})")
        return _last_line(outcome.stdout) if self._session.alive else None

    def _count_passed_tests(self) -> int:
        """How many tests the submitted repository passes before the first that it fails, or that is out of time."""
        deadline = time.monotonic() + self.grading_timeout_s
        files = self._read_submission()
        if not files:
            return 0
        files = {name: files[name] for name in _graded_files(files, self.files, self.protected)}
        files |= {name: base64.b64encode(self.files[name].encode()).decode() for name in self.protected}
        for passed, (script, output) in enumerate(self.tests):
            left = deadline - time.monotonic()
            if left <= 0 or not self._passes(files, script, output, min(self.test_timeout_s, left)):
                return passed
        return len(self.tests)

    def _read_submission(self) -> dict[str, str]:
        """All files of the repository, {path: base64}; none if they are too many or too large."""
        assert self._session is not None
        most = len(self.files) + _MAX_FILES, _size(self.files) + _MAX_BYTES
        told = _last_line(self._session.execute(f"print_files{most!r}", self.grading_timeout_s).stdout)
        files = (told or {}).get("files")
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
    return {name: str(settings.get(name) or own) for name, own in TEMPLATES.items()}


def _limits(wall_s: float) -> Limits:
    return Limits(wall_s=wall_s, cpu_s=wall_s, processes=64, open_files=256, output=8 * _MAX_BYTES)


def _rendered(name: str, template: str, **values: Any) -> str:
    try:
        return ImmutableSandboxedEnvironment().from_string(template).render(**values)
    except TemplateError as error:
        raise ConfigError(f"environment.skyrl_gym.mini_swe.{name}: is no Jinja template: {error}.") from error


def _last_line(text: str) -> dict[str, Any] | None:
    """The JSON on the last line: whatever else was written came before."""
    try:
        found = json.loads(text.rstrip("\n").rpartition("\n")[2])
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _graded_files(submitted: Iterable[str], repository: Iterable[str], protected: frozenset[str]) -> Iterator[str]:
    """The submitted files that are tested: those that were there and are not protected, and most new ones."""
    own, library = frozenset(repository), sys.stdlib_module_names - set(map(_module, repository))
    for name in submitted:
        if name in own:
            counts = name not in protected
        else:
            counts = _module(name) not in library and not any(_shadows(name, path) for path in protected)
        if counts and _is_relative_path(name):
            yield name


def _shadows(name: str, protected: str) -> bool:
    """Whether a new file is in the place of a protected one, or is imported instead of it."""
    for other, own in zip(PurePosixPath(name).parts, PurePosixPath(protected).parts, strict=False):
        if other != own:  # tests.py beside tests/, or a package beside a module
            return protected.endswith(".py") and _module(other) == _module(own)
    return True  # one of them would be a folder of the other


def _module(name: str) -> str:
    """What Python would import as from a path's first part."""
    return name.partition("/")[0].partition(".")[0]


def _is_relative_path(name: str) -> bool:
    path = PurePosixPath(name)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts


def _size(files: Mapping[str, str]) -> int:
    return sum(len(text.encode()) for text in files.values())


def _parsed(given: Any) -> Any:
    """A column of a row, which may be JSON; None for text that is not."""
    if not isinstance(given, str):
        return given
    try:
        return json.loads(given)
    except ValueError:
        return None


def _repository(given: Any) -> dict[str, str]:
    """Raises ValueError for what is no mapping of paths below a folder to text, or is too large."""
    found = _parsed(given)
    good = isinstance(found, Mapping) and found and all(isinstance(text, str) for text in found.values())
    if not good or not all(map(_is_relative_path, found)):
        raise ValueError(f'the row needs repository={{"path": "text", ...}}, got {given!r:.80}')
    if len(found) > _MAX_FILES or _size(found) > _MAX_BYTES:
        raise ValueError(
            f"the row's repository has {len(found)} files and {_size(found)} bytes: at most {_MAX_FILES} files and "
            f"{_MAX_BYTES} bytes can be judged. Leave out what no test needs"
        )
    return {str(PurePosixPath(name)): text for name, text in found.items()}


def _protected(given: Any, repository: Mapping[str, str]) -> frozenset[str]:
    """Raises ValueError for what are no paths of the repository."""
    found = [] if given is None else _parsed(given)
    if isinstance(found, list | tuple) and all(isinstance(name, str) for name in found):
        names = frozenset(str(PurePosixPath(name)) for name in found)
        if names <= repository.keys():
            return names
    raise ValueError(f'protected={given!r:.80} must be ["path", ...], files of the row\'s repository')


def _tests(given: Any) -> list[tuple[str, str]]:
    """Raises ValueError unless there is one at least."""
    try:
        found = [(str(test["script"]), str(test["output"])) for test in _parsed(given)]
    except (TypeError, KeyError) as error:
        raise ValueError(f'the row needs tests=[{{"script": ..., "output": ...}}], got {given!r:.80}') from error
    if not found:
        raise ValueError("the row has no tests: every repository would pass")
    return found
