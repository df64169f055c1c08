"""The Trackio tracker, which records on this machine or in a Hugging Face Space. No other module imports Trackio."""

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

os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")  # for Trackio's client; Trackio itself sends no analytics
try:
    import trackio
except ImportError as error:
    raise ConfigError(
        f"trainer.logger names trackio, which cannot be imported ({error}). Run `uv pip install trackio`, or remove it "
        "from trainer.logger."
    ) from error

_log = logging.getLogger(__name__)


class TrackioTracker:
    """A tracker with one Trackio run per run folder, which a resumed run continues.

    The variables TRACKIO_DIR, TRACKIO_SERVER_URL and TRACKIO_SPACE_ID choose where it records. The default is the
    folder `trackio` of HF_HOME, which `trackio show` reads.
    """

    def __init__(self, setup: TrackerSetup):
        """Create a tracker. It opens the Trackio run in `begin`."""
        self._setup = setup
        self._run: Any = None

    def begin(self, step: int, total_steps: int) -> None:
        """Continue the saved Trackio run, or create a new one at step 0, because Trackio cannot delete records."""
        project, folder = escape_control_chars(self._setup.project_name), self._setup.run_dir
        name = load_run_id(folder, "trackio") if step else None
        if name is None:  # Trackio identifies runs by name, and many runs share one
            name = f"{escape_control_chars(self._setup.run_name)}-{secrets.token_hex(3)}"
            save_run_id(folder, "trackio", name)
        config = {key.lstrip("_"): value for key, value in flatten_config(self._setup.config).items()}
        options = {"embed": False, "auto_log_gpu": False, "auto_log_cpu": False, "private": True}  # a Space it creates
        with _quiet():
            # In a new context Trackio does not see, and so does not end, a run that the user has open.
            self._run = contextvars.Context().run(
                lambda: trackio.init(project, name=name, resume="allow", config=config, **options)
            )
        print_stdout(f'trackio: `trackio show --project "{project}"` shows {name}')

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Record the metrics of a step."""
        self._run.log({name: float(value) for name, value in metrics.items()}, step=step)

    def samples(self, rows: Sequence[SampleRow], step: int) -> None:
        """Do nothing: `table` has these rollouts, too."""

    def table(self, rows: Sequence[SampleRow], step: int) -> None:
        """Record rollouts of a step as a Trackio table."""
        if rows:
            table = trackio.Table(columns=[*SAMPLE_COLUMNS], data=[row.cells(escape_multiline) for row in rows])
            self._run.log({"samples": table}, step=step)

    def close(self) -> None:
        """Finish the Trackio run, if there is one."""
        if self._run is not None:
            with _quiet():
                self._run.finish()


@contextmanager
def _quiet() -> Iterator[None]:
    """Send what Trackio prints to the run's log instead of the terminal."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        yield
    for line in output.getvalue().splitlines():
        _log.info("%s", line)
