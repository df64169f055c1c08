"""Keys and published command lines of the current SkyRL as arguments of this package.

skyrl_head_recipes.tsv has a row for each recipe (below SkyRL's examples/): its module, a part of check_config's error
or nothing, a part of the error of from_skyrl, which knows the programs of this package, and the reason.
skyrl_head_overrides.tsv lists the recipes of each override, without names and folders of runs and without Harbor's own
section. skyrl_head_keys.tsv lists the keys that 0.3 does not have, with their defaults.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from skyrl_train.config.key_help import format_help
from skyrl_train.config.keys import all_keys, find_key, get_value
from skyrl_train.config.prepare import prepare_config
from skyrl_train.config.skyrl_keys import SKYRL_KEYS, find_skyrl_key
from skyrl_train.entrypoints.from_skyrl import translate
from skyrl_train.errors import ConfigError

FOLDER = Path(__file__).parent
ENGINE, MEGATRON = "generator.inference_engine.", "trainer.policy.megatron_config."


class Recipe(NamedTuple):
    number: str
    name: str
    module: str
    check: str = ""
    from_skyrl: str = ""
    reason: str = ""


def rows(name: str) -> list[list[str]]:
    return [line.split("\t") for line in (FOLDER / name).read_text().splitlines()[1:]]


def overrides_by_recipe() -> dict[str, list[str]]:
    found = defaultdict(list)
    for override, numbers in rows("skyrl_head_overrides.tsv"):
        for first, _, last in (part.partition("-") for part in numbers.split(",")):
            for number in range(int(first), int(last or first) + 1):
                found[str(number)].append(override)
    return found


RECIPES = [Recipe(*row) for row in rows("skyrl_head_recipes.tsv")]
OVERRIDES = overrides_by_recipe()
KEYS = dict(rows("skyrl_head_keys.tsv"))


def prepare_error(arguments: list[str]) -> str:
    """Return the error of `check_config --elsewhere` on a machine with accelerators, or an empty text."""
    try:
        prepare_config(arguments, has_accelerator=True)
    except ConfigError as error:
        return str(error)
    return ""


def to_script(recipe: Recipe) -> str:
    """Return a script in SkyRL's style, in which `$HOME` is expanded by the shell."""
    program = (
        f"python {recipe.module.replace('.', '/')}.py"
        if recipe.module.endswith("entrypoint")
        else f"-m {recipe.module}"
    )
    quoted = ['"' + override.replace('"', '\\"') + '"' for override in OVERRIDES[recipe.number]]
    return "\n".join(["set -x", "", " \\\n  ".join([f"uv run --isolated --extra fsdp {program}", *quoted, "$@"])])


@pytest.mark.parametrize("recipe", RECIPES, ids=[recipe.name for recipe in RECIPES])
def test_recipe_is_accepted_or_refused_for_its_reason(recipe: Recipe):
    expected = prepare_error(OVERRIDES[recipe.number])
    assert recipe.check in expected if recipe.check else expected == ""
    done = translate(to_script(recipe), recipe.name)
    assert recipe.from_skyrl in "\n".join(done.problems) if recipe.from_skyrl else done.problems == []
    assert bool(recipe.check or recipe.from_skyrl) == bool(recipe.reason)


def test_most_recipes_are_accepted():
    assert len(RECIPES) == 71
    assert len([recipe for recipe in RECIPES if not recipe.check]) >= 60


def test_current_skyrl_defaults_are_accepted():
    done = prepare_config([f"{key}={value}" for key, value in KEYS.items()], has_accelerator=True)
    noted = "\n".join(done.notes)
    for key in KEYS:
        entry = find_skyrl_key(key)
        assert (entry is None) == (find_key(key) is not None), key
        assert (f"{key}=" in noted) == (entry is not None and entry.accepted_values is None), key


@pytest.mark.parametrize(
    ("written", "key", "meant"),
    [
        (f"{ENGINE}num_engines=3", "generator.num_inference_engines", 3),
        (f"{ENGINE}weight_sync_backend=delta", "generator.weight_sync_backend", "nccl"),
        (f"{ENGINE}language_model_only=true", "trainer.policy.language_model_only", True),
        (f'{ENGINE}engine_init_kwargs={{"a": {{"b": "c d"}}}}', "generator.engine_init_kwargs", {"a": {"b": "c d"}}),
        ("trainer.max_training_steps=3", "trainer.max_steps", 3),
        ("trainer.num_dummy_steps=3", "trainer.max_steps", 3),
        ("trainer.max_tokens_per_microbatch=-1", "trainer.max_tokens_per_microbatch", None),
        ("trainer.remove_microbatch_padding=false", "trainer.use_sample_packing", False),
        ("trainer.algorithm.policy_loss_type=dppo", "trainer.algorithm.policy_loss_type", "dppo_tv"),
        (f"{MEGATRON}moe_enable_routing_replay=false", "trainer.moe_routing_replay", None),
        (f"{ENGINE}speculative_config.method=ngram", "generator.speculative.method", "ngram"),
        (f"{ENGINE}speculative_config={{method: ngram}}", "generator.speculative.method", "ngram"),
        (f"{ENGINE}speculative_config=null", "generator.speculative.method", None),
        (f"{MEGATRON}async_dist_ckpt_save=true", "trainer.async_checkpoint", True),
        (f"{MEGATRON}lora_config.merge_lora=false", "trainer.policy.model.lora.sync", "adapter"),
        (f"{MEGATRON}lora_config.merge_lora=true", "trainer.policy.model.lora.sync", "merged"),
    ],
)
def test_todays_keys_have_their_meaning(written: str, key: str, meant: Any, tmp_path: Path):
    assert get_value(prepare_config([written], has_accelerator=True).config, key) == meant
    name, _, value = written.partition("=")
    *sections, last = name.split(".")
    text = "".join(f"{'  ' * depth}{part}:\n" for depth, part in enumerate(sections))
    (tmp_path / "mine.yaml").write_text(f"{text}{'  ' * len(sections)}{last}: {value}\n")
    preset = ["--config-dir", str(tmp_path), "--config-name", "mine"]
    assert get_value(prepare_config(preset, has_accelerator=True).config, key) == meant


