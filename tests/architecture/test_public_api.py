"""The public API of `import skyrl_train` is light, lazy, documented and used by a test."""

from __future__ import annotations

import ast
import re
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import skyrl_train
import skyrl_train.tensordict
import tests.support.torchrl  # noqa: F401 - before a name imports torchrl with its warnings

REPOSITORY = Path(__file__).resolve().parents[2]
PAGE = "\n".join(path.read_text() for path in sorted((REPOSITORY / "docs" / "reference").glob("api*.md")))
"""Text of api.md and of the pages with the reference."""
PACKAGES: dict[str, Any] = {"skyrl_train": skyrl_train, "skyrl_train.tensordict": skyrl_train.tensordict}
NAMES: list[str] = PACKAGES["skyrl_train"].__all__


def test_api_pages_have_every_public_name_once():
    assert sorted(re.findall(r"^::: skyrl_train\.(\w+)$", PAGE, re.MULTILINE)) == NAMES


def test_first_api_page_names_the_page_of_each_name():
    rows = re.findall(r"^\| \[[\w ,]+\]\((api_\w+\.md)\) \| (.*) \|$", PAGE, re.MULTILINE)
    listed = {name: file for file, names in rows for name in re.findall(r"`(\w+)`", names)}
    errors = {name for name in NAMES if issubclass_of_skyrl_error(name)} - {"SkyRLError"}
    assert set(listed) == set(NAMES) - errors
    for name, file in listed.items():
        assert f"::: skyrl_train.{name}\n" in (REPOSITORY / "docs" / "reference" / file).read_text(), name


def issubclass_of_skyrl_error(name: str) -> bool:
    found = getattr(skyrl_train, name)
    return isinstance(found, type) and issubclass(found, skyrl_train.SkyRLError)


@pytest.mark.parametrize("package", PACKAGES)
def test_public_names_load_and_match_stubs(package: str):
    source = Path(str(PACKAGES[package].__file__)).read_text()
    block = next(n for n in ast.parse(source).body if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING")
    seen = {
        alias.asname for node in block.body if isinstance(node, ast.Import | ast.ImportFrom) for alias in node.names
    }
    assert seen == set(PACKAGES[package].__all__)
    for name in PACKAGES[package].__all__:
        assert getattr(PACKAGES[package], name).__doc__, name
    assert set(PACKAGES[package].__all__) <= set(dir(PACKAGES[package]))


def test_unknown_name_raises_attribute_error():
    with pytest.raises(AttributeError, match="module 'skyrl_train' has no attribute 'trane'"):
        PACKAGES["skyrl_train"].trane  # noqa: B018


@pytest.mark.parametrize("package", PACKAGES)
def test_importing_loads_no_heavy_library(package: str):
    code = f"import {package}, sys; print({{'torch', 'ray', 'tensordict', 'transformers'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "set()"


def test_missing_torchrl_error_names_extra():
    code = "import sys; sys.modules['torchrl'] = None; import skyrl_train.tensordict"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "ModuleNotFoundError" in done.stderr and "uv run --extra torchrl" in done.stderr


def test_import_takes_under_50_ms():
    code = "import time; began = time.process_time(); import skyrl_train; print(time.process_time() - began)"
    runs = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60) for _ in range(5)]
    assert statistics.median(float(run.stdout) for run in runs) <= 0.05


def test_every_public_name_has_usage_script():
    """The snippets of the page, which tests run, and the scripts of tests/integration/api count as usage."""
    scripts = "\n".join(path.read_text() for path in (REPOSITORY / "tests" / "integration" / "api").rglob("*.py"))
    snippets = "\n".join(re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL))
    used = set(re.findall(r"\bsk\.(\w+)", scripts + snippets))
    assert set(NAMES) - used == set()
    kinds = {name for name in vars(skyrl_train.register) if name in REGISTRATIONS}
    assert kinds == set(REGISTRATIONS)
    assert {kind for kind in REGISTRATIONS if f"sk.register.{kind}(" in scripts + snippets} == kinds


REGISTRATIONS = re.findall(r"^\| `register\.(\w+)`", PAGE, re.MULTILINE)


@pytest.mark.parametrize("package", PACKAGES)
def test_type_checkers_reject_misspelled_names(package: str):
    body = ast.parse(Path(str(PACKAGES[package].__file__)).read_text()).body
    outside = [node for node in body if not isinstance(node, ast.If)]
    assert not any("__getattr__" in ast.unparse(node) for node in outside)
    (hidden,) = [node for node in body if isinstance(node, ast.If) and "__getattr__" in ast.unparse(node)]
    assert ast.unparse(hidden.test) == "not TYPE_CHECKING"
