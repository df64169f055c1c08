"""Rules that look at a run's numbers and say what is wrong, with the evidence and a key to change.

A rule that begins to hold is said once, and kept in RUN/diagnosis.json with the steps at which it held, beside the
number of steps that the run is to have. No rule stops a run: that is what trainer.guards are for.
"""

from __future__ import annotations

import json
import logging
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from skyrl_train.atomic_files import atomic_write_text
from skyrl_train.report.jsonl import METRICS_FILE, read_metrics
from skyrl_train.report.protocol import SampleRow
from skyrl_train.report.untrusted_files import is_step, read_json_object

DIAGNOSIS_FILE = "diagnosis.json"
MAX_HISTORY_STEPS = 64
"""The most steps that a rule looks at. Evaluations are seldom: it sees all of them."""
STEP_TIME_METRIC = "timing/step_s"
"""In the row of every step that was trained; an evaluation alone has none."""
_log = logging.getLogger(__name__)

Rows = Sequence[Mapping[str, float]]
"""The numbers of consecutive steps, the latest last."""


@dataclass(frozen=True)
class Evaluation:
    """One of a run's evaluations, beside the reward in training at that time."""

    step: int
    """After which it was; 0 before the first."""
    score: float
    reward: float | None
    """reward/mean in the five steps that end with it; of that before the first step, in the first five."""


@dataclass
class History:
    """What rules look at."""

    total_steps: int = 0
    """Of the run; 0 if it is not known."""
    first_steps: list[Mapping[str, float]] = field(default_factory=list)
    """The numbers of the run's first five steps."""
    steps: list[Mapping[str, float]] = field(default_factory=list)
    """Those of the last LOOKED_AT steps, the latest last."""
    evaluations: list[Evaluation] = field(default_factory=list)
    """All of them, the latest last."""

    def add(self, metrics: Mapping[str, float], step: int) -> None:
        """Take in a row of metrics. A step that a resumed run completes comes again, and counts once."""
        if STEP_TIME_METRIC in metrics:
            row = {"step": step, **metrics}
            self.steps = [*_before(step, self.steps)[1 - MAX_HISTORY_STEPS :], row]
            if len(earlier := _before(step, self.first_steps)) < 5:
                self.first_steps = [*earlier, row]
                self.evaluations[:1] = [
                    replace(one, reward=_mean_reward(self.first_steps)) if one.step == 0 else one
                    for one in self.evaluations[:1]
                ]
        if (score := _score(metrics)) is not None and math.isfinite(score):
            before = [one for one in self.evaluations if one.step < step]
            self.evaluations = [*before, Evaluation(step, score, _mean_reward(self.steps[-5:]))]


def _before(step: int, rows: Rows) -> list[Mapping[str, float]]:
    return [row for row in rows if row["step"] < step]


Evidence = Callable[[History], str | None]


@dataclass(frozen=True)
class Rule:
    """An illness: `evidence` returns what shows it in a run's numbers, None if nothing does."""

    name: str
    evidence: Evidence
    advice: str
    """What to change, with its key."""


@dataclass
class Finding:
    """A rule that holds, or held."""

    rule: str
    since: int
    """The first step at which it held."""
    until: int | None
    """The last one; None while it holds."""
    evidence: str
    advice: str


