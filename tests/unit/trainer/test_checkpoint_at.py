"""A checkpoint that somebody names, whoever wrote it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from skyrl_train.errors import CheckpointError
from skyrl_train.trainer.checkpoints import checkpoint_at


@pytest.mark.parametrize("scheme", ["", "file://"])
@pytest.mark.parametrize("state", ['{"global_step": Infinity}', '{"global_step": "x"}', "{}", "[" * 100_000])
def test_state_without_a_step_is_a_damaged_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str, scheme: str
):
    monkeypatch.setenv("SKYRL_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "run" / "global_step_1"
    folder.mkdir(parents=True)
    (folder / "trainer_state.json").write_text(state)
    held = {"bytes": len(state), "sha256": hashlib.sha256(state.encode()).hexdigest()}
    (folder / "manifest.json").write_text(json.dumps({"files": {"trainer_state.json": held}}))
    with pytest.raises(CheckpointError), checkpoint_at(f"{scheme}{folder}", ()):
        pass
