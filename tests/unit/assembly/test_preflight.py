"""Mistakes that `check_config` finds before Ray starts: each within ten seconds, with its key and what to do."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

from skyrl_train.algorithms.registry import advantage_estimators
from skyrl_train.assembly.names import check_plugins
from skyrl_train.assembly.preflight import _model, check_run
from skyrl_train.assembly.storage import check_addresses
from skyrl_train.config.prepare import prepare
from skyrl_train.config.presence import Uses
from skyrl_train.entrypoints import check_config
from skyrl_train.entrypoints.main_generate import EvaluationExp
from skyrl_train.entrypoints.main_sft import SFTExp
from skyrl_train.entrypoints.serve import ServingExp
from skyrl_train.errors import ConfigError, DataError
from skyrl_train.experiments.base import Experiment, used_by
from skyrl_train.models.loading import POLICY_PATH, described_causal_lm
from skyrl_train.models.token_scorer import refuse_unscorable
from skyrl_train.storage.hub import unreachable_model
from skyrl_train.testing.tiny_models import byte_tokenizer, save_tiny_model, save_tiny_reward_model
from tests.support.hub_server import hub_server

ROW = {
    "prompt": [{"role": "user", "content": "What is 1+1?"}],
    "env_class": "gsm8k",
    "reward_spec": {"method": "rule", "ground_truth": "2"},
}
PLUGIN = """
import skyrl_train as sk

@sk.register.advantage("asks_for_values")
def asks_for_values(token_rewards, mask, sequence_ids, *, values, gamma, lambd): ...

@sk.register.advantage("asks_for_reference")
def asks_for_reference(rewards, group_ids, valid, *, ref_logprobs): ...
"""


@pytest.fixture
def good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Overrides of a run without mistakes, whose files are in tmp_path."""
    for variable in ("RAY_ADDRESS", "SKYRL_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    save_tiny_model(tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text(f"{json.dumps(ROW)}\n" * 8)
    return [
        f"data.train_data=['{tmp_path}/rows.jsonl']",
        "data.val_data=[]",
        f"trainer.policy.model.path={tmp_path}/model",
        f"trainer.ckpt_path={tmp_path}/ckpts",
        f"trainer.export_path={tmp_path}/exports",
        "trainer.placement.colocate_all=true",
        "generator.backend=transformers",
    ]


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "plugin_with_roles.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("plugin_with_roles", None)
    for name in ("asks_for_values", "asks_for_reference"):
        advantage_estimators.forget(name)


def check(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, float]:
    """Return the exit code of check_config, everything printed, and how many seconds it took."""
    begun, code = time.perf_counter(), 0
    try:
        check_config.main(argv)
    except SystemExit as stop:
        code = int(stop.code or 0)
    printed = capsys.readouterr()
    return code, printed.out + printed.err, time.perf_counter() - begun


def opt(folder: Path, patch: pytest.MonkeyPatch) -> list[str]:
    sizes = {"hidden_size": 32, "ffn_dim": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 320}
    config = AutoConfig.for_model("opt", **sizes, word_embed_proj_dim=32, dropout=0.0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "model")
    return []


def encoder_decoder(folder: Path, patch: pytest.MonkeyPatch) -> list[str]:
    config = AutoConfig.for_model("t5", d_model=32, d_kv=16, d_ff=32, num_layers=1, num_heads=2, vocab_size=320)
    AutoModelForSeq2SeqLM.from_config(config).save_pretrained(folder / "model")
    return []


def reward_model_as_policy(folder: Path, patch: pytest.MonkeyPatch) -> list[str]:
    save_tiny_reward_model(folder / "reward", tie_word_embeddings=False)
    return [f"trainer.policy.model.path={folder}/reward"]


def policy_as_reward_model(folder: Path, patch: pytest.MonkeyPatch) -> list[str]:
    return [f"trainer.reward.model.path={folder}/model"]


def unservable_rope(folder: Path, patch: pytest.MonkeyPatch) -> list[str]:
    file = folder / "model" / "config.json"
    factors = {"short_factor": [1.0] * 16, "long_factor": [2.0] * 16, "original_max_position_embeddings": 1024}
    config = json.loads(file.read_text()) | {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, **factors}}
    file.write_text(json.dumps(config))
    return []


def no_tokenizer(folder: Path, patch: pytest.MonkeyPatch) -> list[str]:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / "model" / name).unlink()
    return []


def small_embedding(folder: Path, patch: pytest.MonkeyPatch) -> list[str]:
    save_tiny_model(folder / "model", vocab_size=200)
    return []


