"""What it costs to keep all rollouts: CPU-seconds of a step, and bytes of a token.

    python scripts/benchmarks/kept_rollouts.py [--steps 7] [--sizes 8x64 32x256] [--json FILE] [key=value ...]

- runs: the work of grpo_step.py with trainer.keep_rollouts=all, PROMPTSxTOKENS and 8 samples a prompt. Counted are the
  CPU-seconds of the thread that writes, against those of all processes of the run and against the driver's alone, and
  bytes of the files a sampled token. The model is random, so that texts and ids are as hard to compress as can be, and
  computes in float32, so that its log-probs and the engine's are close.
- made up: texts of this repository under a tokenizer made from them, no two alike; log-probs of distributions of which
  half have an entropy below 0.01 nats and a fifth one above 0.7, as was reported of models that reason
  (arXiv:2506.01939), in an engine and in a trainer whose logits differ as float32's or as bfloat16's do. Bytes and
  CPU-nanoseconds of a token, by column.

Wanted: at most 1 % of a step's CPU-seconds, and 8 bytes a token.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from measure import HERE, Gate, Side, about, in_turns, line
from numpy.typing import NDArray
from reports import Spent
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from workload import SMALL, Work, assert_did, prompt_texts, run_command, save_model, write_prompts

from skyrl_train.data.batch import collate
from skyrl_train.data.trajectory import Prompt, Trajectory, TrajectoryGroup, Turn
from skyrl_train.experiments.base import Experiment, run_experiment
from skyrl_train.report.rollout_files import FOLDER, write_rollouts
from skyrl_train.report.trackers import Trackers
from skyrl_train.trainer.kept_rollouts import KeptRollouts, rollout_tables

WARM_UP = 2
RUN = "BENCHMARK_RUN"
SPENT = "kept/cpu_s"
"""In what a step is told: of the thread that wrote its rollouts."""
REPOSITORY = HERE.parents[1]
GROUPS, SAMPLES, TOKENS = 64, 8, 1024
"""Of the step that is made up."""
CANDIDATES = 32
GAPS = {"float32": 2.0**-23, "bfloat16": 2.0**-8, "bfloat16, half of that": 2.0**-9}
"""Relative noise of a logit of the trainer's."""


# -- runs ------------------------------------------------------------------------------------------------------------


class Gated:
    """Tells what was spent on the rollouts of a step."""

    def __init__(self, inner: Trackers, spent: Spent):
        self._gate, self._inner, self._spent = Gate(), inner, spent

    def begin(self, step: int, total_steps: int) -> None:
        self._inner.begin(step, total_steps)
        self._gate.wait()

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._inner.log(metrics, step)
        if step:
            self._gate.wait({**metrics, SPENT: self._spent.take()})

    def samples(self, rows: Any, step: int) -> None:
        self._inner.samples(rows, step)

    def table(self, rows: Any, step: int) -> None:
        self._inner.table(rows, step)

    def close(self) -> None:
        self._inner.close()


class KeptExp(Experiment):
    def build_tracker(self, directory: Path) -> Any:
        spent = Spent()
        KeptRollouts._write = spent.wrapped(KeptRollouts._write)  # type: ignore[method-assign]
        return Trackers({"run": Gated(super().build_tracker(directory), spent)})


def of_a_run(size: str, options: argparse.Namespace) -> dict[str, float]:
    prompts, tokens = map(int, size.split("x"))
    work, total = Work(prompts=prompts, new_tokens=tokens), WARM_UP + options.steps
    with tempfile.TemporaryDirectory(prefix="kept-") as name:
        folder = Path(name)
        save_model(folder / "model", SMALL)
        write_prompts(folder / "prompts.jsonl", prompt_texts(work.prompts * total, work.prompt_tokens))
        overrides = ["trainer.keep_rollouts=all", *options.overrides]
        command = run_command(folder, folder / "model", work, total, "fsdp2", overrides)
        with Side("run", [sys.executable, __file__, *command[2:]], folder, {RUN: "1"}) as side:
            steps = in_turns([side], WARM_UP, options.steps)["run"]
        files = sorted((folder / "run" / FOLDER).glob("step_*.parquet"))
        assert len(files) == total
        size_of_step = statistics.median(file.stat().st_size for file in files)
    assert_did(work, steps)
    spent = statistics.median(step.told[SPENT] for step in steps)
    whole = statistics.median(step.total_cpu_s for step in steps)
    driver = statistics.median(step.cpu_s["driver"] for step in steps)
    return {
        "sampled tokens": work.sampled,
        "step, CPU-s": whole,
        "driver, CPU-s": driver,
        "keeping, CPU-s": spent,
        "share of the step": spent / whole,
        "bytes a token": size_of_step / work.sampled,
    }


# -- made up ---------------------------------------------------------------------------------------------------------


def texts_of_repository() -> list[str]:
    files = [*(REPOSITORY / "docs").glob("*.md"), *(REPOSITORY / "skyrl_train").rglob("*.py")]
    return [file.read_text(encoding="utf-8") for file in sorted(files)]


