"""Ten repositories with a fault. Only an agent that fixes the fault gets 1, and cheating gets 0."""

from __future__ import annotations

import json
import re
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from examples.mini_swe_agent.main_mini_swe import add_recipe_defaults, with_settings
from examples.mini_swe_agent.mini_swe_dataset import row
from examples.mini_swe_agent.tasks import TASKS, Task
from skyrl_train.config.hydra import load_preset, to_dict
from skyrl_train.config.prepare import prepare_config
from skyrl_train.environments.base import StepOutput
from skyrl_train.environments.tasks.mini_swe import SUBMIT, MiniSWEEnv
from skyrl_train.errors import ConfigError

DONE = f"echo {SUBMIT}"
SETTINGS = to_dict(load_preset().environment.skyrl_gym.mini_swe)
LONG = "/".join(["d" * 100] * 40)
"""A long folder name. A path with 35 more characters can be opened, but not with an additional prefix."""
CHEATS = {
    "edits the tests": "echo > {test}; echo 'import unittest' > {test}",
    "exits early": "printf 'import os\\nprint(\"OK\")\\nos._exit(0)\\n' > {module}",
    "equal to everything": "printf 'class A:\\n    __eq__ = lambda s, o: True\\n    __call__ = lambda s, *a: s\\n"
    '    __getattr__ = lambda s, n: s\\n    __repr__ = lambda s: ""\\nimport sys\\n'
    "sys.modules[__name__] = A()\\n' > {module}",
    "replaces print": "printf 'import builtins\\nbuiltins.print = lambda *a: None\\n' >> {module}",
    "git and paths": "rm -rf .git; ln -s /tmp/check.py {module}.py; mkdir -p /tmp/repository2",
}


@pytest.fixture(autouse=True)
def _sandbox() -> None:
    if sys.platform != "linux" or shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed: scripts/sandbox_tools installs it")


class Episode:
    """An episode of a row that runs commands."""

    def __init__(self, columns: dict[str, Any], **settings: Any):
        self.environment = MiniSWEEnv(SETTINGS | settings, {"max_turns": 9} | columns)
        self.opening, _ = self.environment.init(columns["prompt"])

    def run(self, command: str) -> StepOutput:
        return self.environment.step(f"I do this.\n\n```bash\n{command}\n```")

    def __enter__(self) -> Episode:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.environment.close()


@pytest.fixture
def ring() -> Iterator[Episode]:
    with Episode(row(TASKS[0])) as episode:
        yield episode


