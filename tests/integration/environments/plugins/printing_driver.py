"""A driver whose environment prints more than a pipe holds, and which says what came of it."""

import asyncio

from skyrl_train.data.trajectory import Prompt
from skyrl_train.environments.host import EnvironmentHost
from skyrl_train.errors import EnvironmentFailure


async def main() -> None:
    async with EnvironmentHost({}, 1, 10.0, ("misbehaving_envs",)) as host:
        episode = await host.start("Printing", Prompt("0", [], "Printing"))
        try:
            print((await episode.step("prints")).reward, flush=True)
        except EnvironmentFailure as failure:
            print(failure.kind, flush=True)


asyncio.run(main())
