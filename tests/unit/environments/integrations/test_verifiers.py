"""Tests with environments of the real library, if it is installed: it pins versions of other packages."""

from __future__ import annotations

import asyncio
import importlib.util
from pathlib import Path
from typing import Any

import pytest

from skyrl_train.data.messages import Prompt
from skyrl_train.environments.integrations import verifiers
from skyrl_train.environments.pool import WorkerPool
from skyrl_train.errors import ConfigError, EnvironmentFailure

INSTALLED = importlib.util.find_spec("verifiers") is not None
needs_library = pytest.mark.skipif(not INSTALLED, reason="needs verifiers below 0.2, in an environment of its own")


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


def play(texts: list[str], max_turns: int = 10, row: int = 0, **env_args: Any) -> list[Any]:
    config = {"env_id": "vf-guess", "env_args": env_args}
    dataset_row = list(verifiers.make_rows(config, "train"))[row]
    extras = {key: value for key, value in dataset_row.items() if key not in ("prompt", "env_class")}

    async def main() -> list[Any]:
        outputs: list[Any] = []
        async with WorkerPool({"verifiers": config}, 1, 120.0) as pool:
            prompt = Prompt("0", dataset_row["prompt"], "verifiers", extras | {"max_turns": max_turns})
            episode = await pool.start("verifiers", prompt)
            outputs.append(episode.messages)
            try:
                for text in texts:
                    outputs.append(await episode.step(text))
            except EnvironmentFailure as failure:
                outputs.append(failure.kind)
            await episode.close()
        return outputs

    return asyncio.run(asyncio.wait_for(main(), 200))


@needs_library
def test_single_turn_is_scored_by_rubric():
    opening, output = play(["I say 18, surely"])
    assert opening == [{"role": "system", "content": "Be short."}, {"role": "user", "content": "6 * 3?"}]
    assert (output.reward, output.done, output.observations) == (1.0, True, [])
    assert (output.metadata["right"], output.metadata["short"]) == (1.0, 0.0)


@needs_library
def test_multi_turn_episode_ends_by_environment():
    _, first, second, last = play(["1?", "2?", "8"], row=1, turns=5)
    assert (first.observations, first.reward, first.done) == ([{"role": "user", "content": "1 guesses"}], 0.0, False)
    assert second.observations[0]["content"] == "2 guesses"
    assert (last.reward, last.done) == (1.5, True)
    assert last.metadata["num_turns"] == 3


@needs_library
@pytest.mark.parametrize("limits", [{"max_turns": 2, "turns": 9}, {"max_turns": 9, "turns": 2}])
def test_truncated_episode_is_scored(limits: dict[str, int]):
    *_, last = play(["1?", "2?"], **limits)
    assert (last.reward, last.done) == (0.5, True)


@needs_library
def test_environment_error_class_is_failure_kind():
    assert play(["break", "8"], turns=5)[-1] == "ToolError"


@needs_library
def test_unknown_environment_is_a_config_error():
    with pytest.raises(ConfigError, match="no-such-thing"):
        next(verifiers.make_rows({"env_id": "no-such-thing"}, "train"))


@pytest.mark.skipif(INSTALLED, reason="verifiers is installed")
def test_missing_library_error_says_what_to_install():
    with pytest.raises(ConfigError, match=r"uv pip install 'verifiers>=0\.1"):
        verifiers.VerifiersEnv.check({"env_id": "x"})


def test_rows_cannot_choose_environment(monkeypatch: pytest.MonkeyPatch):
    loaded = []
    monkeypatch.setattr(verifiers, "_load_environment", lambda name, arguments: loaded.append(name))
    row = {"verifiers": {"input": '{"answer": "1", "env_id": "os"}', "env_id": "os"}, "env_id": "os"}
    environment = verifiers.VerifiersEnv({"env_id": "mine"}, row)
    environment.close()
    assert loaded == ["mine"]
    with pytest.raises(ConfigError, match=r"verifiers\.env_id=None"):
        verifiers.VerifiersEnv({}, row)
