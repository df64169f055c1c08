"""The MLflow tracker. No other module imports MLflow."""

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

# With these limits a server that does not answer blocks a step for less than a minute until the tracker is dropped.
for _name, _value in {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",  # the URL may contain a password
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
        f"trainer.logger names mlflow, which cannot be imported ({error}). Run `uv pip install mlflow`, or remove it "
        "from trainer.logger."
    ) from error

FOLDER = "mlflow"
"""Folder in the run's folder with the database and its artifacts. Their absolute paths bind it to this machine."""
_MAX_TABLES = 40
"""Number of the newest steps whose rollouts MLflow shows as tables: a tag of limited length names them."""


class MlflowTracker:
    """A tracker with one MLflow run per run folder, which a resumed run continues. The project is the experiment.

    It records at MLFLOW_TRACKING_URI or, if that is not set, in a database in the run's folder.
    """

    def __init__(self, setup: TrackerSetup):
        """Create a tracker. It opens the MLflow run in `begin`."""
        self._setup = setup
        self._folder = setup.run_dir.resolve() / FOLDER
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        self._uses_run_folder = not uri
        self._uri = uri or f"sqlite:///{self._folder / 'mlflow.db'}"
        self._tables: deque[dict[str, str]] = deque(maxlen=_MAX_TABLES)
        self._run_id = ""
        self._status = "FINISHED"

    def begin(self, step: int, total_steps: int) -> None:
        """Continue the saved MLflow run, or create a new one at step 0, because MLflow cannot delete records.

        Raises mlflow's MlflowException if the server does not answer or refuses.
        """
        if self._uses_run_folder:
            self._folder.mkdir(exist_ok=True)
        self._client = MlflowClient(self._uri)
        experiment_id = self._experiment_id()
        params = self._reopen_run(experiment_id) if step else None
        if params is None:
            name = escape_control_chars(self._setup.run_name)
            self._run_id = self._client.create_run(experiment_id, run_name=name).info.run_id
            save_run_id(self._setup.run_dir, "mlflow", self._run_id)
        self._log_config(params or {})
        print_stdout(redact(f"mlflow: {self._view_hint(experiment_id)}"))

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Record the metrics of a step, in batches of the size that MLflow allows."""
        now = time.time_ns() // 1_000_000
        values = [Metric(_key(name), float(value), now, step) for name, value in metrics.items()]
        for start in range(0, len(values), MAX_METRICS_PER_BATCH):
            self._client.log_batch(self._run_id, metrics=values[start : start + MAX_METRICS_PER_BATCH])

    def samples(self, rows: Sequence[SampleRow], step: int) -> None:
        """Do nothing: `table` has these rollouts, too."""

    def table(self, rows: Sequence[SampleRow], step: int) -> None:
        """Record rollouts of a step as a JSON artifact, and add it to the tag `mlflow.loggedArtifacts`.

        MLflow shows the tables that this tag lists, which are only the newest ones. `mlflow.log_table` would
        list all artifacts of the run and exceed the maximum length of a tag.
        """
        if not rows:
            return
        content = {"columns": SAMPLE_COLUMNS, "data": [row.cells(escape_multiline) for row in rows]}
        file = f"samples/step_{step:08d}.json"
        self._client.log_text(self._run_id, json.dumps(content), file)
        newest = {"path": file, "type": "table"}
        self._tables = deque([table for table in self._tables if table != newest], _MAX_TABLES)  # for a repeated step
        self._tables.append(newest)
        self._client.set_tag(self._run_id, MLFLOW_LOGGED_ARTIFACTS, json.dumps([*self._tables]))

    def fail(self, error: BaseException) -> None:
        """Close the MLflow run as KILLED if `error` means that the run was stopped, else as FAILED."""
        was_stopped = isinstance(error, (asyncio.CancelledError, KeyboardInterrupt, RunInterrupted))
        self._status = "KILLED" if was_stopped else "FAILED"

    def close(self) -> None:
        """Set the status of the MLflow run, if there is one, to its final value."""
        if self._run_id:
            self._client.set_terminated(self._run_id, self._status)

    def _experiment_id(self) -> str:
        """Return the id of the project's experiment. Create the experiment if it does not exist."""
        name = escape_control_chars(self._setup.project_name)[:MAX_EXPERIMENT_NAME_LENGTH] or "skyrl"
        artifacts = (self._folder / "artifacts").as_uri() if self._uses_run_folder else None
        existing = self._client.get_experiment_by_name(name)
        if existing is not None and artifacts and existing.artifact_location != artifacts:  # the folder was moved
            name = f"{name[:200]} {hashlib.sha256(artifacts.encode()).hexdigest()[:8]}"
            existing = self._client.get_experiment_by_name(name)
        if existing is not None:
            return str(existing.experiment_id)
        try:
            return str(self._client.create_experiment(name, artifact_location=artifacts))
        except MlflowException:  # another run may have created it at the same time
            created = self._client.get_experiment_by_name(name)
            if created is None:
                raise
            return str(created.experiment_id)

    def _reopen_run(self, experiment_id: str) -> dict[str, str] | None:
        """Reopen the MLflow run of an earlier attempt and return its parameters; None if it does not exist."""
        run_id = load_run_id(self._setup.run_dir, "mlflow")
        if run_id is None:
            return None
        try:
            run = self._client.get_run(run_id)
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return None
        if run.info.experiment_id != experiment_id or run.info.lifecycle_stage != "active":
            return None
        self._run_id = run_id
        self._client.update_run(run_id, status="RUNNING")
        self._tables.extend(json.loads(run.data.tags.get(MLFLOW_LOGGED_ARTIFACTS, "[]")))
        return dict(run.data.params)

    def _log_config(self, known: Mapping[str, str]) -> None:
        """Record new parameters, because MLflow cannot change known ones, and the complete current configuration."""
        config = {
            _key(name): str(value)[:MAX_PARAM_VAL_LENGTH] for name, value in flatten_config(self._setup.config).items()
        }
        new = [Param(name, value) for name, value in config.items() if name not in known]
        for start in range(0, len(new), MAX_PARAMS_TAGS_PER_BATCH):
            self._client.log_batch(self._run_id, params=new[start : start + MAX_PARAMS_TAGS_PER_BATCH])
        self._client.log_text(self._run_id, json.dumps(self._setup.config, indent=1, default=str), "config.json")

    def _view_hint(self, experiment_id: str) -> str:
        if self._uses_run_folder:
            return f"`mlflow ui --backend-store-uri {self._uri}` shows this run"
        parts = urlsplit(self._uri)
        url = urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))  # without a password
        if parts.scheme in ("http", "https"):
            url = f"{url.rstrip('/')}/#/experiments/{experiment_id}/runs/{self._run_id}"
        return f"run {self._run_id} at {url}"


def _key(name: str) -> str:
    """Return a name in the form that MLflow accepts, with a hash in place of the end of a long one.

    MLflow accepts word characters and `-. :/`, no empty path parts, and at most MAX_ENTITY_KEY_LENGTH characters.
    """
    key = re.sub(r"[^\w\-. :/]", lambda match: f"_x{ord(match[0]):x}_", name)
    key = "/".join(part if part.strip(".") else part.replace(".", "_") or "_" for part in key.split("/"))
    if len(key) <= MAX_ENTITY_KEY_LENGTH:
        return key
    return f"{key[: MAX_ENTITY_KEY_LENGTH - 9]}_{hashlib.sha256(name.encode()).hexdigest()[:8]}"
