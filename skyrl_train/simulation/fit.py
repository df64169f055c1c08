"""Timings that a finished run shows: `skyrl-train simulate --from RUN`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import NormalDist, fmean, median, pstdev
from typing import Any

import numpy as np
import yaml

from skyrl_train.config.hydra import CONFIG_FILE
from skyrl_train.errors import DataError
from skyrl_train.report.jsonl import METRICS_FILE, read_jsonl
from skyrl_train.simulation.timings import EngineTimings, LearnerTimings, Lengths, Timings

_ALIKE = 0.005
"""Spread below which numbers of several steps say no more than one of them."""
_LEAST_STEPS = 3
"""The first step is left out: it compiles, and fills caches."""
_PIECES = 2000
"""In which integrals are added up."""


def fit(folder: Path) -> Timings:
    """The timings of the run in `folder`, of its metrics and its own configuration. Raises DataError."""
    rows = [row for row in read_jsonl(folder / METRICS_FILE) if "timing/generate_s" in row and row["step"] > 1]
    if len(rows) < _LEAST_STEPS:
        raise DataError(f"{folder / METRICS_FILE} has {len(rows)} steps after the first: at least {_LEAST_STEPS} tell.")
    ran = _configuration(folder)
    if (reason := unclear(rows, ran)) is not None:
        raise DataError(f"{folder}: {reason}, so that it does not tell what a decode step takes: use --timings.")
    return timings_of(rows, ran)


def timings_of(rows: Sequence[Mapping[str, Any]], ran: Mapping[str, Any]) -> Timings:
    """The timings that the metrics of steps show that are not `unclear`; `ran`: the configuration, as plain values.

    A decode step takes `a + b * batch`. All sequences of a synchronous step begin at once, so that its generation has
    as many decode steps as its longest answer has tokens, and the batches of an engine add up to its tokens:
    `generate_s = a * longest + b * tokens / engines`. Likewise an answer of n tokens takes n steps, whose batches add
    up to the sum of min(length, n) over the m answers of its engine: in the mean
    `response_s = a * mean + b * (mean + (m - 1) * shorter)`, `shorter` being the mean of the shorter of two answers.
    `a` and `b` are what fits both best over the steps.
    """
    answers = ran["trainer"]["train_batch_size"] * ran["generator"]["n_samples_per_prompt"]
    most = ran["generator"]["sampling_params"]["max_generate_length"]
    lengths = _lengths(rows, answers, most)
    each, shorter = answers / ran["generator"]["num_inference_engines"], _share_of_shorter(lengths, most)
    decode_s, per_sequence_s = _decode_step(rows, each, shorter)
    engine = EngineTimings(decode_s, per_sequence_s, prefill_tokens_per_s=math.inf)
    return _with_learner(engine, lengths, rows, ran)


def timings_by_throughput(rows: Sequence[Mapping[str, Any]], ran: Mapping[str, Any]) -> Timings:
    """The same for steps that are `unclear`: a token takes its time however many sequences run at once.

    So engines bring in proportion to their number, and all answers are as long as their mean.
    """
    tokens_per_s = median(row["engines/tokens_per_s"] for row in rows)
    per_token_s = ran["generator"]["num_inference_engines"] / max(tokens_per_s, 1e-9)
    lengths = Lengths(max(1.0, fmean(row["response/mean_tokens"] for row in rows)), 0.0)
    return _with_learner(EngineTimings(0.0, per_token_s, prefill_tokens_per_s=math.inf), lengths, rows, ran)


def _with_learner(
    engine: EngineTimings, lengths: Lengths, rows: Sequence[Mapping[str, Any]], ran: Mapping[str, Any]
) -> Timings:
    """All timings; those of the learner, of a sync and of everything else are the rows'."""
    placement = ran["trainer"]["placement"]
    trainers = placement["policy_num_nodes"] * placement["policy_num_gpus_per_node"]
    tokens = [row["rollouts/tokens"] for row in rows]

    def seconds(name: str) -> list[float]:
        return [row.get(f"timing/{name}_s", 0.0) for row in rows]

    per_step, per_token = 0.0, fmean(seconds("update")) / fmean(tokens)
    if _spread(tokens) > _ALIKE:
        per_step, per_token = non_negative([(1.0, count) for count in tokens], seconds("update"))
    known = sum(map(fmean, (seconds("generate"), seconds("update"), seconds("score"), seconds("publish"))))
    rest = max(0.0, fmean(seconds("step")) - known)
    colocated = placement["colocate_all"]
    return Timings(
        engine=engine,
        learner=LearnerTimings(
            update_s_per_token=per_token * trainers,
            score_s_per_token=fmean(seconds("score")) / fmean(tokens) * trainers,
            step_s=per_step + (0.0 if colocated else rest),
        ),
        sync_s=median(seconds("publish")),
        swap_s=rest if colocated else 0.0,
        response=lengths,
        prompt_tokens=0,  # the tokens above are those of answers: prompts are in what they take
        pass_rate=min(1.0, max(0.0, fmean(row.get("reward/mean", 0.5) for row in rows))),
    )


