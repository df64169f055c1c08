"""Tests of the vLLM engine alone. The conformance suite tests what engines have in common.

This engine has a KV cache of five blocks, two of which a long request fills.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import shutil
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from skyrl_train.config.generator import GeneratorConfig
from skyrl_train.config.predicates import OffloadMode
from skyrl_train.engines.client import EngineClient
from skyrl_train.engines.graph_sizes import get_graph_sizes
from skyrl_train.engines.lifecycle import EngineState
from skyrl_train.engines.step_loop import DeviceMonitor
from skyrl_train.engines.transformers.engine import TransformersEngine
from skyrl_train.errors import ConfigError, EngineError, WeightSyncError
from skyrl_train.testing.tiny_models import byte_tokenizer, save_tiny_model, tiny_model
from skyrl_train.trainer.offload_manager import ColocatedOffloadManager
from tests.support.engine_harness import TOLERANCE, BackgroundLoop, EngineHarness, assert_logprobs, largest_difference
from tests.support.fake_trainer_parts import FakeTrainerParts
from tests.support.reference_sampler import Reference
from tests.support.vllm_async_scheduling import enable_async_scheduling

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed"),
]
BLOCK_BYTES = 128 * 2 * 2 * 2 * 32 * 4
"""Size of a cache block of 128 tokens: keys and values of two layers with two heads of 32 numbers."""
LENGTH = 256
ATTENTION_MODULE = "vllm.v1.attention.ops.triton_unified_attention"
"""The module that reads the environment variable for batch invariance when it is imported."""
FIRST, SECOND, THIRD = ([start + n % 50 for n in range(200)] for start in (20, 90, 160))
"""Prompts of two blocks."""


def start(path: str, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of third-party packages on import
        from skyrl_train.engines.vllm.engine import VLLMEngine

        return VLLMEngine(path, name="particular", max_num_seqs=4, max_model_len=LENGTH, threads=1, **options)


@dataclass
class RunningEngine:
    engine: Any
    bench: EngineHarness
    loop: BackgroundLoop
    folder: Path

    @property
    def core(self) -> Any:
        return self.engine.llm_engine.engine_core.engine_core

    @property
    def served(self) -> Any:
        """The model inside vLLM."""
        return self.core.model_executor.driver_worker.worker.model_runner.model


@pytest.fixture(scope="module")
def module_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningEngine]:
    folder = tmp_path_factory.mktemp("vllm")
    path = save_tiny_model(folder / "model", "qwen3")
    engine, loop = start(path, kv_cache_memory_bytes=6 * BLOCK_BYTES, max_lora_rank=8), BackgroundLoop()
    yield RunningEngine(engine, EngineHarness(engine, tiny_model("qwen3"), loop, folder), loop, folder)
    loop.run(engine.close())
    loop.close()


@pytest.fixture
def running(module_engine: RunningEngine) -> Iterator[RunningEngine]:
    yield module_engine
    if module_engine.engine.lifecycle.state is not EngineState.CLOSED:
        module_engine.bench.run(module_engine.bench.restore())


@pytest.fixture
def reference(running: RunningEngine) -> Reference:
    return running.bench.serve(running.bench.random_model(0), "random")


def test_moe_adapters_on_cpu_are_rejected(tmp_path: Path):
    path = save_tiny_model(tmp_path, "qwen3_moe", tied=False)
    with pytest.raises(ConfigError, match=r"max_lora_rank=8: vLLM \d+\.\d+.* mixture of experts.* has 4 experts"):
        start(path, max_lora_rank=8)


def test_unsupported_mla_size_on_cpu_is_rejected(tmp_path: Path):
    model = tiny_model("deepseek_v3", tied=False)
    model.config.update({"head_dim": 64, "qk_rope_head_dim": 64, "kv_lora_rank": 256})
    model.config.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"qk_rope_head_dim = 576; .* has 320\. Set generator\.backend=transf"):
        start(str(tmp_path))


def test_requests_are_built_on_callers_thread(
    running: RunningEngine, reference: Reference, monkeypatch: pytest.MonkeyPatch
):
    bench, processor = running.bench, running.engine.llm_engine.input_processor
    process, threads = processor.process_inputs, list[str]()

    def recorded(*args: Any, **kwargs: Any) -> Any:
        threads.append(threading.current_thread().name)
        return process(*args, **kwargs)

    monkeypatch.setattr(processor, "process_inputs", recorded)
    (completion,) = bench.generate(request := bench.request(FIRST, max_tokens=8))
    assert_logprobs(reference, request, completion)
    assert threads == ["engine-bench"], "the caller's thread, not the engine's"


def test_score_preempts_paused_requests_when_cache_is_full(running: RunningEngine, reference: Reference):
    bench, engine = running.bench, running.engine
    requests = [bench.request(prompt, max_tokens=50, seed=n) for n, prompt in enumerate((FIRST, SECOND))]

    async def run() -> tuple[Any, Any, list[int]]:
        calls = bench.start(*requests)
        await bench.wait_until_running(2)
        await engine.pause("keep")
        running_before = len(running.core.scheduler.running)
        scores = await engine.score([THIRD, [5, 9, 77]])
        health = [running_before, len(running.core.scheduler.running)]
        await engine.resume()
        return await calls, scores, health

    completions, scores, (before, after) = bench.run(run(), 60)
    assert (before, after) == (2, 1), "one of two requests is preempted"
    for actual, expected in zip(scores, reference.score([THIRD, [5, 9, 77]]), strict=True):
        assert largest_difference(actual, expected) <= TOLERANCE
    for request, completion in zip(requests, completions, strict=True):
        assert len(completion.token_ids) == 50
        assert_logprobs(reference, request, completion)


def test_failed_load_requires_complete_sync(
    running: RunningEngine, reference: Reference, monkeypatch: pytest.MonkeyPatch
):
    bench, load = running.bench, running.served.load_weights

    def load_without_memory(weights: Any) -> None:
        load(weights)
        raise RuntimeError("out of memory")

    monkeypatch.setattr(running.served, "load_weights", load_without_memory)
    with pytest.raises(WeightSyncError, match="engine particular: receive failed: RuntimeError: out of memory"):
        bench.run(bench.publish(bench.random_model(1)))
    assert bench.run(running.engine.health()).partially_loaded
    with pytest.raises(EngineError, match="is not fully loaded"):
        bench.generate(bench.request(FIRST))
    monkeypatch.undo()
    new = bench.serve(bench.random_model(2))
    request = bench.request(FIRST)
    assert_logprobs(new, request, bench.generate(request)[0])


def test_unresponsive_rank_ends_engine(running: RunningEngine, monkeypatch: pytest.MonkeyPatch):
    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError("rank 1 is gone")

    monkeypatch.setattr(running.engine.llm_engine, "collective_rpc", fail)
    monkeypatch.setattr(running.engine, "device_monitor", DeviceMonitor(running.engine.lifecycle, fail))
    monkeypatch.setattr(running.engine.lifecycle, "_end", None)  # Undoing this revives the engine after the test.
    with pytest.raises(EngineError, match="'particular': connect failed: OSError: rank 1 is gone"):
        running.bench.run(running.engine.connect_weights("in_process", "", 1, 2, 1.0))
    with pytest.raises(EngineError, match=r"'particular' is dead.*OSError: rank 1 is gone"):
        running.bench.run(running.engine.health())


@pytest.mark.parametrize("lost", [True, False])
def test_failed_step_checks_devices_of_ranks(running: RunningEngine, monkeypatch: pytest.MonkeyPatch, lost: bool):
    """The device check of the ranks fails, as after an illegal memory access, or passes."""

    def fails(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    ranks: Any = running.core.model_executor.driver_worker.worker
    monitor = DeviceMonitor(running.engine.lifecycle, running.engine.device_monitor.check_device)
    monkeypatch.setattr(running.engine, "device_monitor", monitor)
    monkeypatch.setattr(running.engine.lifecycle, "_end", None)  # Undoing this revives the engine after the test.
    monkeypatch.setattr(running.engine.llm_engine, "step", fails)
    if lost:
        monkeypatch.setattr(ranks, "check_device", fails)
    with pytest.raises(EngineError, match="illegal memory access"):
        running.bench.generate(running.bench.request(FIRST))
    if not lost:
        assert not running.bench.run(running.engine.health()).running
        return
    with pytest.raises(EngineError, match="'particular' is dead: its accelerator no longer works"):
        running.bench.run(running.engine.health())
    with pytest.raises(EngineError, match="'particular' is dead"):
        running.bench.generate(running.bench.request(FIRST))


@pytest.fixture
def on_device(running: RunningEngine, monkeypatch: pytest.MonkeyPatch) -> RunningEngine:
    """The engine as on an accelerator: its executor sleeps and wakes, which does nothing in vLLM's CPU workers."""
    monkeypatch.setattr(running.engine, "_on_cpu", False)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 0))
    monkeypatch.setattr(running.core.model_executor.driver_worker.worker, "discard", lambda tags: None)
    return running


