"""The transform that records which version of the policy acted."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass

import torch
from tensordict import TensorDictBase

from skyrl_train.tensordict.envs.base import Transform
from skyrl_train.tensordict.envs.conversation import set_texts

Version = int | str


@dataclass(frozen=True, slots=True)
class VersionChange:
    """A record of one change of the policy's version."""

    timestamp: float
    """Seconds since the epoch."""
    old_version: Version | None
    new_version: Version


class PolicyVersion(Transform):
    """A transform that writes "policy_version", the version that acted, into an observation and the next one.

    A reset writes the current version; a step overwrites it with the version at the step's beginning, in case weights
    have changed in between. [B] int64 for `version_type` int, strings for "uuid".

    Call `increment_version` when the policy's weights change, between a step and the next action.
    """

    last = True  # so that it writes to what is stored, not to a copy that another transform makes for the environment

    def __init__(self, version_type: type | str = "int"):
        if version_type not in (int, "int", str, "uuid"):
            raise ValueError(f"version_type={version_type!r} is not one of int, 'int', str, 'uuid'.")
        self.counts = version_type in (int, "int")
        self.version: Version = 0 if self.counts else str(uuid.uuid4())
        self.version_history = [VersionChange(time.time(), None, self.version)]
        self.acting: Version | None = None
        """The version that sampled the actions of the next step, if a collector sets it; None: `version`."""

    def increment_version(self) -> None:
        """Record that the policy has new weights."""
        old = self.version
        self.version = old + 1 if isinstance(old, int) else str(uuid.uuid4())
        self.version_history.append(VersionChange(time.time(), old, self.version))

    def after_reset(self, given: TensorDictBase, root: TensorDictBase) -> TensorDictBase:
        return _written(root, self.version)

    def before_step(self, root: TensorDictBase) -> TensorDictBase:
        return _written(root, self.version if self.acting is None else self.acting)


def _written(tensordict: TensorDictBase, version: Version) -> TensorDictBase:
    if isinstance(version, int):
        return tensordict.set("policy_version", torch.full(tensordict.batch_size, version))
    set_texts(tensordict, "policy_version", [version] * len(tensordict))
    return tensordict
