"""Names from a bucket, a manifest or a user are checked before they are used."""

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
    """Write an object under any key, like a client that does not check names."""
    import s3fs

    s3fs.S3FileSystem(use_listings_cache=False).call_s3("put_object", Bucket=BUCKET, Key=key, Body=content)


def test_objects_with_invalid_names_are_skipped(server: S3Server, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    with MirroredMachine(tmp_path / "a") as machine:
        machine.save(10)
        machine.mirror.finish(20)
    for key in ("../../evil", "logs/../../../evil", "/evil", "logs//evil", "metrics.jsonl/evil", "x" * 256 + "/evil"):
        put_raw(f"team/run/{key}")
    put_raw("team/run/global_step_20\x1b[2J/../evil/manifest.json")
    put_raw("team/run/global_step_\u0663/manifest.json", b"{}")
    with MirroredMachine(tmp_path / "b") as other:
        assert other.mirror.remote_steps() == [10] and other.loaded() == (10, "weights of step 10")
        assert json.loads((other.folder / "metrics.jsonl").read_text()) == {"step": 10}
        other.save(20)
        other.mirror.finish(20)
    assert not list(tmp_path.rglob("evil*"))
    for name in ("../../evil", "logs//evil", "metrics.jsonl/evil", r"global_step_20\x1b[2J"):
        assert caplog.text.count(f"the object '{name}") == 1, "one warning per object"
    assert "\x1b" not in caplog.text


def test_objects_that_conflict_with_local_paths_are_skipped(
    server: S3Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """A local folder may have an object's name, a local file that of its folder, and a save may create such names."""
    with MirroredMachine(tmp_path / "a") as machine:
        machine.save(10)
        machine.mirror.finish(20)
    for key in ("logs", "notes/page", "global_step_20", "global_step_20.partial", "global_step_x.deleting"):
        put_raw(f"team/run/{key}")
    put_raw("team/run/global_step_10", b"")  # Some tools create empty objects as markers of folders.
    folder = tmp_path / "b"
    (folder / "logs").mkdir(parents=True)
    (folder / "notes").write_text("mine")
    with MirroredMachine(folder) as machine:
        assert machine.loaded() == (10, "weights of step 10") and (folder / "notes").read_text() == "mine"
        machine.save(20)
        machine.mirror.finish(20)
        assert machine.mirror.remote_steps() == [10, 20]
    assert MirroredMachine(folder).checkpoints.steps() == [10, 20]
    for name in ("logs", "notes/page"):
        assert f"the object '{name}' is skipped: there is a f" in caplog.text


@pytest.mark.parametrize("name", OUTSIDE)
@pytest.mark.parametrize("field", ["name", "key"])
def test_manifest_with_outside_name_is_rejected(server: S3Server, tmp_path: Path, name: str, field: str):
    entry = {"bytes": 4, "sha256": SHA} | ({"key": name} if field == "key" else {})
    store = RemoteFolder(f"s3://{BUCKET}/team")
    content = json.dumps({"files": {"a" if field == "key" else name: entry}}).encode()
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
def test_invalid_manifest_is_rejected(files: object):
    with pytest.raises(ValueError, match=r"no valid manifest|64 hexadecimal|inside the folder"):
        parse_manifest(json.dumps({"files": files}).encode())


@pytest.mark.parametrize("name", OUTSIDE[:-2])
def test_every_method_rejects_names_outside_folder(tmp_path: Path, name: str):
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


def test_optimized_python_rejects_the_same(tmp_path: Path):
    code = (
        "from skyrl_train.storage.remote_folder import RemoteFolder\n"
        "from skyrl_train.weight_sync.protocol import dtype_of\n"
        "from skyrl_train.environments.integrations.skyrl_gym import register\n"
        f"rejected, store = 0, RemoteFolder('file://{tmp_path}/store')\n"
        "for call in (lambda: store.write('../evil', b'evil'), lambda: dtype_of('save'), lambda: register('mine')):\n"
        "    try:\n"
        "        call()\n"
        "    except Exception as error:\n"
        "        rejected += type(error).__name__ in ('StorageError', 'WeightSyncError', 'ConfigError')\n"
        "print(__debug__, rejected)\n"
    )
    done = subprocess.run([sys.executable, "-O", "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout == "False 3\n", done.stderr
    assert not (tmp_path / "evil").exists()


@pytest.mark.parametrize(
    "uri",
    ["s3://bucket//run", "s3://bucket/a//b", "s3://bucket/run//", "file:///a//b", "s3://bucket/./a", "s3://b/.."],
)
def test_uri_with_empty_parts_is_rejected(uri: str):
    for use in (RemoteFolder, resolve_local_folder):
        with pytest.raises(ConfigError, match="no part of which is empty"):
            use(uri)
