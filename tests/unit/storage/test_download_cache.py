from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import pytest

from skyrl_train.config.predicates import RunComponents
from skyrl_train.config.prepare import prepare_config
from skyrl_train.config.schema import LoraConfig
from skyrl_train.data.dataset import read_rows
from skyrl_train.errors import ConfigError, StorageError
from skyrl_train.experiment.preflight import check_uris
from skyrl_train.learner.worker import LearnerWorker
from skyrl_train.models.loading import load_causal_lm, load_config
from skyrl_train.storage.download_cache import local_copy
from skyrl_train.storage.manifests import download_folder, upload_folder, write_manifest
from skyrl_train.storage.remote_folder import RemoteFolder
from tests.support.learner_specs import tiny_spec
from tests.support.s3_server import BUCKET, S3Server


def downloaded(server: S3Server) -> list[str]:
    """Return the names of the files that were downloaded so far."""
    return [line.rpartition("/")[2] for line in server.seen if line.startswith(f"GET /{BUCKET}/")]


def test_local_paths_and_hub_names_need_no_copy():
    assert local_copy("/data/model") == "/data/model"
    assert local_copy("Qwen/Qwen2.5-0.5B") == "Qwen/Qwen2.5-0.5B"
    assert local_copy("file:///data/model") == "/data/model"


def test_rows_are_downloaded_once_per_version(server: S3Server):
    store = RemoteFolder(f"s3://{BUCKET}/data")
    store.write("train.jsonl", b'{"prompt": "one"}\n')
    for _ in range(2):  # like two processes
        local_copy.cache_clear()
        assert [row for _, row in read_rows(f"{store.uri}/train.jsonl")] == [{"prompt": "one"}]
    assert downloaded(server) == ["train.jsonl"]
    store.write("train.jsonl", b'{"prompt": "two"}\n')
    assert [row for _, row in read_rows(f"{store.uri}/train.jsonl")] == [{"prompt": "one"}], "one version per process"
    local_copy.cache_clear()
    assert [row for _, row in read_rows(f"{store.uri}/train.jsonl")] == [{"prompt": "two"}]


def test_model_weights_are_downloaded_only_when_needed(server: S3Server, tiny_model_path: str):
    import torch

    store = RemoteFolder(f"s3://{BUCKET}/models/tiny")
    for file in Path(tiny_model_path).iterdir():
        store.put(file.name, file)
    config = load_config(store.uri)
    assert config.to_dict() | {"_name_or_path": ""} == load_config(tiny_model_path).to_dict() | {"_name_or_path": ""}
    assert "model.safetensors" not in downloaded(server)
    remote = load_causal_lm(store.uri, dtype=torch.float32).state_dict()
    local = load_causal_lm(tiny_model_path, dtype=torch.float32).state_dict()
    assert all(torch.equal(remote[name], tensor) for name, tensor in local.items())
    assert sorted(downloaded(server)) == sorted({*downloaded(server)}), "no file is downloaded twice"


