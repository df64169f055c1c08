"""Parts 11, 16 and 19: decoding speed at several batch sizes, of our engines and of `vllm.LLM` without them ("bare").

Each variant runs in a separate process. Ours is what a run has: an EngineClient, a Ray actor, a seed for each request,
both log-probs. Bare vLLM has its default settings (its own model runner, an engine process, async scheduling) and
returns the log-prob of each token.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import multiprocessing
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count as count_from_zero
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import mean
from typing import Any, TypeVar

import torch

from skyrl_train.config.hydra import load_preset
from skyrl_train.config.predicates import count_slots
from skyrl_train.data.token_arrays import to_token_array
from skyrl_train.engines.base import SampleRequest, SamplingParams
from tests.gpu_check.report import Missing, Report, Setting
from tests.gpu_check.training import QWEN3_06B, TOY

MIN_SPEED_RATIOS = {256: 0.95, 1024: 1.0}
"""Speed of our engine by that of bare vLLM which it must reach, by number of requests."""
PROMPT_TOKENS, MAX_MODEL_LEN = 128, 1024
VLLM_LARGEST_GRAPH = 512
"""Largest CUDA graph of vLLM's own choice before Blackwell."""
MEMORY_SHARE = 0.7
BUSY_INTERVAL_MS = 200
T = TypeVar("T")


@dataclass
class Figures:
    """The measurements of a variant."""

    start_s: float
    speeds: list[float] = field(default_factory=list)
    """Tokens per second at each batch size."""
    busy: list[str] = field(default_factory=list)
    """Share of the time in which the GPU ran a kernel, at each batch size."""
    single_calls_speed: float | None = None
    """Tokens per second if each of the most requests is a call of its own."""


def run(setting: Setting, report: Report) -> None:
    """Compare our vLLM engine with bare vLLM at each batch size. Raises Missing if vLLM is not installed."""
    sizes, figures = measure_variants("vllm", (ours, bare_by_default), setting, report)
    our_figures, bare_figures = figures
    for index, size in enumerate(sizes):
        ratio = our_figures.speeds[index] / bare_figures.speeds[index]
        if size in MIN_SPEED_RATIOS:
            report.at_least(f"{size} requests: ours / bare vLLM", ratio, MIN_SPEED_RATIOS[size])
        else:
            report.note(f"{size} requests: ours / bare vLLM", ratio)


def run_variants(setting: Setting, report: Report) -> None:
    """Measure what graphs above 512 and vLLM's second model runner bring, and what drafts cost if few are accepted.

    Raises:
        Missing: vLLM is not installed.
    """
    drafts = () if setting.toy else (ours_with_ngrams,)  # They need vLLM's second model runner.
    measure_variants("vllm", (ours_with_fewer_graphs, bare_with_first_runner, *drafts), setting, report)


def run_sglang(setting: Setting, report: Report) -> None:
    """Measure our SGLang engine alone. Raises Missing if SGLang is not installed."""
    measure_variants("sglang", (ours_sglang,), setting, report)


def measure_variants(
    package: str, variants: Sequence[Callable[..., Figures]], setting: Setting, report: Report
) -> tuple[Sequence[int], list[Figures]]:
    """Measure each variant in a subprocess and report its figures.

    Returns:
        The batch sizes, and the figures of the variants.

    Raises:
        Missing: `package` is not installed.
        RuntimeError: A subprocess ended without a result.
    """
    try:
        importlib.import_module(package)
    except ImportError as error:
        raise Missing(f"{package} is not installed ({error})") from error
    sizes, new = ((4, 8), 8) if setting.toy else ((256, 1024), 128)
    results = []
    with tempfile.TemporaryDirectory() as folder:
        (TOY if setting.toy else QWEN3_06B).save(Path(folder))
        for variant in variants:
            figures = run_in_subprocess(variant, folder, setting.device, sizes, new)
            name = variant.__name__.replace("_", " ")
            report.note(f"{name}: start, s", figures.start_s)
            for size, speed, busy in zip(sizes, figures.speeds, figures.busy, strict=True):
                report.note(f"{name}, {size} requests: tok/s", speed)
                report.note(f"{name}, {size} requests: GPU busy", busy)
            if figures.single_calls_speed is not None:
                report.note(f"{name}, {max(sizes)} single calls: tok/s", figures.single_calls_speed)
            results.append(figures)
    return sizes, results


