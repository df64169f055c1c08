"""Reports have a bounded size and show runs of any length and any text literally."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from skyrl_train.errors import ConfigError
from skyrl_train.report.html_report import MAX_REPORT_BYTES, make_report
from skyrl_train.report.rollout_files import RolloutReader, step_file, write_rollouts
from skyrl_train.report.run_reader import RunReader, open_runs, overview
from skyrl_train.report.viewer_page import render_page
from skyrl_train.testing.synthetic_rollouts import synthetic_rollouts, synthetic_run
from tests.support.synthetic_run_folders import ADVERSARIAL_TEXT, synthetic_metrics, write_metrics, write_synthetic_run
from tests.support.viewer_page import requires_viewer

pytestmark = requires_viewer


class _Scripts(HTMLParser):
    """A parser that collects the script elements of a page with their attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[dict[str, str | None], str]] = []
        self._inside = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._inside = tag == "script"
        if self._inside:
            self.found.append((dict(attrs), ""))

    def handle_endtag(self, tag: str) -> None:
        self._inside = False

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.found[-1] = (self.found[-1][0], self.found[-1][1] + data)


def data_of(html: str) -> dict[str, Any]:
    """Return the data embedded in a report. Assert that the report has no other script than its own."""
    parser = _Scripts()
    parser.feed(html)
    parser.close()
    (data,) = [text for attributes, text in parser.found if attributes.get("id") == "data"]
    assert len(parser.found) == 2
    found: dict[str, Any] = json.loads(data)
    return found


def test_report_has_runs_of_different_length(tmp_path: Path):
    configs: list[dict[str, Any]] = [{"trainer": {"seed": seed}} for seed in (1, 2)]
    folders = [
        write_synthetic_run(tmp_path / "a", 3, total=9, name="a", config=configs[0]),
        write_synthetic_run(tmp_path / "b", 7, name="b", config=configs[1], rollouts=0),
    ]
    made = make_report(folders, render_page)
    data = data_of(made.html)
    assert data["runs"] == overview(open_runs(folders))
    assert [run["state"] for run in data["runs"]["runs"]] == ["failed", "finished"]
    assert data["runs"]["differing"] == [{"key": "trainer.seed", "values": ["1", "2"]}]
    assert data["metrics"]["1"]["columns"] == RunReader(folders[1]).metrics(99)["columns"]
    assert data["metrics"]["0"]["steps"] == [1, 2, 3] and len(data["metrics"]["0"]["columns"]["reward/p90"]) == 3
    assert data["diagnosis"] == {"0": [], "1": []}
    assert data["rollouts"]["1"] == [] and made.rollouts == made.total_rollouts == 48
    saved = RolloutReader(folders[0]).table().to_pylist()
    shown = sorted(data["rollouts"]["0"], key=lambda rollout: (rollout["step"], rollout["group"], rollout["sample"]))
    assert [rollout["messages"] for rollout in shown] == [json.loads(row["messages"]) for row in saved]
    assert [rollout["tokens"]["ids"] for rollout in shown] == [row["prompt_ids"] + row["response_ids"] for row in saved]


def test_model_output_cannot_end_script_element(tmp_path: Path):
    write_synthetic_run(tmp_path, 1, name=ADVERSARIAL_TEXT[0], rollouts=0)
    messages = [[{"role": "user", "content": "q"}, {"role": "assistant", "content": text}] for text in ADVERSARIAL_TEXT]
    table = synthetic_rollouts(len(ADVERSARIAL_TEXT), samples_per_prompt=1, adversarial_texts=ADVERSARIAL_TEXT)
    column = pa.array([json.dumps(conversation) for conversation in messages])
    write_rollouts(tmp_path, 1, table.set_column(table.column_names.index("messages"), "messages", column))
    data = data_of(make_report([tmp_path], render_page).html)
    assert data["runs"]["runs"][0]["name"] == ADVERSARIAL_TEXT[0]
    shown = sorted(data["rollouts"]["0"], key=lambda rollout: rollout["group"])
    expected = [text.encode("utf-16", "surrogatepass").decode("utf-16", "replace") for text in ADVERSARIAL_TEXT]
    assert [rollout["messages"][1]["content"] for rollout in shown] == expected


