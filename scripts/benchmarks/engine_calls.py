"""Measure what requests cost in the driver and in the processes of an engine, by the number of requests in a call.

    python scripts/benchmarks/engine_calls.py [--backends vllm transformers] [--repeats 3] [--json FILE]
    python scripts/benchmarks/engine_calls.py --megabytes 1 10 100

The work: 1,024 requests with prompts of 60 tokens and 64 new tokens each, through an EngineClient to an engine in a Ray
actor, as in a run. The model is a qwen3 with one layer of hidden size 32 on one thread, so that nearly all of the time
is the engine's and the driver's own. The ways to send the requests:

- one call: all requests in one call of `EngineClient.generate`.
- single calls: 1,024 calls, all at once, like the first turns of conversations.
- conversations: 1,024 conversations of four turns with 16 new tokens each. They begin within two seconds, and wait up
  to 0.2 s between two turns, so that calls are spread out. Each turn continues the previous one.

Figures are medians of the repeats after a warm-up: CPU time of the engine's processes per sampled token, CPU time of
the driver per request, and tokens per second.

With `--megabytes`: milliseconds until an array of that size has come back from an actor with a child process, from an
async actor without one, and from a bare Ray actor. Medians of seven calls after a warm-up.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import ray
import torch
from measure import environment_info

from skyrl_train.cluster.actors import spawn
from skyrl_train.cluster.placement import reserve_pool
from skyrl_train.cluster.ray_cluster import Cluster
from skyrl_train.config.hydra import load_preset
from skyrl_train.config.predicates import count_slots
from skyrl_train.data.token_arrays import to_token_array
from skyrl_train.engines.base import Completion, SampleRequest, SamplingParams
from skyrl_train.engines.client import EngineClient
from skyrl_train.experiment.driver import relaxed_gc
from skyrl_train.experiment.engines import build_client, build_engines
from skyrl_train.experiment.placement import reserve_slots
from skyrl_train.testing.tiny_models import save_tiny_model

REQUESTS, PROMPT_TOKENS, NEW_TOKENS = 1024, 60, 64
TURNS, TURN_TOKENS = 4, 16
BEGIN_WITHIN_S, THINK_S = 2.0, 0.2
VOCABULARY, MAX_MODEL_LEN = 320, 256


def make_requests(run: int) -> list[SampleRequest]:
    """Return the requests of a run, which differ from those of other runs."""
    generator = torch.Generator().manual_seed(run)
    prompts = torch.randint(3, VOCABULARY, (REQUESTS, PROMPT_TOKENS), generator=generator).tolist()
    sampling = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)
    return [SampleRequest(f"{run}.{i}", to_token_array(ids), sampling, seed=i) for i, ids in enumerate(prompts)]


def check(completions: Sequence[Completion], tokens: int) -> None:
    assert all(len(completion.token_ids) == len(completion.full_logprobs) == tokens for completion in completions)


async def one_call(client: EngineClient, run: int) -> None:
    check(await client.generate(make_requests(run)), NEW_TOKENS)


async def single_calls(client: EngineClient, run: int) -> None:
    for completions in await asyncio.gather(*(client.generate([request]) for request in make_requests(run))):
        check(completions, NEW_TOKENS)


async def conversations(client: EngineClient, run: int) -> None:
    sampling = SamplingParams(max_tokens=TURN_TOKENS, ignore_eos=True)
    waits = random.Random(run)

    async def converse(request: SampleRequest, waits_s: Sequence[float]) -> None:
        ids = request.token_ids
        for turn, wait_s in enumerate(waits_s):
            await asyncio.sleep(wait_s)
            name = request.request_id
            turn_request = SampleRequest(f"{name}.{turn}", ids, sampling, seed=turn, session=name)
            completions = await client.generate([turn_request])
            check(completions, TURN_TOKENS)
            ids = np.concatenate([ids, completions[0].token_ids])

    schedules = [
        [waits.uniform(0, BEGIN_WITHIN_S), *(waits.uniform(0, THINK_S) for _ in range(TURNS - 1))]
        for _ in range(REQUESTS)
    ]
    await asyncio.gather(*map(converse, make_requests(run), schedules))


WAYS = {
    "one call": (one_call, REQUESTS),
    "single calls": (single_calls, REQUESTS),
    "conversations": (conversations, REQUESTS * TURNS),
}


def engine_processes() -> list[psutil.Process]:
    """Return the engine's actor, which Ray names after its class, and the processes that it has started."""
    processes = psutil.Process().children(recursive=True)
    actors = [process for process in processes if "_AsyncWorkerActor" in " ".join(process.cmdline())]
    return [process for actor in actors for process in (actor, *actor.children(recursive=True))]


