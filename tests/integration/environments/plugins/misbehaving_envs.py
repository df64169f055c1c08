"""Environments that misbehave. Tests use this module as a plugin."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import psutil

from skyrl_train.environments.base import BaseTextEnv, BaseTextEnvStepOutput, StepOutput, TextEnv
from skyrl_train.environments.registry import register
from skyrl_train.errors import EnvironmentFailure


class Counter(TextEnv):
    """A well-behaved, stateful environment that reports the actions it received and its process."""

    def init(self, prompt):
        self.actions = []
        return [*prompt, {"role": "user", "content": f"start {self.extras.get('name')}"}], {"pid": os.getpid()}

    def step(self, action):
        self.actions.append(action)
        if action.startswith("sleep "):
            time.sleep(float(action.removeprefix("sleep ")))
        metadata = {"actions": list(self.actions), "pid": os.getpid()}
        return StepOutput([{"role": "user", "content": str(len(self.actions))}], 1.0, done=False, metadata=metadata)


class SideEffects(Counter):
    """An environment whose steps must never be repeated."""

    replayable = False


class Misbehaving(TextEnv):
    """An environment that misbehaves as the model's text says."""

    def step(self, action):
        rewards = {
            "none": None,
            "nan": float("nan"),
            "infinite": float("inf"),
            "string": "1.0",
            "list": [1.0, 2.0],
            "huge": 10**400,
        }
        if action in rewards:
            return {"observations": [], "reward": rewards[action], "done": True, "metadata": {}}
        return getattr(self, action.replace(" ", "_"))()

    def missing_reward(self):
        return {"observations": [], "done": True, "metadata": {}}

    def nothing(self):
        return None

    def text_observations(self):
        return {"observations": "not a list", "reward": 0.0, "done": True, "metadata": {}}

    def raises(self):
        raise LookupError("the answer is not in the book")

    def exits(self):
        sys.exit(0)

    def dies(self):
        os._exit(0)

    def hangs(self):
        time.sleep(1000)

    def hangs_in_c(self):
        return 9**9**9

    def starts_a_child_and_hangs(self):
        child = subprocess.Popen(["sleep", "1000"])
        with open(self.extras["pid_file"], "w") as file:
            file.write(str(child.pid))
        time.sleep(1000)

    def writes_a_lot(self):
        return StepOutput([{"role": "user", "content": "x" * (65 * 2**20)}], 0.0, False)


class Strays(TextEnv):
    """Starts a process in another session and an orphan without environment variables, then acts as the text says."""

    def step(self, action):
        leader = subprocess.Popen(["sleep", "300"], start_new_session=True)
        start = "import subprocess as s; print(s.Popen(['sleep', '300'], start_new_session=True, stdout=s.DEVNULL).pid)"
        orphan = subprocess.run([sys.executable, "-c", start], env={}, stdout=subprocess.PIPE, text=True, check=True)
        pids = os.path.join(self.extras["folder"], "pids")
        with open(f"{pids}.partial", "w") as file:
            file.write(f"{leader.pid} {orphan.stdout}")
        os.replace(f"{pids}.partial", pids)
        if action == "interrupts":
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            os.killpg(os.getpgrp(), signal.SIGINT)
            time.sleep(0.2)
        if action == "dies":
            os._exit(3)
        if action == "hangs":
            time.sleep(1000)
        return StepOutput([], 1.0, True)


class KillsItsHost(TextEnv):
    """Kills the parent of its process supervisor if that is a Ray actor."""

    def step(self, action):
        supervisor = psutil.Process().parent()
        host = supervisor.parent() if supervisor is not None else None
        assert host is not None and "ray::" in " ".join(host.cmdline())
        host.kill()
        time.sleep(1000)


class Printing(TextEnv):
    """Prints a lot, and then exits without a message from Python if the text is "dies"."""

    def step(self, action):
        for number in range(100_000):
            print(f"\x1b[31m{number}", "." * 90)
        if action == "dies":
            os.write(2, b"the last \x1b[31mword\n")
            os._exit(3)
        return StepOutput([], 1.0, True)


class BadEnd(TextEnv):
    """Returns a secret in an observation, and raises an error that contains it in `close`."""

    def step(self, action):
        return StepOutput([{"role": "user", "content": f"a key: {os.environ['HF_TOKEN']}"}], 1.0, True)

    def close(self):
        raise OSError("it \x1b[2J does not close with " + os.environ["HF_TOKEN"])


class Chatty(TextEnv):
    """Writes to and reads from all descriptors that could be the wire, and prints control characters."""

    def step(self, action):
        print("\x00\x00\x00\x02{}", "\x1b[2J", flush=True)
        os.write(1, b"\x00\x00\x00\x02{}")
        subprocess.run(["echo", "child"], check=True)
        try:
            heard = input()
        except EOFError:
            heard = "end of file"
        metadata = {"heard": heard, "odd": {1, 2}, "length": len(action)}
        return StepOutput([{"role": "tool", "content": action}], 0.5, False, metadata)


class SkyRLGymStyle(BaseTextEnv):
    """An environment as users of SkyRL-Gym write it."""

    def __init__(self, env_config, extras={}):  # noqa: B006
        super().__init__()
        assert "reward_spec" in extras, "reward_spec field is required"
        self.ground_truth = extras["reward_spec"]["ground_truth"]
        self.topk = env_config.search.topk
        self.max_turns = extras.get("max_turns", 2)

    def step(self, action):
        self.turns += 1
        done = self.turns >= self.max_turns
        return BaseTextEnvStepOutput(
            observations=[] if done else [{"role": "user", "content": "go on"}],
            reward=int(self.ground_truth in action),
            done=done,
            metadata={"topk": self.topk},
            postprocessed_action=action,
        )


class NeverCloses(TextEnv):
    def step(self, action):
        threading.Thread(target=time.sleep, args=(1000,)).start()
        return StepOutput([], 1.0, True)

    def close(self):
        time.sleep(1000)


class Nests(TextEnv):
    """Returns nested lists in one part of its output."""

    def nested(self, part):
        value: list = []
        for _ in range(self.extras["depth"] if self.extras["part"] == part else 0):
            value = [value]
        return value

    def init(self, prompt):
        return [*prompt, {"role": "user", "content": "go", "tree": self.nested("opening")}], {}

    def step(self, action):
        observation = {"role": "user", "content": "on", "tree": self.nested("observation")}
        return StepOutput([observation], 1.0, False, {"tree": self.nested("metadata")})


class NoKind(TextEnv):
    def init(self, prompt):
        raise EnvironmentFailure(None)  # type: ignore[arg-type]


class BadStart(TextEnv):
    def init(self, prompt):
        raise PermissionError("not you")


ALL = (
    Counter,
    SideEffects,
    Misbehaving,
    Strays,
    KillsItsHost,
    Printing,
    BadEnd,
    Chatty,
    SkyRLGymStyle,
    NeverCloses,
    Nests,
    NoKind,
    BadStart,
)
for environment in ALL:
    register(environment.__name__, environment)
