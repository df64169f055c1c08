"""Runs with data, model, checkpoints and exports on an S3 server, started through the entrypoint."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import datasets
import psutil
import pytest

from skyrl_train.experiment.export import ExportRequest, export
from skyrl_train.storage.download_cache import local_copy
from tests.support.doc_pages import find_commands
from tests.support.s3_server import ACCESS_KEY, BUCKET, SECRET_KEY, S3Server, s3_server

from .conftest import command
from .test_documented_runs import ROW, SMALL

RUN = f"s3://{BUCKET}/team/run"
EXPORTS = f"s3://{BUCKET}/team/exports"
WEIGHTS = "global_step_6/policy/model.safetensors"
CLOCKS = ("timing/", "throughput/", "time", "memory/")


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[S3Server]:
    monkeypatch.setenv("SKYRL_CACHE", str(tmp_path / "cache"))
    with s3_server(monkeypatch) as running:
        yield running


@pytest.fixture
def inputs(tmp_path: Path, tiny_model_path: str) -> tuple[Path, Path]:
    """Return a file of demonstrations and the folder of a model."""
    rows = [
        {"messages": [{"role": "user", "content": f"say {i}"}, {"role": "assistant", "content": "abc" * (1 + i % 3)}]}
        for i in range(12)
    ]
    data = tmp_path / "demonstrations.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return data, Path(tiny_model_path)


def overrides(data: object, model: object, run: object, exports: object) -> list[str]:
    """Return overrides for six steps with a checkpoint after every second one."""
    return [
        f"data.train_data=['{data}']",
        f"trainer.policy.model.path={model}",
        f"trainer.ckpt_path={run}",
        f"trainer.export_path={exports}",
        "trainer.logger=console",
        "trainer.train_batch_size=2",
        "trainer.policy_mini_batch_size=2",
        "trainer.epochs=1",
        "trainer.ckpt_interval=2",
        "trainer.max_tokens_per_microbatch=2048",
        "trainer.policy.optimizer_config.lr=1e-3",
    ]


def put(server: S3Server, prefix: str, *files: Path) -> None:
    import s3fs

    bucket = s3fs.S3FileSystem(use_listings_cache=False)
    for file in files:
        bucket.put_file(str(file), f"{BUCKET}/{prefix}/{file.name}")


def train(arguments: list[str], expect: int = 0) -> str:
    done = subprocess.run(command("main_sft", arguments), capture_output=True, text=True, env=os.environ, timeout=300)
    assert done.returncode == expect, done.stdout[-3000:] + done.stderr[-5000:]
    return done.stdout + done.stderr


def metrics_in(content: bytes) -> list[dict[str, float]]:
    rows = [json.loads(line) for line in content.splitlines()]
    return [{key: value for key, value in row.items() if not key.startswith(CLOCKS)} for row in rows]


def test_run_on_remote_storage_leaks_no_credentials(
    server: S3Server, inputs: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    data, model = inputs
    put(server, "data", data)
    put(server, "models/tiny", *model.iterdir())
    arguments = overrides(f"s3://{BUCKET}/data/{data.name}", f"s3://{BUCKET}/models/tiny", RUN, EXPORTS)
    monkeypatch.setenv("WANDB_MODE", "offline")
    output = train([*arguments, "trainer.max_ckpts_to_keep=2", "trainer.logger=[console,tensorboard,wandb]"])

    stored = server.objects()
    steps = {key.split("/")[2] for key in stored if key.startswith("team/run/global_step_")}
    assert steps == {"global_step_4", "global_step_6"}, "remote storage also keeps two checkpoints"
    assert stored["team/run/latest_ckpt_global_step.txt"] == b"6"
    assert [row["step"] for row in metrics_in(stored["team/run/metrics.jsonl"])] == [1, 2, 3, 4, 5, 6]
    assert any(key.startswith("team/run/wandb/offline-run-") and key.endswith(".wandb") for key in stored)
    for name in ("global_step_6/trainer_state.json", "global_step_6/manifest.json", "run.json", "logs/driver.log"):
        assert f"team/run/{name}" in stored
    assert {"team/exports/global_step_6/policy/manifest.json", f"team/exports/{WEIGHTS}"} <= stored.keys()
    assert f"{RUN}".encode() in stored["team/run/config.yaml"]
    assert json.loads(stored["team/run/.lock"])["ended"], "the lock is released, so another run need not wait"
    assert_remote_checkpoint_can_be_exported(stored, tmp_path)

    files = {str(path): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for secret in (ACCESS_KEY, SECRET_KEY):
        assert secret not in output
        assert [key for key, content in {**files, **stored}.items() if secret.encode() in content] == []


@pytest.mark.on_demand
@pytest.mark.slow
def test_documented_storage_command_trains(server: S3Server, tiny_model_path: str, tmp_path: Path):
    """Run the command of docs/guides/storage.md with its URIs and a small model."""
    (documented,) = find_commands(r"python -m skyrl_train\.entrypoints\.main_base '?data\.train_data=\S*s3:")
    words = [word.replace("s3://bucket/", f"s3://{BUCKET}/") for word in documented.words[3:]]
    for split in ("train", "validation"):
        datasets.Dataset.from_list([ROW] * 8).to_parquet(tmp_path / f"{split}.parquet")
        put(server, "gsm8k", tmp_path / f"{split}.parquet")
    put(server, "models/qwen2.5-0.5b", *Path(tiny_model_path).iterdir())
    arguments = command("main_base", [*words, *SMALL, "trainer.ckpt_interval=1", "trainer.hf_save_interval=1"])
    done = subprocess.run(arguments, capture_output=True, text=True, env=os.environ, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
    stored = server.objects()
    assert {"runs/a/global_step_1/manifest.json", "exports/a/global_step_1/policy/manifest.json"} <= stored.keys()
    (row,) = (row for row in metrics_in(stored["runs/a/metrics.jsonl"]) if row["step"] == 1)
    assert row["rollouts/failed"] == 0


def assert_remote_checkpoint_can_be_exported(stored: dict[str, bytes], folder: Path) -> None:
    local_copy.cache_clear()
    export(ExportRequest(f"{RUN}/global_step_6", str(folder / "model")))
    local_copy.cache_clear()
    assert (folder / "model" / "model.safetensors").read_bytes() == stored[f"team/exports/{WEIGHTS}"]
    card = (folder / "model" / "README.md").read_text()
    assert "a run that trains on demonstrations. Loaded again" in card and "s3://" not in card
    assert "`tiny`" in card and (folder / "model" / "learning_curve.png").is_file()
    assert not list((folder / "cache").glob("checkpoint-*")), "the downloaded copy is deleted"


@pytest.mark.on_demand
def test_run_killed_during_upload_resumes_elsewhere(
    server: S3Server, inputs: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    data, model = inputs
    train(overrides(data, model, tmp_path / "straight", tmp_path / "straight_exports"))

    arguments = overrides(data, model, RUN, EXPORTS)
    server.block_pattern = r"PUT /runs/team/run/global_step_4/policy/.*"
    driver = subprocess.Popen(command("main_sft", arguments), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    assert server.is_blocking.wait(120), "the upload of the second checkpoint has started"
    processes = psutil.Process(driver.pid).children(recursive=True)
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    psutil.wait_procs(processes, timeout=30)
    server.unblock()
    stored = server.objects()
    assert "team/run/global_step_2/manifest.json" in stored
    assert "team/run/global_step_4/manifest.json" not in stored

    monkeypatch.setenv("SKYRL_CACHE", str(tmp_path / "another_machine"))
    output = train(arguments)
    assert "resumed at step 2 of 6" in output
    stored = server.objects()
    assert stored[f"team/exports/{WEIGHTS}"] == (tmp_path / "straight_exports" / WEIGHTS).read_bytes()
    straight = (tmp_path / "straight" / "metrics.jsonl").read_bytes()
    assert metrics_in(stored["team/run/metrics.jsonl"]) == metrics_in(straight)


@pytest.mark.on_demand
def test_run_killed_during_upload_resumes_locally(server: S3Server, inputs: tuple[Path, Path], tmp_path: Path):
    data, model = inputs
    arguments = overrides(data, model, RUN, EXPORTS)
    server.block_pattern = r"PUT /runs/team/run/global_step_4/policy/.*"
    driver = subprocess.Popen(command("main_sft", arguments), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    assert server.is_blocking.wait(120)
    local = tmp_path / "cache" / "runs" / "s3" / BUCKET / "team" / "run"
    assert (local / "global_step_4" / "manifest.json").exists()
    processes = psutil.Process(driver.pid).children(recursive=True)
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    psutil.wait_procs(processes, timeout=30)
    server.unblock()
    assert re.search(r"resumed at step [46] of 6", train(arguments)), "step 4 is only in the local copy"
    stored = server.objects()
    steps = {key.split("/")[2] for key in stored if key.endswith("/manifest.json") and "/run/" in key}
    assert steps == {"global_step_2", "global_step_4", "global_step_6"}
