"""The working folder of recorded runs, with the data and models from which they start."""

from __future__ import annotations

import json
from pathlib import Path

import quickstart
from model import save_model
from runs import Run

from skyrl_train.testing.tiny_models import save_tiny_model

SEED = 0


class RecordingWorkspace:
    """A working folder that creates data and models when they are needed, and reuses those that exist."""

    def __init__(self, folder: Path):
        self._warm_up_folder = folder / "warm"
        self._random = folder / "random"
        self._runs = folder / "runs"

    def output(self, name: str) -> Path:
        return self._runs / name

    def trained(self, name: str) -> Path | None:
        """Return the folder of the model that a run has exported, or None."""
        return next(self.output(name).glob("export/global_step_*/policy"), None)

    def overrides(self, name: str, run: Run) -> list[str]:
        """Return the command line of a run, and create the data and models that it needs."""
        if not (self._warm_up_folder / "sft" / "export").exists():
            texts = quickstart.write_data(self._warm_up_folder / "data", SEED, quickstart.OPERATIONS)
            save_model(self._warm_up_folder / "model", texts, SEED)
            quickstart.warm_up(self._warm_up_folder, SEED, steps=None)
        defaults = {
            "device": "cpu",
            "trainer.logger": "[]",
            "trainer.seed": SEED,
            "trainer.policy.model.path": self._model(run),
            "trainer.ckpt_path": self.output(name),
            "trainer.export_path": self.output(name) / "export",
            "data.train_data": f"['{self._rows(run.environment)}']",
            "data.val_data": f"['{self._warm_up_folder / 'data' / 'validation.jsonl'}']",
            "environment.skyrl_gym.max_env_workers": 1,
        }
        keys = [f"{key}={value}" for key, value in {**defaults, **run.keys}.items()]
        if run.teacher_run:
            teacher = self.trained(run.teacher_run)
            assert teacher is not None, f"the teacher run {run.teacher_run} has exported no model"
            keys.append(f"trainer.ref.model.path={teacher}")
        return ["--config-dir", str(run.preset.parent), "--config-name", run.preset.stem, *keys]

    def _model(self, run: Run) -> Path:
        if not run.random_model:
            return next((self._warm_up_folder / "sft" / "export").glob("global_step_*/policy"))
        if not self._random.exists():
            save_tiny_model(self._random)
        return self._random

    def _rows(self, environment: str) -> Path:
        """Write the training data with another environment, and return the file."""
        file = self._warm_up_folder / "data" / f"train_{environment}.jsonl"
        lines = (self._warm_up_folder / "data" / "train.jsonl").read_text(encoding="utf-8").splitlines()
        quickstart.write_jsonl(file, [json.loads(line) | {"env_class": environment} for line in lines])
        return file
