"""Measure tokens per second of each engine on the same work: bare, through the client of a run, and over HTTP.

    python scripts/benchmarks/engines.py [--engines transformers vllm sglang] [--repeats 5] [--json FILE]
    python scripts/benchmarks/engines.py --hugging-face [--threads N] [--device cuda] [--repeats N] [--json FILE]

The work: 64 prompts of 60 tokens with 64 new tokens each, and a qwen3 of hidden size 256 with 4 layers and random
weights, in fp32 on the CPU. Temperature 1, the log-prob of every sampled token, no early end. Every run has new
prompts, so that prompt caches do not help. Runs of the three ways alternate, the first round is a warm-up, and
results are medians. All engines compute with the same number of threads, and only one computes at a time. CPU-seconds
are those of all processes, Ray's included; on a busy machine they are more reliable than the time.

- bare: `vllm.LLM.generate` and `sglang.Engine.generate`, started with the arguments of this package's engines, with
  their own samplers, without seeds and text; for transformers, the engine object itself. One call with all prompts, in
  a process of its own.
- client: an EngineClient over an engine in a Ray actor, as skyrl_train.experiment builds them, with a seed for every
  request, both log-probs and weight versions. Each call has 8 requests, like the samples of a prompt.
- remote: an EngineClient over a RemoteEngine in a process of its own, with the same calls. The HTTP endpoint runs in
  the process that started the actor, as in skyrl_train.entrypoints.serve, and uses the same actor.

--hugging-face compares the transformers engine with Hugging Face's generate, which gets left-padded prompts in one
batch. The result is the best run of each, because other load on the machine disturbs single runs.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import json
import math
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import torch

from skyrl_train.cluster.ray_cluster import Cluster
from skyrl_train.config.hydra import load_preset
from skyrl_train.config.predicates import count_slots
from skyrl_train.data.token_arrays import to_token_array
from skyrl_train.engines.base import Completion, SampleRequest, SamplingParams
from skyrl_train.engines.client import EngineClient
from skyrl_train.engines.http.remote import RemoteEngine
from skyrl_train.engines.http.server import HttpEndpoint
from skyrl_train.engines.transformers.engine import TransformersEngine
from skyrl_train.experiment.engines import build_client, build_engines
from skyrl_train.experiment.placement import reserve_slots, threads_per_process
from skyrl_train.testing.tiny_models import save_tiny_model, tiny_model

KINDS = ("transformers", "vllm", "sglang")
PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 64, 60, 64
CALL = 8
"""The number of requests in one call of the client."""
VOCABULARY = 320
MAX_MODEL_LEN = 256
DEADLINE_S = 600.0

Generate = Callable[[list[SampleRequest]], Sequence[int]]
"""Sample all requests, and return the number of tokens of each."""


def make_requests(run: int) -> list[SampleRequest]:
    """Return the requests of a run, which differ from those of other runs."""
    ids = torch.randint(3, VOCABULARY, (PROMPTS, PROMPT_TOKENS), generator=torch.Generator().manual_seed(run)).tolist()
    sampling = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)
    return [
        SampleRequest(f"{run}.{i}", to_token_array(row), sampling, seed=1000 * run + i) for i, row in enumerate(ids)
    ]


def lengths(completions: Sequence[Completion]) -> list[int]:
    assert all(map(math.isfinite, completions[0].full_logprobs))
    return [min(len(completion.token_ids), len(completion.full_logprobs)) for completion in completions]


async def in_calls(client: EngineClient, requests: list[SampleRequest]) -> list[int]:
    calls = [client.generate(requests[start : start + CALL]) for start in range(0, len(requests), CALL)]
    return [length for part in await asyncio.gather(*calls) for length in lengths(part)]


# -- processes of their own ------------------------------------------------------------------------------------------


@contextmanager
def bare_transformers(model: str, threads: int) -> Iterator[Generate]:
    engine = TransformersEngine(model, max_num_seqs=PROMPTS, max_model_len=MAX_MODEL_LEN, threads=threads)
    with asyncio.Runner() as runner:
        yield lambda requests: lengths(runner.run(engine.generate(requests)))
        runner.run(engine.close())


@contextmanager
def bare_vllm(model: str, threads: int) -> Iterator[Generate]:
    import skyrl_train.engines.vllm.engine  # noqa: F401, I001  sets up the import of vLLM
    import vllm
    from skyrl_train.engines.vllm.arguments import configure_threads, engine_arguments

    options = {"dtype": "float32", "max_num_seqs": PROMPTS, "max_model_len": MAX_MODEL_LEN}
    arguments = engine_arguments(model, True, 0, options)
    del arguments["worker_extension_cls"]
    configure_threads(threads, 1, on_cpu=True)
    llm = vllm.LLM(**arguments)
    sampling = vllm.SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=0, detokenize=False)

    def generate(requests: list[SampleRequest]) -> list[int]:
        prompts = [{"prompt_token_ids": request.token_ids.tolist()} for request in requests]
        outputs: Any = llm.generate(prompts, sampling, use_tqdm=False)  # type: ignore[arg-type]
        return [min(len(output.outputs[0].token_ids), len(output.outputs[0].logprobs)) for output in outputs]

    yield generate


@contextmanager
def bare_sglang(model: str, threads: int) -> Iterator[Generate]:
    from skyrl_train.engines.sglang import stubs
    from skyrl_train.engines.sglang.arguments import engine_arguments

    sys.path.insert(0, str(Path(stubs.__file__).parent))
    os.environ |= {
        "SGLANG_USE_CPU_ENGINE": "1",
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "PYTHONWARNINGS": "ignore",
        "OMP_NUM_THREADS": str(threads),
    }
    from sglang import Engine

    engine = Engine(
        **engine_arguments(
            model,
            name="bare",
            device="cpu",
            dtype="float32",
            max_num_seqs=PROMPTS,
            max_model_len=MAX_MODEL_LEN,
            max_lora_rank=0,
            rope_scaling=None,
            rope_theta=None,
            options={},
        )
    )

    def generate(requests: list[SampleRequest]) -> list[int]:
        sampling = {"max_new_tokens": NEW_TOKENS, "temperature": 1.0, "ignore_eos": True}
        prompts = [request.token_ids.tolist() for request in requests]
        outputs: Any = engine.generate(input_ids=prompts, sampling_params=sampling, return_logprob=True)
        return [min(len(output["output_ids"]), len(output["meta_info"]["output_token_logprobs"])) for output in outputs]

    yield generate
    engine.shutdown()


BARE = {"transformers": bare_transformers, "vllm": bare_vllm, "sglang": bare_sglang}


@contextmanager
def remote(url: str, token: str) -> Iterator[Generate]:
    with asyncio.Runner() as runner:
        engine = runner.run(RemoteEngine(url, token, name="remote").connect(DEADLINE_S))
        client = EngineClient([engine], deadline_s=DEADLINE_S)
        yield lambda requests: runner.run(in_calls(client, requests))
        runner.run(client.close())


def serve(connection: Connection, way: Callable[..., AbstractContextManager[Generate]], *args: Any) -> None:
    """Start an engine and send None; then execute the runs whose numbers arrive, and send their seconds, until None."""
    with way(*args) as generate:
        connection.send(None)
        while (run := connection.recv()) is not None:
            requests = make_requests(run)
            start = time.perf_counter()
            token_counts = generate(requests)
            connection.send(time.perf_counter() - start)
            assert list(token_counts) == [NEW_TOKENS] * PROMPTS, token_counts


class GenerateProcess:
    """Another process that generates in one of the three ways."""

    def __init__(self, way: Callable[..., AbstractContextManager[Generate]], *args: Any):
        context = multiprocessing.get_context("spawn")
        self._connection, child_end = context.Pipe()
        self._process = context.Process(target=serve, args=(child_end, way, *args))
        self._process.start()
        child_end.close()  # so that recv raises EOFError when the child ends

    async def started(self) -> None:
        await asyncio.to_thread(self._connection.recv)

    async def seconds(self, run: int) -> float:
        self._connection.send(run)
        return await asyncio.to_thread(self._connection.recv)  # type: ignore[no-any-return]

    def close(self) -> None:
        if self._process.is_alive():
            self._connection.send(None)
        self._process.join(30)
        self._process.kill()


# -- three ways to one engine ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EngineThroughput:
    """Medians of tokens per second and of CPU-seconds per run, for one engine."""

    engine: str
    threads: int
    bare: float
    client: float
    remote: float
    bare_cpu_s: float
    client_cpu_s: float
    remote_cpu_s: float

    def row(self) -> str:
        return (
            f"{self.engine:14}{self.bare:11,.0f}{self.client:14,.0f}{self.client / self.bare:7.2f}"
            f"{self.remote:14,.0f}{self.remote / self.client:7.2f}"
            f"{self.bare_cpu_s:12.2f}{self.client_cpu_s:8.2f}{self.remote_cpu_s:8.2f}"
        )


HEADER = (
    f"{'engine':14}{'bare tok/s':>11}{'client tok/s':>14}{'ratio':>7}{'remote tok/s':>14}{'ratio':>7}"
    f"{'CPU-s bare':>12}{'client':>8}{'remote':>8}"
)


def cpu_seconds() -> float:
    """Return the user and system time of this process and its descendants, in seconds."""
    root = psutil.Process()
    times = [process.cpu_times() for process in [root, *root.children(recursive=True)]]
    return sum(cpu.user + cpu.system for cpu in times)


async def compare(kind: str, model: str, repeats: int) -> EngineThroughput:
    cfg = load_preset(
        [
            "device=cpu",
            f"trainer.policy.model.path={model}",
            f"generator.backend={kind}",
            "generator.model_dtype=float32",
            f"generator.max_num_seqs={PROMPTS}",
            f"+generator.engine_init_kwargs.max_model_len={MAX_MODEL_LEN}",
        ]
    )
    timeouts = cfg.trainer.timeouts
    with Cluster() as cluster:
        counts = count_slots(cfg.trainer.placement, cfg.generator, with_policy=False)
        layout = reserve_slots(cluster, counts, cfg.trainer.placement, cfg.generator, device="cpu", deadline_s=60)
        assert layout.engines is not None
        threads = threads_per_process(cluster, layout.engines, "cpu")
        engines = await build_engines(cluster, cfg.generator, timeouts, layout.engines, "cpu")
        client = build_client(engines, cfg.generator, timeouts)

        async def through_client(run: int) -> float:
            requests = make_requests(run)
            start = time.perf_counter()
            token_counts = await in_calls(client, requests)
            seconds = time.perf_counter() - start
            assert token_counts == [NEW_TOKENS] * PROMPTS, token_counts
            return seconds

        async with HttpEndpoint(engines[0], None, model_name="tiny") as endpoint:
            others = [
                GenerateProcess(BARE[kind], model, threads),
                GenerateProcess(remote, endpoint.url, endpoint.token),
            ]
            try:
                for other in others:
                    await other.started()
                ways = [others[0].seconds, through_client, others[1].seconds]
                runs = []
                for run in range(3 * (repeats + 1)):
                    used = cpu_seconds()
                    runs.append((await ways[run % 3](run), cpu_seconds() - used))
            finally:
                for other in others:
                    await asyncio.to_thread(other.close)
        await client.close()
    medians = [[statistics.median(values) for values in zip(*runs[3 + i :: 3], strict=True)] for i in range(3)]
    seconds, cpu = zip(*medians, strict=True)
    return EngineThroughput(kind, threads, *(PROMPTS * NEW_TOKENS / one for one in seconds), *cpu)


def compare_all(kinds: Sequence[str], repeats: int) -> list[dict[str, Any]]:
    print(HEADER)
    results = []
    with tempfile.TemporaryDirectory() as folder:
        model = save_tiny_model(Path(folder), "qwen3", vocab_size=VOCABULARY, hidden_size=256, layers=4)
        for kind in kinds:
            speeds = asyncio.run(compare(kind, model, repeats))
            results.append(asdict(speeds))
            print(speeds.row(), flush=True)
    return results


# -- against Hugging Face --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One workload on a randomly initialized qwen2."""

    name: str
    hidden: int
    layers: int
    prompts: int
    samples: int
    prompt_tokens: tuple[int, int]
    """The lengths of the shortest and the longest prompt."""
    new_tokens: int
    vocabulary: int = 128