def test_weights_wake_before_cache(on_device: RunningEngine, reference: Reference):
    bench, engine = on_device.bench, on_device.engine
    for tags in (None, ["kv_cache"], ["weights", "kv_cache"]):
        bench.run(engine.sleep(1))
        with pytest.raises(EngineError, match="wake_up"):
            bench.run(bench.publish(bench.random_model(0)))
        bench.run(engine.wake_up(["weights"]))
        assert on_device.core.model_executor.sleeping_tags == {"kv_cache"}
        assert bench.run(engine.health()).asleep
        bench.run(engine.wake_up(tags))
        assert on_device.core.model_executor.sleeping_tags == set()
        request = bench.request(FIRST)
        assert_logprobs(reference, request, bench.generate(request)[0])


@pytest.mark.defect("probe-allocates-cache-beside-learner")
def test_score_restores_cache_of_sleeping_engine_temporarily(on_device: RunningEngine, reference: Reference):
    bench, engine = on_device.bench, on_device.engine
    bench.run(engine.sleep(1))
    with pytest.raises(EngineError, match="asleep"):
        bench.run(engine.score([[5, 9, 77]]))
    bench.run(engine.wake_up(["weights"]))
    (scores,) = bench.run(engine.score([[5, 9, 77]]))
    assert largest_difference(scores, reference.score([[5, 9, 77]])[0]) <= TOLERANCE
    assert on_device.core.model_executor.sleeping_tags == {"kv_cache"}
    assert on_device.core.scheduler.kv_cache_manager.usage == 0, "no cached prompt remains"
    with pytest.raises(EngineError, match="asleep"):
        bench.generate(bench.request(FIRST))
    bench.run(engine.wake_up())
    assert not bench.run(engine.health()).asleep


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        (OffloadMode.NONE, []),
        (OffloadMode.KV_CACHE, ["discard kv_cache", "wake_up kv_cache"]),
        (OffloadMode.ALL, ["sleep 2", "wake_up weights", "wake_up kv_cache"]),
    ],
)
def test_step_with_probe_maps_cache_once(
    mode: OffloadMode, expected: list[str], on_device: RunningEngine, monkeypatch: pytest.MonkeyPatch
):
    bench, engine, worker = on_device.bench, on_device.engine, on_device.core.model_executor.driver_worker.worker
    events: list[str] = []
    monkeypatch.setattr(worker, "sleep", lambda level=1: events.append(f"sleep {level}"))
    monkeypatch.setattr(worker, "discard", lambda tags: events.append(f"discard {' '.join(tags)}"))
    monkeypatch.setattr(worker, "wake_up", lambda tags=None: events.append(f"wake_up {' '.join(tags)}"))
    learner: Any = FakeTrainerParts()
    client = EngineClient([engine], deadline_s=60)

    async def run() -> None:
        manager = ColocatedOffloadManager(client, learner, mode, level=2)
        if mode is not OffloadMode.NONE:
            await client.sleep(2, mode is OffloadMode.KV_CACHE)
        for seed in range(3):
            events.clear()
            async with manager.training():
                await manager.prepare_sync()
                await bench.publish(bench.random_model(seed))
                await manager.prepare_scoring()
                await engine.score([[5, 9, 77]])
            async with manager.generating():
                pass
            assert events == (expected if seed else expected[1:])  # the engine slept before the first step

    bench.run(run())
    request = bench.request(FIRST)
    assert_logprobs(Reference(bench.model), request, bench.generate(request)[0])


