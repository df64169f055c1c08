"""Trackio, Hugging Face's tracker on this machine or in a Space. No other module imports it."""

from __future__ import annotations

import contextlib
import contextvars
import io
import logging
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from skyrl_train.errors import ConfigError
from skyrl_train.report.protocol import (
    SAMPLE_COLUMNS,
    SampleRow,
    TrackerSetup,
    flatten_config,
    load_run_id,
    save_run_id,
)
from skyrl_train.terminal import escape_control_chars, escape_multiline, print_stdout

os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")  # its client's; trackio itself sends nothing of this kind
try:
    import trackio
except ImportError as error:
    raise ConfigError(
        f"trainer.logger names trackio, which cannot be imported ({error}); run `uv pip install trackio`, or leave it "
        "out."
    ) from error

_log = logging.getLogger(__name__)


class TrackioTracker:
    """One Trackio run per run folder, which a resumed run continues. TRACKIO_DIR, TRACKIO_SERVER_URL or
    TRACKIO_SPACE_ID say where; without them it is the folder `trackio` of HF_HOME, which `trackio show` reads."""

    def __init__(self, setup: TrackerSetup):
        self._setup = setup
        self._run: Any = None

    def begin(self, step: int, total_steps: int) -> None:
        """Continue the run of an earlier start; one that begins anew is another run: records cannot be taken back."""
        project, folder = escape_control_chars(self._setup.project_name), self._setup.run_dir
        name = load_run_id(folder, "trackio") if step else None
        if name is None:  # names are what Trackio finds runs by, and many have the same
            name = f"{escape_control_chars(self._setup.run_name)}-{secrets.token_hex(3)}"
            save_run_id(folder, "trackio", name)
        config = {key.lstrip("_"): value for key, value in flatten_config(self._setup.config).items()}
        options = {"embed": False, "auto_log_gpu": False, "auto_log_cpu": False, "private": True}  # a Space it creates
        with _quiet():
            # In a context of its own, Trackio knows of no other run: one of the user's goes on.
            self._run = contextvars.Context().run(
                lambda: trackio.init(project, name=name, resume="allow", config=config, **options)
            )
        print_stdout(f'trackio: `trackio show --project "{project}"` shows {name}')

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log({name: float(value) for name, value in metrics.items()}, step=step)

    def samples(self, rows: Sequence[SampleRow], step: int) -> None:
        """They are in the table."""

    def table(self, rows: Sequence[SampleRow], step: int) -> None:
        if rows:
            table = trackio.Table(columns=[*SAMPLE_COLUMNS], data=[row.cells(escape_multiline) for row in rows])
            self._run.log({"samples": table}, step=step)

    def close(self) -> None:
        if self._run is not None:
            with _quiet():
                self._run.finish()


@contextmanager
def _quiet() -> Iterator[None]:
    """What Trackio prints is in the run's log."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        yield
    for line in said.getvalue().splitlines():
        _log.info("%s", line)
