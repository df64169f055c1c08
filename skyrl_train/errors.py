"""All errors that a user can cause or must act on.

    SkyRLError
    ├── ConfigError            also ValueError: a user's mistake; entrypoints print it and exit 2
    │   ├── DataError          a dataset that cannot be used; names the file and the row
    │   └── RunFolderError     a run folder that is in use, belongs to another run, or is not writable
    ├── DeadlineExceeded       also TimeoutError: a wait passed its deadline; names what was awaited
    ├── WorkerDied             a worker process died; names it and the cause
    ├── EngineError            an inference engine rejected a call or died; names the engine
    │   ├── UnsupportedParameter  a sampling parameter or call that this engine does not support
    │   └── EnginesLost        no engine is left and none can be restarted; the run saves its weights and stops
    ├── EnvironmentHostsLost   no environment host is left, and none could be started in time; the run stops
    ├── RewardModelLost        a replica of the reward model died or hangs; the run saves its weights and stops
    ├── WeightSyncError        a transfer that is stale, partial or corrupt; names the tensor
    │   └── NonFiniteWeights   the trainer's own weights are NaN or infinite, so they are neither sent nor saved
    ├── EnvironmentFailure     an episode's environment raised, hung or returned a bad result; the trajectory is masked
    ├── RolloutsFailed         too many episodes of a step failed; the run stops instead of training on zeros
    ├── StaleRollout           a token is older than trainer.fully_async.max_staleness_steps allows: a bug of ours
    ├── OutOfMemory            an accelerator or a host has no memory left; names settings that need less
    ├── NonFiniteUpdate        loss or gradient was not finite too many times in a row
    ├── GuardTriggered         a guard of trainer.guards stopped the run; names it
    ├── CheckpointError        a checkpoint is corrupt and no older one can replace it, or saving failed too often
    │   └── CheckpointMismatch  the checkpoint to resume from has other data, another model or another optimizer
    ├── StorageError           remote storage could not be read or written; names URI, file and cause
    ├── ClusterLost            a node of the cluster, or one of Ray's own processes, died; names it
    │   └── InsufficientResources  the remaining nodes lack the resources that a lost node had
    └── RunInterrupted         a person or a scheduler asked the run to end, by SIGINT, SIGTERM or SIGHUP

Bugs have no class here. They stay `assert`, `TypeError`, or whatever the library raised, with their traceback.
"""

from __future__ import annotations

import signal as signals
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any


class SkyRLError(Exception):
    """Base of every error that this package raises on purpose."""


class ConfigError(SkyRLError, ValueError):
    """A wrong key, value or combination. The message has the key, its value, what is allowed and what to do."""


class DataError(ConfigError):
    """A dataset that cannot be used. The message names file, row and what to change."""


class RunFolderError(ConfigError):
    """A run folder that belongs to another run, is in use, or cannot be written."""


class DeadlineExceeded(SkyRLError, TimeoutError):
    """A wait that passed its deadline.

    Attributes:
        waited_for: What was awaited.
        seconds: The deadline, in seconds.
    """

    def __init__(self, waited_for: str, seconds: float):
        super().__init__(waited_for, seconds)
        self.waited_for = waited_for
        self.seconds = seconds
        self.explanation = ""
        """Cause of the delay, if it could be found out. It can be set later."""

    def __str__(self) -> str:
        summary = f"{self.waited_for} did not finish within {self.seconds:g} s"
        return f"{summary}: {self.explanation}" if self.explanation else summary


class WorkerDied(SkyRLError):
    """A worker process died during a call. The message names it."""


class EngineError(SkyRLError):
    """An inference engine rejected a call, is partially loaded, or died. The message names it."""


class UnsupportedParameter(EngineError):
    """A parameter that the named engine does not support. It is never dropped silently."""


class EnginesLost(EngineError):
    """No engine is left, and no restarts remain. The message begins with the first cause."""


class EnvironmentHostsLost(SkyRLError):
    """No environment host is available within its deadline. The message says how the last one was lost."""


class RewardModelLost(SkyRLError):
    """A replica of the reward model died or hangs, so rollouts can no longer be scored. The message names it."""


class WeightSyncError(SkyRLError):
    """Weights did not arrive intact. The message names the tensor and the difference."""


class NonFiniteWeights(WeightSyncError):
    """The trainer's weights are not finite. The message names a tensor."""


class EnvironmentFailure(SkyRLError):
    """An episode that cannot be scored.

    Attributes:
        kind: Name under which the failure is counted.
        detail: Explanation, or "".
    """

    def __init__(self, kind: str, detail: str = ""):
        super().__init__(kind, detail)
        self.kind = kind
        self.detail = detail

    def __str__(self) -> str:
        return f"{self.kind}: {self.detail}" if self.detail else self.kind


class RolloutsFailed(SkyRLError):
    """Too many failed episodes in one step, or too many failed steps in a row.

    Attributes:
        groups: The groups of trajectories of the step, on which nothing was trained; empty if there are none.
    """

    def __init__(self, message: str, groups: Sequence[Any] = ()):
        super().__init__(message)
        self.groups = groups


class StaleRollout(SkyRLError):
    """A step would have trained on a token that is older than allowed."""


class OutOfMemory(SkyRLError):
    """No memory is left. The message says where, and which settings would need less, in GiB."""


class NonFiniteUpdate(SkyRLError):
    """Loss or gradient stayed NaN or infinite."""


class GuardTriggered(SkyRLError):
    """A guard of trainer.guards stopped the run. The message names the guard, its evidence and what to do."""


class CheckpointError(SkyRLError):
    """No checkpoint of the run can be loaded, or none can be written any more."""


class CheckpointMismatch(CheckpointError):
    """The checkpoint to resume from has other data, another base model, other adapters or another optimizer."""


class StorageError(SkyRLError):
    """Remote storage rejects a request, does not respond, or lacks a file. The message names URI and file."""


class ClusterLost(SkyRLError):
    """A node or one of Ray's own processes died, or Ray did not start. The message says which."""


class InsufficientResources(ClusterLost):
    """A node was lost, and its actors currently fit on no other node."""


class RunInterrupted(SkyRLError):
    """A signal asked the run to end. The process exits with status 128 + `signal`."""

    def __init__(self, signal: int):
        super().__init__(signal)
        self.signal = signal

    def __str__(self) -> str:
        return f"ended by {signals.Signals(self.signal).name}"
