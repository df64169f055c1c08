"""The memory plan compared with torch's own count of a rank's allocations."""

from __future__ import annotations

import functools
import gc
import importlib.util
import itertools
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from skyrl_train.config.choices import STRATEGIES
from skyrl_train.config.predicates import sleep_level
from skyrl_train.config.prepare import prepare_config
from skyrl_train.config.schema import Config, LoraConfig, OptimizerConfig
from skyrl_train.data.batch import MAX_ATTENDED_RATIO
from skyrl_train.engines.transformers.cache import PromptKey
from skyrl_train.engines.transformers.model_runner import ModelRunner
from skyrl_train.errors import ConfigError
from skyrl_train.experiment import memory_plan as memory_plan_module
from skyrl_train.experiment.memory_plan import (
    MemoryItem,
    ParameterShape,
    Phase,
    SlotMemoryPlan,
    memory_capacity,
    memory_plan,
    model_shape,
    numel,
    summary,
)
from skyrl_train.learner.worker import LearnerSpec, LearnerWorker, MiniBatch
from skyrl_train.models.activation_checkpointing import SELECTIVE
from skyrl_train.models.loading import load_reward_model
from skyrl_train.strategies.base import Strategy
from skyrl_train.strategies.checkpoint_shards import to_local
from skyrl_train.strategies.single import SingleStrategy
from skyrl_train.testing.tiny_models import save_tiny_model, save_tiny_reward_model, tiny_model
from tests.support.learner_specs import policy_batch, tiny_spec
from tests.support.rank_processes import run_ranks

LAYERS = 4
SEQUENCES, PROMPT, RESPONSE = 4, 42, 86
"""Sequences of a micro-batch, and tokens of each. A third of a sequence is prompt in ragged_batch."""
SAMPLES, MICRO_BATCHES = 4, 2
TOLERANCE = 0.15
GIB = 1 << 30


@pytest.fixture(scope="module")
def path(tiny_model_path: str) -> str:
    return tiny_model_path


def config(path: str, *overrides: str, ranks: int = 1, half: bool = False) -> Config:
    """Return a run on a CPU with everything on the same slots and MICRO_BATCHES micro-batches per rank and update."""
    prompts = ranks * MICRO_BATCHES * SEQUENCES // SAMPLES
    keys = {
        "trainer.policy.model.path": path,
        "trainer.strategy": "single",
        "trainer.placement.policy_num_gpus_per_node": ranks,
        "generator.num_inference_engines": ranks,
        "trainer.train_batch_size": prompts,
        "trainer.policy_mini_batch_size": prompts,
        "trainer.critic_mini_batch_size": prompts,
        "trainer.micro_train_batch_size_per_gpu": SEQUENCES,
        "trainer.micro_forward_batch_size_per_gpu": SEQUENCES,
        "trainer.max_prompt_length": PROMPT,
        "generator.sampling_params.max_generate_length": RESPONSE,
        "generator.n_samples_per_prompt": SAMPLES,
        "trainer.algorithm.use_kl_loss": "false",
    }
    cfg = prepared(*(f"{key}={value}" for key, value in keys.items()), *overrides)
    # On a CPU the command line's bf16=true cannot be told from the default, which is replaced.
    return replace(cfg, trainer=replace(cfg.trainer, bf16=half))


@functools.cache
def prepared(*overrides: str) -> Config:
    return prepare_config(overrides, has_accelerator=False).config


def on_gpus(cfg: Config, **generator: Any) -> Config:
    """Return the configuration for GPUs, although this machine may have none."""
    return replace(cfg, device="cuda", generator=replace(cfg.generator, backend="vllm", **generator))


def row(plan: SlotMemoryPlan, role: str, what: str, phase: str = "updating") -> MemoryItem:
    """Return the plan's item with this name; the one on the device if another one is on the host."""
    found = [r for r in plan.items if (r.role, r.name) == (role, what) and phase in r.phases]
    (line,) = [r for r in found if not r.on_host] or found
    return line


