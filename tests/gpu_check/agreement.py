"""Part 14: compare each engine's bfloat16 log-probs with the trainer's, and with its own in another batch.

Each engine runs with default settings. If it has such a mode, it runs again with `generator.batch_invariant=true`, to
show the mode's benefit and cost.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count as count_from_zero, pairwise
from pathlib import Path

from skyrl_train.config.choices import ENGINES, STRATEGIES
from skyrl_train.data.batch import SFTExample, collate_sft_examples
from skyrl_train.data.token_arrays import to_token_array
from skyrl_train.engines.base import Completion, SampleRequest, SamplingParams
from skyrl_train.learner.worker import LearnerWorker
from tests.gpu_check.decoding import random_prompts, run_in_subprocess
from tests.gpu_check.engines import BFLOAT16_MEAN_NATS, load_engine
from tests.gpu_check.report import Missing, Report, Setting
from tests.gpu_check.training import QWEN3_06B, TOY, release_memory
from tests.support.learner_specs import tiny_spec

NUM_SINGLE_REQUESTS = 8
"""Number of requests that are also sampled one by one."""
SHARPNESS = 4.0
"""Factor of the logits. Random weights have almost equal logits, which hide rounding errors."""
MICRO_BATCH_SIZE = 16
"""Number of sequences in the trainer's micro-batches."""


@dataclass(frozen=True)
class EngineSamples:
    """The samples of an engine."""

    rows: list[tuple[list[int], int, list[float]]]
    """All tokens of a request, the number of its prompt tokens, and the log-probs (nats) of the response tokens."""
    batch_gaps: list[float]
    """Log-prob differences (nats) between a request alone and in the batch, up to the first different token."""
    num_equal: int
    """Number of the NUM_SINGLE_REQUESTS requests that have the same tokens alone and in the batch."""
    tokens_per_s: float


def run(setting: Setting, report: Report) -> None:
    """Check every installed engine."""
    count, new = (16, 16) if setting.toy else (256, 256)
    with tempfile.TemporaryDirectory() as name:
        (TOY if setting.toy else QWEN3_06B).save(Path(name), SHARPNESS)
        for engine, where in ENGINES.items():
            try:
                load_engine(where)
            except Missing as missing:
                report.note(engine, str(missing))
                continue
            has_mode = engine != "transformers" and not setting.toy
            for invariant in (False, True) if has_mode else (False,):
                what = f"{engine}, batch-invariant" if invariant else engine
                samples = run_in_subprocess(sample, where, name, setting.device, invariant, count, new)
                gaps = compute_trainer_gaps(name, setting.device, samples)
                report_agreement(what, samples, gaps, invariant, report)


def report_agreement(
    what: str, samples: EngineSamples, trainer_gaps: Sequence[float], invariant: bool, report: Report
) -> None:
    mean = sum(trainer_gaps) / len(trainer_gaps)
    report.at_most(f"{what}: log-prob difference from the trainer, mean", mean, BFLOAT16_MEAN_NATS, "nats")
    report.note(f"{what}: log-prob difference from the trainer, largest", max(trainer_gaps))
    largest_gap = f"{what}: log-prob difference between single and batched requests, largest"
    num_equal = f"{what}: single requests with the tokens of the batch, of {NUM_SINGLE_REQUESTS}"
    if invariant:
        report.at_most(largest_gap, max(samples.batch_gaps), 0.0, "nats")
        report.at_least(num_equal, samples.num_equal, NUM_SINGLE_REQUESTS)
    else:
        report.note(largest_gap, max(samples.batch_gaps))
        report.note(num_equal, samples.num_equal)
    report.note(f"{what}: tok/s", samples.tokens_per_s)


def sample(where: str, path: str, device: str, invariant: bool, count: int, new: int) -> EngineSamples:
    """Sample two batches of `count` requests, then some requests of the second batch one by one.

    The first batch is a warm-up. `run` calls this function in a separate process.
    """
    arguments = {"dtype": "bfloat16", "device": device, "max_num_seqs": count, "max_model_len": 1024}
    if device != "cpu" and "transformers" not in where:
        arguments |= {"gpu_memory_utilization": 0.7, "enforce_eager": False}
    engine = load_engine(where)(path, **arguments, **({"batch_invariant": True} if invariant else {}))
    sampling = SamplingParams(max_tokens=new, ignore_eos=True)
    request_ids = map(str, count_from_zero())

    def make_requests(run: int) -> list[SampleRequest]:
        return [
            SampleRequest(next(request_ids), to_token_array(ids), sampling, seed)
            for seed, ids in enumerate(random_prompts(count, run))
        ]

    with asyncio.Runner() as runner:
        runner.run(engine.generate(make_requests(0)))  # warms up
        start = time.perf_counter()
        requests = make_requests(1)
        batched = runner.run(engine.generate(requests))
        seconds = time.perf_counter() - start
        single = [runner.run(engine.generate([request]))[0] for request in make_requests(1)[:NUM_SINGLE_REQUESTS]]
        runner.run(engine.close())
    pairs = list(zip(single, batched, strict=False))
    gaps = [gap for pair in pairs for gap in logprob_gaps(*pair)]
    rows = [
        ([*request.token_ids.tolist(), *answer.token_ids.tolist()], len(request.token_ids), list(answer.full_logprobs))
        for request, answer in zip(requests, batched, strict=True)
    ]
    num_equal = sum(first.token_ids.tolist() == second.token_ids.tolist() for first, second in pairs)
    return EngineSamples(rows, gaps, num_equal, count * new / seconds)


def logprob_gaps(first: Completion, second: Completion) -> list[float]:
    """Return the absolute log-prob differences (nats) of the tokens before the first different token."""
    gaps = []
    tokens = zip(first.token_ids, second.token_ids, first.full_logprobs, second.full_logprobs, strict=True)
    for first_id, second_id, first_logprob, second_logprob in tokens:
        if first_id != second_id:
            break
        gaps.append(abs(first_logprob - second_logprob))
    return gaps


def compute_trainer_gaps(path: str, device: str, samples: EngineSamples) -> list[float]:
    """Return the absolute differences (nats) of the engine's log-probs from those of a trainer with the same dtype."""
    worker = LearnerWorker(tiny_spec(path, strategy=STRATEGIES["fsdp2"], device=device, dtype="bfloat16"), 0, 1)
    try:
        worker.setup(*worker.address())
        examples = [
            SFTExample(ids, [False] * prompt_length + [True] * (len(ids) - prompt_length))
            for ids, prompt_length, _ in samples.rows
        ]
        batch = collate_sft_examples(examples)
        parts = batch.split_micro_batches(max_sequences=MICRO_BATCH_SIZE)
        trainer_logprobs = worker.forward(parts, len(parts)).tolist()
    finally:
        worker.close()
        del worker
        release_memory(device)
    gaps = []
    for (start, stop), (_, prompt_length, logprobs) in zip(pairwise(batch.offsets.tolist()), samples.rows, strict=True):
        gaps += [abs(a - b) for a, b in zip(trainer_logprobs[start + prompt_length : stop], logprobs, strict=True)]
    return gaps
