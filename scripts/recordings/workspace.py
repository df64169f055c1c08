"""The folder in which runs are made, with what they begin with: data and models."""

from __future__ import annotations

import json
from pathlib import Path

import quickstart
from model import save_model
from runs import Run

from skyrl_train.testing.tiny_models import save_tiny_model

SEED = 0


class RecordingWorkspace:
    """What is there already is used again."""

    def __init__(self, folder: Path):
        self._warm = folder / "warm"
        self._random = folder / "random"
        self._runs = folder / "runs"

    def output(self, name: str) -> Path:
        return self._runs / name

    def trained(self, name: str) -> Path | None:
        """The model that a run has exported, if it has."""
        return next(self.output(name).glob("export/global_step_*/policy"), None)

    def overrides(self, name: str, run: Run) -> list[str]:
        """The command line of a run."""
        if not (self._warm / "sft" / "export").exists():
            texts = quickstart.write_data(self._warm / "data", SEED, quickstart.OPERATIONS)
            save_model(self._warm / "model", texts, SEED)
            quickstart.warm_up(self._warm, SEED, steps=None)
        given = {
            "device": "cpu",
            "trainer.logger": "[]",
            "trainer.seed": SEED,
            "trainer.policy.model.path": self._model(run),
            "trainer.ckpt_path": self.output(name),
            "trainer.export_path": self.output(name) / "export",
            "data.train_data": f"['{self._rows(run.environment)}']",
            "data.val_data": f"['{self._warm / 'data' / 'validation.jsonl'}']",
            "environment.skyrl_gym.max_env_workers": 1,
        }
        keys = [f"{key}={value}" for key, value in {**given, **run.keys}.items()]
        if run.teacher_run:
            teacher = self.trained(run.teacher_run)
            assert teacher is not None, f"{run.teacher_run} has exported no model"
            keys.append(f"trainer.ref.model.path={teacher}")
        return ["--config-dir", str(run.preset.parent), "--config-name", run.preset.stem, *keys]

    def _model(self, run: Run) -> Path:
        if not run.random_model:
            return next((self._warm / "sft" / "export").glob("global_step_*/policy"))
        if not self._random.exists():
            save_tiny_model(self._random)
        return self._random

    def _rows(self, environment: str) -> Path:
        """The training data, for another environment."""
        file = self._warm / "data" / f"train_{environment}.jsonl"
        lines = (self._warm / "data" / "train.jsonl").read_text(encoding="utf-8").splitlines()
        quickstart.write_jsonl(file, [json.loads(line) | {"env_class": environment} for line in lines])
        return file