def test_adapter_config_names_base_model_uri(server: S3Server, tiny_model_path: str, tmp_path: Path):
    store = RemoteFolder(f"s3://{BUCKET}/models/tiny")
    for path in Path(tiny_model_path).iterdir():
        store.write(path.name, path.read_bytes())
    worker = LearnerWorker(tiny_spec(store.uri, lora=LoraConfig(rank=2)), 0, 1)
    worker.build(store.uri)
    worker.export(str(tmp_path / "out"))
    config = json.loads((tmp_path / "out" / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == store.uri


def test_truncated_copy_is_downloaded_again(server: S3Server):
    RemoteFolder(f"s3://{BUCKET}/m").write("config.json", b"{} ")
    copy = Path(local_copy(f"s3://{BUCKET}/m")) / "config.json"
    copy.write_bytes(b"{")
    local_copy.cache_clear()
    assert Path(local_copy(f"s3://{BUCKET}/m"), "config.json").read_bytes() == b"{} "


def test_export_requires_complete_manifest(server: S3Server, tmp_path: Path):
    store, uri = RemoteFolder(f"s3://{BUCKET}/exports"), f"s3://{BUCKET}/exports/global_step_3/policy"
    export = tmp_path / "policy"
    export.mkdir()
    for text in ("first", "second"):
        (export / "config.json").write_text(text)
        (export / "manifest.json").unlink(missing_ok=True)
        write_manifest(export)
        assert upload_folder(store, "global_step_3/policy", export)
    assert {path.name for path in Path(local_copy(uri)).iterdir()} == {"config.json"}
    assert Path(local_copy(uri), "config.json").read_text() == "second", "even though its key differs"

    (key,) = (name for name in store.find() if "config.json" in name)
    store.write(key, b"secind")
    local_copy.cache_clear()
    with pytest.raises(StorageError, match=r"config\.json.* has another SHA-256 or size than when it was listed"):
        local_copy(uri)

    store.delete(["global_step_3/policy/manifest.json"])
    local_copy.cache_clear()
    with pytest.raises(StorageError, match="its upload is not finished"):
        local_copy(uri)


def test_folder_changed_during_download_is_rejected(server: S3Server):
    store = RemoteFolder(f"s3://{BUCKET}/model")
    store.write("a.json", b"old")
    store.write("b.json", b"old")
    server.block_pattern = "GET .*/b.json"
    with ThreadPoolExecutor(1) as pool:
        copying = pool.submit(local_copy, store.uri)
        assert server.is_blocking.wait(20)
        store.write("a.json", b"new")
        server.unblock()
        with pytest.raises(StorageError, match="was changed while it was downloaded"):
            copying.result(20)


@pytest.mark.parametrize("scheme", ["s3", "file"])
def test_interrupted_transfer_raises_and_leaves_nothing(
    scheme: str, server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    filesystems: list[Any] = []
    make = fsspec.filesystem

    def filesystem(*arguments: Any, **options: Any) -> Any:
        filesystems.append(make(*arguments, **options))
        return filesystems[-1]

    monkeypatch.setattr(fsspec, "filesystem", filesystem)
    store = RemoteFolder(f"s3://{BUCKET}/cut" if scheme == "s3" else f"file://{tmp_path}/there")
    store.write("file", b"whole")
    (files,) = filesystems
    get_file = files.get_file

    def interrupt(source: str, target: str) -> None:
        get_file(source, target)
        Path(target).write_bytes(b"who")
        raise ConnectionResetError("connection reset by peer")

    with monkeypatch.context() as patch:
        patch.setattr(files, "get_file", interrupt)
        with pytest.raises(StorageError, match="cannot be read"):
            store.get("file", tmp_path / "here" / "file")
    assert not list((tmp_path / "here").iterdir())

    def truncate(source: str, target: str) -> None:
        files.pipe_file(target, Path(source).read_bytes()[:-1])

    (tmp_path / "sent").write_bytes(b"whole")
    monkeypatch.setattr(files, "put_file", truncate)
    with pytest.raises(StorageError, match="4 bytes of 5 arrived"):
        store.put("file", tmp_path / "sent")


@pytest.mark.parametrize("status", ["409 Conflict", "412 Precondition Failed"])
def test_losing_conditional_write_returns_false(server: S3Server, status: str):
    store = RemoteFolder(f"s3://{BUCKET}/lease")
    server.reject_status, server.reject_condition = status, "HTTP_IF_"
    assert not store.write_if_version("lock", b"mine", None)
    assert store.read("lock") is None


def test_missing_files_and_rejected_requests_name_uri(server: S3Server):
    with pytest.raises(StorageError, match="s3://runs/nothing: there is no file or folder at this URI"):
        local_copy(f"s3://{BUCKET}/nothing")
    server.reject_pattern = "."
    with pytest.raises(StorageError, match=r"s3://runs/x: its properties cannot be read.*come from AWS_ACCESS_KEY_ID"):
        local_copy(f"s3://{BUCKET}/x")


def test_changed_file_of_equal_size_is_downloaded_again(server: S3Server, tmp_path: Path):
    store, export, local = RemoteFolder(f"s3://{BUCKET}/exports"), tmp_path / "export", tmp_path / "local"
    export.mkdir()
    (export / "config.json").write_text("first")
    write_manifest(export)
    assert upload_folder(store, "policy", export)
    local.mkdir()
    (local / "config.json").write_text("wrong")
    assert download_folder(store, "policy", local) is None
    assert (local / "config.json").read_text() == "first"


def test_missing_bucket_is_detected(server: S3Server, tmp_path: Path) -> None:
    assert RemoteFolder(f"s3://{BUCKET}/run").has_bucket()
    assert not RemoteFolder("s3://no-such-bucket/run").has_bucket()
    assert RemoteFolder(f"file://{tmp_path}/none/run").has_bucket()
    server.reject_pattern = "HEAD /"
    assert RemoteFolder(f"s3://{BUCKET}/run").has_bucket(), "a user may be allowed to write but not to read the bucket"


def test_check_names_key_of_missing_bucket(server: S3Server) -> None:
    argv = ["trainer.ckpt_path=s3://no-such-bucket/run", f"trainer.export_path=s3://{BUCKET}/exports"]
    components = RunComponents(train_data=False, val_data=False)
    with pytest.raises(ConfigError, match=r"1 problem.*\n.*trainer\.ckpt_path=s3://no-such-bucket/run.* that exists"):
        check_uris(prepare_config(argv, has_accelerator=False).config, components)
    check_uris(prepare_config([argv[1]], has_accelerator=False).config, components)
    assert RemoteFolder(f"s3://{BUCKET}").find() == {}, "a check writes nothing"