def no_chat_template(folder: Path, patch: pytest.MonkeyPatch) -> list[str]:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = None
    (folder / "model" / "chat_template.jinja").unlink()
    tokenizer.save_pretrained(folder / "model")
    return []


def unreachable_hub(folder: Path, patch: pytest.MonkeyPatch) -> list[str]:
    patch.setattr(constants, "HF_HUB_OFFLINE", False)
    patch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    return ["trainer.policy.model.path=nobody/nothing"]


def folder_below_a_file(folder: Path, patch: pytest.MonkeyPatch) -> list[str]:
    return [f"trainer.ckpt_path={folder}/rows.jsonl/ckpts"]


def unwritable_mirror(folder: Path, patch: pytest.MonkeyPatch) -> list[str]:
    return ["trainer.export_path=file:///proc/exports"]


def short_limit(folder: Path, patch: pytest.MonkeyPatch) -> list[str]:
    return ["trainer.max_prompt_length=3"]


def no_server_token(folder: Path, patch: pytest.MonkeyPatch) -> list[str]:
    urls = "generator.remote_inference_engine_urls=['127.0.0.1:8000']"
    return ["generator.run_engines_locally=false", "trainer.placement.colocate_all=false", urls]


def no_judge_key(folder: Path, patch: pytest.MonkeyPatch) -> list[str]:
    (folder / "rows.jsonl").write_text(json.dumps(ROW | {"env_class": "llm_as_a_judge"}) + "\n")
    return []


def no_home(folder: Path, patch: pytest.MonkeyPatch) -> list[str]:
    patch.delenv("HOME")
    return ["trainer.export_path=${oc.env:HOME}/exports"]


def critic_of_a_plugin(folder: Path, patch: pytest.MonkeyPatch) -> list[str]:
    return ["trainer.plugins=[plugin_with_roles]", "trainer.algorithm.advantage_estimator=asks_for_values"]


def ranks_of_a_plugin_s_critic(folder: Path, patch: pytest.MonkeyPatch) -> list[str]:
    critic = f"trainer.critic.model.path={folder}/model"
    own = ["trainer.placement.colocate_all=false", "trainer.placement.critic_num_nodes=0"]
    return [*critic_of_a_plugin(folder, patch), critic, *own]


def ranks_of_a_plugin_s_reference(folder: Path, patch: pytest.MonkeyPatch) -> list[str]:
    names = ["trainer.plugins=[plugin_with_roles]", "trainer.algorithm.advantage_estimator=asks_for_reference"]
    own = ["trainer.placement.colocate_policy_ref=false", "trainer.placement.ref_num_nodes=0"]
    return [*names, "trainer.algorithm.use_kl_loss=false", "trainer.placement.colocate_all=false", *own]


def no_data(folder: Path, patch: pytest.MonkeyPatch) -> list[str]:
    return ["data.train_data=[]"]


MISTAKES: dict[Callable[[Path, pytest.MonkeyPatch], list[str]], list[str]] = {
    opt: [f"{POLICY_PATH}=", "OPTForCausalLM computes its logits from more than", "another architecture"],
    encoder_decoder: [f"{POLICY_PATH}=", "cannot be loaded", "causal language model", "T5Config"],
    reward_model_as_policy: [f"{POLICY_PATH}=", "the checkpoint lacks", "lm_head.weight"],
    policy_as_reward_model: ["trainer.reward.model.path=", "num_labels=2", "num_labels=1"],
    unservable_rope: [f"{POLICY_PATH}=", "generator.backend=transformers cannot serve", "Use another engine"],
    no_tokenizer: [f"{POLICY_PATH}=", "has no tokenizer; save that of the model"],
    small_embedding: [
        f"{POLICY_PATH}=",
        "beyond the model's embedding of 200 rows",
        "id 258",
        "resize_token_embeddings",
    ],
    no_chat_template: ["generator.chat_template.name_or_path=null", "The tokenizer of", "source=file"],
    unreachable_hub: [f"{POLICY_PATH}=nobody/nothing", "The hub does not answer within 3 s", "HF_HUB_OFFLINE=1"],
    folder_below_a_file: ["trainer.ckpt_path=", "rows.jsonl cannot be written: Not a directory"],
    unwritable_mirror: ["trainer.export_path=file:///proc/exports", "/proc cannot be written"],
    short_limit: ["none of 8 prompts has at most 3 tokens (the shortest has about", "raise trainer.max_prompt_length"],
    no_server_token: ["generator.run_engines_locally=false", "SKYRL_API_KEY"],
    no_judge_key: ["environment.skyrl_gym.llm_as_a_judge.base_url=null", "OPENAI_API_KEY"],
    no_home: ["trainer.export_path=", "The environment variable HOME is not set: export it"],
    critic_of_a_plugin: ["trainer.critic.model.path=null", "advantage_estimator=asks_for_values needs a critic"],
    ranks_of_a_plugin_s_critic: ["trainer.placement.critic_num_nodes=0", "at least 1"],
    ranks_of_a_plugin_s_reference: ["trainer.placement.ref_num_nodes=0", "at least 1"],
    no_data: ["data.train_data=[]", "at least one file or dataset"],
}


