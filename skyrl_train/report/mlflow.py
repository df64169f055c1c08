"""MLflow at MLFLOW_TRACKING_URI, else in a database in the run's folder. No other module imports it."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import time
from collections import deque
from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit, urlunsplit

from skyrl_train.config.redaction import redact
from skyrl_train.errors import ConfigError, RunInterrupted
from skyrl_train.report.protocol import (
    SAMPLE_COLUMNS,
    SampleRow,
    TrackerSetup,
    flatten_config,
    load_run_id,
    save_run_id,
)
from skyrl_train.terminal import escape_control_chars, escape_multiline, print_stdout

# A server that does not answer holds a step up for less than a minute before the tracker is dropped, not for ten.
for _name, _value in {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",  # with the password that the address may have
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
}.items():
    os.environ.setdefault(_name, _value)
try:
    from mlflow import MlflowClient
    from mlflow.entities import Metric, Param
    from mlflow.exceptions import MlflowException
    from mlflow.utils.mlflow_tags import MLFLOW_LOGGED_ARTIFACTS
    from mlflow.utils.validation import (
        MAX_ENTITY_KEY_LENGTH,
        MAX_EXPERIMENT_NAME_LENGTH,
        MAX_METRICS_PER_BATCH,
        MAX_PARAM_VAL_LENGTH,
        MAX_PARAMS_TAGS_PER_BATCH,
    )
except ImportError as error:
    raise ConfigError(
        f"trainer.logger names mlflow, which cannot be imported ({error}); run `uv pip install mlflow`, or leave it "
        "out."
    ) from error

FOLDER = "mlflow"
"""In the run's folder: the database and its artifacts, whose absolute paths make it this machine's own."""
_TABLES = 40
"""So many of the newest steps' completions are shown as tables: a tag of limited length names them."""


class MlflowTracker:
    """One MLflow run per run folder, which a resumed run continues; the project is the experiment."""

    def __init__(self, setup: TrackerSetup):
        self._setup = setup
        self._folder = setup.run_dir.resolve() / FOLDER
        given = os.environ.get("MLFLOW_TRACKING_URI")
        self._is_ours = not given
        self._uri = given or f"sqlite:///{self._folder / 'mlflow.db'}"
        self._tables: deque[dict[str, str]] = deque(maxlen=_TABLES)
        self._run = ""
        self._status = "FINISHED"

    def begin(self, step: int, total_steps: int) -> None:
        """Continue the run of an earlier start; one that begins anew is another run: MLflow cannot delete numbers."""
        if self._is_ours:
            self._folder.mkdir(exist_ok=True)
        self._client = MlflowClient(self._uri)
        experiment = self._experiment()
        params = self._continued(experiment) if step else None
        if params is None:
            self._run = self._client.create_run(
                experiment, run_name=escape_control_chars(self._setup.run_name)
            ).info.run_id
            save_run_id(self._setup.run_dir, "mlflow", self._run)
        self._configure(params or {})
        print_stdout(redact(f"mlflow: {self._how_to_see(experiment)}"))

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        now = time.time_ns() // 1_000_000
        values = [Metric(_key(name), float(value), now, step) for name, value in metrics.items()]
        for start in range(0, len(values), MAX_METRICS_PER_BATCH):
            self._client.log_batch(self._run, metrics=values[start : start + MAX_METRICS_PER_BATCH])

    def samples(self, rows: Sequence[SampleRow], step: int) -> None:
        """They are in the table."""

    def table(self, rows: Sequence[SampleRow], step: int) -> None:
        """A file of JSON per step, as `log_table` writes them, which would name every one of them in a tag."""
        if not rows:
            return
        content = {"columns": SAMPLE_COLUMNS, "data": [row.cells(escape_multiline) for row in rows]}
        file = f"samples/step_{step:08d}.json"
        self._client.log_text(self._run, json.dumps(content), file)
        newest = {"path": file, "type": "table"}
        self._tables = deque([table for table in self._tables if table != newest], _TABLES)  # a step done again
        self._tables.append(newest)
        self._client.set_tag(self._run, MLFLOW_LOGGED_ARTIFACTS, json.dumps([*self._tables]))

    def fail(self, error: BaseException) -> None:
        stopped = isinstance(error, (asyncio.CancelledError, KeyboardInterrupt, RunInterrupted))
        self._status = "KILLED" if stopped else "FAILED"

    def close(self) -> None:
        if self._run:
            self._client.set_terminated(self._run, self._status)

    def _experiment(self) -> str:
        """The id of the project's experiment, which is made if there is none."""
        name = escape_control_chars(self._setup.project_name)[:MAX_EXPERIMENT_NAME_LENGTH] or "skyrl"
        artifacts = (self._folder / "artifacts").as_uri() if self._is_ours else None
        found = self._client.get_experiment_by_name(name)
        if found is not None and artifacts and found.artifact_location != artifacts:  # the folder was moved
            name = f"{name[:200]} {hashlib.sha256(artifacts.encode()).hexdigest()[:8]}"
            found = self._client.get_experiment_by_name(name)
        if found is not None:
            return str(found.experiment_id)
        try:
            return str(self._client.create_experiment(name, artifact_location=artifacts))
        except MlflowException:  # another run made it meanwhile
            made = self._client.get_experiment_by_name(name)
            if made is None:
                raise
            return str(made.experiment_id)

    def _continued(self, experiment: str) -> dict[str, str] | None:
        """Open the run of an earlier start again, and return its parameters; None if it is not there."""
        kept = load_run_id(self._setup.run_dir, "mlflow")
        if kept is None:
            return None
        try:
            run = self._client.get_run(kept)
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return None
        if run.info.experiment_id != experiment or run.info.lifecycle_stage != "active":
            return None
        self._run = kept
        self._client.update_run(kept, status="RUNNING")
        self._tables.extend(json.loads(run.data.tags.get(MLFLOW_LOGGED_ARTIFACTS, "[]")))
        return dict(run.data.params)

    def _configure(self, known: Mapping[str, str]) -> None:
        """Parameters, which cannot be changed once they are there, and all of the configuration as it is now."""
        config = {
            _key(name): str(value)[:MAX_PARAM_VAL_LENGTH] for name, value in flatten_config(self._setup.config).items()
        }
        new = [Param(name, value) for name, value in config.items() if name not in known]
        for start in range(0, len(new), MAX_PARAMS_TAGS_PER_BATCH):
            self._client.log_batch(self._run, params=new[start : start + MAX_PARAMS_TAGS_PER_BATCH])
        self._client.log_text(self._run, json.dumps(self._setup.config, indent=1, default=str), "config.json")

    def _how_to_see(self, experiment: str) -> str:
        if self._is_ours:
            return f"`mlflow ui --backend-store-uri {self._uri}` shows this run"
        parts = urlsplit(self._uri)
        address = urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))  # without a password
        if parts.scheme in ("http", "https"):
            address = f"{address.rstrip('/')}/#/experiments/{experiment}/runs/{self._run}"
        return f"run {self._run} at {address}"


def _key(name: str) -> str:
    """A name that MLflow takes: letters, digits and `_-. :/`, a path without empty parts, at most 250 characters."""
    plain = re.sub(r"[^\w\-. :/]", lambda found: f"_x{ord(found[0]):x}_", name)
    plain = "/".join(part if part.strip(".") else part.replace(".", "_") or "_" for part in plain.split("/"))
    if len(plain) <= MAX_ENTITY_KEY_LENGTH:
        return plain
    return f"{plain[: MAX_ENTITY_KEY_LENGTH - 9]}_{hashlib.sha256(name.encode()).hexdigest()[:8]}"