def test_replayed_routing_is_that_of_rollouts():
    replay = [f"{MEGATRON}moe_enable_routing_replay=true", f"{ENGINE}enable_return_routed_experts=true"]
    config = prepare_config(replay, has_accelerator=True).config
    assert (config.trainer.moe_routing_replay, config.generator.backend) == ("rollout", "vllm")
    servers = [*replay, *SERVERS]
    assert "trainer.moe_routing_replay=rollout: must be null or old_policy" in prepare_error(servers)


SERVERS = [f"{ENGINE}run_engines_locally=false", f"{ENGINE}external_proxy_url=http://127.0.0.1:8000"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["trainer.algorithm.temperature=0.7"], "must be null or 1.0"),
        (["trainer.algorithm.temperature=0.7", "generator.sampling_params.temperature=0.7"], ""),
        (["trainer.critic.fsdp_config.mixed_precision=null"], ""),
        (["trainer.policy.fsdp_config.mixed_precision.param_dtype=fp32"], "must be bf16"),
        (["trainer.ref.model.fake_int4_qat.enabled=true"], "must be false"),
        (["generator.sampling_params.additional_kwargs={seed:3}"], "additional_kwargs.seed=3: must be null or {}"),
        (["generator.sampling_params.additional_kwargs={}"], ""),
        (["trainer.policy.megatron_config.moe_grouped_gem=true"], "unknown key"),
        (
            ["trainer.strategy=megatron", f"+{MEGATRON}transformer_config_kwargs.rope_parameters={{factor:4}}"],
            "Change the model with trainer.policy.model_config_kwargs.",
        ),
        (["trainer.strategy=megatron", f"+{MEGATRON}model_config_kwargs.num_hidden_layers=2"], "must be left out"),
        (["trainer.strategy=megatron", f"+{MEGATRON}optimizer_config_kwargs.adam_eps=1e-5"], "must be left out"),
        (["trainer.strategy=megatron", f"+{MEGATRON}transformer_config_kwargs.moe_grouped_gemm=true"], ""),
        (["trainer.strategy=megatron", f"+{MEGATRON}transformer_config_kwargs.freeze_moe_router=true"], "left out"),
        ([f"+{MEGATRON}transformer_config_kwargs.rope_parameters={{factor:4}}"], ""),
        (
            ["generator.step_wise_trajectories=true", "trainer.algorithm.loss_reduction=token_mean_legacy"],
            "token_mean with",
        ),
        (SERVERS, "Set generator.external_server_urls to the servers behind it"),
        ([*SERVERS, f"{ENGINE}external_server_urls=['http://127.0.0.1:8001']"], ""),
    ],
)
def test_unsupported_result_changes_are_rejected(arguments: list[str], expected: str):
    assert expected in prepare_error(arguments) if expected else prepare_error(arguments) == ""


def test_ineffective_skyrl_keys_are_grouped_by_advice():
    keys = ["trainer.mtp.enabled=true", f"{MEGATRON}mtp_loss_topk=256", f"{ENGINE}distributed_executor_backend=mp"]
    first, second = prepare_config([*keys, "device=cuda"], has_accelerator=True).notes
    assert first == f"{MEGATRON}mtp_loss_topk=256, {keys[0]}: no effect. {SKYRL_KEYS['trainer.mtp'].advice}"
    assert second.startswith(f"{keys[2]}: no effect. Ray places engines")


def test_help_describes_keys_without_counterpart():
    assert SKYRL_KEYS["trainer.mtp"].advice in format_help(["trainer.mtp.enabled"], 120)


def test_skyrl_key_table_has_no_stale_entries():
    sections = {"trainer.*.fsdp_config.mixed_precision", f"{ENGINE}engine_init_kwargs.kv_transfer_config"}
    used = [id(find_skyrl_key(key)) for key in KEYS]
    assert {name for name, entry in SKYRL_KEYS.items() if id(entry) not in used} == sections
    assert not SKYRL_KEYS.keys() & all_keys().keys()
    assert all(entry.advice.endswith(".") for entry in SKYRL_KEYS.values())
