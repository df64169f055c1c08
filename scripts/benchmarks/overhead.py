"""A run's step beside the bare work in it: what the framework itself costs.

    python scripts/benchmarks/overhead.py [--vocabulary N] [--strategy fsdp2] [--steps 5] [--json FILE] [key=value ...]

The work is that of grpo_step.py: 8 prompts x 8 samples, 121 tokens and 64 new ones, one optimizer step, fp32, CPU.

- run: the training entrypoint with its defaults, from one report of metrics to the next.
- bare generation: `TransformersEngine.generate` with the same prompts, the engine an object in a process of its own.
- bare update: forward and backward of the same sequences with the same loss as `LearnerWorker.update` does them, in a
  process of its own: no Ray, no sharding, and the optimizer's step taken off.

All three take turns and compute with all cores; the first steps do not count; medians. The ratio is the run's step over
the sum of the other two, in seconds and in CPU-seconds of whole process trees. Wanted: at most 1.10.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from measure import PASSIVE, Gate, Side, Step, about, in_turns, line, median, medians_by_role
from workload import (
    SMALL,
    Work,
    assert_did,
    local_learner,
    prompt_texts,
    run_command,
    save_model,
    training_batch,
    write_prompts,
)

from skyrl_train.data.arrays import token_array
from skyrl_train.data.chat import render_prompt
from skyrl_train.engines.base import SampleRequest, SamplingParams
from skyrl_train.engines.transformers.engine import TransformersEngine
from skyrl_train.models.loading import load_tokenizer

WARM_UP = 2
RUN, ENGINE, UPDATE = "run", "bare generation", "bare update"
WANTED = 1.10


# -- the bare work ---------------------------------------------------------------------------------------------------


def bare_engine(model: str, work: Work, vocabulary: int, steps: int) -> Callable[[int], dict[str, float]]:
    """The same prompts as the run's, another order aside."""
    engine = TransformersEngine(model, max_num_seqs=1024, threads=torch.get_num_threads())
    tokenizer = load_tokenizer(model)
    texts = prompt_texts(work.prompts * steps, work.prompt_tokens)
    sampling = SamplingParams(max_tokens=work.new_tokens)
    runner = asyncio.Runner()

    def step(number: int) -> dict[str, float]:
        requests = []
        for index, text in enumerate(texts[number * work.prompts : (number + 1) * work.prompts]):
            ids = tuple(render_prompt(tokenizer, [{"role": "user", "content": text}]))
            assert len(ids) == work.prompt_tokens
            for sample in range(work.samples):
                name = f"{number}.{index}.{sample}"
                requests.append(
                    SampleRequest(
                        name, token_array(ids), sampling, seed=1000 * index + sample, group=f"{number}.{index}"
                    )
                )
        start, used = time.perf_counter(), time.process_time()
        found = runner.run(engine.generate(requests))
        spent = {"seconds": time.perf_counter() - start, "cpu_s": time.process_time() - used}
        assert sum(len(completion.token_ids) for completion in found) == work.sampled
        return spent

    return step


def bare_update(model: str, work: Work, vocabulary: int, steps: int) -> Callable[[int], dict[str, float]]:
    """What `LearnerWorker.update` takes, less what the optimizer's step takes of it."""
    learner, worker = local_learner(model, "single", work.prompts, work.tokens)
    runner = asyncio.Runner()
    runner.run(learner.setup())
    responses = [work.new_tokens] * (work.prompts * work.samples)
    spent: dict[str, float] = {}

    def timed(function: Callable[..., Any], sign: int) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            start, used = time.perf_counter(), time.process_time()
            result = function(*args)
            spent["seconds"] += sign * (time.perf_counter() - start)
            spent["cpu_s"] += sign * (time.process_time() - used)
            return result

        return call

    timed_worker: Any = worker
    timed_worker.update = timed(worker.update, 1)
    timed_worker.strategy.step = timed(worker.strategy.step, -1)

    def step(number: int) -> dict[str, float]:
        sizes = (work.prompts, work.samples, work.prompt_tokens, responses)
        batch = training_batch(*sizes, vocabulary=vocabulary, seed=number)
        spent.update(seconds=0.0, cpu_s=0.0)
        runner.run(learner.update(batch))
        return dict(spent)

    return step


def run_side(name: str, model: str, options: dict[str, Any]) -> None:
    torch.set_num_threads(options["threads"])
    make = {ENGINE: bare_engine, UPDATE: bare_update}[name]
    step = make(model, Work(**options["work"]), options["vocabulary"], options["steps"])
    gate = Gate()
    gate.wait()
    for number in range(options["steps"]):
        gate.wait(step(number))
    os._exit(0)  # nothing to close down that the benchmark would wait for


