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

    acting: Version | None = None
    """The version that sampled the actions of the next step, if a collector sets it; None: `version`."""

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        return self._written(next_tensordict, self.version if self.acting is None else self.acting)

    def _reset(self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase) -> TensorDictBase:
        return self._written(tensordict_reset, self.version)

    def _post_step_mdp_hooks(
        self, tensordict: TensorDictBase, tensordict_: TensorDictBase
    ) -> tuple[TensorDictBase, TensorDictBase]:
        tensordict.set("policy_version", tensordict.get(("next", "policy_version")))
        return tensordict, self._written(tensordict_, self.version)

    def _written(self, tensordict: TensorDictBase, version: Version) -> TensorDictBase:
        if isinstance(version, int):
            value = torch.full(tensordict.batch_size, version, dtype=torch.int64, device=tensordict.device)
            return tensordict.set("policy_version", value)
        return tensordict.set("policy_version", NonTensorData(version, batch_size=tensordict.batch_size))
