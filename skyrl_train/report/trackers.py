"""The registry of trackers, and several of them combined into one."""

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
from skyrl_train.report.prometheus import PrometheusTracker
from skyrl_train.report.protocol import SampleRow, Tracker, TrackerSetup
from skyrl_train.terminal import escape_control_chars

_log = logging.getLogger(__name__)

CONSOLE = "console"
trackers: Registry[Callable[[TrackerSetup], Tracker]] = Registry("tracker", TRACKERS)


class Trackers:
    """Combines several trackers. One that raises is dropped with a single warning, and training continues (F39).

    Texts and names reach them without the contents of credential variables, which a tool of an environment may have
    shown, and names as printable text: environments and rows choose parts of them.
    """

    def __init__(self, members: Mapping[str, Tracker]):
        self._members = dict(members)

    def begin(self, step: int, total_steps: int) -> None:
        self._each("begin", step, total_steps)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._each("log", {escape_control_chars(str(name)): value for name, value in redact(metrics).items()}, step)

    def samples(self, rows: Sequence[SampleRow], step: int) -> None:
        self._each("samples", _without_secrets(rows), step)

    def table(self, rows: Sequence[SampleRow], step: int) -> None:
        """Rollouts of a step, for those that have this method."""
        self._each("table", _without_secrets(rows), step)

    def fail(self, error: BaseException) -> None:
        """The run ends with `error`: told to those that have this method."""
        self._each("fail", error)

    def close(self) -> None:
        self._each("close")
        self._members.clear()

    def __enter__(self) -> Trackers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.fail(error)
        self.close()

    def _each(self, method: str, *args: Any) -> None:
        for name, member in list(self._members.items()):
            if method in ("fail", "table") and not hasattr(member, method):
                continue
            try:
                getattr(member, method)(*args)
            except Exception as error:
                del self._members[name]
                what = f"{method}: {redact(repr(error))}"
                _log.warning("Tracker %s failed and is off for the rest of the run (%s).", name, what)


def _without_secrets(rows: Sequence[SampleRow]) -> list[SampleRow]:
    shown: list[list[Any]] = redact([[*row.cells()] for row in rows])
    return [SampleRow(*cells) for cells in shown]


def make_trackers(
    names: Sequence[str],
    run_dir: Path,
    project_name: str,
    run_name: str,
    config: Mapping[str, Any],
    rules: Sequence[Rule] = (),
) -> Trackers:
    """Make the JSONL tracker, the console tracker and those in `names`, each once, and the diagnosis by these rules.

    With trainer.metrics_port there is one for Prometheus, too. Raises ConfigError for an unknown name, a missing
    library or a port that is in use.
    """
    setup = TrackerSetup(Path(run_dir), project_name, run_name, config)
    members: dict[str, Tracker] = {"jsonl": JsonlTracker(setup.run_dir)}
    for name in dict.fromkeys((CONSOLE, *names)):
        members[name] = trackers.get(name)(setup)
    members["diagnosis"] = Diagnosis(setup.run_dir, rules)  # after those that show the numbers it speaks of
    if config.get("trainer", {}).get("metrics_port") is not None:
        members["prometheus"] = PrometheusTracker(setup)  # last: it listens, and nobody closes it if another one fails
    return Trackers(members)
