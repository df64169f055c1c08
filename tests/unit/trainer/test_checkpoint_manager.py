"""Checkpoints and exports of a real learner: in the background, on a full disk, and with pending actions."""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from skyrl_train.config.schema import GuardsConfig
from skyrl_train.data.chat_templates import TEMPLATES
from skyrl_train.errors import CheckpointError
from skyrl_train.learner.learner import Learner
from skyrl_train.models.export import export_hf
from skyrl_train.strategies.checkpoint_shards import CheckpointShard
from skyrl_train.testing.tiny_models import byte_tokenizer, tiny_model
from skyrl_train.trainer import checkpoint_manager
from skyrl_train.trainer.checkpoint_manager import CheckpointManager, PendingActions
from skyrl_train.trainer.checkpoints import CheckpointStore, find_checkpoint_damage
from skyrl_train.trainer.guards import Guards
from tests.support.checkpoint_fixtures import Position, rewrite_trainer_state, with_saved_state
from tests.support.disk_limits import limit_file_size
from tests.support.learner_specs import policy_batch


def shard_digest(folder: Path) -> str:
    return hashlib.sha256((folder / "policy" / "shard_0.safetensors").read_bytes()).hexdigest()


def test_resume_restores_step_version_and_pending_actions(tiny_model_path: str, tmp_path: Path):
    async def first(state: CheckpointManager, learner: Learner, position: Position) -> None:
        assert await state.resume() == (0, PendingActions((), {}))
        await learner.update(policy_batch())
        position.at = 3
        state.skipped_updates.observe(1, {"policy/skipped": 0.5})
        state.capture_state()
        position.at = 5  # a change of the next step, which must not be saved
        await state.save(1, PendingActions(("evaluate",), {"reward/mean": 0.5}))
        assert (state.saved_step, learner.version) == (1, 1)

    async def second(state: CheckpointManager, learner: Learner, position: Position) -> None:
        assert await state.resume() == (1, PendingActions(("evaluate",), {"reward/mean": 0.5}))
        assert (position.at, learner.version, state.saved_step) == (3, 1, 1)
        state.skipped_updates.observe(2, {"policy/skipped": 1.0})
        assert state.skipped_updates.since == 1  # the series of skipped updates began before the checkpoint
        state.skipped_updates.observe(3, {"policy/skipped": 0.0})
        assert state.skipped_updates.since is None

    with_saved_state(tiny_model_path, tmp_path, first)
    with_saved_state(tiny_model_path, tmp_path, second)


def test_controller_missing_in_checkpoint_is_unchanged(tiny_model_path: str, tmp_path: Path):
    async def save(state: CheckpointManager, learner: Learner, position: Position) -> None:
        await state.save(1)

    async def resume(state: CheckpointManager, learner: Learner, position: Position) -> None:
        assert (await state.resume())[0] == 1

    guards = Guards(GuardsConfig(), None)
    guards.load_state_dict({"equal_steps": 7})
    with_saved_state(tiny_model_path, tmp_path, save)
    with_saved_state(tiny_model_path, tmp_path, resume, more={"guards": guards})
    assert guards.state_dict() == {"equal_steps": 7}


def test_exports_and_checkpoints_have_the_chat_template(tiny_model_path: str, tmp_path: Path):
    async def steps(state: CheckpointManager, learner: Learner, position: Position) -> None:
        exported = await state.export(1)
        assert AutoTokenizer.from_pretrained(exported).chat_template == TEMPLATES["mistral"]
        await state.save(1)

    with_saved_state(tiny_model_path, tmp_path, steps, chat_template=TEMPLATES["mistral"])
    saved = json.loads((tmp_path / "global_step_1" / "trainer_state.json").read_text())
    assert saved["chat_template"] == TEMPLATES["mistral"]


