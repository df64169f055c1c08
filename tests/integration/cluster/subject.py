"""What actors of test_cluster.py hold, in a module that imports little."""

from __future__ import annotations

import asyncio
import os
import sys
import time

from skyrl_train.cluster.sockets import GROUP_ADDRESS, NODE_ADDRESS
from skyrl_train.errors import ConfigError


class Subject:
    """Answers, fails, hangs and dies."""

    constant = 7

    def __init__(self, fail: bool = False):
        if fail:
            raise ValueError("no such model")

    def add(self, a: int, b: int = 0) -> int:
        return a + b

    def process(self, module: str) -> tuple[int, bool]:
        """Its id, and whether it has imported a module."""
        return os.getpid(), module in sys.modules

    def addresses(self) -> tuple[str, str]:
        """Those at which the run's actors, and other machines, reach it."""
        return os.environ[GROUP_ADDRESS], os.environ[NODE_ADDRESS]

    def raise_config_error(self) -> None:
        raise ConfigError("key=3 is wrong")

    def hang(self) -> None:
        time.sleep(600)

    def die(self) -> None:
        os._exit(3)

    async def wait(self, seconds: float) -> float:
        await asyncio.sleep(seconds)
        return seconds
