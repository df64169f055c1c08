"""The metrics server of a run: names, labels, values and access."""

from __future__ import annotations

import http.client
import math
import re
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import prometheus_client
import psutil
import pytest
from hypothesis import example, given, strategies as st
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from skyrl_train import http_server
from skyrl_train.config.prepare import prepare_config
from skyrl_train.errors import ConfigError
from skyrl_train.experiment.base import Experiment
from skyrl_train.http_server import ConnectionLimits
from skyrl_train.report.metric_catalog import METRICS
from skyrl_train.report.prometheus import PrometheusTracker, check_metrics_address, prometheus_name
from skyrl_train.report.protocol import SampleRow, TrackerSetup
from skyrl_train.report.trackers import make_trackers
from tests.support.slow_clients import open_connection
from tests.support.table_cases import check_each

TOKEN = "a-secret-of-this-test"


def setup(port: int = 0, host: str = "127.0.0.1") -> TrackerSetup:
    config = {"trainer": {"metrics_port": port, "metrics_host": host}}
    return TrackerSetup(Path(), "project", "run", config)


@contextmanager
def serving(host: str = "127.0.0.1") -> Iterator[PrometheusTracker]:
    with closing(PrometheusTracker(setup(host=host))) as tracker:
        yield tracker


@pytest.fixture(scope="module")
def shared() -> Iterator[PrometheusTracker]:
    """One tracker for all examples of a property test, each of which calls `begin`."""
    with serving() as tracker:
        yield tracker


def port_of(url: str) -> int:
    return int(url.rpartition(":")[2].partition("/")[0])


def get(url: str, path: str = "/metrics", **headers: str) -> tuple[int, str, str]:
    """Return (status, content type, body)."""
    with closing(http.client.HTTPConnection("127.0.0.1", port_of(url), timeout=30)) as connection:
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.headers["Content-Type"], answer.read().decode()


def families(url: str) -> dict[str, Metric]:
    status, kind, text = get(url)
    assert status == 200 and kind.startswith("text/plain; version=")
    return {family.name: family for family in text_string_to_metric_families(text)}


