"""Tests of the SGLang engine alone. The conformance suite tests what engines have in common.

This engine differs from the suite's: an untied Qwen2, chunked prefill of 16 tokens, and overlap scheduling, which
starts a step before the previous one is processed, as on an accelerator. Its KV cache is large enough for two long
requests.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import itertools
import json
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors.torch import save_file
from transformers import CONFIG_MAPPING, PreTrainedModel, Qwen2_5_VLConfig

from skyrl_train.config.generator import GeneratorConfig
from skyrl_train.data.token_arrays import to_token_array
from skyrl_train.engines.base import Completion, SampleRequest, SamplingParams
from skyrl_train.engines.graph_sizes import get_graph_sizes
from skyrl_train.engines.sglang.arguments import engine_arguments
from skyrl_train.engines.sglang.engine import SGLangEngine
from skyrl_train.engines.sglang.processes import _isolated_transformers_patches, remove_stale_files
from skyrl_train.engines.sglang.requests import RequestManager
from skyrl_train.engines.transformers.engine import TransformersEngine
from skyrl_train.errors import ConfigError, EngineError, WeightSyncError
from skyrl_train.testing.tiny_models import byte_tokenizer, tiny_model
from skyrl_train.weight_sync.sync import WeightSync
from tests.support.base_checkpoints import save_with_head
from tests.support.engine_harness import TOLERANCE, BackgroundLoop, largest_difference
from tests.support.reference_sampler import Reference
from tests.support.weight_targets import LocalTrainer

pytestmark = pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="sglang is not installed")
PROMPT = tuple(range(20, 60))
MODEL: dict[str, Any] = {"hidden_size": 128, "tied": False}
CACHE_TOKENS = 1040
"""Size of the KV cache in tokens."""


def process_state() -> dict[str, Any]:
    """Return the state of this process that SGLang would change without isolation."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT)}
    return {
        "handlers": handlers,
        "start method": multiprocessing.get_start_method(allow_none=True),
        "policy": type(asyncio.get_event_loop_policy()),
        "path": sys.path[:],
        "logging": (logging.getLogger().handlers[:], logging.getLogger().level),
        "PYTHONPATH": os.environ.get("PYTHONPATH"),
        "model types": sorted(CONFIG_MAPPING),
        "rope of a vision tower": Qwen2_5_VLConfig().to_dict()["vision_config"]["rope_parameters"],
    }


@dataclass
class RunningEngine:
    engine: SGLangEngine
    model: PreTrainedModel
    path: str
    loop: BackgroundLoop
    before: dict[str, Any]
    after: dict[str, Any]
    process: psutil.Process

    def run(self, work: Any) -> Any:
        return self.loop.run(work)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningEngine]:
    path = tmp_path_factory.mktemp("untied")
    model = tiny_model("qwen2", **MODEL)
    model.save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    before, children = process_state(), set(psutil.Process().children())
    options: dict[str, Any] = {
        "chunked_prefill_size": 16,
        "disable_overlap_schedule": False,
        "max_total_tokens": CACHE_TOKENS,
    }
    engine = SGLangEngine(str(path), name="particular", max_num_seqs=16, max_model_len=512, threads=1, **options)
    after = process_state()
    (process,) = (child for child in set(psutil.Process().children()) - children if "sglang" in child.name())
    loop = BackgroundLoop()
    yield RunningEngine(engine, model, str(path), loop, before, after, process)
    loop.run(engine.close())
    loop.close()


TIMED_TOKENS = 64
names = itertools.count()


def request(prompt: tuple[int, ...] = PROMPT, seed: int = 0, **sampling: Any) -> SampleRequest:
    params = SamplingParams(**{"max_tokens": 16, "ignore_eos": True, **sampling})
    return SampleRequest(f"particular-{next(names)}", to_token_array(prompt), params, seed)


