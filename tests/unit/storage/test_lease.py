"""Leases of URIs on a real S3 server. Two local folders stand for two machines."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path

import pytest

from skyrl_train.errors import RunFolderError, StorageError
from skyrl_train.experiment.run_resources import Mirrors
from skyrl_train.storage import lease
from skyrl_train.storage.mirror import Mirror
from skyrl_train.storage.remote_folder import RemoteFolder
from skyrl_train.trainer.run_folder import RunFolder
from tests.support.mirrored_runs import URI, MirroredMachine, wait_until
from tests.support.s3_server import BUCKET, S3Server


@pytest.fixture
def quick_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "RENEW_INTERVAL_S", 0.1)
    monkeypatch.setattr(lease, "EXPIRY_S", 1.0)
    monkeypatch.setattr(lease, "POLL_INTERVAL_S", 0.05)


@pytest.mark.usefixtures("quick_leases")
def test_uri_is_leased_to_one_live_run(server: S3Server, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    with MirroredMachine(tmp_path / "a"), pytest.raises(RunFolderError, match="is in use by process"):
        MirroredMachine(tmp_path / "b").mirror.acquire_and_pull()
    with MirroredMachine(tmp_path / "b") as there:
        folder = json.loads(server.objects()["team/run/.lock"])["folder"]
        assert folder.endswith((there.folder / ".folder").read_text())
        caplog.clear()
        with MirroredMachine(tmp_path / "b"):
            assert "was in use by" not in caplog.text, "the lease of the dead process in this folder needs no wait"


@pytest.mark.usefixtures("quick_leases")
@pytest.mark.defect("equal-host-names-share-lease")
def test_lease_distinguishes_machines_of_same_name(server: S3Server, tmp_path: Path):
    path = tmp_path / "run"
    with MirroredMachine(path) as here:
        path.rename(tmp_path / "disk of the first")
        with pytest.raises(RunFolderError, match="is in use by process"):
            MirroredMachine(path).mirror.acquire_and_pull()
        assert not here.mirror.lease.check_lost()


@pytest.mark.usefixtures("quick_leases")
def test_expired_lease_stops_uploads(server: S3Server, tmp_path: Path):
    silent = MirroredMachine(tmp_path / "a")
    silent.mirror.acquire_and_pull()
    server.block_pattern = "PUT .*/.lock"
    assert server.is_blocking.wait(10)
    server.block_pattern = ""  # Later requests are not blocked.
    with MirroredMachine(tmp_path / "b") as other:
        server.unblock()
        silent.mirror.start()
        silent.save(10)
        with pytest.raises(StorageError, match="as this process was silent"):
            silent.mirror.finish(20)
        assert other.mirror.remote_steps() == [] and not other.mirror.lease.check_lost()
        exports = Mirror(tmp_path / "exports", f"s3://{BUCKET}/exports", lease_owner=silent.mirror)
        exports.start()
        with pytest.raises(StorageError, match="as this process was silent"):
            exports.finish(20)
    silent.mirror.lease.release()


@pytest.mark.usefixtures("quick_leases")
@pytest.mark.defect("stale-process-uploads-after-lease-loss")
@pytest.mark.parametrize(
    ("late", "lives"),
    [
        ("global_step_20/policy/rank_0", True),
        ("metrics.jsonl", False),
        ("zone.log", True),
        ("global_step_20/manifest.json", False),
    ],
)
def test_stopped_process_does_not_disturb_successor(
    server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: str, lives: bool
):
    """`late` is the file that the stopped process was sending. Its successor is alive or has ended."""
    monkeypatch.setattr(lease, "EXPIRY_S", 0.2)
    stopped = MirroredMachine(tmp_path / "a", keep=1)
    stopped.__enter__()
    (stopped.folder / "zone.log").write_text("log")
    server.block_pattern = f"PUT .*/{late}"
    stopped.save(20)
    assert server.is_blocking.wait(10)
    stopped.stop_renewals()
    with ExitStack() as running:
        successor = running.enter_context(MirroredMachine(tmp_path / "b"))
        (successor.folder / "zone.log").write_text("another log")
        successor.save(10)
        server.block_pattern = ""
        successor.mirror.finish(20)
        if not lives:
            running.close()
        before, num_requests = data_objects(server), len(server.seen)
        server.unblock()
        holder = "process" if lives else "process .*, which has ended since"
        with pytest.raises(StorageError, match=f"was taken by {holder}.*, as this process was silent"):
            stopped.mirror.finish(20)
        stopped.__exit__()
        assert not lives or "team/run/.lock" in server.objects()
    assert {line.split()[0] for line in server.seen[num_requests:] if ".lock" not in line} <= {"GET", "HEAD"}
    after = data_objects(server)
    assert {key for key in after | before if after.get(key) != before.get(key)} == {f"team/run/{late}"}


def data_objects(server: S3Server) -> dict[str, bytes]:
    """Return all objects except lock files."""
    return {key: content for key, content in server.objects().items() if ".lock" not in key}


def test_conditional_write_has_one_winner(uri: str):
    store = RemoteFolder(uri)
    assert store.write_if_version("name", b"first", None) and not store.write_if_version("name", b"other", None)
    version = store.version("name")
    assert version is not None and store.write_if_version("name", b"second", version)
    assert not store.write_if_version("name", b"third", version) and store.read("name") == b"second"
    version = store.version("name")
    store.delete(["name"])
    assert not store.write_if_version("name", b"third", version) and store.version("name") is None


def test_concurrent_file_creation_has_one_winner(tmp_path: Path):
    barrier = threading.Barrier(16)
    stores = [RemoteFolder(f"file://{tmp_path}/run") for _ in range(barrier.parties)]

    def create(number: int) -> bool:
        barrier.wait()
        return stores[number].write_if_version(".lock", b"%d" % number, None)

    with ThreadPoolExecutor(barrier.parties) as threads:
        for _ in range(20):
            written = list(threads.map(create, range(barrier.parties)))
            assert sum(written) == 1 and stores[0].read(".lock") == b"%d" % written.index(True)
            stores[0].delete([".lock"])


@pytest.mark.usefixtures("quick_leases")
@pytest.mark.defect("two-runs-acquire-expired-lease")
def test_expired_lease_has_one_successor(server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(lease, "EXPIRY_S", 0.2)
    dead = MirroredMachine(tmp_path / "a")
    dead.mirror.acquire_and_pull()
    dead.stop_renewals()
    errors: list[BaseException] = []

    def acquire() -> None:
        try:
            MirroredMachine(tmp_path / "b").mirror.acquire_and_pull()
        except RunFolderError as error:
            errors.append(error)

    server.block_pattern = "PUT .*/.lock"
    slower = threading.Thread(target=acquire)
    slower.start()
    assert server.is_blocking.wait(10)
    server.block_pattern = ""  # Later requests are not blocked.
    with MirroredMachine(tmp_path / "c") as faster:
        server.unblock()
        slower.join(10)
        assert "is in use by process" in str(errors[0])
        time.sleep(0.3)
        assert not faster.mirror.lease.lost_to


@pytest.mark.usefixtures("quick_leases")
def test_lease_changed_before_last_check_is_kept(server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The faster of two waiting machines may take an expired lease just before the last check of the slower one."""
    monkeypatch.setattr(lease, "EXPIRY_S", 0.2)
    dead = MirroredMachine(tmp_path / "a")
    dead.mirror.acquire_and_pull()
    dead.stop_renewals()
    slower = MirroredMachine(tmp_path / "b")
    get_version, num_checks, faster = slower.mirror.store.version, 0, MirroredMachine(tmp_path / "c")

    def get_version_late(name: str) -> str | None:
        nonlocal num_checks
        num_checks += 1
        if num_checks == 2:
            faster.mirror.acquire_and_pull()
            time.sleep(0.3)  # longer than the slower machine waits
        return get_version(name)

    monkeypatch.setattr(slower.mirror.store, "version", get_version_late)
    with pytest.raises(RunFolderError, match="is in use by process"):
        slower.mirror.acquire_and_pull()
    assert num_checks >= 2 and not faster.mirror.lease.check_lost()
    faster.mirror.lease.release()


