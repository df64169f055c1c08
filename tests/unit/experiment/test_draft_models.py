"""Draft models and heads are checked before Ray starts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from skyrl_train.config.local_checks import find_missing_resources
from skyrl_train.config.predicates import RunComponents
from skyrl_train.config.prepare import prepare_config
from skyrl_train.config.schema import Config
from skyrl_train.errors import ConfigError
from skyrl_train.experiment.draft_models import check_drafts, measure_drafts
from skyrl_train.experiment.preflight import check_run
from skyrl_train.testing.tiny_models import save_tiny_model, tiny_config, tiny_model
from tests.support.draft_heads import save_draft_head

SECTION = "generator.speculative"


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("policy") / "model", "qwen3")


@pytest.fixture(autouse=True)
def v2_model_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")


def config(policy: str, *overrides: str) -> Config:
    argv = [f"trainer.policy.model.path={policy}", "generator.backend=vllm", "data.val_data=[]", *overrides]
    return prepare_config(argv, has_accelerator=False).config


def drafting(policy: str, method: str, model: object = None) -> Config:
    return config(policy, f"{SECTION}.method={method}", *([f"{SECTION}.model={model}"] if model is not None else []))


def test_missing_draft_model_is_found(policy: str, tmp_path: Path):
    cfg = drafting(policy, "eagle", tmp_path / "nothing")
    found = {problem.key: str(problem) for problem in find_missing_resources(cfg, RunComponents())}
    assert "must be a model's folder or its name on the hub" in found[f"{SECTION}.model"]
    drafts = f"{{method: eagle, model: {tmp_path}/nothing, num_speculative_tokens: 2}}"
    cfg = config(policy, f"+generator.engine_init_kwargs.speculative_config={drafts}")
    keys = [problem.key for problem in find_missing_resources(cfg, RunComponents())]
    assert "generator.engine_init_kwargs.speculative_config.model" in keys
    assert f"{SECTION}.model" not in keys


@pytest.mark.parametrize("method", ["ngram", "draft_model", "eagle", "eagle3"])
def test_fitting_drafts_are_accepted(method: str, policy: str, tmp_path: Path):
    model = {"ngram": None, "draft_model": policy}.get(method) or save_draft_head(tmp_path / "head", method)
    check_drafts(drafting(policy, method, None if method == "ngram" else model))


def test_draft_of_other_vocabulary_is_refused(policy: str, tmp_path: Path):
    draft = save_tiny_model(tmp_path / "draft", "llama", vocab_size=400)
    with pytest.raises(ConfigError, match=rf"{SECTION}\.model=.*its vocab_size is 400, but that of .* is 320"):
        check_run(drafting(policy, "draft_model", draft), RunComponents(rewards=False))


def test_draft_of_other_tokenizer_is_refused(policy: str, tmp_path: Path):
    shutil.copytree(policy, tmp_path / "draft")
    file = tmp_path / "draft" / "tokenizer.json"
    content = json.loads(file.read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    file.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=rf"{SECTION}\.model=.*2 tokens of the policy"):
        check_drafts(drafting(policy, "draft_model", tmp_path / "draft"))


def test_draft_of_other_architecture_is_refused(policy: str, tmp_path: Path):
    tiny_config("t5").save_pretrained(tmp_path / "draft")
    with pytest.raises(ConfigError, match=rf"{SECTION}\.model=.*cannot be loaded"):
        check_drafts(drafting(policy, "draft_model", tmp_path / "draft"))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"vocab_size": 400}, "its vocab_size is 400"),
        ({"hidden_size": 96}, "its hidden_size is 96"),
        ({"architectures": None}, "names no architectures"),
        ({"hidden_size": 96, "target_hidden_size": 64}, None),
    ],
)
def test_head_of_another_model_is_refused(
    changes: dict[str, object], expected: str | None, policy: str, tmp_path: Path
):
    folder = Path(save_draft_head(tmp_path / "head", "eagle3"))
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(content | changes))
    cfg = drafting(policy, "eagle3", folder)
    if expected is None:
        check_drafts(cfg)
        return
    with pytest.raises(ConfigError, match=rf"{SECTION}\.model=.*{expected}"):
        check_drafts(cfg)


def test_mtp_needs_layers_in_policy(policy: str, tmp_path: Path):
    with pytest.raises(ConfigError, match=rf"{SECTION}\.method=mtp: .* \(qwen3\) has no layers for multi-token"):
        check_drafts(drafting(policy, "mtp"))
    model = tiny_config("glm4_moe")
    model.num_nextn_predict_layers = 1
    model.save_pretrained(tmp_path / "model")
    check_drafts(drafting(str(tmp_path / "model"), "mtp"))
    model.num_nextn_predict_layers = 2
    model.save_pretrained(tmp_path / "model")
    with pytest.raises(ConfigError, match=rf"{SECTION}\.num_speculative_tokens=3: .* has 2 layers"):
        check_drafts(drafting(str(tmp_path / "model"), "mtp"))


def test_size_of_drafts(policy: str, tmp_path: Path):
    model = tiny_model("qwen3")
    numel, per_layer = sum(parameter.numel() for parameter in model.parameters()), 2 * 2 * 32
    size = measure_drafts(drafting(policy, "draft_model", policy), 0)
    assert (size.weights, size.cache_per_token) == (numel, 2 * per_layer)
    for method in ("eagle", "eagle3"):
        folder = Path(save_draft_head(tmp_path / method, method))
        size = measure_drafts(drafting(policy, method, folder), 0)
        stored = (folder / "model.safetensors").stat().st_size // 4
        assert size.cache_per_token == per_layer
        assert abs(size.weights - stored) / stored < 0.1, method
    assert measure_drafts(drafting(policy, "ngram"), 0).weights == 0


def test_head_in_format_of_speculators_is_read(policy: str, tmp_path: Path):
    folder = Path(save_draft_head(tmp_path / "head", "eagle3"))
    cfg = drafting(policy, "eagle3", folder)
    size, content = measure_drafts(cfg, 0), json.loads((folder / "config.json").read_text())
    own = {name: content.pop(name) for name in ("architectures", "draft_vocab_size")}
    settings = {**own, "transformer_layer_config": content, "target_hidden_size": None}
    (folder / "config.json").write_text(json.dumps(settings))
    check_drafts(cfg)
    assert measure_drafts(cfg, 0) == size
    content["hidden_size"] = 96
    (folder / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ConfigError, match="its hidden_size is 96"):
        check_drafts(cfg)