async def start(engine: SGLangEngine, *requests: SampleRequest) -> list[asyncio.Task[list[Completion]]]:
    """Start each request in a separate call, and wait until it has some of its hundreds of tokens.

    The engine does not report its progress, so another request is timed first.
    """
    start_s = time.monotonic()
    await engine.generate([request(tuple(reversed(PROMPT)), max_tokens=TIMED_TOKENS)])
    seconds = time.monotonic() - start_s
    calls = [asyncio.ensure_future(engine.generate([started])) for started in requests]
    async with asyncio.timeout(30):
        while (await engine.health()).running < len(requests):
            await asyncio.sleep(0.002)
    await asyncio.sleep(seconds)
    return calls


# -- without an engine ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["pipeline_parallel_size", "data_parallel_size"])
def test_unsupported_parallelism_error_names_sglang_version(tiny_model_path: str, key: str):
    options: dict[str, Any] = {key: 2}
    with pytest.raises(ConfigError, match=rf"generator.inference_engine_{key}=2 is not supported: SGLang \d+\.\d+"):
        SGLangEngine(tiny_model_path, **options)


def test_adapters_on_cpu_are_rejected(tiny_model_path: str):
    with pytest.raises(ConfigError, match=r"max_lora_rank=8 is not supported: SGLang \d+\.\d+.* pinned"):
        SGLangEngine(tiny_model_path, max_lora_rank=8)


def arguments(path: str, device: str = "cpu", **options: Any) -> dict[str, Any]:
    return engine_arguments(
        path,
        name="particular",
        device=device,
        dtype="float32",
        max_num_seqs=4,
        max_model_len=100,
        max_lora_rank=0,
        rope_scaling=None,
        rope_theta=None,
        options=options,
    )


def test_reserved_arguments_are_rejected(tiny_model_path: str):
    with pytest.raises(ConfigError, match=r"generator\.engine_init_kwargs\.sampling_backend='flashinfer'.*Remove it"):
        arguments(tiny_model_path, sampling_backend="flashinfer")


def test_keys_become_sglang_arguments_which_take_precedence(tiny_model_path: str):
    plain = arguments(tiny_model_path, tensor_parallel_size=2, enable_prefix_caching=False, max_num_batched_tokens=64)
    assert (plain["tp_size"], plain["disable_radix_cache"]) == (2, True)
    assert (plain["max_prefill_tokens"], plain["chunked_prefill_size"]) == (64, 64)
    assert arguments(tiny_model_path, enable_chunked_prefill=False)["chunked_prefill_size"] == -1
    assert arguments(tiny_model_path, batch_invariant=True)["enable_deterministic_inference"] is True
    assert arguments(tiny_model_path, attention_backend="intel_amx")["attention_backend"] == "intel_amx"


def test_separate_head_overrides_the_configuration(tiny_model_path: str, tmp_path: Path):
    separate = arguments(save_with_head(tmp_path, kind="llama", hidden_size=128))
    assert json.loads(separate["json_model_override_args"]) == {"tie_word_embeddings": False}
    assert "json_model_override_args" not in arguments(tiny_model_path)


def test_cuda_graphs_default_on_accelerators_only(tiny_model_path: str):
    defaults = {"enforce_eager": GeneratorConfig().enforce_eager}
    assert arguments(tiny_model_path, "cuda", **defaults)["disable_cuda_graph"] is False
    assert arguments(tiny_model_path, "cuda", enforce_eager=True)["disable_cuda_graph"] is True
    assert arguments(tiny_model_path, "cpu", **defaults)["disable_cuda_graph"] is True


def test_cuda_graphs_reach_max_num_seqs(tiny_model_path: str):
    assert arguments(tiny_model_path, "cuda")["cuda_graph_bs_decode"] == get_graph_sizes(4)
    assert arguments(tiny_model_path, "cuda", cuda_graph_bs_decode=[1, 3])["cuda_graph_bs_decode"] == [1, 3]
    for device, options in (("cpu", {}), ("cuda", {"cuda_graph_max_bs_decode": 2})):
        assert "cuda_graph_bs_decode" not in arguments(tiny_model_path, device, **options)


def test_stubs_have_every_name_and_raise_on_call(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "meta_path", sys.meta_path[:])
    package = "skyrl_train.engines.sglang.stubs"
    attention = importlib.import_module(f"{package}.sgl_kernel.flash.attention")
    with pytest.raises(NotImplementedError, match=r"sgl_kernel\.flash\.attention\.forward\.fast is a stub"):
        attention.forward.fast(1)
    assert importlib.import_module(f"{package}.torchvision").transforms.InterpolationMode
    with pytest.raises(ImportError):
        importlib.import_module(f"{package}.no_such_package")


