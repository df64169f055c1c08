"""Generation and updates beside each other, without a schedule: about the most that asynchronous training can bring.

    python scripts/benchmarks/overlap.py [--backends transformers vllm] [--lengths equal] [--rounds 5]
                                         [--size PROMPTS TOKENS] [key=value ...]

One engine and one learner with a core each and the work of async.py: the rollouts of a step, and scoring and updating
its batch, of the size at which async.py begins or the given one, which async.py prints when it has found one at which
both take equally long. A round is each of them alone, then both again and again at the same time, with nothing that
makes one wait for the other. A step of both begins with both and ends with the longer one alone: of that, which takes a
seconds alone and b beside the other, u / b is done while the other takes its u seconds. So it takes
u + a * (1 - u / b), and what can be had is (both alone) / that: medians over the rounds, the least and the most of it.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import os
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from gated_run import LENGTHS, GatedRun, compute_with
from measure import HERE, PASSIVE, about, line
from workload import SMALL, prompt_texts, run_command, save_model, write_prompts

from skyrl_train.config.choices import ENGINES
from skyrl_train.data.batch import TrainBatch
from skyrl_train.experiments.base import start
from skyrl_train.metrics import Metrics
from skyrl_train.report.trackers import Trackers

schedules = importlib.import_module("async")  # whose name is a keyword
SIDES = ("generation", "update")
Side = Callable[[], Awaitable[Any]]


@dataclass(frozen=True)
class Round:
    """Seconds of generation and update."""

    alone: list[float]
    beside: list[float]

    @property
    def together_s(self) -> float:
        """Of a step of both."""
        (_, quick), (alone, beside) = sorted(zip(self.alone, self.beside, strict=True), key=lambda one: one[1])
        return quick + alone * (1 - quick / beside)

    @property
    def times(self) -> float:
        return sum(self.alone) / self.together_s


class Overlap(GatedRun):
    """One step of a run, whose work is then done again and again."""

    rounds: ClassVar[int]
    found: ClassVar[list[Round]]

    def build_tracker(self, directory: Path) -> Any:
        return Trackers({})

    async def _run(self) -> None:
        kept: list[TrainBatch] = []

        def keep(batch: TrainBatch, metrics: Metrics) -> TrainBatch:
            kept.append(batch.with_tokens(old_logprobs=None))  # to be scored again
            return batch

        async with self.session() as session:
            trainer, learner = session.trainer, session.learner
            trainer.batch_steps = [*trainer.batch_steps, keep]
            await trainer.fit()
            generator = self.build_generator(session.client, session.environments, evaluation=False)
            prompts = self.train_dataset.prompts[: self.config.trainer.train_batch_size]

            async def generate() -> None:
                await asyncio.gather(*(generator.rollout(prompt, index) for index, prompt in enumerate(prompts)))

            async def update() -> None:
                await learner.update(await learner.score(kept[0]))

            sides = generate, update
            rounds = [(await in_turns(sides), await at_once(sides)) for _ in range(self.rounds + 1)]
        type(self).found = [Round(alone, beside) for alone, beside in rounds[1:]]  # the first warms up


async def timed(side: Side) -> float:
    begun = time.perf_counter()
    await side()
    return time.perf_counter() - begun


async def in_turns(sides: Sequence[Side]) -> list[float]:
    """Seconds of each side alone."""
    return [await timed(side) for side in sides]


async def at_once(sides: Sequence[Side]) -> list[float]:
    """Seconds of each side while the other goes on."""
    found: list[list[float]] = [[] for _ in sides]

    async def again_and_again(own: list[float], side: Side) -> None:
        while min(map(len, found)) < 2:
            own.append(await timed(side))

    await asyncio.gather(*(again_and_again(own, side) for own, side in zip(found, sides, strict=True)))
    return [own[1] for own in found]  # in the first both begin at once, as in no step but a run's first


def measure(
    folder: Path, model: Path, backend: str, lengths: str, options: argparse.Namespace
) -> dict[str, str | float]:
    """What each side takes beside the other, times what it takes alone."""
    folder.mkdir()
    work = schedules.WORK[lengths]
    if options.size:
        work = replace(work, prompts=options.size[0], new_tokens=options.size[1])
    write_prompts(folder / "prompts.jsonl", prompt_texts(work.prompts, work.prompt_tokens))
    os.environ.pop(LENGTHS, None)
    if sigma := schedules.SIGMAS[lengths]:
        os.environ[LENGTHS] = f"{work.new_tokens},{sigma}"
        work = replace(work, new_tokens=schedules.LONGEST * work.new_tokens)
    overrides = [
        f"generator.backend={backend}",
        "trainer.placement.colocate_all=false",
        f"trainer.max_tokens_per_microbatch={schedules.MICROBATCH}",
        "trainer.algorithm.off_policy_correction.tis_ratio_type=token",
        *options.overrides,
    ]
    _, _, *keys = run_command(folder, model, work, 1, "fsdp2", overrides)
    start(Overlap, keys, own_code=True)
    slowed: dict[str, str | float] = {}
    for index, side in enumerate(SIDES):
        alone = statistics.median(one.alone[index] for one in Overlap.found)
        beside = statistics.median(one.beside[index] for one in Overlap.found)
        print(f"| {backend} | {lengths} | {side} | {alone:.2f} | {beside:.2f} ({beside / alone - 1:+.0%}) | |")
        slowed[side] = beside / alone
    both, together = (
        statistics.median(values)
        for values in zip(*((sum(one.alone), one.together_s) for one in Overlap.found), strict=True)
    )
    times = [one.times for one in Overlap.found]
    shown = f"{statistics.median(times):.2f} ({min(times):.2f} to {max(times):.2f})"
    print(f"| {backend} | {lengths} | both | {both:.2f} | {together:.2f} | {shown} |", flush=True)
    return {"backend": backend, "lengths": lengths} | slowed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backends", nargs="+", default=["transformers", "vllm"], choices=ENGINES)
    parser.add_argument("--lengths", nargs="+", default=["equal"], choices=schedules.SIGMAS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--size", type=int, nargs=2, metavar=("PROMPTS", "TOKENS"), help="a step's, an answer's")
    parser.add_argument("--json", type=Path, help="also write how much the sides slow each other down here")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="more configuration of the run")
    options = parser.parse_intermixed_args()
    path = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])  # where processes find `even_digits`
    os.environ.update(PASSIVE, PYTHONPATH=path)
    compute_with(1)
    Overlap.rounds = options.rounds
    print(line(about(*(name for name in options.backends if name != "transformers"))), flush=True)
    print(
        "| engine | lengths | what | s alone | s beside the other | times as fast |\n" + "| --- " * 6 + "|", flush=True
    )
    found = []
    with tempfile.TemporaryDirectory(prefix="overlap-") as name:
        folder = Path(name)
        save_model(folder / "model", SMALL)
        for backend in options.backends:
            for lengths in options.lengths:
                found.append(measure(folder / f"{backend}-{lengths}", folder / "model", backend, lengths, options))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
