"""Settings chosen for a GPU's memory, and advice when memory has run out. Only arithmetic: no GPU is needed."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import Qwen2Config

from skyrl_train.algorithms.registry import policy_losses
from skyrl_train.config.keys import get_value, replace_value
from skyrl_train.config.prepare import prepare_config
from skyrl_train.config.schema import Config
from skyrl_train.errors import EnginesLost
from skyrl_train.experiment import memory_tuning
from skyrl_train.experiment.algorithm import build_policy_objective_spec, build_sft_objective_spec
from skyrl_train.experiment.engines import engine_generator_config
from skyrl_train.experiment.memory_plan import LEARNER_PHASES, CacheLimit, engine_cache_limit, memory_plan
from skyrl_train.experiment.memory_tuning import (
    CHECKPOINTING_MODES,
    MAX_MEMORY_FRACTION,
    MAX_MICRO_BATCH_TOKENS,
    as_out_of_memory,
    memory_saving_advice,
    tune_and_report,
    tune_to_memory,
)

GIB = 1 << 30
OFFLOAD = "trainer.placement.colocate_offload"
BUDGET = "trainer.max_tokens_per_microbatch"
CHECKPOINTING = "trainer.gradient_checkpointing"
LONGEST = 512 + 1024
"""Default number of tokens of prompt and response."""
RESHARD = "trainer.{}.fsdp_config.reshard_after_forward"
ONCE = "trainer.{}.fsdp_config.reduce_once"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with the shapes of Qwen2.5-1.5B; no test reads weights."""
    folder = tmp_path_factory.mktemp("model")
    Qwen2Config(
        hidden_size=1536,
        intermediate_size=8960,
        num_hidden_layers=28,
        num_attention_heads=12,
        num_key_value_heads=2,
        vocab_size=151936,
        tie_word_embeddings=True,
        architectures=["Qwen2ForCausalLM"],
    ).save_pretrained(folder)
    return str(folder)


def config(path: str, *overrides: str, ranks: int = 1) -> Config:
    keys = [
        f"trainer.policy.model.path={path}",
        "trainer.strategy=fsdp2",
        f"trainer.placement.policy_num_gpus_per_node={ranks}",
        f"generator.num_inference_engines={ranks}",
    ]
    cfg = prepared(*keys, *overrides)
    trainer = replace(cfg.trainer, bf16=True, strategy="fsdp2")
    return replace(cfg, device="cuda", trainer=trainer, generator=replace(cfg.generator, model_dtype="bfloat16"))


@functools.cache
def prepared(*overrides: str) -> Config:
    return prepare_config(overrides, has_accelerator=False, has_user_code=True).config


def tuned(cfg: Config, capacity: int) -> tuple[Config, list[str]]:
    return tune_to_memory(cfg, capacity, build_policy_objective_spec(cfg))


def peak(cfg: Config, capacity: int) -> int:
    plans = memory_plan(cfg, capacity)
    return max(plan.total(phase) for plan in plans for phase in LEARNER_PHASES if "policy" in plan.name)


def test_ample_memory_selects_fastest_settings(path: str):
    cfg, notes = tuned(config(path), 160 * GIB)
    expected = {
        BUDGET: MAX_MICRO_BATCH_TOKENS,
        CHECKPOINTING: False,
        RESHARD.format("policy"): False,
        RESHARD.format("ref"): False,
        ONCE.format("policy"): True,
    }
    assert {key: get_value(cfg, key) for key in expected} == expected
    reason = "the fastest that fits into 85% of 160 GiB by the plan."
    assert [note.split(": ")[0] for note in notes] == [
        f"{BUDGET}=null -> 16384",
        f"{CHECKPOINTING}=null -> false",
        f"{RESHARD.format('policy')}=null -> false",
        f"{RESHARD.format('ref')}=null -> false",
        f"{ONCE.format('policy')}=null -> true",
        f"{OFFLOAD}=null -> none",
    ]
    assert all(note.endswith(reason) for note in notes[:-1])
    assert tune_to_memory(cfg, 160 * GIB, build_policy_objective_spec(cfg)) == (cfg, []), "chosen settings are kept"