def test_checkpoint_with_names_sglang_skips_is_rejected(tmp_path: Path):
    model = tiny_model("qwen3_moe", tied=False)
    model.config.save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    save_file({name: tensor.detach() for name, tensor in model.named_parameters()}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"lacks 'model\.layers\.0\.mlp\.experts\.0\.\w+\.weight' .*save_pretrained"):
        SGLangEngine(str(tmp_path))


def test_only_files_of_killed_engines_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    script = """
import sys, time
from skyrl_train.engines.sglang.processes import _TempFiles
files = _TempFiles()
print(files.folder, flush=True)
time.sleep(60)
"""
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        folder = Path(process.stdout.readline().strip())
        remove_stale_files()
        assert folder.is_dir()
        process.kill()
    remove_stale_files()
    assert not folder.exists()


# -- with an engine ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_unknown_sglang_argument_fails_without_side_effects(tiny_model_path: str):
    before = process_state()
    with pytest.raises(ConfigError, match=r"Engine 'sglang': SGLang .*no_such_argument"):
        SGLangEngine(tiny_model_path, no_such_argument=1)
    assert process_state() == before


@pytest.mark.slow
def test_start_restores_process_state(running: RunningEngine):
    assert running.after == running.before
    # Another test may have imported SGLang before, so equality alone proves nothing.
    assert running.after["rope of a vision tower"]["rope_type"] == "axial"
    with _isolated_transformers_patches():  # like the start of a second engine
        assert set(CONFIG_MAPPING) > set(running.after["model types"])
    assert sorted(CONFIG_MAPPING) == running.after["model types"]
    assert not any("sglang/stubs" in entry for entry in sys.path)


@pytest.mark.slow
def test_samples_match_transformers_engine(running: RunningEngine):
    options: list[dict[str, Any]] = [
        {},
        {"temperature": 0.0},
        {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "min_p": 0.02},
        {"repetition_penalty": 1.4, "min_tokens": 4, "ignore_eos": False},
        {"stop": ("a", "e", "x"), "max_tokens": 60},
        {"stop_token_ids": tuple(range(100, 120)), "max_tokens": 60},
        {"stop_token_ids": tuple(range(100, 120)), "min_tokens": 20, "max_tokens": 60},
    ]
    seeds = (1, 2**63 + 5, 2**64 - 1)
    prompts = (PROMPT[:5], PROMPT)
    requests = [
        request(prompt, seed, **sampling) for sampling, seed, prompt in itertools.product(options, seeds, prompts)
    ]
    other = TransformersEngine(tiny_model("qwen2", **MODEL), byte_tokenizer(), name="other")

    async def both() -> tuple[list[Completion], list[Completion]]:
        try:
            return await running.engine.generate(requests), await other.generate(requests)
        finally:
            await other.close()

    for actual, expected in zip(*running.run(both()), strict=True):
        assert actual.token_ids.tolist() == expected.token_ids.tolist()
        assert (actual.stop_reason, actual.stop_text) == (expected.stop_reason, expected.stop_text)
        assert largest_difference(actual.logprobs, expected.logprobs) < TOLERANCE
        assert largest_difference(actual.full_logprobs, expected.full_logprobs) < TOLERANCE


