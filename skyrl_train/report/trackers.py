"""The registry of trackers, and the object that combines the trackers of a run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from skyrl_train.config.choices import TRACKERS
from skyrl_train.config.redaction import redact
from skyrl_train.registry import Registry
from skyrl_train.report.diagnosis import Diagnosis, Rule
from skyrl_train.report.jsonl import JsonlTracker
from skyrl_train.report.metric_catalog import add_deprecated_names
from skyrl_train.report.prometheus import PrometheusTracker
from skyrl_train.report.protocol import SampleRow, Tracker, TrackerSetup
from skyrl_train.terminal import escape_control_chars

_log = logging.getLogger(__name__)

CONSOLE = "console"
trackers: Registry[Callable[[TrackerSetup], Tracker]] = Registry("tracker", TRACKERS)


class Trackers:
    """A tracker that forwards every call to several trackers.

    If a tracker raises an exception, it is removed with one warning and training continues (F39). None of the methods
    raises. Values of credential variables, which a tool of an environment may have shown, are redacted in texts and
    names. Control characters in metric names are escaped, because environments and data rows choose parts of them.
    """

    def __init__(self, members: Mapping[str, Tracker]):
        """Combine `members`, trackers by name. Warnings use the names."""
        self._members = dict(members)

    def begin(self, step: int, total_steps: int) -> None:
        """Tell every tracker that the run continues after `step` (0: from the start) and has `total_steps` steps."""
        self._call_each("begin", step, total_steps)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Send the metrics of a step to every tracker, renamed ones under their deprecated name as well."""
        written = add_deprecated_names(redact(metrics))
        self._call_each("log", {escape_control_chars(str(name)): value for name, value in written.items()}, step)

    def samples(self, rows: Sequence[SampleRow], step: int) -> None:
        """Send a few complete rollouts of a step to every tracker."""
        self._call_each("samples", _redact_rows(rows), step)

    def table(self, rows: Sequence[SampleRow], step: int) -> None:
        """Send a table of rollouts of a step to the trackers that have a method `table`."""
        self._call_each("table", _redact_rows(rows), step)

    def fail(self, error: BaseException) -> None:
        """Tell the trackers that have a method `fail` that the run ends with `error`."""
        self._call_each("fail", error)

    def close(self) -> None:
        """Close and release every tracker. Later calls of any method do nothing."""
        self._call_each("close")
        self._members.clear()

    def __enter__(self) -> Trackers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.fail(error)
        self.close()

    def _call_each(self, method: str, *args: Any) -> None:
        for name, member in list(self._members.items()):
            if method in ("fail", "table") and not hasattr(member, method):
                continue
            try:
                getattr(member, method)(*args)
            except Exception as error:
                del self._members[name]
                reason = f"{method}: {redact(repr(error))}"
                _log.warning("Tracker %s failed and is off for the rest of the run (%s).", name, reason)


def _redact_rows(rows: Sequence[SampleRow]) -> list[SampleRow]:
    redacted: list[list[Any]] = redact([[*row.cells()] for row in rows])
    return [SampleRow(*cells) for cells in redacted]


def make_trackers(
    names: Sequence[str],
    run_dir: Path,
    project_name: str,
    run_name: str,
    config: Mapping[str, Any],
    rules: Sequence[Rule] = (),
) -> Trackers:
    """Make the trackers of a run: JSONL, console, diagnosis, the named ones, and Prometheus if it has a port.

    Args:
        names: Trackers of `trainer.logger`. Repeated names count once.
        run_dir: Folder of the run.
        project_name: Project under which trackers file the run.
        run_name: Name that trackers show for the run.
        config: Resolved configuration without secrets. `trainer.metrics_port` adds the Prometheus tracker.
        rules: Rules of the diagnosis.

    Raises:
        ConfigError: If a name is unknown, the library of a tracker is missing, or the Prometheus port is in use.
    """
    setup = TrackerSetup(Path(run_dir), project_name, run_name, config)
    members: dict[str, Tracker] = {"jsonl": JsonlTracker(setup.run_dir)}
    for name in dict.fromkeys((CONSOLE, *names)):
        members[name] = trackers.get(name)(setup)
    members["diagnosis"] = Diagnosis(setup.run_dir, rules)  # after the console, which shows the metrics it warns about
    if config.get("trainer", {}).get("metrics_port") is not None:
        members["prometheus"] = PrometheusTracker(setup)  # last: nobody would close its server if a later one failed
    return Trackers(members)