def test_cache_is_freed_again_after_failed_sync(on_device: RunningEngine):
    """An engine whose weights are freed can free its cache, too."""
    bench, engine = on_device.bench, on_device.engine
    bench.run(engine.sleep(1))
    bench.run(engine.sleep(1, True))
    assert on_device.core.model_executor.sleeping_tags == {"weights", "kv_cache"}
    bench.run(engine.wake_up(["weights"]))
    bench.run(engine.sleep(1, True))
    assert on_device.core.model_executor.sleeping_tags == {"kv_cache"}
    bench.run(engine.wake_up())
    assert not bench.run(engine.health()).asleep
    bench.generate(bench.request(FIRST))


def test_sleep_level_2_discards_weights_until_commit(on_device: RunningEngine):
    bench, engine = on_device.bench, on_device.engine
    bench.run(engine.sleep(2))
    bench.run(engine.wake_up())
    with pytest.raises(WeightSyncError, match="Begin a sync first"):
        bench.run(engine.commit_weights(99))
    bench.run(engine.connect_weights("in_process", "", 1, 2, 1.0))
    assert bench.run(engine.health()).partially_loaded, "no weights have arrived yet"
    new = bench.serve(bench.random_model(3))
    assert not bench.run(engine.health()).partially_loaded
    request = bench.request(FIRST)
    assert_logprobs(new, request, bench.generate(request)[0])


