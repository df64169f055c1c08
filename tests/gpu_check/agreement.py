"""Part 14: difference of the engines' bfloat16 log-probs from the trainer's, and from their own in another batch.

Each engine runs with default settings, and again with `generator.batch_invariant=true` if it has such a mode, to show
its benefit and cost.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from skyrl_train.config.choices import ENGINES, STRATEGIES
from skyrl_train.data.batch import SFTExample, collate_sft_examples
from skyrl_train.data.token_arrays import to_token_array
from skyrl_train.engines.base import Completion, SampleRequest, SamplingParams
from skyrl_train.learner.worker import LearnerWorker
from tests.gpu_check.decoding import elsewhere, prompts
from tests.gpu_check.engines import BFLOAT16_MEAN_NATS, load_engine
from tests.gpu_check.report import Missing, Report, Setting
from tests.gpu_check.training import QWEN3_06B, TOY, free
from tests.support.learner_specs import tiny_spec

ALONE = 8
"""Number of requests that are also sampled one by one."""
SHARPNESS = 4.0
"""Factor of the logits. Random weights have almost equal logits, which hide rounding errors."""
AT_ONCE = 16
"""Number of sequences that the trainer scores at a time."""


@dataclass(frozen=True)
class Sampled:
    """The samples of an engine."""

    rows: list[tuple[list[int], int, list[float]]]
    """For every request: all tokens, the number of prompt tokens, and the engine's log-probs of the others (nats)."""
    gaps: list[float]
    """Differences of log-probs between a request alone and in the batch, up to the first different token."""
    same: int
    """Number of the ALONE requests with the same tokens in both."""
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
                sampled = elsewhere(sample, where, name, setting.device, invariant, count, new)
                tell(what, sampled, from_trainer(name, setting.device, sampled), invariant, report)


def tell(what: str, sampled: Sampled, trainer_gaps: Sequence[float], invariant: bool, report: Report) -> None:
    mean = sum(trainer_gaps) / len(trainer_gaps)
    report.at_most(f"{what}: log-probs from the trainer's, mean", mean, BFLOAT16_MEAN_NATS, "nats")
    report.note(f"{what}: log-probs from the trainer's, largest", max(trainer_gaps))
    worst = max(sampled.gaps)
    if invariant:
        report.at_most(f"{what}: log-probs alone and in a batch, largest gap", worst, 0.0, "nats")
        report.at_least(f"{what}: of {ALONE} requests with the same tokens in both", sampled.same, ALONE)
    else:
        report.note(f"{what}: log-probs alone and in a batch, largest gap", worst)
        report.note(f"{what}: of {ALONE} requests with the same tokens in both", sampled.same)
    report.note(f"{what}: tok/s", sampled.tokens_per_s)


def sample(where: str, path: str, device: str, invariant: bool, count: int, new: int) -> Sampled:
    """Sample all requests at once, twice, then some of them one by one. Runs in a separate process."""
    arguments = {"dtype": "bfloat16", "device": device, "max_num_seqs": count, "max_model_len": 1024}
    if device != "cpu" and "transformers" not in where:
        arguments |= {"gpu_memory_utilization": 0.7, "enforce_eager": False}
    engine = load_engine(where)(path, **arguments, **({"batch_invariant": True} if invariant else {}))
    sampling = SamplingParams(max_tokens=new, ignore_eos=True)
    named = iter(range(10**9))

    def requests(run: int) -> list[SampleRequest]:
        given = enumerate(prompts(count, run))
        return [SampleRequest(str(next(named)), to_token_array(ids), sampling, seed) for seed, ids in given]

    with asyncio.Runner() as runner:
        runner.run(engine.generate(requests(0)))  # warms up
        start = time.perf_counter()
        asked = requests(1)
        together = runner.run(engine.generate(asked))
        seconds = time.perf_counter() - start
        alone = [runner.run(engine.generate([one]))[0] for one in requests(1)[:ALONE]]
        runner.run(engine.close())
    gaps: list[float] = []
    for one, other in zip(alone, together, strict=False):
        gaps += gaps_until_they_part(one, other)
    rows = [
        ([*request.token_ids.tolist(), *found.token_ids.tolist()], len(request.token_ids), list(found.full_logprobs))
        for request, found in zip(asked, together, strict=True)
    ]
    same = sum(one.token_ids.tolist() == other.token_ids.tolist() for one, other in zip(alone, together, strict=False))
    return Sampled(rows, gaps, same, count * new / seconds)


def gaps_until_they_part(one: Completion, other: Completion) -> list[float]:
    """Return differences in nats before the first token that differs.

    That token has the same context, but is not the same.
    """
    found = []
    pairs = zip(one.token_ids, other.token_ids, one.full_logprobs, other.full_logprobs, strict=True)
    for mine, theirs, a, b in pairs:
        if mine != theirs:
            break
        found.append(abs(a - b))
    return found


def from_trainer(path: str, device: str, sampled: Sampled) -> list[float]:
    """Return differences (nats) of the engine's log-probs from those of a trainer with the same dtype."""
    worker = LearnerWorker(tiny_spec(path, strategy=STRATEGIES["fsdp2"], device=device, dtype="bfloat16"), 0, 1)
    try:
        worker.setup(*worker.address())
        found = [SFTExample(ids, [False] * prompt + [True] * (len(ids) - prompt)) for ids, prompt, _ in sampled.rows]
        batch = collate_sft_examples(found)
        parts = batch.split_micro_batches(max_sequences=AT_ONCE)
        scores, ends = worker.forward(parts, len(parts)).tolist(), pairwise(batch.offsets.tolist())
    finally:
        worker.close()
        del worker
        free(device)
    gaps = []
    for (start, stop), (_, prompt, logprobs) in zip(ends, sampled.rows, strict=True):
        gaps += [abs(a - b) for a, b in zip(scores[start + prompt : stop], logprobs, strict=True)]
    return gaps