CASES = (
    Case("group: 32 x 8 x 32 tokens", 192, 4, 32, 8, (60, 60), 32),
    Case("ragged group: 32 x 8 x 32", 192, 4, 32, 8, (40, 90), 32),
    Case("no groups: 64 x 64 tokens", 256, 4, 64, 1, (60, 60), 64),
    Case("long prompts: 8 x 8 x 64", 256, 4, 8, 8, (400, 500), 64),
)


@dataclass(frozen=True)
class Result:
    case: str
    parameters: int
    engine_tokens_per_s: float
    generate_tokens_per_s: float

    @property
    def ratio(self) -> float:
        return self.engine_tokens_per_s / self.generate_tokens_per_s


async def measure(case: Case, device: str, repeats: int) -> Result:
    model = tiny_model("qwen2", vocab_size=case.vocabulary, hidden_size=case.hidden, layers=case.layers)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    low, high = case.prompt_tokens
    sizes = torch.linspace(low, high, case.prompts).int().tolist()
    prompts = [tuple(torch.randint(3, case.vocabulary, (size,)).tolist()) for size in sizes]
    engine = TransformersEngine(copy.deepcopy(model), device=device, max_num_seqs=case.prompts * case.samples)
    generate = hugging_face(model.to(device).eval(), case, prompts)  # type: ignore[arg-type]
    sampling = SamplingParams(max_tokens=case.new_tokens, ignore_eos=True)
    requests = [
        SampleRequest(f"{p}.{s}", to_token_array(prompt), sampling, seed=1000 * p + s)
        for p, prompt in enumerate(prompts)
        for s in range(case.samples)
    ]

    async def engine_generate() -> None:
        completions = await engine.generate(requests)
        assert all(len(completion.token_ids) == case.new_tokens for completion in completions)

    best = {engine_generate: float("inf"), generate: float("inf")}
    for repeat in range(repeats + 1):
        for work in best:
            seconds = await timed(work)
            if repeat:  # the first round warms up
                best[work] = min(best[work], seconds)
    await engine.close()
    tokens = len(requests) * case.new_tokens
    return Result(case.name, parameters, tokens / best[engine_generate], tokens / best[generate])


