"""The snippets of docs/torchrl/index.md run, and its table has every name of the surface, where it says."""

from __future__ import annotations

import importlib
import inspect
import re
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

from skyrl_train.tensordict.collectors.llm_collector import LLMCollector
from skyrl_train.tensordict.collectors.ray_collector import RayLLMCollector
from skyrl_train.testing.tiny_models import save_tiny_model
from tests.unit.tensordict.conftest import TORCHRL_MODULES

PAGE = (Path(__file__).parents[4] / "docs" / "torchrl" / "index.md").read_text()
ROWS = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \| `(skyrl_train[\w.]+)` \|$", PAGE, re.MULTILINE)
WHERE = {name: module for names, module in ROWS for name in re.findall(r"`(\w+)`", names)}
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
"""Names that TorchRL's users look for, by release."""

NOT_OFFERED = """
MATHEnv CountdownEnv RetrieveKL KLComputation ExecuteToolsInOrder ToolRegistry XMLBlockParser JSONCallParser
SimpleToolTransform AddThinkingPrompt VLLMWeightSyncScheme SGLangWeightSyncScheme VLLMDoubleBuffer default_spec
dialogpt falcon deepseek TransformedEnv Compose SerialEnv ParallelEnv AsyncEnvPool
TensorDictReplayBuffer ListStorage LazyMemmapStorage
"""
"""Others of its names, beside those that its modules export: see below."""
LEFT_OUT = PAGE.partition("\n## What is not offered\n")[2].partition("\n| method ")[0]
NOT_HERE = PAGE.partition("\n## What is not offered\n")[2].partition("\nThere is one forward")[0]
INSTEAD = {
    name: instead
    for names, instead in re.findall(r"^\| (`\w+`(?:, `\w+`)*) \| (.+) \|$", LEFT_OUT, re.MULTILINE)
    for name in re.findall(r"`(\w+)`", names)
}


def test_every_name_of_the_surface_is_in_the_table():
    assert set(SURFACE.split()) - set(WHERE) == set()


def test_every_name_that_is_not_offered_has_something_instead():
    assert set(NOT_OFFERED.split()) <= set(INSTEAD)
    assert not set(INSTEAD) & set(WHERE)
    for module, name in re.findall(r"`(skyrl_train[\w.]+)\.(\w+)", LEFT_OUT):
        assert hasattr(importlib.import_module(module), name)


def exported(torchrl: ModuleType) -> dict[str, Any]:
    """Return the names that torchrl's modules for language models export."""
    modules = [importlib.import_module(f"torchrl.{name}") for name in (*TORCHRL_MODULES, "weight_update.llm")]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {name: getattr(module, name) for module in modules for name in module.__all__}


def test_every_name_that_torchrl_exports_is_here_or_has_something_instead(torchrl: ModuleType):
    assert set(exported(torchrl)) - set(WHERE) - set(INSTEAD) == set()


def test_every_argument_and_method_of_theirs_is_here_or_in_a_table(torchrl: ModuleType):
    named = set(re.findall(r"`(\w+)(?:=\w+)?`", NOT_HERE))
    left = []
    for name, theirs in exported(torchrl).items():
        if name not in WHERE or not inspect.isclass(theirs):
            continue
        ours = getattr(importlib.import_module(WHERE[name]), name)
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


def test_names_are_where_the_table_says():
    found = {name: getattr(importlib.import_module(WHERE[name]), name).__module__ for name in WHERE}
    assert found == WHERE


def test_the_snippets_run(tmp_path: Path):
    path = save_tiny_model(tmp_path / "model")
    for code in re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL):
        names: dict[str, Any] = {}
        exec(compile(code.replace("Qwen/Qwen2.5-0.5B-Instruct", path), "tensordict.md", "exec"), names)
