"""Scripts written after TorchRL's documentation learn here with other import lines only."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

import tests.support.torchrl  # noqa: F401 - before a script's imports of torchrl, with their warnings
from tests.support.doc_pages import REPOSITORY, snippets

FOLDER = REPOSITORY / "examples" / "torchrl"
STEPS = {"grpo_sync.py": 12, "grpo_async.py": 60, "expert_iteration.py": 14}
IMPORT = re.compile(r"^from (\S+) import (?:\(([^)]*)\)|(.*))$", re.MULTILINE)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("model"))
    subprocess.run([sys.executable, str(FOLDER / "make_model.py"), folder], check=True, timeout=120)
    return folder


def imports(code: str) -> set[tuple[str, str]]:
    """Return (module, name) for each name that the code imports."""
    return {
        (module, name.strip())
        for module, several, single in IMPORT.findall(code)
        for name in (several or single).split(",")
        if name.strip()
    }


def test_page_diffs_change_imports_only():
    for script in (*STEPS, "letters.py"):
        page = "grpo_sync" if script == "letters.py" else script.removesuffix(".py")
        (diff,) = [text for text in snippets(f"docs/torchrl/{page}.md", "diff") if f"/{script}\n" in text]
        lines = diff.splitlines()[2:]
        old, new = ("\n".join(line[1:] for line in lines if line[0] == sign) for sign in "-+")
        assert new in (FOLDER / script).read_text()
        assert {module for module, _ in imports(new)} == {"skyrl_train.tensordict"}
        assert {name for _, name in imports(old)} == {name for _, name in imports(new)}
        exec(old, {})  # torchrl has the names
        before = (FOLDER / script).read_text().replace(new, old)
        assert "skyrl_train" not in before
        compile(before, script, "exec")


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("engine", ["transformers", pytest.param("vllm", marks=pytest.mark.on_demand)])
@pytest.mark.parametrize("script", STEPS)
def test_script_raises_reward(script: str, engine: str, model_path: str):
    command = [sys.executable, str(FOLDER / script), model_path, "--engine", engine]
    done = subprocess.run(
        [*command, "--steps", str(STEPS[script])], capture_output=True, text=True, timeout=360, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    rewards = [float(one) for one in re.findall(r"^step \d+: reward ([\d.]+)", done.stdout, re.MULTILINE)]
    assert rewards[-1] > rewards[0] + 0.25, rewards