def run_in_subprocess(function: Callable[..., T], *arguments: Any) -> T:
    """Return `function(*arguments)`, computed in a separate process so that its memory is released at the end.

    Raises:
        RuntimeError: The process ended without a result. It prints its own error.
    """
    context = multiprocessing.get_context("spawn")
    connection, child_connection = context.Pipe()
    process = context.Process(target=send_result, args=(child_connection, function, arguments))
    process.start()
    child_connection.close()
    try:
        return connection.recv()  # type: ignore[no-any-return]
    except EOFError as error:
        raise RuntimeError(f"{function.__name__} ended without a result; see its output above") from error
    finally:
        process.kill()
        process.join()


def send_result(connection: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    connection.send(function(*arguments))


def random_prompts(count: int, run: int) -> list[list[int]]:
    """Return prompts that differ between runs, so that no prefix cache contains them."""
    generator = torch.Generator().manual_seed(1000 * count + run)
    return torch.randint(3, 256, (count, PROMPT_TOKENS), generator=generator).tolist()  # type: ignore[no-any-return]


def measure_speed(generate: Callable[[list[list[int]]], int], size: int, first_run: int = 0) -> tuple[float, str]:
    """Return tokens per second and how busy the GPU was: a warm-up, then the faster of two more runs.

    Args:
        generate: Function that samples for prompts, and returns the number of sampled tokens.
        size: Number of prompts.
        first_run: Number of the first run. Runs of the same size and number have the same prompts.
    """
    results = []
    for run in range(first_run, first_run + 3):
        prompts = random_prompts(size, run)
        with sample_busy() as busy:
            start = time.perf_counter()
            count = generate(prompts)
            results.append((count / (time.perf_counter() - start), busy))
    speed, busy = max(results[1:], key=lambda result: result[0])
    return speed, f"{mean(busy):.0f} %" if busy else "not measured"


@contextmanager
def sample_busy() -> Iterator[list[float]]:
    """Yield a list that has the GPU's utilization in percent, sampled during the body, after the body."""
    samples: list[float] = []
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    command = ["nvidia-smi", "-i", gpu, "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits"]
    try:
        process = subprocess.Popen([*command, "-lms", str(BUSY_INTERVAL_MS)], stdout=subprocess.PIPE, text=True)
    except FileNotFoundError:
        yield samples
        return
    try:
        yield samples
    finally:
        process.terminate()
        lines, _ = process.communicate()
        samples += [float(line) for line in lines.split() if line.isdigit()]


# -- our engines


def ours(path: str, device: str, sizes: Sequence[int], new: int) -> Figures:
    return measure_ours("vllm", path, device, sizes, new)


def ours_with_fewer_graphs(path: str, device: str, sizes: Sequence[int], new: int) -> Figures:
    """Measure our engine with vLLM's own sizes of CUDA graphs."""
    largest = f"+generator.engine_init_kwargs.max_cudagraph_capture_size={VLLM_LARGEST_GRAPH}"
    return measure_ours("vllm", path, device, sizes, new, largest)


def ours_with_ngrams(path: str, device: str, sizes: Sequence[int], new: int) -> Figures:
    return measure_ours("vllm", path, device, sizes, new, "generator.speculative.method=ngram")


def ours_sglang(path: str, device: str, sizes: Sequence[int], new: int) -> Figures:
    return measure_ours("sglang", path, device, sizes, new)


def measure_ours(backend: str, path: str, device: str, sizes: Sequence[int], new: int, *overrides: str) -> Figures:
    """Measure an engine in a Ray actor, as a run has it."""
    from skyrl_train.cluster.ray_cluster import Cluster
    from skyrl_train.experiment.driver import relaxed_gc
    from skyrl_train.experiment.engines import build_client, build_engines
    from skyrl_train.experiment.placement import reserve_slots

    cfg = load_preset(
        [
            f"device={device}",
            f"trainer.policy.model.path={path}",
            "trainer.placement.colocate_all=false",
            f"generator.backend={backend}",
            f"generator.model_dtype={'float32' if device == 'cpu' else 'bfloat16'}",
            f"generator.max_num_seqs={max(sizes)}",
            f"generator.gpu_memory_utilization={MEMORY_SHARE}",
            f"+generator.engine_init_kwargs.max_model_len={MAX_MODEL_LEN}",
            *overrides,
        ]
    )
    timeouts, placement = cfg.trainer.timeouts, cfg.trainer.placement
    sampling = SamplingParams(max_tokens=new, ignore_eos=True)
    request_ids = map(str, count_from_zero())
    with Cluster() as cluster, asyncio.Runner() as runner:
        counts = count_slots(placement, cfg.generator, with_policy=False)
        layout = reserve_slots(cluster, counts, placement, cfg.generator, device=device, deadline_s=60)
        assert layout.engines is not None
        start = time.perf_counter()
        engines = runner.run(build_engines(cluster, cfg.generator, timeouts, layout.engines, device))
        figures = Figures(time.perf_counter() - start)
        client = build_client(engines, cfg.generator, timeouts)

        def make_requests(prompts: list[list[int]]) -> list[SampleRequest]:
            return [
                SampleRequest(next(request_ids), to_token_array(ids), sampling, seed)
                for seed, ids in enumerate(prompts)
            ]

        def one_call(prompts: list[list[int]]) -> int:
            return sum(len(done.full_logprobs) for done in runner.run(client.generate(make_requests(prompts))))

        async def call_separately(requests: list[SampleRequest]) -> int:
            results = await asyncio.gather(*(client.generate([request]) for request in requests))
            return sum(len(done.full_logprobs) for (done,) in results)

        with relaxed_gc():
            for size in sizes:
                speed, busy = measure_speed(one_call, size)
                figures.speeds.append(speed)
                figures.busy.append(busy)
            single_calls = measure_speed(lambda prompts: runner.run(call_separately(make_requests(prompts))), size, 3)
            figures.single_calls_speed, _ = single_calls
        runner.run(client.close())
    return figures


# -- vLLM without our engine


def bare_by_default(path: str, device: str, sizes: Sequence[int], new: int) -> Figures:
    return measure_bare(path, device, sizes, new)


def bare_with_first_runner(path: str, device: str, sizes: Sequence[int], new: int) -> Figures:
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"  # read when vLLM is imported
    return measure_bare(path, device, sizes, new)


def measure_bare(path: str, device: str, sizes: Sequence[int], new: int) -> Figures:
    """Measure `vllm.LLM` with its default settings, in its own process."""
    if importlib.util.find_spec("flashinfer") is None:  # vLLM's own sampler imports it unconditionally
        os.environ["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
    import vllm

    start = time.perf_counter()
    arguments: dict[str, Any] = {"max_num_seqs": max(sizes), "max_model_len": MAX_MODEL_LEN, "dtype": "bfloat16"}
    if device == "cpu":
        from skyrl_train.engines.vllm.arguments import configure_threads

        configure_threads(None, 1, on_cpu=True)
        arguments |= {"dtype": "float32", "enforce_eager": True, "kv_cache_memory_bytes": 64 << 20}
    else:
        arguments["gpu_memory_utilization"] = MEMORY_SHARE
    llm = vllm.LLM(path, **arguments)
    figures = Figures(time.perf_counter() - start)
    sampling = vllm.SamplingParams(max_tokens=new, ignore_eos=True, logprobs=0, detokenize=False)

    def generate(prompts: list[list[int]]) -> int:
        inputs: Any = [{"prompt_token_ids": ids} for ids in prompts]
        outputs: Any = llm.generate(inputs, sampling, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    for size in sizes:
        speed, busy = measure_speed(generate, size)
        figures.speeds.append(speed)
        figures.busy.append(busy)
    llm.llm_engine.engine_core.shutdown()
    return figures
