"""docs/torchrl/from_torchrl.md has all of TorchRL's names: offered under our import, or with a replacement."""

from __future__ import annotations

import importlib
import inspect
import json
import re
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import skyrl_train.tensordict
from skyrl_train.tensordict.collectors.llm_collector import LLMCollector
from skyrl_train.tensordict.collectors.ray_collector import RayLLMCollector
from skyrl_train.testing.tiny_models import save_tiny_model
from tests.support.doc_pages import REPOSITORY, snippets
from tests.support.torchrl import MODULES as TORCHRL_MODULES

PAGE = (REPOSITORY / "docs" / "torchrl" / "from_torchrl.md").read_text()
OFFERED = set(vars(skyrl_train.tensordict)["__all__"])
TABLES = PAGE.partition("\n## Methods that are not offered\n")[2].partition("\n## Results that differ\n")[0]


def exported(torchrl: ModuleType) -> dict[str, Any]:
    """Return the names that torchrl's modules for language models export."""
    modules = [importlib.import_module(f"torchrl.{name}") for name in (*TORCHRL_MODULES, "weight_update.llm")]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {name: getattr(module, name) for module in modules for name in module.__all__}


def test_page_lists_names_outside_packages(torchrl: ModuleType):
    other = set(re.findall(r"`(\w+)`", PAGE.partition("Names outside those packages")[2].partition("\n\n## ")[0]))
    assert set(exported(torchrl)) | other == OFFERED


def test_every_name_of_torchrl_is_offered(torchrl: ModuleType):
    theirs = exported(torchrl)
    assert set(theirs) - OFFERED == set()
    unchanged = PAGE.partition("TorchRL's own, unchanged:")[2].partition("\n\nNames outside")[0]
    same = {name for name, kind in theirs.items() if getattr(skyrl_train.tensordict, name) is kind}
    assert same == set(re.findall(r"`(\w+)`", unchanged))


def test_torchrl_methods_are_offered_or_listed(torchrl: ModuleType):
    named = set(re.findall(r"`(\w+)(?:=\w+)?`", TABLES))
    left = []
    for name, theirs in exported(torchrl).items():
        if name not in OFFERED or not inspect.isclass(theirs):
            continue
        ours = getattr(skyrl_train.tensordict, name)
        if ours is theirs:
            continue
        here = set(dir(ours))
        own = [kind for kind in ours.__mro__ if "skyrl_train" in kind.__module__]
        for kind in [*own, LLMCollector] if ours is RayLLMCollector else own:
            here |= set(inspect.signature(kind.__init__).parameters)
            here |= set(re.findall(r"self\.(\w+)", inspect.getsource(kind)))
        passes_on = any(one.kind is one.VAR_KEYWORD for one in inspect.signature(ours.__init__).parameters.values())
        if issubclass(ours, theirs) and (passes_on or ours.__init__ is theirs.__init__):
            here |= set(inspect.signature(theirs.__init__).parameters)
        parts = [kind for kind in theirs.__mro__ if kind.__module__.startswith("torchrl") and "llm" in kind.__module__]
        methods = (inspect.isfunction, lambda value: isinstance(value, property | classmethod | staticmethod))
        there = {
            key for kind in parts for key, value in vars(kind).items() if any(is_one(value) for is_one in methods)
        } | set(inspect.signature(theirs.__init__).parameters)
        there = {key for key in there if not key.startswith("_") and not key.endswith("_spec")} - {"args", "kwargs"}
        left += [f"{name}.{key}" for key in sorted(there - here - named)]
    assert left == []


def test_documented_program_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    path = save_tiny_model(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    rows = [{"question": f"1 + {number} = ?", "answer": f"#### {number + 1}"} for number in range(8)]
    Path("train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (program,) = snippets("docs/torchrl/from_torchrl.md")
    code = program.replace("Qwen/Qwen2.5-0.5B-Instruct", path).replace('"max_new_tokens": 64', '"max_new_tokens": 8')
    exec(compile(code, "from_torchrl.md", "exec"), {})
    assert re.findall(r"^version (\d): reward \d\.\d\d, entropy \d\.\d\d$", capsys.readouterr().out, re.M) == ["1", "2"]
