"""A run follows the file in its folder from its first sync on, and says why where it cannot."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from skyrl_train.engines.wanted import ENGINES_FILE, why_fixed, write_wanted
from skyrl_train.experiment import engines as builders
from skyrl_train.experiment.engines import WantedEngines


class Counted:
    """A scaler that does at once what it is asked for."""

    def __init__(self) -> None:
        self.number = 1
        self.asked: list[int] = []
        self.ended = False

    def set(self, wanted: int) -> None:
        self.number = wanted
        self.asked.append(wanted)

    async def end(self) -> None:
        self.ended = True


async def publish(version: int) -> dict[str, float]:
    return {"weights/version": float(version)}


@pytest.fixture(autouse=True)
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builders, "_LOOKS_EVERY_S", 0.01)


def test_what_is_asked_for_is_followed_once_the_engines_have_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    async def run() -> Counted:
        scaler: Any = Counted()
        wanted = WantedEngines(tmp_path, scaler, "")
        watched = wanted.after(publish)
        write_wanted(tmp_path, 3)
        await asyncio.sleep(0.05)
        assert scaler.asked == [], "nobody may join before the first sync"
        for version in range(2):
            assert await watched(version) == {"weights/version": version}
        await asyncio.sleep(0.05)
        (tmp_path / ENGINES_FILE).write_text("three")
        await asyncio.sleep(0.05)
        write_wanted(tmp_path, 2)
        await asyncio.sleep(0.05)
        write_wanted(tmp_path, 2)  # the same again: one that found no room is tried again
        await asyncio.sleep(0.05)
        await wanted.end()
        write_wanted(tmp_path, 5)
        await asyncio.sleep(0.05)
        return scaler  # type: ignore[no-any-return]

    scaler = asyncio.run(run())
    assert scaler.asked == [3, 2, 2]
    assert scaler.ended
    said = capsys.readouterr().out.splitlines()
    assert [line.split(None, 1)[1] for line in (said[0], said[2])] == [
        "3 are wanted, there are 1",
        "2 are wanted, there are 3",
    ]
    assert "their number stays as it is" in said[1]
    assert "'three'" in said[1]
    assert len(said) == 3


def test_where_the_number_is_fixed_who_asks_is_told_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    async def run() -> None:
        reason = why_fixed(colocate_all=True, run_engines_locally=True)
        assert reason is not None
        wanted = WantedEngines(tmp_path, None, reason)
        await wanted.after(publish)(0)
        await asyncio.sleep(0.05)
        assert capsys.readouterr().out == ""
        write_wanted(tmp_path, 3)
        await asyncio.sleep(0.05)
        await wanted.end()

    asyncio.run(run())
    (line,) = capsys.readouterr().out.splitlines()
    assert "engines.json changes nothing: its engines take turns with the trainer" in line
