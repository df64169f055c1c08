"""Scripts as users write them, run with an installed wheel outside of the repository."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from skyrl_train.testing.tiny_models import save_tiny_model
from tests.support.wheel import build_wheel

HERE = Path(__file__).parent
PAGE = (HERE.parents[2] / "docs" / "reference" / "api.md").read_text()
SNIPPETS = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
SMALL = """
        "trainer.max_steps": 2,
        "trainer.train_batch_size": 4,
        "trainer.policy_mini_batch_size": 4,
        "trainer.max_tokens_per_microbatch": 2048,
        "trainer.algorithm.use_kl_loss": False,
        "trainer.ckpt_interval": -1,
        "trainer.ckpt_path": "run{number}",
        "trainer.export_path": "exports{number}",
        "generator.n_samples_per_prompt": 2,
        "generator.sampling_params.max_generate_length": 8,
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the unpacked wheel."""
    folder = tmp_path_factory.mktemp("installed")
    with zipfile.ZipFile(build_wheel(folder)) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


@pytest.fixture
def outside(tmp_path: Path, installed: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model and rows, in which scripts find the installed package."""
    monkeypatch.setenv("PYTHONPATH", str(installed))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    save_tiny_model(tmp_path / "model")
    rows = [
        {
            "prompt": [{"role": "user", "content": f"Count down from {n}."}],
            "start": n,
            "reward_spec": {"ground_truth": str(n)},
            "env_class": ("brief", "two_turns", "graded")[n % 3],
        }
        for n in range(1, 9)
    ]
    (tmp_path / "mixed.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    own = [{"prompt": row["prompt"], "start": row["start"]} for row in rows]
    (tmp_path / "count_down.jsonl").write_text("".join(json.dumps(row) + "\n" for row in own))
    gsm8k = [{"prompt": row["prompt"], "reward_spec": row["reward_spec"]} for row in rows]
    (tmp_path / "gsm8k.jsonl").write_text("".join(json.dumps(row) + "\n" for row in gsm8k))
    return tmp_path


def run_script(path: Path, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, str(path), *arguments],
        cwd=path.parent,
        env=os.environ,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return done.stdout


@pytest.mark.on_demand
@pytest.mark.slow
def test_snippets_of_api_page_run(outside: Path, installed: Path):
    code = (
        "\n".join(SNIPPETS)
        .replace("Qwen/Qwen2.5-0.5B-Instruct", "model")
        .replace("data/gsm8k/train.parquet", "gsm8k.jsonl")
    )
    for number in (1, 2):
        code = code.replace('        "trainer.max_steps": 20,\n', SMALL.format(number=number), 1)
    script = outside / "notebook.py"
    script.write_text(code + "\nprint('from', sk.__file__)\n")
    output = run_script(script)
    assert "2 steps in " in output and "last reward" in output
    assert "log-probs of every token after the first: [" in output
    assert f"from {installed}" in output
    second = json.loads((outside / "run2" / "metrics.jsonl").read_text().splitlines()[-1])
    assert second["step"] == 2 and second["rollouts/failed"] == 0


@pytest.mark.slow
@pytest.mark.defect("signal-in-api-program")
def test_program_registers_parts_and_drives_run(outside: Path):
    script = outside / "embedder.py"
    script.write_text((HERE / "scripts" / "embedder.py").read_text())
    output = run_script(script, str(outside / "mixed.jsonl"), str(outside / "model"), str(outside))
    assert "everything held\n" in output and "max_steps:" in output


def test_wheel_has_type_marker(installed: Path):
    assert (installed / "skyrl_train" / "py.typed").is_file()
