"""A run's checkpoints and exports: which are there, what is in them, how a run goes on from one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from skyrl_train.errors import CheckpointError
from skyrl_train.trainer.checkpoints import Checkpoints
from skyrl_train.workers.learner import Learner


class RunState:
    """Saves and restores everything a step depends on: weights, optimizer, schedule, step, controllers.

    Sampling and data order need no state of their own: both are functions of the seed and the step.
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        learner: Learner,
        export_path: Path,
        *,
        resume_mode: str,
        resume_path: str | None,
        fingerprints: Mapping[str, str],
        controllers: Mapping[str, Any] | None = None,
    ):
        self._checkpoints = checkpoints
        self._learner = learner
        self._export_path = export_path
        self._resume_mode = resume_mode
        self._resume_path = resume_path
        self._fingerprints = dict(fingerprints)
        self._controllers = dict(controllers or {})

    async def resume(self) -> int:
        """Load the checkpoint that the configuration asks for; returns the step to go on from, 0 for a fresh run.

        Raises CheckpointError when the data it was trained on has changed since.
        """
        found = self._checkpoints.load_path(self._resume_mode, self._resume_path)
        if found is None:
            return 0
        for name, stored in found.state["fingerprints"].items():
            current = self._fingerprints.get(name)
            if current != stored:
                raise CheckpointError(
                    f"{name} has changed since {found.path} was written (then {stored}, now {current}): "
                    "the run cannot go on where it stopped. Restore the data, or start in another trainer.ckpt_path."
                )
        await self._learner.policy.all("load", str(found.path / "policy"))
        for name, controller in self._controllers.items():
            controller.load_state(found.state["controllers"][name])
        return found.step

    async def save(self, step: int) -> None:
        """Write a checkpoint that appears all at once or not at all."""
        folder = self._checkpoints.begin(step)
        (folder / "policy").mkdir(parents=True, exist_ok=True)
        await self._learner.policy.all("save", str(folder / "policy"))
        controllers = {name: controller.state() for name, controller in self._controllers.items()}
        self._checkpoints.commit(step, {"fingerprints": self._fingerprints, "controllers": controllers})

    async def export(self, step: int) -> Path:
        """The policy as a Hugging Face folder."""
        folder = self._export_path / f"global_step_{step}" / "policy"
        await self._learner.policy.all("export", str(folder))
        return folder
