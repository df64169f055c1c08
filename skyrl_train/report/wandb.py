"""Weights & Biases; no other module imports it. Also works without network or account (offline, `wandb sync` later)."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from skyrl_train.config.secrets import redact
from skyrl_train.errors import ConfigError
from skyrl_train.report.protocol import SampleRow, TrackerSetup

try:
    import wandb
except ImportError as error:
    raise ConfigError(
        f"trainer.logger names wandb, which cannot be imported ({error}); run `uv pip install wandb`, or leave it out."
    ) from error

_log = logging.getLogger(__name__)
INIT_TIMEOUT_S = 60.0


class WandbTracker:
    """One W&B run per run folder; a resumed run continues it. WANDB_MODE decides; without it, online if logged in."""

    def __init__(self, setup: TrackerSetup):
        folder = str(setup.run_dir.resolve())
        self._options = {
            "project": setup.project_name,
            "name": setup.run_name,
            "dir": folder,
            "id": hashlib.sha256(f"{setup.run_name}:{folder}".encode()).hexdigest()[:12],
            "config": dict(setup.config),
        }
        try:
            mode = os.environ.get("WANDB_MODE") or ("online" if wandb.login(prompt=False) else "offline")
            self._run = self._open(mode)
        except wandb.errors.Error as error:
            why = redact(str(error))
            _log.warning(
                "wandb cannot be reached (%s): this run is kept in %s/wandb; `wandb sync` sends it.", why, folder
            )
            self._run = self._open("offline")
        # W&B's own output says so too, but among a dozen other lines.
        if self._run.offline:
            print(f"wandb: offline, `wandb sync {Path(self._run.dir).parent}` sends this run", flush=True)
        elif self._run.url:  # none if W&B is disabled
            print(f"wandb: {self._run.url}", flush=True)

    def _open(self, mode: str) -> wandb.Run:
        settings = wandb.Settings(
            init_timeout=INIT_TIMEOUT_S,
            console="off",
            silent=True,
            # Variables of the scheduler (SLURM_JWT), the command line, code and git remotes would be sent as metadata.
            x_disable_meta=True,
            x_save_requirements=False,
            host="-",
            disable_code=True,
            disable_git=True,
        )
        online = {"resume": "allow"} if mode == "online" else {}
        return wandb.init(mode=mode, settings=settings, **self._options, **online)  # type: ignore[arg-type]

    def begin(self, step: int, total_steps: int) -> None:
        self._run.config.update({"total_steps": total_steps}, allow_val_change=True)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log(dict(metrics), step=step)

    def samples(self, rows: Sequence[SampleRow], step: int) -> None:
        table = wandb.Table(columns=["prompt", "response", "reward", "stop_reason"])
        for row in rows:
            table.add_data(row.prompt, row.response, row.reward, row.stop_reason)
        self._run.log({"samples": table}, step=step)

    def close(self) -> None:
        self._run.finish()