def tokenized(texts: list[str]) -> tuple[Tokenizer, NDArray[np.int32]]:
    """Byte-level BPE of 32,000 tokens, and the ids of all texts, again and again as far as a step needs them."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=32_000, show_progress=False, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(texts, trainer)
    ids = np.concatenate([np.array(one.ids, np.int32) for one in tokenizer.encode_batch(texts)])
    return tokenizer, ids


def log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    """As frameworks compute it in float32."""
    below = logits - logits.max(1, keepdims=True)
    found: NDArray[np.float32] = below - np.log(np.exp(below).sum(1, keepdims=True, dtype=np.float32))
    return found


def logprobs(count: int, noise: float) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """[count] those of sampled tokens in an engine and in a trainer, whose logits differ by this relative noise."""
    random = np.random.default_rng(0)
    engine, trainer = np.empty(count, np.float32), np.empty(count, np.float32)
    for start in range(0, count, 1 << 16):
        stop = min(count, start + (1 << 16))
        shape = (stop - start, CANDIDATES)
        logits = (20 + random.normal(0, 3, (shape[0], 1)) + random.normal(0, 1, shape)).astype(np.float32)
        lead = np.interp(random.random(shape[0]), [0, 0.1, 0.2, 0.3, 0.49, 0.7, 0.9, 1], [0, 2, 4, 5.5, 8, 11, 15, 20])
        logits[:, 0] = logits[:, 1:].max(1) + lead
        ours = log_softmax(logits)
        shares = np.exp(ours.astype(np.float64))
        drawn = (shares.cumsum(1) > random.random((shape[0], 1)) * shares.sum(1, keepdims=True)).argmax(1)
        theirs = log_softmax(logits * (1 + random.normal(0, noise, shape)).astype(np.float32))
        rows = np.arange(shape[0])
        engine[start:stop], trainer[start:stop] = ours[rows, drawn], theirs[rows, drawn]
    return engine, trainer


def made_up_step(tokenizer: Tokenizer, ids: NDArray[np.int32], noise: float) -> tuple[list[TrajectoryGroup], Any]:
    """Groups of responses that no two share a word of beyond what such texts share, and their scored batch."""
    import torch

    count = GROUPS * SAMPLES
    ids = np.resize(ids, count * TOKENS).reshape(count, TOKENS)
    engine, trainer = (values.reshape(count, TOKENS) for values in logprobs(ids.size, noise))
    groups = []
    for group in range(GROUPS):
        question = tokenizer.decode(ids[group, :128].tolist())
        prompt = Prompt(str(group), [{"role": "user", "content": question}], "math", {"ground_truth": str(group)})
        items = []
        for row in range(group * SAMPLES, (group + 1) * SAMPLES):
            text = tokenizer.decode(ids[row].tolist())
            turn = Turn(0, TOKENS, float(row % 2), "stop", 7, 7, 7.0, 20.0 + row / 7)
            items.append(
                Trajectory(
                    prompt,
                    row % SAMPLES,
                    ids[group, :128],
                    ids[row],
                    [(0, TOKENS)],
                    engine[row],
                    [turn],
                    float(row % 2),
                    "stop",
                    1.0,
                    {"correct": float(row % 2)},
                    text=text,
                    messages=[*prompt.messages, {"role": "assistant", "content": text}],
                )
            )
        groups.append(TrajectoryGroup(prompt, items))
    batch = collate(groups)
    old = torch.zeros(len(batch.input_ids))
    old[batch.loss_mask] = torch.from_numpy(trainer.reshape(-1))
    spread = torch.randn(count, generator=torch.Generator().manual_seed(0))
    advantages = torch.where(batch.loss_mask, batch.per_token(spread), 0.0)
    return groups, batch.with_tokens(old_logprobs=old, advantages=advantages)


def of_made_up(noise: float, tokenizer: Tokenizer, ids: NDArray[np.int32]) -> dict[str, float]:
    groups, batch = made_up_step(tokenizer, ids, noise)
    tokens = GROUPS * SAMPLES * TOKENS
    gap = (batch.old_logprobs - batch.rollout_logprobs)[batch.loss_mask].abs().mean()
    with tempfile.TemporaryDirectory(prefix="kept-") as name:
        spent = [_cpu_s(lambda: write_rollouts(Path(name), 1, rollout_tables(1, groups, batch))) for _ in range(5)]
        file = next(Path(name).rglob("step_*.parquet"))
        by_column: dict[str, float] = defaultdict(float)
        held = pq.ParquetFile(file).metadata
        for row_group in range(held.num_row_groups):
            for index in range(held.num_columns):
                column = held.row_group(row_group).column(index)
                by_column[column.path_in_schema.partition(".")[0]] += column.total_compressed_size / tokens
        whole = file.stat().st_size / tokens
    largest = dict(sorted(by_column.items(), key=lambda item: -item[1])[:5])
    rest = whole - sum(largest.values())
    found = {"mean gap, nats": float(gap), "CPU-ns a token": 1e9 * statistics.median(spent) / tokens}
    return found | {"bytes a token": whole} | largest | {"all else": rest}


def _cpu_s(call: Callable[[], Any]) -> float:
    begun = time.process_time()
    call()
    return time.process_time() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--sizes", nargs="*", default=["8x64", "32x256"], help="of runs, PROMPTSxTOKENS")
    parser.add_argument("--json", type=Path, help="also write the results here")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="more configuration of the runs")
    options = parser.parse_args()
    machine = about("torch", "ray", "pyarrow")
    tokenizer, ids = tokenized(texts_of_repository())
    made_up = {name: of_made_up(noise, tokenizer, ids) for name, noise in GAPS.items()}
    runs = {size: of_a_run(size, options) for size in options.sizes}
    print(line(machine))
    for found in (runs, made_up):
        if found:
            names = list(next(iter(found.values())))
            print(f"\n| | {' | '.join(names)} |\n|{' --- |' * (len(names) + 1)}")
        for name, values in found.items():
            print(f"| {name} | {' | '.join(f'{value:,.4g}' for value in values.values())} |")
    if options.json:
        options.json.write_text(json.dumps({"about": machine, "runs": runs, "made up": made_up}, indent=1) + "\n")


if __name__ == "__main__":
    if RUN in os.environ:
        run_experiment(KeptExp)
    else:
        main()
