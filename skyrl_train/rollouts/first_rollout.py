"""The first rollout of a run, shown as soon as it exists: a step of many may end minutes later."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from skyrl_train.clock import now
from skyrl_train.data.trajectory import OK, Prompt, Trajectory, TrajectoryGroup

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
                show(shown, now() - begun)
            return group

        return watched
