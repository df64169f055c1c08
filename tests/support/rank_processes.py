"""Ranks of a learner in processes of their own, without a cluster: cheap enough to be built anew for every case."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import torch

DEADLINE_S = 120.0


class RankProcess:
    """A process that holds one worker at a time; its methods are coroutines, as those of a remote worker are."""

    def __init__(self) -> None:
        context = get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()

    def hold(self, make: Callable[..., Any], *args: Any) -> None:
        """Replace the worker by make(*args)."""
        self._call("hold", (make, *args))

    def __getattr__(self, method: str) -> Any:
        if method.startswith("_"):
            raise AttributeError(method)

        async def call(*args: Any) -> Any:
            return await asyncio.to_thread(self._call, method, args)

        return call

    def end(self) -> None:
        """At once."""
        self._process.kill()
        self._process.join()
        self._pipe.close()

    def _call(self, method: str, args: tuple[Any, ...]) -> Any:
        self._pipe.send((method, args))
        if not self._pipe.poll(DEADLINE_S):
            raise TimeoutError(f"rank {self._process.pid}: {method} took more than {DEADLINE_S:g} s")
        result = self._pipe.recv()
        if isinstance(result, Exception):
            raise result
        return result


def _serve(pipe: Connection) -> None:
    torch.set_num_threads(1)
    worker: Any = None
    while True:
        method, args = pipe.recv()
        try:
            if method == "hold":
                make, *rest = args
                worker = make(*rest)
                result = None
            else:
                result = getattr(worker, method)(*args)
        except Exception as error:
            result = error
        pipe.send(result)
