from __future__ import annotations

import subprocess
import sys

import pytest

from skyrl_train.cluster import external_cluster
from skyrl_train.cluster.external_cluster import external_cluster_has_gpus, short_job_grace_warning
from skyrl_train.cluster.ray_cluster import Cluster
from skyrl_train.config.prepare import prepare_config
from skyrl_train.errors import ConfigError

_QUERY_FAKE_GPUS = """
import os, ray
ray.init(num_cpus=1, num_gpus=4, include_dashboard=False, logging_level="ERROR")
os.environ["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address
from skyrl_train.config.prepare import prepare_config
from skyrl_train.cluster.external_cluster import external_cluster_has_gpus
has_gpus = external_cluster_has_gpus()
print(has_gpus, prepare_config(["device=cuda"], has_gpus).config.device)
ray.shutdown()
"""


@pytest.mark.on_demand
def test_driver_without_gpu_uses_cluster_gpus():
    query = subprocess.run([sys.executable, "-c", _QUERY_FAKE_GPUS], capture_output=True, text=True, timeout=120)
    assert query.stdout.split() == ["True", "cuda"], query.stderr[-4000:]


@pytest.mark.parametrize("address", [None, "", "local", "ray://10.0.0.1:10001"])
def test_no_query_without_a_cluster_address(address: str | None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(external_cluster.subprocess, "run", None)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if address is not None:
        monkeypatch.setenv("RAY_ADDRESS", address)
    assert external_cluster_has_gpus() is None


def test_unresponsive_cluster_has_unknown_gpus(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(external_cluster, "QUERY_TIMEOUT_S", 1.0)
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    assert external_cluster_has_gpus() is None


@pytest.mark.defect("autoscaling-cluster-rejected")
@pytest.mark.parametrize("address", ["ray://10.0.0.1:10001", "10.0.0.1:6379"])
def test_external_cluster_may_gain_gpus(address: str, monkeypatch: pytest.MonkeyPatch):
    for own in ("", "local"):
        monkeypatch.setenv("RAY_ADDRESS", own)
        with pytest.raises(ConfigError, match="No NVIDIA device"):
            prepare_config(["device=cuda"], False)
    monkeypatch.setenv("RAY_ADDRESS", address)
    assert prepare_config(["device=cuda"], False).config.device == "cuda"


def test_job_server_address_is_rejected():
    with pytest.raises(
        ConfigError, match=r"RAY_ADDRESS=http://10\.0\.0\.1:8265: this is the address of a job server.*ray job submit"
    ):
        Cluster(settings={"address": "http://10.0.0.1:8265"}).connect()


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({}, None),
        ({"RAY_JOB_STOP_WAIT_TIME_S": "3"}, None),
        ({"RAY_JOB_CONFIG_JSON_ENV_VAR": "{}"}, "kills this job 3 s after"),
        ({"RAY_JOB_CONFIG_JSON_ENV_VAR": "{}", "RAY_JOB_STOP_WAIT_TIME_S": "59"}, "kills this job 59 s after"),
        ({"RAY_JOB_CONFIG_JSON_ENV_VAR": "{}", "RAY_JOB_STOP_WAIT_TIME_S": "ten"}, "kills this job 0 s after"),
        ({"RAY_JOB_CONFIG_JSON_ENV_VAR": "{}", "RAY_JOB_STOP_WAIT_TIME_S": "60"}, None),
    ],
)
def test_submitted_job_warns_of_short_grace(
    variables: dict[str, str], message: str | None, monkeypatch: pytest.MonkeyPatch
):
    for name in ("RAY_JOB_CONFIG_JSON_ENV_VAR", "RAY_JOB_STOP_WAIT_TIME_S"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    warning = short_job_grace_warning()
    assert (warning is None) == (message is None)
    assert (message or "") in (warning or "")