@pytest.mark.parametrize(
    ("users", "on_cpu", "arguments", "expected"),
    [
        (None, True, {}, "0"),
        (None, False, {}, None),
        (None, False, {"logits_processors": ["module:Class"]}, "0"),
        ("1", True, {}, "1"),
        ("0", False, {}, "0"),
    ],
)
def test_user_and_device_select_model_runner(
    running: RunningEngine, monkeypatch: pytest.MonkeyPatch, users: str | None, on_cpu: bool, arguments: Any,
    expected: str | None,
):  # fmt: skip
    from skyrl_train.engines.vllm import model_runner

    monkeypatch.setenv(model_runner.VARIABLE, "left by an earlier engine")
    monkeypatch.setattr(model_runner, "_USERS_CHOICE", users)
    model_runner.select_model_runner(arguments, on_cpu)
    assert os.environ.get(model_runner.VARIABLE) == expected


def test_unknown_sampler_is_rejected(running: RunningEngine):
    with pytest.raises(ConfigError, match="VLLM_USE_V2_MODEL_RUNNER=0"):
        running.engine.llm_engine.collective_rpc("prepare", args=("again", 0))  # Our sampler already replaces vLLM's.


@pytest.mark.parametrize("option", ["speculative_config", "logits_processors"])
def test_options_that_bypass_sampler_are_rejected(running: RunningEngine, option: str):
    from vllm.v1.sample.sampler import Sampler

    from skyrl_train.engines.vllm.sampler import replace_sampler

    processors: Any = SimpleNamespace(argmax_invariant=[object()] if option == "logits_processors" else [])
    drafts = {"method": "ngram"} if option == "speculative_config" else None
    runner = SimpleNamespace(
        sampler=Sampler(), input_batch=SimpleNamespace(logitsprocs=processors), speculative_config=drafts
    )
    with pytest.raises(ConfigError, match=f"'particular' does not support {option}.*engine_init_kwargs"):
        replace_sampler(runner, "particular")


def test_closed_runner_is_freed(running: RunningEngine):
    from skyrl_train.engines.vllm.sampler import _keep_unmasked_logits

    runner: Any = ModuleType("runner")
    runner.input_batch = None
    _keep_unmasked_logits(runner)
    reference = weakref.ref(runner)
    del runner
    assert reference() is None


