"""The first rollout of a run, shown as soon as it exists: a step of many may end minutes later."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from skyrl_train.clock import now
from skyrl_train.data.trajectory import OK, Prompt, Trajectory, TrajectoryGroup

log = logging.getLogger(__name__)

Rollout = Callable[[Prompt, int], Awaitable[TrajectoryGroup]]


class FirstRollout:
    """Shows one of the first group's trajectories, of whichever of the wrapped rollouts ends first."""

    def __init__(self, show: Callable[[Trajectory, float], None]):
        """`show` gets the trajectory, and how many seconds its group took."""
        self._show: Callable[[Trajectory, float], None] | None = show

    def of(self, rollout: Rollout) -> Rollout:
        """The same rollout, which is watched."""

        async def watched(prompt: Prompt, position: int) -> TrajectoryGroup:
            begun = now()
            group = await rollout(prompt, position)
            shown = next((item for item in group.trajectories if item.status == OK), None)
            if self._show is not None and shown is not None:
                show, self._show = self._show, None
                try:
                    show(shown, now() - begun)
                except Exception as error:  # a generator of the user's own may have filled it with anything
                    log.warning("The first rollout cannot be shown (%s: %s).", type(error).__name__, error)
            return group

        return watched
