"""Parts 7, 9, 10, 12 and 15: check that engines follow the protocol and agree with a float32 model on the CPU."""

from __future__ import annotations

import gc
import importlib
import math
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from skyrl_train.engines.base import Completion, SampleRequest
from skyrl_train.errors import ConfigError
from skyrl_train.registry import load_object
from skyrl_train.testing.tiny_models import byte_tokenizer, tiny_model
from tests.gpu_check.report import Missing, Report, Setting
from tests.support.engine_harness import BackgroundLoop, EngineHarness
from tests.support.reference_sampler import Reference

HIDDEN = 256
PROMPTS = [[5, 9, 77, 30, 12, 44], [8, 8, 8, 250], list(range(20, 60)), [100, 3, 17]]
FLOAT32_NATS = 1e-3
"""Bound of a log-prob difference on CUDA. On a CPU it is 1e-4, as in the tests."""
BFLOAT16_MEAN_NATS = 0.05
"""Bound of the mean log-prob difference. It makes a token's importance ratio wrong by five percent on average."""


def run_transformers(setting: Setting, report: Report) -> None:
    """Check the engine in float32, and on CUDA also in bfloat16, the dtype of runs on a GPU."""
    for dtype in ("float32",) if setting.toy else ("float32", "bfloat16"):
        check("skyrl_train.engines.transformers.engine:TransformersEngine", setting, report, dtype)


def run_vllm_eager(setting: Setting, report: Report) -> None:
    run_vllm(setting, report, enforce_eager=True)


def run_vllm_graphs(setting: Setting, report: Report) -> None:
    """Check vLLM with CUDA graphs. vLLM has none on a CPU, where this part only checks that the arguments work."""
    run_vllm(setting, report, enforce_eager=False)


def run_vllm(setting: Setting, report: Report, **arguments: Any) -> None:
    memory = {} if setting.toy else {"gpu_memory_utilization": 0.4}
    dtype = "float32" if setting.toy else "bfloat16"
    check("skyrl_train.engines.vllm.engine:VLLMEngine", setting, report, dtype, **arguments, **memory)


def run_sglang_eager(setting: Setting, report: Report) -> None:
    run_sglang(setting, report, enforce_eager=True)


def run_sglang_graphs(setting: Setting, report: Report) -> None:
    run_sglang(setting, report, enforce_eager=False)


def run_sglang(setting: Setting, report: Report, **arguments: Any) -> None:
    memory = {} if setting.toy else {"gpu_memory_utilization": 0.4}
    dtype = "float32" if setting.toy else "bfloat16"
    check("skyrl_train.engines.sglang.engine:SGLangEngine", setting, report, dtype, **arguments, **memory)


def check(engine_class: str, setting: Setting, report: Report, dtype: str, **arguments: Any) -> None:
    """Start an engine with a tiny model and run all checks of `Conformance`.

    Raises:
        Missing: The engine's package is not installed.
    """
    engine_type = load_engine(engine_class)
    loop = BackgroundLoop()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = tiny_model("qwen3", hidden_size=HIDDEN)
        model.save_pretrained(folder / "model")
        byte_tokenizer().save_pretrained(folder / "model")
        start = time.perf_counter()
        engine = engine_type(
            str(folder / "model"), dtype=dtype, device=setting.device, max_num_seqs=16, max_model_len=1024, **arguments
        )
        report.note(f"{dtype}: start, s", time.perf_counter() - start)
        try:
            Conformance(EngineHarness(engine, model, loop, folder), setting, report, dtype).run()
        finally:
            loop.run(engine.close())
            loop.close()
    gc.collect()


def load_engine(engine_class: str) -> Callable[..., Any]:
    package = engine_class.split(".")[2]
    if package != "transformers":
        try:
            importlib.import_module(package)
        except ImportError as error:
            raise Missing(f"{package} is not installed ({error})") from error
    try:
        return load_object(engine_class)  # type: ignore[no-any-return]
    except ConfigError as error:
        raise Missing(str(error)) from error