def test_cuda_graphs_default_on_accelerators_only(running: RunningEngine):
    from skyrl_train.engines.vllm.arguments import engine_arguments

    defaults = {"enforce_eager": GeneratorConfig().enforce_eager, "max_num_seqs": 4, "max_model_len": LENGTH}
    model = running.engine.llm_engine.model_config.model
    assert [engine_arguments(model, on_cpu, 0, defaults)["enforce_eager"] for on_cpu in (False, True)] == [False, True]
    assert engine_arguments(model, False, 0, defaults | {"enforce_eager": True})["enforce_eager"] is True


def test_cuda_graphs_reach_max_num_seqs(running: RunningEngine):
    """vLLM derives the sizes from the arguments, except those that the user chooses."""
    from vllm import EngineArgs
    from vllm.config import CUDAGraphMode

    from skyrl_train.engines.vllm.arguments import engine_arguments

    model = running.engine.llm_engine.model_config.model

    def graph_sizes(**options: Any) -> list[int]:
        limits = {"max_num_seqs": 1024, "max_model_len": LENGTH, "max_num_batched_tokens": 8192}
        arguments = engine_arguments(model, False, 0, limits | options)
        config = EngineArgs(**arguments | {"enable_sleep_mode": False}).create_engine_config()
        compilation = config.compilation_config
        # The platform has turned graphs off, because it is a CPU. A GPU goes on as here.
        compilation.cudagraph_mode = CUDAGraphMode.FULL_AND_PIECEWISE
        compilation.cudagraph_capture_sizes = arguments.get("cudagraph_capture_sizes")
        compilation.max_cudagraph_capture_size = arguments.get("max_cudagraph_capture_size")
        config.scheduler_config.max_num_seqs = arguments["max_num_seqs"]
        config._set_cudagraph_sizes()
        return list(compilation.cudagraph_capture_sizes)

    assert graph_sizes() == get_graph_sizes(1024)
    assert len(graph_sizes()) < len(graph_sizes(max_cudagraph_capture_size=512)) == 51
    assert graph_sizes(max_num_seqs=48)[-1] == 96, "of vLLM's own sizes for 48 requests"
    assert graph_sizes(max_num_batched_tokens=1030, max_num_seqs=600)[-1] == 1024
    assert graph_sizes(cudagraph_capture_sizes=[1, 7]) == [1, 7]
    limits = {"max_num_seqs": 1024, "max_model_len": LENGTH}
    for options in ({"enforce_eager": True}, {"compilation_config": {"max_cudagraph_capture_size": 64}}):
        assert "cudagraph_capture_sizes" not in engine_arguments(model, False, 0, limits | options)


@pytest.mark.parametrize("requests", [1, 3, 500, 1000, 4096])
def test_cuda_graphs_fit_all_decoding_requests(requests: int, running: RunningEngine, monkeypatch: pytest.MonkeyPatch):
    """A graph of decoding requests with drafts has 1 + num_speculative_tokens tokens for each of them."""
    from skyrl_train.engines.vllm import arguments

    monkeypatch.setattr(arguments, "expected_model_runner", lambda on_cpu: "V2")
    model = running.engine.llm_engine.model_config.model
    limits = {"max_num_seqs": requests, "max_model_len": LENGTH, "max_num_batched_tokens": 8192}

    def graph_sizes(**drafts: Any) -> list[int] | None:
        options = {"speculative_config": {"method": "ngram"} | drafts} if drafts else {}
        sizes: list[int] | None = arguments.engine_arguments(model, False, 0, limits | options).get(
            "cudagraph_capture_sizes"
        )
        return sizes

    sizes, with_drafts = graph_sizes(), graph_sizes(num_speculative_tokens=3)
    assert sizes is not None and requests in sizes
    assert with_drafts is not None and with_drafts[-1] <= 8192
    decoding = {size // 4 for size in with_drafts if size % 4 == 0}
    assert {size for size in get_graph_sizes(requests) if size <= 2048} <= decoding
    assert len(with_drafts) <= 70
    assert graph_sizes(num_speculative_tokens=3, num_speculative_tokens_per_batch_size=[[1, 8, 3]]) is None


def test_ngram_drafts_allow_async_scheduling(running: RunningEngine, monkeypatch: pytest.MonkeyPatch):
    """vLLM refuses the method "ngram" with async scheduling, which our engines use on GPUs."""
    from vllm import EngineArgs

    from skyrl_train.engines.vllm import arguments

    monkeypatch.setattr(arguments, "expected_model_runner", lambda on_cpu: "V2")
    model = running.engine.llm_engine.model_config.model
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 2, "prompt_lookup_max": 4}
    limits = {"max_num_seqs": 8, "max_model_len": LENGTH, "speculative_config": drafts}
    made = arguments.engine_arguments(model, False, 0, limits) | {"enable_sleep_mode": False}
    assert made["async_scheduling"]
    config = EngineArgs(**made).create_engine_config()
    assert config.speculative_config is not None and config.speculative_config.use_ngram()
    assert config.speculative_config.prompt_lookup_max == 4


