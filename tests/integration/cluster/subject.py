"""Classes that actors of test_cluster.py wrap, in a module that imports little."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import sys
import threading
import time
from typing import Any

from skyrl_train.cluster.addresses import BIND_ADDRESS, LOOPBACK, NODE_ADDRESS, free_address
from skyrl_train.cluster.child_process import StartAgainError
from skyrl_train.errors import ConfigError


class ValuesAsTuple:
    """A plan whose call has one argument: a tuple of all stored values."""

    def build_arguments(self, *values: Any) -> tuple[Any]:
        return (values,)


class Rank:
    """One of two ranks with a process group. Methods get the rank's shard of the call, with True for faults."""

    def __init__(self, rank: int):
        self.rank = rank

    def setup(self, address: str, port: int) -> int:
        from skyrl_train.strategies.process_group import init_process_group

        init_process_group(self.rank, 2, address, port, "gloo", 60.0)
        return os.getpid()

    def address(self) -> tuple[str, int]:
        return free_address(LOOPBACK)

    def reduce(self, hangs: bool, dies: bool) -> None:
        import torch

        if dies:
            torch.distributed.destroy_process_group()  # so that the other rank notices before the driver
            time.sleep(1)
            os._exit(3)
        if hangs:
            time.sleep(600)
        torch.distributed.all_reduce(torch.ones(1))


class Subject:
    """A class whose methods answer, fail, hang and die."""

    constant = 7

    def __init__(self, fail: bool = False, exits: bool = False, restarts: bool = False):
        self.recorded: list[int] = []
        if fail:
            raise ValueError("no such model")
        if exits:
            os._exit(3)
        if restarts and "SUBJECT_RESTARTED" not in os.environ:
            raise StartAgainError("a test", {"SUBJECT_RESTARTED": "1"})

    def add(self, a: int, b: int = 0) -> int:
        return a + b

    def process(self, module: str) -> tuple[int, bool]:
        """Return the process id, and True if the process has imported a module."""
        return os.getpid(), module in sys.modules

    def record(self, number: int) -> list[int]:
        """Append a number, and return all numbers so far."""
        self.recorded.append(number)
        return self.recorded

    def semaphore(self) -> str:
        """Create a semaphore that the operating system keeps until someone unlinks it, and return its name."""
        self.kept = multiprocessing.get_context("spawn").Lock()
        return str(self.kept._semlock.name)  # type: ignore[attr-defined]

    def lock(self) -> object:
        return threading.Lock()

    def raise_unpicklable(self) -> None:
        class LocalError(Exception):
            def __reduce__(self) -> Any:
                raise TypeError("no")

        raise LocalError("not importable")

    def addresses(self) -> tuple[str, str]:
        """Return the addresses at which the run's actors and other nodes reach it."""
        return os.environ[BIND_ADDRESS], os.environ[NODE_ADDRESS]

    def raise_config_error(self) -> None:
        raise ConfigError("key=3 is wrong")

    def read_ids(self, batches: list[Any]) -> list[int]:
        """Return the token ids of all batches."""
        return [int(number) for batch in batches for number in batch.input_ids]

    def hang(self) -> None:
        time.sleep(600)

    def die(self) -> None:
        os._exit(3)

    exit: asyncio.Future[None] | None = None

    async def wait_until_exit(self) -> None:
        self.exit = asyncio.get_running_loop().create_future()
        await self.exit

    async def end(self, error: Exception | None) -> None:
        """Make `wait_until_exit` return, or raise an error."""
        while self.exit is None:
            await asyncio.sleep(0.05)
        if error is None:
            self.exit.set_result(None)
        else:
            self.exit.set_exception(error)

    async def wait(self, seconds: float) -> float:
        await asyncio.sleep(seconds)
        return seconds
