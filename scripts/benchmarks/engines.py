"""Tokens per second of the transformers engine against Hugging Face's generate: same model, prompts, numbers of tokens.

    python scripts/benchmarks/engines.py [--threads N] [--device cuda] [--repeats N] [--json FILE]

Both sample at temperature 1 without truncation, may not end early, and are warmed up. Runs alternate and the best of
each counts, because a shared machine disturbs single runs. Generate gets its prompts left-padded in one batch.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from skyrl_train.engines.base import SampleRequest, SamplingParams
from skyrl_train.engines.transformers import TransformersEngine
from skyrl_train.testing.tiny_models import tiny_model


@dataclass(frozen=True)
class Case:
    """One workload on a randomly initialised qwen2."""

    name: str
    hidden: int
    layers: int
    prompts: int
    samples: int
    prompt_tokens: tuple[int, int]
    """Shortest and longest prompt."""
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
    lengths = torch.linspace(low, high, case.prompts).int().tolist()
    prompts = [tuple(torch.randint(3, case.vocabulary, (length,)).tolist()) for length in lengths]
    engine = TransformersEngine(copy.deepcopy(model), device=device, max_num_seqs=case.prompts * case.samples)
    generate = hugging_face(model.to(device).eval(), case, prompts)  # type: ignore[arg-type]
    sampling = SamplingParams(max_tokens=case.new_tokens, ignore_eos=True)
    requests = [
        SampleRequest(f"{p}.{s}", prompt, sampling, seed=1000 * p + s)
        for p, prompt in enumerate(prompts)
        for s in range(case.samples)
    ]

    async def ours() -> None:
        completions = await engine.generate(requests)
        assert all(len(completion.token_ids) == case.new_tokens for completion in completions)

    best = {ours: float("inf"), generate: float("inf")}
    for repeat in range(repeats + 1):
        for work in best:
            seconds = await timed(work)
            if repeat:  # the first round warms up
                best[work] = min(best[work], seconds)
    await engine.close()
    tokens = len(requests) * case.new_tokens
    return Result(case.name, parameters, tokens / best[ours], tokens / best[generate])


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="also write the results here")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"{'workload':28} {'parameters':>11} {'engine tok/s':>13} {'generate tok/s':>15} {'ratio':>6}")
    results = []
    for case in CASES:
        result = asyncio.run(measure(case, options.device, options.repeats))
        results.append({**asdict(result), "ratio": result.ratio})
        print(
            f"{result.case:28} {result.parameters:11,} {result.engine_tokens_per_s:13,.0f} "
            f"{result.generate_tokens_per_s:15,.0f} {result.ratio:6.1f}"
        )
    report = {"device": options.device, "threads": options.threads, "torch": torch.__version__, "results": results}
    text = json.dumps(report, indent=2)
    if options.json:
        options.json.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