def test_start_is_reported_by_phase(running: RunningEngine):
    phases = running.engine.startup_phases
    expected = ["device", "weights", "compile", "memory profile", "KV cache", "warm-up", "other"]
    assert list(phases) == expected
    assert phases["weights"] > 0 < phases["warm-up"]
    assert phases["compile"] == 0, "on a CPU"


def test_capture_of_graphs_is_its_own_phase(running: RunningEngine):
    """vLLM's wrapper around a worker of an accelerator, which captures graphs during the warm-up."""
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    captured: list[float] = []
    worker = SimpleNamespace(model_runner=SimpleNamespace())

    def warm_up() -> int:
        time.sleep(0.02)
        worker.model_runner.capture_model(profile_only=False)
        return 5

    def capture(*, profile_only: bool) -> None:
        captured.append(time.time())
        time.sleep(0.05)

    worker.compile_or_warm_up_model = warm_up
    wrapper: Any = WorkerWrapperBase(rpc_rank=0)
    wrapper.worker, worker.model_runner.capture_model = worker, capture
    assert wrapper.compile_or_warm_up_model() == 5
    before, graphs, after = worker.startup_phases
    assert [phase.name for phase in worker.startup_phases] == ["warm-up", "CUDA graphs", "warm-up"]
    assert (before.end, graphs.end) == (graphs.begin, after.begin)
    assert before.end - before.begin >= 0.02
    assert before.end <= captured[0] <= graphs.end - 0.05
    assert worker.model_runner.capture_model is capture


def test_batch_invariance_is_set_before_vllm_import(running: RunningEngine, monkeypatch: pytest.MonkeyPatch):
    from skyrl_train.engines.vllm.arguments import enable_batch_invariance

    with pytest.raises(ConfigError, match=r"generator\.batch_invariant=true is not supported on a CPU"):
        enable_batch_invariance(on_cpu=True)
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "0")
    monkeypatch.setitem(sys.modules, ATTENTION_MODULE, ModuleType(ATTENTION_MODULE))
    with pytest.raises(ConfigError, match="has already started an engine without"):
        enable_batch_invariance(on_cpu=False)
    monkeypatch.delitem(sys.modules, ATTENTION_MODULE)
    enable_batch_invariance(on_cpu=False)
    assert os.environ["VLLM_BATCH_INVARIANT"] == "1"


def test_nothing_is_compiled_on_cpu(running: RunningEngine):
    """The engine sets the environment before vLLM's modules with compiled functions are imported."""
    from vllm.v1.sample.ops.logprobs import batched_count_greater_than

    assert not hasattr(batched_count_greater_than, "_torchdynamo_orig_callable")


def test_engine_overrides_vllm_environment(running: RunningEngine):
    config = running.engine.llm_engine.vllm_config
    assert not config.use_v2_model_runner
    assert type(running.engine.llm_engine.engine_core).__name__ == "InprocClient"


