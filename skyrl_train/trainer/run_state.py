"""A run's checkpoints and exports: what they contain, and how a run resumes from one."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from skyrl_train.errors import CheckpointError
from skyrl_train.learner.learner import Learner
from skyrl_train.trainer.checkpoints import Checkpoints


class RunState:
    """Saves and restores everything a step depends on: weights, optimizer, schedule, step, controllers.

    Controllers are all other objects with `state()` and `load_state()`: the position in the data, the KL coefficient.
    Sampling and the order of the data need no state: both are functions of the seed and of that position.
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
        reference_folder: Path | None = None,
    ):
        """`reference_folder`: used to copy the policy to the reference; None for a reference that never changes."""
        self._checkpoints = checkpoints
        self._learner = learner
        self._export_path = export_path
        self._resume_mode = resume_mode
        self._resume_path = resume_path
        self._fingerprints = dict(fingerprints)
        self._controllers = dict(controllers or {})
        self._reference_folder = None if learner.reference is None else reference_folder

    async def resume(self) -> int:
        """Load the checkpoint that the configuration asks for; returns the step to continue from, 0 for a fresh run.

        Raises CheckpointError if the data has changed since the checkpoint was written.
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
        for role, group in self._learner.trained.items():
            await group.all("load", str(found.path / role))
        if self._reference_folder is not None and (found.path / "reference").is_dir():
            await self._reference("reload", found.path / "reference")
        for name, controller in self._controllers.items():
            controller.load_state(found.state["controllers"][name])
        return found.step

    async def save(self, step: int) -> None:
        """Write a checkpoint atomically: it appears complete or not at all."""
        folder = self._checkpoints.begin(step)
        for role, group in self._learner.trained.items():
            (folder / role).mkdir(parents=True, exist_ok=True)
            await group.all("save", str(folder / role))
        if self._reference_folder is not None:
            await self._reference("export", folder / "reference")
        controllers = {name: controller.state() for name, controller in self._controllers.items()}
        self._checkpoints.commit(step, {"fingerprints": self._fingerprints, "controllers": controllers})

    async def export(self, step: int) -> Path:
        """Write the policy as a Hugging Face folder; returns its path."""
        folder = self._export_path / f"global_step_{step}" / "policy"
        await self._learner.policy.all("export", str(folder))
        return folder

    async def update_reference(self) -> None:
        """Copy the policy's weights to the reference, if the reference follows the policy."""
        folder = self._reference_folder
        if folder is None:
            return
        shutil.rmtree(folder, ignore_errors=True)
        try:
            await self._learner.policy.all("export", str(folder))
            await self._reference("reload", folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    async def _reference(self, method: str, folder: Path) -> None:
        """Export or reload the reference as a Hugging Face folder: its ranks and dtype may not be the policy's."""
        assert self._learner.reference is not None
        await self._learner.reference.all(method, str(folder))
