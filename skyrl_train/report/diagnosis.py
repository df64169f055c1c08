"""Rules that detect unhealthy runs from their metrics, and report the evidence and the configuration key to change.

When a rule begins to hold, it logs one warning. `diagnosis.json` in the run's folder records the steps at which it
held. No rule stops a run: `trainer.guards` can do that.
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
"""Maximum number of latest steps that a rule sees. It sees all evaluations, because they are rare."""
STEP_TIME_METRIC = "timing/step_s"
"""Metric that the row of every training step has. The row of an evaluation alone lacks it."""
_log = logging.getLogger(__name__)

Rows = Sequence[Mapping[str, float]]
"""Metrics of consecutive steps, the latest last."""


@dataclass(frozen=True)
class Evaluation:
    """An evaluation of a run, with the training reward at that time."""

    step: int
    """Step after which the run was evaluated; 0 before the first step."""
    score: float
    reward: float | None
    """Mean of reward/mean over the five steps up to the evaluation, or over the first five steps if `step` is 0."""


@dataclass
class History:
    """The part of a run's metrics that rules read."""

    total_steps: int = 0
    """Number of steps of the run; 0 if it is not known."""
    first_steps: list[Mapping[str, float]] = field(default_factory=list)
    """Metrics of the run's first five steps."""
    steps: list[Mapping[str, float]] = field(default_factory=list)
    """Metrics of the last MAX_HISTORY_STEPS steps, the latest last."""
    evaluations: list[Evaluation] = field(default_factory=list)
    """All evaluations, the latest last."""

    def add(self, metrics: Mapping[str, float], step: int) -> None:
        """Add the metrics of a step, which replace those of the same step and of later ones."""
        if STEP_TIME_METRIC in metrics:
            row = {"step": step, **metrics}
            self.steps = [*_before(step, self.steps)[1 - MAX_HISTORY_STEPS :], row]
            if len(earlier := _before(step, self.first_steps)) < 5:
                self.first_steps = [*earlier, row]
                if self.evaluations and self.evaluations[0].step == 0:
                    self.evaluations[0] = replace(self.evaluations[0], reward=_mean_reward(self.first_steps))
        if (score := _score(metrics)) is not None and math.isfinite(score):
            earlier_evaluations = [evaluation for evaluation in self.evaluations if evaluation.step < step]
            self.evaluations = [*earlier_evaluations, Evaluation(step, score, _mean_reward(self.steps[-5:]))]


def _before(step: int, rows: Rows) -> list[Mapping[str, float]]:
    return [row for row in rows if row["step"] < step]


Evidence = Callable[[History], str | None]
"""Function that returns the evidence of a rule as text, or None if the rule does not hold."""


@dataclass(frozen=True)
class Rule:
    """A symptom of an unhealthy run."""

    name: str
    evidence: Evidence
    advice: str
    """Recommended change, with its configuration key."""


@dataclass
class Finding:
    """A period in which a rule holds or held."""

    rule: str
    since: int
    """First step at which the rule held."""
    until: int | None
    """Last step at which the rule held; None while it still holds."""
    evidence: str
    advice: str


