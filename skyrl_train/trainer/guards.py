"""Says, or stops, when a run goes on without learning what it should."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Protocol

from skyrl_train.algorithms.advantages import Compared
from skyrl_train.errors import Unhealthy

_EQUAL: Mapping[Compared, tuple[str, float, str]] = {
    "group": ("reward/zero_variance_groups", 1.0, "samples of a prompt had the same reward"),
    "step": ("reward/std", 0.0, "samples of a step had the same reward"),
}
"""The metric that says that all rewards compared are equal, its value then, and what to call that."""
_log = logging.getLogger(__name__)


class GuardSettings(Protocol):
    """trainer.guards."""

    @property
    def equal_rewards_steps(self) -> int | None: ...
    @property
    def max_ratio(self) -> float | None: ...
    @property
    def max_cut_fraction(self) -> float | None: ...
    @property
    def stop(self) -> list[str]: ...


class Guards:
    """Looks at the metrics of every step. A guard warns when its limit is first passed, and again after a recovery."""

    def __init__(self, settings: GuardSettings, compared: Compared | None):
        """`compared`: among which samples an update compares rewards; None if it reads none."""
        self._settings = settings
        self._compared = compared
        self._equal_steps = 0
        self._warned: set[str] = set()

    def check(self, metrics: Mapping[str, float], step: int) -> None:
        """Raises Unhealthy for the first guard in trainer.guards.stop whose limit is passed."""
        found = dict(self._found(metrics))
        for name, text in found.items():
            message = f"step {step}: {text}"
            if name in self._settings.stop:
                raise Unhealthy(f"{message} trainer.guards.stop names {name}.")
            if name not in self._warned:
                _log.warning("%s", message)
        self._warned = set(found)

    def _found(self, metrics: Mapping[str, float]) -> Iterator[tuple[str, str]]:
        """The guards whose limits are passed, and what to do."""
        settings = self._settings
        yield from self._equal_rewards(metrics)
        ratio = metrics.get("policy/ratio_max", 0.0)
        if settings.max_ratio is not None and not ratio <= settings.max_ratio:
            yield (
                "ratio",
                f"a token's probability ratio was {ratio:.3g} (trainer.guards.max_ratio={settings.max_ratio:g}): the "
                "policy moves far in one step. Lower the learning rate or the updates per step.",
            )
        cut = metrics.get("response/truncated_fraction", 0.0)
        if settings.max_cut_fraction is not None and cut > settings.max_cut_fraction:
            yield (
                "cut",
                f"{cut:.0%} of the responses reached the length limit (trainer.guards.max_cut_fraction="
                f"{settings.max_cut_fraction:g}): raise generator.sampling_params.max_generate_length.",
            )

    def _equal_rewards(self, metrics: Mapping[str, float]) -> Iterator[tuple[str, str]]:
        if self._compared is None:
            return
        metric, value, what = _EQUAL[self._compared]
        self._equal_steps = self._equal_steps + 1 if metrics.get(metric) == value else 0
        most = self._settings.equal_rewards_steps
        if most is not None and self._equal_steps >= most:
            yield (
                "equal_rewards",
                f"all {what} for {self._equal_steps} steps (trainer.guards.equal_rewards_steps={most}): no answer is "
                "better than another, and nothing is learnt from them. Try the environment with `env try`, easier "
                "prompts, or more samples.",
            )