def hugging_face(model: Any, case: Case, prompts: list[tuple[int, ...]]) -> Callable[[], Awaitable[None]]:
    longest = max(map(len, prompts))
    rows = [prompt for prompt in prompts for _ in range(case.samples)]
    ids = torch.tensor([[0] * (longest - len(row)) + list(row) for row in rows], device=model.device)
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows], device=model.device)
    model.generation_config.eos_token_id = None

    @torch.inference_mode()
    async def generate() -> None:
        output = model.generate(
            ids, attention_mask=mask, do_sample=True, top_k=0, max_new_tokens=case.new_tokens, pad_token_id=0
        )
        assert output.shape[1] == longest + case.new_tokens

    return generate


async def timed(work: Callable[[], Awaitable[None]]) -> float:
    start = time.perf_counter()
    await work()
    return time.perf_counter() - start


def compare_with_hugging_face(device: str, repeats: int) -> list[dict[str, Any]]:
    print(f"{'workload':28} {'parameters':>11} {'engine tok/s':>13} {'generate tok/s':>15} {'ratio':>6}")
    results = []
    for case in CASES:
        result = asyncio.run(measure(case, device, repeats))
        results.append({**asdict(result), "ratio": result.ratio})
        print(
            f"{result.case:28} {result.parameters:11,} {result.engine_tokens_per_s:13,.0f} "
            f"{result.generate_tokens_per_s:15,.0f} {result.ratio:6.1f}"
        )
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--hugging-face", action="store_true", help="the transformers engine against generate")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="with --hugging-face")
    parser.add_argument("--device", default="cpu", help="with --hugging-face")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="also write the results here")
    options = parser.parse_args()
    report: dict[str, Any] = {"torch": torch.__version__}
    if options.hugging_face:
        torch.set_num_threads(options.threads)
        results = compare_with_hugging_face(options.device, options.repeats)
        report |= {"device": options.device, "threads": options.threads}
    else:
        results = compare_all(options.engines, options.repeats)
    text = json.dumps({**report, "results": results}, indent=2)
    if options.json:
        options.json.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
