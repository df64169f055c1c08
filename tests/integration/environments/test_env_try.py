"""`skyrl-train env try` as users call it: its output and its exit code."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import datasets
import pytest

from skyrl_train.entrypoints import cli
from skyrl_train.environments import registry
from skyrl_train.testing.tiny_models import save_tiny_model
from tests.support.doc_pages import REPOSITORY, Command, find_commands, snippets

PLUGINS = Path(__file__).parent / "plugins"
ROW = {
    "prompt": [{"role": "user", "content": "6 * 3?\nthink"}],
    "reward_spec": {"method": "rule", "ground_truth": "18"},
}


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(PLUGINS))
    path = tmp_path / "rows.jsonl"
    second = ROW | {"reward_spec": {"method": "rule", "ground_truth": "19"}, "env_class": "another_environment"}
    path.write_text("\n".join(json.dumps(row) for row in (ROW, second)))
    return path


def run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: object
) -> tuple[int, str, str]:
    """Run `skyrl-train env try ...`, and return its exit code, output and errors."""
    monkeypatch.setattr(sys, "argv", ["skyrl-train", "env", "try", *map(str, arguments)])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    captured = capsys.readouterr()
    assert isinstance(caught.value.code, int)
    return caught.value.code, captured.out, captured.err


def test_a_completion_is_scored(data: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    code, out, _ = run(capsys, monkeypatch, "gsm8k", "--data", data, "--completion", "#### 18")
    assert code == 0
    assert "         user | 6 * 3?\n              | think\n" in out
    assert "turn 1: reward 1, done" in out
    assert "reward of the episode: 1 in 1 turn, done" in out
    code, out, _ = run(capsys, monkeypatch, "gsm8k", "--data", data, "--row", 1, "--completion", "#### 18")
    assert (code, "turn 1: reward 0, done" in out) == (0, True)


def test_completion_continues_the_prompts_last_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(ROW | {"prompt": [*ROW["prompt"], {"role": "assistant", "content": "<think>"}]}))  # type: ignore[misc]
    rewards = []
    for text in ("#### 18", "17?</think>#### 18"):
        code, out, _ = run(capsys, monkeypatch, "gsm8k", "--data", path, "--completion", text)
        assert code == 0 and f"assistant | <think>{text}\n" in out
        rewards.append("turn 1: reward 1, done" in out)
    assert rewards == [False, True]


def test_without_completions_the_prompt_is_shown(
    data: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    code, out, _ = run(capsys, monkeypatch, "gsm8k", "--data", data)
    assert code == 0
    assert "user | 6 * 3?" in out
    assert "reward" not in out


@pytest.mark.defect("dumped-evaluations-show-secrets")
def test_no_secret_is_shown(
    data: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HF_TOKEN", "canary-of-a-token")
    plugin = "trainer.plugins=[misbehaving_envs]"
    code, out, errors = run(capfd, monkeypatch, "BadEnd", "--data", data, "--completion", "go on", plugin)
    assert (code, "user | a key: <HF_TOKEN>" in out) == (0, True)
    assert "canary" not in out + errors + caplog.text
    assert "does not close with <HF_TOKEN>" in caplog.text


def test_env_try_uses_settings_of_a_run(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    answers = tmp_path / "answers.jsonl"
    lines = [["is it 17?", "18!", "more"], "18 at once", {"completion": ["17"], "row": 1}]
    answers.write_text("\n".join(map(json.dumps, lines)))
    code, out, _ = run(
        capsys,
        monkeypatch,
        *("SkyRLGymStyle", "--data", data, "--completions", answers),
        *("trainer.plugins=[misbehaving_envs]", "environment.skyrl_gym.own.SkyRLGymStyle.search.topk=5"),
        *("generator.max_turns=2",),
    )
    assert code == 0, out
    assert 'metadata | {"topk": 5}' in out
    assert "turn 1: reward 0\n" in out
    assert "user | go on" in out
    assert "turn 2: reward 1, done" in out
    assert "assistant | more\n" in out, "the text that the first episode did not use begins another one"
    assert "reward of the episode: 1 in 1 turn, not done yet" in out
    assert "episode 4: SkyRLGymStyle, row 1" in out


def test_every_completion_is_played(data: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    texts = ("--completion", "#### 18", "--completion", "#### 17", "--completion", "18?")
    code, out, _ = run(capsys, monkeypatch, "gsm8k", "--data", data, *texts)
    assert code == 0
    assert re.findall(r"assistant \| (.*)\n  turn 1: reward (\d), done", out) == [
        ("#### 18", "1"),
        ("#### 17", "0"),
        ("18?", "0"),
    ]
    assert re.findall(r"^episode.*", out, re.MULTILINE) == [
        *(f"episode {number}: gsm8k, row 0" for number in (1, 2, 3)),
        "episodes: 3, failed 0, mean reward 0.333333",
    ]


def test_failed_start_names_unplayed_completions(
    data: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    texts = ("--completion", "a", "--completion", "b")
    plugin = "trainer.plugins=[misbehaving_envs]"
    code, out, _ = run(capsys, monkeypatch, "Nests", "--data", data, *texts, plugin)
    assert code == 1
    assert out.count("FAILED") == 1
    assert "completions not played, because the episode could not start: 2" in out


@pytest.mark.fault("F24")
def test_control_characters_are_escaped(
    data: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    adversarial = "\x1b[2J\x1b]0;title\x07 NUL \x00 \r\u202e[bold]<script>\ud800"
    code, out, _ = run(
        capsys,
        monkeypatch,
        *("Chatty", "--data", data, "--completion", adversarial, "trainer.plugins=[misbehaving_envs]"),
    )
    assert code == 0
    assert all(character.isprintable() or character == "\n" for character in out)
    assert out.count(r"\x1b[2J\x1b]0;title\x07 NUL \x00 \r\u202e[bold]<script>\ud800") == 2, (
        "in the completion and in the observation"
    )


def test_failed_episode_does_not_stop_others(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    answers = tmp_path / "answers.jsonl"
    answers.write_text('"nan"\n"exits"\n"fine"')
    code, out, _ = run(
        capsys,
        monkeypatch,
        *("Misbehaving", "--data", data, "--completions", answers, "trainer.plugins=[misbehaving_envs]"),
    )
    assert code == 1
    assert "FAILED: bad_reward" in out
    assert "FAILED: SystemExit" in out


def test_the_prompt_as_a_model_reads_it(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    model = save_tiny_model(tmp_path / "model")
    code, out, _ = run(capsys, monkeypatch, "gsm8k", "--data", data, "--model", model)
    assert code == 0
    assert "as the model reads it, " in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gsm8", "--data", "{data}"], "Did you mean 'gsm8k'"),
        (["gsm8k", "--data", "{data}", "--row", "2"], "row 2 does not exist. Choose one from 0 to 1"),
        (["gsm8k", "--data", "missing.jsonl"], "missing.jsonl: no such file"),
        (["gsm8k", "--data", "{data}", "generator.max_turn=2"], "generator.max_turns"),
        (["gsm8k", "--data", "{data}", "18"], "'18' is not key=value"),
        (["gsm8k", "--data", "{data}", "--completions", "missing"], "--completions missing: No such file"),
        (["gsm8k", "--data", "{data}", "--completions", "{data}"], 'line 1: .* is not "text"'),
        (["gsm8k", "--data", "{data}", "trainer.plugins=[no_such_plugin]"], "no_such_plugin"),
        (["openenv", "--data", "{data}"], r"openenv\.base_url=None"),
        (["gsm8k"], "--data"),
    ],
)
def test_user_errors_exit_with_2(
    arguments: list[str], message: str, data: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    code, _, err = run(capsys, monkeypatch, *(argument.format(data=data) for argument in arguments))
    assert code == 2
    assert re.search(message, err), err


def test_missing_commands_are_distinguished(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "argv", ["skyrl-train", "envv", "try"])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 2
    assert "No such command 'envv'" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["skyrl-train", "check-config", "generator.max_turn=2"])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 2
    assert "generator.max_turns" in capsys.readouterr().err


GUESS_ENV = """
from skyrl_train.environments.integrations.skyrl_gym import BaseTextEnv, BaseTextEnvStepOutput, register

