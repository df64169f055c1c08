"""Names that come from a bucket, a manifest or a person: checked before anything is made of them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from skyrl_train.errors import ConfigError, StorageError
from skyrl_train.storage.manifests import download_folder, parse_manifest
from skyrl_train.storage.remote_folder import RemoteFolder
from skyrl_train.storage.uris import resolve_local_folder
from tests.support.mirrored_runs import MirroredMachine
from tests.support.s3_server import BUCKET, S3Server

SHA = "0" * 64
OUTSIDE = ("../evil", "a/../../evil", "/evil", "a//b", "./a", "a/.", "", "a\0b", "x" * 256)


def put_raw(key: str, content: bytes = b"evil") -> None:
    """As somebody else would: whatever the key."""
    import s3fs

    s3fs.S3FileSystem(use_listings_cache=False).call_s3("put_object", Bucket=BUCKET, Key=key, Body=content)


def test_objects_that_are_no_files_of_a_folder_are_skipped_and_named(
    server: S3Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    with MirroredMachine(tmp_path / "a") as here:
        here.save(10)
        here.mirror.finish(20)
    for key in ("../../evil", "logs/../../../evil", "/evil", "logs//evil", "metrics.jsonl/evil", "x" * 256 + "/evil"):
        put_raw(f"team/run/{key}")
    put_raw("team/run/global_step_20\x1b[2J/../evil/manifest.json")
    put_raw("team/run/global_step_\u0663/manifest.json", b"{}")
    with MirroredMachine(tmp_path / "b") as there:
        assert there.mirror.remote_steps() == [10] and there.loaded() == (10, "weights of step 10")
        assert json.loads((there.folder / "metrics.jsonl").read_text()) == {"step": 10}
        there.save(20)
        there.mirror.finish(20)
    assert not list(tmp_path.rglob("evil*"))
    for name in ("../../evil", "logs//evil", "metrics.jsonl/evil", r"global_step_20\x1b[2J"):
        assert caplog.text.count(f"the object '{name}") == 1, "said once"
    assert "\x1b" not in caplog.text


def test_objects_that_have_no_place_in_the_folder_here_prevent_nothing(
    server: S3Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """A folder may be here where an object is there, a file where objects lie below, or what saves make or delete."""
    with MirroredMachine(tmp_path / "a") as here:
        here.save(10)
        here.mirror.finish(20)
    for key in ("logs", "notes/page", "global_step_20", "global_step_20.partial", "global_step_x.deleting"):
        put_raw(f"team/run/{key}")
    put_raw("team/run/global_step_10", b"")  # as some tools mark folders
    there = tmp_path / "b"
    (there / "logs").mkdir(parents=True)
    (there / "notes").write_text("mine")
    with MirroredMachine(there) as machine:
        assert machine.loaded() == (10, "weights of step 10") and (there / "notes").read_text() == "mine"
        machine.save(20)
        machine.mirror.finish(20)
        assert machine.mirror.remote_steps() == [10, 20]
    assert MirroredMachine(there).checkpoints.steps() == [10, 20]
    for name in ("logs", "notes/page"):
        assert f"the object '{name}' is skipped: there is a f" in caplog.text


@pytest.mark.parametrize("name", OUTSIDE)
@pytest.mark.parametrize("where", ["name", "key"])
def test_manifest_that_leaves_its_folder_is_refused(server: S3Server, tmp_path: Path, name: str, where: str):
    entry = {"bytes": 4, "sha256": SHA} | ({"key": name} if where == "key" else {})
    store = RemoteFolder(f"s3://{BUCKET}/team")
    content = json.dumps({"files": {"a" if where == "key" else name: entry}}).encode()
    store.write("run/manifest.json", content)
    problem = download_folder(store, "run", tmp_path / "local")
    assert problem is not None and "is not the name of a file inside the folder" in problem
    assert not (tmp_path / "local").exists()


@pytest.mark.parametrize(
    "files",
    [
        {"a": {"bytes": 1, "sha256": SHA}, "a/b": {"bytes": 1, "sha256": SHA}},
        {"a": {"bytes": float("inf"), "sha256": SHA}},
        {"a": {"bytes": 1, "sha256": "../../evil"}},
        {"a": 3},
        [],
    ],
)
def test_manifest_that_cannot_be_is_refused(files: object):
    with pytest.raises(ValueError, match=r"no manifest|64 hexadecimal|inside the folder"):
        parse_manifest(json.dumps({"files": files}).encode())


@pytest.mark.parametrize("name", OUTSIDE[:-2])
def test_name_outside_a_folder_is_refused_by_every_method(tmp_path: Path, name: str):
    store = RemoteFolder(f"file://{tmp_path}/store")
    (tmp_path / "source").write_bytes(b"source")
    for call in (
        lambda: store.read(name),
        lambda: store.write(name, b"evil"),
        lambda: store.write_if_version(name, b"evil", None),
        lambda: store.put(name, tmp_path / "source"),
        lambda: store.version(name),
        lambda: store.delete([name]),
    ):
        with pytest.raises(StorageError, match="is not the name of a file inside this folder"):
            call()
    assert not [*tmp_path.glob("**/evil")]


def test_optimized_python_refuses_the_same(tmp_path: Path):
    code = (
        "from skyrl_train.storage.remote_folder import RemoteFolder\n"
        "from skyrl_train.weight_sync.protocol import dtype_of\n"
        "from skyrl_train.environments.integrations.skyrl_gym import register\n"
        f"refused, store = 0, RemoteFolder('file://{tmp_path}/store')\n"
        "for call in (lambda: store.write('../evil', b'evil'), lambda: dtype_of('save'), lambda: register('mine')):\n"
        "    try:\n"
        "        call()\n"
        "    except Exception as error:\n"
        "        refused += type(error).__name__ in ('StorageError', 'WeightSyncError', 'ConfigError')\n"
        "print(__debug__, refused)\n"
    )
    done = subprocess.run([sys.executable, "-O", "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout == "False 3\n", done.stderr
    assert not (tmp_path / "evil").exists()


@pytest.mark.parametrize(
    "address",
    ["s3://bucket//run", "s3://bucket/a//b", "s3://bucket/run//", "file:///a//b", "s3://bucket/./a", "s3://b/.."],
)
def test_address_with_empty_parts_is_refused(address: str):
    for use in (RemoteFolder, resolve_local_folder):
        with pytest.raises(ConfigError, match="no part of which is empty"):
            use(address)
