"""The TensorBoard tracker: event files in <run folder>/tensorboard. No other module imports TensorBoard."""

from __future__ import annotations

import re
import string
import time
from collections.abc import Mapping, Sequence

import numpy as np

from skyrl_train.errors import ConfigError
from skyrl_train.report.protocol import SAMPLE_COLUMNS, SampleRow, TrackerSetup, flatten_config
from skyrl_train.terminal import escape_multiline

try:
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.hparams.summary_v2 import hparams_pb
    from tensorboard.plugins.text.summary_v2 import text_pb
    from tensorboard.summary.writer.event_file_writer import EventFileWriter
except ImportError as error:
    raise ConfigError(
        f"trainer.logger names tensorboard, which cannot be imported ({error}). Run `uv pip install tensorboard`, or "
        "remove it from trainer.logger."
    ) from error

_ENTITIES = {ord(char): f"&#{ord(char)};" for char in string.punctuation}


class TensorboardTracker:
    """A tracker that writes scalars, tables of rollouts and the configuration as hyperparameters.

    `tensorboard --logdir <run folder>` shows them.
    """

    def __init__(self, setup: TrackerSetup):
        """Create a new event file in the run's folder. Raises OSError if that fails."""
        self._writer = EventFileWriter(str(setup.run_dir / "tensorboard"))
        self._config = setup.config

    def begin(self, step: int, total_steps: int) -> None:
        """Write the configuration, and a session start that makes TensorBoard drop records after `step`."""
        self._add(Event(session_log=SessionLog(status=SessionLog.START), step=step + 1 if step else 0))
        if self._config:
            self._add(Event(summary=hparams_pb(flatten_config(self._config)), step=0))

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Write the metrics of a step as scalars, and flush the file."""
        values = [Summary.Value(tag=name, simple_value=float(value)) for name, value in metrics.items()]
        self._add(Event(summary=Summary(value=values), step=step))
        self._writer.flush()

    def samples(self, rows: Sequence[SampleRow], step: int) -> None:
        """Do nothing: `table` has these rollouts, too."""

    def table(self, rows: Sequence[SampleRow], step: int) -> None:
        """Write rollouts of a step as a table that TensorBoard shows under Text."""
        if rows:
            cells = [[cell if isinstance(cell, str) else f"{cell:g}" for cell in row.cells(_literal)] for row in rows]
            table = [SAMPLE_COLUMNS, *cells]
            self._add(Event(summary=text_pb("samples", np.array(table, dtype=object)), step=step))

    def close(self) -> None:
        """Flush and close the event file."""
        self._writer.close()

    def _add(self, event: Event) -> None:
        event.wall_time = time.time()
        self._writer.add_event(event)


def _literal(text: str) -> str:
    """Return HTML that renders as the literal text, with or without TensorBoard's Markdown rendering."""
    escaped = escape_multiline(text).translate(_ENTITIES)
    return re.sub(r"^ | (?= )", "&nbsp;", escaped, flags=re.MULTILINE).replace("\n", "<br>")