class Diagnosis:
    """A tracker: what the rules find in a run's numbers."""

    def __init__(self, run_dir: Path, rules: Sequence[Rule]):
        self._folder = Path(run_dir)
        self._rules = rules
        self._history = History()
        self.findings: list[Finding] = []

    def begin(self, step: int, total_steps: int) -> None:
        """Go on from what the run's earlier attempts have written."""
        self._history, self.findings = History(total_steps), []
        metrics, found = self._folder / METRICS_FILE, self._folder / DIAGNOSIS_FILE
        if step:
            for row in read_metrics(metrics):
                if row["step"] <= step:
                    self._history.add(_numbers(row), int(row["step"]))
        if step:
            self.findings = list(_read(found, step))
        self._write()  # those of steps that are taken again are gone

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._history.add(metrics, step)
        if STEP_TIME_METRIC not in metrics:
            return
        before = json.dumps([asdict(finding) for finding in self.findings])
        for begun in update_findings(self._rules, self._history, self.findings, step):
            _log.warning("step %d: %s: %s. %s", step, begun.rule.replace("_", " "), begun.evidence, begun.advice)
        if json.dumps([asdict(finding) for finding in self.findings]) != before:
            self._write()

    def samples(self, rows: Sequence[SampleRow], step: int) -> None:
        pass

    def close(self) -> None:
        pass

    def _write(self) -> None:
        findings = [asdict(finding) for finding in self.findings]
        text = json.dumps({"total_steps": self._history.total_steps, "findings": findings}, indent=1)
        try:
            atomic_write_text(self._folder / DIAGNOSIS_FILE, text + "\n")
        except OSError as error:
            _log.warning("%s cannot be written (%s).", self._folder / DIAGNOSIS_FILE, error)


def update_findings(rules: Sequence[Rule], history: History, findings: list[Finding], step: int) -> list[Finding]:
    """End the findings that no longer hold after `step`, and append those that begin to; returns the latter."""
    open_ones = {finding.rule: finding for finding in findings if finding.until is None}
    begun = []
    for rule in rules:
        evidence, held = rule.evidence(history), open_ones.get(rule.name)
        if evidence is None:
            if held is not None:
                held.until = step - 1
        elif held is None:
            begun.append(Finding(rule.name, step, None, evidence, rule.advice))
    findings += begun
    return begun


def diagnose(rows: Iterable[Mapping[str, Any]], rules: Sequence[Rule], total_steps: int = 0) -> list[Finding]:
    """What the rules find in the lines of a metrics.jsonl, as they would have during the run."""
    history, findings = History(total_steps), list[Finding]()
    for row in rows:
        history.add(_numbers(row), int(row["step"]))
        if STEP_TIME_METRIC in row:
            update_findings(rules, history, findings, int(row["step"]))
    return findings


def _numbers(row: Mapping[str, object]) -> Mapping[str, float]:
    """A line of metrics.jsonl, in which null is what was not finite."""
    return {name: float("nan") if value is None else value for name, value in row.items()}  # type: ignore[misc]


def _read(file: Path, step: int) -> Iterator[Finding]:
    """The findings of earlier attempts, up to `step`; what cannot be read is left out."""
    try:
        found = [Finding(**finding) for finding in read_json_object(file).get("findings", [])]
    except TypeError:
        return
    for finding in found:
        if is_step(finding.since) and (finding.until is None or is_step(finding.until)) and finding.since <= step:
            if finding.until is not None and finding.until >= step:
                finding.until = None  # it ended in steps that are taken again
            yield finding


# -- rules -------------------------------------------------------------------------------------------------------------


def values(rows: Rows, name: str, steps: int) -> list[float] | None:
    """A metric in the last `steps` rows; None if there are not as many, or one lacks it."""
    found = [row[name] for row in rows[-steps:] if name in row]
    return found if len(found) == steps else None


def holds_in_every_step(name: str, steps: int, holds: Callable[[float], bool], words: str) -> Evidence:
    """Holds if a metric was so in each of the last `steps` steps; `words` with its mean."""

    def evidence(seen: History) -> str | None:
        found = values(seen.steps, name, steps)
        if found is None or not all(map(holds, found)):
            return None
        return f"{words.format(statistics.fmean(found))} in the last {steps} steps ({name})"

    return evidence


def holds_in_every_window(name: str, window: int, count: int, above: float, words: str) -> Evidence:
    """Holds if a share of the time was `above` this in each of the last `count` windows of so many steps.

    Steps that ended early have no such share, and are left out.
    """

    def evidence(seen: History) -> str | None:
        rows = [row for row in seen.steps if name in row and STEP_TIME_METRIC in row][-window * count :]
        if len(rows) < window * count:
            return None
        shares = [_share(name, rows[begin : begin + window]) for begin in range(0, len(rows), window)]
        if not all(share > above for share in shares):
            return None
        return f"{words.format(_share(name, rows))} in the last {len(rows)} steps ({name})"

    return evidence


