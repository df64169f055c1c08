"""Mistakes that `check_config` finds before Ray starts: each within ten seconds, with its key and advice."""

from __future__ import annotations

import functools
import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from huggingface_hub import constants
from transformers import AddedToken, AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

from skyrl_train.algorithms.registry import advantage_estimators
from skyrl_train.cluster.addresses import free_address
from skyrl_train.config.predicates import RunComponents
from skyrl_train.config.prepare import prepare_config
from skyrl_train.config.schema import Config
from skyrl_train.data.dataset import _to_python_rows
from skyrl_train.entrypoints import check_config
from skyrl_train.entrypoints.main_generate import EvaluationExp
from skyrl_train.entrypoints.main_sft import SFTExp
from skyrl_train.entrypoints.serve import ServingExp
from skyrl_train.errors import ConfigError, DataError
from skyrl_train.experiment.base import Experiment, required_components
from skyrl_train.experiment.plugins import check_plugins
from skyrl_train.experiment.preflight import check_run, check_trainable, check_uris, checked_model
from skyrl_train.models.loading import POLICY_PATH_KEY, build_meta_model, check_causal_lm
from skyrl_train.models.logprob_model import check_model_supported
from skyrl_train.storage.hugging_face_hub import hub_model_problem
from skyrl_train.testing.tiny_models import byte_tokenizer, save_tiny_model, save_tiny_reward_model, tiny_config
from tests.integration.models.table import ARCHITECTURES, architecture, column
from tests.support.hub_server import hub_server

ROW = {
    "prompt": [{"role": "user", "content": "What is 1+1?"}],
    "env_class": "gsm8k",
    "reward_spec": {"method": "rule", "ground_truth": "2"},
}
PLUGIN = """
import skyrl_train as sk

@sk.register.advantage("needs_values")
def needs_values(token_rewards, mask, sequence_ids, *, values, gamma, lambd): ...

@sk.register.advantage("needs_reference")
def needs_reference(rewards, group_ids, valid, *, ref_logprobs): ...
"""


