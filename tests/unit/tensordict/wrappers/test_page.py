"""The snippets of docs/tensordict.md run, and its table has every name of the surface, where it says."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest

from skyrl_train.testing.tiny_models import save_tiny_model

PAGE = (Path(__file__).parents[4] / "docs" / "tensordict.md").read_text()
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
"""What TorchRL's users look for, release by release: the issue's list."""

NOT_OFFERED = """
MATHEnv CountdownEnv RetrieveKL KLComputation ExecuteToolsInOrder ToolRegistry XMLBlockParser JSONCallParser
SimpleToolTransform AddThinkingPrompt VLLMWeightSyncScheme SGLangWeightSyncScheme VLLMDoubleBuffer default_spec
dialogpt falcon deepseek
"""
"""The rest of its names."""
LEFT_OUT = PAGE.partition("\n## What is not offered\n")[2].partition("\n| argument |")[0]
INSTEAD = {
    name: instead
    for names, instead in re.findall(r"^\| (`\w+`(?:, `\w+`)*) \| (.+) \|$", LEFT_OUT, re.MULTILINE)
    for name in re.findall(r"`(\w+)`", names)
}


def test_every_name_of_the_surface_is_in_the_table():
    assert set(SURFACE.split()) - set(WHERE) == set()


def test_every_name_that_is_not_offered_has_something_instead():
    assert set(INSTEAD) == set(NOT_OFFERED.split())
    assert not set(INSTEAD) & set(WHERE)
    for module, name in re.findall(r"`(skyrl_train[\w.]+)\.(\w+)", LEFT_OUT):
        assert hasattr(importlib.import_module(module), name)


@pytest.mark.parametrize("name", sorted(WHERE))
def test_a_name_is_where_the_table_says(name: str):
    found = getattr(importlib.import_module(WHERE[name]), name)
    assert found.__module__ == WHERE[name]


def test_the_snippets_run(tmp_path: Path):
    path = save_tiny_model(tmp_path / "model")
    for code in re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL):
        names: dict[str, Any] = {}
        exec(compile(code.replace("Qwen/Qwen2.5-0.5B-Instruct", path), "tensordict.md", "exec"), names)