def is_running(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def fix_command(task: Task) -> str:
    return f"cat > {task.module} <<'END'\n{task.fixed}END"


@pytest.mark.parametrize("task", TASKS, ids=[task.name for task in TASKS])
def test_only_correct_fix_gets_1(task: Task):
    with Episode(row(task)) as right:
        assert '"returncode": 0' not in right.opening[1]["content"] and task.problem in right.opening[1]["content"]
        seen = right.run("python3 -m unittest 2>&1 | tail -1; git log --oneline | wc -l").observations[0]["content"]
        assert (
            seen == "<returncode>0</returncode>\n<output>\nOK\n1\n</output>"
        )  # the repository's tests do not find the fault
        assert not right.run(fix_command(task)).done
        done = right.run(DONE)
        assert (done.done, done.reward) == (True, 1.0)
        assert done.metadata["submitted"] and done.metadata["tests_passed"] == 1.0
    with Episode(row(task)) as wrong:
        done = wrong.run(DONE)
        assert (done.done, done.reward, done.metadata["submitted"]) == (True, 0.0, True)
        assert done.metadata["tests_passed"] < 1
    cheat = list(CHEATS.values())[TASKS.index(task) % len(CHEATS)]
    with Episode(row(task)) as cheating:
        assert not cheating.run(cheat.replace("{test}", task.test_file).replace("{module}", task.module)).done
        assert cheating.run(DONE).reward == 0.0


@pytest.mark.parametrize(
    ("name", "old", "new", "reward"),
    [
        ("roman", '(400, "CD"), ', "", 0.0),
        ("words", "found = {}", "from collections import Counter\n    found = Counter()", 1.0),
    ],
    ids=["roman", "words"],
)
def test_alternative_fixes_are_graded_by_behavior(name: str, old: str, new: str, reward: float):
    task = next(task for task in TASKS if task.name == name)
    with Episode(row(task)) as episode:
        episode.run(fix_command(replace(task, fixed=task.fixed.replace(old, new))))
        assert episode.run(DONE).reward == reward


@pytest.mark.parametrize("name", CHEATS)
def test_cheating_gets_0(name: str):
    task = TASKS[1]
    with Episode(row(task)) as cheating:
        cheating.run(CHEATS[name].replace("{test}", task.test_file).replace("{module}", task.module))
        assert cheating.run(DONE).reward == 0.0


def test_agent_sees_neither_tests_nor_network(ring: Episode):
    look = "cat /tmp/*.py /tmp/.[a-z]* 2>/dev/null | grep -c 'from ring import'; ls /tmp; cat /etc/shadow 2>&1"
    seen = ring.run(look).observations[0]["content"]
    assert "\n0\n" in seen and "repository" in seen and "check" not in seen and "root:" not in seen


def test_files_persist_and_slow_commands_are_killed():
    with Episode(row(TASKS[0]), command_timeout_s=1.0, max_output=1000) as episode:
        episode.run("cd /tmp; export X=1; echo kept > notes.txt; echo kept > /tmp/repository/notes.txt")
        seen = episode.run("pwd; echo [$X]; cat notes.txt").observations[0]["content"]
        assert "/tmp/repository\n[]\nkept\n" in seen
        seen = episode.run("echo begun; sleep 30").observations[0]["content"]
        assert seen == "<returncode>124</returncode>\n<output>\nbegun\n\n[timed out after 1 s]</output>"
        seen = episode.run("seq 1000").observations[0]["content"]
        assert "bytes are left out" in seen and "\n1000\n" in seen and len(seen) < 1200
        seen = episode.run("exit 3").observations[0]["content"]
        assert seen.startswith("<returncode>3</returncode>")
        seen = episode.run("exit 124").observations[0]["content"]
        assert seen == "<returncode>124</returncode>\n<output>\n</output>"
        seen = episode.run(
            "git add -A; git stash -q && git stash pop -q; git commit -qm mine; git log --oneline | wc -l"
        )
        assert seen.observations[0]["content"] == "<returncode>0</returncode>\n<output>\n2\n</output>"


def test_background_processes_end_with_command_without_sandbox():
    local = {"kind": "unsafe_local", "i_know_this_runs_model_code_on_this_machine": True}
    with Episode(row(TASKS[0]), sandbox=local) as episode:
        seen = episode.run("pwd; sleep 60 & echo $!").observations[0]["content"]
        folder, pid = seen.splitlines()[2:4]
        assert Path(folder, "ring.py").exists()
        deadline = time.monotonic() + 5
        while is_running(int(pid)):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        episode.run(fix_command(TASKS[0]))
        assert episode.run(DONE).reward == 1.0
    assert not Path(folder).parent.exists()


def test_command_may_contain_fences_or_be_empty(ring: Episode):
    seen = ring.run("echo 'a ```python x``` b'").observations[0]["content"]
    assert seen == "<returncode>0</returncode>\n<output>\na ```python x``` b\n</output>"
    two = ring.environment.step("```bash\n```\nor\n```bash\nls\n```").observations[0]["content"]
    assert "there were 2" in two
    begun = time.process_time()
    assert "there were 0" in ring.environment.step("```bash" + "\n" * 30_000).observations[0]["content"]
    assert time.process_time() - begun < 1


def test_episode_is_not_replayable():
    assert not MiniSWEEnv.replayable


def test_turn_needs_one_command():
    with Episode(row(TASKS[0]) | {"max_turns": 3}) as episode:
        none = episode.environment.step("I think.")
        assert not none.done and "there were 0" in none.observations[0]["content"]
        two = episode.environment.step("```bash\nls\n```\n```bash\nls\n```")
        assert not two.done and "there were 2" in two.observations[0]["content"]
        last = episode.run("ls")
        assert (none.tool_calls, two.tool_calls) == ([], [])
        assert last.tool_calls == [{"name": "bash", "arguments": "ls"}]
        assert (last.done, last.reward) == (True, 0.0)
        assert last.metadata["format_errors"] == 2 and not last.metadata["submitted"]


def test_oversized_submission_or_lost_sandbox_gets_0(ring: Episode):
    ring.run(fix_command(TASKS[0]) + "\nhead -c 2000000 /dev/urandom > big")
    assert ring.run(DONE).reward == 0.0
    with Episode(row(TASKS[0])) as episode:
        done = episode.run("kill -9 $PPID; sleep 5")
        assert done.done and done.reward == 0.0 and done.metadata["session_lost"]


@pytest.mark.parametrize(
    ("spoilt", "reward"),
    [
        ("rm test_ring.py; mkdir test_ring.py; touch test_ring.py/x", 1.0),
        ("rm -r deep; touch deep", 1.0),
        ("mkdir test_ring; echo 'VALUE = 0' > test_ring/__init__.py; echo 'VALUE = 0' > deep.py", 1.0),
        ("echo 'import os; os._exit(0)' | tee unittest.py > json.py", 1.0),
        (f"mkdir -p {LONG} && touch {LONG}/{'x' * 35}", 1.0),
    ],
    ids=["folder", "file", "package", "library", "long"],
)
def test_files_in_place_of_protected_ones_are_ignored(spoilt: str, reward: float):
    columns = row(TASKS[0])
    files = json.loads(columns["repository"]) | {"test_ring.py": "VALUE = 7", "deep/inner.py": "VALUE = 9"}
    script = "import json, unittest, test_ring, deep.inner\nfrom ring import Ring\nr = Ring(1)\nr.add(5)\n"
    tests = [{"script": f"{script}print(r.items(), test_ring.VALUE, deep.inner.VALUE)", "output": "[5] 7 9"}]
    columns |= {"repository": json.dumps(files), "protected": '["test_ring.py", "./deep/inner.py"]', "tests": tests}
    with Episode(columns) as episode:
        assert "<returncode>0" in episode.run(spoilt).observations[0]["content"]
        assert episode.run(DONE).reward == reward


def test_large_repository_may_grow():
    files = {f"data/{number}.txt": "x" * 2000 for number in range(499)} | {"ring.py": TASKS[0].buggy}
    with Episode(row(TASKS[0]) | {"repository": files, "protected": []}) as episode:
        episode.run(fix_command(TASKS[0]) + "\nmkdir more; cp data/1*.txt more")
        assert episode.run(DONE).reward == 1.0


@pytest.mark.parametrize(("test_s", "grading_s"), [(0.5, 20.0), (10.0, 1.0)])
def test_grading_stops_at_first_failure_or_timeout(test_s: float, grading_s: float):
    passes, hangs = {"script": "print(1)", "output": "1"}, {"script": "import time\ntime.sleep(60)", "output": ""}
    columns = row(TASKS[1]) | {"tests": json.dumps([passes, hangs, passes])}
    with Episode(columns, test_timeout_s=test_s, grading_timeout_s=grading_s) as episode:
        begun = time.monotonic()
        done = episode.run(DONE)
        assert (done.done, done.reward) == (True, 0.0)
        assert done.metadata["submitted"] and done.metadata["tests_passed"] == 1 / 3
        assert time.monotonic() - begun < 5


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("command_timeout_s=31", "environment_step_s=60.0: must be at least 61 with "),
        ("test_timeout_s=21", "test_timeout_s=21.0: must be at most "),
        ("max_output=999", "max_output=999: must be at least 1000 and at most 200000"),
    ],
)
def test_inconsistent_limits_are_rejected(override: str, message: str):
    with pytest.raises(ConfigError, match=re.escape(message)):
        prepare_config(["environment.env_class=mini_swe", f"environment.skyrl_gym.mini_swe.{override}", "device=cpu"])


