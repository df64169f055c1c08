"""docs/torchrl/examples.md runs, section by section."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from skyrl_train.environments.tools.browser import PROGRAMS
from skyrl_train.testing.tiny_models import save_tiny_model

PAGE = Path(__file__).parents[4] / "docs" / "torchrl" / "examples.md"
SERVER = Path(__file__).parents[2] / "environments" / "tools" / "mcp_server.py"
NEEDS = {
    "PythonInterpreter": shutil.which("bwrap"),
    "MCPToolTransform": importlib.util.find_spec("mcp"),
    "BrowserTransform": any(map(shutil.which, PROGRAMS)) and importlib.util.find_spec("playwright"),
}
QUESTIONS = [
    {"question": "How many clips are 48 and 24?", "answer": "48 + 24 = 72\n#### 72"},
    {"question": "What is 20 + 1?", "answer": "#### 21"},
]
INSTRUCTIONS = [
    {
        "key": 1,
        "prompt": "Write without commas and end with over.",
        "instruction_id_list": ["startend:end_checker", "punctuation:no_comma"],
        "kwargs": [{"end_phrase": "over"}, {}],
    }
]


def sections() -> dict[str, str]:
    """The Python of each section by its heading."""
    found = {}
    for part in PAGE.read_text().split("\n## ")[1:]:
        title, _, body = part.partition("\n")
        found[title] = "\n".join(re.findall(r"^```python\n(.*?)^```$", body, re.MULTILINE | re.DOTALL))
    return {title: code for title, code in found.items() if code}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create the files that the page assumes."""
    made = tmp_path_factory.mktemp("examples")
    save_tiny_model(made / "model")
    for name, rows in (("questions", QUESTIONS), ("instructions", INSTRUCTIONS)):
        (made / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    shutil.copy(SERVER, made / "server.py")
    return made


def test_the_page_has_every_example():
    assert len(sections()) == 14 and set(NEEDS) <= set(sections())


@pytest.mark.filterwarnings("ignore:LLMEnv is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:eos_token_id is missing:UserWarning")
@pytest.mark.parametrize("title", sections())
def test_an_example_runs(title: str, folder: Path, monkeypatch: pytest.MonkeyPatch):
    if not NEEDS.get(title, True):
        pytest.skip(f"{title} needs what scripts/test installs")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PATH", os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    names: dict[str, Any] = {}
    exec(compile(sections()[title], f"{PAGE.name}: {title}", "exec"), names)