def test_long_run_is_downsampled_and_sampled_evenly(tmp_path: Path):
    """A report of 5 MB has complete groups with tokens, from the first step to the last."""
    extra = {f"my/{index}": index / 7 for index in range(60)}
    write_metrics(tmp_path, [synthetic_metrics(step, **extra) for step in range(1, 3001)], 3000)
    synthetic_run(tmp_path, 60, 56, mean_tokens=100)
    html = make_report([tmp_path], render_page).html
    assert 3_500_000 < len(html.encode()) <= MAX_REPORT_BYTES
    data = data_of(html)
    metrics, rollouts = data["metrics"]["0"], data["rollouts"]["0"]
    assert 300 <= len(metrics["steps"]) <= 2000 and metrics["steps"][-1] == 3000
    steps = {rollout["step"] for rollout in rollouts}
    assert {1, 60} < steps and len(steps) >= 20
    assert max(after - before for before, after in zip(sorted(steps), sorted(steps)[1:], strict=False)) <= 6
    assert {rollout["source"] for rollout in rollouts} == {"gsm8k", "math", "tools"}
    assert {rollout["status"] for rollout in rollouts} == {"ok", "failed"}
    groups: dict[tuple[int, int], set[int]] = {}
    for rollout in rollouts:
        groups.setdefault((rollout["step"], rollout["group"]), set()).add(rollout["sample"])
    assert all(samples == set(range(8)) for samples in groups.values())
    assert sum(rollout["tokens"] is not None for rollout in rollouts) > len(rollouts) / 2


@pytest.mark.parametrize(
    ("tokens", "budget", "min_rollouts"), [(3000, 700_000, 8), (100, 300_000, 8), (30_000, 230_000, 8)]
)
def test_small_report_stays_below_its_limit(tmp_path: Path, tokens: int, budget: int, min_rollouts: int):
    write_synthetic_run(tmp_path, 2, rollouts=32, mean_tokens=tokens)
    made = make_report([tmp_path], render_page, budget)
    assert len(made.html.encode()) <= budget
    shown = data_of(made.html)["rollouts"]["0"]
    assert len(shown) >= min_rollouts
    if tokens == 30_000:
        assert all(rollout["tokens"] is None for rollout in shown)
        assert any("characters are left out" in rollout["messages"][-1]["content"] for rollout in shown)


def test_more_runs_than_fit_are_refused(tmp_path: Path):
    folders = [write_synthetic_run(tmp_path / str(number), 60, rollouts=0) for number in range(30)]
    limit = len(make_report(folders[:2], render_page).html.encode()) + 100
    assert len(make_report(folders[:2], render_page, limit).html.encode()) <= limit
    with pytest.raises(ConfigError, match=r"the report would have .*\. Name fewer runs, or open them with"):
        make_report(folders, render_page, limit)


def test_many_metrics_reduce_points_before_refusal(tmp_path: Path):
    numbers = {f"my/{index}": index / 7 for index in range(300)}
    write_metrics(tmp_path, [numbers] * 60, 60)
    empty = len(render_page().encode())
    data = data_of(make_report([tmp_path], render_page, empty + 30_000).html)["metrics"]["0"]
    assert data["steps_per_point"] > 5 and len(data["columns"]) == 300
    with pytest.raises(ConfigError, match=r"the report would have .*\. Open the run with skyrl-train watch"):
        make_report([tmp_path], render_page, empty + 5_000)


def test_damaged_step_is_left_out_of_report(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    write_synthetic_run(tmp_path, 2)
    file = step_file(tmp_path, 1)
    content = pq.ParquetFile(file).metadata.row_group(0)
    chunks = [content.column(number) for number in range(content.num_columns)]
    (texts,) = [chunk for chunk in chunks if chunk.path_in_schema == "text"]
    data = bytearray(file.read_bytes())
    begin = texts.dictionary_page_offset or texts.data_page_offset
    data[begin : begin + texts.total_compressed_size] = bytes(texts.total_compressed_size)
    file.write_bytes(data)
    made = make_report([tmp_path], render_page)
    assert {rollout["step"] for rollout in data_of(made.html)["rollouts"]["0"]} == {2}
    assert "rollouts of step 1 cannot be read" in caplog.text and "step_00000001.parquet" in caplog.text
