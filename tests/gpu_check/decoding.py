"""Parts 11 and 16: decoding speed at several batch sizes, of our engines and of `vllm.LLM` without them ("bare").

Each variant runs in a separate process. Bare vLLM gets the arguments with which our engine starts vLLM. Our engine
samples with a seed for every request, as in a run; bare vLLM is measured with and without seeds.
"""

from __future__ import annotations

import asyncio
import importlib.util
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import count as count_from_zero
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import torch

from skyrl_train.config.choices import ENGINES
from skyrl_train.data.token_arrays import to_token_array
from skyrl_train.engines.base import SampleRequest, SamplingParams
from skyrl_train.registry import load_object
from tests.gpu_check.report import Missing, Report, Setting
from tests.gpu_check.training import QWEN3_06B, TOY

CHECKED_SIZE = 256
"""Number of requests at which our engine must reach MIN_SPEED_RATIO of bare vLLM's speed."""
MIN_SPEED_RATIO = 0.95
PROMPT_TOKENS = 128
T = TypeVar("T")


def run(setting: Setting, report: Report) -> None:
    """Measure our vLLM engine and bare vLLM at each batch size. Raises Missing if vLLM is not installed."""
    variants = (ours, bare_without_seeds, bare_with_seeds, bare_in_our_process)
    sizes, speeds = measure_variants("vllm", variants, setting, report)
    for index, size in enumerate(sizes):
        ratio = speeds["ours"][index] / speeds["bare_without_seeds"][index]
        if size == CHECKED_SIZE:
            report.at_least(f"{size} requests: ours / bare without seeds", ratio, MIN_SPEED_RATIO)
        else:
            report.note(f"{size} requests: ours / bare without seeds", ratio)


def run_sglang(setting: Setting, report: Report) -> None:
    """Measure our SGLang engine alone. Raises Missing if SGLang is not installed."""
    measure_variants("sglang", (ours_sglang,), setting, report)


def measure_variants(
    package: str, variants: Sequence[Callable[..., list[float]]], setting: Setting, report: Report
) -> tuple[Sequence[int], dict[str, list[float]]]:
    """Measure each variant in a subprocess and report its speeds.

    Returns:
        The batch sizes, and by name of the variant its tokens per second at each of these sizes.

    Raises:
        Missing: `package` is not installed.
        RuntimeError: A subprocess ended without a result.
    """
    try:
        importlib.import_module(package)
    except ImportError as error:
        raise Missing(f"{package} is not installed ({error})") from error
    sizes, new = ((4, 8), 8) if setting.toy else ((64, CHECKED_SIZE, 1024), 256)
    with tempfile.TemporaryDirectory() as folder:
        (TOY if setting.toy else QWEN3_06B).save(Path(folder))
        speeds = {
            variant.__name__: run_in_subprocess(variant, folder, setting.device, sizes, new) for variant in variants
        }
    for index, size in enumerate(sizes):
        for name, speed_by_size in speeds.items():
            report.note(f"{size} requests, {name.replace('_', ' ')}: tok/s", speed_by_size[index])
    return sizes, speeds


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


def start_arguments(device: str, sizes: Sequence[int]) -> dict[str, Any]:
    on_cpu = device == "cpu"
    arguments = {"max_num_seqs": max(sizes), "max_model_len": 1024, "dtype": "float32" if on_cpu else "bfloat16"}
    if on_cpu:
        return arguments
    # Both variants need this value, because vLLM's default depends on how it is started.
    return {**arguments, "max_num_batched_tokens": 8192, "gpu_memory_utilization": 0.7, "enforce_eager": False}


def random_prompts(count: int, run: int) -> list[list[int]]:
    """Return prompts that differ between runs, so that no prefix cache contains them."""
    generator = torch.Generator().manual_seed(1000 * count + run)
    return torch.randint(3, 256, (count, PROMPT_TOKENS), generator=generator).tolist()  # type: ignore[no-any-return]


def measure_sizes(generate: Callable[[list[list[int]]], int], sizes: Sequence[int]) -> list[float]:
    """Return tokens per second at each batch size: a warm-up, then the faster of two more runs.

    `generate` returns the number of sampled tokens.
    """
    speeds = []
    for size in sizes:
        speeds_of_runs = []
        for run in range(3):
            prompts = random_prompts(size, run)
            start = time.perf_counter()
            count = generate(prompts)
            speeds_of_runs.append(count / (time.perf_counter() - start))
        speeds.append(max(speeds_of_runs[1:]))
    return speeds


def ours(path: str, device: str, sizes: Sequence[int], new: int) -> list[float]:
    return measure_engine(ENGINES["vllm"], path, device, sizes, new)


def ours_sglang(path: str, device: str, sizes: Sequence[int], new: int) -> list[float]:
    return measure_engine(ENGINES["sglang"], path, device, sizes, new)


def measure_engine(where: str, path: str, device: str, sizes: Sequence[int], new: int) -> list[float]:
    engine = load_object(where)(path, device=device, **start_arguments(device, sizes))
    sampling = SamplingParams(max_tokens=new, ignore_eos=True)
    request_ids = map(str, count_from_zero())
    with asyncio.Runner() as runner:

        def generate(prompts: list[list[int]]) -> int:
            requests = [
                SampleRequest(next(request_ids), to_token_array(ids), sampling, seed)
                for seed, ids in enumerate(prompts)
            ]
            return sum(len(completion.full_logprobs) for completion in runner.run(engine.generate(requests)))

        speeds = measure_sizes(generate, sizes)
        runner.run(engine.close())
    return speeds


def bare_without_seeds(path: str, device: str, sizes: Sequence[int], new: int) -> list[float]:
    return bare(path, device, sizes, new, seeded=False)


def bare_with_seeds(path: str, device: str, sizes: Sequence[int], new: int) -> list[float]:
    return bare(path, device, sizes, new, seeded=True)


def bare_in_our_process(path: str, device: str, sizes: Sequence[int], new: int) -> list[float]:
    """Measure bare vLLM with the settings of our engine: its model runner, and steps in one process."""
    import skyrl_train.engines.vllm.engine  # noqa: F401  sets the environment variables of these settings

    return bare(path, device, sizes, new, seeded=False)


def bare(path: str, device: str, sizes: Sequence[int], new: int, *, seeded: bool) -> list[float]:
    if importlib.util.find_spec("flashinfer") is None:  # vLLM's own sampler imports it unconditionally
        os.environ["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
    import vllm

    from skyrl_train.engines.vllm.arguments import configure_threads, engine_arguments

    arguments = engine_arguments(path, device == "cpu", 0, start_arguments(device, sizes))
    del arguments["worker_extension_cls"]
    configure_threads(None, 1, device == "cpu")
    llm = vllm.LLM(**arguments)

    def generate(prompts: list[list[int]]) -> int:
        sampling = [
            vllm.SamplingParams(
                max_tokens=new, ignore_eos=True, logprobs=0, detokenize=False, seed=index if seeded else None
            )
            for index in range(len(prompts))
        ]
        inputs: Any = [{"prompt_token_ids": ids} for ids in prompts]
        outputs: Any = llm.generate(inputs, sampling, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    return measure_sizes(generate, sizes)