def test_layers_are_kept_only_by_unsharded_ranks(path: str):
    cfg, _ = tuned(config(path, ranks=4), 80 * GIB)
    assert get_value(cfg, RESHARD.format("policy")) is None
    assert get_value(cfg, ONCE.format("policy")) is True
    unsharded, _ = tuned(config(path, "trainer.policy.fsdp_config.fsdp_size=1", ranks=4), 80 * GIB)
    assert get_value(unsharded, RESHARD.format("policy")) is False
    assert get_value(unsharded, RESHARD.format("ref")) is None


def test_less_memory_selects_fitting_settings(path: str):
    chosen, sizes = [], range(30, 10, -1)
    for gib in sizes:
        cfg, notes = tuned(config(path, f"{CHECKPOINTING}=true", ranks=4), gib * GIB)
        settings = (get_value(cfg, BUDGET), get_value(cfg, ONCE.format("policy")))
        if not any("no plan fits" in note for note in notes):
            assert peak(cfg, gib * GIB) <= MAX_MEMORY_FRACTION * gib * GIB
            chosen.append(settings)
        else:
            assert settings == (LONGEST, False), "the smallest candidate: one longest sequence, nothing kept"
    budgets = [tokens for tokens, _ in chosen]
    assert budgets == sorted(budgets, reverse=True)
    assert budgets[0] == MAX_MICRO_BATCH_TOKENS and len(set(budgets)) > 2, chosen
    assert (MAX_MICRO_BATCH_TOKENS, False) in chosen, "reducing more often costs less than small micro-batches"
    assert len(chosen) < len(sizes), "the smallest sizes fit no candidate"


def test_less_memory_recomputes_more(path: str):
    chosen = []
    for gib in range(100, 8, -4):
        cfg, notes = tuned(config(path, f"{OFFLOAD}=all", ranks=4), gib * GIB)
        assert peak(cfg, gib * GIB) <= MAX_MEMORY_FRACTION * gib * GIB or "no plan fits" in notes[0]
        chosen.append((get_value(cfg, CHECKPOINTING), get_value(cfg, BUDGET)))
    modes = [mode for mode, _ in chosen]
    assert modes == sorted(modes, key=CHECKPOINTING_MODES.index) and set(modes) == set(CHECKPOINTING_MODES)
    assert {tokens for mode, tokens in chosen if mode is not True} == {16384, 8192, 4096}
    assert min(tokens for mode, tokens in chosen if mode is True) < 4096


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_reentrant_checkpointing_is_never_selective(path: str, device: str):
    reentrant = config(path, "trainer.gradient_checkpointing_use_reentrant=true", f"{OFFLOAD}=all", ranks=4)
    cfg, modes = replace(reentrant, device=device), set()
    for gib in range(8, 600, 24):
        changed, _ = tune_to_memory(cfg, gib * GIB, build_policy_objective_spec(cfg))
        modes.add(get_value(changed, CHECKPOINTING))
    assert modes == {False, True}
    kept = replace_value(cfg, CHECKPOINTING, False)
    assert dict(memory_tuning.smaller_settings(kept))[CHECKPOINTING] is True


def test_cpus_recompute_if_activations_do_not_fit(path: str):
    cfg = replace(config(path), device="cpu")
    modes = []
    for gib in (500, 100, 10):
        changed, notes = tune_to_memory(cfg, gib * GIB, build_policy_objective_spec(cfg))
        modes.append(get_value(changed, CHECKPOINTING))
        assert notes == [] and replace_value(changed, CHECKPOINTING, None) == cfg
    assert (modes[0], modes[-1]) == (False, True)
    unknown, _ = tune_to_memory(cfg, None, build_policy_objective_spec(cfg))
    assert get_value(unknown, CHECKPOINTING) is True


def test_smallest_budget_is_longest_sequence(path: str):
    long = config(path, f"{CHECKPOINTING}=true", f"generator.sampling_params.max_generate_length={9000 - 512}")
    budgets = {get_value(tuned(long, gib * GIB)[0], BUDGET) for gib in range(36, 46)}
    assert budgets == {9000, MAX_MICRO_BATCH_TOKENS}