def _share(name: str, rows: Rows) -> float:
    """Of the time of all these steps together."""
    return sum(row[name] * row[STEP_TIME_METRIC] for row in rows) / max(
        1e-9, sum(row[STEP_TIME_METRIC] for row in rows)
    )


def entropy_collapse(seen: History) -> str | None:
    """Below 0.02 nats, and a tenth of what it was in the run's first steps."""
    recent = values(seen.steps, "policy/entropy", 3)
    earlier = [row["policy/entropy"] for row in seen.first_steps if math.isfinite(row.get("policy/entropy", math.nan))]
    if recent is None or len(seen.steps) < 10 or not earlier:
        return None
    before, after = statistics.fmean(earlier), statistics.fmean(recent)
    if not (after < 0.02 and after < 0.1 * before):
        return None
    return f"the policy's entropy fell from {before:.3g} to {after:.3g} nats (policy/entropy)"


def kl_runs_away(seen: History) -> str | None:
    """Above 1 nat a token in three steps, and a fifth more than in the three before."""
    found = values(seen.steps, "policy/kl", 6)
    if found is None or not min(found[-3:]) > 1.0:
        return None
    if not statistics.fmean(found[-3:]) > 1.2 * statistics.fmean(found[:3]):
        return None
    return (
        f"the policy is {statistics.fmean(found[-3:]):.3g} nats a token away from its reference and leaves (policy/kl)"
    )


def engine_and_trainer_disagree(seen: History) -> str | None:
    """By the mean ratio; or by the distance, where samples are of the newest weights: else it is what was learnt."""
    ratio = _ratio(seen)
    if ratio is not None or any(row.get("rollouts/max_staleness", 0.0) > 0 for row in seen.steps[-3:]):
        return ratio
    return _distance(seen)


_ratio = holds_in_every_step(
    "mismatch/ratio_mean", 3, lambda ratio: not 0.9 <= ratio <= 1.1, "the mean ratio was {:.3g}"
)
_distance = holds_in_every_step("mismatch/kl", 3, lambda kl: not kl <= 0.02, "they were {:.3g} nats a token apart")


def gradient_rule(uses_group_baseline: bool) -> Rule:
    """Holds if two of the last ten gradients were more than ten times the median of those before, or not finite.

    With `groups_teach`, where rewards are compared within groups, steps whose groups were all alike do not count:
    beside their gradients every other is large.
    """

    def counts(row: Mapping[str, float]) -> bool:
        alike = uses_group_baseline and row.get("reward/zero_variance_groups", 0.0) >= 1.0
        return not alike or not math.isfinite(row["policy/grad_norm"])

    def evidence(seen: History) -> str | None:
        norms = [row["policy/grad_norm"] for row in seen.steps if "policy/grad_norm" in row and counts(row)]
        if len(norms) < 20:
            return None
        usual = statistics.median([norm for norm in norms[:-10] if math.isfinite(norm)] or [0.0])
        spikes = [norm for norm in norms[-10:] if not math.isfinite(norm) or 0 < 10 * usual < norm]
        if len(spikes) < 2:
            return None
        return f"{len(spikes)} of the last 10 gradients were over ten times the usual {usual:.3g} (policy/grad_norm)"

    return Rule(
        "gradient_spikes",
        evidence,
        "Lower trainer.policy.optimizer_config.max_grad_norm or .lr; `trainer.dump_data_batch=true` keeps the batches.",
    )


_DEADLINE_FAILURES = "rollouts/failed/deadline"
"""Those that took longer than trainer.timeouts.rollout_s."""


def episodes_fail(seen: History) -> str | None:
    """Over 5 % in each of three steps, those that are cut apart; the usual way is named."""
    rows = seen.steps
    failed, total = values(rows, "rollouts/failed", 3), values(rows, "rollouts/trajectories", 3)
    if failed is None or total is None:
        return None
    failed = [number - row.get(_DEADLINE_FAILURES, 0.0) for number, row in zip(failed, rows[-3:], strict=True)]
    if not all(one > 0.05 * of for one, of in zip(failed, total, strict=True)):
        return None
    kinds = {name for row in rows[-3:] for name in row if name.startswith("rollouts/failed/")} - {_DEADLINE_FAILURES}
    most = max(kinds, key=lambda kind: sum(row.get(kind, 0.0) for row in rows[-3:]), default="rollouts/failed")
    share = sum(failed) / max(1.0, sum(total))
    return f"{share:.0%} of the episodes of the last 3 steps failed, most as {most.removeprefix('rollouts/failed/')}"