def test_run_without_mistakes_is_accepted(good: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    code, text, _ = check(capsys, *good)
    assert (code, text.startswith("config ok\n")) == (0, True), text
    assert [line for line in text.splitlines()[1:] if not line.startswith("note: ")] == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "rows.jsonl"]


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
def test_mistake_is_found_within_ten_seconds(
    mistake: Callable[[Path, pytest.MonkeyPatch], list[str]],
    good: list[str],
    plugin: None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    code, text, seconds = check(capsys, *good, *mistake(tmp_path, monkeypatch))
    assert code == 2
    assert [part for part in MISTAKES[mistake] if part not in text] == [], text
    assert "config ok" not in text
    assert seconds < 10


def test_elsewhere_looks_at_nothing_of_this_machine(good: list[str], capsys: pytest.CaptureFixture[str]):
    wrong = ["trainer.policy.model.path=nobody/nothing", "data.train_data=[/none.jsonl]", "trainer.ckpt_path=/proc/x"]
    assert check(capsys, "--elsewhere", *good, *wrong)[0] == 0


def test_train_finds_mistake_before_ray_starts(good: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    opt(tmp_path, monkeypatch)
    with pytest.raises(ConfigError, match="OPTForCausalLM computes its logits from more than"):
        Experiment(prepare(good, has_accelerator=False).config)


def test_several_mistakes_are_reported_at_once(good: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    opt(tmp_path, monkeypatch)
    with pytest.raises(ConfigError, match=r"(?s)2 problems.*OPTForCausalLM.*raise trainer\.max_prompt_length"):
        check_run(prepare([*good, *short_limit(tmp_path, monkeypatch)], has_accelerator=False).config, Uses())


def test_single_mistake_keeps_its_kind(good: list[str]):
    with pytest.raises(DataError, match=r"raise trainer\.max_prompt_length"):
        check_run(prepare([*good, "trainer.max_prompt_length=3"], has_accelerator=False).config, Uses())


def test_long_demonstrations_are_found(good: list[str], tmp_path: Path):
    messages = [*ROW["prompt"], {"role": "assistant", "content": "2"}]  # type: ignore[misc]
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
    limits = ["trainer.max_prompt_length=3", "generator.sampling_params.max_generate_length=3"]
    check_run(prepare(good, has_accelerator=False).config, used_by(SFTExp))
    with pytest.raises(DataError, match="no demonstration of at most 6 tokens"):
        check_run(prepare([*good, *limits], has_accelerator=False).config, used_by(SFTExp))


def test_only_first_prompt_that_fits_is_read(good: list[str], tmp_path: Path):
    long = ROW | {"prompt": [{"role": "user", "content": "x" * 5000}]}
    rows = [json.dumps(long), json.dumps(ROW), "no JSON"]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    check_run(prepare(good, has_accelerator=False).config, Uses())


def test_evaluation_needs_no_training_data(good: list[str]):
    argv = [*good, "data.train_data=[]", "trainer.ckpt_path=/proc/ckpts"]
    prepared = prepare(argv, has_accelerator=False, uses=used_by(EvaluationExp))
    check_run(prepared.config, used_by(EvaluationExp))


def test_serving_needs_no_chat_template(good: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    no_chat_template(tmp_path, monkeypatch)
    check_run(prepare(good, has_accelerator=False).config, used_by(ServingExp))


def test_tokenizer_of_a_program_is_not_checked(good: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    class OwnTokenizer(Experiment):
        def get_tokenizer(self) -> None: ...

    assert not used_by(OwnTokenizer).tokenizer
    no_tokenizer(tmp_path, monkeypatch)
    config = prepare(good, has_accelerator=False).config
    check_run(config, used_by(OwnTokenizer))
    with pytest.raises(ConfigError, match="has no tokenizer"):
        check_run(config, Uses())


def test_padding_token_beyond_embedding_is_accepted(good: list[str], tmp_path: Path):
    save_tiny_model(tmp_path / "model", vocab_size=259)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    tokenizer.add_special_tokens({"pad_token": "<pad>"})
    tokenizer.save_pretrained(tmp_path / "model")
    assert len(tokenizer) == 260
    check_run(prepare(good, has_accelerator=False).config, Uses())


def test_quantized_model_is_served_but_not_trained(good: list[str], tmp_path: Path):
    file = tmp_path / "model" / "config.json"
    quantization = {"quant_method": "compressed-tensors", "config_groups": {}}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": quantization}))
    config = prepare([*good, "generator.backend=vllm"], has_accelerator=False).config
    check_run(config, used_by(EvaluationExp))
    with pytest.raises(ConfigError, match="quantized weights are not trained"):
        check_run(config, Uses())


def test_architecture_is_fine_for_critic_whose_logits_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    opt(tmp_path, monkeypatch)
    model = described_causal_lm(f"{tmp_path}/model")
    refuse_unscorable(model, values=True)
    with pytest.raises(ConfigError, match="OPTForCausalLM computes its logits from more than"):
        refuse_unscorable(model)


def test_sglang_refuses_what_its_cpu_attention_lacks(good: list[str], tmp_path: Path):
    save_tiny_model(tmp_path / "model", "gpt_oss")
    config = prepare([*good, "generator.backend=sglang"], has_accelerator=False).config
    with pytest.raises(ConfigError, match=r"SGLang cannot serve models of type 'gpt_oss': .* has no attention sinks"):
        _model(config, Uses(), POLICY_PATH, f"{tmp_path}/model")


def test_model_in_cache_passes_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    assert "HF_HUB_OFFLINE is set" in str(unreachable_model(POLICY_PATH, "nobody/tiny"))
    folder = tmp_path / "models--nobody--tiny"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("0" * 40)
    save_tiny_model(folder / "snapshots" / ("0" * 40))
    assert unreachable_model(POLICY_PATH, "nobody/tiny") is None


def test_name_that_hub_does_not_have_is_refused(monkeypatch: pytest.MonkeyPatch):
    with hub_server(monkeypatch):
        problem = str(unreachable_model(POLICY_PATH, "nobody/nothing"))
    assert "The hub has no such model, or it is private" in problem and "HF_TOKEN" in problem


def test_unwritable_copy_of_an_address_is_refused(good: list[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SKYRL_CACHE", "/proc/cache")
    config = prepare([*good, "trainer.ckpt_path=s3://bucket/run"], has_accelerator=False).config
    with pytest.raises(ConfigError, match=r"trainer\.ckpt_path=s3://bucket/run.* /proc cannot .* Set SKYRL_CACHE"):
        check_addresses(config, Uses())


def test_program_s_algorithm_counts_when_the_configuration_is_made(good: list[str], plugin: None):
    estimator = "trainer.algorithm.advantage_estimator=asks_for_values"
    prepared = prepare([*good, estimator], has_accelerator=False, own_code=True)
    __import__("plugin_with_roles")
    with pytest.raises(ConfigError, match=r"trainer\.critic\.model\.path=null"):
        prepare([*good, estimator], has_accelerator=False, own_code=True)
    with pytest.raises(ConfigError, match=r"trainer\.critic\.model\.path=null"):
        check_plugins(prepared.config)


def test_more_ranks_than_cpus_are_a_warning(good: list[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    apart = ["trainer.placement.colocate_all=false", "generator.num_inference_engines=3"]
    (warning,) = prepare([*good, *apart], has_accelerator=False, uses=Uses()).warnings
    assert "4 ranks and engines compute at the same time, more than the 2 CPUs" in warning
    assert prepare(good, has_accelerator=False, uses=Uses()).warnings == []
    assert prepare([*good, *apart], has_accelerator=False).warnings == []


@pytest.mark.parametrize("typed", [r"\n", r"\nObservation:", r"end\t", r"\r\n"])
def test_typed_escape_in_stop_string_is_a_warning(good: list[str], typed: str):
    (warning,) = prepare([*good, f"generator.eval_sampling_params.stop=['{typed}']"], has_accelerator=False).warnings
    assert "generator.eval_sampling_params.stop=" in warning and "$'generator.eval_sampling_params.stop=" in warning
    real = typed.replace(r"\n", "\n").replace(r"\t", "\t").replace(r"\r", "\r")
    assert prepare([*good, f'generator.eval_sampling_params.stop=["{real}"]'], has_accelerator=False).warnings == []