def test_budget_is_independent_of_longer_sequences(path: str):
    cfg, _ = tuned(config(path, "generator.sampling_params.max_generate_length=30000"), 80 * GIB)
    assert get_value(cfg, BUDGET) == MAX_MICRO_BATCH_TOKENS


def test_budget_scales_with_sequence_parallel_size(path: str):
    cfg = config(path, "trainer.policy.sequence_parallel_size=4", f"{OFFLOAD}=all", ranks=4)
    assert get_value(tuned(cfg, 80 * GIB)[0], BUDGET) == 4 * MAX_MICRO_BATCH_TOKENS


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        (f"{BUDGET}=3000", BUDGET, 3000),
        ("trainer.micro_train_batch_size_per_gpu=2", BUDGET, None),
        ("trainer.micro_forward_batch_size_per_gpu=1", BUDGET, None),
        (f"{ONCE.format('policy')}=false", ONCE.format("policy"), False),
        (f"{RESHARD.format('policy')}=true", RESHARD.format("policy"), True),
    ],
)
def test_configured_values_are_kept(path: str, override: str, key: str, value: Any):
    cfg, notes = tuned(config(path, override), 80 * GIB)
    assert get_value(cfg, key) == value
    assert not any(note.startswith(key) for note in notes)
    assert notes, "open settings are still chosen"


@pytest.fixture
def loss_like_skyrls() -> Iterator[str]:
    @policy_losses.register("mean_of_a_micro_batch")
    def mean(log_probs, old_log_probs, advantages, config, loss_mask=None, rollout_logprobs=None):  # type: ignore[no-untyped-def]
        return (log_probs * advantages).mean(), 0.0

    yield "mean_of_a_micro_batch"
    policy_losses.unregister("mean_of_a_micro_batch")


def test_losses_that_depend_on_micro_batches_keep_theirs(path: str, loss_like_skyrls: str):
    cfg, _ = tuned(config(path, f"trainer.algorithm.policy_loss_type={loss_like_skyrls}"), 80 * GIB)
    assert get_value(cfg, BUDGET) is None
    assert get_value(cfg, ONCE.format("policy")) is True


def test_nothing_is_tuned_without_accelerator_memory(path: str):
    cfg = config(path)
    same, notes = tune_to_memory(cfg, None, build_policy_objective_spec(cfg))
    assert same is cfg
    assert [note.split(",")[0] for note in notes] == [f"{BUDGET}=null: not tuned", f"{OFFLOAD}=null means all"]


def test_fine_tuning_is_tuned(path: str):
    cfg = config(path)
    cfg, _ = tune_to_memory(cfg, 160 * GIB, build_sft_objective_spec(cfg))
    assert get_value(cfg, BUDGET) == MAX_MICRO_BATCH_TOKENS
    assert get_value(cfg, ONCE.format("policy")) is True


def test_tuning_is_reported_and_optional(
    path: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    cfg = config(path)
    monkeypatch.setattr(memory_tuning, "memory_capacity", lambda device: 160 * GIB)
    assert get_value(tune_and_report(cfg, build_policy_objective_spec(cfg)), BUDGET) == MAX_MICRO_BATCH_TOKENS
    assert f"note: {BUDGET}=null -> 16384: the fastest" in capsys.readouterr().err

    def unreadable(*arguments: Any) -> Any:
        raise OSError("no such model")

    monkeypatch.setattr(memory_tuning, "model_ranks", unreadable)
    assert tune_and_report(cfg, build_policy_objective_spec(cfg)) is cfg
    note = f"note: {BUDGET}=null: not tuned, because there is no memory plan (OSError: no such model)"
    assert note in capsys.readouterr().err


def small(path: str, *overrides: str) -> Config:
    keys = [f"trainer.policy.model.path={path}", "trainer.strategy=fsdp2", *overrides]
    return prepared(*keys)


@pytest.mark.fault("F34")
def test_out_of_memory_suggests_three_settings(tiny_model_path: str):
    cfg = small(tiny_model_path, "trainer.micro_train_batch_size_per_gpu=8", "trainer.gradient_checkpointing=false")
    with pytest.raises(RuntimeError) as failed:
        torch.empty(1 << 60)
    failed.value.raised_in = "policy rank 1.update"  # type: ignore[attr-defined]
    error = as_out_of_memory(failed.value, cfg)
    assert error is not None
    assert str(error).startswith("policy rank 1.update: ")
    named = re.findall(r"([\w.]+=\w+) saves about ([\d.e-]+) GiB", str(error))
    assert len(named) == 3
    assert "trainer.micro_train_batch_size_per_gpu=4" in dict(named)
    sizes = [float(size) for _, size in named]
    assert sizes == sorted(sizes, reverse=True) and sizes[-1] > 0


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["trainer.max_tokens_per_microbatch=4096"], "trainer.max_tokens_per_microbatch=2048"),
        (["trainer.micro_train_batch_size_per_gpu=16"], "trainer.micro_train_batch_size_per_gpu=8"),
    ],
)
def test_effective_micro_batch_size_is_halved(tiny_model_path: str, overrides: list[str], expected: str):
    assert expected in memory_saving_advice(small(tiny_model_path, *overrides))


