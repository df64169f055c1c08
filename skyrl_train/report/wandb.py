"""Weights & Biases; no other module imports it. Also works without network or account (offline, `wandb sync` later)."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path

from skyrl_train.config.redaction import redact
from skyrl_train.errors import ConfigError
from skyrl_train.report.protocol import SAMPLE_COLUMNS, SampleRow, TrackerSetup, load_run_id, save_run_id
from skyrl_train.terminal import print_stdout

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
        self._setup = setup
        self._folder = setup.run_dir.resolve()
        self._run: wandb.Run | None = None
        self._exit_code = 0

    def begin(self, step: int, total_steps: int) -> None:
        """Continue the run of an earlier start; one that begins anew is another: W&B takes a step only once."""
        if self._run is None:
            run_id = (load_run_id(self._setup.run_dir, "wandb") if step else None) or secrets.token_hex(6)
            self._run = self._start(run_id)
            save_run_id(self._setup.run_dir, "wandb", run_id)
        self._run.config.update({"total_steps": total_steps}, allow_val_change=True)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._begun.log(dict(metrics), step=step)

    def samples(self, rows: Sequence[SampleRow], step: int) -> None:
        """They are in the table."""

    def table(self, rows: Sequence[SampleRow], step: int) -> None:
        if rows:
            table = wandb.Table(columns=[*SAMPLE_COLUMNS], data=[row.cells() for row in rows])
            self._begun.log({"samples": table}, step=step)

    def fail(self, error: BaseException) -> None:
        self._exit_code = 1

    def close(self) -> None:
        if self._run is not None:
            self._run.finish(self._exit_code)

    @property
    def _begun(self) -> wandb.Run:
        assert self._run is not None, "begin comes first"
        return self._run

    def _start(self, run_id: str) -> wandb.Run:
        """Online, or offline where that fails; says where the run can be seen."""
        try:
            mode = os.environ.get("WANDB_MODE") or ("online" if wandb.login(prompt=False) else "offline")
            run = self._open(mode, run_id)
        except wandb.errors.Error as error:
            why, kept = redact(str(error)), f"{self._folder}/wandb"
            _log.warning("wandb cannot be reached (%s): this run is kept in %s; `wandb sync` sends it.", why, kept)
            run = self._open("offline", run_id)
        # W&B's own output says so too, but among a dozen other lines.
        if run.offline:
            print_stdout(f"wandb: offline, `wandb sync {Path(run.dir).parent}` sends this run")
        elif run.url:  # none if W&B is disabled
            print_stdout(f"wandb: {run.url}")
        return run

    def _open(self, mode: str, run_id: str) -> wandb.Run:
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
        return wandb.init(
            mode=mode,  # type: ignore[arg-type]
            settings=settings,
            project=self._setup.project_name,
            name=self._setup.run_name,
            dir=str(self._folder),
            id=run_id,
            config=dict(self._setup.config),
            resume="allow",
        )