@pytest.fixture
def valid_overrides(tmp_path: Path, tiny_model_path: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Overrides of a run without mistakes, whose files are in tmp_path."""
    for variable in ("RAY_ADDRESS", "SKYRL_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    shutil.copytree(tiny_model_path, tmp_path / "model")
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
    for name in ("needs_values", "needs_reference"):
        advantage_estimators.unregister(name)


def check(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, float]:
    """Return the exit code of check_config, everything printed, and how many seconds it took."""
    begun, code = time.perf_counter(), 0
    try:
        check_config.main(argv)
    except SystemExit as stop:
        code = int(stop.code or 0)
    printed = capsys.readouterr()
    return code, printed.out + printed.err, time.perf_counter() - begun


def test_agent_is_checked_before_ray_starts(
    valid_overrides: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "rows.jsonl").write_text(json.dumps({**ROW, "env_class": "agent"}))
    key = "environment.skyrl_gym.agent"
    overrides = [
        *valid_overrides,
        "trainer.train_batch_size=1",
        "trainer.policy_mini_batch_size=1",
        f"{key}.command=[sh, '{{row.task}}']",
        f"{key}.sandbox={{kind: none, i_know_this_runs_model_code_on_this_machine: true}}",
    ]
    code, printed, _ = check(capsys, *overrides, f"{key}.reward=gsm8kk")
    assert code == 2
    assert "line 1: has no column 'task', which {row.task} in environment.skyrl_gym.agent.command needs" in printed
    assert f"{key}.reward=gsm8kk: Unknown environment 'gsm8kk'" in printed
    assert [line for line in printed.splitlines() if "in the configuration" in line] == [
        "2 problems in the configuration:"
    ]
    code, printed, _ = check(capsys, *overrides, "environment.hosts=1", "environment.host_cpus=0.1")
    assert code == 2
    assert "environment.hosts=1: must be 0 with rows of env_class agent" in printed


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
    return ["trainer.plugins=[plugin_with_roles]", "trainer.algorithm.advantage_estimator=needs_values"]


def ranks_of_a_plugin_s_critic(folder: Path, patch: pytest.MonkeyPatch) -> list[str]:
    critic = f"trainer.critic.model.path={folder}/model"
    own = ["trainer.placement.colocate_all=false", "trainer.placement.critic_num_nodes=0"]
    return [*critic_of_a_plugin(folder, patch), critic, *own]


def ranks_of_a_plugin_s_reference(folder: Path, patch: pytest.MonkeyPatch) -> list[str]:
    names = ["trainer.plugins=[plugin_with_roles]", "trainer.algorithm.advantage_estimator=needs_reference"]
    own = ["trainer.placement.colocate_policy_ref=false", "trainer.placement.ref_num_nodes=0"]
    return [*names, "trainer.algorithm.use_kl_loss=false", "trainer.placement.colocate_all=false", *own]


def corrupt_weights(folder: Path, patch: pytest.MonkeyPatch) -> list[str]:
    (folder / "model" / "model.safetensors").write_bytes(b"no tensors at all")
    return []


def corrupt_tokenizer(folder: Path, patch: pytest.MonkeyPatch) -> list[str]:
    (folder / "model" / "tokenizer.json").write_text('{"version": "1.0", "model": {"type": "None"}}')
    return []


def corrupt_model_config(folder: Path, patch: pytest.MonkeyPatch) -> list[str]:
    file = folder / "model" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"hidden_size": "wide"}))
    return []


def unknown_lora_target(folder: Path, patch: pytest.MonkeyPatch) -> list[str]:
    lora = "trainer.policy.model.lora"
    return [f"{lora}.rank=4", f"{lora}.target_modules=[query]"]


def indivisible_heads(folder: Path, patch: pytest.MonkeyPatch) -> list[str]:
    return ["trainer.policy.tensor_parallel_size=3", "trainer.placement.policy_num_gpus_per_node=3"]


def indivisible_query_heads(folder: Path, patch: pytest.MonkeyPatch) -> list[str]:
    return ["trainer.policy.sequence_parallel_size=3", "trainer.placement.policy_num_gpus_per_node=3"]


def experts_of_a_dense_model(folder: Path, patch: pytest.MonkeyPatch) -> list[str]:
    return ["trainer.policy.expert_parallel_size=2", "trainer.placement.policy_num_gpus_per_node=2"]


def router_loss_of_a_dense_model(folder: Path, patch: pytest.MonkeyPatch) -> list[str]:
    return ["trainer.algorithm.router_aux_loss_coef=0.01"]


def reference_of_another_family(folder: Path, patch: pytest.MonkeyPatch) -> list[str]:
    save_tiny_model(folder / "reference")
    file = folder / "reference" / "tokenizer.json"
    content = json.loads(file.read_text())
    ids = content["model"]["vocab"]
    ids["a"], ids["b"] = ids["b"], ids["a"]
    file.write_text(json.dumps(content))
    return [f"trainer.ref.model.path={folder}/reference"]


def engine_model_that_is_missing(folder: Path, patch: pytest.MonkeyPatch) -> list[str]:
    return [f"generator.model_name={folder}/other"]


def engine_model_without_head(folder: Path, patch: pytest.MonkeyPatch) -> list[str]:
    return [f"generator.model_name={encoder_decoder(folder / 'served', patch) or folder / 'served' / 'model'}"]


def no_data(folder: Path, patch: pytest.MonkeyPatch) -> list[str]:
    return ["data.train_data=[]"]


MISTAKES: dict[Callable[[Path, pytest.MonkeyPatch], list[str]], list[str]] = {
    opt: [f"{POLICY_PATH_KEY}=", "OPTForCausalLM does not compute its logits from", "another architecture"],
    encoder_decoder: [f"{POLICY_PATH_KEY}=", "cannot be loaded", "causal language model", "T5Config"],
    reward_model_as_policy: [f"{POLICY_PATH_KEY}=", "the checkpoint lacks", "lm_head.weight"],
    policy_as_reward_model: ["trainer.reward.model.path=", "num_labels=2", "num_labels=1"],
    unservable_rope: [f"{POLICY_PATH_KEY}=", "generator.backend=transformers cannot serve", "Use another engine"],
    no_tokenizer: [f"{POLICY_PATH_KEY}=", "has no tokenizer. Save the tokenizer of the model"],
    small_embedding: [
        f"{POLICY_PATH_KEY}=",
        "beyond the model's embedding of 200 rows",
        "id 258",
        "resize_token_embeddings",
    ],
    no_chat_template: ["generator.chat_template.name_or_path=null", "The tokenizer of", "source=file"],
    unreachable_hub: [f"{POLICY_PATH_KEY}=nobody/nothing", "The hub does not respond within 3 s", "set HF_ENDPOINT"],
    folder_below_a_file: ["trainer.ckpt_path=", "rows.jsonl cannot be written: Not a directory"],
    unwritable_mirror: ["trainer.export_path=file:///proc/exports", "/proc cannot be written"],
    short_limit: ["none of 8 prompts has at most 3 tokens (the shortest has about", "raise trainer.max_prompt_length"],
    no_server_token: ["generator.run_engines_locally=false", "SKYRL_API_KEY"],
    no_judge_key: ["environment.skyrl_gym.llm_as_a_judge.base_url=null", "OPENAI_API_KEY"],
    no_home: ["trainer.export_path=", "The environment variable HOME is not set: export it"],
    critic_of_a_plugin: ["trainer.critic.model.path=null", "advantage_estimator=needs_values needs a critic"],
    ranks_of_a_plugin_s_critic: ["trainer.placement.critic_num_nodes=0", "at least 1"],
    ranks_of_a_plugin_s_reference: ["trainer.placement.ref_num_nodes=0", "at least 1"],
    corrupt_weights: [f"{POLICY_PATH_KEY}=", "cannot be loaded", "SafetensorError"],
    corrupt_tokenizer: [f"{POLICY_PATH_KEY}=", "cannot be loaded", "a tokenizer"],
    corrupt_model_config: [f"{POLICY_PATH_KEY}=", "cannot be loaded", "hidden_size"],
    unknown_lora_target: ["trainer.policy.model.lora.target_modules='query'", "q_proj"],
    indivisible_heads: ["trainer.policy.tensor_parallel_size=3 does not divide", "num_attention_heads"],
    indivisible_query_heads: ["trainer.policy.sequence_parallel_size=3 does not divide", "attention heads"],
    experts_of_a_dense_model: ["Qwen2ForCausalLM: set trainer.policy.expert_parallel_size to 1"],
    router_loss_of_a_dense_model: ["trainer.algorithm.router_aux_loss_coef=", "Qwen2ForCausalLM has no routers"],
    reference_of_another_family: ["trainer.ref.model.path=", "2 tokens of the policy ", "the policy's tokenizer"],
    engine_model_that_is_missing: ["generator.model_name=", "a model's folder or its name on the hub"],
    engine_model_without_head: ["generator.model_name=", "cannot be loaded", "T5Config"],
    no_data: ["data.train_data=[]", "at least one file or dataset"],
}


def test_run_without_mistakes_is_accepted(
    valid_overrides: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    code, text, _ = check(capsys, *valid_overrides)
    assert (code, text.startswith("config ok\n")) == (0, True), text
    assert [line for line in text.splitlines()[1:] if not line.startswith("note: ")] == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "rows.jsonl"]


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
def test_mistake_is_found_within_ten_seconds(
    mistake: Callable[[Path, pytest.MonkeyPatch], list[str]],
    valid_overrides: list[str],
    plugin: None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    code, text, seconds = check(capsys, *valid_overrides, *mistake(tmp_path, monkeypatch))
    assert code == 2
    assert [part for part in MISTAKES[mistake] if part not in text] == [], text
    assert "config ok" not in text
    assert seconds < 10


@pytest.mark.parametrize("flag", check_config.ENTRYPOINTS)
def test_entrypoint_is_checked_for_its_own_needs(
    flag: str,
    valid_overrides: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    messages = [*ROW["prompt"], {"role": "assistant", "content": "2"}]  # type: ignore[misc]
    (tmp_path / "talks.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
    data = {
        "--sft": [f"data.train_data=['{tmp_path}/talks.jsonl']"],
        "--generate": ["data.train_data=[]", f"data.val_data=['{tmp_path}/rows.jsonl']", "trainer.ckpt_path=/proc/x"],
        "--serve": ["data.train_data=[]", f"generator.http_endpoint_port={free_address()[1]}"],
    }
    code, text, _ = check(capsys, flag, *valid_overrides, *data[flag])
    assert (code, text.startswith("config ok\n"), "no effect" in text) == (0, True, False), text
    assert check(capsys, *valid_overrides, *data[flag])[0] == 2
    if flag == "--serve":
        no_tokenizer(tmp_path, monkeypatch)
        assert "has no tokenizer" in check(capsys, flag, *valid_overrides, *data[flag])[1]


@pytest.mark.parametrize("flags", [["--sft", "--serve"], ["--sft", "--plan"]])
def test_flags_that_exclude_each_other_are_refused(
    flags: list[str], valid_overrides: list[str], capsys: pytest.CaptureFixture[str]
):
    code, text, _ = check(capsys, *flags, *valid_overrides)
    assert (code, "at most one of these flags" in text) == (2, True)


def test_evaluation_without_data_is_refused(valid_overrides: list[str], capsys: pytest.CaptureFixture[str]):
    code, text, _ = check(capsys, "--generate", *valid_overrides)
    assert (code, "data.val_data=[]: must be at least one file" in text) == (2, True)


def test_elsewhere_skips_checks_of_this_machine(valid_overrides: list[str], capsys: pytest.CaptureFixture[str]):
    wrong = ["trainer.policy.model.path=nobody/nothing", "data.train_data=[/none.jsonl]", "trainer.ckpt_path=/proc/x"]
    assert check(capsys, "--elsewhere", *valid_overrides, *wrong)[0] == 0


def test_training_checks_model_before_ray_starts(
    valid_overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    opt(tmp_path, monkeypatch)
    with pytest.raises(ConfigError, match="OPTForCausalLM does not compute its logits from"):
        Experiment(prepare_config(valid_overrides, has_accelerator=False).config)


def test_several_mistakes_are_reported_at_once(
    valid_overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    opt(tmp_path, monkeypatch)
    with pytest.raises(ConfigError, match=r"(?s)2 problems.*OPTForCausalLM.*raise trainer\.max_prompt_length"):
        check_run(
            prepare_config([*valid_overrides, *short_limit(tmp_path, monkeypatch)], has_accelerator=False).config,
            RunComponents(),
        )


def test_single_mistake_keeps_its_kind(valid_overrides: list[str]):
    with pytest.raises(DataError, match=r"raise trainer\.max_prompt_length"):
        check_run(
            prepare_config([*valid_overrides, "trainer.max_prompt_length=3"], has_accelerator=False).config,
            RunComponents(),
        )


def test_long_demonstrations_are_found(valid_overrides: list[str], tmp_path: Path):
    messages = [*ROW["prompt"], {"role": "assistant", "content": "2"}]  # type: ignore[misc]
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
    limits = ["trainer.max_prompt_length=3", "generator.sampling_params.max_generate_length=3"]
    check_run(prepare_config(valid_overrides, has_accelerator=False).config, required_components(SFTExp))
    with pytest.raises(DataError, match="no demonstration of at most 6 tokens"):
        check_run(
            prepare_config([*valid_overrides, *limits], has_accelerator=False).config, required_components(SFTExp)
        )


def test_only_first_prompt_that_fits_is_read(valid_overrides: list[str], tmp_path: Path):
    long = ROW | {"prompt": [{"role": "user", "content": "x" * 5000}]}
    rows = [json.dumps(long), json.dumps(ROW), "no JSON"]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    check_run(prepare_config(valid_overrides, has_accelerator=False).config, RunComponents())


def test_sample_of_parquet_converts_few_rows(
    valid_overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    pq.write_table(pa.Table.from_pylist([ROW] * 20_000), tmp_path / "rows.parquet")
    converted: list[int] = []

    def counted(batch: pa.RecordBatch, path: Path, before: int) -> list[dict[str, object]]:
        converted.append(batch.num_rows)
        return _to_python_rows(batch, path, before)

    monkeypatch.setattr("skyrl_train.data.dataset._to_python_rows", counted)
    check_run(
        prepare_config(
            [*valid_overrides, f"data.train_data=['{tmp_path}/rows.parquet']"], has_accelerator=False
        ).config,
        RunComponents(),
    )
    assert sum(converted) < 5_000


def test_evaluation_needs_no_training_data(valid_overrides: list[str], tmp_path: Path):
    argv = [
        *valid_overrides,
        "data.train_data=[]",
        f"data.val_data=['{tmp_path}/rows.jsonl']",
        "trainer.ckpt_path=/proc/ckpts",
    ]
    prepared = prepare_config(argv, has_accelerator=False, components=required_components(EvaluationExp))
    check_run(prepared.config, required_components(EvaluationExp))


def test_serving_needs_no_chat_template(valid_overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    no_chat_template(tmp_path, monkeypatch)
    check_run(prepare_config(valid_overrides, has_accelerator=False).config, required_components(ServingExp))


def test_tokenizer_of_a_program_is_not_checked(
    valid_overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    class OwnTokenizer(Experiment):
        def get_tokenizer(self) -> None: ...

    assert not required_components(OwnTokenizer).tokenizer
    no_tokenizer(tmp_path, monkeypatch)
    config = prepare_config(valid_overrides, has_accelerator=False).config
    check_run(config, required_components(OwnTokenizer))
    with pytest.raises(ConfigError, match="has no tokenizer"):
        check_run(config, RunComponents())


def test_padding_token_beyond_embedding_is_accepted(valid_overrides: list[str], tmp_path: Path):
    save_tiny_model(tmp_path / "model", vocab_size=259)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    tokenizer.add_special_tokens({"pad_token": "<pad>"})
    tokenizer.save_pretrained(tmp_path / "model")
    assert len(tokenizer) == 260
    check_run(prepare_config(valid_overrides, has_accelerator=False).config, RunComponents())


def test_reserved_token_beyond_embedding_is_accepted(valid_overrides: list[str], tmp_path: Path):
    save_tiny_model(tmp_path / "model", vocab_size=259)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    tokenizer.add_tokens([AddedToken("<|reserved|>", special=True)], special_tokens=True)
    tokenizer.save_pretrained(tmp_path / "model")
    assert len(tokenizer) == 260 and "<|reserved|>" not in tokenizer.all_special_tokens
    check_run(prepare_config(valid_overrides, has_accelerator=False).config, RunComponents())


def test_tokenizer_in_older_files_is_accepted(valid_overrides: list[str], tmp_path: Path):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "model" / name).unlink()
    letters = {chr(code): code for code in range(33, 127)} | {"Ġ": 127, "Ċ": 128}
    (tmp_path / "model" / "vocab.json").write_text(json.dumps(letters))
    (tmp_path / "model" / "merges.txt").write_text("#version: 0.2\n")
    check_run(prepare_config(valid_overrides, has_accelerator=False).config, RunComponents())


def test_quantized_model_on_the_hub_is_not_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    save_tiny_model(tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    quantization = {"quant_method": "compressed-tensors", "config_groups": {}}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": quantization}))
    monkeypatch.setattr("skyrl_train.models.loading.is_local_folder", lambda path: False)
    with pytest.raises(ConfigError, match="quantized weights are not supported"):
        check_causal_lm(str(tmp_path / "model"))


def test_large_json_list_is_left_to_the_run(
    valid_overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "rows.json").write_text("[no JSON")
    argv = [*valid_overrides, f"data.train_data=['{tmp_path}/rows.json']"]
    with pytest.raises(DataError, match="not JSON"):
        check_run(prepare_config(argv, has_accelerator=False).config, RunComponents())
    monkeypatch.setattr("skyrl_train.experiment.preflight.MAX_SAMPLE_FILE_BYTES", 4)
    check_run(prepare_config(argv, has_accelerator=False).config, RunComponents())


def test_quantized_model_is_served_but_not_trained(valid_overrides: list[str], tmp_path: Path):
    file = tmp_path / "model" / "config.json"
    quantization = {"quant_method": "compressed-tensors", "config_groups": {}}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": quantization}))
    config = prepare_config([*valid_overrides, "generator.backend=vllm"], has_accelerator=False).config
    check_run(config, required_components(EvaluationExp))
    with pytest.raises(ConfigError, match="quantized weights are not supported"):
        check_run(config, RunComponents())


def test_critic_may_have_unsupported_logits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    opt(tmp_path, monkeypatch)
    model = check_causal_lm(f"{tmp_path}/model")
    check_model_supported(model, values=True)
    with pytest.raises(ConfigError, match="OPTForCausalLM does not compute its logits from"):
        check_model_supported(model)


@functools.cache
def config_with(kind: str) -> Config:
    sizes = {"TP": "tensor_parallel_size", "SP": "sequence_parallel_size", "EP": "expert_parallel_size"}
    key = f"trainer.policy.{sizes[kind]}=2" if kind in sizes else "trainer.policy.model.lora.rank=2"
    keys = ["generator.backend=transformers", "trainer.placement.policy_num_gpus_per_node=2"]
    return prepare_config([*keys, key], has_accelerator=False).config


@pytest.mark.parametrize("kind", ["TP", "SP", "EP", "LoRA"])
@pytest.mark.parametrize("name", [one.name for one in ARCHITECTURES])
def test_check_agrees_with_models_page(name: str, kind: str):
    """Expect the learner's result: tests/integration/models checks it with two real ranks."""
    config = config_with(kind)
    model_config = tiny_config(architecture(name).kind)
    model_config.update(dict(architecture(name).config))
    model = build_meta_model(model_config, torch.float32)
    refused = column(kind).refused.get(name)
    with pytest.raises(ConfigError, match=refused.message) if refused else nullcontext():
        check_trainable(config, POLICY_PATH_KEY, model)


@pytest.mark.parametrize("kind", ["TP", "SP"])
def test_recurrent_layers_refuse_parallel_groups(kind: str):
    model = build_meta_model(tiny_config("qwen3_5_text"), torch.float32)
    size = "tensor_parallel_size" if kind == "TP" else "sequence_parallel_size"
    message = rf"recurrent state \(gated delta net\).* Set trainer\.policy\.{size} to 1"
    with pytest.raises(ConfigError, match=message):
        check_trainable(config_with(kind), POLICY_PATH_KEY, model)


def test_models_unfit_for_meta_device_are_accepted():
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_key_value_heads": 1, "kv_channels": 8}
    config = AutoConfig.for_model("jetmoe", **small, intermediate_size=16, vocab_size=320, pad_token_id=0)
    model = build_meta_model(config, torch.float32)
    with pytest.raises(RuntimeError, match="meta"):
        model(input_ids=torch.zeros(1, 3, dtype=torch.int64, device="meta"))
    check_model_supported(model)


def test_sglang_refuses_what_its_cpu_attention_lacks(valid_overrides: list[str], tmp_path: Path):
    save_tiny_model(tmp_path / "model", "gpt_oss")
    config = prepare_config([*valid_overrides, "generator.backend=sglang"], has_accelerator=False).config
    with pytest.raises(ConfigError, match=r"SGLang cannot serve models of type 'gpt_oss': .* has no attention sinks"):
        checked_model(config, RunComponents(), POLICY_PATH_KEY, f"{tmp_path}/model")


def test_sglang_check_reads_no_weights(valid_overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def read(path: str) -> bool:
        raise AssertionError("on the hub this would download the weights")

    monkeypatch.setattr("skyrl_train.engines.sglang.arguments.has_untied_head", read)
    options = "generator.engine_init_kwargs={dtype: float32, max_num_seqs: 4}"  # of the engine, not of ServerArgs
    config = prepare_config([*valid_overrides, "generator.backend=sglang", options], has_accelerator=False).config
    checked_model(config, RunComponents(), POLICY_PATH_KEY, f"{tmp_path}/model")


def test_model_in_cache_passes_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    assert "HF_HUB_OFFLINE is set" in str(hub_model_problem(POLICY_PATH_KEY, "nobody/tiny"))
    folder = tmp_path / "models--nobody--tiny"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("0" * 40)
    save_tiny_model(folder / "snapshots" / ("0" * 40))
    assert hub_model_problem(POLICY_PATH_KEY, "nobody/tiny") is None


def test_cached_model_needs_offline_mode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    unreachable_hub(tmp_path, monkeypatch)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    folder = tmp_path / "models--nobody--tiny"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("0" * 40)
    save_tiny_model(folder / "snapshots" / ("0" * 40))
    assert "Set HF_HUB_OFFLINE=1: the model is in this" in str(hub_model_problem(POLICY_PATH_KEY, "nobody/tiny"))


def test_name_that_hub_does_not_have_is_refused(monkeypatch: pytest.MonkeyPatch):
    with hub_server(monkeypatch):
        problem = str(hub_model_problem(POLICY_PATH_KEY, "nobody/nothing"))
    assert "The hub has no such model, or it is private" in problem and "HF_TOKEN" in problem


def test_unwritable_copy_of_an_address_is_refused(valid_overrides: list[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SKYRL_CACHE", "/proc/cache")
    config = prepare_config([*valid_overrides, "trainer.ckpt_path=s3://bucket/run"], has_accelerator=False).config
    with pytest.raises(ConfigError, match=r"trainer\.ckpt_path=s3://bucket/run.* /proc cannot .* Set SKYRL_CACHE"):
        check_uris(config, RunComponents())


def test_registered_estimator_requires_critic(valid_overrides: list[str], plugin: None):
    estimator = "trainer.algorithm.advantage_estimator=needs_values"
    prepared = prepare_config([*valid_overrides, estimator], has_accelerator=False, has_user_code=True)
    __import__("plugin_with_roles")
    with pytest.raises(ConfigError, match=r"trainer\.critic\.model\.path=null"):
        prepare_config([*valid_overrides, estimator], has_accelerator=False, has_user_code=True)
    with pytest.raises(ConfigError, match=r"trainer\.critic\.model\.path=null"):
        check_plugins(prepared.config)


def test_more_ranks_than_cpus_are_a_warning(valid_overrides: list[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    apart = ["trainer.placement.colocate_all=false", "generator.num_inference_engines=3"]
    (warning,) = prepare_config([*valid_overrides, *apart], has_accelerator=False, components=RunComponents()).warnings
    assert "4 ranks and engines run at the same time, but this machine has 2 CPUs" in warning
    assert "colocate_all=true" in warning
    together = ["trainer.placement.policy_num_gpus_per_node=4", "generator.num_inference_engines=4"]
    (warning,) = prepare_config(
        [*valid_overrides, *together], has_accelerator=False, components=RunComponents()
    ).warnings
    assert "4 ranks and engines run" in warning and "colocate_all" not in warning
    assert prepare_config(valid_overrides, has_accelerator=False, components=RunComponents()).warnings == []
    assert prepare_config([*valid_overrides, *apart], has_accelerator=False).warnings == []


@pytest.mark.parametrize("typed", [r"\n", r"\nObservation:", r"end\t", r"\r\n"])
def test_typed_escape_in_stop_string_is_a_warning(valid_overrides: list[str], typed: str):
    (warning,) = prepare_config(
        [*valid_overrides, f"generator.eval_sampling_params.stop=['{typed}']"], has_accelerator=False
    ).warnings
    assert "generator.eval_sampling_params.stop=" in warning and "$'generator.eval_sampling_params.stop=" in warning
    real = typed.replace(r"\n", "\n").replace(r"\t", "\t").replace(r"\r", "\r")
    assert (
        prepare_config(
            [*valid_overrides, f'generator.eval_sampling_params.stop=["{real}"]'], has_accelerator=False
        ).warnings
        == []
    )
