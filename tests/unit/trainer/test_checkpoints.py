from __future__ import annotations

import hashlib
import json
import logging
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from skyrl_train.atomic_files import digest_file
from skyrl_train.errors import CheckpointError, ConfigError
from skyrl_train.trainer.checkpoints import CheckpointStore, find_checkpoint_damage, open_run_checkpoint

WEIGHTS = b"weights of step %d" * 1000


def save(checkpoints: CheckpointStore, step: int) -> Path:
    folder = checkpoints.begin(step)
    (folder / "policy").mkdir()
    (folder / "policy" / "rank0.safetensors").write_bytes(WEIGHTS % ((step,) * 1000))
    return checkpoints.commit(step, {"seed": 7})


def test_latest_is_the_newest_committed_step_with_its_state(tmp_path: Path):
    checkpoints = CheckpointStore(tmp_path)
    for step in (2, 10):
        save(checkpoints, step)
    found = CheckpointStore(tmp_path).find_resumable("latest")
    assert found is not None
    assert (found.step, found.path) == (10, tmp_path / "global_step_10")
    assert found.state == {"global_step": 10, "seed": 7}
    assert (tmp_path / "latest_ckpt_global_step.txt").read_text() == "10"


def test_find_resumable_returns_none_without_checkpoints(tmp_path: Path):
    assert CheckpointStore(tmp_path / "absent").find_resumable("latest") is None
    save(CheckpointStore(tmp_path), 1)
    assert CheckpointStore(tmp_path).find_resumable("none") is None
    assert CheckpointStore(tmp_path).find_resumable(None) is None


def test_from_path_loads_checkpoint_of_another_run(tmp_path: Path):
    other = CheckpointStore(tmp_path / "other")
    save(other, 4)
    save(other, 8)
    found = CheckpointStore(tmp_path / "own").find_resumable("from_path", tmp_path / "other" / "global_step_4")
    assert found is not None
    assert found.step == 4


def test_manifest_step_overrides_folder_name(tmp_path: Path):
    checkpoints = CheckpointStore(tmp_path)
    for step in (3, 5):
        save(checkpoints, step)
    (tmp_path / "global_step_3").rename(tmp_path / "global_step_20")
    latest = checkpoints.find_resumable("latest")
    assert latest is not None and (latest.step, latest.path.name) == (5, "global_step_5")
    renamed = checkpoints.find_resumable("from_path", tmp_path / "global_step_20")
    assert renamed is not None and (renamed.step, renamed.path.name) == (3, "global_step_20")


def test_pruning_uses_the_manifest_step(tmp_path: Path):
    checkpoints = CheckpointStore(tmp_path)
    for step in (50, 100):
        save(checkpoints, step)
    (tmp_path / "global_step_100").rename(tmp_path / "global_step_10")
    save(checkpoints, 60)
    assert checkpoints.steps() == [50, 60]
    found = checkpoints.find_resumable("latest")
    assert found is not None and found.step == 60
    (tmp_path / "global_step_60").rename(tmp_path / "global_step_1")
    save(CheckpointStore(tmp_path, max_ckpts_to_keep=2), 70)
    assert checkpoints.steps() == [60, 70]


def test_resume_path_may_be_a_symbolic_link(tmp_path: Path):
    save(CheckpointStore(tmp_path / "there"), 30)
    (tmp_path / "global_step_40").symlink_to(tmp_path / "there" / "global_step_30")
    found = CheckpointStore(tmp_path / "own").find_resumable("from_path", tmp_path / "global_step_40")
    assert found is not None and found.step == 30


