"""A driver whose environment prints more than a pipe holds, and that prints the result: `printing_driver.py [LOG]`."""

import asyncio
import sys
from pathlib import Path

from skyrl_train.data.messages import Prompt
from skyrl_train.environments.pool import WorkerPool
from skyrl_train.errors import EnvironmentFailure


async def main() -> None:
    log = Path(sys.argv[1]) if sys.argv[1:] else None
    async with WorkerPool({}, 1, 10.0, ("misbehaving_envs",), log) as pool:
        episode = await pool.start("Printing", Prompt("0", [], "Printing"))
        try:
            print((await episode.step("prints")).reward, flush=True)
        except EnvironmentFailure as failure:
            print(failure.kind, flush=True)


asyncio.run(main())
