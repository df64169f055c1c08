"""Parts 11 and 16: tokens per second of decoding at several sizes: our engines, and `vllm.LLM` as it is.

Each is a process of its own, the bare one started with the arguments that our engine starts vLLM with. Ours samples
with a seed for every request, as a run does; the bare one with and without seeds.
"""

from __future__ import annotations

import asyncio
import importlib.util
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Sequence
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

MAIN = 256
"""The number of requests at which our engine's share of bare vLLM's speed is asked for."""
SHARE = 0.95
PROMPT_TOKENS = 128
T = TypeVar("T")


def run(setting: Setting, report: Report) -> None:
    """Sizes of the batch in turn; the first run of each warms up, the better of two more counts."""
    sizes, speeds = measured("vllm", (ours, bare_without_seeds, bare_with_seeds, bare_in_our_process), setting, report)
    for index, size in enumerate(sizes):
        share = speeds["ours"][index] / speeds["bare_without_seeds"][index]
        if size == MAIN:
            report.at_least(f"{size} requests: ours / bare without seeds", share, SHARE)
        else:
            report.note(f"{size} requests: ours / bare without seeds", share)


def run_sglang(setting: Setting, report: Report) -> None:
    """Our engine alone: its share of bare vLLM's speed is read off part 11."""
    measured("sglang", (ours_sglang,), setting, report)


def measured(
    package: str, ways: Sequence[Callable[..., list[float]]], setting: Setting, report: Report
) -> tuple[Sequence[int], dict[str, list[float]]]:
    """The sizes, and tokens per second at each of them, by way."""
    try:
        importlib.import_module(package)
    except ImportError as error:
        raise Missing(f"{package} is not installed ({error})") from error
    sizes, new = ((4, 8), 8) if setting.toy else ((64, MAIN, 1024), 256)
    with tempfile.TemporaryDirectory() as folder:
        (TOY if setting.toy else QWEN3_06B).save(Path(folder))
        speeds = {way.__name__: elsewhere(way, folder, setting.device, sizes, new) for way in ways}
    for index, size in enumerate(sizes):
        for name, found in speeds.items():
            report.note(f"{size} requests, {name.replace('_', ' ')}: tok/s", found[index])
    return sizes, speeds


def elsewhere(way: Callable[..., T], *arguments: Any) -> T:
    """`way(*arguments)` in a process of its own, which takes its memory with it. Raises RuntimeError if it fails."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=answer, args=(there, way, arguments))
    process.start()
    there.close()
    try:
        return here.recv()  # type: ignore[no-any-return]
    except EOFError as error:
        raise RuntimeError(f"{way.__name__} ended without a result; see its output above") from error
    finally:
        process.kill()
        process.join()


def answer(connection: Connection, way: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    connection.send(way(*arguments))


def start_arguments(device: str, sizes: Sequence[int]) -> dict[str, Any]:
    on_cpu = device == "cpu"
    given = {"max_num_seqs": max(sizes), "max_model_len": 1024, "dtype": "float32" if on_cpu else "bfloat16"}
    if on_cpu:
        return given
    # What a run gives both: vLLM's own default depends on who starts it.
    return {**given, "max_num_batched_tokens": 8192, "gpu_memory_utilization": 0.7, "enforce_eager": False}


def prompts(count: int, run: int) -> list[list[int]]:
    """Random ones that no prompt cache knows."""
    generator = torch.Generator().manual_seed(1000 * count + run)
    return torch.randint(3, 256, (count, PROMPT_TOKENS), generator=generator).tolist()  # type: ignore[no-any-return]


def best(generate: Callable[[list[list[int]]], int], sizes: Sequence[int]) -> list[float]:
    """Tokens per second at each size; `generate` returns how many tokens there are."""
    speeds = []
    for size in sizes:
        found = []
        for run in range(3):
            given = prompts(size, run)
            start = time.perf_counter()
            count = generate(given)
            found.append(count / (time.perf_counter() - start))
        speeds.append(max(found[1:]))
    return speeds


def ours(path: str, device: str, sizes: Sequence[int], new: int) -> list[float]:
    return of_engine(ENGINES["vllm"], path, device, sizes, new)


def ours_sglang(path: str, device: str, sizes: Sequence[int], new: int) -> list[float]:
    return of_engine(ENGINES["sglang"], path, device, sizes, new)


def of_engine(where: str, path: str, device: str, sizes: Sequence[int], new: int) -> list[float]:
    engine = load_object(where)(path, device=device, **start_arguments(device, sizes))
    sampling = SamplingParams(max_tokens=new, ignore_eos=True)
    named = iter(range(10**9))
    with asyncio.Runner() as runner:

        def generate(given: list[list[int]]) -> int:
            requests = [
                SampleRequest(str(next(named)), to_token_array(ids), sampling, seed) for seed, ids in enumerate(given)
            ]
            return sum(len(one.full_logprobs) for one in runner.run(engine.generate(requests)))

        speeds = best(generate, sizes)
        runner.run(engine.close())
    return speeds


def bare_without_seeds(path: str, device: str, sizes: Sequence[int], new: int) -> list[float]:
    return bare(path, device, sizes, new, seeded=False)


def bare_with_seeds(path: str, device: str, sizes: Sequence[int], new: int) -> list[float]:
    return bare(path, device, sizes, new, seeded=True)


def bare_in_our_process(path: str, device: str, sizes: Sequence[int], new: int) -> list[float]:
    """With the model runner that our sampler needs, and stepped in one process, as our engine is."""
    import skyrl_train.engines.vllm.engine  # noqa: F401  says how vLLM is to be imported

    return bare(path, device, sizes, new, seeded=False)


def bare(path: str, device: str, sizes: Sequence[int], new: int, *, seeded: bool) -> list[float]:
    if importlib.util.find_spec("flashinfer") is None:  # vLLM's own sampler imports it without looking
        os.environ["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
    import vllm

    from skyrl_train.engines.vllm.arguments import configure_threads, engine_arguments

    arguments = engine_arguments(path, device == "cpu", 0, start_arguments(device, sizes))
    del arguments["worker_extension_cls"]
    configure_threads(None, 1, device == "cpu")
    llm = vllm.LLM(**arguments)

    def generate(given: list[list[int]]) -> int:
        sampling = [
            vllm.SamplingParams(
                max_tokens=new, ignore_eos=True, logprobs=0, detokenize=False, seed=index if seeded else None
            )
            for index in range(len(given))
        ]
        inputs: Any = [{"prompt_token_ids": ids} for ids in given]
        found: Any = llm.generate(inputs, sampling, use_tqdm=False)
        return sum(len(one.outputs[0].token_ids) for one in found)

    return best(generate, sizes)