class Diagnosis:
    """A tracker that applies rules to the metrics of every step, logs new findings and keeps them in diagnosis.json."""

    def __init__(self, run_dir: Path, rules: Sequence[Rule]):
        """Apply `rules` to the run in the folder `run_dir`."""
        self._folder = Path(run_dir)
        self._rules = rules
        self._history = History()
        self.findings: list[Finding] = []

    def begin(self, step: int, total_steps: int) -> None:
        """Load metrics and findings up to `step` from the run's folder, and drop the findings of later steps.

        Args:
            step: The last finished step; 0 for a new run, which reads nothing.
            total_steps: Number of steps of the run; 0 if it is not known.

        Raises:
            OSError: A file of the run's folder cannot be read or written.
        """
        self._history, self.findings = History(total_steps), []
        if step:
            for row in read_metrics(self._folder / METRICS_FILE):
                if row["step"] <= step:
                    self._history.add(_with_nan(row), int(row["step"]))
            self.findings = list(_read_findings(self._folder / DIAGNOSIS_FILE, step))
        self._write()

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Apply the rules after a step, and log a warning for each new finding. Rows of evaluations only are kept."""
        self._history.add(metrics, step)
        if STEP_TIME_METRIC not in metrics:
            return
        before = json.dumps([asdict(finding) for finding in self.findings])
        for finding in update_findings(self._rules, self._history, self.findings, step):
            name = finding.rule.replace("_", " ")
            _log.warning("step %d: %s: %s. %s", step, name, finding.evidence, finding.advice)
        if json.dumps([asdict(finding) for finding in self.findings]) != before:
            self._write()

    def samples(self, rows: Sequence[SampleRow], step: int) -> None:
        """Do nothing: rules read metrics only."""

    def close(self) -> None:
        """Do nothing: diagnosis.json is always up to date."""

    def _write(self) -> None:
        findings = [asdict(finding) for finding in self.findings]
        text = json.dumps({"total_steps": self._history.total_steps, "findings": findings}, indent=1)
        try:
            atomic_write_text(self._folder / DIAGNOSIS_FILE, text + "\n")
        except OSError as error:
            _log.warning("%s cannot be written (%s).", self._folder / DIAGNOSIS_FILE, error)


def update_findings(rules: Sequence[Rule], history: History, findings: list[Finding], step: int) -> list[Finding]:
    """Apply rules after a step: end findings that no longer hold, and append new ones.

    Args:
        rules: Rules to apply.
        history: Metrics up to `step`.
        findings: Findings of earlier steps. Changed in place.
        step: The latest step of the history.

    Returns:
        The new findings.
    """
    active = {finding.rule: finding for finding in findings if finding.until is None}
    new = []
    for rule in rules:
        evidence, finding = rule.evidence(history), active.get(rule.name)
        if evidence is None:
            if finding is not None:
                finding.until = step - 1
        elif finding is None:
            new.append(Finding(rule.name, step, None, evidence, rule.advice))
    findings += new
    return new


def diagnose(rows: Iterable[Mapping[str, Any]], rules: Sequence[Rule], total_steps: int = 0) -> list[Finding]:
    """Return the findings that a diagnosis with these rules makes during a run.

    Args:
        rows: Lines of the run's metrics.jsonl, as `read_metrics` returns them.
        rules: Rules to apply.
        total_steps: Number of steps of the run; 0 if it is not known.
    """
    history, findings = History(total_steps), list[Finding]()
    for row in rows:
        history.add(_with_nan(row), int(row["step"]))
        if STEP_TIME_METRIC in row:
            update_findings(rules, history, findings, int(row["step"]))
    return findings


def _with_nan(row: Mapping[str, Any]) -> Mapping[str, float]:
    """Return a line of metrics.jsonl with NaN for None, which stands for a number that is not finite."""
    return {name: float("nan") if value is None else value for name, value in row.items()}


def _read_findings(file: Path, step: int) -> Iterator[Finding]:
    """Yield the findings of earlier attempts up to `step`. Skip findings that cannot be read."""
    try:
        findings = [Finding(**finding) for finding in read_json_object(file).get("findings", [])]
    except TypeError:
        return
    for finding in findings:
        if is_step(finding.since) and (finding.until is None or is_step(finding.until)) and finding.since <= step:
            if finding.until is not None and finding.until >= step:
                finding.until = None  # it ended in a step that is repeated
            yield finding


# -- rules -------------------------------------------------------------------------------------------------------------


def values(rows: Rows, name: str, steps: int) -> list[float] | None:
    """Return the values of a metric in the last rows, the latest last.

    Args:
        rows: Metrics of consecutive steps.
        name: Name of the metric.
        steps: Number of rows.

    Returns:
        The values; None if there are fewer rows, or one of them lacks the metric.
    """
    found = [row[name] for row in rows[-steps:] if name in row]
    return found if len(found) == steps else None


def holds_in_every_step(name: str, steps: int, holds: Callable[[float], bool], text: str) -> Evidence:
    """Return a rule's evidence function that looks at each of the last steps.

    An evidence function takes the history of a run. It returns the evidence as a text, or None if the rule does not
    hold. This one appends the number of steps and the name of the metric to `text`.

    Args:
        name: Metric to look at.
        steps: Number of latest steps. The rule does not hold if one of them lacks the metric.
        holds: Predicate on a value of the metric. The rule holds if it is true for all values.
        text: Format string of the evidence. Its placeholder, such as `{:.0%}`, shows the mean of the values.
    """

    def evidence(history: History) -> str | None:
        recent = values(history.steps, name, steps)
        if recent is None or not all(map(holds, recent)):
            return None
        return f"{text.format(statistics.fmean(recent))} in the last {steps} steps ({name})"

    return evidence


def holds_in_every_window(name: str, window: int, count: int, above: float, text: str) -> Evidence:
    """Return a rule's evidence function that looks at the latest windows of consecutive steps.

    An evidence function takes the history of a run. It returns the evidence as a text, or None if the rule does not
    hold. This one appends the number of steps and the name of the metric to `text`.

    Args:
        name: Metric to look at: a fraction of the time of a step. Steps that ended early lack it and are skipped.
        window: Number of steps in a window.
        count: Number of latest windows. The rule does not hold if there are fewer.
        above: Threshold for the mean of a window, weighted by the time of its steps. The rule holds if all windows
            exceed it.
        text: Format string of the evidence. Its placeholder, such as `{:.0%}`, shows the weighted mean over all
            windows.
    """

    def evidence(history: History) -> str | None:
        rows = [row for row in history.steps if name in row and STEP_TIME_METRIC in row][-window * count :]
        if len(rows) < window * count:
            return None
        means = [_time_weighted_mean(name, rows[begin : begin + window]) for begin in range(0, len(rows), window)]
        if not all(mean > above for mean in means):
            return None
        return f"{text.format(_time_weighted_mean(name, rows))} in the last {len(rows)} steps ({name})"

    return evidence


def _time_weighted_mean(name: str, rows: Rows) -> float:
    total_s = sum(row[STEP_TIME_METRIC] for row in rows)
    return sum(row[name] * row[STEP_TIME_METRIC] for row in rows) / max(1e-9, total_s)


def entropy_collapse(history: History) -> str | None:
    """Return a text with the numbers if the policy's entropy has collapsed, otherwise None.

    It has if the mean policy/entropy of the last three steps is below 0.02 nats and below a tenth of the mean of the
    first five. Without these values, or before step 10, the result is None.
    """
    recent = values(history.steps, "policy/entropy", 3)
    first = [row["policy/entropy"] for row in history.first_steps if math.isfinite(row.get("policy/entropy", math.nan))]
    if recent is None or len(history.steps) < 10 or not first:
        return None
    before, after = statistics.fmean(first), statistics.fmean(recent)
    if not (after < 0.02 and after < 0.1 * before):
        return None
    return f"the policy's entropy fell from {before:.3g} to {after:.3g} nats (policy/entropy)"


def kl_runs_away(history: History) -> str | None:
    """Return a text with the numbers if the policy moves ever further from the reference model, otherwise None.

    The policy does so if policy/kl exceeds 1 nat per token in each of the last three steps, and its mean over them is
    more than 20 % above that of the three steps before.
    """
    recent = values(history.steps, "policy/kl", 6)
    if recent is None or not min(recent[-3:]) > 1.0:
        return None
    before, after = statistics.fmean(recent[:3]), statistics.fmean(recent[-3:])
    if not after > 1.2 * before:
        return None
    return f"the policy is {after:.3g} nats per token away from its reference model, and still moving away (policy/kl)"


def engine_and_trainer_disagree(history: History) -> str | None:
    """Return evidence if engine and trainer compute different log-probs for the same tokens in three steps.

    The mean ratio of their probabilities shows it, or their KL divergence. The KL divergence counts only if samples
    come from the newest weights; otherwise it also measures the training since then.
    """
    ratio = _ratio(history)
    if ratio is not None or any(row.get("rollouts/max_staleness", 0.0) > 0 for row in history.steps[-3:]):
        return ratio
    return _distance(history)


_ratio = holds_in_every_step(
    "mismatch/ratio_mean", 3, lambda ratio: not 0.9 <= ratio <= 1.1, "the mean ratio was {:.3g}"
)
_distance = holds_in_every_step("mismatch/kl", 3, lambda kl: not kl <= 0.02, "they were {:.3g} nats per token apart")


def gradient_rule(uses_group_baseline: bool) -> Rule:
    """Return the rule about gradient spikes.

    It holds if two of the last ten gradient norms are not finite, or more than ten times the median of the earlier
    ones. It needs 20 steps.

    Args:
        uses_group_baseline: True if rewards are compared within groups. Then steps whose groups all have equal rewards
            do not count: compared with their tiny gradients, every other gradient is large.
    """

    def counts(row: Mapping[str, float]) -> bool:
        has_no_signal = uses_group_baseline and row.get("reward/zero_variance_groups", 0.0) >= 1.0
        return not has_no_signal or not math.isfinite(row["policy/grad_norm"])

    def evidence(history: History) -> str | None:
        norms = [row["policy/grad_norm"] for row in history.steps if "policy/grad_norm" in row and counts(row)]
        if len(norms) < 20:
            return None
        median = statistics.median([norm for norm in norms[:-10] if math.isfinite(norm)] or [0.0])
        spikes = [norm for norm in norms[-10:] if not math.isfinite(norm) or 0 < 10 * median < norm]
        if len(spikes) < 2:
            return None
        return (
            f"{len(spikes)} of the last 10 gradients were not finite or over ten times the median norm of {median:.3g} "
            "(policy/grad_norm)"
        )

    return Rule(
        "gradient_spikes",
        evidence,
        "Lower trainer.policy.optimizer_config.max_grad_norm or .lr; `trainer.dump_data_batch=true` saves the batches "
        "for inspection.",
    )


_DEADLINE_FAILURES = "rollouts/failed/deadline"
"""Metric: number of episodes that took longer than trainer.timeouts.rollout_s."""


def episodes_fail(history: History) -> str | None:
    """Return a text with the numbers if over 5 % of the episodes failed in each of the last three steps, otherwise
    None.

    The text names the most frequent kind of failure. Episodes that took longer than trainer.timeouts.rollout_s do not
    count.
    """
    rows = history.steps
    failed, total = values(rows, "rollouts/failed", 3), values(rows, "rollouts/trajectories", 3)
    if failed is None or total is None:
        return None
    failed = [number - row.get(_DEADLINE_FAILURES, 0.0) for number, row in zip(failed, rows[-3:], strict=True)]
    if not all(failures > 0.05 * episodes for failures, episodes in zip(failed, total, strict=True)):
        return None
    kinds = {name for row in rows[-3:] for name in row if name.startswith("rollouts/failed/")} - {_DEADLINE_FAILURES}
    kind = max(kinds, key=lambda kind: sum(row.get(kind, 0.0) for row in rows[-3:]), default="rollouts/failed")
    share = sum(failed) / max(1.0, sum(total))
    return f"{share:.0%} of the episodes of the last 3 steps failed, mostly as {kind.removeprefix('rollouts/failed/')}"


def long_answers_are_cut(history: History) -> str | None:
    """Return a text with their number if episodes exceeded trainer.timeouts.rollout_s in each of the last three steps.

    Otherwise return None.
    """
    recent = values(history.steps, _DEADLINE_FAILURES, 3)
    if recent is None or not min(recent) > 0:
        return None
    return (
        f"{sum(recent):.0f} episodes of the last 3 steps exceeded trainer.timeouts.rollout_s and are masked "
        f"({_DEADLINE_FAILURES})"
    )


def evaluation_falls(history: History) -> str | None:
    """Return a text with the numbers if evaluations get worse while the training reward rises, otherwise None.

    Evaluations get worse if the last two are below the best earlier one. The training reward rises if it is higher at
    the last evaluation than at the best one. A fall is at least 0.05 and a rise at least 0.02, or 5 % and 2 % of values
    above 1. The best of many noisy evaluations is partly luck. So from ten evaluations on, a fall must also exceed five
    standard deviations of the noise, which is estimated from the second differences of the scores.
    """
    if len(history.evaluations) < 3:
        return None
    *earlier, last_but_one, last = history.evaluations
    best = max(earlier, key=lambda evaluation: (evaluation.score, evaluation.step))
    scores = [evaluation.score for evaluation in earlier]
    second_differences = [abs(a - 2 * b + c) for a, b, c in zip(scores, scores[1:], scores[2:], strict=False)]
    # For normally distributed noise the mean absolute second difference is 1.95 standard deviations.
    noise = 2.5 * statistics.fmean(second_differences) if len(scores) >= 8 else 0.0
    if not max(last_but_one.score, last.score) < best.score - max(noise, 0.05 * max(1.0, abs(best.score))):
        return None
    before, after = best.reward, last.reward
    if before is None or after is None or not after > before + 0.02 * max(1.0, abs(before)):
        return None
    return (
        f"the evaluation score fell from {best.score:.3g} to {last.score:.3g} while the training reward rose from "
        f"{before:.3g} to {after:.3g}"
    )


def _score(row: Mapping[str, float]) -> float | None:
    if "eval/all/avg_score" in row:
        return row["eval/all/avg_score"]
    return next(
        (value for name, value in row.items() if name.startswith("eval/") and name.endswith("/avg_score")), None
    )


def _mean_reward(rows: Rows) -> float | None:
    rewards = [row["reward/mean"] for row in rows if "reward/mean" in row]
    return statistics.fmean(rewards) if rewards else None


def memory_rule(limit_gib: float, name: str) -> Rule:
    """Return the rule about memory: it holds if the peak exceeds 95 % of the limit.

    Args:
        limit_gib: Available memory in GiB.
        name: Metric with the peak memory in GiB.
    """

    def evidence(history: History) -> str | None:
        peak = history.steps[-1].get(name, 0.0)
        return f"{peak:.3g} of {limit_gib:.3g} GiB were in use ({name})" if peak > 0.95 * limit_gib else None

    return Rule(
        "memory_near_its_limit",
        evidence,
        "Lower trainer.max_tokens_per_microbatch, set trainer.gradient_checkpointing=true, or shard over more "
        "ranks (trainer.placement.policy_num_gpus_per_node).",
    )


ENV_TRY = "`skyrl-train env try`"
"""Command in the advice of rules. `run_resources.diagnosis_rules` adds the arguments of the run."""
NO_DIFFERENCE_IN_STEP = Rule(
    "no_difference",
    holds_in_every_step("reward/std", 5, lambda std: std == 0.0, "all samples of a step had the same reward"),
    f"They give no training signal. Try a row with {ENV_TRY}, or use easier or harder prompts.",
)
"""Rule for algorithms that compare all samples of a step."""
NO_DIFFERENCE = Rule(
    "no_difference",
    holds_in_every_step(
        "reward/zero_variance_groups", 5, lambda share: share >= 0.95, "{:.0%} of the prompts had equal rewards"
    ),
    f"They give no training signal. Try a row with {ENV_TRY}. Use easier or harder prompts or more samples "
    "per prompt (generator.n_samples_per_prompt), or sample until rewards differ "
    "(trainer.algorithm.dynamic_sampling.type=filter).",
)
"""Rule for algorithms that compare the samples of a prompt."""


def async_rules(max_staleness_steps: int) -> tuple[Rule, ...]:
    """Return the rules for asynchronous training, about a trainer or engines that are idle for too long.

    In synchronous training one side always waits for the other. If rollouts run ahead, steps come in bursts: a slow
    step, then `max_staleness_steps` fast ones. The rules look at several bursts, each as a whole, up to a staleness
    of 20.
    """
    burst = min(max_staleness_steps + 1, MAX_HISTORY_STEPS // 3)
    bursts = 3 if burst > 1 else 5
    idle = holds_in_every_window("async/engines_idle", burst, bursts, 0.6, "engines had no request {:.0%} of the time")

    def engines_starved(history: History) -> str | None:
        # In a run's last steps there is nothing left to sample.
        end = history.total_steps - max_staleness_steps if history.total_steps else math.inf
        return idle(replace(history, steps=[row for row in history.steps if row["step"] < end]))

    return (
        Rule(
            "trainer_starved",
            holds_in_every_window(
                "async/trainer_idle", burst, bursts, 0.4, "the trainer waited for rollouts {:.0%} of the time"
            ),
            "Give the engines more GPUs (generator.num_inference_engines), or let rollouts run further ahead "
            "(trainer.fully_async.max_staleness_steps). `skyrl-train plan --probe` compares splits of the GPUs.",
        ),
        Rule(
            "engines_starved",
            engines_starved,
            "Give some of their GPUs to the trainer (trainer.placement.policy_num_gpus_per_node), or let rollouts run "
            "further ahead (trainer.fully_async.max_staleness_steps). `skyrl-train plan --probe` compares splits of "
            "the GPUs.",
        ),
    )


@dataclass(frozen=True)
class RatioSymptom:
    """A probability ratio that is too large for a token."""

    description: str
    advice: str

    def evidence(self, metrics: Mapping[str, float], name: str, max_ratio: float | None) -> str | None:
        """Return a text with the ratio if it exceeds the limit or is NaN, otherwise None.

        Args:
            metrics: Metrics of a step.
            name: Metric with the largest ratio of the step.
            max_ratio: The limit, trainer.guards.max_ratio; None if there is none.
        """
        ratio = metrics.get(name, 0.0)
        if max_ratio is None or ratio <= max_ratio:
            return None
        return f"{self.description} was {ratio:.3g} ({name}, trainer.guards.max_ratio={max_ratio:g})"


RATIOS = {
    "policy/ratio_max": RatioSymptom(
        "the ratio of a token's probability during the update to its probability before the step",
        "The policy changes a lot in one step. Lower trainer.policy.optimizer_config.lr or "
        "trainer.update_epochs_per_batch.",
    ),
    "mismatch/ratio_max": RatioSymptom(
        "the ratio of a sampled token's probability in the trainer to its probability in the engine",
        "Trainer and engine compute different policies. Compare generator.model_dtype with trainer.bf16, verify the "
        "engines' weights with generator.weight_sync_check=probe, and exclude such tokens from the loss with "
        "trainer.algorithm.off_policy_correction.",
    ),
}
"""Metrics of largest probability ratios. An update of a single optimizer step starts at the policy of the rollouts, so
its own ratio is 1 and only the engine's is useful."""