def test_out_of_memory_update_suggests_trainer_settings(path: str, monkeypatch: pytest.MonkeyPatch):
    """The engine's cache is the peak of the whole plan, but it is empty during an update."""
    monkeypatch.setattr(memory_tuning, "memory_capacity", lambda device: 80 * GIB)
    cfg = config(path, f"{CHECKPOINTING}=true")
    cfg = replace(cfg, generator=replace(cfg.generator, backend="vllm"))
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
    assert "generator.max_num_seqs=512 saves about " in str(as_out_of_memory(error, cfg))
    error.raised_in = "learner 0.update"  # type: ignore[attr-defined]
    advice = str(as_out_of_memory(error, cfg))
    assert "trainer.policy.fsdp_config.reshard_after_forward=true saves about " in advice
    assert "generator." not in advice


def test_memory_of_remote_engines_is_not_lowered(tiny_model_path: str):
    local = replace(small(tiny_model_path), device="cuda")
    remote = replace(local, generator=replace(local.generator, run_engines_locally=False))
    key = "generator.gpu_memory_utilization"
    assert key in dict(memory_tuning.smaller_settings(local))
    assert key not in dict(memory_tuning.smaller_settings(remote))


def test_other_errors_are_left_alone(tiny_model_path: str):
    cfg = small(tiny_model_path)
    assert as_out_of_memory(ValueError("x"), cfg) is None
    assert as_out_of_memory(RuntimeError("shapes do not match"), cfg) is None
    assert as_out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), cfg) is not None


@pytest.mark.parametrize(("mode", "names_mode"), [("none", True), ("kv_cache", True), ("all", False)])
def test_engines_lost_to_full_gpus_suggest_settings(path: str, mode: str, names_mode: bool):
    cfg = replace_value(config(path), OFFLOAD, mode)
    error = EnginesLost("engine_0 died (CUDA Error: out of memory at cumem.cpp:1), and all 3 restarts are used up.")
    message = str(as_out_of_memory(error, cfg))
    assert message.startswith(str(error))
    assert (f"{OFFLOAD}=all (it is {mode})" in message) == names_mode
    assert "lower generator.gpu_memory_utilization (it is 0.8)" in message
    assert as_out_of_memory(EnginesLost("engine_0 died (lost its node)."), cfg) is None
    dedicated = replace_value(cfg, "trainer.placement.colocate_all", False)
    assert as_out_of_memory(error, dedicated) is None


def test_engine_advice_knows_the_planned_mode(path: str, monkeypatch: pytest.MonkeyPatch):
    """The run's configuration has null, and the plan has chosen what moves."""
    monkeypatch.setattr(memory_tuning, "memory_capacity", lambda device: 1000 * GIB)
    error = EnginesLost("engine_0 died (CUDA Error: out of memory at cumem.cpp:1), and all 3 restarts are used up.")
    assert f"Set {OFFLOAD}=all (it is none) or " in str(as_out_of_memory(error, with_engine(path)))


def with_engine(path: str, *overrides: str, backend: str = "vllm") -> Config:
    """Return a configuration whose engine's cache for all sequences of a step takes 13.3 GiB."""
    batch = ["trainer.train_batch_size=64", "trainer.policy_mini_batch_size=64", "trainer.eval_batch_size=128"]
    cfg = config(path, *batch, *overrides)
    return replace(cfg, generator=replace(cfg.generator, backend=backend))