@pytest.mark.parametrize("name", ["manifest.json", "trainer_state.json"])
@pytest.mark.parametrize(
    "content",
    [
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"[]",
        b"7" * 5_000,
        pickle.dumps({"files": {}}),
        b"\xff\xfe",
        b'{"files": 3}',
    ],
    ids=["deep list", "deep object", "list", "number", "pickle", "binary", "no files"],
)
def test_malformed_json_counts_as_damage(tmp_path: Path, name: str, content: bytes):
    checkpoints = CheckpointStore(tmp_path)
    for step in (1, 2):
        save(checkpoints, step)
    folder = tmp_path / "global_step_2"
    (folder / name).write_bytes(content)
    if name == "trainer_state.json":  # make the checksum match
        manifest = json.loads((folder / "manifest.json").read_text())
        manifest["files"][name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        (folder / "manifest.json").write_text(json.dumps(manifest))
    started = time.monotonic()
    found = checkpoints.find_resumable("latest")
    assert time.monotonic() - started < 3
    if content == b'{"files": 3}' and name == "trainer_state.json":
        assert found is not None and found.step == 2  # any JSON object is a valid state
    else:
        assert found is not None and found.step == 1


@pytest.mark.parametrize(
    ("mode", "path"), [("newest", None), ("from_path", None), ("from_path", "/absent/global_step_3")]
)
def test_invalid_mode_or_path_is_rejected(tmp_path: Path, mode: str, path: str | None):
    with pytest.raises(ConfigError, match=r"resume_(mode|path)="):
        CheckpointStore(tmp_path).find_resumable(mode, path)


@pytest.mark.parametrize("keep", [0, -2])
def test_keeping_no_checkpoint_is_rejected(tmp_path: Path, keep: int):
    with pytest.raises(ConfigError, match="max_ckpts_to_keep"):
        CheckpointStore(tmp_path, keep)


def test_only_newest_checkpoints_are_kept(tmp_path: Path):
    checkpoints = CheckpointStore(tmp_path, max_ckpts_to_keep=2)
    for step in range(1, 6):
        save(checkpoints, step)
    assert checkpoints.steps() == [4, 5]
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["global_step_4", "global_step_5"]


def test_saving_the_same_step_again_replaces_it(tmp_path: Path):
    checkpoints = CheckpointStore(tmp_path)
    save(checkpoints, 1)
    folder = checkpoints.begin(1)
    (folder / "other").write_text("x")
    checkpoints.commit(1, {})
    assert {p.name for p in (tmp_path / "global_step_1").iterdir()} == {"other", "manifest.json", "trainer_state.json"}
    assert find_checkpoint_damage(tmp_path / "global_step_1") is None


@pytest.mark.fault("F35")
def test_kill_during_replacement_keeps_old_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    checkpoints = CheckpointStore(tmp_path)
    save(checkpoints, 1)
    rename = Path.rename

    def interrupted(path: Path, target: Path) -> Path:
        if path.name.endswith(".partial"):
            raise KeyboardInterrupt  # the old folder is renamed, the new one is not yet in place
        return rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", interrupted)
        with pytest.raises(KeyboardInterrupt):
            save(checkpoints, 1)
    assert checkpoints.steps() == []
    found = checkpoints.find_resumable("latest")
    assert found is not None and (found.step, found.path.name) == (1, "global_step_1")


def test_commit_rejects_missing_file_of_a_rank(tmp_path: Path):
    checkpoints = CheckpointStore(tmp_path)
    (checkpoints.begin(1) / "shard_0.json").write_text("{}")
    written = {"shard_0.json": digest_file(tmp_path / "global_step_1.partial" / "shard_0.json", fsync=False)}
    with pytest.raises(CheckpointError, match=r"does not contain shard_1\.json.*disk that all nodes share"):
        checkpoints.commit(1, {}, written | {"shard_1.json": written["shard_0.json"]})
    assert checkpoints.find_resumable("latest") is None


def test_later_checkpoints_are_set_aside_after_going_back(tmp_path: Path):
    checkpoints = CheckpointStore(tmp_path)
    for step in (10, 20, 30):
        save(checkpoints, step)
    save(checkpoints, 15)
    found = checkpoints.find_resumable("latest")
    assert found is not None
    assert found.step == 15
    assert find_checkpoint_damage(tmp_path / "global_step_30.set_aside_0") is None, (
        "later checkpoints are renamed, not deleted"
    )


@pytest.mark.fault("F35")
def test_interrupted_save_is_reported_but_not_loaded(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    checkpoints = CheckpointStore(tmp_path)
    save(checkpoints, 1)
    partial = checkpoints.begin(2)
    (partial / "file").write_text("x")
    with caplog.at_level(logging.WARNING):
        found = CheckpointStore(tmp_path).find_resumable("latest")
    assert found is not None
    assert found.step == 1
    assert "global_step_2.partial is incomplete" in caplog.text
    assert (partial / "file").exists()
    assert list(checkpoints.begin(2).iterdir()) == [], "the next save of the step starts with an empty folder"


def delete(file: Path) -> None:
    file.unlink()


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


def flip_bit(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


@pytest.mark.fault("F36")
@pytest.mark.parametrize("damage", [delete, truncate, flip_bit])
@pytest.mark.parametrize("name", ["policy/rank0.safetensors", "trainer_state.json", "manifest.json"])
def test_damaged_checkpoint_falls_back_to_the_previous(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage, name: str
):
    checkpoints = CheckpointStore(tmp_path)
    save(checkpoints, 1)
    damage(save(checkpoints, 2) / name)
    with caplog.at_level(logging.ERROR):
        found = checkpoints.find_resumable("latest")
    assert found is not None
    assert found.step == 1
    assert "global_step_2 IS DAMAGED" in caplog.text


@pytest.mark.fault("F36")
def test_damage_to_all_checkpoints_is_an_error(tmp_path: Path):
    checkpoints = CheckpointStore(tmp_path)
    flip_bit(save(checkpoints, 1) / "policy" / "rank0.safetensors")
    with pytest.raises(CheckpointError, match=r"\[1\]"):
        checkpoints.find_resumable("latest")


@pytest.mark.fault("F36")
def test_full_disk_keeps_earlier_checkpoint_loadable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    checkpoints = CheckpointStore(tmp_path)
    save(checkpoints, 1)
    folder = checkpoints.begin(2)
    (folder / "big").write_text("x")

    def fail(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space"):
        checkpoints.commit(2, {})
    found = checkpoints.find_resumable("latest")
    assert found is not None
    assert found.step == 1


def rewrite_manifest(folder: Path, name: str, data: bytes) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"][name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (folder / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.fault("F38")
@pytest.mark.parametrize("name", ["../../secret", "policy/../../../secret", "/etc/hostname", ""])
def test_manifest_with_outside_path_is_rejected(tmp_path: Path, name: str):
    folder = save(CheckpointStore(tmp_path / "run"), 1)
    (tmp_path / "secret").write_bytes(b"s")
    rewrite_manifest(folder, name, b"s")
    assert "is not the name of a file inside the folder" in str(find_checkpoint_damage(folder))


@pytest.mark.fault("F38")
@pytest.mark.parametrize("linked", ["policy", "policy/rank0.safetensors"])
def test_symbolic_link_in_checkpoint_is_rejected(tmp_path: Path, linked: str):
    folder = save(CheckpointStore(tmp_path), 1)
    shutil.move(folder / linked, tmp_path / "elsewhere")
    (folder / linked).symlink_to(tmp_path / "elsewhere")
    assert "symbolic link" in str(find_checkpoint_damage(folder))


SAVE_LOOP = """
import sys
from pathlib import Path
from skyrl_train.trainer.checkpoints import CheckpointStore
checkpoints = CheckpointStore(Path(sys.argv[1]), max_ckpts_to_keep=2)
print("ready", flush=True)
for step in range(1, 10**9):
    folder = checkpoints.begin(step)
    (folder / "policy").mkdir()
    for rank in range(3):
        (folder / "policy" / f"rank{rank}").write_bytes(bytes([step % 251]) * 200_000)
    checkpoints.commit(step, {"step_again": step})
    print(step, flush=True)
"""


@pytest.mark.fault("F35")
@pytest.mark.parametrize("seed", range(6))
def test_kill_during_save_loses_only_that_save(tmp_path: Path, seed: int):
    process = subprocess.Popen([sys.executable, "-c", SAVE_LOOP, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    time.sleep(random.Random(seed).uniform(0.0, 0.3))
    process.send_signal(signal.SIGKILL)
    output, _ = process.communicate(timeout=30)
    committed = max((int(line) for line in output.split()), default=0)
    found = CheckpointStore(tmp_path).find_resumable("latest")
    step = found.step if found else 0
    assert step in (committed, committed + 1), "the next checkpoint may be committed but not printed"
    assert found is None or found.state["step_again"] == step
    again = save(CheckpointStore(tmp_path, max_ckpts_to_keep=2), step + 1)
    assert find_checkpoint_damage(again) is None, "a save works in spite of what the crash left"


def test_files_are_durable_before_they_become_visible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    events: list[tuple[str, Path]] = []
    fsync, rename = os.fsync, os.rename

    def record_fsync(descriptor: int) -> None:
        events.append(("fsync", Path(os.readlink(f"/proc/self/fd/{descriptor}"))))
        fsync(descriptor)

    def record_rename(source: Any, target: Any) -> None:
        events.append(("rename", Path(source)))
        rename(source, target)

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(os, "rename", record_rename)
    monkeypatch.setattr(os, "replace", record_rename)
    final = save(CheckpointStore(tmp_path), 3)
    files = [path.relative_to(final) for path in final.rglob("*")]
    partial = next(
        path for kind, path in events if kind == "rename" and path.parent == tmp_path and path.suffix != ".new"
    )
    visible = events.index(("rename", partial))
    durable_before = {path for kind, path in events[:visible] if kind == "fsync"}
    for name in files:
        written = partial / name
        assert written in durable_before or written.with_name(f".{name.name}.new") in durable_before, name
    assert partial in durable_before
    assert ("fsync", tmp_path) in events[visible:], "the new name of the folder is durable"
    for position, (kind, path) in enumerate(events):
        if kind == "rename" and path.suffix == ".new":
            assert ("fsync", path) in events[:position]
            assert ("fsync", path.parent) in events[position:]


@pytest.mark.parametrize("scheme", ["", "file://"])
@pytest.mark.parametrize("state", ['{"global_step": Infinity}', '{"global_step": "x"}', "{}", "[" * 100_000])
def test_state_without_a_step_is_a_damaged_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str, scheme: str
):
    monkeypatch.setenv("SKYRL_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "run" / "global_step_1"
    folder.mkdir(parents=True)
    (folder / "trainer_state.json").write_text(state)
    digest = {"bytes": len(state), "sha256": hashlib.sha256(state.encode()).hexdigest()}
    (folder / "manifest.json").write_text(json.dumps({"files": {"trainer_state.json": digest}}))
    with pytest.raises(CheckpointError), open_run_checkpoint(f"{scheme}{folder}", ()):
        pass
