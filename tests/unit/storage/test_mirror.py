"""A real S3 server, and threads that upload to it. Two machines are two folders."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import threading
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path

import pytest

from skyrl_train.assembly.storage import Mirrors
from skyrl_train.errors import RunDirectoryError, StorageError
from skyrl_train.storage import lease, mirror as mirrors
from skyrl_train.storage.folder import StoredFolder
from skyrl_train.storage.mirror import Mirror
from skyrl_train.trainer.checkpoints import Checkpoints, verify
from skyrl_train.trainer.run_directory import RunDirectory
from tests.support.s3_server import BUCKET, S3Server, s3_server

ADDRESS = f"s3://{BUCKET}/team/run"


@pytest.fixture(scope="module", autouse=True)
def one_server() -> Iterator[S3Server]:
    with pytest.MonkeyPatch.context() as patch, s3_server(patch) as running:
        yield running


@pytest.fixture
def server(one_server: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[S3Server]:
    monkeypatch.setenv("SKYRL_CACHE", str(tmp_path / "cache"))
    yield one_server
    one_server.empty()


@pytest.fixture(params=["s3", "file"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An address of either kind."""
    if request.param == "s3":
        request.getfixturevalue("server")
        return ADDRESS
    return f"file://{tmp_path}/elsewhere/run"


class Machine:
    """A folder with checkpoints, and its mirror."""

    def __init__(self, folder: Path, address: str = ADDRESS, keep: int = -1):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.mirror = Mirror(folder, address, keep)
        self.checkpoints = Checkpoints(folder, keep, self.mirror)

    def __enter__(self) -> Machine:
        self.mirror.take_over()
        self.mirror.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.mirror.stop()
        self.mirror.give_up()

    def save(self, step: int, text: str = "weights") -> Path:
        folder = self.checkpoints.begin(step)
        (folder / "policy").mkdir()
        (folder / "policy" / "rank_0").write_text(f"{text} of step {step}")
        (self.folder / "metrics.jsonl").write_text(json.dumps({"step": step}))
        done = self.checkpoints.commit(step, {"text": text})
        self.mirror.offer(done)
        return done

    def loaded(self) -> tuple[int, str] | None:
        found = self.checkpoints.load_path("latest")
        return (found.step, (found.path / "policy" / "rank_0").read_text()) if found is not None else None


def puts(server: S3Server, name: str) -> list[str]:
    """What was uploaded under this name, each time."""
    names = (line.rpartition("run/")[2] for line in server.seen if line.startswith("PUT"))
    return [one for one in names if re.match(name, one)]


