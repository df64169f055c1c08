"""Says, or stops, when a run goes on without learning what it should."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping

from skyrl_train.algorithms.advantages import ComparisonScope
from skyrl_train.config.schema import GuardsConfig
from skyrl_train.errors import GuardTriggered
from skyrl_train.report.diagnosis import truncation_advice
from skyrl_train.trainer.checkpoint_manager import SKIPPED_SUFFIX

_EQUAL: Mapping[ComparisonScope, tuple[str, float, str]] = {
    ComparisonScope.GROUP: ("reward/zero_variance_groups", 1.0, "samples of a prompt had the same reward"),
    ComparisonScope.STEP: ("reward/std", 0.0, "samples of a step had the same reward"),
}
"""The metric that says that all rewards compared are equal, its value then, and what to call that."""
_RATIOS = {
    "policy/ratio_max": (
        "a token's probability in an update, over that before the step,",
        "the policy moves far in one step. Lower the learning rate or the updates per step.",
    ),
    "mismatch/ratio_max": (
        "a sampled token's probability in the trainer, over that in the engine,",
        "they disagree about the policy. Compare generator.model_dtype with trainer.bf16, prove what engines hold with "
        "generator.weight_sync_check=probe, and keep such tokens out of the loss by "
        "trainer.algorithm.off_policy_correction.",
    ),
}
"""The largest ratios between two policies: what they are, and what it means if they explode. An update that is one
optimizer step starts at the policy from before it, so its own ratio is 1 and only the engine's tells anything."""
_log = logging.getLogger(__name__)


class Guards:
    """Looks at the metrics of every step. A guard warns when its limit is first passed, and again after a recovery."""

    def __init__(self, settings: GuardsConfig, comparison_scope: ComparisonScope | None, end_of_turn: str = ""):
        """Create guards with these limits.

        Args:
            settings: The section trainer.guards.
            compared: Among which samples an update compares rewards; None if it reads none.
            end_of_turn: The token that ends an answer, for messages.
        """
        self._settings = settings
        self._end_of_turn = end_of_turn
        self._comparison_scope = comparison_scope
        self._equal_steps = 0
        self._warned: set[str] = set()
        self._skipping_steps = 0
        self._next_skip_warning = 1

    def state_dict(self) -> dict[str, int]:
        """What a resumed run goes on counting from. What was said is said again: its reader may be another."""
        return {"equal_steps": self._equal_steps}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self._equal_steps = state["equal_steps"]

    def check(self, metrics: Mapping[str, float], step: int) -> None:
        """Raises Unhealthy for the first guard in trainer.guards.stop whose limit is passed."""
        self._warn_about_skipped_updates(metrics, step)
        passed = set()
        for guard, metric, text in self._passed_limits(metrics):
            message = f"step {step}: {text}"
            if guard in self._settings.stop:
                raise GuardTriggered(f"{message} trainer.guards.stop names {guard}.")
            if metric not in self._warned:
                _log.warning("%s", message)
            passed.add(metric)
        self._warned = passed

    def _warn_about_skipped_updates(self, metrics: Mapping[str, float], step: int) -> None:
        """Warn at the 1st, 10th, 100th, ... step with skipped updates: a few do no harm, and a run may have many."""
        models = [name for name, share in metrics.items() if name.endswith(SKIPPED_SUFFIX) and share > 0]
        self._skipping_steps += bool(models)
        if not models or self._skipping_steps < self._next_skip_warning:
            return
        self._next_skip_warning *= 10
        shares = " and ".join(
            f"{metrics[name]:.0%} of the {name.removesuffix(SKIPPED_SUFFIX)}'s updates" for name in models
        )
        _log.warning(
            "step %d: %s were skipped, as their gradient was not finite; steps with such updates since the run was "
            "started: %d. Lower the learning rate, or look for NaN in data, rewards and log-probs. %d in a row end the "
            "run (trainer.guards.max_skipped_updates).",
            step,
            shares,
            self._skipping_steps,
            self._settings.max_skipped_updates,
        )

    def _passed_limits(self, metrics: Mapping[str, float]) -> Iterator[tuple[str, str, str]]:
        """(guard, metric, what to say) of each limit that is passed."""
        settings = self._settings
        yield from self._equal_rewards(metrics)
        for metric, (what, advice) in _RATIOS.items():
            ratio = metrics.get(metric, 0.0)
            if settings.max_ratio is not None and not ratio <= settings.max_ratio:
                limit = f"{metric}, trainer.guards.max_ratio={settings.max_ratio:g}"
                yield "ratio", metric, f"{what} was {ratio:.3g} ({limit}): {advice}"
        cut = metrics.get("response/truncated_fraction", 0.0)
        if settings.max_cut_fraction is not None and cut > settings.max_cut_fraction:
            yield (
                "cut",
                "response/truncated_fraction",
                f"{cut:.0%} of the responses reached the length limit (trainer.guards.max_cut_fraction="
                f"{settings.max_cut_fraction:g}). {truncation_advice(self._end_of_turn)}",
            )

    def _equal_rewards(self, metrics: Mapping[str, float]) -> Iterator[tuple[str, str, str]]:
        if self._comparison_scope is None:
            return
        metric, value, what = _EQUAL[self._comparison_scope]
        self._equal_steps = self._equal_steps + 1 if metrics.get(metric) == value else 0
        most = self._settings.equal_rewards_steps
        if most is not None and self._equal_steps >= most:
            yield (
                "equal_rewards",
                metric,
                f"all {what} for {self._equal_steps} steps (trainer.guards.equal_rewards_steps={most}): no answer is "
                "better than another, and nothing is learnt from them. Try the environment with `env try`, easier "
                "prompts, or more samples.",
            )
