"""A driver to be killed, whose environment hangs and has processes in other sessions: `straying_driver.py FOLDER`."""

import asyncio
import sys

from skyrl_train.data.messages import Prompt
from skyrl_train.environments.pool import WorkerPool


async def main() -> None:
    async with WorkerPool({}, 1, 1000.0, ("misbehaving_envs",)) as pool:
        episode = await pool.start("Strays", Prompt("0", [], "Strays", {"folder": sys.argv[1]}))
        await episode.step("hangs")


asyncio.run(main())
