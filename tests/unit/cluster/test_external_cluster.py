from __future__ import annotations

import subprocess
import sys

import pytest

from skyrl_train.cluster import external_cluster
from skyrl_train.cluster.external_cluster import external_cluster_has_gpus, short_job_grace_warning
from skyrl_train.cluster.ray_cluster import Cluster
from skyrl_train.config.prepare import prepare_config
from skyrl_train.errors import ConfigError

_GPUS_NOBODY_HAS = """
import os, ray
ray.init(num_cpus=1, num_gpus=4, include_dashboard=False, logging_level="ERROR")
os.environ["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address
from skyrl_train.config.prepare import prepare
from skyrl_train.cluster.external_cluster import external_cluster_has_gpus
there = external_cluster_has_gpus()
print(there, prepare(["device=cuda"], there).config.device)
ray.shutdown()
"""


@pytest.mark.on_demand
def test_a_driver_without_a_gpu_runs_on_those_of_the_cluster_that_is_named():
    asked = subprocess.run([sys.executable, "-c", _GPUS_NOBODY_HAS], capture_output=True, text=True, timeout=120)
    assert asked.stdout.split() == ["True", "cuda"], asked.stderr[-4000:]


@pytest.mark.parametrize("address", [None, "", "local", "ray://10.0.0.1:10001"])
def test_nobody_is_asked_where_no_cluster_can_be(address: str | None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(external_cluster.subprocess, "run", None)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if address is not None:
        monkeypatch.setenv("RAY_ADDRESS", address)
    assert external_cluster_has_gpus() is None


def test_a_cluster_that_does_not_answer_soon_is_left_to_whoever_joins_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(external_cluster, "QUERY_TIMEOUT_S", 1.0)
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    assert external_cluster_has_gpus() is None


@pytest.mark.defect("a-growing-cluster-was-refused-at-once")
@pytest.mark.parametrize("address", ["ray://10.0.0.1:10001", "10.0.0.1:6379"])
def test_of_a_cluster_of_others_nobody_knows_that_it_will_have_no_gpu(address: str, monkeypatch: pytest.MonkeyPatch):
    for own in ("", "local"):
        monkeypatch.setenv("RAY_ADDRESS", own)
        with pytest.raises(ConfigError, match="No NVIDIA device"):
            prepare_config(["device=cuda"], False)
    monkeypatch.setenv("RAY_ADDRESS", address)
    assert prepare_config(["device=cuda"], False).config.device == "cuda"


def test_a_job_server_is_no_cluster_to_join():
    with pytest.raises(
        ConfigError, match=r"RAY_ADDRESS=http://10\.0\.0\.1:8265: is the address of a job server.*ray job submit"
    ):
        Cluster(settings={"address": "http://10.0.0.1:8265"}).connect()


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({}, None),
        ({"RAY_JOB_STOP_WAIT_TIME_S": "3"}, None),
        ({"RAY_JOB_CONFIG_JSON_ENV_VAR": "{}"}, "kills this job 3 s after"),
        ({"RAY_JOB_CONFIG_JSON_ENV_VAR": "{}", "RAY_JOB_STOP_WAIT_TIME_S": "59"}, "kills this job 59 s after"),
        ({"RAY_JOB_CONFIG_JSON_ENV_VAR": "{}", "RAY_JOB_STOP_WAIT_TIME_S": "ten"}, "kills this job 0 s after"),
        ({"RAY_JOB_CONFIG_JSON_ENV_VAR": "{}", "RAY_JOB_STOP_WAIT_TIME_S": "60"}, None),
    ],
)
def test_a_submitted_job_hears_that_it_would_be_killed_before_it_saves(
    variables: dict[str, str], said: str | None, monkeypatch: pytest.MonkeyPatch
):
    for name in ("RAY_JOB_CONFIG_JSON_ENV_VAR", "RAY_JOB_STOP_WAIT_TIME_S"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    warning = short_job_grace_warning()
    assert (warning is None) == (said is None)
    assert (said or "") in (warning or "")