def until(condition: object, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_what_is_saved_here_is_loaded_on_another_machine_with_its_metrics(address: str, tmp_path: Path):
    with Machine(tmp_path / "a", address, keep=2) as here:
        for step in (10, 20, 30):
            here.save(step)
        here.mirror.finish(20)
    with Machine(tmp_path / "b", address, keep=2) as there:
        assert there.mirror.steps() == [20, 30], "the oldest is deleted there as well"
        assert json.loads((there.folder / "metrics.jsonl").read_text()) == {"step": 30}
        assert there.loaded() == (30, "weights of step 30")
        assert there.mirror.store.read("latest_ckpt_global_step.txt") == b"30"


def test_a_checkpoint_without_its_manifest_is_not_there_and_the_one_before_is(server: S3Server, tmp_path: Path):
    with Machine(tmp_path / "a") as here:
        here.save(10)
        until(lambda: here.mirror.steps() == [10])
        server.held = "PUT .*/global_step_20/policy/"
        here.save(20)
        assert server.holding.wait(10)
        other = Machine(tmp_path / "b")
        assert other.mirror.steps() == [10]
        assert other.loaded() == (10, "weights of step 10")
        server.let_go()
        here.mirror.finish(20)
        assert other.mirror.steps() == [10, 20]


def test_the_manifest_and_the_metrics_of_its_steps_come_in_this_order_and_last(server: S3Server, tmp_path: Path):
    with Machine(tmp_path / "a") as here:
        here.save(10)
        here.mirror.finish(20)
    of_step = puts(server, "(global_step_10|metrics)")
    assert of_step[-2:] == ["metrics.jsonl", "global_step_10/manifest.json"]


def test_what_an_interrupted_upload_left_is_deleted_and_the_checkpoint_uploaded_by_the_next_start(
    server: S3Server, tmp_path: Path
):
    before = Machine(tmp_path / "a")
    before.save(10)
    before.mirror.store.write("global_step_10/policy/rank_0", b"half")
    before.mirror.store.write("global_step_5/policy/rank_0", b"half")
    with Machine(tmp_path / "a") as again:
        again.mirror.finish(20)
    keys = {key for key in server.objects() if "/global_step" in key}
    names = ("manifest.json", "policy/rank_0", "trainer_state.json")
    assert keys == {f"team/run/global_step_10/{name}" for name in names}
    assert Machine(tmp_path / "b").loaded() == (10, "weights of step 10")


@pytest.mark.defect("a-manifest-without-its-files")
def test_a_checkpoint_whose_manifest_came_after_its_files_were_deleted_is_sent_again(address: str, tmp_path: Path):
    with Machine(tmp_path / "a", address) as here:
        here.save(10)
        here.mirror.finish(20)
        store = here.mirror.store
        store.delete(name for name in store.find("global_step_10") if "policy" in name)
    with Machine(tmp_path / "a", address) as again:
        again.mirror.finish(20)
    assert Machine(tmp_path / "b", address).loaded() == (10, "weights of step 10")


def test_a_damaged_checkpoint_is_not_uploaded_and_holds_up_no_other(
    server: S3Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    before = Machine(tmp_path / "a")
    (before.save(10) / "policy" / "rank_0").unlink()
    (before.save(20) / "manifest.json").write_text("{")
    with Machine(tmp_path / "a") as again:
        again.save(30)
        again.mirror.finish(20)
        assert again.mirror.steps() == [30]
    assert "policy/rank_0 is not the 18 bytes" in caplog.text and "manifest.json cannot be read" in caplog.text


def test_a_step_that_is_saved_once_more_is_whole_at_every_moment(server: S3Server, tmp_path: Path):
    with Machine(tmp_path / "a") as here:
        here.save(10, "first")
        until(lambda: here.mirror.steps() == [10])
        server.held = "PUT .*/global_step_10/manifest.json"
        here.save(10, "second")
        assert server.holding.wait(10)
        assert Machine(tmp_path / "b").loaded() == (10, "first of step 10")
        server.let_go()
        here.mirror.finish(20)
    assert Machine(tmp_path / "c").loaded() == (10, "second of step 10")
    contents = [content for key, content in server.objects().items() if "rank_0" in key]
    assert contents == [b"second of step 10"], "the file before is deleted"


def test_a_checkpoint_that_is_being_uploaded_is_not_deleted_here(server: S3Server, tmp_path: Path):
    with Machine(tmp_path / "a", keep=1) as here:
        server.held = "PUT .*/global_step_10/policy/"
        here.save(10)
        assert server.holding.wait(10)
        here.save(20)
        here.save(30)
        assert here.checkpoints.steps() == [10, 30], "20 has not begun to be uploaded, and will not"
        server.let_go()
        here.mirror.finish(20)
        assert here.mirror.steps() == [30]


def test_a_failed_upload_is_repeated_said_and_named_if_it_still_lacks_at_the_end(
    server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(mirrors, "LONGEST_PAUSE_S", 0.05)
    monkeypatch.setattr(mirrors, "SAID_ANEW_AFTER", 2)
    with Machine(tmp_path / "a") as here, caplog.at_level(logging.WARNING):
        server.refused = "PUT .*/global_step_10/"
        here.save(10)
        with pytest.raises(StorageError, match=r"lacks global_step_10.*trainer\.timeouts\.upload_s.*Forbidden"):
            here.mirror.finish(1.0)
        assert "is tried again" in caplog.text
        assert "AN UPLOAD HAS FAILED 2 TIMES" in caplog.text
        server.refused = ""
        here.mirror.finish(20)
        assert here.mirror.steps() == [10]


def test_what_has_arrived_is_not_sent_again_when_a_checkpoint_is_tried_again(
    server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(mirrors, "LONGEST_PAUSE_S", 0.05)
    with Machine(tmp_path / "a") as here:
        server.refused = "PUT .*/global_step_10/trainer_state"
        here.save(10)
        until(lambda: len(puts(server, "global_step_10/trainer_state")) == 3)
        server.refused = ""
        until(lambda: here.mirror.steps() == [10])
        assert len(puts(server, "global_step_10/policy/rank_0")) == 1
        here.save(10, "other")
        here.mirror.finish(20)
    assert Machine(tmp_path / "b").loaded() == (10, "other of step 10")


@pytest.mark.defect("gone-back-and-killed")
@pytest.mark.parametrize(("address", "machine"), [("file", "a"), ("s3", "b")], indirect=["address"])
def test_a_run_that_went_back_and_was_killed_before_its_upload_goes_on_from_there(
    address: str, tmp_path: Path, machine: str
):
    """Also where it has never had the checkpoints that it left behind."""
    with Machine(tmp_path / "a", address) as here:
        for step in (10, 20, 30, 40):
            here.save(step, "old")
        here.mirror.finish(20)
    with Machine(tmp_path / machine, address) as back:
        back.mirror.stop()
        found = back.checkpoints.load_path("from_path", f"{address}/global_step_20")
        assert found is not None and found.step == 20
        back.save(30, "new")
    with Machine(tmp_path / machine, address) as again:
        assert json.loads((again.folder / "metrics.jsonl").read_text()) == {"step": 30}, "not those of step 40"
        assert again.loaded() == (30, "new of step 30")
        until(lambda: again.mirror.store.read("global_step_40/manifest.set_aside.json") is not None)
        assert again.mirror.steps() == [10, 20, 30]
        again.save(40, "old")  # bit for bit what was left behind
        again.mirror.finish(20)
        assert again.mirror.steps() == [10, 20, 30, 40]
    with Machine(tmp_path / "c", address) as there:
        assert there.loaded() == (40, "old of step 40")
        found = there.checkpoints.load_path("from_path", f"{address}/global_step_30")
        assert found is not None and found.step == 30, "though 40 is here, and 30 is not"
        assert (found.path / "policy" / "rank_0").read_text() == "new of step 30"


def test_what_another_machine_has_saved_since_is_not_left_behind(tmp_path: Path):
    address = f"file://{tmp_path}/elsewhere/run"
    with Machine(tmp_path / "a", address) as here:
        here.save(10)
        here.save(20)
        here.mirror.finish(20)
    with Machine(tmp_path / "b", address) as back:
        back.mirror.stop()
        back.save(15)
    with Machine(tmp_path / "a", address) as here:
        here.save(20, "other")
        here.mirror.finish(20)
    with Machine(tmp_path / "b", address) as back:
        assert back.loaded() == (20, "other of step 20")


def test_a_run_that_went_back_leaves_its_later_checkpoints_aside_there_too(server: S3Server, tmp_path: Path):
    with Machine(tmp_path / "a") as here:
        for step in (10, 20):
            here.save(step)
        here.mirror.finish(20)
    with Machine(tmp_path / "b") as back:
        found = back.checkpoints.load_path("from_path", f"{ADDRESS}/global_step_10")
        assert found is not None and found.step == 10
        back.save(15)
        back.mirror.finish(20)
        assert back.mirror.steps() == [10, 15]
    assert "team/run/global_step_20/manifest.set_aside.json" in server.objects()
    assert Machine(tmp_path / "c").loaded() == (15, "weights of step 15")


def test_what_a_run_deletes_of_its_records_is_deleted_there_unless_it_is_written_again(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(mirrors, "RECORDS_EVERY_S", 0.05)
    with Machine(tmp_path / "one", address) as one:
        files = [one.folder / "rollouts" / f"step_{n:08d}.parquet" for n in (1, 2, 3)]
        files[0].parent.mkdir()
        for file in files:
            file.write_text("rows")
        until(lambda: len(one.mirror.store.find("rollouts")) == 3)
        for file in files[:2]:
            file.unlink()
            one.mirror.drop(file)
            if file == files[1]:
                file.write_text("others")
        until(lambda: one.mirror.store.read("rollouts/step_00000002.parquet") == b"others")
        until(lambda: len(one.mirror.store.find("rollouts")) == 2)
        one.mirror.finish(20.0)
    assert sorted(one.mirror.store.find("rollouts")) == [f"rollouts/step_0000000{n}.parquet" for n in (2, 3)]


def test_a_checkpoint_that_is_damaged_here_is_repaired_and_one_that_is_damaged_there_is_passed_over(
    server: S3Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    with Machine(tmp_path / "a") as here:
        here.save(10)
        damaged = here.save(20)
        here.mirror.finish(20)
    (damaged / "policy" / "rank_0").write_text("something else")
    assert Machine(tmp_path / "a").loaded() == (20, "weights of step 20")
    assert verify(damaged) is None

    here.mirror.store.write("global_step_20/policy/rank_0", b"something else")
    assert Machine(tmp_path / "b").loaded() == (10, "weights of step 10")
    assert "global_step_20/policy/rank_0 has another SHA-256" in caplog.text


def test_storage_that_does_not_answer_ends_a_resume_instead_of_an_older_checkpoint(server: S3Server, tmp_path: Path):
    with Machine(tmp_path / "a") as here:
        here.save(10)
        here.save(20)
        here.mirror.finish(20)
    server.refused = "GET .*/global_step_20/policy"
    with pytest.raises(StorageError, match="global_step_20/policy/rank_0: cannot be read"):
        Machine(tmp_path / "b").loaded()


def test_an_export_is_there_once_its_manifest_is_and_one_that_is_written_again_is_withdrawn(
    server: S3Server, tmp_path: Path
):
    exports = Mirror(tmp_path / "exports", f"s3://{BUCKET}/exports")
    folder = tmp_path / "exports" / "global_step_3" / "policy"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    exports.start()
    exports.offer(folder)
    exports.finish(20)
    assert {"exports/global_step_3/policy/config.json", "exports/global_step_3/policy/manifest.json"} == {
        *server.objects()
    }
    exports.withdraw(folder)
    again = Mirror(tmp_path / "exports", f"s3://{BUCKET}/exports")
    server.seen.clear()
    again.start()
    again.finish(20)
    assert not any(line.startswith("PUT") for line in server.seen), "half an export is not uploaded"


@pytest.fixture
def quick_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "RENEWED_EVERY_S", 0.1)
    monkeypatch.setattr(lease, "ENDS_AFTER_S", 1.0)
    monkeypatch.setattr(lease, "_LOOKS_EVERY_S", 0.05)


@pytest.mark.usefixtures("quick_leases")
def test_an_address_belongs_to_one_live_run(server: S3Server, tmp_path: Path):
    with Machine(tmp_path / "a"), pytest.raises(RunDirectoryError, match="is in use by process"):
        Machine(tmp_path / "b").mirror.take_over()
    with Machine(tmp_path / "b"):
        assert json.loads(server.objects()["team/run/.lock"])["folder"].endswith("/b")


@pytest.mark.usefixtures("quick_leases")
def test_a_dead_runs_claim_ends_and_one_that_was_only_silent_uploads_nothing_more(server: S3Server, tmp_path: Path):
    silent = Machine(tmp_path / "a")
    silent.mirror.take_over()
    silent.mirror._lease._left.set()  # its renewals stop, as those of a process that is stopped
    with Machine(tmp_path / "b") as other:
        silent.mirror._lease._left = threading.Event()
        thread = threading.Thread(target=silent.mirror._lease._renew)
        thread.start()
        thread.join(10)
        silent.mirror.start()
        silent.save(10)
        with pytest.raises(StorageError, match="as this process was silent"):
            silent.mirror.finish(20)
        assert other.mirror.steps() == []
        exports = Mirror(tmp_path / "exports", f"s3://{BUCKET}/exports", run=silent.mirror)
        exports.start()
        with pytest.raises(StorageError, match="as this process was silent"):
            exports.finish(20)
    silent.mirror.give_up()


@pytest.mark.usefixtures("quick_leases")
@pytest.mark.defect("uploads-of-who-was-taken-for-dead")
@pytest.mark.parametrize(
    ("late", "lives"),
    [
        ("global_step_20/policy/rank_0", True),
        ("metrics.jsonl", False),
        ("zone.log", True),
        ("global_step_20/manifest.json", False),
    ],
)
def test_a_process_that_was_stopped_in_the_middle_of_a_checkpoint_leaves_its_successor_alone(
    server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: str, lives: bool
):
    """`late` is what it was sending; its successor lives, or has ended since."""
    monkeypatch.setattr(lease, "ENDS_AFTER_S", 0.2)
    stopped = Machine(tmp_path / "a", keep=1)
    stopped.__enter__()
    (stopped.folder / "zone.log").write_text("log")
    server.held = f"PUT .*/{late}"
    stopped.save(20)
    assert server.holding.wait(10)
    stopped.mirror._lease._left.set()  # its renewals end, too
    stopped.mirror._lease._renewing.join(10)
    with ExitStack() as running:
        successor = running.enter_context(Machine(tmp_path / "b"))
        (successor.folder / "zone.log").write_text("another log")
        successor.save(10)
        server.held = ""
        successor.mirror.finish(20)
        if not lives:
            running.close()
        before, sent = kept(server), len(server.seen)
        server.let_go()
        who = "process" if lives else "another process, which has ended since"
        with pytest.raises(StorageError, match=f"was taken by {who}.*, as this process was silent"):
            stopped.mirror.finish(20)
        stopped.__exit__()
        assert not lives or "team/run/.lock" in server.objects()
    assert {line.split()[0] for line in server.seen[sent:] if ".lock" not in line} <= {"GET", "HEAD"}
    after = kept(server)
    assert {key for key in after | before if after.get(key) != before.get(key)} == {f"team/run/{late}"}


def kept(server: S3Server) -> dict[str, bytes]:
    """What is at the address, but for claims."""
    return {key: content for key, content in server.objects().items() if ".lock" not in key}


def test_nothing_more_is_sent_of_a_checkpoint_after_the_end(
    server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(mirrors, "_LAST_FILE_S", 0.1)
    with Machine(tmp_path / "a") as here:
        server.held = "PUT .*/global_step_10/policy/"
        here.save(10)
        assert server.holding.wait(10)
        here.mirror.stop()
        server.let_go()
        here.mirror._worker.join(10)
    assert puts(server, "global_step_10") == ["global_step_10/policy/rank_0"]


def test_one_of_those_who_have_seen_the_same_writes(address: str):
    store = StoredFolder(address)
    assert store.write_if("name", b"first", None) and not store.write_if("name", b"other", None)
    seen = store.version("name")
    assert seen is not None and store.write_if("name", b"second", seen)
    assert not store.write_if("name", b"third", seen) and store.read("name") == b"second"
    seen = store.version("name")
    store.delete(["name"])
    assert not store.write_if("name", b"third", seen) and store.version("name") is None


@pytest.mark.usefixtures("quick_leases")
@pytest.mark.defect("two-runs-take-one-dead-claim")
def test_one_of_two_that_find_a_claim_dead_takes_it(server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(lease, "ENDS_AFTER_S", 0.2)
    dead = Machine(tmp_path / "a")
    dead.mirror.take_over()
    dead.mirror._lease._left.set()
    errors: list[BaseException] = []

    def take() -> None:
        try:
            Machine(tmp_path / "b").mirror.take_over()
        except RunDirectoryError as error:
            errors.append(error)

    dead.mirror._lease._renewing.join(10)
    server.held = "PUT .*/.lock"
    slower = threading.Thread(target=take)
    slower.start()
    assert server.holding.wait(10)
    server.held = ""  # for those who come from now on
    with Machine(tmp_path / "c") as faster:
        server.let_go()
        slower.join(10)
        assert "is in use by process" in str(errors[0])
        time.sleep(0.3)
        assert not faster.mirror._lease.lost_to


@pytest.mark.usefixtures("quick_leases")
@pytest.mark.parametrize("answer", ["lost", "501 Not Implemented"])
def test_a_claim_holds_whose_answer_was_lost_and_one_on_a_server_without_conditions(
    server: S3Server, tmp_path: Path, answer: str
):
    if answer == "lost":
        server.unheard = "PUT .*/.lock"
    else:
        server.refused_as, server.refused_if = answer, "HTTP_IF_"
    with Machine(tmp_path / "a") as here:
        content = server.objects()["team/run/.lock"]
        until(lambda: server.objects()["team/run/.lock"] != content)
        assert not here.mirror._lease.lost_to


def test_a_signal_is_heard_while_a_claim_is_looked_at(tmp_path: Path):
    address = f"file://{tmp_path}/elsewhere"
    claim = json.dumps({"holder": "process 1 on another", "folder": "another:/run", "id": "1"}).encode()
    StoredFolder(address).write(".lock", claim)

    async def begin() -> None:
        mirror = Mirror(tmp_path / "run", address)
        async with AsyncExitStack() as stack:
            await Mirrors(mirror).enter(stack, RunDirectory(tmp_path / "run", {}, True, mirror))

    async def run() -> None:
        beginning = asyncio.create_task(begin())
        await asyncio.sleep(0.5)
        assert not beginning.done()
        beginning.cancel()
        with pytest.raises(asyncio.CancelledError):
            await beginning

    began = time.monotonic()
    asyncio.run(run())
    assert time.monotonic() - began < 5.0, "and not the 45 s after which a claim ends"
    assert StoredFolder(address).read(".lock") == claim
    with RunDirectory(tmp_path / "run", {}, True):
        pass


def test_the_end_of_a_run_waits_for_its_uploads_and_says_what_is_missing(server: S3Server, tmp_path: Path):
    here = Machine(tmp_path / "a")

    async def run() -> None:
        async with Mirrors(here.mirror).kept(0.5):
            server.held = "PUT .*/global_step_10/policy/"
            here.save(10)
            threading.Timer(1.0, server.let_go).start()

    with pytest.raises(StorageError, match="lacks global_step_10"):
        asyncio.run(run())
    assert here.mirror.steps() == [], "no manifest comes after the end"