def ratio_rules(max_ratio: float) -> tuple[Rule, ...]:
    """Return the rules about probability ratios above trainer.guards.max_ratio in the last step."""

    def evidence(name: str) -> Evidence:
        return lambda history: RATIOS[name].evidence(history.steps[-1], name, max_ratio)

    names = {"policy/ratio_max": "large_policy_ratio", "mismatch/ratio_max": "large_engine_ratio"}
    return tuple(Rule(rule, evidence(name), RATIOS[name].advice) for name, rule in names.items())


def truncation_advice(end_of_turn: str = "") -> str:
    """Return advice for runs in which most responses reach the length limit.

    Args:
        end_of_turn: Token that ends a response; empty if it is not known.
    """
    token = f", {end_of_turn!r}" if end_of_turn else ""
    return (
        f"Responses end at the end-of-turn token of the chat template{token}. If the model does not sample it, train "
        "it with SFT on the same template, or choose a template that the model knows (generator.chat_template). If "
        "responses are complete but long, raise generator.sampling_params.max_generate_length or set "
        "trainer.algorithm.overlong_buffer."
    )


def truncated_rule(end_of_turn: str = "") -> Rule:
    """Return the rule about responses that reach the length limit.

    Args:
        end_of_turn: Token that ends a response, for the advice; empty if it is not known.
    """
    return Rule(
        "truncated",
        holds_in_every_step(
            "response/truncated_fraction", 3, lambda share: share >= 0.5, "{:.0%} of the responses were truncated"
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
        "Show the answer format in the prompt, or train it first with `skyrl_train.entrypoints.main_sft`.",
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
        "Engine and trainer do not compute the same policy. Compare generator.model_dtype with trainer.bf16, verify "
        "the engines' weights with generator.weight_sync_check=probe, or correct the mismatch with "
        "trainer.algorithm.off_policy_correction.tis_ratio_type=token.",
    ),
    Rule(
        "episodes_fail",
        episodes_fail,
        "The warnings above name the environment and the row, with a command that tries them.",
    ),
    Rule(
        "long_answers_are_cut",
        long_answers_are_cut,
        "Long responses are missing from the training data. Raise trainer.timeouts.rollout_s, or lower "
        "generator.sampling_params.max_generate_length.",
    ),
    Rule(
        "evaluation_falls",
        evaluation_falls,
        "The policy may exploit the reward. Read samples.jsonl, raise trainer.algorithm.kl_loss_coef, or stop the run "
        "and use the checkpoint of the best evaluation.",
    ),
)
"""Rules for every run."""
