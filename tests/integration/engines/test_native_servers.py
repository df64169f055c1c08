"""Tests of vLLM's and SGLang's own servers in addition to the conformance suite."""

from __future__ import annotations

import asyncio
import importlib.util
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from skyrl_train.config.hydra import load_preset
from skyrl_train.data.token_arrays import to_token_array
from skyrl_train.engines.base import SampleRequest, SamplingParams
from skyrl_train.engines.http.native import NativeEngine
from skyrl_train.errors import ConfigError, EngineError, UnsupportedParameter, WeightSyncError
from skyrl_train.experiment.engines import connect_engine
from skyrl_train.listeners import API_KEY_ENV
from skyrl_train.tensordict.wrappers.backends import SGLangWrapper
from skyrl_train.tensordict.wrappers.sglang_server import AsyncSGLang
from skyrl_train.testing.tiny_models import save_tiny_model, tiny_model
from skyrl_train.weight_sync.sync import Probe, WeightSync
from tests.support.engine_harness import assert_logprobs
from tests.support.native_servers import TOKEN, NativeServerProcess
from tests.support.reference_sampler import Reference
from tests.support.weight_targets import LocalTrainer, score

pytestmark = pytest.mark.slow
PROMPT = (50, 60, 70, 80, 90)
IDS = [[5, 9, 77, 30, 12, 44], list(range(20, 60))]


@dataclass
class Server:
    kind: str
    model: str
    folder: Path
    process: NativeServerProcess

    def run(
        self, check: Callable[[NativeEngine], Coroutine[Any, Any, None]], *overrides: str, backend: str | None = None
    ) -> None:
        """Call `check` with an engine that is connected like in a run."""

        async def connected() -> None:
            cfg = load_preset(
                [
                    f"generator.backend={backend or self.kind}",
                    f"trainer.policy.model.path={self.model}",
                    f"trainer.ckpt_path={self.folder}",
                    "generator.run_engines_locally=false",
                    "generator.model_dtype=float32",
                    "trainer.timeouts.engine_start_s=200",
                    *overrides,
                ]
            )
            engine = await connect_engine(self.process.address, cfg)
            assert isinstance(engine, NativeEngine)
            try:
                await check(engine)
            finally:
                await engine.close()

        asyncio.run(connected())


