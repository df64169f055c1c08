"""The update alone, beside plain padded training of the same model on the same sequences.

    python scripts/benchmarks/learner.py [--cases equal long-prompt ...] [--strategy single] [--steps 5] [--threads N]
        [--share-prompt auto|yes|no] [--compile] [--json FILE]

- learner: `Learner.update` over a worker in this process, without Ray: what a run does with a batch.
- padded: `model(input_ids, attention_mask).logits`, log_softmax, gather; the same clipped surrogate, the same token
  budget for a micro-batch (pads counted), the same AdamW and clipping of gradients.

Each side is a process of its own; they take turns, the first step does not count, medians. Tokens are logical: prompt
and response of every sequence, counted once for each sequence, whatever a side computes. Peak memory is what the
process had at most beyond what it had once its model was loaded: gradients and optimizer state included.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from measure import PASSIVE, Gate, Side, Step, about, in_turns, line
from torch import Tensor
from transformers import AutoModelForCausalLM
from workload import LEARNING_RATE, MEDIUM, SMALL, Shape, local_learner, save_model, training_batch

from skyrl_train.data.batch import TrainBatch
from skyrl_train.report.memory import peak_memory

SIDES = ("learner", "padded")
SHARE = {"auto": None, "yes": True, "no": False}


@dataclass(frozen=True)
class Case:
    """`samples` responses to each of `prompts`; `shortest` responses of a case with random lengths."""

    shape: Shape
    prompts: int
    prompt_tokens: int
    response_tokens: int
    samples: int = 16
    shortest: int | None = None
    wanted: float | None = None
    """Times the padded side's tokens per second."""

    def responses(self) -> list[int]:
        """Tokens of every response: all the same, or uniform between the shortest and the longest."""
        rng = random.Random(0)
        low = self.response_tokens if self.shortest is None else self.shortest
        return [rng.randint(low, self.response_tokens) for _ in range(self.prompts * self.samples)]

    def batch(self) -> TrainBatch:
        sizes = (self.prompts, self.samples, self.prompt_tokens, self.responses())
        return training_batch(*sizes, vocabulary=self.shape.vocabulary)


HUGE = SMALL.sized(150_000)
CASES = {
    "equal": Case(SMALL, 2, 128, 128, wanted=1.6),
    "long-prompt": Case(SMALL, 1, 384, 128, wanted=2.8),
    "ragged": Case(SMALL, 2, 128, 240, shortest=16),
    "alone": Case(SMALL, 32, 128, 128, samples=1),
    "equal-50m": Case(MEDIUM, 1, 64, 64, wanted=1.6),
    "long-prompt-50m": Case(MEDIUM, 1, 192, 64, wanted=2.8),
    "ragged-50m": Case(MEDIUM, 1, 64, 120, shortest=8),
    "vocabulary-150k": Case(HUGE, 1, 64, 64, wanted=1.6),
    "vocabulary-150k-twice": Case(HUGE, 1, 128, 128, wanted=1.6),
}
"""Names -> sizes; the last two differ in tokens alone, both of more than the head keeps chunks for (KEPT_CHUNKS)."""


# -- a side's process ------------------------------------------------------------------------------------------------


def learner_step(case: Case, model: str, options: dict[str, Any]) -> Callable[[], None]:
    sizes = case.prompts, options["max_tokens"], options["share_prompt"]
    learner, _ = local_learner(model, options["strategy"], *sizes, options["compile"])
    runner = asyncio.Runner()
    runner.run(learner.setup())
    batch = case.batch()

    def step() -> None:
        runner.run(learner.update(batch))

    return step