def test_async_scheduling_is_default_on_accelerators(running: RunningEngine):
    from skyrl_train.engines.vllm.arguments import engine_arguments

    model, limits = str(running.folder / "model"), {"max_model_len": LENGTH, "max_num_seqs": 4}
    assert engine_arguments(model, False, 0, limits)["async_scheduling"]
    assert not engine_arguments(model, False, 0, {**limits, "async_scheduling": False})["async_scheduling"]
    assert not running.engine.llm_engine.vllm_config.scheduler_config.async_scheduling, "on a CPU"


def test_pipeline_parallelism_is_rejected(running: RunningEngine):
    assert running.bench.refusal_reason("pipeline_parallel_size")
    message = r"inference_engine_pipeline_parallel_size=2 is not supported: with it vLLM .* tensor parallelism"
    with pytest.raises(ConfigError, match=message):
        start(str(running.folder / "model"), pipeline_parallel_size=2)


def save_adapter(folder: Path, seed: int) -> str:
    torch.manual_seed(seed)
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    get_peft_model(tiny_model("qwen3"), config).save_pretrained(str(folder))
    return str(folder)


@pytest.mark.filterwarnings("ignore")
def test_adapter_survives_unloading_while_in_use(running: RunningEngine, reference: Reference):
    bench, engine = running.bench, running.engine
    folder = save_adapter(running.folder / "adapter", 1)
    prompt = FIRST[:20]

    def long(adapter: str | None) -> Any:
        return bench.request(prompt, max_tokens=200, adapter=adapter)

    async def run() -> tuple[Any, Any, Any]:
        await engine.load_adapter("one", folder)
        (alone,) = await engine.generate([long("one")])
        adapted_call, plain_call = bench.start(long("one")), bench.start(plain)
        await bench.wait_until_running(1)
        shutil.rmtree(folder)
        await engine.unload_adapter("one")
        assert not adapted_call.done()
        assert [path for path in private.iterdir() if path.is_dir()], "still in use"
        return alone, (await adapted_call)[0], (await plain_call)[0]

    plain = long(None)
    bench.run(engine.load_adapter("first", folder))
    private = Path(engine._adapters._folder.name)
    bench.run(engine.unload_adapter("first"))
    assert not list(private.iterdir())
    alone, adapted, unadapted = bench.run(run())
    assert adapted.token_ids.tolist() == alone.token_ids.tolist() != unadapted.token_ids.tolist()
    assert largest_difference(adapted.full_logprobs, alone.full_logprobs) <= TOLERANCE
    assert_logprobs(reference, plain, unadapted)
    assert not list(private.iterdir()), "no request uses it any more"


def test_cancel_during_submission_leaves_no_request(
    running: RunningEngine, reference: Reference, monkeypatch: pytest.MonkeyPatch
):
    bench, engine = running.bench, running.engine
    processor = engine.llm_engine.input_processor
    assign = processor.assign_request_id

    def assign_slowly(request: Any) -> None:
        time.sleep(0.2)
        assign(request)

    async def run() -> int:
        call = engine.generate([bench.request(FIRST[:20], max_tokens=200) for _ in range(2)])
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(call, 0.1)
        await engine.reset_prefix_cache()  # This command runs after the submission and the abort.
        health = await engine.health()
        return int(health.running + health.queued)

    monkeypatch.setattr(processor, "assign_request_id", assign_slowly)
    assert bench.run(run()) == 0


def test_close_aborts_requests_waiting_in_pause(running: RunningEngine, reference: Reference):
    """This test must be the last with this engine, because it closes the engine."""
    bench, engine = running.bench, running.engine

    async def run() -> Any:
        started = bench.start(bench.request(FIRST, max_tokens=50))
        await bench.wait_until_running(1)
        await engine.pause("keep")
        waiting = bench.start(bench.request(SECOND))
        await asyncio.sleep(0.1)
        await engine.close()
        async with asyncio.timeout(10):
            return [*await started, *await waiting]

    started, waiting = bench.run(run())
    assert (started.stop_reason, waiting.stop_reason, waiting.token_ids.tolist()) == ("abort", "abort", [])
    with pytest.raises(EngineError, match="closed"):
        bench.run(engine.health())


