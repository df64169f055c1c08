"""The first rollout is shown once, when it exists, and whatever it belongs to."""

from __future__ import annotations

import asyncio

from skyrl_train.data.trajectory import Prompt, TrajectoryGroup
from skyrl_train.rollouts.first_rollout import FirstRollout
from tests.support.trajectories import trajectory_from


def group(uid: str, *statuses: str) -> TrajectoryGroup:
    prompt = Prompt(uid, [{"role": "user", "content": uid}], "none", {})
    items = []
    for sample, status in enumerate(statuses):
        items.append(trajectory_from(prompt, sample, [1], [2], [1], [-0.5], [], 0.0, "stop", 1.0))
        if status != "ok":
            items[-1].fail(status, "")
    return TrajectoryGroup(prompt, items)


def test_the_first_that_ends_well_is_shown_and_no_other():
    shown: list[tuple[str, int, float]] = []
    first = FirstRollout(lambda item, seconds: shown.append((item.prompt.uid, item.sample, seconds)))
    groups = {
        "slow": (0.2, group("slow", "ok")),
        "bad": (0.0, group("bad", "engine")),
        "mixed": (0.05, group("mixed", "engine", "ok")),
    }

    async def rollout(prompt: str, position: int) -> TrajectoryGroup:
        seconds, made = groups[prompt]
        await asyncio.sleep(seconds)
        return made

    async def main() -> None:
        train, evaluate = first.of(rollout), first.of(rollout)  # type: ignore[arg-type]
        made = await asyncio.gather(train("slow", 0), train("bad", 1), evaluate("mixed", 2))  # type: ignore[arg-type]
        assert list(made) == [made for _, made in groups.values()]

    asyncio.run(main())
    assert [one[:2] for one in shown] == [("mixed", 1)] and shown[0][2] > 0.04