@pytest.fixture(scope="module", params=[pytest.param("vllm", marks=pytest.mark.on_demand), "sglang"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that is started without options of this package, except for vLLM's development mode."""
    kind = request.param
    if importlib.util.find_spec(kind) is None:
        pytest.skip(f"{kind} is not installed; scripts/cpu_engines installs it")
    folder = tmp_path_factory.mktemp(kind)
    model = save_tiny_model(folder / "model", "qwen3")
    process = NativeServerProcess(kind, model, log=folder / "log", plain=True)
    try:
        yield Server(kind, model, folder, process)
    finally:
        process.stop()


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(API_KEY_ENV, TOKEN)


async def noop(engine: NativeEngine) -> None:
    """Do nothing; the test needs only the connection."""


def test_greedy_and_sampled_logprobs_match_reference(server: Server):
    reference = Reference(tiny_model("qwen3"))

    async def check(engine: NativeEngine) -> None:
        for temperature in (0.0, 1.0):
            request = SampleRequest(
                "r", to_token_array(PROMPT), SamplingParams(max_tokens=16, temperature=temperature), 1
            )
            assert_logprobs(reference, request, (await engine.generate([request]))[0])

    server.run(check)


def test_vllm_temperature_requires_processed_logprobs(server: Server):
    async def check(engine: NativeEngine) -> None:
        sampling = SamplingParams(
            max_tokens=4, temperature=0.7, ignore_eos=True
        )  # a server without processed log-probs
        request = SampleRequest("r", to_token_array(PROMPT), sampling, 1)
        if server.kind == "sglang":
            assert len((await engine.generate([request]))[0].token_ids) == 4
            return
        with pytest.raises(UnsupportedParameter, match=r"temperature=0\.7"):
            await engine.generate([request])
        assert "--logprobs-mode processed_logprobs" in engine.capabilities.refusals["temperature"]

    server.run(check)


def test_wrong_token_is_engine_error_with_401(server: Server, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(API_KEY_ENV, "guessed")
    with pytest.raises(EngineError, match=r"401.*SKYRL_API_KEY") as caught:
        server.run(noop)
    assert "guessed" not in str(caught.value)


def test_server_of_another_kind_is_rejected_by_address(server: Server):
    other, name = {"vllm": ("sglang", "SGLang"), "sglang": ("vllm", "vLLM")}[server.kind]
    with pytest.raises(
        EngineError, match=rf"{server.process.address}.* not an? {name} server; check generator\.backend"
    ):
        server.run(noop, backend=other)


def test_backend_without_native_server_is_rejected_by_key(server: Server):
    with pytest.raises(ConfigError, match=r"remote_inference_engine_urls.*generator\.backend.*transformers"):
        server.run(noop, backend="transformers")


def test_probe_verifies_weights_or_names_engine(server: Server):
    """With tied embeddings on a CPU and without WorkerExtension, vLLM keeps the old head; only a probe detects it."""
    trainer = LocalTrainer(tiny_model("qwen3", seed=1))
    with torch.no_grad():
        trainer.model.get_input_embeddings().weight.mul_(-1)  # type: ignore[operator]

    async def trainer_score(ids: Any) -> list[list[float]]:
        return score(trainer.model, ids)

    async def check(engine: NativeEngine) -> None:
        probe = Probe(IDS, trainer_score)
        weight_sync = WeightSync(trainer, lambda: [engine], route="in_process", deadline_s=60, probe=probe)
        if server.kind == "vllm":
            with pytest.raises(WeightSyncError, match=rf"{server.process.address}.*stale or corrupt"):
                await weight_sync.sync_all(1)
            return
        assert (await weight_sync.sync_all(1))["weights/probe_gap"] <= 1e-4
        folders = list((server.folder / "weight_sync" / "served").glob("*/*"))
        assert [folder.name for folder in folders] == ["weights_000001"]

    server.run(check)


@pytest.mark.defect("D09")
def test_torchrl_calls_reach_native_sglang_server(server: Server):
    """Generation, a wrapper and a weight update work; a server of another kind is rejected."""
    if server.kind != "sglang":
        with pytest.raises(ConnectionError, match=r"No SGLang server answers at .*without a model_path"):
            AsyncSGLang.connect(server.process.address, connect_timeout=200.0)
        return
    trained = tiny_model("qwen3", seed=2)
    with AsyncSGLang.connect(server.process.address, connect_timeout=200.0) as sglang:
        assert sglang.model_path == server.model
        sampling = {"max_new_tokens": 5, "temperature": 0.0}
        version = sglang.update_weights(trained)
        response: Any = sglang.generate(input_ids=PROMPT, sampling_params=sampling, return_logprobs=True)
        assert len(response["output_ids"]) == len(response["meta_info"]["output_token_logprobs"]) == 5
        assert response["meta_info"]["weight_version"] == str(version)
        wrapper = SGLangWrapper(sglang, input_mode="tokens", generate=False, inplace=False)
        out = wrapper(TensorDict(tokens=torch.tensor(IDS[0])))
        torch.testing.assert_close(out["log_probs"].full[1:].tolist(), score(trained, IDS[:1])[0], atol=1e-4, rtol=0)
        assert sglang.flush_cache()


def test_killed_server_is_reported_by_name_in_time(server: Server):
    async def check(engine: NativeEngine) -> None:
        request = SampleRequest("r", to_token_array(PROMPT), SamplingParams(max_tokens=900, ignore_eos=True), 1)
        call = asyncio.ensure_future(engine.generate([request]))
        while not (await engine.health()).running:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        await asyncio.to_thread(server.process.stop)
        start = time.monotonic()
        with pytest.raises(EngineError, match=rf"{server.process.address}.*lost during"):
            await call
        assert time.monotonic() - start < 30
        with pytest.raises(EngineError, match=server.process.address):
            await engine.health()

    server.run(check)