@pytest.mark.slow
def test_repeated_calls_are_equal_bit_for_bit(running: RunningEngine):
    """The scheduler gets all requests of a call at once, so that the same prompts are computed together."""

    async def sample() -> bytes:
        await running.engine.reset_prefix_cache()
        completions = await running.engine.generate(
            [request(tuple(range(3, 5 + length)), seed) for length in range(4) for seed in range(4)]
        )
        return b"".join(c.token_ids.tobytes() + c.full_logprobs.tobytes() for c in completions)

    async def repeat() -> set[bytes]:
        return {await sample() for _ in range(10)}

    assert len(running.run(repeat())) == 1


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["keep", "retract"])
def test_abort_while_paused_returns_tokens_immediately(running: RunningEngine, mode: str):
    async def run() -> tuple[SampleRequest, Completion, Completion]:
        first, second = (request(seed=seed, max_tokens=450) for seed in (1, 2))
        calls = await start(running.engine, first, second)
        await running.engine.pause(mode)
        await running.engine.abort([first.request_id])
        (aborted,) = await asyncio.wait_for(calls[0], 5)
        assert not calls[1].done()
        await running.engine.resume()
        return first, aborted, (await calls[1])[0]

    first, aborted, finished = running.run(run())
    assert (aborted.stop_reason, finished.stop_reason, len(finished.token_ids)) == ("abort", "length", 450)
    assert 0 < len(aborted.token_ids) < 450
    _, full = Reference(running.model).logprobs(PROMPT, aborted.token_ids, first.sampling)
    assert largest_difference(aborted.full_logprobs, full) < TOLERANCE


@pytest.mark.slow
@pytest.mark.defect("failed-call-keeps-request-ids")
def test_failed_request_aborts_rest_of_its_call(running: RunningEngine, monkeypatch: pytest.MonkeyPatch):
    broken, *others = (request(seed=seed, max_tokens=400) for seed in range(3))
    sample = RequestManager._sample

    async def sample_or_fail(self: RequestManager, entry: Any) -> Completion:
        if entry.request is broken:
            await asyncio.sleep(0.2)
            raise EngineError("its log-probs are not finite")
        return await sample(self, entry)

    async def run() -> list[Completion]:
        with monkeypatch.context() as patch:
            patch.setattr(RequestManager, "_sample", sample_or_fail)
            with pytest.raises(EngineError, match="not finite"):
                await running.engine.generate([broken, *others])
        assert (await running.engine.health()).running == 0
        return await running.engine.generate([broken, *others])

    assert [len(completion.token_ids) for completion in running.run(run())] == [400, 400, 400]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["keep", "retract"])
def test_scoring_does_not_affect_paused_requests(running: RunningEngine, mode: str):
    sequences = [list(range(5, 200)), [7, 8, 9], list(range(30, 90))]

    async def run() -> tuple[list[list[float]], Completion, Completion]:
        plain, paused = (request(seed=3, max_tokens=300) for _ in range(2))
        (expected,) = await running.engine.generate([plain])
        (call,) = await start(running.engine, paused)
        await running.engine.pause(mode)
        scores = await asyncio.wait_for(running.engine.score(sequences), 30)
        assert not call.done()
        await running.engine.resume()
        return scores, expected, (await call)[0]

    scores, expected, completion = running.run(run())
    assert completion.token_ids.tolist() == expected.token_ids.tolist()
    for actual, reference in zip(scores, Reference(running.model).score(sequences), strict=True):
        assert largest_difference(actual, reference) < TOLERANCE


@pytest.mark.slow
def test_score_retracts_paused_requests_when_cache_is_full(running: RunningEngine):
    prompts = [tuple((7 * n + first) % 250 + 3 for n in range(280)) for first in (0, 90)]
    scored = [(11 * n) % 250 + 3 for n in range(511)]
    assert 2 * len(prompts[0]) + len(scored) > CACHE_TOKENS

    async def run() -> tuple[list[list[float]], list[Completion], list[Completion]]:
        expected = await running.engine.generate([request(prompt, max_tokens=220) for prompt in prompts])
        calls = await start(running.engine, *(request(prompt, max_tokens=220) for prompt in prompts))
        await running.engine.pause()
        scores = await asyncio.wait_for(running.engine.score([scored]), 30)
        assert not any(call.done() for call in calls)
        await running.engine.resume()
        return scores, expected, [completion for call in calls for completion in await call]

    (score,), expected, completions = running.run(run())
    assert [completion.token_ids.tolist() for completion in completions] == [
        completion.token_ids.tolist() for completion in expected
    ]
    assert largest_difference(score, Reference(running.model).score([scored])[0]) < TOLERANCE