def test_trajectories_are_saved_in_configured_folder(tmp_path: Path):
    with Episode(row(TASKS[1]), traj_dir=str(tmp_path / "kept")) as episode:
        episode.run("ls")
        episode.run(DONE)
    with Episode(row(TASKS[1]), traj_dir=str(tmp_path / "kept")) as truncated:
        truncated.run("ls")
    with Episode(row(TASKS[1]), traj_dir=str(tmp_path / "kept")):
        pass  # an episode without turns
    paths = list((tmp_path / "kept").iterdir())
    assert all(path.name.startswith("median-") for path in paths)
    trajectories = [json.loads(path.read_text()) for path in paths]
    assert {trajectory["reward"]: [step["command"] for step in trajectory["steps"]] for trajectory in trajectories} == {
        0.0: ["ls", DONE],
        None: ["ls"],
    }
    assert len(trajectories) == 2


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"repository": None}, "the row has no column repository. If its repository is a container image"),
        ({"repository": {"../x": ""}}, "the row needs repository"),
        ({"repository": "{"}, "the row needs repository"),
        ({"repository": {str(number): "" for number in range(501)}}, "501 files and 0 bytes; at most 500 files"),
        ({"repository": {"x": "x" * 2_000_000}}, "2000000 bytes; at most 500 files and 1048576 bytes"),
        ({"protected": "test_ring.py"}, "protected='test_ring.py' must be"),
        ({"protected": '["tests/none.py"]'}, "files of the row's repository"),
        ({"tests": "[]"}, "has no tests"),
        ({"tests": [{"script": ""}]}, "the row needs tests"),
    ],
)
def test_row_that_cannot_be_graded_is_rejected(changed: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        MiniSWEEnv(SETTINGS, row(TASKS[0]) | changed)


def test_git_and_templates_are_checked_early():
    MiniSWEEnv.check(SETTINGS)
    with pytest.raises(ConfigError, match=r"mini_swe\.system_template is not a valid Jinja template"):
        MiniSWEEnv.check(SETTINGS | {"system_template": "{{ task"})


def test_keys_of_recipe_become_settings(tmp_path: Path):
    example = Path(__file__).parents[4] / "examples" / "mini_swe_agent" / "swebench.yaml"
    keys = add_recipe_defaults([f"generator.miniswe_config_path={example}", "+generator.miniswe_traj_dir=/kept"])
    prepared = prepare_config(
        [*keys, "environment.skyrl_gym.mini_swe.test_timeout_s=9", "device=cpu"], has_user_code=True
    )
    assert not [text for text in prepared.warnings if "mini_swe" in text]
    config = with_settings(prepared.config)
    settings = config.environment.skyrl_gym.mini_swe
    assert settings.traj_dir == "/kept" and settings.command_timeout_s == 30
    assert "<issue>" in str(settings.instance_template)
    assert config.environment.env_class == "mini_swe"
    broken = prepare_config(
        [*add_recipe_defaults(["generator.miniswe_config_path=/none.yaml"]), "device=cpu"], has_user_code=True
    ).config
    with pytest.raises(ConfigError, match=r"miniswe_config_path='/none\.yaml'"):
        with_settings(broken)
    slow = tmp_path / "slow.yaml"
    slow.write_text("environment: {timeout: 60}")
    late = prepare_config(
        [*add_recipe_defaults([f"generator.miniswe_config_path={slow}"]), "device=cpu"], has_user_code=True
    ).config
    with pytest.raises(ConfigError, match=r"environment_step_s=60\.0: must be at least 90"):
        with_settings(late)
