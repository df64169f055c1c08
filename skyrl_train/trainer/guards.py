"""Guards that stop a run whose metrics show that training makes no progress or diverges."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping

from skyrl_train.algorithms.advantages import ComparisonScope
from skyrl_train.config.schema import GuardsConfig
from skyrl_train.errors import GuardTriggered
from skyrl_train.report.diagnosis import RATIOS, truncation_advice
from skyrl_train.trainer.checkpoint_manager import SKIPPED_SUFFIX

_EQUAL: Mapping[ComparisonScope, tuple[str, float, str]] = {
    ComparisonScope.GROUP: ("reward/zero_variance_groups", 1.0, "samples of a prompt had the same reward"),
    ComparisonScope.STEP: ("reward/std", 0.0, "samples of a step had the same reward"),
}
"""Per scope: the metric that shows that all compared rewards are equal, its value in that case, and a description."""
_log = logging.getLogger(__name__)


class Guards:
    """Checks the metrics of every step against the limits of the guards that trainer.guards.stop names.

    The diagnosis warns about the same symptoms without stopping the run. Only skipped updates are logged here.
    """

    def __init__(self, settings: GuardsConfig, comparison_scope: ComparisonScope | None, end_of_turn: str = ""):
        """Create guards with these limits.

        Args:
            settings: The section trainer.guards.
            comparison_scope: The samples whose rewards an update compares: "group" or "step". None if the update reads
                no rewards; the guard equal_rewards is then off.
            end_of_turn: Text of the token that ends an answer, for messages.
        """
        self._settings = settings
        self._end_of_turn = end_of_turn
        self._comparison_scope = comparison_scope
        self._equal_steps = 0
        self._skipping_steps = 0
        self._next_skip_warning = 1

    def state_dict(self) -> dict[str, int]:
        """Return the number of consecutive steps with equal rewards."""
        return {"equal_steps": self._equal_steps}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue counting from the result of `state_dict`. Raises KeyError if "equal_steps" is missing."""
        self._equal_steps = state["equal_steps"]

    def check(self, metrics: Mapping[str, float], step: int) -> None:
        """Check the metrics of a finished step. Call it once per step, in ascending order.

        Args:
            metrics: The metrics of the step, by name.
            step: The number of the step, for messages.

        Raises:
            GuardTriggered: A limit is exceeded and trainer.guards.stop names the guard.
        """
        self._warn_about_skipped_updates(metrics, step)
        for guard, text in self._exceeded_limits(metrics):
            if guard in self._settings.stop:
                raise GuardTriggered(f"step {step}: {text} trainer.guards.stop names {guard}.")

    def _warn_about_skipped_updates(self, metrics: Mapping[str, float], step: int) -> None:
        """Warn at the 1st, 10th, 100th, ... step with skipped updates, because a few are harmless."""
        models = [name for name, share in metrics.items() if name.endswith(SKIPPED_SUFFIX) and share > 0]
        self._skipping_steps += bool(models)
        if not models or self._skipping_steps < self._next_skip_warning:
            return
        self._next_skip_warning *= 10
        shares = " and ".join(
            f"{metrics[name]:.0%} of the {name.removesuffix(SKIPPED_SUFFIX)}'s updates" for name in models
        )
        _log.warning(
            "step %d: %s were skipped because their gradient was not finite. Steps with skipped updates since the run "
            "started: %d. Lower the learning rate, or look for NaN in data, rewards and log-probs. The run ends after "
            "%d consecutive skipped updates (trainer.guards.max_skipped_updates).",
            step,
            shares,
            self._skipping_steps,
            self._settings.max_skipped_updates,
        )

    def _exceeded_limits(self, metrics: Mapping[str, float]) -> Iterator[tuple[str, str]]:
        """Yield (guard, message) for each limit that is exceeded."""
        settings = self._settings
        yield from self._equal_rewards(metrics)
        for metric, ratio in RATIOS.items():
            if evidence := ratio.evidence(metrics, metric, settings.max_ratio):
                yield "ratio", f"{evidence}. {ratio.advice}"
        truncated = metrics.get("response/truncated_fraction", 0.0)
        if settings.max_cut_fraction is not None and truncated > settings.max_cut_fraction:
            yield (
                "cut",
                f"{truncated:.0%} of the responses reached the length limit (trainer.guards.max_cut_fraction="
                f"{settings.max_cut_fraction:g}). {truncation_advice(self._end_of_turn)}",
            )

    def _equal_rewards(self, metrics: Mapping[str, float]) -> Iterator[tuple[str, str]]:
        if self._comparison_scope is None:
            return
        metric, value, description = _EQUAL[self._comparison_scope]
        self._equal_steps = self._equal_steps + 1 if metrics.get(metric) == value else 0
        max_steps = self._settings.equal_rewards_steps
        if max_steps is not None and self._equal_steps >= max_steps:
            yield (
                "equal_rewards",
                f"all {description} for {self._equal_steps} steps (trainer.guards.equal_rewards_steps={max_steps}): no "
                "answer is better than another, so the rewards give no training signal. Test the environment with "
                "`skyrl-train env try`, or use easier prompts or more samples per prompt.",
            )