@pytest.mark.slow
def test_request_cancelled_during_scoring_is_aborted(running: RunningEngine):
    async def run() -> None:
        (call,) = await start(running.engine, request(max_tokens=450))
        await running.engine.pause()
        scores = asyncio.ensure_future(running.engine.score([list(range(first, 250)) for first in range(3, 13)]))
        await asyncio.sleep(0.05)
        call.cancel()
        await scores
        async with asyncio.timeout(5):
            while (await running.engine.health()).running:
                await asyncio.sleep(0.01)
        await running.engine.resume()

    running.run(run())


@pytest.mark.slow
@pytest.mark.parametrize("delay_s", [0.0, 0.02, 0.05])
def test_chunked_prefill_can_be_aborted_while_paused(running: RunningEngine, delay_s: float):
    async def pause_in_prefill(started: SampleRequest) -> asyncio.Task[list[Completion]]:
        await running.engine.reset_prefix_cache()
        call = asyncio.ensure_future(running.engine.generate([started]))
        while not (await running.engine.health()).running:
            await asyncio.sleep(0.001)
        await asyncio.sleep(delay_s)
        await running.engine.pause()
        assert not call.done()
        return call

    async def run() -> Completion:
        aborted, continued = (request(tuple(range(3, 250)) + tuple(range(3, 203)), max_tokens=50) for _ in range(2))
        call = await pause_in_prefill(aborted)
        await asyncio.wait_for(running.engine.abort([aborted.request_id]), 5)
        assert (await asyncio.wait_for(call, 5))[0].stop_reason == "abort"
        await running.engine.resume()
        call = await pause_in_prefill(continued)
        await running.engine.resume()
        return (await call)[0]

    completion = running.run(run())
    prompt = tuple(range(3, 250)) + tuple(range(3, 203))
    _, full = Reference(running.model).logprobs(prompt, completion.token_ids, request(prompt).sampling)
    assert largest_difference(completion.full_logprobs, full) < TOLERANCE


@pytest.mark.slow
def test_retracted_request_aborted_in_prefill_returns_its_tokens(running: RunningEngine):
    retracted = request(tuple(range(3, 200)), max_tokens=300)

    async def run() -> Completion:
        (call,) = await start(running.engine, retracted)
        await running.engine.pause("retract")
        await running.engine.reset_prefix_cache()
        await running.engine.resume()
        await asyncio.sleep(0.02)
        await running.engine.pause()
        await asyncio.wait_for(running.engine.abort([retracted.request_id]), 5)
        await running.engine.resume()
        return (await call)[0]

    completion = running.run(run())
    assert completion.stop_reason == "abort"
    _, full = Reference(running.model).logprobs(retracted.token_ids, completion.token_ids, retracted.sampling)
    assert len(full) > 0
    assert largest_difference(completion.full_logprobs, full) < TOLERANCE


@pytest.mark.slow
def test_cancelled_commit_is_served(running: RunningEngine):
    class ImpatientEngine:
        def __getattr__(self, name: str) -> Any:
            return getattr(running.engine, name)

        async def commit_weights(self, version: int) -> None:
            running.process.suspend()  # This delays SGLang's response.
            try:
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(running.engine.commit_weights(version), 0.3)
            finally:
                running.process.resume()
            async with asyncio.timeout(10):
                while (await running.engine.health()).version < version:
                    await asyncio.sleep(0.01)

    async def run() -> Completion:
        weight_sync = WeightSync(
            LocalTrainer(running.model), lambda: [ImpatientEngine()], route="in_process", deadline_s=60.0
        )
        (call,) = await start(running.engine, request(max_tokens=300))
        await weight_sync.sync_all(1)
        await asyncio.wait_for(call, 20)
        (completion,) = await asyncio.wait_for(running.engine.generate([request()]), 20)
        return completion

    assert [span.version for span in running.run(run()).versions] == [1]


@pytest.mark.slow
def test_prefix_cache_reset_works_during_running_request(running: RunningEngine):
    prompt = tuple(range(100, 180))

    async def count_cached_tokens(*requests: SampleRequest) -> int:
        before = (await running.engine.health()).cached_tokens
        await running.engine.generate(list(requests))
        return (await running.engine.health()).cached_tokens - before

    async def run() -> tuple[int, int]:
        (call,) = await start(running.engine, request(prompt, max_tokens=400))
        before_reset = await count_cached_tokens(request(prompt, max_tokens=1))
        await running.engine.reset_prefix_cache()
        after_reset = await count_cached_tokens(request(prompt, max_tokens=1))
        assert not call.done()
        await call
        return before_reset, after_reset

    before_reset, after_reset = running.run(run())
    assert before_reset >= 64
    assert after_reset == 0


