"""Mending a repository by shell commands, as mini-swe-agent does it: one command a turn, until the agent submits."""

from __future__ import annotations

import base64
import itertools
import json
import logging
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from skyrl_train.data.trajectory import Message
from skyrl_train.environments.base import StepOutput, TextEnv
from skyrl_train.environments.graders.programs import same_output
from skyrl_train.environments.tools.sandbox import PYTHON, Limits, Sandbox, Session
from skyrl_train.errors import ConfigError, EnvironmentFailure
from skyrl_train.messages import visible

SUBMIT = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
"""What the last command prints first: mini-swe-agent's marker."""
_COMMAND = re.compile(r"```bash\s*\n(.*?)\n?```", re.DOTALL)
_INSIDE = Path(__file__).with_name("mini_swe_inside.py")
_SLACK_S = 10.0
"""Time for what is around a command."""
_MOST_FILES, _MOST_BYTES = 500, 1 << 20
"""Of a repository."""
_EPISODES = itertools.count()
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

    A row has `repository`, {path: text}; `protected`, the paths of its own tests, which count as they were; and
    `tests`, a list of {"script", "output"}: a script that imports from the repository must print exactly that output.
    Scripts and outputs are never where the agent works, and outputs are compared outside of the sandbox: an agent that
    edits tests, exits early or patches what compares has only given a wrong answer.

    Tests run in order until one fails, each for at most `test_timeout_s` and all for at most `grading_timeout_s`: a
    program that hangs has failed. The metric `tests_passed` is the share before the first failure.

    Commands run in `bash` in the repository, which has one commit, each for at most `command_timeout_s`; in bubblewrap
    all that they started ends with them, in unsafe_local what did not leave their process group. Files stay. A turn
    with another number of ```bash blocks than one is told so, and counts.
    Templates are Jinja, with `task`, `output.returncode`, `output.output` and `actions`.
    """

    def __init__(self, env_config: Mapping[str, Any] | None = None, extras: Mapping[str, Any] | None = None):
        super().__init__(env_config, extras)
        settings = self.env_config
        self.files = _repository(self.extras.get("repository"))
        self.tests = _tests(self.extras.get("tests"))
        self.protected = frozenset(self.extras.get("protected") or ())
        self.max_turns = int(self.extras.get("max_turns") or 0)
        self.command_s = float(settings.get("command_timeout_s", 30.0))
        self.test_s = float(settings.get("test_timeout_s", 10.0))
        self.grading_s = float(settings.get("grading_timeout_s", 20.0))
        self.most = int(settings.get("max_output", 10_000))
        self.sandbox = Sandbox.of(settings.get("sandbox"), _limits(self.command_s + _SLACK_S))
        self._templates = _templates(settings)
        self._session: Session | None = None
        self._turns = self._mistakes = 0
        self._steps: list[dict[str, Any]] = []

    @classmethod
    def check(cls, env_config: Mapping[str, Any]) -> None:
        sandbox = Sandbox.of(env_config.get("sandbox"))
        sandbox.check()
        if sandbox.run({}, ["/usr/bin/git", "--version"]).returncode != 0:
            raise ConfigError("environment mini_swe needs git: install it (Debian, Ubuntu: apt-get install git).")
        for name, template in _templates(env_config).items():
            _rendered(name, template, task="", output={"returncode": 0, "output": ""}, actions=[])

    def init(self, prompt: list[Message]) -> tuple[list[Message], dict[str, Any]]:
        self._session = self.sandbox.session()
        setup = _INSIDE.read_text(encoding="utf-8")
        made = self._session.execute(f"{setup}\nmake({self.files!r})")
        if made.stdout.strip() != "made":
            raise EnvironmentFailure("sandbox", f"no repository could be made: {made.stderr.strip()[-500:]}")
        task = "\n".join(str(message.get("content") or "") for message in prompt)
        return [
            {"role": "system", "content": self._render("system_template", task=task)},
            {"role": "user", "content": self._render("instance_template", task=task)},
        ], {}

    def step(self, action: str) -> StepOutput:
        self._turns += 1
        commands = _COMMAND.findall(action)
        if len(commands) != 1:
            self._mistakes += 1
            self._steps.append({"answer": action})
            return self._goes_on(self._render("format_error_template", actions=commands))
        answer = self._ran(commands[0])
        self._steps.append({"answer": action, "command": commands[0], **(answer or {})})
        if answer is None:  # a limit on everything inside: the repository is gone
            return self._over(0.0, session_lost=True)
        first, _, _ = answer["output"].lstrip().partition("\n")
        if first.strip() == SUBMIT and answer["returncode"] == 0:
            passed = self._passed()
            return self._over(float(passed == len(self.tests)), submitted=True, tests_passed=passed / len(self.tests))
        return self._goes_on(self._render("action_observation_template", output=answer))

    def close(self) -> None:
        if self._session is not None:
            self._session.close()

    def _goes_on(self, text: str) -> StepOutput:
        if self.max_turns and self._turns >= self.max_turns:
            return self._over(0.0)
        return StepOutput([{"role": "user", "content": text}], 0.0, done=False)

    def _over(self, reward: float, **metadata: Any) -> StepOutput:
        told = {"submitted": False, "tests_passed": 0.0, "session_lost": False, "format_errors": self._mistakes}
        self._keep(reward)
        return StepOutput([], reward, done=True, metadata=told | {"commands": self._turns} | metadata)

    def _ran(self, command: str) -> dict[str, Any] | None:
        assert self._session is not None
        outcome = self._session.execute(f"ran({command!r}, {self.command_s!r}, {self.most!r})")
        return _last_line(outcome.stdout) if self._session.alive else None

    def _passed(self) -> int:
        """How many tests the submitted repository passes before the first that it fails, or that is out of time."""
        assert self._session is not None
        deadline = time.monotonic() + self.grading_s
        told = _last_line(self._session.execute(f"collected({_MOST_FILES}, {_MOST_BYTES})", self.grading_s).stdout)
        if told is None or not self._session.alive:
            return 0
        files = {name: base64.b64decode(content) for name, content in told["files"].items()}
        files = {name: content for name, content in files.items() if name not in self.protected}
        files |= {name: text.encode() for name, text in self.files.items() if name in self.protected}
        for passed, (script, output) in enumerate(self.tests):
            left = deadline - time.monotonic()
            if left <= 0 or not self._passes(files, script, output, min(self.test_s, left)):
                return passed
        return len(self.tests)

    def _passes(self, files: Mapping[str, bytes], script: str, output: str, timeout_s: float) -> bool:
        inside = {f"repository/{name}": content for name, content in files.items()}
        inside["check.py"] = f"import sys\nsys.path.insert(0, 'repository')\n{script}".encode()
        outcome = self.sandbox.run(inside, [PYTHON, "-I", "check.py"], limits=_limits(timeout_s))
        return outcome.returncode == 0 and same_output(outcome.stdout, output)

    def _render(self, name: str, **values: Any) -> str:
        return _rendered(name, self._templates[name], **values)

    def _keep(self, reward: float) -> None:
        folder = self.env_config.get("traj_dir")
        if folder is None:
            return
        name = re.sub(r"[^\w.-]+", "_", str(self.extras.get("instance_id") or "episode"))
        path = Path(folder).expanduser() / f"{name}-{os.getpid()}-{next(_EPISODES)}.json"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps({"reward": reward, "steps": self._steps}, indent=1), encoding="utf-8")
        except OSError as error:
            log.warning("environment.skyrl_gym.mini_swe.traj_dir: %s", visible(str(error)))


def _templates(settings: Mapping[str, Any]) -> dict[str, str]:
    return {name: str(settings.get(name) or own) for name, own in TEMPLATES.items()}


def _limits(wall_s: float) -> Limits:
    return Limits(wall_s=wall_s, cpu_s=wall_s, processes=64, open_files=256, output=4 * _MOST_BYTES)


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


def _repository(given: Any) -> dict[str, str]:
    """Raises ValueError for what is no mapping of paths below a folder to text."""
    if isinstance(given, str):
        given = json.loads(given)
    good = isinstance(given, Mapping) and given and all(isinstance(text, str) for text in given.values())
    if not good or any(Path(name).is_absolute() or ".." in Path(name).parts for name in given):
        raise ValueError(f'the row needs repository={{"path": "text", ...}}, got {given!r:.80}')
    return dict(given)


def _tests(given: Any) -> list[tuple[str, str]]:
    """Raises ValueError unless there is one at least."""
    if isinstance(given, str):
        given = json.loads(given)
    try:
        found = [(str(test["script"]), str(test["output"])) for test in given]
    except (TypeError, KeyError) as error:
        raise ValueError(f'the row needs tests=[{{"script": ..., "output": ...}}], got {given!r:.80}') from error
    if not found:
        raise ValueError("the row has no tests: every repository would pass")
    return found
