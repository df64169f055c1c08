"""TensorBoard event files in <run folder>/tensorboard, written without torch. No other module imports it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from skyrl_train.errors import ConfigError
from skyrl_train.report.protocol import SampleRow, TrackerSetup

try:
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter
except ImportError as error:
    raise ConfigError(
        f"trainer.logger names tensorboard, which cannot be imported ({error}); run `uv pip install tensorboard`, "
        "or leave it out."
    ) from error


class TensorboardTracker:
    """Writes scalars only; view them with `tensorboard --logdir <run folder>`."""

    def __init__(self, setup: TrackerSetup):
        self._writer = EventFileWriter(str(setup.run_dir / "tensorboard"))

    def begin(self, step: int, total_steps: int) -> None:
        """Write a session start at `step + 1`, which makes TensorBoard drop an earlier attempt's later records."""
        self._add(Event(session_log=SessionLog(status=SessionLog.START), step=step + 1 if step else 0))

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        values = [Summary.Value(tag=name, simple_value=float(value)) for name, value in metrics.items()]
        self._add(Event(summary=Summary(value=values), step=step))
        self._writer.flush()

    def samples(self, rows: Sequence[SampleRow], step: int) -> None:
        """Does nothing: completions are in samples.jsonl."""

    def close(self) -> None:
        self._writer.close()

    def _add(self, event: Event) -> None:
        event.wall_time = time.time()
        self._writer.add_event(event)
