"""The dataset scripts of environments that use other servers convert local files."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from skyrl_train.environments import registry

EXAMPLES = Path(__file__).parents[3] / "examples"
SCRIPTS: dict[str, tuple[str, dict[str, Any]]] = {
    "search": ("search/search_dataset.py", {"question": "Where?", "golden_answers": ["The hill"]}),
    "searchcode": ("searchcode/searchcode_dataset.py", {"question": "6 * 7?", "answer": "so\n#### 42"}),
    "llm_as_a_judge": ("llm_as_a_judge/judge_dataset.py", {"question": "6 * 7?", "answer": "so\n#### 42"}),
}
TRUTHS = {"search": {"target": ["The hill"]}, "searchcode": "42", "llm_as_a_judge": "42"}


def convert(name: str, folder: Path, row: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    for split in ("train", "test"):
        (folder / f"{split}.jsonl").write_text(json.dumps(row) + "\n")
    script, _ = SCRIPTS[name]
    command = [sys.executable, str(EXAMPLES / script), "--input", str(folder), "--output", str(folder / "out")]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("name", SCRIPTS)
def test_dataset_script_converts_local_files(name: str, tmp_path: Path):
    done = convert(name, tmp_path, SCRIPTS[name][1])
    assert done.returncode == 0, done.stderr
    for split in ("train", "validation"):
        (row,) = pq.read_table(tmp_path / "out" / f"{split}.parquet").to_pylist()
        assert (row["env_class"], row["reward_spec"]["ground_truth"]) == (name, TRUTHS[name])
        assert SCRIPTS[name][1]["question"] in row["prompt"][0]["content"]
        registry.make(name, {}, {"reward_spec": row["reward_spec"]}).close()


@pytest.mark.parametrize("name", SCRIPTS)
def test_dataset_script_reports_row_without_answer(name: str, tmp_path: Path):
    done = convert(name, tmp_path, {"question": "Where?"})
    assert done.returncode != 0
    assert "train.jsonl, line 1" in done.stderr and "answer" in done.stderr