def mini_batch() -> MiniBatch:
    lengths = (PROMPT + RESPONSE,) * SEQUENCES
    batches = [policy_batch(lengths, seed=seed) for seed in range(MICRO_BATCHES)]
    return MiniBatch(batches, MICRO_BATCHES, sum(int(batch.loss_mask.sum()) for batch in batches))


def allocated_at_most(call: Callable[[], Any]) -> int:
    """Return the bytes that torch holds at the peak of a call beyond what it held before."""
    gc.collect()  # garbage of other tests must not be freed during the call
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        call()
    results: Any = recorded.profiler
    events = [event for event in results.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def state_bytes(strategy: Strategy) -> int:
    """Return the bytes of this rank's optimizer state."""
    return sum(
        tensor.nbytes for key, tensor in strategy.get_checkpoint_shard().tensors.items() if not key.startswith("param/")
    )


def peak_of_update(spec: LearnerSpec, rank: int, world_size: int, port: int | None = None) -> tuple[int, int, int]:
    """Return the bytes that a second update adds, and those of this rank's parameters and optimizer state."""
    worker = LearnerWorker(spec, rank, world_size)
    address, free = worker.address()
    worker.setup(address, port or free)
    small = policy_batch()
    worker.update(MiniBatch([small], 1, int(small.loss_mask.sum())))  # creates the optimizer's state
    peak = allocated_at_most(lambda: worker.update(mini_batch()))
    held = sum(to_local(parameter).nbytes for parameter in worker.module.parameters())
    state = state_bytes(worker.strategy)
    worker.close()
    return peak, held, state


def planned(plan: SlotMemoryPlan) -> int:
    """Return the planned bytes that an update adds to what a rank holds before it."""
    kept = ("parameters", "optimizer", "weight-sync buckets")
    return plan.total(Phase.UPDATING, role="policy") - sum(row(plan, "policy", what).size for what in kept)


needs_bitsandbytes = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed"
)


def on_demand(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.on_demand)


@pytest.mark.parametrize(
    ("kind", "vocab_size", "half", "checkpointing"),
    [
        ("qwen2", 320, False, False),
        ("qwen2", 320, False, True),
        ("qwen2", 320, False, SELECTIVE),
        ("qwen3", 320, False, True),
        ("llama", 320, True, False),
        ("qwen2", 8192, True, True),
        ("qwen3_5_text", 320, False, False),
        ("qwen3_5_text", 320, True, True),
        ("falcon_h1", 320, False, True),
        ("qwen3_5_text", 320, True, SELECTIVE),
        ("lfm2", 320, False, False),
        on_demand("qwen3", 320, True, SELECTIVE),
        on_demand("llama", 320, False, SELECTIVE),
        on_demand("gemma2", 320, False, SELECTIVE),
        on_demand("qwen3_moe", 320, False, SELECTIVE),
        on_demand("falcon_h1", 320, False, SELECTIVE),
        on_demand("lfm2", 320, False, SELECTIVE),
        on_demand("qwen3_5_text", 320, False, True),
        on_demand("qwen3_5_text", 320, True, False),
        on_demand("falcon_h1", 320, False, False),
        on_demand("falcon_h1", 320, True, False),
        on_demand("granitemoehybrid", 320, False, False),
        on_demand("lfm2", 320, False, True),
        on_demand("kimi_linear", 320, False, False),
        on_demand("qwen3", 320, False, False),
        on_demand("llama", 320, False, False),
        on_demand("llama", 320, False, True),
        on_demand("llama", 320, True, True),
        on_demand("qwen2", 8192, False, False),
        on_demand("qwen2", 8192, False, True),
        on_demand("qwen2", 8192, True, False),
        on_demand("gemma2", 320, False, False),
        on_demand("gemma2", 320, False, True),
        on_demand("qwen3_moe", 320, False, False),
        on_demand("qwen3_moe", 320, False, True),
    ],
)
def test_update_allocates_planned_memory(
    kind: str, vocab_size: int, half: bool, checkpointing: bool | str, tmp_path: Path
):
    path = save_tiny_model(tmp_path, kind, layers=LAYERS, vocab_size=vocab_size)
    cfg = config(path, f"trainer.gradient_checkpointing={checkpointing}", half=half)
    (plan,) = memory_plan(cfg)
    spec = tiny_spec(path, gradient_checkpointing=checkpointing, dtype="bfloat16" if half else "float32")
    measured, _, _ = peak_of_update(spec, 0, 1)
    assert planned(plan) == pytest.approx(measured, rel=TOLERANCE)


