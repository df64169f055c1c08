"""Mirrors of runs on a real S3 server and on a disk. Two local folders stand for two machines."""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
import threading
from pathlib import Path

import pytest

from skyrl_train.errors import CheckpointError, ConfigError, StorageError
from skyrl_train.experiment.run_resources import Mirrors
from skyrl_train.storage import mirror as mirrors
from skyrl_train.storage.manifests import download_folder
from skyrl_train.storage.mirror import Mirror
from skyrl_train.storage.uris import resolve_local_folder
from skyrl_train.trainer.checkpoints import find_checkpoint_damage
from tests.support.mirrored_runs import URI, MirroredMachine, puts, wait_until
from tests.support.s3_server import BUCKET, S3Server


def test_another_machine_loads_checkpoint_and_metrics(uri: str, tmp_path: Path):
    with MirroredMachine(tmp_path / "a", uri, keep=2) as here:
        for step in (10, 20, 30):
            here.save(step)
        here.mirror.finish(20)
    with MirroredMachine(tmp_path / "b", uri, keep=2) as there:
        assert there.mirror.remote_steps() == [20, 30], "the oldest remote checkpoint is deleted as well"
        assert json.loads((there.folder / "metrics.jsonl").read_text()) == {"step": 30}
        assert there.loaded() == (30, "weights of step 30")
        assert there.mirror.store.read("latest_ckpt_global_step.txt") == b"30"


def test_checkpoint_without_manifest_is_ignored(server: S3Server, tmp_path: Path):
    with MirroredMachine(tmp_path / "a") as here:
        here.save(10)
        wait_until(lambda: here.mirror.remote_steps() == [10])
        server.block_pattern = "PUT .*/global_step_20/policy/"
        here.save(20)
        assert server.is_blocking.wait(10)
        other = MirroredMachine(tmp_path / "b")
        assert other.mirror.remote_steps() == [10]
        assert other.loaded() == (10, "weights of step 10")
        server.unblock()
        here.mirror.finish(20)
        assert other.mirror.remote_steps() == [10, 20]


def test_metrics_and_manifest_are_uploaded_last(server: S3Server, tmp_path: Path):
    with MirroredMachine(tmp_path / "a") as here:
        here.save(10)
        here.mirror.finish(20)
    uploads = puts(server, "(global_step_10|metrics)")
    assert uploads[-2:] == ["metrics.jsonl", "global_step_10/manifest.json"]


def test_restart_cleans_up_interrupted_upload(server: S3Server, tmp_path: Path):
    before = MirroredMachine(tmp_path / "a")
    before.save(10)
    before.mirror.store.write("global_step_10/policy/rank_0", b"half")
    before.mirror.store.write("global_step_5/policy/rank_0", b"half")
    with MirroredMachine(tmp_path / "a") as again:
        again.mirror.finish(20)
    keys = {key for key in server.objects() if "/global_step" in key}
    names = ("manifest.json", "policy/rank_0", "trainer_state.json")
    assert keys == {f"team/run/global_step_10/{name}" for name in names}
    assert MirroredMachine(tmp_path / "b").loaded() == (10, "weights of step 10")


@pytest.mark.defect("manifest-without-files-blocks-upload")
def test_checkpoint_without_its_files_is_uploaded_again(uri: str, tmp_path: Path):
    with MirroredMachine(tmp_path / "a", uri) as here:
        here.save(10)
        here.mirror.finish(20)
        store = here.mirror.store
        store.delete(name for name in store.find("global_step_10") if "policy" in name)
    with MirroredMachine(tmp_path / "a", uri) as again:
        again.mirror.finish(20)
    assert MirroredMachine(tmp_path / "b", uri).loaded() == (10, "weights of step 10")