def unclear(rows: Sequence[Mapping[str, Any]], ran: Mapping[str, Any]) -> str | None:
    """Why the times of these steps do not tell what a decode step takes; None if they do."""
    generator = ran["generator"]
    parallel = [f"inference_engine_{kind}_parallel_size" for kind in ("tensor", "pipeline", "data")]
    each = max(row["rollouts/trajectories"] for row in rows) / generator["num_inference_engines"]
    reasons = {
        "it was asynchronous": any(row.get("async/staleness_max") for row in rows),
        "its engines have several accelerators each": any(generator.get(name, 1) > 1 for name in parallel),
        "its episodes have several turns": any(row.get("episode/max_turns", 1) > 1 for row in rows),
        "it sampled groups that no step trained on": any(
            row.get("sampling/dropped") or row.get("sampling/cut") for row in rows
        ),
        "its engines had more sequences than run at a time (generator.max_num_seqs)": each > generator["max_num_seqs"],
        "its answers are all as long, or in each step alike": _spread(
            [row["rollouts/tokens"] / row["response/max_tokens"] for row in rows]
        )
        <= _ALIKE,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def _decode_step(rows: Sequence[Mapping[str, Any]], each: float, shorter: float) -> tuple[float, float]:
    """Seconds of a decode step, and those that each sequence adds: of engines with `each` answers in a step."""
    tokens = [row["response/mean_tokens"] for row in rows]
    whole = [(row["response/max_tokens"], mean * each) for row, mean in zip(rows, tokens, strict=True)]
    alone = [(mean, mean * (1 + (each - 1) * shorter)) for mean in tokens]
    of_whole, of_each = ([row.get(f"timing/{name}_s", 0.0) for row in rows] for name in ("generate", "response"))
    if not all(of_each):  # a run of an earlier version
        alone, of_each = [], []
    return non_negative([*whole, *alone], [*of_whole, *of_each])


def _spread(values: Sequence[float]) -> float:
    """Standard deviation over mean."""
    return pstdev(values) / fmean(values)


def _configuration(folder: Path) -> dict[str, Any]:
    file = folder / CONFIG_FILE
    try:
        ran = yaml.safe_load(file.read_text(encoding="utf-8"))
        return {section: ran[section] for section in ("trainer", "generator")}
    except (OSError, yaml.YAMLError, KeyError, TypeError) as error:
        raise DataError(f"{file}: is not what a run writes when it starts ({error!r}).") from error


def _lengths(rows: Sequence[Mapping[str, Any]], answers: int, most: int) -> Lengths:
    """The log-normal of answers before they are cut at `most` tokens.

    It has the run's mean, and its share of cut answers; where none was cut, or answers have limits of their own, its
    expected longest of the `answers` of a step.
    """
    mean = fmean(row["response/mean_tokens"] for row in rows)
    cut = fmean(row.get("response/truncated_fraction", 0.0) for row in rows)
    if 0 < cut * most < mean:
        return _cut_lengths(mean, cut, most)
    longest = fmean(row["response/max_tokens"] for row in rows)
    quantile = NormalDist().inv_cdf(1 - 0.5 / max(2, answers))
    ratio = math.log(max(longest / mean, 1.0))
    # longest / mean = exp(quantile * sigma - sigma^2 / 2)
    sigma = quantile - math.sqrt(max(0.0, quantile**2 - 2 * ratio))
    return Lengths(mean, sigma)


def _cut_lengths(mean: float, cut: float, most: int) -> Lengths:
    """The log-normal of which a share `cut` is longer than `most`, and has the mean `mean` once that is cut off."""
    normal = NormalDist()
    beyond = normal.inv_cdf(1 - min(cut, 1 - 1e-6))  # (ln most - mu) / sigma

    def mean_of(sigma: float) -> float:
        below = math.exp(sigma * (sigma / 2 - beyond)) * normal.cdf(beyond - sigma)
        return most * (below + cut)

    low, high = 1e-3, 8.0  # the wider it is, the smaller its mean
    for _ in range(60):
        sigma = (low + high) / 2
        low, high = (sigma, high) if mean_of(sigma) > mean else (low, sigma)
    return Lengths(most * math.exp(sigma * (sigma / 2 - beyond)), sigma)


def _share_of_shorter(lengths: Lengths, most: int) -> float:
    """Mean of the shorter one of two answers, over that of one, both cut at `most` tokens: the integrals of S^2 and S
    from 0 to `most`, S(x) being the share of answers longer than x."""
    if not lengths.sigma:
        return 1.0
    normal = NormalDist(math.log(lengths.mean) - lengths.sigma**2 / 2, lengths.sigma)
    width = min(most, lengths.mean * math.exp(6 * lengths.sigma)) / _PIECES
    longer = [1 - normal.cdf(math.log((piece + 0.5) * width)) for piece in range(_PIECES)]
    return math.fsum(share**2 for share in longer) / math.fsum(longer)


def non_negative(columns: Sequence[tuple[float, float]], values: Sequence[float]) -> tuple[float, float]:
    """The two coefficients, none below 0, with which the columns come closest to the values."""
    table, wanted = np.asarray(columns, dtype=float), np.asarray(values, dtype=float)
    found = np.linalg.lstsq(table, wanted, rcond=None)[0]
    for other in range(2):
        if found[other] < 0:
            one = 1 - other
            found[other], found[one] = 0.0, max(0.0, (table[:, one] @ wanted) / (table[:, one] @ table[:, one]))
            break
    return float(found[0]), float(found[1])