def measure_rank(spec: LearnerSpec, rank: int, ranks: int, port: int, file: Path) -> None:
    found = peak_of_update(spec, rank, ranks, port)
    if rank == 0:
        file.write_text(json.dumps(found))


def test_recurrent_layers_repeat_shared_prompts(tmp_path: Path):
    path = save_tiny_model(tmp_path, "lfm2", layers=2)
    samples = [
        "generator.n_samples_per_prompt=8",
        "trainer.gradient_checkpointing=false",
        f"trainer.max_tokens_per_microbatch={PROMPT + RESPONSE}",
    ]
    shared, alone = (
        memory_plan(config(path, *samples, f"trainer.share_prompt={share}"))[0] for share in ("true", "false")
    )
    shape = model_shape(path, key="k")
    (per_token,) = {size for (width, _), size in shape.mixer_bytes.items() if width == 4}
    key_values = 2 * 4 * shape.key_value_heads * shape.head_dim * shape.attention_layers
    added = row(shared, "policy", "activations").size - row(alone, "policy", "activations").size
    more_tokens = (MAX_ATTENDED_RATIO - 1) * (PROMPT + RESPONSE)
    assert added == more_tokens * (shape.mixers * per_token + key_values)


@pytest.mark.parametrize("kind", ["qwen3_5_text", "falcon_h1", "kimi_linear"])
def test_kernels_of_recurrent_layers_save_less(kind: str, tmp_path: Path):
    shape = model_shape(save_tiny_model(tmp_path, kind, layers=4), key="k")
    assert shape.mixer_bytes[2, True] < shape.mixer_bytes[2, False] / 2 < shape.mixer_bytes[4, False] / 2


def test_separate_attention_kernels_keep_their_inputs(path: str, monkeypatch: pytest.MonkeyPatch):
    cfg = on_gpus(config(path, "trainer.gradient_checkpointing=selective", half=True))
    shape = model_shape(path, key="k")

    def kept(is_installed: bool) -> int:
        monkeypatch.setattr(memory_plan_module, "has_separate_kernels", lambda: is_installed)
        return row(memory_plan(cfg)[0], "policy", "activations").size

    heads = shape.heads + 2 * shape.key_value_heads
    per_token = 2 * shape.attention_layers * shape.head_dim * heads
    assert kept(True) - kept(False) == SEQUENCES * (PROMPT + RESPONSE) * per_token > 0


@pytest.mark.parametrize(("ranks", "half", "checkpointing"), [(1, True, False), (2, False, True)])
def test_sharded_model_holds_planned_memory(ranks: int, half: bool, checkpointing: bool, tmp_path: Path):
    path = save_tiny_model(tmp_path, "llama", layers=LAYERS, vocab_size=321)
    cfg = config(
        path, "trainer.strategy=fsdp2", f"trainer.gradient_checkpointing={checkpointing}", ranks=ranks, half=half
    )
    (plan,) = memory_plan(cfg)
    spec = tiny_spec(
        path,
        strategy=STRATEGIES["fsdp2"],
        gradient_checkpointing=checkpointing,
        dtype="bfloat16" if half else "float32",
    )
    _, port = LearnerWorker(spec, 0, ranks).address()
    file = tmp_path / "measured.json"
    # A device mesh and its store live as long as their process.
    run_ranks(measure_rank, [(spec, rank, ranks, port, file) for rank in range(ranks)], tmp_path)
    measured, parameters, optimizer = json.loads(file.read_text())
    assert row(plan, "policy", "parameters").size == parameters
    assert row(plan, "policy", "optimizer").size == optimizer
    assert planned(plan) == pytest.approx(measured, rel=TOLERANCE)


