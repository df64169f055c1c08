"""Ranks of a learner in separate processes, without a cluster: cheap enough to create for every case.

They are forks of one process that has imported what a rank needs, which is most of the cost of starting a rank.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

DEADLINE_S = 300.0
RANKS = get_context("forkserver")
RANKS.set_forkserver_preload(["skyrl_train.learner.worker", "tests.support.recording_strategies"])


def run_ranks(
    main: Callable[..., None], arguments: Sequence[Sequence[Any]], folder: Path, deadline_s: float = DEADLINE_S
) -> None:
    """Run `main(*arguments[rank])` in all ranks at once. Fail with their output unless all return in time.

    The output goes to files, because a rank with an unread pipe would block the others.
    """
    logs = [folder / f"rank_{rank}.log" for rank in range(len(arguments))]
    ranks = [
        RANKS.Process(target=_logged, args=(log, main, *own), daemon=True)
        for log, own in zip(logs, arguments, strict=True)
    ]
    deadline = time.monotonic() + deadline_s
    try:
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join(max(1.0, deadline - time.monotonic()))
    finally:
        for rank in (rank for rank in ranks if rank.pid is not None):
            rank.kill()
            rank.join()
    said = "\n".join(log.read_text()[-4000:] for log in logs if log.exists())
    assert [rank.exitcode for rank in ranks] == [0] * len(ranks), said


def _logged(log: Path, main: Callable[..., None], *args: Any) -> None:
    with log.open("w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    code = 1
    try:
        main(*args)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        # Skip the interpreter's shutdown, which gloo's threads outlive: a thread that then requests the interpreter
        # lock ends the process with SIGABRT, about once in several hundred times, after all checks.
        os._exit(code)


class RankProcess:
    """A process that holds one worker at a time. Its methods are coroutines, like those of a remote worker."""

    def __init__(self) -> None:
        self._pipe, theirs = RANKS.Pipe()
        self._process = RANKS.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()

    def set_worker(self, make: Callable[..., Any], *args: Any) -> None:
        """Replace the worker by make(*args)."""
        self._call("hold", (make, *args))

    def __getattr__(self, method: str) -> Any:
        if method.startswith("_"):
            raise AttributeError(method)

        async def call(*args: Any) -> Any:
            return await asyncio.to_thread(self._call, method, args)

        return call

    def put(self, value: Any) -> Any:
        return value

    async def call_with_refs(self, method: str, plan: Any, refs: Sequence[Any]) -> Any:
        return await asyncio.to_thread(lambda: self._call(method, plan.build_arguments(*refs)))

    def end(self) -> None:
        """Kill the process at once."""
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