def long_answers_are_cut(seen: History) -> str | None:
    """By rollout_s: what is learnt lacks them."""
    found = values(seen.steps, _DEADLINE_FAILURES, 3)
    if found is None or not min(found) > 0:
        return None
    return f"{sum(found):.0f} episodes of the last 3 steps took too long and are masked ({_DEADLINE_FAILURES})"


def evaluation_falls(seen: History) -> str | None:
    """The last two evaluations are below the best one, while the reward in training rose since.

    A fall is 0.05, a rise 0.02; where scores or rewards are larger than 1, these parts of them. The best of many is
    luck, too: from eight evaluations on a fall is also five standard deviations of their noise, which is told by how
    far scores lie off the line between their neighbours.
    """
    if len(seen.evaluations) < 3:
        return None
    *earlier, last_but_one, last = seen.evaluations
    best = max(earlier, key=lambda one: (one.score, one.step))
    scores = [one.score for one in earlier]
    beside = [abs(one - 2 * two + three) for one, two, three in zip(scores, scores[1:], scores[2:], strict=False)]
    noise = 2.5 * statistics.fmean(beside) if len(scores) >= 8 else 0.0  # of normal noise the mean is 1.95 deviations
    if not max(last_but_one.score, last.score) < best.score - max(noise, 0.05 * max(1.0, abs(best.score))):
        return None
    before, after = best.reward, last.reward
    if before is None or after is None or not after > before + 0.02 * max(1.0, abs(before)):
        return None
    return (
        f"the evaluation fell from {best.score:.3g} to {last.score:.3g} while the reward in training rose from "
        f"{before:.3g} to {after:.3g}"
    )


def _score(row: Mapping[str, float]) -> float | None:
    if "eval/all/avg_score" in row:
        return row["eval/all/avg_score"]
    return next(
        (value for name, value in row.items() if name.startswith("eval/") and name.endswith("/avg_score")), None
    )


def _mean_reward(rows: Rows) -> float | None:
    """None if no row has a reward."""
    rewards = [row["reward/mean"] for row in rows if "reward/mean" in row]
    return statistics.fmean(rewards) if rewards else None


def memory_rule(limit_gib: float, name: str) -> Rule:
    """Holds if more than 95 % of what is there was needed at some time."""

    def evidence(seen: History) -> str | None:
        peak = seen.steps[-1].get(name, 0.0)
        return f"{peak:.3g} of {limit_gib:.3g} GiB were in use ({name})" if peak > 0.95 * limit_gib else None

    return Rule(
        "memory_near_its_limit",
        evidence,
        "Lower trainer.max_tokens_per_microbatch, set trainer.gradient_checkpointing=true, or shard over more "
        "ranks (trainer.placement.policy_num_gpus_per_node).",
    )


NO_DIFFERENCE = Rule(
    "no_difference",
    holds_in_every_step(
        "reward/zero_variance_groups", 5, lambda share: share >= 0.95, "{:.0%} of the prompts had equal rewards"
    ),
    "Nothing is learnt from them. Look at a row with `skyrl-train env try`; take easier or harder prompts, more "
    "samples (generator.n_samples_per_prompt), or draw until they differ "
    "(trainer.algorithm.dynamic_sampling.type=filter).",
)
"""For algorithms that compare the samples of a prompt."""


