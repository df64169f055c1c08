"""Weight syncs that load a model of vLLM in place, as on GPUs. vLLM's CPU kernels are told not to pack weights."""

from __future__ import annotations

import importlib.util
import threading
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from skyrl_train.testing.tiny_models import save_tiny_model, tiny_model
from tests.support.engine_harness import BackgroundLoop, EngineHarness, Reference, assert_logprobs
from tests.support.weight_targets import LocalTrainer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed"),
]


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_unpacked_models_load_in_place(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    warnings.simplefilter("ignore")  # warnings of third-party packages; pytest restores the filters
    import vllm._custom_ops as ops

    from skyrl_train.engines.vllm import worker
    from skyrl_train.engines.vllm.engine import VLLMEngine

    reloads: list[object] = []
    threads: list[str] = []
    monkeypatch.setattr(
        worker.WorkerExtension, "use_main_stream", lambda rank: threads.append(threading.current_thread().name)
    )
    monkeypatch.setattr(ops, "_supports_onednn", False)
    monkeypatch.setattr(worker, "_UNPACKED_DEVICES", frozenset({"cpu"}))
    monkeypatch.setattr(worker, "initialize_layerwise_reload", reloads.append)
    path, loop = save_tiny_model(tmp_path / "model", kind), BackgroundLoop()
    engine = VLLMEngine(path, name="in place", max_num_seqs=4, max_model_len=256, threads=1)
    try:
        bench = EngineHarness(engine, tiny_model(kind), loop, tmp_path)
        for seed in (1, 2):
            new = bench.serve(bench.random_model(seed))
            request = bench.request([5, 9, 77])
            assert_logprobs(new, request, bench.generate(request)[0])
        loads: list[str] = []
        load = worker.VLLMWeightStore.load

        def record_and_load(store: worker.VLLMWeightStore, tensors: Sequence[tuple[str, Tensor]]) -> None:
            loads.extend(name for name, _ in tensors)
            load(store, tensors)

        monkeypatch.setattr(worker.VLLMWeightStore, "load", record_and_load)
        changed = [f"model.layers.1.{name}.weight" for name in ("self_attn.k_proj", "mlp.up_proj", "input_layernorm")]

        async def sync_changes() -> None:
            trainer = LocalTrainer(bench.model, bucket_bytes=1 << 14, weight_sync_only_changed=True)
            async with bench.syncing("in_process", trainer=trainer) as weight_sync:
                await weight_sync.sync_all(await bench.next_version())
                for _ in range(2):
                    loads.clear()
                    for name in changed:
                        bench.model.get_parameter(name).data.view(-1)[3::50] *= -1.5
                    await weight_sync.sync_all(await bench.next_version())  # verified by log-probs
                    assert sorted(loads) == sorted(changed)

        loop.run(sync_changes())
        assert_logprobs(Reference(bench.model), request, bench.generate(request)[0])
        assert reloads == []
        assert threads == ["engine-in place"], "the thread of the engine's steps, not the one that started it"
    finally:
        loop.run(engine.close())
        loop.close()


def test_steps_use_stream_of_start(monkeypatch: pytest.MonkeyPatch):
    warnings.simplefilter("ignore")
    from skyrl_train.engines.vllm.worker import WorkerExtension

    streams: list[object] = []
    monkeypatch.setattr(torch.cuda, "set_stream", streams.append)
    runner = SimpleNamespace(main_stream=object())
    for device, is_v2, expected in (("cpu", True, []), ("cuda", False, []), ("cuda", True, [runner.main_stream])):
        rank = SimpleNamespace(device=torch.device(device), use_v2_model_runner=is_v2, model_runner=runner)
        WorkerExtension.use_main_stream(rank)
        assert streams == expected