def test_sync_rejects_padded_experts(module_engine: RunningEngine):
    """This runs after the last test of the other engine, because a process runs one engine at a time."""
    config = tiny_model("qwen3_moe", tied=False).config
    config.moe_intermediate_size = 48
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    folder = module_engine.folder / "padded"
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    engine = start(str(folder), kv_cache_memory_bytes=6 * BLOCK_BYTES)
    try:
        padded = EngineHarness(engine, model, module_engine.loop, module_engine.folder)
        with pytest.raises(WeightSyncError, match="pads the experts of this model from 48 to 64 columns"):
            padded.run(padded.publish(model))
        assert not padded.run(engine.health()).partially_loaded
        assert len(padded.run(engine.score([[5, 9, 77]]))[0]) == 2, "it still serves its weights"
    finally:
        module_engine.loop.run(engine.close())


def test_seed_determines_tokens_across_preemptions_and_pauses(
    module_engine: RunningEngine, monkeypatch: pytest.MonkeyPatch
):
    """The KV cache is large enough for two of four requests, and a step prefills at most 48 tokens.

    The module's engine has been closed before.
    """
    path, preempted = str(module_engine.folder / "model"), list[str]()
    enable_async_scheduling(monkeypatch)
    limits = {"kv_cache_memory_bytes": 6 * BLOCK_BYTES, "enable_chunked_prefill": True, "max_num_batched_tokens": 48}
    engine = start(path, **limits)
    core = engine.llm_engine.engine_core.engine_core
    scheduler = core.scheduler
    preempt = scheduler._preempt_request

    def counted(request: Any, *args: Any, **kwargs: Any) -> None:
        preempted.append(request.request_id)
        preempt(request, *args, **kwargs)

    monkeypatch.setattr(scheduler, "_preempt_request", counted)
    bench = EngineHarness(engine, tiny_model("qwen3"), module_engine.loop, module_engine.folder)
    options: list[dict[str, Any]] = [{}, {"top_k": 20}, {"top_p": 0.9}, {"temperature": 0.7, "min_p": 0.02}]
    requests = [
        bench.request([20 * n + i % 40 + 1 for i in range(100)], seed=2**64 - 1 - n, max_tokens=140, **sampling)
        for n, sampling in enumerate(options)
    ]

    async def run() -> Any:
        call = bench.start(*requests)
        for mode in ("keep", "retract"):
            await bench.wait_until_running(2)
            await asyncio.sleep(0.1)
            await engine.pause(mode)
            assert not call.done()
            await engine.resume()
        return await call

    try:
        assert core.batch_queue is not None, "steps overlap"
        completions = bench.run(run(), 60)
    finally:
        module_engine.loop.run(engine.close())
    assert len(preempted) > 2, "requests are preempted in addition to the retraction"
    other = TransformersEngine(path, max_num_seqs=4)
    expected = module_engine.loop.run(other.generate(requests))
    module_engine.loop.run(other.close())
    for actual, reference in zip(completions, expected, strict=True):
        assert actual.token_ids.tolist() == reference.token_ids.tolist()
        assert len(actual.token_ids) == 140


@pytest.mark.parametrize(("rope_scaling", "num_blocks"), [(None, 32), ({"rope_type": "linear", "factor": 2.0}, 64)])
def test_cpu_cache_holds_longest_sequences(rope_scaling: dict[str, Any] | None, num_blocks: int, tmp_path: Path):
    """vLLM never uses one of the blocks, and refuses to start if a single sequence does not fit into the others."""
    from skyrl_train.engines.vllm.arguments import engine_arguments

    options = {"max_num_seqs": 32, "max_model_len": None, "rope_scaling": rope_scaling}
    size = engine_arguments(save_tiny_model(tmp_path, "llama"), True, 0, options)["kv_cache_memory_bytes"]
    assert size == (32 * num_blocks + 1) * BLOCK_BYTES
