"""A driver with one hung and one idle environment process. It prints their pids and waits to be killed."""

import asyncio

from skyrl_train.data.messages import Prompt
from skyrl_train.environments.pool import WorkerPool


async def main() -> None:
    async with WorkerPool({}, 2, 1000.0, ("misbehaving_envs",)) as pool:
        started = [pool.start("Counter", Prompt("0", [], "Counter")) for _ in range(2)]
        first, second = await asyncio.gather(*started)
        print(first.metadata["pid"], second.metadata["pid"], flush=True)
        await first.step("sleep 1000")


asyncio.run(main())