class GuessEnv(BaseTextEnv):
    def __init__(self, env_config, extras={}):
        super().__init__()
        self.truth, self.max_turns = extras["reward_spec"]["ground_truth"], extras["max_turns"]

    def step(self, action):
        self.turns += 1
        right = action.endswith(self.truth)
        hint = [{"role": "user", "content": "Try again."}]
        return BaseTextEnvStepOutput(
            observations=[] if right else hint,
            reward=float(right),
            done=right or self.turns >= self.max_turns,
            metadata={},
        )

register(id="guess", entry_point=GuessEnv)
"""
"""The environment that from_skyrl.md assumes: a class for SkyRL-Gym with the import lines of this package."""


@pytest.fixture
def docs_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create and enter a folder with the files that the guides and examples/reasoning_gym assume."""
    monkeypatch.setattr(registry.environments, "loaded", dict(registry.environments.loaded))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    monkeypatch.chdir(tmp_path)
    for module in ("my_envs", "guess_env"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    (tmp_path / "guess_env.py").write_text(GUESS_ENV)
    (tmp_path / "my_envs.py").write_text(snippets("docs/guides/foreign_environments.md")[0])
    rows = datasets.Dataset.from_list([ROW] * 4)
    rows.to_json("rows.jsonl")
    rows.to_parquet("train.parquet")
    Path("answers.jsonl").write_text('"a"\n["a", "b"]\n')
    save_tiny_model(Path("Qwen/Qwen2.5-0.5B-Instruct"))
    return tmp_path


ENV_TRY_COMMANDS = find_commands(
    r"skyrl-train env try (?!show_work|is_correct|graded|shopping|right_and_brief|guess_the_number)"
)
"""Commands whose environment no page defines; the tests of the pages run the others."""


@pytest.mark.parametrize("command", ENV_TRY_COMMANDS, ids=str)
def test_the_commands_of_the_pages(
    command: Command,
    docs_folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    if "reasoning_gym" in command.words:
        pytest.importorskip("reasoning_gym")
        for dataset in find_commands("python examples/reasoning_gym/reasoning_gym_dataset"):
            words = [sys.executable, str(REPOSITORY / dataset.words[1]), *map(os.path.expandvars, dataset.words[2:])]
            subprocess.run(words, check=True, capture_output=True, timeout=120)
        capsys.readouterr()
    code, out, err = run(capsys, monkeypatch, *map(os.path.expandvars, command.words[3:]))
    assert code == 0, out + err
    assert ("reward of the episode" in out) == any("--completion" in word for word in command.words)