def test_damaged_checkpoint_does_not_block_uploads(server: S3Server, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    before = MirroredMachine(tmp_path / "a")
    (before.save(10) / "policy" / "rank_0").unlink()
    (before.save(20) / "manifest.json").write_text("{")
    linked = before.save(25) / "policy" / "rank_0"
    linked.symlink_to(linked.rename(tmp_path / "elsewhere"))
    with MirroredMachine(tmp_path / "a") as again:
        again.save(30)
        again.mirror.finish(20)
        assert again.mirror.remote_steps() == [30]
    for problem in (
        "policy/rank_0 is missing",
        "manifest.json cannot be read",
        "rank_0 is, or is under, a symbolic link",
    ):
        assert problem in caplog.text


def test_step_saved_again_stays_complete(server: S3Server, tmp_path: Path):
    with MirroredMachine(tmp_path / "a") as here:
        here.save(10, "first")
        wait_until(lambda: here.mirror.remote_steps() == [10])
        server.block_pattern = "PUT .*/global_step_10/manifest.json"
        here.save(10, "second")
        assert server.is_blocking.wait(10)
        assert MirroredMachine(tmp_path / "b").loaded() == (10, "first of step 10")
        server.unblock()
        here.mirror.finish(20)
    assert MirroredMachine(tmp_path / "c").loaded() == (10, "second of step 10")
    contents = [content for key, content in server.objects().items() if "rank_0" in key]
    assert contents == [b"second of step 10"], "the old file is deleted"


def test_checkpoint_in_upload_is_not_deleted(server: S3Server, tmp_path: Path):
    with MirroredMachine(tmp_path / "a", keep=1) as here:
        server.block_pattern = "PUT .*/global_step_10/policy/"
        here.save(10)
        assert server.is_blocking.wait(10)
        here.save(20)
        here.save(30)
        assert here.checkpoints.steps() == [10, 30], "the upload of 20 has not started"
        server.unblock()
        here.mirror.finish(20)
        assert here.mirror.remote_steps() == [30]


def test_failed_upload_is_retried_and_reported(
    server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(mirrors, "MAX_RETRY_DELAY_S", 0.05)
    monkeypatch.setattr(mirrors, "ERROR_LOG_INTERVAL", 2)
    with MirroredMachine(tmp_path / "a") as here, caplog.at_level(logging.WARNING):
        server.reject_pattern = "PUT .*/global_step_10/"
        here.save(10)
        with pytest.raises(StorageError, match=r"lacks global_step_10.*trainer\.timeouts\.upload_s.*Forbidden"):
            here.mirror.finish(1.0)
        assert "will be retried" in caplog.text
        assert "AN UPLOAD HAS FAILED 2 TIMES" in caplog.text
        server.reject_pattern = ""
        here.mirror.finish(20)
        assert here.mirror.remote_steps() == [10]


def test_retry_does_not_resend_files(server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(mirrors, "MAX_RETRY_DELAY_S", 0.05)
    with MirroredMachine(tmp_path / "a") as here:
        server.reject_pattern = "PUT .*/global_step_10/trainer_state"
        here.save(10)
        wait_until(lambda: len(puts(server, "global_step_10/trainer_state")) == 3)
        server.reject_pattern = ""
        wait_until(lambda: here.mirror.remote_steps() == [10])
        assert len(puts(server, "global_step_10/policy/rank_0")) == 1
        here.save(10, "other")
        here.mirror.finish(20)
    assert MirroredMachine(tmp_path / "b").loaded() == (10, "other of step 10")


def test_failed_upload_is_retried_before_later_ones(server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(mirrors, "MAX_RETRY_DELAY_S", 0.05)
    with MirroredMachine(tmp_path / "a") as here:
        server.reject_pattern = "PUT .*/global_step_10/"
        here.save(10)
        here.save(20)
        wait_until(lambda: len(puts(server, "global_step_10/")) > 1)
        server.reject_pattern = ""
        here.mirror.finish(20)
    manifests = puts(server, r"global_step_\d+/manifest.json")
    assert manifests == ["global_step_10/manifest.json", "global_step_20/manifest.json"]


def test_restart_uploads_checkpoints_up_to_limit(tmp_path: Path):
    uri = f"file://{tmp_path}/elsewhere/run"
    with MirroredMachine(tmp_path / "a", uri, keep=2) as here:
        here.save(10)
        here.save(20)
        here.mirror.finish(20)
    with MirroredMachine(tmp_path / "a", uri, keep=2) as here:
        here.mirror.stop()
        here.save(30)
        here.save(40)
    with MirroredMachine(tmp_path / "a", uri, keep=2) as again:
        again.mirror.finish(20)
        assert again.mirror.remote_steps() == [30, 40]


def test_own_upload_is_not_another_machines(uri: str, tmp_path: Path):
    with MirroredMachine(tmp_path / "a", uri) as here:
        here.save(10)
        wait_until(lambda: here.mirror.remote_steps() == [10])
        here.mirror.stop()
        here.save(20)  # This is never uploaded.
    with MirroredMachine(tmp_path / "a", uri) as again:
        assert again.loaded() == (20, "weights of step 20")


@pytest.mark.defect("rewound-run-resumes-old-state")
@pytest.mark.parametrize(("uri", "machine"), [("file", "a"), ("s3", "b")], indirect=["uri"])
def test_killed_run_continues_after_going_back(uri: str, tmp_path: Path, machine: str):
    """This also holds on a machine that never had the obsolete checkpoints."""
    with MirroredMachine(tmp_path / "a", uri) as here:
        for step in (10, 20, 30, 40):
            here.save(step, "old")
        here.mirror.finish(20)
    with MirroredMachine(tmp_path / machine, uri) as back:
        back.mirror.stop()
        found = back.checkpoints.find_resumable("from_path", f"{uri}/global_step_20")
        assert found is not None and found.step == 20
        back.save(30, "new")
    with MirroredMachine(tmp_path / machine, uri) as again:
        assert json.loads((again.folder / "metrics.jsonl").read_text()) == {"step": 30}, "not the metrics of step 40"
        assert again.loaded() == (30, "new of step 30")
        wait_until(lambda: again.mirror.store.read("global_step_40/manifest.set_aside.json") is not None)
        assert again.mirror.remote_steps() == [10, 20, 30]
        again.save(40, "old")  # the same bits as the obsolete checkpoint
        again.mirror.finish(20)
        assert again.mirror.remote_steps() == [10, 20, 30, 40]
    with MirroredMachine(tmp_path / "c", uri) as there:
        assert there.loaded() == (40, "old of step 40")
        found = there.checkpoints.find_resumable("from_path", f"{uri}/global_step_30")
        assert found is not None and found.step == 30, "even though only 40 exists locally"
        assert (found.path / "policy" / "rank_0").read_text() == "new of step 30"


def test_newer_remote_checkpoint_is_not_obsolete(tmp_path: Path):
    uri = f"file://{tmp_path}/elsewhere/run"
    with MirroredMachine(tmp_path / "a", uri) as here:
        here.save(10)
        here.save(20)
        here.mirror.finish(20)
    with MirroredMachine(tmp_path / "b", uri) as back:
        back.mirror.stop()
        back.save(15)
    with MirroredMachine(tmp_path / "a", uri) as here:
        here.save(20, "other")
        here.mirror.finish(20)
    with MirroredMachine(tmp_path / "b", uri) as back:
        assert back.loaded() == (20, "other of step 20")


def test_going_back_sets_remote_checkpoints_aside(server: S3Server, tmp_path: Path):
    with MirroredMachine(tmp_path / "a") as here:
        for step in (10, 20):
            here.save(step)
        here.mirror.finish(20)
    with MirroredMachine(tmp_path / "b") as back:
        found = back.checkpoints.find_resumable("from_path", f"{URI}/global_step_10")
        assert found is not None and found.step == 10
        back.save(15)
        back.mirror.finish(20)
        assert back.mirror.remote_steps() == [10, 15]
    assert "team/run/global_step_20/manifest.set_aside.json" in server.objects()
    with MirroredMachine(tmp_path / "c") as later:
        assert later.loaded() == (15, "weights of step 15")
        later.mirror.finish(20)
    names = [name for name in server.objects() if name.startswith("team/run/global_step_20/")]
    assert "team/run/global_step_20/manifest.set_aside.json" in names
    assert len(names) > 1, "a later start deletes no file of a checkpoint that was set aside"


@pytest.mark.defect("first-machine-overwrites-newer-run")
@pytest.mark.parametrize("went_back", [True, False])
def test_checkpoints_of_another_machine_take_precedence(
    uri: str, tmp_path: Path, went_back: bool, caplog: pytest.LogCaptureFixture
):
    with MirroredMachine(tmp_path / "a", uri) as here:
        for step in (10, 20, 30):
            here.save(step, "first")
        here.mirror.finish(20)
    with MirroredMachine(tmp_path / "a", uri) as here:
        here.mirror.stop()
        here.save(40, "first")  # This is never uploaded.
    with MirroredMachine(tmp_path / "b", uri) as there:
        if went_back:
            found = there.checkpoints.find_resumable("from_path", f"{uri}/global_step_10")
            assert found is not None and found.step == 10
            there.save(20, "second")
        there.save(35, "second")
        there.mirror.finish(20)
    caplog.clear()
    for _ in range(2):
        with MirroredMachine(tmp_path / "a", uri) as again:
            assert again.loaded() == (35, "second of step 35")
            assert json.loads((again.folder / "metrics.jsonl").read_text()) == {"step": 35}
            assert find_checkpoint_damage(again.folder / "global_step_40.set_aside_0") is None, "it stays complete"
            assert (again.folder / "global_step_30.set_aside_0").exists() == went_back
            again.mirror.finish(20)
            assert again.mirror.remote_steps() == [10, 20, *([] if went_back else [30]), 35]
    warnings = [record.message for record in caplog.records if "Another machine" in record.message]
    assert len(warnings) == (3 if went_back else 1), "one warning per checkpoint"


@pytest.mark.defect("first-machine-overwrites-newer-run")
def test_local_checkpoint_is_used_without_newer_remote(uri: str, tmp_path: Path):
    with MirroredMachine(tmp_path / "a", uri) as here:
        here.save(10)
        here.mirror.finish(20)
    with MirroredMachine(tmp_path / "b", uri) as there:  # continues from another machine's checkpoint
        assert there.loaded() == (10, "weights of step 10")
        there.mirror.stop()
        there.save(20)
    with MirroredMachine(tmp_path / "c", uri) as reader:  # saves nothing
        assert reader.loaded() == (10, "weights of step 10")
    with MirroredMachine(tmp_path / "b", uri) as there:
        assert there.loaded() == (20, "weights of step 20")
        there.mirror.finish(20)
        assert there.mirror.remote_steps() == [10, 20]


@pytest.mark.defect("first-machine-overwrites-newer-run")
def test_only_renaming_restores_set_aside_checkpoint(tmp_path: Path):
    uri = f"file://{tmp_path}/elsewhere/run"
    with MirroredMachine(tmp_path / "a", uri) as here:
        for step in (10, 20, 30):
            here.save(step)
        here.mirror.finish(20)
    with MirroredMachine(tmp_path / "a", uri) as here:
        here.mirror.stop()
        assert here.checkpoints.find_resumable("from_path", f"{uri}/global_step_10") is not None
        here.save(20, "back")  # This is never uploaded.
        here.save(25, "back").rename(
            tmp_path / "a" / "global_step_25.deleting"
        )  # It was killed while it saved the step again.
    with MirroredMachine(tmp_path / "b", uri) as there:
        assert there.loaded() == (30, "weights of step 30")
        there.save(35)
        there.mirror.finish(20)
    with MirroredMachine(tmp_path / "a", uri) as again:
        assert again.loaded() == (35, "weights of step 35")
        assert again.mirror.remote_steps() == [10, 20, 30, 35], "no run has gone back"
        aside = tmp_path / "a" / "global_step_20.set_aside_0"
        aside.rename(tmp_path / "a" / "global_step_40")
        (tmp_path / "a" / "global_step_40").rename(tmp_path / "a" / "global_step_40.set_aside_0")
        for path in (f"{uri}/global_step_40", tmp_path / "a" / "global_step_40"):
            with pytest.raises(ConfigError, match=r"40\.set_aside_0 was set aside: rename it to global_step_40"):
                again.checkpoints.find_resumable("from_path", path)
    (tmp_path / "a" / "global_step_40.set_aside_0").rename(tmp_path / "a" / "global_step_40")
    with MirroredMachine(tmp_path / "a", uri) as again:
        again.mirror.finish(20)
        assert 40 in again.mirror.remote_steps()


@pytest.mark.defect("first-machine-overwrites-newer-run")
def test_alternating_machines_respect_checkpoint_limit(uri: str, tmp_path: Path):
    step = 10
    for name in ("a", "b") * 2:
        with MirroredMachine(tmp_path / name, uri, keep=2) as machine:
            assert machine.loaded() == (None if step == 10 else (step - 10, f"weights of step {step - 10}"))
            for _ in range(3):
                machine.save(step)
                step += 10
            machine.mirror.finish(20)
            assert machine.mirror.remote_steps() == [step - 20, step - 10]
        folders = [folder.name for folder in (tmp_path / name).glob("global_step_*")]
        assert len(folders) <= 3, "a checkpoint in upload is deleted by the next save"
        assert all(folder.removeprefix("global_step_").isdigit() for folder in folders), "nothing is set aside"


@pytest.mark.defect("first-machine-overwrites-newer-run")
def test_checkpoint_of_another_run_comes_from_its_uri(server: S3Server, tmp_path: Path):
    here = resolve_local_folder(URI)
    with MirroredMachine(here) as first:
        first.save(10)
        first.mirror.finish(20)
    with MirroredMachine(here) as first:
        first.mirror.stop()
        first.save(20, "first")  # This is never uploaded.
    with MirroredMachine(tmp_path / "b") as there:
        there.save(20, "second")
        there.mirror.finish(20)
    with MirroredMachine(tmp_path / "other", f"{URI}2") as other:
        for _ in range(2):
            found = other.checkpoints.find_resumable("from_path", f"{URI}/global_step_20")
            assert found is not None and found.step == 20
            assert (found.path / "policy" / "rank_0").read_text() == "second of step 20"
        for missing in (False, True):
            if missing:
                shutil.rmtree(here / "global_step_10")
            found = other.checkpoints.find_resumable("from_path", f"{URI}/global_step_10")
            assert found is not None and found.path == here / "global_step_10"
    assert (here / "global_step_20" / "policy" / "rank_0").read_text() == "first of step 20", "the local one stays"


def test_deleted_records_are_deleted_remotely(uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(mirrors, "RECORD_INTERVAL_S", 0.05)
    with MirroredMachine(tmp_path / "run", uri) as machine:
        files = [machine.folder / "rollouts" / f"step_{n:08d}.parquet" for n in (1, 2, 3)]
        files[0].parent.mkdir()
        for file in files:
            file.write_text("rows")
        wait_until(lambda: len(machine.mirror.store.find("rollouts")) == 3)
        for file in files[:2]:
            file.unlink()
            machine.mirror.delete_record(file)
            if file == files[1]:
                file.write_text("others")
        wait_until(lambda: machine.mirror.store.read("rollouts/step_00000002.parquet") == b"others")
        wait_until(lambda: len(machine.mirror.store.find("rollouts")) == 2)
        machine.mirror.finish(20.0)
    assert sorted(machine.mirror.store.find("rollouts")) == [f"rollouts/step_0000000{n}.parquet" for n in (2, 3)]


def test_rewritten_record_is_not_deleted(uri: str, tmp_path: Path):
    with MirroredMachine(tmp_path / "run", uri) as machine:
        file = machine.folder / "rollouts.parquet"
        machine.mirror.delete_record(file)
        file.write_text("others")
        machine.mirror.finish(20.0)
        assert machine.mirror.store.read("rollouts.parquet") == b"others"


def test_damaged_checkpoint_is_repaired_or_skipped(server: S3Server, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    with MirroredMachine(tmp_path / "a") as here:
        here.save(10)
        damaged = here.save(20)
        here.mirror.finish(20)
    (damaged / "policy" / "rank_0").write_text("something else")
    assert MirroredMachine(tmp_path / "a").loaded() == (20, "weights of step 20")
    assert find_checkpoint_damage(damaged) is None

    here.mirror.store.write("global_step_20/policy/rank_0", b"something else")
    assert MirroredMachine(tmp_path / "b").loaded() == (10, "weights of step 10")
    assert "global_step_20/policy/rank_0 has another SHA-256" in caplog.text


def test_resume_fails_when_storage_rejects_requests(server: S3Server, tmp_path: Path):
    with MirroredMachine(tmp_path / "a") as here:
        here.save(10)
        here.save(20)
        here.mirror.finish(20)
    server.reject_pattern = "GET .*/global_step_20/policy"
    with pytest.raises(StorageError, match="global_step_20/policy/rank_0: cannot be read"):
        MirroredMachine(tmp_path / "b").loaded()


def test_export_is_visible_only_when_complete(server: S3Server, tmp_path: Path):
    exports = Mirror(tmp_path / "exports", f"s3://{BUCKET}/exports")
    folder = tmp_path / "exports" / "global_step_3" / "policy"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    exports.start()
    exports.enqueue(folder)
    exports.finish(20)
    assert {"exports/global_step_3/policy/config.json", "exports/global_step_3/policy/manifest.json"} == {
        *server.objects()
    }
    exports.mark_unfinished(folder)
    again = Mirror(tmp_path / "exports", f"s3://{BUCKET}/exports")
    server.seen.clear()
    again.start()
    again.finish(20)
    assert not any(line.startswith("PUT") for line in server.seen), "an unfinished export is not uploaded"


@pytest.mark.defect("first-machine-overwrites-newer-run")
def test_start_keeps_export_of_another_machine(uri: str, tmp_path: Path):
    def export(machine: str, text: str | None, killed: bool = False) -> Mirror:
        mirror = Mirror(tmp_path / machine, uri)
        folder = tmp_path / machine / "global_step_3" / "policy"
        mirror.start()
        if killed:
            mirror.stop()
        if text is not None:
            folder.mkdir(parents=True, exist_ok=True)
            mirror.mark_unfinished(folder)
            (folder / "config.json").write_text(text)
            mirror.enqueue(folder)
        if not killed:
            mirror.finish(20)
        return mirror

    def remote_text(mirror: Mirror) -> bytes | None:
        assert download_folder(mirror.store, "global_step_3/policy", tmp_path / "downloaded") is None
        return (tmp_path / "downloaded" / "config.json").read_bytes()

    assert remote_text(export("a", "first")) == b"first"
    assert remote_text(export("b", "second")) == b"second"
    for _ in range(2):
        assert remote_text(export("a", None)) == b"second", "the other machine's export stays"
    assert remote_text(export("a", "third")) == b"third"
    assert remote_text(export("b", "fourth", killed=True)) == b"third"
    assert remote_text(export("b", None)) == b"fourth", "this machine had seen the third"


def test_stop_ends_running_upload(server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(mirrors, "STOP_TIMEOUT_S", 0.1)
    with MirroredMachine(tmp_path / "a") as here:
        server.block_pattern = "PUT .*/global_step_10/policy/"
        here.save(10)
        assert server.is_blocking.wait(10)
        here.mirror.stop()
        server.unblock()
        wait_until(lambda: "global_step" not in here.mirror.describe_upload())
    assert puts(server, "global_step_10") == ["global_step_10/policy/rank_0"]


def test_run_end_waits_and_reports_missing_uploads(server: S3Server, tmp_path: Path):
    here = MirroredMachine(tmp_path / "a")

    async def run() -> None:
        async with Mirrors(here.mirror).keep_uploading(0.5):
            server.block_pattern = "PUT .*/global_step_10/policy/"
            here.save(10)
            threading.Timer(1.0, server.unblock).start()

    with pytest.raises(StorageError, match="lacks global_step_10"):
        asyncio.run(run())
    assert here.mirror.remote_steps() == [], "no manifest is uploaded after the end"


INVALID_CONTENTS = (b"", b"\xff\xfe", b"[" * 100_000, b'"text"', b"[[1], {}, null]", b'{"a": 1, "10": 2}')


@pytest.mark.parametrize("content", INVALID_CONTENTS)
@pytest.mark.parametrize("name", [mirrors.KNOWN_MANIFESTS_FILE, mirrors.LEFT_BEHIND_FILE, ".folder"])
def test_damaged_side_file_does_not_prevent_a_restart(tmp_path: Path, name: str, content: bytes):
    uri = f"file://{tmp_path}/elsewhere/run"
    with MirroredMachine(tmp_path / "a", uri) as here:
        here.save(10)
        here.mirror.finish(20)
    (tmp_path / "a" / name).write_bytes(content)
    with MirroredMachine(tmp_path / "a", uri) as again:
        assert again.loaded() == (10, "weights of step 10")
        again.save(20)
        again.mirror.finish(20)
        assert again.mirror.remote_steps() == [10, 20]
    assert MirroredMachine(tmp_path / "b", uri).loaded() == (20, "weights of step 20")


def test_missing_objects_are_uploaded_again(uri: str, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    with MirroredMachine(tmp_path / "a", uri) as here:
        for step in (10, 20, 30):
            here.save(step)
        here.mirror.finish(20)
        store = here.mirror.store
        store.delete(["global_step_10/policy/rank_0"])
        store.write("global_step_20/policy/rank_0", b"cut off")
    with MirroredMachine(tmp_path / "a", uri) as again:
        again.mirror.finish(20)
    assert "global_step_10 lacks files" in caplog.text and "global_step_20 lacks files" in caplog.text
    for step in (10, 20):
        assert download_folder(store, f"global_step_{step}", tmp_path / f"copy {step}") is None


def test_failed_download_leaves_no_partial_checkpoint(server: S3Server, tmp_path: Path):
    with MirroredMachine(tmp_path / "a") as here:
        here.save(10)
        here.mirror.finish(20)
        here.mirror.store.delete(["global_step_10/trainer_state.json"])
    there = MirroredMachine(tmp_path / "b")
    with pytest.raises(CheckpointError, match="is intact"):
        there.loaded()
    assert not list((tmp_path / "b").glob("global_step*"))
