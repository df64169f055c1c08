"""Each tracker with its real library, in an environment with this package's dependencies and that one extra."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from skyrl_train.cluster.addresses import free_address
from skyrl_train.report.protocol import load_run_id
from skyrl_train.report.rollout_files import RolloutReader

REPOSITORY = Path(__file__).parents[3]
PATH = os.pathsep.join([os.environ["PATH"], str(REPOSITORY / ".uv" / "bin")])
"""The PATH with the uv that scripts/bootstrap installs where there is none."""
HOSTILE = "\x1b[31m\x00</td><script>f()</script> **b** [a](javascript:f())\ud800\u202e\r\nnext line"
SHOWN = r"\x1b[31m\x00</td><script>f()</script> **b** [a](javascript:f())\ud800\u202e\r" + "\nnext line"
TABLE = {"prompt": SHOWN, "reward": 0.25, "stop_reason": "stop", "uid": "gsm8k-7", "status": "ok"} | {
    "turns": 2,
    "tokens": 300,
    "version": 5,
    "sample": 0,
}
"""A row of completions without the response."""
LONG = "environment/" + 300 * "x"
CANARIES = {name: f"canary-{name}" for name in ("SLURM_JWT", "HF_TOKEN", "WANDB_API_KEY", "MY_PASSWORD")}

pytestmark = [pytest.mark.on_demand, pytest.mark.slow]

WATCHED = """
import socket, sys

def watch(event, arguments):
    if event in ("socket.bind", "socket.connect") and arguments[0].family != socket.AF_UNIX:
        is_local = arguments[1][0] in ("127.0.0.1", "localhost", "::1")
        probe = arguments[1][:2] == ("::1", 0)  # urllib3 checks for IPv6 support
        if not (probe or is_local and event == "socket.connect"):
            print("NETWORK", event, arguments[1], flush=True)
            raise OSError("no network in this test")

sys.addaudithook(watch)
"""
"""Prints and blocks connections to other machines, and every port that is opened on this one."""

REPORT = (
    WATCHED
    + f"""
from pathlib import Path
from skyrl_train.report.protocol import SampleRow
from skyrl_train.report.trackers import make_trackers

name, folder, start, seed = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
free = {{"long": 9000 * "x", "_own": 1, "odd key!": [1, None], "none": None}}
config = {{"trainer": {{"seed": seed, "policy": {{"lr": 1e-6}}, "free": free}}}}
with make_trackers([name], folder, "a project", "run", config) as trackers:
    trackers.begin(start, start + 2)
    for step in (start + 1, start + 2):
        names = ("nan", "environment//a", "../x", {HOSTILE!r}, {LONG!r})
        trackers.log({{"reward/mean": step / 4, "inf": float("inf"), **dict.fromkeys(names, float("nan"))}}, step)
        response = f"it is canary-MY_PASSWORD {{step}}"
        trackers.table([SampleRow({HOSTILE!r}, response, 0.25, "stop", "gsm8k-7", "ok", 2, 300, 5)], step)
    print("members", sorted(trackers._members))
    if sys.argv[5:] == ["fails"]:
        raise RuntimeError("the run fails")