class Conformance:
    """The checks that every engine must pass, with a row for each."""

    def __init__(self, bench: EngineHarness, setting: Setting, report: Report, dtype: str):
        self._bench, self._report, self._dtype = bench, report, dtype
        self._exact_nats = 1e-4 if setting.toy else FLOAT32_NATS

    def run(self) -> None:
        bench = self._bench
        self.logprobs("as loaded", bench.model)
        self.seeds()
        self.pauses()
        bench.run(bench.engine.sleep(1))
        bench.run(bench.engine.wake_up())
        self.logprobs("after sleep 1", bench.model)
        for seed, route in enumerate(("", "ipc"), 5):
            if route and route not in bench.capabilities.weight_routes:
                continue
            model = tiny_model("qwen3", hidden_size=HIDDEN, seed=seed)
            bench.run(bench.publish(model, route))
            # Here ipc goes through host memory, because a process cannot share device memory with itself; see part 4.
            self.logprobs(f"after a sync by {route or bench.cheapest_route}", model)
        bench.run(bench.engine.sleep(2))
        bench.run(bench.engine.wake_up(["weights"]))
        model = tiny_model("qwen3", hidden_size=HIDDEN, seed=9)
        bench.run(bench.publish(model))
        bench.run(bench.engine.wake_up(["kv_cache"]))
        self.logprobs("after sleep 2 and a sync", model)

    def logprobs(self, when: str, model: Any) -> None:
        """Compare both kinds of log-probs of sampled tokens, and the results of `score`, with the float32 model."""
        bench, reference = self._bench, Reference(model)
        requests = self.requests(top_k=20, temperature=0.8)
        gaps: dict[str, list[float]] = {"log-probs": [], "full log-probs": [], "score": []}
        for request, completion in zip(requests, bench.generate(*requests), strict=True):
            expected = reference.logprobs(request.token_ids, completion.token_ids.tolist(), request.sampling)
            actual = completion.logprobs.tolist(), completion.full_logprobs.tolist()
            for name, engine_logprobs, exact in zip(gaps, actual, expected, strict=False):
                gaps[name] += [abs(a - b) for a, b in zip(engine_logprobs, exact, strict=True)]
        prompt_logprobs = bench.run(bench.engine.score(PROMPTS))
        for engine_logprobs, exact in zip(prompt_logprobs, reference.score(PROMPTS), strict=True):
            gaps["score"] += [abs(a - b) for a, b in zip(engine_logprobs, exact, strict=True)]
        for name, values in gaps.items():
            what = f"{self._dtype}, {when}: {name}"
            if self._dtype == "float32":
                self._report.at_most(f"{what}, largest gap", largest(values), self._exact_nats, "nats")
                continue
            finite = [value for value in values if value != math.inf]  # top_k may select another token than in float32
            self._report.note(f"{what}, largest gap", largest(finite))
            self._report.at_most(f"{what}, mean gap", sum(finite) / len(finite), BFLOAT16_MEAN_NATS, "nats")

    def requests(self, **sampling: Any) -> list[SampleRequest]:
        return [self._bench.request(prompt, seed=index, **sampling) for index, prompt in enumerate(PROMPTS)]

    def seeds(self) -> None:
        """Check that equal seeds give equal tokens, and different seeds different ones."""
        bench = self._bench
        first, second = (tokens(bench.generate(*self.requests(max_tokens=32))) for _ in range(2))
        num_equal = sum(a == b for a, b in zip(first, second, strict=True))
        min_equal = len(PROMPTS) if self._dtype == "float32" else 0
        self._report.note(
            f"{self._dtype}: requests with the same tokens for the same seed",
            f"{num_equal} of {len(PROMPTS)}",
            f"≥ {min_equal}",
            num_equal >= min_equal,
        )
        other = tokens(bench.generate(*(bench.request(prompt, seed=99, max_tokens=32) for prompt in PROMPTS)))
        self._report.note(f"{self._dtype}: other seeds give other tokens", other != first, "True", other != first)

    def pauses(self) -> None:
        """Check that paused requests end after `resume` with all of their tokens."""
        bench = self._bench

        async def interrupted() -> list[Completion]:
            running = bench.start(*self.requests(max_tokens=128))
            await bench.wait_until_running()
            await bench.engine.pause(bench.pause_mode)
            await bench.engine.resume()
            return await running

        lengths = [len(completion.token_ids) for completion in bench.run(interrupted())]
        complete = lengths == [128] * len(PROMPTS)
        self._report.note(f"{self._dtype}: tokens of paused requests", str(lengths), "128 each", complete)


def largest(values: list[float]) -> float:
    """Return the largest value, or NaN if there is any, which `max` may miss."""
    return max(values, key=lambda value: (math.isnan(value), value))


def tokens(completions: list[Completion]) -> list[list[int]]:
    return [completion.token_ids.tolist() for completion in completions]
