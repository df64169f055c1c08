"""The Weights & Biases tracker. No other module imports W&B.

Without network or account it records offline, and `wandb sync` uploads the run later.
"""

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
        f"trainer.logger names wandb, which cannot be imported ({error}). Run `uv pip install wandb`, or remove it "
        "from trainer.logger."
    ) from error

_log = logging.getLogger(__name__)
INIT_TIMEOUT_S = 60.0


class WandbTracker:
    """A tracker with one W&B run per run folder, which a resumed run continues.

    The variable WANDB_MODE chooses online or offline; the default is online if the user is logged in.
    """

    def __init__(self, setup: TrackerSetup):
        """Create a tracker. It opens the W&B run in `begin`."""
        self._setup = setup
        self._folder = setup.run_dir.resolve()
        self._run: wandb.Run | None = None
        self._exit_code = 0

    def begin(self, step: int, total_steps: int) -> None:
        """Continue the saved W&B run, or create a new one at step 0, because W&B accepts each step only once.

        Raises wandb.Error if neither an online nor an offline run can be opened.
        """
        if self._run is None:
            run_id = (load_run_id(self._setup.run_dir, "wandb") if step else None) or secrets.token_hex(6)
            self._run = self._start(run_id)
            save_run_id(self._setup.run_dir, "wandb", run_id)
        self._run.config.update({"total_steps": total_steps}, allow_val_change=True)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Record the metrics of a step."""
        self._open_run.log(dict(metrics), step=step)

    def samples(self, rows: Sequence[SampleRow], step: int) -> None:
        """Do nothing: `table` has these rollouts, too."""

    def table(self, rows: Sequence[SampleRow], step: int) -> None:
        """Record rollouts of a step as a W&B table."""
        if rows:
            table = wandb.Table(columns=[*SAMPLE_COLUMNS], data=[row.cells() for row in rows])
            self._open_run.log({"samples": table}, step=step)

    def fail(self, error: BaseException) -> None:
        """Let `close` mark the W&B run as failed. The type of the error does not matter."""
        self._exit_code = 1

    def close(self) -> None:
        """Finish the W&B run, if there is one, and wait until its data is written or sent."""
        if self._run is not None:
            self._run.finish(self._exit_code)

    @property
    def _open_run(self) -> wandb.Run:
        assert self._run is not None, "begin must be called first"
        return self._run

    def _start(self, run_id: str) -> wandb.Run:
        """Open a run online or, if that fails, offline, and print where the run can be seen."""
        try:
            mode = os.environ.get("WANDB_MODE") or ("online" if wandb.login(prompt=False) else "offline")
            run = self._open(mode, run_id)
        except wandb.errors.Error as error:
            reason, folder = redact(str(error)), f"{self._folder}/wandb"
            _log.warning(
                "wandb cannot be reached (%s). The run is recorded in %s; `wandb sync` uploads it.", reason, folder
            )
            run = self._open("offline", run_id)
        # W&B's own output, which is silenced, has this among a dozen other lines.
        if run.offline:
            print_stdout(f"wandb: offline, `wandb sync {Path(run.dir).parent}` uploads this run")
        elif run.url:  # no URL if W&B is disabled
            print_stdout(f"wandb: {run.url}")
        return run

    def _open(self, mode: str, run_id: str) -> wandb.Run:
        settings = wandb.Settings(
            init_timeout=INIT_TIMEOUT_S,
            console="off",
            silent=True,
            # Otherwise W&B sends scheduler variables (SLURM_JWT), the command line, code and git remotes as metadata.
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