@pytest.mark.parametrize("backend", ["vllm", "sglang"])
def test_fitting_plan_moves_least(path: str, backend: str):
    chosen: list[str] = []
    for gib in range(24, 100, 4):
        cfg, notes = tuned(with_engine(path, backend=backend), gib * GIB)
        mode = get_value(cfg, OFFLOAD)
        (note,) = [note for note in notes if note.startswith(OFFLOAD)]
        assert note.startswith(f"{OFFLOAD}=null -> {mode}: ")
        plans = {
            mode: memory_plan(replace_value(cfg, OFFLOAD, mode), gib * GIB)[0] for mode in ("none", "kv_cache", "all")
        }
        fits = [mode for mode, plan in plans.items() if plan.peak()[0] <= MAX_MEMORY_FRACTION * gib * GIB]
        assert mode == (fits[0] if fits else "all")
        chosen += [] if chosen[-1:] == [mode] else [mode]
    assert chosen == ["all", "kv_cache", "none"]


@pytest.mark.parametrize("mode", ["none", "kv_cache", "all"])
def test_configured_offload_is_kept_and_named(path: str, mode: str, monkeypatch: pytest.MonkeyPatch):
    cfg = with_engine(path, f"{OFFLOAD}={mode}")
    same, notes = tuned(cfg, 80 * GIB)
    assert get_value(same, OFFLOAD) == mode
    assert not any(note.startswith(OFFLOAD) for note in notes)
    monkeypatch.setattr(memory_tuning, "memory_capacity", lambda device: 80 * GIB)
    error = as_out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), cfg)
    assert (f"{OFFLOAD}=all saves about " in str(error)) is (mode != "all")


def test_caches_hold_what_engines_can_use(path: str):
    assert engine_cache_limit(with_engine(path), 80 * GIB) == CacheLimit(
        tokens=320 * (LONGEST + 16),
        size=2 * 28 * 2 * 128 * 2 * 320 * (LONGEST + 16),  # keys and values, layers, heads, head size, bytes
        sequences=320,
        length=LONGEST + 16,
    )
    fewer = engine_cache_limit(with_engine(path, "generator.max_num_seqs=100"), 80 * GIB)
    assert fewer is not None and fewer.sequences == 100
    turns = engine_cache_limit(with_engine(path, "generator.max_num_seqs=100", "generator.max_turns=3"), 80 * GIB)
    assert turns is not None and turns.sequences == 320, "conversations that wait for tools keep their cache"
    long = engine_cache_limit(with_engine(path, "+generator.engine_init_kwargs.max_model_len=600000"), 80 * GIB)
    assert long is not None and long.tokens == 600_256, "vLLM starts only if a sequence of max_model_len fits"
    scaled = engine_cache_limit(with_engine(path, "generator.rope_scaling={rope_type: linear, factor: 16}"), 80 * GIB)
    assert scaled is not None and scaled.tokens == 16 * 32_768 + 256, "vLLM multiplies the positions by the factor"


@pytest.mark.parametrize(
    ("overrides", "gib"),
    [
        ([], 16),
        (["+generator.engine_init_kwargs.kv_cache_memory_bytes=1000000000"], 80),
        (["trainer.placement.colocate_all=false", "trainer.placement.policy_num_gpus_per_node=1"], 80),
    ],
)
def test_caches_without_limit_take_their_share(path: str, overrides: list[str], gib: int):
    assert engine_cache_limit(with_engine(path, *overrides), gib * GIB) is None


@pytest.mark.parametrize(("backend", "key"), [("vllm", "kv_cache_memory_bytes"), ("sglang", "max_total_tokens")])
def test_engines_get_planned_cache_sizes(path: str, backend: str, key: str):
    cfg = with_engine(path, backend=backend)
    limit = engine_cache_limit(cfg, 80 * GIB)
    assert limit is not None
    expected = {"kv_cache_memory_bytes": limit.size, "max_total_tokens": limit.tokens}[key]
    assert engine_generator_config(cfg, limit).engine_init_kwargs == {key: expected}
    assert engine_generator_config(cfg).engine_init_kwargs == {}