def test_export_replaces_that_of_another_run(tiny_model_path: str, tmp_path: Path):
    """Engines read the index of an export, which would name the weights of the other run."""
    folder = tmp_path / "exports" / "global_step_1" / "policy"
    other = tiny_model()
    export_hf(other.config, iter(other.named_parameters()), byte_tokenizer(), folder, max_shard_bytes=100_000)
    (folder / "adapter").mkdir()

    async def steps(state: CheckpointManager, learner: Learner, position: Position) -> None:
        await state.export(1)

    with_saved_state(tiny_model_path, tmp_path, steps)
    assert [file.name for file in folder.glob("*.safetensors*")] == ["model.safetensors"]
    assert not (folder / "adapter").exists()


@pytest.mark.defect("forged-run-state")
def test_malformed_state_names_file_and_key(tiny_model_path: str, tmp_path: Path):
    good: dict[str, Any] = {"controllers": {"position": {"at": 0}}, "fingerprints": {"data": "abc"}}
    good |= dict.fromkeys(("unfinished", "base_models", "chat_template"))  # not saved by earlier versions
    malformed: list[tuple[str, Any]] = [
        ("fingerprints", None),
        ("fingerprints", [["data", "abc"]]),
        ("chat_template", ["abc"]),
        ("base_models", {"policy": "abc"}),
        ("base_models", {"policy": {"weights": "abc"}}),
        ("base_models", {"policy": {"weights": "abc", "lora": {"rank": 8}}}),
        ("controllers", None),
        ("controllers", "position"),
        ("controllers", {"position": 3}),
        ("controllers", {"position": {}}),
        ("controllers", {"position": {"at": 0}, "skipped_updates": {"since": "never"}}),
        ("unfinished", []),
        ("unfinished", {"actions": ["export"]}),
        ("unfinished", {"actions": 3, "row": {}}),
        ("unfinished", {"actions": [], "row": {"reward/mean": "high"}}),
    ]

    async def steps(state: CheckpointManager, learner: Learner, position: Position) -> None:
        await state.save(1)
        for key, value in malformed:
            rewrite_trainer_state(tmp_path / "global_step_1", **good | {key: value})
            with pytest.raises(
                CheckpointError, match=rf"trainer_state\.json: {key}.*=.* is not a value that a run saves"
            ):
                await state.resume()
        rewrite_trainer_state(tmp_path / "global_step_1", **good)
        assert await state.resume() == (1, PendingActions((), {}))

    with_saved_state(tiny_model_path, tmp_path, steps)


@pytest.mark.defect("hashing-blocks-event-loop")
def test_reported_digests_match_written_files(tiny_model_path: str, tmp_path: Path):
    async def save(state: CheckpointManager, learner: Learner, position: Position) -> None:
        await state.save(1)

    with_saved_state(tiny_model_path, tmp_path, save)
    assert find_checkpoint_damage(tmp_path / "global_step_1") is None
    files = json.loads((tmp_path / "global_step_1" / "manifest.json").read_text())["files"]
    assert set(files) == {"policy/shard_0.json", "policy/shard_0.safetensors", "trainer_state.json"}
    assert files["policy/shard_0.safetensors"]["sha256"] == shard_digest(tmp_path / "global_step_1")