def cpu_seconds(processes: Sequence[psutil.Process]) -> float:
    times = [process.cpu_times() for process in processes]
    return sum(cpu.user + cpu.system for cpu in times)


async def measure(backend: str, model: str, repeats: int) -> list[dict[str, Any]]:
    cfg = load_preset(
        [
            "device=cpu",
            f"trainer.policy.model.path={model}",
            f"generator.backend={backend}",
            "generator.model_dtype=float32",
            f"generator.max_num_seqs={REQUESTS}",
            f"+generator.engine_init_kwargs.max_model_len={MAX_MODEL_LEN}",
            "generator.enable_prefix_caching=true",
        ]
    )
    timeouts = cfg.trainer.timeouts
    rows = []
    with Cluster() as cluster:
        counts = count_slots(cfg.trainer.placement, cfg.generator, with_policy=False)
        layout = reserve_slots(cluster, counts, cfg.trainer.placement, cfg.generator, device="cpu", deadline_s=60)
        assert layout.engines is not None
        client = build_client(
            await build_engines(cluster, cfg.generator, timeouts, layout.engines, "cpu"), cfg.generator, timeouts
        )
        processes = engine_processes()
        with relaxed_gc():  # as in a run
            for way, (send, requests) in WAYS.items():
                figures = []
                for run in range(repeats + 1):
                    engine_s, driver_s, start = cpu_seconds(processes), time.process_time(), time.perf_counter()
                    await send(client, run)
                    seconds = time.perf_counter() - start
                    driver_s = time.process_time() - driver_s
                    engine_s = cpu_seconds(processes) - engine_s
                    tokens = REQUESTS * NEW_TOKENS
                    figures.append((1e6 * engine_s / tokens, 1e3 * driver_s / requests, tokens / seconds))
                engine_us, driver_ms, tokens_per_s = map(statistics.median, zip(*figures[1:], strict=True))
                rows.append(
                    {
                        "backend": backend,
                        "way": way,
                        "engine, us per token": engine_us,
                        "driver, ms per request": driver_ms,
                        "tokens per s": tokens_per_s,
                    }
                )
                costs = f"{engine_us:8.1f} us/token{driver_ms:8.3f} ms/request"
                print(f"{backend:14}{way:16}{costs}{tokens_per_s:10,.0f} tok/s", flush=True)
        await client.close()
    return rows


class ArraySource:
    """An object whose method returns an array of zeros that it keeps."""

    def __init__(self) -> None:
        self._arrays: dict[int, np.ndarray] = {}

    async def get(self, megabytes: int) -> np.ndarray:
        return self._arrays.setdefault(megabytes, np.zeros(megabytes * 1_000_000, np.uint8))


async def measure_results(sizes: Sequence[int]) -> list[dict[str, Any]]:
    rows = []
    with Cluster() as cluster:
        pool = reserve_pool(
            cluster, count=1, actors_per_slot=2, device="cpu", total_slots=1, deadline_s=60, key="sources"
        )
        target = f"{Path(__file__).stem}:{ArraySource.__name__}"
        sources = {
            name: spawn(
                cluster, target, {}, pool=pool, index=0, name=name, is_async=True, deadline_s=600.0,
                in_child_process=name == "child process",
            )
            for name in ("child process", "async actor")
        }  # fmt: skip
        bare: Any = ray.remote(ArraySource).options(num_cpus=0).remote()
        calls: dict[str, Callable[[int], Awaitable[Any]]] = {name: source.get for name, source in sources.items()}
        calls["bare Ray actor"] = lambda size: asyncio.wrap_future(bare.get.remote(size).future())
        for size in sizes:
            row: dict[str, Any] = {"megabytes": size}
            for name, call in calls.items():
                times = []
                for _ in range(8):
                    start = time.perf_counter()
                    await call(size)
                    times.append(time.perf_counter() - start)
                row[name] = 1e3 * statistics.median(times[1:])
            rows.append(row)
            print(*(f"{key}: {value:.4g}" for key, value in row.items()), sep=", ", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backends", nargs="+", default=["vllm"], choices=("transformers", "vllm", "sglang"))
    parser.add_argument("--megabytes", nargs="+", type=int, default=(), help="measure results of these sizes instead")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.megabytes:
        rows = asyncio.run(measure_results(options.megabytes))
    else:
        with tempfile.TemporaryDirectory() as folder:
            model = save_tiny_model(Path(folder), "qwen3", vocab_size=VOCABULARY, hidden_size=32, layers=1)
            rows = [
                row for backend in options.backends for row in asyncio.run(measure(backend, model, options.repeats))
            ]
    if options.json is not None:
        options.json.write_text(json.dumps({"about": environment_info("vllm"), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
