"""Environments that fork or write to the wire of their process. Tests use this module as a plugin."""

from __future__ import annotations

import ctypes
import fcntl
import multiprocessing
import os
import threading
import time

from skyrl_train.environments.base import StepOutput, TextEnv
from skyrl_train.environments.registry import register
from skyrl_train.errors import ConfigError, EnvironmentFailure

WRONG = 7.0
"""Reward that only a forked child returns, which must not answer."""


def _seven() -> int:
    return 7


class Forks(TextEnv):
    """Forks as the text says. The child continues in the worker's code, and the parent answers with reward 1."""

    def step(self, action):
        if action == "multiprocessing":
            with multiprocessing.get_context("fork").Pool(2) as pool:
                return StepOutput([], 1.0, pool.apply(_seven) == 7)
        pid = ctypes.CDLL(None).fork() if action == "in C" else os.fork()
        if pid == 0:
            if action == "raises":
                raise LookupError("in the child")
            if action == "exits":
                raise SystemExit(0)
            if action == "later":
                time.sleep(0.3)
            return StepOutput([], WRONG, True)
        if action in ("first", "in C", "raises", "exits"):
            os.waitpid(pid, 0)
        return StepOutput([], 1.0, True)


class Writes(TextEnv):
    """Writes to every pipe of its process, and answers with reward 1."""

    def step(self, action):
        frame = self.extras["frame"].encode("latin-1")
        if action == "after its answer":
            threading.Thread(target=self.write, args=(frame, 0.2)).start()
        elif action != "nothing":
            self.write(frame)
        return StepOutput([], 1.0, False)

    def write(self, frame, seconds=0.0):
        time.sleep(seconds)
        for descriptor in range(3, 64):
            try:
                is_pipe = "pipe" in os.readlink(f"/proc/self/fd/{descriptor}")
                if is_pipe and fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_WRONLY:
                    os.write(descriptor, frame)
            except OSError:
                pass


class OwnKinds(TextEnv):
    """Raises an exception class that is named like the text."""

    def step(self, action):
        raise type(action, (Exception,), {})("no")


class Unreadable(TextEnv):
    """Returns invalid metadata, or raises an exception that cannot be described as it is."""

    class Unreadable(Exception):
        def __str__(self):
            raise RuntimeError("no message")

    def init(self, prompt):
        return prompt, [1, 2] if self.extras["how"] == "metadata" else {}

    def step(self, action):
        if action == "message":
            raise self.Unreadable
        if action == "long message":
            raise ConfigError("x" * 100_000_000)
        if action == "long kind":
            raise type("X" * 100_000_000, (Exception,), {})("no")
        raise EnvironmentFailure("odd", self.Unreadable())  # type: ignore[arg-type]


for environment in (Forks, Writes, OwnKinds, Unreadable):
    register(environment.__name__, environment)
