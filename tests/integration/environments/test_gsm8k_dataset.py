from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from skyrl_train.data.dataset import load_prompts
from skyrl_train.environments.tasks.gsm8k import GSM8KEnv

SCRIPT = Path(__file__).parents[3] / "examples" / "gsm8k" / "gsm8k_dataset.py"
ROW = {"question": "She has 6 boxes of 200. How many?", "answer": "6*200 = <<6*200=1200>>1200\n#### 1,200"}


def write_dataset(source: Path, output: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), "--input", str(source), "--output", str(output), *options]
    return subprocess.run(command, capture_output=True, text=True)


def test_json_lines_are_converted_and_scored(tmp_path: Path):
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text((json.dumps(ROW) + "\n") * 3)
    done = write_dataset(tmp_path, tmp_path / "out", "--limit", "2")
    assert done.returncode == 0, done.stderr
    assert "validation.parquet: 2 rows" in done.stdout
    dataset = load_prompts([str(tmp_path / "out" / "train.parquet")], lambda messages: 1, 10, "other")
    first = dataset[0]
    assert len(dataset) == 2
    assert (first.env_class, first.data_source) == ("gsm8k", "openai/gsm8k")
    assert first.messages[0]["content"].endswith(
        'How many? Let\'s think step by step and output the final answer after "####".'
    )
    assert first.env_extras["extra_info"] == ROW | {"split": "train", "index": 0}
    assert GSM8KEnv({}, first.env_extras).step("#### 1200").reward == 1.0


def test_row_without_answer_is_reported(tmp_path: Path):
    (tmp_path / "train.jsonl").write_text(json.dumps(ROW) + "\n" + json.dumps({"question": "?", "answer": None}) + "\n")
    done = write_dataset(tmp_path, tmp_path / "out")
    assert done.returncode == 1
    assert "train.jsonl, line 2: needs a question and an answer" in done.stderr


def test_entire_gsm8k_is_converted(gsm8k_jsonl: Path, tmp_path: Path):
    assert write_dataset(gsm8k_jsonl, tmp_path).returncode == 0
    counts = []
    for name in ("train", "validation"):
        dataset = load_prompts([str(tmp_path / f"{name}.parquet")], lambda messages: 1, 10, "gsm8k")
        counts.append(len(dataset))
        for prompt in dataset.prompts:
            assert GSM8KEnv({}, prompt.env_extras).step(prompt.env_extras["extra_info"]["answer"]).reward == 1.0
    assert counts == [7473, 1319]