def padded_step(case: Case, path: str, options: dict[str, Any]) -> Callable[[], None]:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01, fused=True)
    batch = case.batch()
    tokens = int(batch.loss_mask.sum())
    rows = max(1, options["max_tokens"] // int(batch.lengths.max()))
    parts = [batch.select(list(range(len(batch)))[start : start + rows]) for start in range(0, len(batch), rows)]

    def step() -> None:
        for part in parts:
            (padded_loss(model, part) / tokens).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def padded_loss(model: Any, batch: TrainBatch) -> Tensor:
    """-min(r A, clip(r, 0.8, 1.2) A), summed over tokens: one rectangle, all logits."""
    ids = batch.padded(batch.input_ids)
    attention = batch.padded(torch.ones_like(batch.input_ids))
    logits = model(input_ids=ids, attention_mask=attention, use_cache=False).logits[:, :-1]
    logprobs = logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    ratio = (logprobs - logprobs.detach()).exp()
    assert batch.advantages is not None
    mask, advantages = batch.padded(batch.loss_mask)[:, 1:], batch.padded(batch.advantages)[:, 1:]
    values = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    return (values * mask).sum()


def run_side(name: str, folder: str, options: dict[str, Any]) -> None:
    """As many steps as it is let through gates; tells the most memory that it had, in MiB beyond the loaded model."""
    torch.set_num_threads(options["threads"])
    gate = Gate()
    step = {"learner": learner_step, "padded": padded_step}[name](CASES[options["case"]], folder, options)
    loaded = psutil.Process().memory_info().rss
    gate.wait()
    for _ in range(options["steps"]):
        start = time.perf_counter()
        step()
        seconds = time.perf_counter() - start
        peak = peak_memory("cpu")["peak_rss_gib"] * 2**30
        gate.wait({"seconds": seconds, "peak_mib": (peak - loaded) / 2**20})
    os._exit(0)  # nothing to close down that the benchmark would wait for


# -- the comparison --------------------------------------------------------------------------------------------------


def compare(name: str, options: argparse.Namespace) -> dict[str, Any]:
    case = CASES[name]
    lengths = [case.prompt_tokens + tokens for tokens in case.responses()]
    given = {
        "case": name,
        "steps": options.warm_up + options.steps,
        "threads": options.threads,
        "strategy": options.strategy,
        "max_tokens": options.max_tokens,
        "share_prompt": SHARE[options.share_prompt],
        "compile": options.compile,
    }
    with tempfile.TemporaryDirectory(prefix="learner-") as place, ExitStack() as stack:
        model = Path(place) / "model"
        parameters = save_model(model, case.shape)
        command = [sys.executable, __file__, "--side"]
        sides = [
            stack.enter_context(Side(side, [*command, side, str(model), json.dumps(given)], Path(place), PASSIVE))
            for side in SIDES
        ]
        found = in_turns(sides, options.warm_up, options.steps)
    measured = {side: summary(found[side], sum(lengths)) for side in SIDES}
    return {
        "case": name,
        "parameters": parameters,
        "sequences": len(lengths),
        "tokens": sum(lengths),
        "padded_tokens": len(lengths) * max(lengths),
        "sides": measured,
        "ratio": measured["learner"]["tokens_per_s"] / measured["padded"]["tokens_per_s"],
        "cpu_ratio": measured["padded"]["cpu_s"] / measured["learner"]["cpu_s"],
        "wanted": case.wanted,
    }


def summary(steps: list[Step], tokens: int) -> dict[str, float]:
    return {
        "tokens_per_s": tokens / statistics.median(step.told["seconds"] for step in steps),
        "cpu_s": statistics.median(step.total_cpu_s for step in steps),
        "peak_mib": max(step.told["peak_mib"] for step in steps),
    }


HEADER = (
    "| case | parameters | tokens | learner tok/s | padded tok/s | ratio | CPU-s | padded CPU-s | ratio | wanted "
    "| peak MiB | padded peak MiB |\n" + "| --- " * 12 + "|"
)


def row(result: dict[str, Any]) -> str:
    ours, theirs = (result["sides"][side] for side in SIDES)
    wanted = "" if result["wanted"] is None else f"≥ {result['wanted']}"
    return (
        f"| {result['case']} | {result['parameters']:,} | {result['tokens']:,} | {ours['tokens_per_s']:,.0f} "
        f"| {theirs['tokens_per_s']:,.0f} | {result['ratio']:.2f} | {ours['cpu_s']:.2f} | {theirs['cpu_s']:.2f} "
        f"| {result['cpu_ratio']:.2f} | {wanted} | {ours['peak_mib']:,.0f} | {theirs['peak_mib']:,.0f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--strategy", default="single", help="trainer.strategy of the learner")
    parser.add_argument("--share-prompt", choices=SHARE, default="auto", help="trainer.share_prompt of the learner")
    parser.add_argument("--compile", action="store_true", help="trainer.policy.use_torch_compile of the learner")
    parser.add_argument("--max-tokens", type=int, default=16384, help="of a micro-batch")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--warm-up", type=int, default=1)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path, help="also write the results here")
    options = parser.parse_args()
    given = {name: getattr(options, name) for name in ("threads", "strategy", "share_prompt", "max_tokens", "compile")}
    report = about() | given
    print(f"{line(report)}; {', '.join(f'{name} {value}' for name, value in given.items())}\n{HEADER}", flush=True)
    report["results"] = []
    for name in options.cases:
        report["results"].append(compare(name, options))
        print(row(report["results"][-1]), flush=True)
    if options.json:
        options.json.write_text(json.dumps(report, indent=1), encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--side"]:
        run_side(sys.argv[2], sys.argv[3], json.loads(sys.argv[4]))
    else:
        main()