def async_rules(max_staleness_steps: int) -> tuple[Rule, ...]:
    """For asynchronous training: in synchronous training one side waits for the other by design.

    Where rollouts run ahead, steps come in bursts: a slow one, then as many fast ones as rollouts are ahead. So each of
    several bursts is looked at as a whole, up to a staleness of 20.
    """
    burst = min(max_staleness_steps + 1, MAX_HISTORY_STEPS // 3)
    bursts = 3 if burst > 1 else 5
    idle = holds_in_every_window("async/engines_idle", burst, bursts, 0.6, "engines had no request {:.0%} of the time")

    def engines_starved(seen: History) -> str | None:
        """While there is something left to sample: in a run's last steps what runs ahead has ended."""
        end = seen.total_steps - max_staleness_steps if seen.total_steps else math.inf
        return idle(replace(seen, steps=[row for row in seen.steps if row["step"] < end]))

    return (
        Rule(
            "trainer_starved",
            holds_in_every_window(
                "async/trainer_idle", burst, bursts, 0.4, "the trainer waited for rollouts {:.0%} of the time"
            ),
            "Give engines more slots (generator.num_inference_engines), or let them run further ahead "
            "(trainer.fully_async.max_staleness_steps); `skyrl-train plan --probe` compares divisions of the slots.",
        ),
        Rule(
            "engines_starved",
            engines_starved,
            "Give the trainer some of their slots (trainer.placement.policy_num_gpus_per_node), or let them run "
            "further ahead (trainer.fully_async.max_staleness_steps); `skyrl-train plan --probe` compares "
            "divisions of the slots.",
        ),
    )


def truncation_advice(end_of_turn: str = "") -> str:
    """Return what to change if most responses reach the length limit.

    `end_of_turn`: the token that ends an answer; empty if it is not known.
    """
    token = f", {end_of_turn!r}" if end_of_turn else ""
    return (
        f"Answers end at the end-of-turn token of the chat template{token}. If the model does not write it, teach it "
        "to with SFT on the same template, or choose a template that the model knows (generator.chat_template). If its "
        "answers are complete but long, raise generator.sampling_params.max_generate_length or set "
        "trainer.algorithm.overlong_buffer."
    )


def truncated_rule(end_of_turn: str = "") -> Rule:
    """Return the rule about responses that reach the length limit; `end_of_turn` as in `truncation_advice`."""
    return Rule(
        "truncated",
        holds_in_every_step(
            "response/truncated_fraction", 3, lambda share: share >= 0.5, "{:.0%} of the responses were cut"
        ),
        truncation_advice(end_of_turn),
    )


RULES = (
    truncated_rule(),
    Rule(
        "format_never_met",
        holds_in_every_step(
            "environment/no_answer", 5, lambda share: share >= 0.95, "{:.0%} of the responses had no answer to score"
        ),
        "Show the form in the prompt, or teach it first with `skyrl_train.entrypoints.main_sft`.",
    ),
    Rule(
        "entropy_collapse",
        entropy_collapse,
        "Add trainer.algorithm.use_entropy_loss=true, raise trainer.algorithm.eps_clip_high, or lower "
        "trainer.policy.optimizer_config.lr.",
    ),
    Rule(
        "kl_runs_away",
        kl_runs_away,
        "Raise trainer.algorithm.kl_loss_coef or lower trainer.policy.optimizer_config.lr.",
    ),
    Rule(
        "engine_and_trainer_disagree",
        engine_and_trainer_disagree,
        "Engine and trainer do not compute the same policy. Compare generator.model_dtype with trainer.bf16, prove "
        "what engines hold with generator.weight_sync_check=probe, or correct for it: "
        "trainer.algorithm.off_policy_correction.tis_ratio_type=token.",
    ),
    Rule(
        "episodes_fail",
        episodes_fail,
        "The warnings above name environment and row; try it with `skyrl-train env try`.",
    ),
    Rule(
        "long_answers_are_cut",
        long_answers_are_cut,
        "What is learnt lacks long answers. Raise trainer.timeouts.rollout_s, or lower "
        "generator.sampling_params.max_generate_length.",
    ),
    Rule(
        "evaluation_falls",
        evaluation_falls,
        "The reward is met without what the evaluation asks for. Read samples.jsonl; raise "
        "trainer.algorithm.kl_loss_coef, or stop here: the best checkpoint is that of the best evaluation.",
    ),
)
"""For every run."""