class CountingSingle(SingleStrategy):
    """The strategy `single`, which counts the bytes of an update's gradients."""

    gradient_bytes = 0

    def step(self) -> dict[str, float]:
        gradients = [parameter.grad for parameter in self.module.parameters()]
        self.gradient_bytes = sum(gradient.nbytes for gradient in gradients if gradient is not None)
        return super().step()


@pytest.mark.parametrize(
    ("kind", "adapted", "optimizer"),
    [
        *itertools.product(["qwen2", "llama"], [False, True], ["adamw"]),
        ("qwen3_moe", False, "muon"),
        pytest.param("llama", False, "adamw_8bit", marks=needs_bitsandbytes),
    ],
)
def test_parameters_gradients_and_optimizer_are_exact(kind: str, adapted: bool, optimizer: str, tmp_path: Path):
    path = save_tiny_model(tmp_path, kind, tied=kind == "qwen2")
    lora = ["trainer.policy.model.lora.rank=4"] if adapted else []
    (plan,) = memory_plan(config(path, f"trainer.policy.optimizer_config.name={optimizer}", *lora))
    spec = tiny_spec(
        path,
        lora=LoraConfig(rank=4) if adapted else None,
        strategy=f"{__name__}:CountingSingle",
        optimizer_config=OptimizerConfig(name=optimizer),
    )
    worker = LearnerWorker(spec, 0, 1)
    worker.setup(*worker.address())
    batch = policy_batch()
    worker.update(MiniBatch([batch], 1, int(batch.loss_mask.sum())))
    strategy: Any = worker.strategy
    assert row(plan, "policy", "parameters").size == sum(weight.nbytes for weight in worker.module.parameters())
    assert row(plan, "policy", "optimizer").size == state_bytes(strategy)
    assert row(plan, "policy", "gradients").size == strategy.gradient_bytes
    worker.close()


@pytest.mark.parametrize("ranks", [1, 2, 3, 7, 8])
@pytest.mark.parametrize("rows", [1, 3, 8, 321])
def test_first_rank_is_fullest(rows: int, ranks: int):
    first = torch.empty(rows, 5).chunk(ranks)[0]
    assert ParameterShape((rows, 5)).shard_numel(ranks) == first.numel()


def test_critic_has_value_head_without_logits(tmp_path: Path):
    path = save_tiny_model(tmp_path, tied=False)
    gae = ["trainer.algorithm.advantage_estimator=gae", f"trainer.critic.model.path={path}"]
    (plan,) = memory_plan(config(path, *gae))
    policy, critic = model_shape(path, key="k"), model_shape(path, key="k", kind="critic")
    assert numel(critic.weights) == numel(policy.weights) - policy.head + policy.hidden
    assert [r.name for r in plan.items if r.role == "critic" and r.name in ("logits", "values")] == ["values"] * 2


def test_sequential_roles_do_not_add_up(path: str):
    (plan,) = memory_plan(config(path, "trainer.algorithm.use_kl_loss=true"))
    passing = {
        role: plan.total(Phase.SCORING, role=role) - plan.total(Phase.GENERATING, role=role) for role in plan.roles
    }
    assert passing["policy"] > 0
    assert plan.total(Phase.SCORING) == plan.total(Phase.GENERATING) + max(passing.values())