@pytest.fixture
def slow_writes(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Return an event that must be set before shards are written."""
    may_write, write = threading.Event(), CheckpointShard.write

    def wait_and_write(self: CheckpointShard, folder: Path) -> Any:
        assert may_write.wait(30)
        return write(self, folder)

    monkeypatch.setattr(CheckpointShard, "write", wait_and_write)
    return may_write


def test_background_save_has_the_weights_of_its_step(
    tiny_model_path: str, tmp_path: Path, slow_writes: threading.Event
):
    async def in_background(state: CheckpointManager, learner: Learner, position: Position) -> None:
        await learner.update(policy_batch())
        await state.save(1)
        assert not (tmp_path / "background" / "global_step_1").exists()
        await learner.update(policy_batch(seed=1))  # changes the weights in place
        slow_writes.set()
        await state.save(2)  # waits for the first save
        assert (tmp_path / "background" / "global_step_1").exists()
        await state.ensure_saved(2)

    async def in_foreground(state: CheckpointManager, learner: Learner, position: Position) -> None:
        for seed, step in ((0, 1), (1, 2)):
            await learner.update(policy_batch(seed=seed))
            await state.save(step)

    with_saved_state(tiny_model_path, tmp_path / "background", in_background, async_checkpoint=True)
    with_saved_state(tiny_model_path, tmp_path / "foreground", in_foreground)
    for step in (1, 2):
        actual, expected = (tmp_path / kind / f"global_step_{step}" for kind in ("background", "foreground"))
        assert find_checkpoint_damage(actual) is None
        assert shard_digest(actual) == shard_digest(expected)
    assert shard_digest(actual) != shard_digest(tmp_path / "background" / "global_step_1")


@pytest.mark.parametrize("in_background", [False, True])
@pytest.mark.fault("F36")
@pytest.mark.defect("C5-full-disk-ends-the-run")
def test_third_failed_save_in_a_row_raises(
    tiny_model_path: str,
    tmp_path: Path,
    in_background: bool,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
):
    async def steps(state: CheckpointManager, learner: Learner, position: Position) -> None:
        await state.save(1)
        await state.wait_until_written()
        with limit_file_size(None, 1000):
            for step in (2, 3):
                await state.save(step)
                await state.wait_until_written()
        assert state.saved_step == 1
        assert [path.name for path in tmp_path.glob("global_step_*")] == ["global_step_1"]  # no partial folder remains
        await state.save(4)
        await state.ensure_saved(4)
        with limit_file_size(None, 1000):
            await state.save(5)
            with pytest.raises(CheckpointError, match=r"step 5 COULD NOT BE WRITTEN.*failure 3 in a row"):
                await state.ensure_saved(5)
        await state.ensure_saved(4)

    monkeypatch.setattr(checkpoint_manager, "RETRY_INTERVAL_S", 0.0)
    with_saved_state(tiny_model_path, tmp_path, steps, async_checkpoint=in_background)
    assert caplog.text.count("COULD NOT BE WRITTEN") >= 4
    assert find_checkpoint_damage(tmp_path / "global_step_4") is None


@pytest.mark.fault("F36")
@pytest.mark.defect("full-disk-during-export")
def test_export_is_retried_after_a_full_disk(
    tiny_model_path: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    async def steps(state: CheckpointManager, learner: Learner, position: Position) -> None:
        monkeypatch.setattr(checkpoint_manager, "RETRY_INTERVAL_S", 0.0)
        with (
            limit_file_size(None, 1000),
            pytest.raises(CheckpointError, match=r"Export of step 1 COULD NOT.*failure 3 in a row. Free disk space"),
        ):
            await state.export(1)
        assert not list(tmp_path.rglob("*.safetensors"))
        monkeypatch.setattr(checkpoint_manager, "RETRY_INTERVAL_S", 0.5)
        with ExitStack() as full_disk:
            full_disk.enter_context(limit_file_size(None, 1000))
            asyncio.get_running_loop().call_later(0.25, full_disk.close)
            folder = await state.export(2)
        assert AutoModelForCausalLM.from_pretrained(folder).num_parameters() > 0
        assert len(AutoTokenizer.from_pretrained(folder)) > 0

    with_saved_state(tiny_model_path, tmp_path, steps)
    assert caplog.text.count("COULD NOT BE WRITTEN") >= 3


def test_canceled_save_is_completed(tiny_model_path: str, tmp_path: Path, slow_writes: threading.Event):
    async def steps(state: CheckpointManager, learner: Learner, position: Position) -> None:
        saving = asyncio.ensure_future(state.save(1))
        await asyncio.sleep(0.1)
        saving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await saving
        slow_writes.set()
        await state.wait_until_written()
        assert state.saved_step == 1

    with_saved_state(tiny_model_path, tmp_path, steps)
    assert find_checkpoint_damage(tmp_path / "global_step_1") is None


@pytest.mark.defect("C9-deleting-folders-stay")
def test_next_save_removes_interrupted_deletions(tmp_path: Path):
    (tmp_path / "global_step_1.deleting" / "policy").mkdir(parents=True)
    CheckpointStore(tmp_path).begin(2)
    assert [path.name for path in tmp_path.iterdir()] == ["global_step_2.partial"]
