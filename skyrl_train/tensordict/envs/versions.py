"""The transform that records which version of the policy acted."""

from __future__ import annotations

import torch
from tensordict import NonTensorData, TensorDictBase
from torchrl.envs.llm.transforms import PolicyVersion as _PolicyVersion

Version = int | str


class PolicyVersion(_PolicyVersion):  # type: ignore[misc]
    """TorchRL's transform, which writes "policy_version", but the version that acted instead of the previous step's.

    `step` writes the version at its beginning into the next observation. `step_and_maybe_reset`, `rollout` and
    collectors, whose weights may change between steps, also write it into the observation of the step itself.

    Call `increment_version` when the policy's weights change, between a step and the next action.
    """

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        return write_version(next_tensordict, self.version)

    def _post_step_mdp_hooks(
        self, tensordict: TensorDictBase, tensordict_: TensorDictBase
    ) -> tuple[TensorDictBase, TensorDictBase]:
        tensordict.set("policy_version", tensordict.get(("next", "policy_version")))
        return tensordict, write_version(tensordict_, self.version)


def write_version(tensordict: TensorDictBase, version: Version) -> TensorDictBase:
    """Write a version under "policy_version" of every row, and return the tensordict."""
    size = tensordict.batch_size
    if isinstance(version, int):
        return tensordict.set("policy_version", torch.full(size, version, device=tensordict.device))
    return tensordict.set("policy_version", NonTensorData(version, batch_size=size))