def test_dedicated_slots_have_own_plan(path: str):
    dedicated = ["trainer.placement.colocate_all=false", "trainer.placement.colocate_policy_ref=false"]
    reference = ["trainer.placement.ref_num_gpus_per_node=3", "trainer.algorithm.use_kl_loss=true"]
    plans = memory_plan(config(path, *dedicated, *reference, "generator.num_inference_engines=2"))
    assert [(plan.name, plan.count) for plan in plans] == [("policy", 1), ("reference", 3), ("engine", 2)]
    assert [plan.name for plan in memory_plan(config(path, "generator.run_engines_locally=false"))] == ["policy"]


@pytest.mark.parametrize(
    ("engines", "expected"),
    [
        (1, [("policy + engine", 1), ("policy", 2)]),
        (3, [("policy + engine", 3)]),
        (5, [("policy + engine", 3), ("engine", 2)]),
    ],
)
def test_shared_slots_are_planned_separately(engines: int, expected: list[tuple[str, int]], path: str):
    cfg = config(path, "trainer.strategy=fsdp2", f"generator.num_inference_engines={engines}", ranks=3)
    plans = memory_plan(cfg)
    assert [(plan.name, plan.count) for plan in plans] == expected


@pytest.mark.parametrize("colocated", [True, False])
def test_reward_model_is_complete_on_each_slot(colocated: bool, tmp_path: Path):
    path, judge = save_tiny_model(tmp_path / "policy"), save_tiny_reward_model(tmp_path / "judge")
    keys = [f"trainer.placement.colocate_all={colocated}", f"trainer.reward.model.path={judge}"]
    own = [] if colocated else ["trainer.placement.reward_num_gpus_per_node=3"]
    plans = memory_plan(config(path, *keys, *own, half=True))
    names = ["policy + reward model + engine"] if colocated else ["policy", "reward model", "engine"]
    assert [plan.name for plan in plans] == names
    plan = next(plan for plan in plans if "reward model" in plan.name)
    assert plan.count == (1 if colocated else 3)
    loaded = load_reward_model(judge, dtype=torch.bfloat16)
    assert row(plan, "reward model", "parameters").size == sum(weight.nbytes for weight in loaded.parameters())
    assert plan.total(Phase.GENERATING, role="reward model") > plan.total(Phase.UPDATING, role="reward model")


def test_zero_3_keeps_reused_layers_gathered(tmp_path: Path):
    path = save_tiny_model(tmp_path, layers=6)
    shape = model_shape(path, key="k")
    keys = ["trainer.strategy=deepspeed", "trainer.policy.deepspeed_config.zero_stage=3"]
    options = "+trainer.policy.deepspeed_config.zero_optimization.stage3_"
    bounded = [f"{options}prefetch_bucket_size=0", f"{options}max_reuse_distance={4 * shape.largest_layer}"]

    def gathered(phase: str, *overrides: str) -> int:
        (plan,) = memory_plan(config(path, *keys, *overrides, ranks=4))
        return row(plan, "policy", "gathered weights", phase).size

    assert gathered("updating") == gathered("scoring") == 4 * numel(shape.weights)
    assert gathered("updating", *bounded) == 4 * (numel(shape.root) + 2 * shape.largest_layer)
    assert gathered("scoring", *bounded) == 4 * (numel(shape.root) + shape.largest_layer)


def test_trainer_is_offloaded_while_engines_generate(path: str):
    (plan,) = memory_plan(on_gpus(config(path)), capacity=GIB)
    held = row(plan, "policy", "parameters").size + row(plan, "policy", "optimizer").size
    buckets = row(plan, "policy", "weight-sync buckets").size
    assert plan.total(Phase.GENERATING, role="policy") == buckets
    assert plan.total(Phase.GENERATING, role="policy", on_host=True) == held
    assert plan.total(Phase.UPDATING, role="engine") == 0  # a sleeping vLLM holds no accelerator memory
    assert plan.total(Phase.GENERATING, role="engine") == int(0.8 * GIB)


