"""The state of a run with a real learner of one rank, without a cluster."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from skyrl_train.learner.learner import BatchSizes, Learner, LocalWorker, WorkerGroup
from skyrl_train.learner.worker import LearnerWorker
from skyrl_train.trainer.checkpoint_manager import CheckpointManager
from skyrl_train.trainer.checkpoints import CheckpointStore
from tests.support.learner_specs import tiny_spec


class Position:
    """A controller with a state."""

    def __init__(self) -> None:
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


Steps = Callable[[CheckpointManager, Learner, Position], Awaitable[None]]


def with_saved_state(
    model: str,
    root: Path,
    steps: Steps,
    more: Mapping[str, Any] | None = None,
    spec: Mapping[str, Any] | None = None,
    **options: Any,
) -> None:
    """Run `steps` with a learner of one rank and the state of its run.

    `more` are other controllers of it, `spec` fields of the learner's LearnerSpec, and `options` those of RunState.
    """

    async def run() -> None:
        worker = LearnerWorker(tiny_spec(model, **(spec or {})), 0, 1)
        learner, position = Learner(WorkerGroup([LocalWorker(worker)]), None, BatchSizes(100)), Position()
        state = CheckpointManager(
            CheckpointStore(root),
            learner,
            root / "exports",
            fingerprints={"data": "abc"},
            controllers={"position": position, **(more or {})},
            **{"resume_mode": "latest", "resume_path": None, **options},
        )
        await learner.setup()
        try:
            await steps(state, learner, position)
        finally:
            await learner.close()

    asyncio.run(run())


def rewrite_trainer_state(checkpoint: Path, **changes: Any) -> None:
    """Change keys of trainer_state.json (a value of None deletes the key), and update its checksum."""
    file, manifest = checkpoint / "trainer_state.json", checkpoint / "manifest.json"
    state = {key: value for key, value in (json.loads(file.read_text()) | changes).items() if value is not None}
    file.write_text(json.dumps(state))
    listed = json.loads(manifest.read_text())
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    listed["files"][file.name] = {"bytes": file.stat().st_size, "sha256": digest}
    manifest.write_text(json.dumps(listed))