@pytest.mark.usefixtures("quick_leases")
def test_expired_lease_on_disk_goes_to_last_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A disk has no conditional writes, so two machines may both write, and one of them must notice."""
    monkeypatch.setattr(lease, "EXPIRY_S", 0.2)
    monkeypatch.setattr(lease, "POLL_INTERVAL_S", 0.5)
    store = RemoteFolder(f"file://{tmp_path}/elsewhere")
    store.write(".lock", json.dumps({"holder": "process 1 on another", "folder": "another:/run", "id": "1"}).encode())
    first = MirroredMachine(tmp_path / "a", store.uri)
    write = first.mirror.store.write_if_version
    last = json.dumps({"holder": "process 2 on another", "folder": "another:/run2", "id": "2"}).encode()

    def write_first(name: str, content: bytes, version: str | None) -> bool:
        written = write(name, content, version)
        threading.Timer(0.1, store.write, [name, last]).start()
        return written

    monkeypatch.setattr(first.mirror.store, "write_if_version", write_first)
    with pytest.raises(RunFolderError, match="is in use by process 2 on another"):
        first.mirror.acquire_and_pull()
    assert store.read(".lock") == last


@pytest.mark.usefixtures("quick_leases")
@pytest.mark.parametrize("content", [b"", b"\xff\x00", b"[" * 100_000, b"[1]", b'{"holder": {"a": "\\u001b[2J"}}'])
def test_damaged_lock_file_expires(
    server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, content: bytes
):
    monkeypatch.setattr(lease, "EXPIRY_S", 0.2)
    RemoteFolder(URI).write(".lock", content)
    with MirroredMachine(tmp_path / "a") as here:
        assert not here.mirror.lease.check_lost()
    assert "was in use by" in caplog.text and "\x1b" not in caplog.text


@pytest.mark.usefixtures("quick_leases")
def test_deleted_lock_file_is_written_again(uri: str, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    store = RemoteFolder(uri)
    store.write(".lock", json.dumps({"holder": "process 1 on another", "folder": "another:/run", "id": "1"}).encode())
    deleting = threading.Timer(0.2, store.delete, [[".lock"]])
    deleting.start()
    with MirroredMachine(tmp_path / "a", uri) as here:
        deleting.join()
        for deleted in range(2):
            store.delete([".lock"])
            here.save(10 + deleted)
            wait_until(lambda step=10 + deleted: step in here.mirror.remote_steps())  # type: ignore[misc]
            assert f"{uri}/.lock was deleted. It is written again" in caplog.text
            assert json.loads(store.read(".lock") or b"")["folder"].endswith((here.folder / ".folder").read_text())
        here.mirror.finish(20)
        with pytest.raises(RunFolderError, match="is in use by process"):
            MirroredMachine(tmp_path / "b", uri).mirror.acquire_and_pull()
    lock = json.loads(store.read(".lock") or b"{}")
    assert lock["ended"], "the next run need not wait"
    caplog.clear()
    with MirroredMachine(tmp_path / "b", uri):
        assert "was in use by" not in caplog.text


@pytest.mark.usefixtures("quick_leases")
def test_lost_lease_error_names_deletion(server: S3Server, tmp_path: Path):
    with MirroredMachine(tmp_path / "a") as here:
        lock = json.dumps({"holder": "process 1 on another\x1b[2J", "folder": "another:/run", "id": "1"}).encode()
        here.mirror.store.write(".lock", lock)
        wait_until(lambda: here.mirror.lease.lost_to)
        with pytest.raises(StorageError, match=r"taken by process 1 on another\\x1b\[2J, after \.lock was deleted\. N"):
            here.mirror.finish(20)
        assert here.mirror.store.read(".lock") == lock


@pytest.mark.usefixtures("quick_leases")
def test_repeated_lock_deletion_raises_error(server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    here = MirroredMachine(tmp_path / "a")
    write = here.mirror.store.write_if_version

    def write_and_delete(name: str, content: bytes, version: str | None) -> bool:
        written = write(name, content, version)
        here.mirror.store.delete([name])
        return written

    monkeypatch.setattr(here.mirror.store, "write_if_version", write_and_delete)
    with pytest.raises(RunFolderError, match=r"its \.lock was deleted 5 times"):
        here.mirror.acquire_and_pull()


@pytest.mark.usefixtures("quick_leases")
@pytest.mark.parametrize("response", ["lost", "501 Not Implemented"])
def test_lease_survives_lost_response_and_missing_conditions(server: S3Server, tmp_path: Path, response: str):
    if response == "lost":
        server.lose_answer_pattern = "PUT .*/.lock"
    else:
        server.reject_status, server.reject_condition = response, "HTTP_IF_"
    with MirroredMachine(tmp_path / "a") as here:
        content = server.objects()["team/run/.lock"]
        wait_until(lambda: server.objects()["team/run/.lock"] != content)
        assert not here.mirror.lease.lost_to


def test_signal_interrupts_lease_wait(tmp_path: Path):
    uri = f"file://{tmp_path}/elsewhere"
    lock = json.dumps({"holder": "process 1 on another", "folder": "another:/run", "id": "1"}).encode()
    RemoteFolder(uri).write(".lock", lock)

    async def start() -> None:
        mirror = Mirror(tmp_path / "run", uri)
        async with AsyncExitStack() as stack:
            await Mirrors(mirror).enter(stack, RunFolder(tmp_path / "run", {}, True, mirror))

    async def run() -> None:
        starting = asyncio.create_task(start())
        await asyncio.sleep(0.5)
        assert not starting.done()
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting

    start_s = time.monotonic()
    asyncio.run(run())
    assert time.monotonic() - start_s < 5.0, "instead of the 45 s after which a lease expires"
    assert RemoteFolder(uri).read(".lock") == lock
    with RunFolder(tmp_path / "run", {}, True):
        pass