# -- the comparison --------------------------------------------------------------------------------------------------


def compare(options: argparse.Namespace) -> dict[str, Any]:
    work, total, vocabulary = Work(), options.warm_up + options.steps, options.vocabulary
    with tempfile.TemporaryDirectory(prefix="overhead-") as name, ExitStack() as stack:
        folder = Path(name)
        model = folder / "model"
        save_model(model, SMALL.sized(vocabulary))
        write_prompts(folder / "prompts.jsonl", prompt_texts(work.prompts * total, work.prompt_tokens))
        given = {"work": asdict(work), "steps": total, "vocabulary": vocabulary, "threads": os.cpu_count()}
        commands = {RUN: run_command(folder, model, work, total, options.strategy, options.overrides)} | {
            side: [sys.executable, __file__, "--side", side, str(model), json.dumps(given)] for side in (ENGINE, UPDATE)
        }
        sides = [stack.enter_context(Side(side, command, folder, PASSIVE)) for side, command in commands.items()]
        found = in_turns(sides, options.warm_up, options.steps)
    assert_did(work, found[RUN])
    return summary(found)


def summary(found: dict[str, list[Step]]) -> dict[str, Any]:
    """Medians; the phases of a run are those of its own timing/* metrics."""
    run = found[RUN]
    step_s = statistics.median(step.wall_s for step in run)
    step_cpu_s = statistics.median(step.total_cpu_s for step in run)
    bare = {side: {key: median(found[side], key) for key in ("seconds", "cpu_s")} for side in (ENGINE, UPDATE)}
    phases = {name: median(run, f"timing/{name}_s") for name in ("generate", "score", "update", "publish", "step")}
    within = sum(seconds for name, seconds in phases.items() if name != "step")
    return {
        "step": {"seconds": step_s, "cpu_s": step_cpu_s},
        "bare": bare,
        "ratio": step_s / sum(side["seconds"] for side in bare.values()),
        "cpu_ratio": step_cpu_s / sum(side["cpu_s"] for side in bare.values()),
        "phases": phases,
        "beyond_the_bare_work": {
            "generate, less bare generation": phases["generate"] - bare[ENGINE]["seconds"],
            "score": phases["score"],
            "update, less bare update": phases["update"] - bare[UPDATE]["seconds"],
            "publish": phases["publish"],
            "between phases: collating, advantages, who holds the slots": phases["step"] - within,
            "between steps: reports": step_s - phases["step"],
        },
        "cpu_s_by_role": medians_by_role(run),
        "steps": {side: [asdict(step) for step in steps] for side, steps in found.items()},
    }


def show(result: dict[str, Any]) -> None:
    print("| | seconds | CPU-s |\n| --- | --- | --- |")
    for name, spent in {"a run's step": result["step"], **result["bare"]}.items():
        print(f"| {name} | {spent['seconds']:.3f} | {spent['cpu_s']:.2f} |")
    print(f"| ratio (wanted: at most {WANTED:.2f}) | {result['ratio']:.2f} | {result['cpu_ratio']:.2f} |")
    print("\n| beyond the bare work | seconds | of a step |\n| --- | --- | --- |")
    for name, seconds in result["beyond_the_bare_work"].items():
        print(f"| {name} | {seconds:.3f} | {seconds / result['step']['seconds']:.1%} |")
    by_role = ", ".join(f"{role} {seconds:.2f}" for role, seconds in result["cpu_s_by_role"].items())
    print(f"\nCPU-s of the run's processes: {by_role}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabulary", type=int, default=SMALL.vocabulary)
    parser.add_argument("--strategy", default="fsdp2", help="trainer.strategy; the default is that of a run")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--warm-up", type=int, default=WARM_UP)
    parser.add_argument("--json", type=Path, help="also write the results here")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="more configuration of the run")
    options = parser.parse_intermixed_args()
    given = {"threads": os.cpu_count(), "strategy": options.strategy, "vocabulary": options.vocabulary}
    report = about() | given | {"overrides": options.overrides}
    print(f"{line(report)}; {', '.join(f'{name} {value}' for name, value in given.items())}", flush=True)
    report |= compare(options)
    show(report)
    if options.json:
        options.json.write_text(json.dumps(report, indent=1), encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--side"]:
        run_side(sys.argv[2], sys.argv[3], json.loads(sys.argv[4]))
    else:
        main()