assert "torch" not in sys.modules
"""
)

READ_MLFLOW = """
import json, os, sys
os.environ["MLFLOW_LOGGING_LEVEL"] = "WARNING"
import mlflow
mlflow.set_tracking_uri(sys.argv[1])
client = mlflow.MlflowClient()
FILE = "samples/step_00000002.json"
(experiment,) = [one for one in client.search_experiments() if one.name == "a project"]
runs = client.search_runs([experiment.experiment_id], order_by=["attributes.start_time"])
print(json.dumps([{
    "id": run.info.run_id,
    "name": run.info.run_name,
    "status": run.info.status,
    "rewards": [[one.step, one.value] for one in client.get_metric_history(run.info.run_id, "reward/mean")],
    "metrics": sorted(run.data.metrics),
    "params": run.data.params,
    "tags": sorted(run.data.tags),
    "files": sorted(one.path for one in client.list_artifacts(run.info.run_id, "samples")),
    "table": client.load_table(experiment.experiment_id, FILE, [run.info.run_id]).to_dict("records"),
} for run in runs]))
"""

READ_TRACKIO = """
import json
from trackio.sqlite_storage import SQLiteStorage
print(json.dumps([{
    "name": one["name"],
    "rows": SQLiteStorage.get_logs("a project", one["name"], run_id=one["id"]),
    "config": SQLiteStorage.get_run_config("a project", one["name"], run_id=one["id"]),
} for one in sorted(SQLiteStorage.get_run_records("a project"), key=lambda one: one["created_at"])]))
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Return the Python of an environment with an extra, created once. Skips without uv or the package index."""
    pythons: dict[str, str] = {}

    def make(extra: str) -> str:
        if extra not in pythons:
            if shutil.which("uv", path=PATH) is None:
                pytest.skip("needs uv")
            folder = tmp_path_factory.mktemp(extra) / "venv"
            python = str(folder / "bin" / "python")
            links = os.environ.get("UV_FIND_LINKS") or os.environ.get("PIP_FIND_LINKS", "")
            for command in (
                ["uv", "venv", "--quiet", "--python", sys.executable, str(folder)],
                ["uv", "pip", "install", "--quiet", "--python", python, "-r", "pyproject.toml", "--extra", extra],
            ):
                env = os.environ | {"PATH": PATH, "UV_FIND_LINKS": links}
                done = subprocess.run(command, cwd=REPOSITORY, env=env, capture_output=True, text=True, timeout=500)
                if done.returncode and "Failed to fetch" in done.stderr:
                    pytest.skip(f"the package index cannot be reached: {done.stderr.splitlines()[0]}")
                assert done.returncode == 0, done.stderr
            pythons[extra] = python
        return pythons[extra]

    return make


def read(python: str, code: str, *arguments: str, home: Path, **variables: str) -> Any:
    """Return the runs that the library itself finds."""
    env = {"PATH": os.environ["PATH"], "HOME": str(home)} | variables
    done = subprocess.run(
        [python, "-c", code, *arguments], env=env, cwd=home, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def report(python: str, *arguments: str, home: Path, **variables: str) -> str:
    """Return the output of a run in an environment with secrets. It must not mention them, network or failures."""
    env = CANARIES | {"PATH": os.environ["PATH"], "HOME": str(home), "PYTHONPATH": str(REPOSITORY)} | variables
    done = subprocess.run(
        [python, "-c", REPORT, *arguments], env=env, cwd=home, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == ("fails" in arguments), done.stderr
    output = done.stdout + done.stderr
    for unwanted in ("NETWORK", "failed", "arning", "canary-", "http://", "INFO", "Uploading"):
        assert unwanted not in output, output
    return done.stdout


@pytest.fixture
def home(tmp_path: Path) -> Path:
    folder = tmp_path / "home"
    folder.mkdir()
    return folder


def assert_no_secret_and_no_host(folder: Path) -> None:
    host = socket.gethostname().encode()
    for file in (path for path in folder.rglob("*") if path.is_file()):
        content = file.read_bytes()
        assert b"canary-" not in content, f"{file} has a secret of the environment"
        assert b'"%s"' % host not in content, f"{file} has the name of this machine"


def start_three_times(python: str, tracker: str, run: Path, **variables: str) -> None:
    """Start a run, resume it at step 1 with another seed, and start it again with an error at the end."""
    home = run.parent / "home"
    for start, *others in (("0", "1"), ("1", "2"), ("0", "3", "fails")):
        output = report(python, tracker, str(run), start, *others, home=home, **variables)
        assert f"members ['console', 'diagnosis', 'jsonl', '{tracker}']" in output


def test_mlflow_resumes_run_in_run_folder(environment: Callable[[str], str], home: Path, tmp_path: Path):
    python, run = environment("mlflow"), tmp_path / "run"
    run.mkdir()
    start_three_times(python, "mlflow", run)
    assert os.listdir(home) == [], "files outside of the run's folder"
    first, second = read(python, READ_MLFLOW, f"sqlite:///{run}/mlflow/mlflow.db", home=home)
    assert sorted(first["rewards"]) == [[1, 0.25], [2, 0.5], [2, 0.5], [3, 0.75]]
    assert [step for step, _ in second["rewards"]] == [1, 2]
    assert first["name"] == "run" and (first["status"], second["status"]) == ("FINISHED", "FAILED")
    assert json.loads((run / "trackers.json").read_text()) == {"mlflow": second["id"]}
    assert len(first["metrics"]) == 7 and max(map(len, first["metrics"])) == 250
    assert {"reward/mean", "environment/_/a", "__/x"} <= set(first["metrics"])
    # MLflow's parameters cannot be changed; config.json has the latest values.
    assert first["params"]["trainer.seed"] == "1" and first["params"]["trainer.policy.lr"] == "1e-06"
    assert len(first["params"]["trainer.free.long"]) == 6000
    assert first["params"]["trainer.free.odd key_x21_"] == "[1, null]"
    (config,) = run.glob(f"mlflow/artifacts/{first['id']}/artifacts/config.json")
    assert json.loads(config.read_text())["trainer"]["seed"] == 2
    assert first["files"] == [f"samples/step_{step:08d}.json" for step in (1, 2, 3)]
    assert first["table"] == [TABLE | {"response": "it is <MY_PASSWORD> 2"}]
    assert not any(tag.startswith(("mlflow.source", "mlflow.git")) for tag in first["tags"])
    assert_no_secret_and_no_host(tmp_path)


def test_moved_folder_gets_new_mlflow_run(environment: Callable[[str], str], home: Path, tmp_path: Path):
    python, run, moved = environment("mlflow"), tmp_path / "run", tmp_path / "moved"
    run.mkdir()
    report(python, "mlflow", str(run), "0", "1", home=home)
    run.rename(moved)
    report(python, "mlflow", str(moved), "1", "1", home=home)
    assert not run.exists()
    assert len(list(moved.glob("mlflow/artifacts/*"))) == 2


@contextmanager
def mlflow_server(python: str, folder: Path, port: int) -> Iterator[subprocess.Popen[bytes]]:
    store = ["--backend-store-uri", f"sqlite:///{folder}/server.db", "--artifacts-destination", str(folder / "files")]
    server = subprocess.Popen(
        [python, "-m", "mlflow", "server", *store, "--host", "127.0.0.1", "--port", str(port), "--workers", "1"],
        cwd=folder,
        env=os.environ | {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + 120
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                assert server.poll() is None and time.monotonic() < deadline
                time.sleep(0.2)
        yield server
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


@pytest.mark.fault("F39")
def test_mlflow_server_failure_disables_tracker(environment: Callable[[str], str], home: Path, tmp_path: Path):
    python, run = environment("mlflow"), tmp_path / "run"
    run.mkdir()
    _, port = free_address()
    at = f"http://somebody:canary-pass@127.0.0.1:{port}"
    with mlflow_server(python, tmp_path, port):
        env = CANARIES | {"PATH": os.environ["PATH"], "PYTHONPATH": str(REPOSITORY), "MLFLOW_TRACKING_URI": at}
        for start in ("0", "1"):
            command = [python, "-c", REPORT, "mlflow", str(run), start, "1"]
            done = subprocess.run(command, env=env, cwd=home, capture_output=True, text=True, timeout=200)
            assert done.returncode == 0 and "members ['console', 'diagnosis', 'jsonl', 'mlflow']" in done.stdout
            assert f"at http://127.0.0.1:{port}/#/experiments/" in done.stdout
            assert "canary-" not in done.stdout + done.stderr
        (only,) = read(python, READ_MLFLOW, f"http://127.0.0.1:{port}", home=home)
    assert sorted(only["rewards"]) == [[1, 0.25], [2, 0.5], [2, 0.5], [3, 0.75]]
    assert not (run / "mlflow").exists()
    assert_no_secret_and_no_host(run)
    began = time.monotonic()
    command = [python, "-c", REPORT, "mlflow", str(run), "1", "1"]
    done = subprocess.run(command, env=env, cwd=home, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "members ['console', 'diagnosis', 'jsonl']" in done.stdout, done.stderr
    assert done.stderr.count("Tracker mlflow failed and is off for the rest of the run") == 1
    assert "canary-" not in done.stdout + done.stderr
    assert time.monotonic() - began < 60


def test_trackio_resumes_run_in_configured_folder(environment: Callable[[str], str], home: Path, tmp_path: Path):
    python, run, folder = environment("trackio"), tmp_path / "run", tmp_path / "trackio"
    run.mkdir()
    variables = {"TRACKIO_DIR": str(folder), "HF_HUB_OFFLINE": "1"}
    start_three_times(python, "trackio", run, **variables)
    first, second = read(python, READ_TRACKIO, home=home, **variables)
    rewards = [(row["step"], row["reward/mean"]) for row in first["rows"] if "reward/mean" in row]
    assert sorted(rewards) == [(1, 0.25), (2, 0.5), (2, 0.5), (3, 0.75)]
    assert json.loads((run / "trackers.json").read_text()) == {"trackio": second["name"]}
    assert first["name"].startswith("run-") and second["name"].startswith("run-")
    table = next(row["samples"] for row in first["rows"] if "samples" in row)
    assert table["_value"] == [TABLE | {"response": "it is <MY_PASSWORD> 1"}]
    assert first["config"]["trainer.policy.lr"] == 1e-6 and first["config"]["trainer.free._own"] == 1
    assert second["config"]["trainer.seed"] == 3
    assert_no_secret_and_no_host(tmp_path)


@pytest.mark.parametrize("tracker", ["tensorboard", "wandb"])
def test_default_trackers_work_in_separate_environment(
    tracker: str, environment: Callable[[str], str], home: Path, tmp_path: Path
):
    run = tmp_path / "run"
    run.mkdir()
    for start in ("0", "1"):
        report(environment(tracker), tracker, str(run), start, "1", home=home, WANDB_MODE="offline")
    patterns = {"tensorboard": "tensorboard/events.out.tfevents.*", "wandb": "wandb/offline-run-*/run-*.wandb"}
    assert len(list(run.glob(patterns[tracker]))) == 2


@pytest.mark.parametrize("tracker", ["mlflow", "trackio", "wandb"])
def test_resumed_run_is_one_tracker_run(
    tracker: str, small: Callable[[Path], list[str]], environment: Callable[[str], str], home: Path, tmp_path: Path
):
    python, folder = environment(tracker), tmp_path / "trackio"
    env = {"PATH": os.environ["PATH"], "HOME": str(home), "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    env |= {"HF_HUB_OFFLINE": "1", "TRACKIO_DIR": str(folder), "WANDB_MODE": "offline"}
    env |= {"SKYRL_TEST_SESSION": os.environ["SKYRL_TEST_SESSION"]}
    for steps in ("1", "2"):
        changes = [f"trainer.logger={tracker}", f"trainer.max_steps={steps}", "trainer.project_name=a project"]
        command = [python, "-m", "skyrl_train.entrypoints.main_base", *small(tmp_path), *changes]
        done = subprocess.run(command, env=env, cwd=home, capture_output=True, text=True, timeout=280)
        assert done.returncode == 0, done.stdout + done.stderr
        assert f"Tracker {tracker} failed" not in done.stderr and f"{tracker}: " in done.stdout
        assert "Uploading" not in done.stdout
    if tracker == "wandb":
        assert_one_run_of_wandb(tmp_path / "ckpts")
        return
    if tracker == "mlflow":
        store = f"sqlite:///{tmp_path}/ckpts/mlflow/mlflow.db"
        (only,) = read(python, READ_MLFLOW, store, home=home)
        steps_seen = [step for step, _ in only["rewards"]]
        assert only["files"] == ["samples/step_00000001.json", "samples/step_00000002.json"]
        assert only["params"]["trainer.train_batch_size"] == "4"
    else:
        variables = {"TRACKIO_DIR": str(folder), "HF_HUB_OFFLINE": "1"}
        (only,) = read(python, READ_TRACKIO, home=home, **variables)
        steps_seen = [row["step"] for row in only["rows"] if "reward/mean" in row]
        assert only["config"]["trainer.train_batch_size"] == 4
    assert sorted(steps_seen) == [1, 2]


def assert_one_run_of_wandb(run: Path) -> None:
    """Check that each start has a folder of the same run id, with the table of all samples of its step."""
    folders = sorted((run / "wandb").glob("offline-run-*"))
    assert [folder.name.rpartition("-")[2] for folder in folders] == [load_run_id(run, "wandb")] * 2
    for step, folder in enumerate(folders, 1):
        (table,) = [json.loads(file.read_text()) for file in folder.glob("files/media/table/*.json")]
        rows = [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]
        saved = RolloutReader(run).table([step], ["uid", "sample", "reward", "response_tokens", "text"]).to_pylist()
        assert len(rows) == len(saved) == 16
        for row, rollout in zip(rows, saved, strict=True):
            assert [row[name] for name in ("uid", "sample", "reward", "tokens")] == [*rollout.values()][:4]
            assert row["response"] == rollout["text"] and row["version"] == step - 1
