"""Every preset of examples/ is valid and sets no key without effect, also through its script."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from skyrl_train.config.prepare import prepare_config
from tests.support.doc_pages import Command, find_commands
from tests.support.table_cases import check_each

REPOSITORY = Path(__file__).parents[3]
EXAMPLES = REPOSITORY / "examples"
PATH = os.pathsep.join([os.environ["PATH"], str(REPOSITORY / ".uv" / "bin")])
"""PATH with the uv that scripts/bootstrap downloads if none is installed."""
needs_uv = pytest.mark.skipif(shutil.which("uv", path=PATH) is None, reason="needs uv")
SCRIPTS = find_commands(r"examples/\w+/run\w*\.sh")
NOT_PRESETS = ("clusters", "mini_swe_agent/swebench.yaml")
"""Resources of Kubernetes and SkyPilot (tests/integration/runs/test_clusters.py), and prompts of mini-swe-agent."""
PRESETS = [
    path
    for path in sorted(EXAMPLES.rglob("*.yaml"))
    if not path.relative_to(EXAMPLES).as_posix().startswith(NOT_PRESETS)
]


def is_good_without_warnings(path: Path) -> None:
    prepared = prepare_config(
        ["--config-dir", str(path.parent), "--config-name", path.stem, "trainer.policy.model.path=model"],
        has_accelerator=True,
    )
    assert prepared.warnings == []
    assert len(path.read_text().splitlines()) <= 30


def test_presets_are_good_and_free_of_warnings():
    check_each(PRESETS, is_good_without_warnings)


def run_script(
    *arguments: str, folder: Path, script: str = "examples/algorithms/run.sh", **env: str
) -> subprocess.CompletedProcess[str]:
    """Run a script of examples/ in a folder, in the environment of the tests."""
    paths = {"PATH": PATH, "UV_PROJECT_ENVIRONMENT": sys.prefix, "UV_NO_SYNC": "1", "UV_OFFLINE": "1"}
    inherited = {name: value for name, value in os.environ.items() if name not in ("EXTRA", "LOGGER", "NUM_GPUS")}
    command = [str(REPOSITORY / script), *arguments]
    return subprocess.run(
        command, cwd=folder, env=inherited | paths | env, capture_output=True, text=True, timeout=120, check=False
    )


@needs_uv
def test_preset_script_composes_from_any_folder(tmp_path: Path):
    done = run_script("custom_loss", "trainer.max_steps=2", "--cfg", "job", folder=tmp_path, NUM_GPUS="3")
    assert done.returncode == 0, done.stderr
    for line in ("policy_loss_type: reinforce", "max_steps: 2", "num_inference_engines: 3", "logger: console"):
        assert line in done.stdout


def test_preset_script_lists_presets_without_argument(tmp_path: Path):
    done = run_script(folder=tmp_path)
    assert done.returncode != 0
    assert "name a preset, one of: cispo clip_cov " in done.stderr


@pytest.mark.on_demand
@needs_uv
@pytest.mark.parametrize("command", SCRIPTS, ids=str)
def test_script_composes_preset_as_documented(command: Command, tmp_path: Path):
    """Compose the preset only. Tests of environments and runs train with the presets."""
    script, *words = command.words
    done = run_script(*words, "--cfg", "job", folder=REPOSITORY, script=script, NUM_GPUS="3", HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr
    composed = yaml.safe_load(done.stdout)
    assert composed["generator"]["num_inference_engines"] == 3
    assert composed["trainer"]["logger"] == "console"
    if "trainer.max_steps=2" in words:
        assert composed["trainer"]["max_steps"] == 2


def test_every_script_is_started_by_a_page():
    assert {REPOSITORY / command.words[0] for command in SCRIPTS} == set(EXAMPLES.glob("*/run*.sh"))


@pytest.mark.parametrize("module", ["examples.async.main_async", "examples.fully_async.main_fully_async"])
def test_skyrl_s_asynchronous_modules_train_asynchronously(module: str):
    command = [sys.executable, "-m", module, "device=cpu", "trainer.placement.colocate_all=true"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert "false with trainer.fully_async.enabled" in done.stderr