def series(url: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Return (name, labels) -> value of all samples."""
    samples = [sample for family in families(url).values() for sample in family.samples]
    found = {(sample.name, tuple(sample.labels.items())): sample.value for sample in samples}
    assert len(found) == len(samples)
    return found


# -- names -------------------------------------------------------------------------------------------------------------

WORDS = ("eval", "rollouts", "failed", "failed_by_kind", "failed_", "other", "a", "a_b", "b", "_", "", "A", "é", "1")
NAMES = st.lists(st.sampled_from(WORDS), max_size=4).map("/".join) | st.text(max_size=12)


@given(st.sets(NAMES, max_size=30))
@example({"eval/a", "eval/b/a"})
@example({"rollouts/failed_by_kind", "rollouts/failed/a"})
def test_prometheus_names_are_valid_and_unique(names: set[str]):
    found = [prometheus_name(name) for name in names]
    labels_of: dict[str, set[str]] = {}
    for name, labels in found:
        assert re.fullmatch(r"skyrl_[a-z0-9_]+", name)
        assert labels_of.setdefault(name, set(labels)) == set(labels), "a family has the same labels throughout"
    assert len({(name, *labels.items()) for name, labels in found}) == len(names)


def has_own_name(metric: str) -> None:
    word = {"{source}": "openai/gsm8k", "{kind}": "deadline", "{n}": "8", "{k}": "4", "{name}": "thing"}
    name = re.sub(r"\{\w+\}", lambda found: word[found[0]], metric)
    expected: tuple[str, dict[str, str]] = ("skyrl_" + name.replace("/", "_"), {})
    if "{source}" in metric:
        expected = "skyrl_eval_" + name.rpartition("/")[2], {"source": "openai/gsm8k"}
    elif "{kind}" in metric:
        expected = "skyrl_rollouts_failed_by_kind", {"kind": "deadline"}
    assert prometheus_name(name) == expected


def test_every_metric_has_its_own_name():
    check_each([metric.name for metric in METRICS], has_own_name)


# -- values ------------------------------------------------------------------------------------------------------------


def test_scrape_has_newest_values_with_help_texts():
    with serving() as tracker:
        tracker.begin(0, 9)
        tracker.log({"reward/mean": 0.25, "eval/all/avg_score": 0.5, "timing/step_s": 2}, 1)
        tracker.log({"reward/mean": 0.75, "timing/step_s": math.nan, "mine/x": math.inf}, 2)
        tracker.samples([SampleRow("p", "r", 1.0, "stop")], 2)
        found, about = series(tracker.url), families(tracker.url)
    assert math.isnan(found.pop(("skyrl_timing_step_s", ())))
    resident = found.pop(("skyrl_process_resident_memory_bytes", ()))
    assert resident == pytest.approx(psutil.Process().memory_info().rss, rel=0.2)
    assert found == {
        ("skyrl_run_step", ()): 2,
        ("skyrl_run_total_steps", ()): 9,
        ("skyrl_reward_mean", ()): 0.75,
        ("skyrl_eval_avg_score", (("source", "all"),)): 0.5,
        ("skyrl_mine_x", ()): math.inf,
    }
    assert about["skyrl_timing_step_s"].documentation == "time of the whole step, without evaluation and checkpoint (s)"
    assert about["skyrl_reward_mean"].documentation == "mean reward of the step's samples (reward)"
    assert {family.type for family in about.values()} == {"gauge"}


def test_deprecated_names_point_to_the_current_ones():
    with serving() as tracker:
        tracker.log({"timing/offload_s": 2.0, "timing/move_s": 2.0}, 1)
        found, about = series(tracker.url), families(tracker.url)
    assert found["skyrl_timing_offload_s", ()] == found["skyrl_timing_move_s", ()] == 2.0
    assert about["skyrl_timing_move_s"].documentation.startswith("deprecated name of skyrl_timing_offload_s,")


def test_resumed_run_serves_no_old_values():
    with serving() as tracker:
        tracker.log({"reward/mean": 0.25}, 7)
        tracker.begin(5, 9)
        found = series(tracker.url)
    assert (found["skyrl_run_step", ()], found["skyrl_run_total_steps", ()]) == (5, 9)
    assert ("skyrl_reward_mean", ()) not in found


def test_user_metrics_cannot_replace_run_metrics():
    with serving() as tracker:
        tracker.begin(0, 9)
        tracker.log({"run/total_steps": -1.0, "process/resident_memory_bytes": -1.0}, 1)
        assert min(series(tracker.url).values()) > 0


@given(st.text(st.characters(exclude_categories=["C"]), min_size=1, max_size=12))
def test_labels_are_read_as_they_were_written(shared: PrometheusTracker, word: str):
    shared.begin(0, 1)
    shared.log({f"eval/{word}/avg_score": 1.0, f"rollouts/failed/{word}": 2.0, f"{word}/of/mine": 3.0}, 1)
    found = series(shared.url)
    assert found["skyrl_eval_avg_score", (("source", word),)] == 1
    assert found["skyrl_rollouts_failed_by_kind", (("kind", word),)] == 2
    assert found["skyrl_other", (("name", f"{word}/of/mine"),)] == 3


def test_quotes_backslashes_and_line_ends_are_escaped():
    source = 'a"b\\c\nd\\n'
    with serving() as tracker:
        tracker.log({f"eval/{source}/avg_score": 0.5}, 1)
        assert series(tracker.url)["skyrl_eval_avg_score", (("source", source),)] == 0.5
        assert r'source="a\"b\\c\nd\\n"' in get(tracker.url)[2]


def test_runs_in_one_process_have_separate_registries():
    before = prometheus_client.generate_latest(prometheus_client.REGISTRY).count(b"skyrl_")
    with serving() as first, serving() as second:
        first.log({"reward/mean": 1.0}, 1)
        second.log({"reward/mean": 2.0}, 2)
        assert series(first.url)["skyrl_reward_mean", ()] == 1
        assert series(second.url)["skyrl_reward_mean", ()] == 2
    assert prometheus_client.generate_latest(prometheus_client.REGISTRY).count(b"skyrl_") == before == 0


# -- the run's tracker -------------------------------------------------------------------------------------------------


def test_run_prints_metrics_address_and_serves(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    config = {"trainer": {"metrics_port": 0, "metrics_host": "127.0.0.1"}}
    with make_trackers([], tmp_path, "project", "run", config) as trackers:
        (url,) = re.findall(r"^metrics +(http://127\.0\.0\.1:\d+/metrics)$", capsys.readouterr().out, re.MULTILINE)
        trackers.begin(0, 2)
        trackers.log({"environment/a\ud800\x1b[31m": 1.0, "reward/mean": 0.5}, 1)
        found = series(url)
        assert found["skyrl_reward_mean", ()] == 0.5
        assert found["skyrl_other", (("name", r"environment/a\ud800\x1b[31m"),)] == 1
        assert families(url)["skyrl_other"].documentation.startswith("metrics whose names")
    with pytest.raises(ConnectionRefusedError):
        get(url)


@pytest.mark.parametrize("trainer", [{}, {"metrics_port": None, "metrics_host": "127.0.0.1"}])
def test_run_without_metrics_port_listens_nowhere(trainer: dict[str, Any], tmp_path: Path):
    def listening() -> set[Any]:
        connections = psutil.Process().net_connections("inet")
        return {connection.laddr for connection in connections if connection.status == psutil.CONN_LISTEN}

    before = listening()
    with make_trackers([], tmp_path, "project", "run", {"trainer": trainer}):
        assert listening() == before


def test_port_in_use_is_refused_before_start(tmp_path: Path):
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        message = rf"trainer\.metrics_port={port}: .*Choose another trainer\.metrics_port"
        with pytest.raises(ConfigError, match=message):
            make_trackers([], tmp_path, "project", "run", setup(port).config)
        with pytest.raises(ConfigError, match=message):
            Experiment(prepare_config([f"trainer.metrics_port={port}", f"trainer.ckpt_path={tmp_path}"]).config)
    check_metrics_address("127.0.0.1", port)
    check_metrics_address("not-checked", None)


def test_reachable_address_requires_token(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("SKYRL_API_KEY", raising=False)
    for refused in (lambda: check_metrics_address("0.0.0.0", 0), lambda: PrometheusTracker(setup(host="0.0.0.0"))):
        with pytest.raises(ConfigError, match=r"trainer\.metrics_host='0\.0\.0\.0'.*SKYRL_API_KEY"):
            refused()
    monkeypatch.setenv("SKYRL_API_KEY", TOKEN)
    with serving("0.0.0.0") as tracker:
        for wrong in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Basic {TOKEN}"}):
            status, _, text = get(tracker.url, **wrong)
            assert status == 401 and "skyrl_" not in text
        assert get(tracker.url, Authorization=f"Bearer {TOKEN}")[0] == 200
    with serving() as tracker:
        assert get(tracker.url)[0] == 200, "loopback needs no token"


def test_other_paths_are_not_found():
    with serving() as tracker:
        assert [get(tracker.url, path)[0] for path in ("/", "/metrics/", "/metric", "/metrics?name=x")] == [
            404,
            404,
            404,
            200,
        ]


@pytest.mark.defect("watch-exhausts-connections")
def test_pages_of_other_sites_are_refused(monkeypatch: pytest.MonkeyPatch):
    with serving() as tracker:
        for host in ("evil.example", "127.0.0.1.evil.example", "10.0.0.1:9400", "", "["):
            status, _, text = get(tracker.url, Host=host)
            assert status == 403 and "skyrl_" not in text, host
        for host in ("localhost", "127.0.0.1:1", "[::1]:9400"):
            assert get(tracker.url, Host=host)[0] == 200, host
    monkeypatch.setenv("SKYRL_API_KEY", TOKEN)
    with serving("0.0.0.0") as tracker:
        assert get(tracker.url, Host="trainer.cluster:9400", Authorization=f"Bearer {TOKEN}")[0] == 200


def test_only_get_is_allowed():
    with serving() as tracker, closing(http.client.HTTPConnection("127.0.0.1", port_of(tracker.url))) as connection:
        connection.request("POST", "/metrics", body=b"x")
        assert connection.getresponse().status == 405


@pytest.mark.fault("F28")
@pytest.mark.defect("watch-exhausts-connections")
def test_slow_clients_block_neither_others_nor_close(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(http_server, "HEADER_TIMEOUT_S", 2.0)
    monkeypatch.setattr(http_server, "connection_limits", lambda most: ConnectionLimits(connections=8, backlog=8))
    begun = time.monotonic()
    with serving() as tracker, ExitStack() as clients:
        half = b"GET /metrics HTTP/1.1\r\nX: "
        held = [clients.enter_context(closing(open_connection(tracker.url, half * (place % 2)))) for place in range(7)]
        assert get(tracker.url)[0] == 200, "other clients get an answer at once"
        held += [clients.enter_context(closing(open_connection(tracker.url, half))) for _ in range(20)]
        held[0].settimeout(20)
        assert held[0].recv(1) == b"", "a client without a request is disconnected"
        for client in held:
            client.close()
        while get(tracker.url)[0] == 503:
            time.sleep(0.05)
        clients.enter_context(closing(open_connection(tracker.url, half)))
    assert time.monotonic() - begun < 20


def test_closing_twice_is_harmless():
    tracker = PrometheusTracker(setup())
    tracker.close()
    tracker.close()