@pytest.mark.defect("engines-wake-beside-optimizer")
def test_sync_holds_only_weights_on_shared_accelerators(path: str):
    (plan,) = memory_plan(on_gpus(config(path, "trainer.algorithm.use_kl_loss=true")), capacity=GIB)
    weights, moments = (row(plan, "policy", what).size for what in ("parameters", "optimizer"))
    sent = sum(row(plan, "policy", what, "syncing").size for what in ("weight-sync buckets", "tensor being sent"))
    of_engine = sum(row(plan, "engine", what, "syncing").size for what in ("weights", "sampler"))
    assert plan.total(Phase.SYNCING) == weights + sent + of_engine
    assert plan.total(Phase.SYNCING, role="reference") == 0
    frozen = row(plan, "reference", "parameters").size
    assert (
        plan.total(Phase.GENERATING, on_host=True)
        == plan.total(Phase.UPDATING, on_host=True)
        == weights + moments + frozen
    )


@pytest.mark.parametrize(
    ("backend", "changes", "on_device", "on_host"),
    [
        ("vllm", {}, False, False),
        ("vllm", {"weight_sync_only_changed": True}, False, True),
        ("vllm", {"engine_init_kwargs": {"max_lora_rank": 8}}, False, True),
        ("sglang", {}, False, False),
        ("sglang", {"weight_sync_only_changed": True}, True, False),
        ("transformers", {}, False, True),
    ],
)
def test_sleeping_engines_hold_weights_without_full_sync(
    backend: str, changes: dict[str, Any], on_device: bool, on_host: bool, path: str
):
    cfg = on_gpus(config(path), **changes)
    cfg = replace(cfg, generator=replace(cfg.generator, backend=backend))
    (plan,) = memory_plan(cfg, capacity=GIB)
    weights = [r.on_host for r in plan.items if (r.role, r.name) == ("engine", "weights") and "updating" in r.phases]
    assert weights == [False] * on_device + [True] * on_host
    assert sleep_level(cfg) == (1 if changes else 2)


def test_drafts_take_cache_and_host_memory(path: str, monkeypatch: pytest.MonkeyPatch):
    plain_cfg = on_gpus(config(path))
    drafts = replace(plain_cfg.generator.speculative, method="draft_model", model=path)
    cfg = replace(plain_cfg, generator=replace(plain_cfg.generator, speculative=drafts))
    (plain,), (plan,) = memory_plan(plain_cfg, capacity=GIB), memory_plan(cfg, capacity=GIB)
    weights, sampler, cache = (
        row(plan, "engine", what, "generating") for what in ("draft weights", "sampler", "KV cache")
    )
    assert weights.size == row(plain, "engine", "weights", "generating").size
    more_rows = sampler.size - row(plain, "engine", "sampler", "generating").size
    assert more_rows == cfg.generator.max_num_seqs * 4 * drafts.num_speculative_tokens * 320 // 32
    cache_of_plain = row(plain, "engine", "KV cache", "generating")
    assert cache.size == cache_of_plain.size - weights.size - more_rows
    fits, fits_plain = (
        int(re.findall(r"fits ([\d,]+)", row.note)[0].replace(",", "")) for row in (cache, cache_of_plain)
    )
    assert abs(2 * fits - fits_plain) < 0.01 * fits_plain, "the draft model has as many layers as the policy"
    on_host = {item.name for item in plan.items if item.on_host and item.role == "engine"}
    assert on_host == {"weights", "draft weights", "sampler"}, "vLLM cannot discard the weights of drafts"
    assert not any(item.on_host and item.role == "engine" for item in plain.items)
    monkeypatch.setattr("skyrl_train.engines.vllm.model_runner._USERS_CHOICE", "0")
    assert "sampler" not in {item.name for item in memory_plan(plain_cfg, capacity=GIB)[0].items}, "V1 has no buffers"


