"""Every error a user can cause or must act on.

    SkyRLError
    ├── ConfigError            also ValueError: a user's mistake; entrypoints print it and exit 2
    │   ├── DataError          a dataset that cannot be used as it is; names the file and the row
    │   └── RunDirectoryError  a run folder that is in use, of another run, or not writable
    ├── DeadlineExceeded       also TimeoutError: a wait passed its deadline; names what was awaited
    ├── WorkerDied             a worker process ended; names it and how
    ├── EngineError            an inference engine refused or died; names the engine
    │   ├── UnsupportedParameter  a sampling parameter or call this engine cannot honour
    │   └── EnginesLost        no engine is left and none can be restarted; the run saves its weights and stops
    ├── EnvironmentHostsLost   no environment host is left, and none could be started in time; the run stops
    ├── RewardModelLost        a replica of the reward model died or hangs; the run saves its weights and stops
    ├── WeightSyncError        a transfer that is stale, partial or corrupt; names the tensor
    │   └── NonFiniteWeights   the trainer's own weights are NaN or infinite: there is nothing good to send or to save
    ├── EnvironmentFailure     an episode's environment raised, hung or gave a bad result; the trajectory is masked
    ├── RolloutsFailed         too many episodes of a step failed; the run stops instead of training on zeros
    ├── StaleRollout           a token is older than trainer.fully_async.max_staleness_steps allows: a bug of ours
    ├── OutOfMemory            an accelerator or a host has no memory left; names settings that need less
    ├── NonFiniteUpdate        loss or gradient was not finite too many times in a row
    ├── Unhealthy              a guard of trainer.guards stopped the run; names it
    ├── CheckpointError        a checkpoint is corrupt and nothing older can replace it, or saving failed too often
    │   └── CheckpointMismatch  the checkpoint to resume from has other data, another base model or other adapters
    ├── StorageError           an address could not be read or written; names address and file, and why
    ├── ClusterLost            a node of the cluster, or one of Ray's own processes, died; names it
    │   └── NoRoom             the nodes that are left have no room for what a lost one had
    └── Stopped                a person or a scheduler asked the run to end, by SIGINT, SIGTERM or SIGHUP

Bugs are not here: they stay `assert`, `TypeError`, or whatever the library raised, with their traceback.
"""

from __future__ import annotations

import signal as signals


class SkyRLError(Exception):
    """Base of every error that this package raises on purpose."""


class ConfigError(SkyRLError, ValueError):
    """A wrong key, value or combination. The message gives the key, its value, what is allowed and what to do."""


class DataError(ConfigError):
    """A dataset that cannot be used; the message names file, row and what to change."""


class RunFolderError(ConfigError):
    """An output folder that belongs to another run, is in use, or cannot be written."""


class DeadlineExceeded(SkyRLError, TimeoutError):
    """A wait passed its deadline."""

    def __init__(self, waited_for: str, seconds: float):
        super().__init__(waited_for, seconds)
        self.waited_for = waited_for
        self.seconds = seconds
        self.explanation = ""
        """What held it up, if that could be found out."""

    def __str__(self) -> str:
        told = f"{self.waited_for} did not finish within {self.seconds:g} s"
        return f"{told}: {self.explanation}" if self.explanation else told


class WorkerDied(SkyRLError):
    """A worker process ended in the middle of a call; the message names it."""


class EngineError(SkyRLError):
    """An inference engine refused a call, is torn, or died; the message names it."""


class UnsupportedParameter(EngineError):
    """A parameter that the named engine cannot honour; it is never dropped silently."""


class EnginesLost(EngineError):
    """No engine is left, and no restarts remain; the message begins with the first cause."""


class EnvironmentHostsLost(SkyRLError):
    """No environment host is there within its deadline; the message says how the last one was lost."""


class RewardModelLost(SkyRLError):
    """A replica of the reward model died or hangs, so rollouts can no longer be scored; the message names it."""


class WeightSyncError(SkyRLError):
    """Weights did not arrive intact; the message names the tensor and the difference."""


class NonFiniteWeights(WeightSyncError):
    """The trainer's weights are not finite; the message names a tensor."""


class EnvironmentFailure(SkyRLError):
    """An episode that cannot be scored; `kind` is the name under which it is counted."""

    def __init__(self, kind: str, detail: str = ""):
        super().__init__(kind, detail)
        self.kind = kind
        self.detail = detail

    def __str__(self) -> str:
        return f"{self.kind}: {self.detail}" if self.detail else self.kind


class RolloutsFailed(SkyRLError):
    """Too many failed episodes in one step, or too many failed steps in a row."""


class StaleRollout(SkyRLError):
    """A step would have trained on a token that is older than its bound."""


class OutOfMemory(SkyRLError):
    """No memory is left; the message names where, and the settings that would need less, in GiB."""


class NonFiniteUpdate(SkyRLError):
    """Loss or gradient stayed NaN or infinite."""


class GuardTriggered(SkyRLError):
    """A guard of trainer.guards stopped the run; the message names it, what it saw and what to do."""


class CheckpointError(SkyRLError):
    """No checkpoint of the run can be loaded, or none can be written any more."""


class CheckpointMismatch(CheckpointError):
    """The checkpoint to resume from was saved with other data, another base model or other adapters."""


class StorageError(SkyRLError):
    """Storage at an address refuses, does not answer, or lacks something; the message names address and file."""


class ClusterLost(SkyRLError):
    """A node or one of Ray's own processes died, or Ray did not start; the message says which."""


class InsufficientResources(ClusterLost):
    """A node was lost, and what ran there fits nowhere else for now."""


class RunInterrupted(SkyRLError):
    """The run ended because it got a signal; its exit status is 128 + `signal`."""

    def __init__(self, signal: int):
        super().__init__(signal)
        self.signal = signal

    def __str__(self) -> str:
        return f"ended by {signals.Signals(self.signal).name}"
