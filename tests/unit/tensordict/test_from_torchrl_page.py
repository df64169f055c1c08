"""docs/torchrl/from_torchrl.md has all of TorchRL's names: offered under our import, or with a replacement."""

from __future__ import annotations

import importlib
import inspect
import json
import pkgutil
import re
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import skyrl_train.tensordict
from skyrl_train.config.keys import all_keys
from skyrl_train.tensordict.collectors.llm_collector import LLMCollector
from skyrl_train.tensordict.collectors.ray_collector import RayLLMCollector
from skyrl_train.tensordict.not_offered import DOCS_PAGE, REPLACEMENTS
from skyrl_train.testing.tiny_models import save_tiny_model
from tests.support.doc_pages import REPOSITORY, snippets
from tests.support.torchrl import MODULES as TORCHRL_MODULES

PAGE = (REPOSITORY / "docs" / "torchrl" / "from_torchrl.md").read_text()
OFFERED = set(vars(skyrl_train.tensordict)["__all__"])
IMPORTS = re.findall(r"^\| `from (torchrl[\w.]*) import ([^`]+)` \| `from ([\w.]+) import ([^`]+)` \|$", PAGE, re.M)
OLDER_AND_OWN = PAGE.partition("\nNames of older releases")[2].partition("\n## ")[0]
NOT_OFFERED = PAGE.partition("\n## Names that are not offered\n")[2].partition("\n| method ")[0]
TABLES = PAGE.partition("\n## Names that are not offered\n")[2].partition("\n## Results that differ\n")[0]
SURFACE = """
Text Tokens Masks LogProbs ChatHistory History ContentBase LLMData LogProbDistribution LLMMaskedCategorical
add_chat_template LLMWrapperBase SGLangWrapper vLLMWrapper TransformersWrapper RemoteTransformersWrapper
AsyncSGLang make_vllm_worker stateless_init_process_group vLLMWorker LLMOnDevice CategoricalSequential vLLMUpdater
ChatEnv DatasetChatEnv GSM8KEnv make_gsm8k_env GSM8KPrepareQuestion GSM8KRewardParser IFEvalEnv IfEvalScorer
IFEvalScoreData LLMEnv LLMHashingEnv MLGymWrapper make_mlgym
DataLoadingPrimer KLRewardTransform RetrieveLogProb MCPToolTransform BrowserTransform PythonInterpreter PolicyVersion
TemplateTransform Tokenizer as_nested_tensor as_padded_tensor
GRPOLoss DAPO CISPO GRPOLossOutput MCAdvantage SFTLoss SFTLossOutput TopKRewardSelector
LLMCollector RayLLMCollector WeightUpdaterBase ReplayBuffer
"""
"""Names that TorchRL's users look for. Some are only in older releases."""


def exported(torchrl: ModuleType) -> dict[str, Any]:
    """Return the names that torchrl's modules for language models export."""
    modules = [importlib.import_module(f"torchrl.{name}") for name in (*TORCHRL_MODULES, "weight_update.llm")]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {name: getattr(module, name) for module in modules for name in module.__all__}


def test_import_lines_of_page_work():
    for theirs, names, ours, same_names in IMPORTS:
        assert names == same_names, theirs
        exec(f"from {ours} import {same_names}", {})


def test_import_lines_of_page_exist_in_torchrl(torchrl: ModuleType):
    for module, names, _, _ in IMPORTS:
        for name in names.split(", "):
            assert hasattr(importlib.import_module(module), name), (module, name)


def test_page_names_everything_that_is_offered():
    named = {name for _, names, _, _ in IMPORTS for name in names.split(", ")}
    other = set(re.findall(r"`(\w+)[`(]", OLDER_AND_OWN))
    assert named | other == OFFERED
    assert set(SURFACE.split()) <= OFFERED


def test_page_table_equals_replacements():
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \| (.+) \|$", NOT_OFFERED, re.MULTILINE)
    assert {name: advice for names, advice in rows for name in re.findall(r"`(\w+)`", names)} == REPLACEMENTS
    assert not set(REPLACEMENTS) & OFFERED


def test_replacements_name_what_exists():
    for name in re.findall(r"`(skyrl_train[\w.]+)", NOT_OFFERED):
        assert pkgutil.resolve_name(name)
    keys = set(all_keys())
    found = re.findall(r"`(trainer\.[\w.]+)`", NOT_OFFERED)
    assert found and all(any(key == name or key.startswith(f"{name}.") for key in keys) for name in found)
    folders = re.findall(r"`(examples/\w+)`", NOT_OFFERED)
    assert folders and all((REPOSITORY / folder).is_dir() for folder in folders)
    classes = set(re.findall(r"`([A-Z]\w+)\b", "".join(REPLACEMENTS.values())))
    assert classes - OFFERED == {"Compose"}  # Compose is torchrl's: append_transform accepts it


def test_missing_names_raise_error_with_replacement():
    module: Any = skyrl_train.tensordict
    for name, advice in REPLACEMENTS.items():
        assert not hasattr(module, name)
        with pytest.raises(AttributeError) as read:
            getattr(module, name)
        with pytest.raises(ImportError) as imported:
            exec(f"from {module.__name__} import {name}", {})
        message = f"{module.__name__} has no {name!r}. Instead: {advice} ({DOCS_PAGE})."
        assert str(read.value) == str(imported.value) == message
    with pytest.raises(ImportError, match="cannot import name 'Nonsense'"):
        exec(f"from {module.__name__} import Nonsense", {})
    with pytest.raises(AttributeError, match="has no attribute 'Nonsense'"):
        module.Nonsense  # noqa: B018


def test_names_of_torchrl_are_offered_or_have_replacement(torchrl: ModuleType):
    assert set(exported(torchrl)) - OFFERED - set(REPLACEMENTS) == set()


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
