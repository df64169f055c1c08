"""An engine killed between two buckets of a weight sync: sync and request fail in time and name the engine."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from skyrl_train.config.choices import ENGINES
from skyrl_train.data.token_arrays import to_token_array
from skyrl_train.engines.base import SampleRequest, SamplingParams
from skyrl_train.engines.http.remote import RemoteEngine
from skyrl_train.engines.transformers.engine import TransformersEngine
from skyrl_train.errors import EngineError
from skyrl_train.testing.tiny_models import save_tiny_model, tiny_model
from skyrl_train.weight_sync.protocol import Bucket
from skyrl_train.weight_sync.sync import WeightSync
from tests.support.weight_targets import LocalTrainer

TOKEN = "a-secret-of-this-test"
SERVER = """
import asyncio
import sys

from skyrl_train.engines.http.server import HttpEndpoint
from skyrl_train.registry import load_object


async def main(engine_class, model, token):
    engine = load_object(engine_class)(model=model, max_num_seqs=4, max_model_len=1024, threads=1, name="far")
    async with HttpEndpoint(engine, None, model_name="tiny", token=token) as endpoint:
        print("at", endpoint.url, flush=True)
        await asyncio.sleep(600)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
"""
CASES = [
    ("transformers", "broadcast"),
    pytest.param("transformers", "ipc", marks=pytest.mark.on_demand),
    pytest.param("transformers", "checkpoint", marks=pytest.mark.on_demand),
    pytest.param("vllm", "broadcast", marks=[pytest.mark.slow, pytest.mark.on_demand]),
    pytest.param("sglang", "broadcast", marks=[pytest.mark.slow, pytest.mark.on_demand]),
]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[[str], tuple[subprocess.Popen[str], str]]]:
    """Return a function that starts an engine behind HTTP in a new process and returns process and address."""
    model = str(save_tiny_model(tmp_path / "model", "qwen3"))
    script = tmp_path / "server.py"
    script.write_text(SERVER)
    processes: list[subprocess.Popen[str]] = []

    def start(backend: str) -> tuple[subprocess.Popen[str], str]:
        command = [sys.executable, str(script), ENGINES[backend], model, TOKEN]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        processes.append(process)
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("at "):
                return process, line.split()[1]
        raise AssertionError("the server exited before it served")

    yield start
    for process in processes:
        process.kill()
        process.communicate()


class EngineKilledAtSecondBucket:
    """A proxy of an engine that kills the engine's process before its second bucket."""

    def __init__(self, engine: RemoteEngine, pid: int):
        self._engine = engine
        self._pid = pid
        self.killed_at = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def receive_weights(self, bucket: Bucket) -> None:
        if bucket.index == 1:
            self.killed_at = time.monotonic()
            os.kill(self._pid, signal.SIGKILL)
        await self._engine.receive_weights(bucket)


@pytest.mark.fault("F29")
@pytest.mark.fault("F30")
@pytest.mark.parametrize(("backend", "route"), CASES)
def test_engine_killed_between_buckets_does_not_stop_trainer(
    serve: Callable[[str], tuple[subprocess.Popen[str], str]], tmp_path: Path, backend: str, route: str
):
    if importlib.util.find_spec(backend) is None:
        pytest.skip(f"{backend} is not installed; scripts/cpu_engines installs it")
    process, url = serve(backend)
    children = psutil.Process(process.pid).children(recursive=True)
    trainer = LocalTrainer(tiny_model("qwen3", seed=3), bucket_bytes=1 << 14)
    folder = str(tmp_path / "weights")

    async def run() -> None:
        remote = await RemoteEngine(url, TOKEN, name="far", deadline_s=60).connect(60)
        killed_engine = EngineKilledAtSecondBucket(remote, process.pid)
        weight_sync = WeightSync(trainer, lambda: [killed_engine], route=route, deadline_s=60, folder=folder)
        request = SampleRequest("r", to_token_array((5, 6)), SamplingParams(max_tokens=1_000, ignore_eos=True), seed=1)
        running = asyncio.ensure_future(remote.generate([request]))
        while not (await remote.health()).running:
            await asyncio.sleep(0.01)
        await remote.pause("keep")
        with pytest.raises(EngineError, match="'far'"):
            await weight_sync.sync_all(1)
        with pytest.raises(EngineError, match="'far'"):
            await running
        assert killed_engine.killed_at and time.monotonic() - killed_engine.killed_at < 40
        await remote.close()

        survivor = TransformersEngine(tiny_model("qwen3"), name="near")
        try:
            await WeightSync(trainer, lambda: [survivor], route=route, deadline_s=60, folder=folder).sync_all(2)
            assert (await survivor.health()).version == 2
        finally:
            trainer.disconnect_weights()
            await survivor.close()

    asyncio.run(run())
    _, alive = psutil.wait_procs(children, timeout=20)
    assert not alive, "processes of a killed engine are still alive"