@pytest.mark.parametrize("backend", ["vllm", "sglang", "transformers"])
def test_copies_of_synced_weights_are_counted(backend: str, path: str):
    cfg = on_gpus(config(path, "trainer.strategy=fsdp2", ranks=4), weight_sync_only_changed=True)
    cfg = replace(cfg, generator=replace(cfg.generator, backend=backend))
    weights = numel(model_shape(path, key="k").weights) * (2 if cfg.generator.model_dtype == "bfloat16" else 4)
    (plan,) = memory_plan(cfg, capacity=GIB)
    copies = {r.role: r.size for r in plan.items if r.name == "weights synced last" and r.on_host}
    assert copies == {"policy": -(-weights // 4)} | ({} if backend == "transformers" else {"engine": weights})


def test_cpu_offload_keeps_gathered_layers_on_accelerator(path: str):
    keys = ["trainer.strategy=fsdp2", "trainer.policy.fsdp_config.cpu_offload=true"]
    (plan,) = memory_plan(on_gpus(config(path, *keys, "trainer.placement.colocate_all=true")), capacity=GIB)
    on_host = {r.name for r in plan.items if r.on_host and r.role == "policy" and "updating" in r.phases}
    assert on_host == {"parameters", "optimizer", "gradients"}


@pytest.mark.parametrize(("stage", "parameters"), [(2, 1), (3, 4)])
def test_zero_shards_what_its_stage_says(stage: int, parameters: int, path: str):
    keys = ["trainer.strategy=deepspeed", f"trainer.policy.deepspeed_config.zero_stage={stage}"]
    (plan,) = memory_plan(config(path, *keys, ranks=4, half=True))
    weights = numel(model_shape(path, key="k").weights)
    assert row(plan, "policy", "parameters").size == pytest.approx(2 * weights / parameters, rel=1e-3)
    assert row(plan, "policy", "master weights").size == pytest.approx(4 * weights / 4, rel=1e-3)
    assert row(plan, "policy", "optimizer").size == pytest.approx(8 * weights / 4, rel=1e-3)
    assert row(plan, "policy", "gradients").size == pytest.approx(4 * weights / 4, rel=0.01)


def test_sequence_parallel_ranks_share_tokens(path: str):
    keys, logits = ["trainer.strategy=fsdp2", "trainer.algorithm.use_kl_loss=false"], ("policy", "logits")
    alone, grouped = (
        row(memory_plan(config(path, *keys, f"trainer.policy.sequence_parallel_size={size}", ranks=2))[0], *logits)
        for size in (1, 2)
    )
    assert grouped.size == alone.size / 2


@pytest.mark.parametrize(("capacity", "rows"), [(None, 64), (24 << 30, 64), (81559 << 20, 256), (141 << 30, 512)])
def test_logit_chunks_depend_on_gpu_memory(capacity: int | None, rows: int, path: str):
    keys = [
        "+trainer.policy.model_config_kwargs.vocab_size=1048576",
        "generator.sampling_params.max_generate_length=900",
    ]
    (plan, *_) = memory_plan(on_gpus(config(path, *keys)), capacity)
    assert row(plan, "policy", "logits").note.startswith(f"chunks of {rows} x 1,048,576")


def test_tensor_parallel_ranks_share_layers(tmp_path: Path):
    path = save_tiny_model(tmp_path, "qwen3_moe")
    keys = ["trainer.strategy=fsdp2", "trainer.algorithm.use_kl_loss=false"]
    whole, parts = model_shape(path, key="k"), model_shape(path, key="k", tensor_parallel_size=2)
    shared = [weight for layer in whole.layers for weight in layer if len(weight.shape) > 1]
    alike = [weight for weight in shared if weight.shape[0] == 4 and len(weight.shape) == 2]  # routers, of 4 experts
    halved = sum(weight.numel for weight in shared) - sum(weight.numel for weight in alike)
    assert numel(whole.weights) - numel(parts.weights) == halved / 2
    assert (parts.heads, parts.key_value_heads) == (whole.heads // 2, whole.key_value_heads // 2)
    plans = [memory_plan(config(path, *keys, f"trainer.policy.tensor_parallel_size={n}", ranks=2))[0] for n in (1, 2)]
    alone, grouped = (row(plan, "policy", "parameters") for plan in plans)
    assert grouped.size == 4 * numel(parts.weights) > alone.size == 4 * numel(whole.weights, 2)
    assert "one of 2 parts of layers" in grouped.note
    logits, fewer = (row(plan, "policy", "logits").size for plan in plans)
    assert fewer == logits / 2


def test_gradients_are_sharded_if_reduced_per_micro_batch(path: str):
    cfg = config(path, "trainer.strategy=fsdp2", ranks=4)
    whole = row(memory_plan(cfg)[0], "policy", "gradients").size
    sharded = row(memory_plan(on_gpus(cfg), capacity=GIB)[0], "policy", "gradients").size
    assert whole == 4 * numel(model_shape(path, key="k").weights)
    assert whole / 4 <= sharded < whole / 3


@pytest.mark.parametrize("backend", ["transformers", "vllm"])
def test_cpu_cache_size_depends_on_backend(backend: str, path: str):
    (plan,) = memory_plan(config(path, f"generator.backend={backend}", "generator.max_num_seqs=8"))
    per_token = 2 * 2 * 2 * 32 * 4  # keys and values, layers, heads, head size, bytes
    expected = {"transformers": per_token * (8 * RESPONSE + 2 * PROMPT), "vllm": per_token * 8 * 4096}
    assert row(plan, "engine", "KV cache").size == expected[backend]


@pytest.mark.parametrize("kind", ["qwen3_5_text", "falcon_h1", "nemotron_h", "lfm2", "kimi_linear"])
def test_cache_includes_states_of_recurrent_layers(kind: str, tmp_path: Path):
    path = save_tiny_model(tmp_path, kind, layers=4)
    runner = ModelRunner(tiny_model(kind, layers=4), torch.device("cpu"), "planned")
    packed, _, _ = runner.prefill([PromptKey((5, 6, 7))])
    states = [
        tensor
        for layer in packed.states[0].states.cache.layers
        for name in ("conv_states", "recurrent_states")
        for tensor in getattr(layer, name, {}).values()
        if tensor is not None
    ]
    state_bytes = sum(tensor.nbytes for tensor in states)
    token_bytes = sum(tensor.nbytes for pair in packed.layers_kv.values() for tensor in pair) // 3
    (plan,) = memory_plan(config(path, "generator.backend=transformers", "generator.max_num_seqs=8"))
    cache = row(plan, "engine", "KV cache")
    if kind != "kimi_linear":  # which expands keys and values
        assert cache.size == token_bytes * (8 * RESPONSE + 2 * PROMPT) + state_bytes * (8 + 2)
    assert f"{state_bytes / 1024:,.1f} KiB of states each" in cache.note


def test_missing_model_is_named_by_key(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"trainer\.policy\.model\.path='.*nowhere' cannot be loaded"):
        memory_plan(config(str(tmp_path / "nowhere")))


def test_summary_names_peaks_and_largest_parts(path: str):
    plans = memory_plan(config(path, "trainer.algorithm.use_kl_loss=true"))
    peaks, parts, command = summary(plans, "cuda", 80 << 30)
    (first, *_), megabytes = plans, round(plans[0].peak()[0] / 2**20)
    assert f"per GPU: {first.name} at most {megabytes:,} MiB of 80.0 GiB while updating" in peaks
    assert all(plan.name in peaks for plan in plans)
    largest = max((item for item in first.items if "updating" in item.phases), key=lambda item: item.size)
    assert parts.startswith(f"memory plan: largest parts: {largest.role} {largest.name} ")
    assert "`skyrl-train plan`" in command


def test_memory_capacity_of_this_machine():
    found = memory_capacity("cpu")
    assert found is not None
    assert found > 64 << 20