@pytest.mark.slow
def test_start_is_reported_by_phase(running: RunningEngine):
    phases = running.engine.startup_phases
    assert list(phases) == ["processes", "weights", "KV cache", "CUDA graphs", "other"]
    assert phases["processes"] > 0 < phases["weights"]
    assert phases["CUDA graphs"] == 0, "on a CPU"


@pytest.mark.slow
def test_idle_and_paused_engines_use_no_cpu(running: RunningEngine):
    def cpu_time_s() -> float:
        times = running.process.cpu_times()
        return times.user + times.system

    async def run() -> list[float]:
        spent = []
        for is_paused in (False, True):
            calls = await start(running.engine, request(max_tokens=400)) if is_paused else []
            if is_paused:
                await running.engine.pause()
            before_s = cpu_time_s()
            await asyncio.sleep(1.0)
            spent.append(cpu_time_s() - before_s)
            await running.engine.resume()
            await asyncio.gather(*calls)
        return spent

    assert max(running.run(run())) < 0.2


def shared_files(*processes: psutil.Process) -> set[str]:
    """Return the names of the files in /dev/shm that processes have mapped: they would outlive killed processes."""
    lines = (line for process in processes for line in Path(f"/proc/{process.pid}/maps").read_text().splitlines())
    inodes = {int(line.split()[4]) for line in lines if "/dev/shm/" in line}
    return {file.name for file in os.scandir("/dev/shm") if file.inode() in inodes}


@pytest.mark.slow
@pytest.mark.fault("F29")
def test_killed_process_fails_only_its_engine(running: RunningEngine):
    async def run() -> None:
        (call,) = await start(running.engine, request(max_tokens=450))
        join = running.engine.connect_weights
        waiting = asyncio.ensure_future(join("broadcast", "127.0.0.1:1", 1, 2, 3.0))  # No trainer listens there.
        queued = asyncio.ensure_future(join("in_process", "", 1, 2, 3.0))
        running.process.kill()
        message = rf"Engine 'particular' is dead: its process {running.process.pid} ended with exit code -9\."
        with pytest.raises(EngineError, match=message):
            await asyncio.wait_for(call, 10)
        for method in (running.engine.health, running.engine.pause, running.engine.reset_prefix_cache):
            with pytest.raises(EngineError, match=message):
                await method()
        await running.engine.close()
        await running.engine.close()
        with pytest.raises(EngineError, match=message):
            await queued
        with pytest.raises(WeightSyncError, match="could not connect to the other ranks"):
            await waiting

    folder = Path(running.engine._processes._files.folder)
    assert folder.is_dir() and not shared_files(running.process)
    running.run(run())
    assert not folder.exists()


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A temporary folder with a short path. SGLang's sockets are in it, and their paths have at most 107 characters."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


@pytest.mark.slow
@pytest.mark.fault("F29")
def test_close_during_requests_leaves_no_process_or_file(
    running: RunningEngine, short_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(tempfile, "tempdir", str(short_path))
    this = psutil.Process()
    before, children = shared_files(this), set(this.children())
    engine = SGLangEngine(running.path, name="closing", max_num_seqs=4, max_model_len=512, threads=1)
    (process,) = (child for child in set(this.children()) - children if "sglang" in child.name())
    assert any(short_path.iterdir()), "there are no files to clean up"

    async def run() -> None:
        calls = await start(engine, *(request(seed=seed, max_tokens=450) for seed in range(3)))
        assert not any(call.done() for call in calls)
        await engine.close()
        for call in calls:
            with pytest.raises(EngineError, match="'closing' is closed"):
                await call

    assert not shared_files(this, process) - before
    asyncio.run(run())
    assert not process.is_running()
    assert not list(short_path.iterdir())
