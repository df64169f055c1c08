"""TensorBoard event files in <run folder>/tensorboard, written without torch. No other module imports it."""

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
        f"trainer.logger names tensorboard, which cannot be imported ({error}); run `uv pip install tensorboard`, "
        "or leave it out."
    ) from error

_ENTITIES = {ord(sign): f"&#{ord(sign)};" for sign in string.punctuation}


class TensorboardTracker:
    """Scalars, completions as tables of text, and the configuration; `tensorboard --logdir <run folder>` shows them."""

    def __init__(self, setup: TrackerSetup):
        self._writer = EventFileWriter(str(setup.run_dir / "tensorboard"))
        self._config = setup.config

    def begin(self, step: int, total_steps: int) -> None:
        """Write a session start at `step + 1`, which makes TensorBoard drop an earlier attempt's later records."""
        self._add(Event(session_log=SessionLog(status=SessionLog.START), step=step + 1 if step else 0))
        if self._config:
            self._add(Event(summary=hparams_pb(flatten_config(self._config)), step=0))

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        values = [Summary.Value(tag=name, simple_value=float(value)) for name, value in metrics.items()]
        self._add(Event(summary=Summary(value=values), step=step))
        self._writer.flush()

    def samples(self, rows: Sequence[SampleRow], step: int) -> None:
        """They are in the table."""

    def table(self, rows: Sequence[SampleRow], step: int) -> None:
        if rows:
            cells = [[cell if isinstance(cell, str) else f"{cell:g}" for cell in row.cells(_literal)] for row in rows]
            table = [SAMPLE_COLUMNS, *cells]
            self._add(Event(summary=text_pb("samples", np.array(table, dtype=object)), step=step))

    def close(self) -> None:
        self._writer.close()

    def _add(self, event: Event) -> None:
        event.wall_time = time.time()
        self._writer.add_event(event)


def _literal(text: str) -> str:
    """HTML that shows this text and nothing else, also where it is read as Markdown, as TensorBoard does by default."""
    shown = escape_multiline(text).translate(_ENTITIES)
    return re.sub(r"^ | (?= )", "&nbsp;", shown, flags=re.MULTILINE).replace("\n", "<br>")
