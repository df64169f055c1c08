"""Adapts a run to an accelerator's memory: what the configuration leaves open, and what to change if memory ran out.

Chosen are the size of micro-batches and FSDP2's gathers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

from skyrl_train.algorithms.registry import policy_losses
from skyrl_train.algorithms.skyrl_adapters import has_skyrl_signature
from skyrl_train.config.keys import get_value, replace_value
from skyrl_train.config.predicates import max_sequence_length, shares_gpu_memory
from skyrl_train.config.problems import format_value
from skyrl_train.config.schema import Config
from skyrl_train.errors import ConfigError, OutOfMemory
from skyrl_train.experiment.algorithm import ObjectiveSpec, build_policy_objective_spec
from skyrl_train.experiment.memory_plan import (
    CONFIG_SECTIONS,
    LEARNER_PHASES,
    memory_capacity,
    memory_plan,
    model_ranks,
)
from skyrl_train.terminal import print_stderr

MAX_MICRO_BATCH_TOKENS = 1 << 14
"""Of a micro-batch, where there is room: enough for a GPU's matrix products to be limited by arithmetic."""
MAX_MEMORY_FRACTION = 0.85
"""The part of an accelerator that a plan may fill; the rest is for the CUDA context, fragmentation, and estimates."""
_TOKEN_BUDGET_KEY = "trainer.max_tokens_per_microbatch"
MAX_SUGGESTIONS = 3
"""How many settings are named."""
_OOM_MESSAGES = ("can't allocate memory", "CUDA out of memory")


def tune_and_report(cfg: Config, objective_spec: ObjectiveSpec) -> Config:
    """`fit` to this machine's accelerators, with its notes on stderr.

    A model whose memory cannot be planned keeps its configuration, as its plan is only a forecast.
    """
    try:
        cfg, notes = tune_to_memory(cfg, memory_capacity(cfg.device), objective_spec)
    except ConfigError:
        raise
    except Exception as error:
        why = f"not chosen, as there is no plan ({type(error).__name__}: {error})"
        notes = [f"{_TOKEN_BUDGET_KEY}={format_value(cfg.trainer.max_tokens_per_microbatch)}: {why}"]
    for note in notes:
        print_stderr(f"note: {note}")
    return cfg


def tune_to_memory(cfg: Config, capacity: int | None, objective_spec: ObjectiveSpec) -> tuple[Config, list[str]]:
    """The configuration with the fastest way to compute that fits an accelerator, and a note for every change.

    Speed only: the update stays the same. In this order a way has large micro-batches, keeps gathered layers for
    backward where one rank has the whole model, and reduces gradients once an update. The first way of which scoring
    and updating need at most ROOM of `capacity` bytes is taken, else the one that needs least. Only what is left open
    is chosen, and only on accelerators whose memory is known: `max_tokens_per_microbatch` if no size of micro-batches
    is given, `reduce_once` and `reshard_after_forward` where they are null.
    """
    if cfg.device != "cuda":
        return cfg, []
    if capacity is None:
        budget = format_value(cfg.trainer.max_tokens_per_microbatch)
        return cfg, [
            f"{_TOKEN_BUDGET_KEY}={budget}: nothing is chosen by memory, as nvidia-smi does not say how much there is."
        ]
    changes: dict[str, Any] = {}
    for changes in _candidate_changes(cfg, capacity, objective_spec):
        if _peak(_changed(cfg, changes), capacity, objective_spec) <= MAX_MEMORY_FRACTION * capacity:
            reason = f"the fastest that the plan fits into {MAX_MEMORY_FRACTION:.0%} of {capacity / 2**30:.3g} GiB"
            break
    else:
        reason = f"needs least; no plan fits into {MAX_MEMORY_FRACTION:.0%} of {capacity / 2**30:.3g} GiB"
    notes = [
        f"{key}={format_value(get_value(cfg, key))} -> {format_value(value)}: {reason}."
        for key, value in changes.items()
    ]
    return _changed(cfg, changes), notes


def fits_in_memory(cfg: Config) -> bool:
    """Whether the memory plan leaves room on this machine; true if there is no plan."""
    capacity = memory_capacity(cfg.device)
    if capacity is None:
        return True
    try:
        plans = memory_plan(cfg, capacity, build_policy_objective_spec(cfg))
    except Exception:  # free-form settings, as in memory_plan.announce
        return True
    peaks = [plan.peak()[0] for plan in plans]
    if cfg.device == "cuda":
        return max(peaks) <= MAX_MEMORY_FRACTION * capacity
    return (
        sum(plan.count * peak for plan, peak in zip(plans, peaks, strict=True)) <= MAX_MEMORY_FRACTION * capacity
    )  # all in one


def _candidate_changes(cfg: Config, capacity: int, objective_spec: ObjectiveSpec) -> Iterator[dict[str, Any]]:
    """Keys and their values, fastest first; at least one."""
    kept, reduced = [], []
    for model in model_ranks(cfg, capacity, objective_spec):
        section = f"trainer.{CONFIG_SECTIONS[model.role]}.fsdp_config"
        if model.fsdp is not None and model.fsdp.reshard_after_forward is None and model.num_shards == 1:
            kept.append(f"{section}.reshard_after_forward")
        if model.fsdp is not None and model.fsdp.reduce_once is None and model.role != "reference":
            reduced.append(f"{section}.reduce_once")
    keeps, reduces = (True, False) if kept else (False,), (True, False) if reduced else (False,)
    for tokens, keep, once in product(_token_budgets(cfg), keeps, reduces):
        changes: dict[str, Any] = {} if tokens is None else {_TOKEN_BUDGET_KEY: tokens}
        changes |= dict.fromkeys(kept if keep else (), False)
        yield changes | dict.fromkeys(reduced, once)


def _token_budgets(cfg: Config) -> list[int | None]:
    """Halved down to the longest sequence, which has to fit in any case. None: micro-batches are as configured."""
    trainer = cfg.trainer
    configured = (
        trainer.max_tokens_per_microbatch,
        trainer.micro_train_batch_size_per_gpu,
        trainer.micro_forward_batch_size_per_gpu,
    )
    # The mean over a micro-batch that SkyRL's losses take depends on which sequences share one.
    alone = has_skyrl_signature(policy_losses.get(trainer.algorithm.policy_loss_type))
    if alone or any(size is not None for size in configured):
        return [None]
    longest, sections = max_sequence_length(cfg.generator), (trainer.policy, trainer.ref, trainer.critic)
    budgets = [
        MAX_MICRO_BATCH_TOKENS * max(section.sequence_parallel_size for section in sections)
    ]  # which a group of ranks shares
    while budgets[-1] // 2 > longest:
        budgets.append(budgets[-1] // 2)
    return [*budgets, longest] if longest < budgets[-1] else [*budgets]


def _peak(cfg: Config, capacity: int, objective_spec: ObjectiveSpec) -> int:
    """Bytes of the fullest accelerator while the learner's models compute there."""
    plans = memory_plan(cfg, capacity, objective_spec)
    return max(
        plan.total(phase)
        for plan in plans
        for phase in LEARNER_PHASES
        if not CONFIG_SECTIONS.keys().isdisjoint(plan.roles)
    )


def _changed(cfg: Config, changes: dict[str, Any]) -> Config:
    for key, value in changes.items():
        cfg = replace_value(cfg, key, value)
    return cfg


# -- out of memory


def as_out_of_memory(
    error: Exception, cfg: Config, build_objective_spec: Callable[[Config], ObjectiveSpec] = build_policy_objective_spec
) -> OutOfMemory | None:
    """What to raise if an exception of torch's says that there is no memory left, on an accelerator or a CPU."""
    says_so = isinstance(error, RuntimeError) and any(text in str(error) for text in _OOM_MESSAGES)
    if not says_so and type(error).__name__ != "OutOfMemoryError":
        return None
    where = getattr(error, "raised_in", "")
    first = next(iter(str(error).splitlines()), "")
    return OutOfMemory(f"{where + ': ' if where else ''}{first} {memory_saving_advice(cfg, build_objective_spec)}")


def memory_saving_advice(
    cfg: Config, build_objective_spec: Callable[[Config], ObjectiveSpec] = build_policy_objective_spec
) -> str:
    """The settings that lower the peak of the policy's slots most, with what the plan says that each would save."""
    try:
        learns = build_objective_spec(cfg)
        cfg, _ = tune_to_memory(cfg, memory_capacity(cfg.device), learns)  # as the run was
        peak = _policy_peak(cfg, learns)
    except Exception as error:  # free-form settings, or a model that cannot be read any more
        return f"Lower the tokens of a micro-batch; there is no memory plan ({type(error).__name__})."
    saved: dict[str, int] = {}
    for key, value in smaller_settings(cfg):
        saved[f"{key}={str(value).lower()}"] = peak - _policy_peak(replace_value(cfg, key, value), learns)
    best = sorted(((size, text) for text, size in saved.items() if size > 0), reverse=True)[:MAX_SUGGESTIONS]
    each = ", ".join(f"{text} saves about {size / 2**30:.3g} GiB" for size, text in best)
    planned = f"The plan of a slot of the policy is {peak / 2**30:.3g} GiB"
    if not best:
        return f"{planned}, which no setting lowers: take more ranks or a smaller model."
    return f"{planned}: {each}."


def _policy_peak(cfg: Config, objective_spec: ObjectiveSpec) -> int:
    plans = memory_plan(cfg, memory_capacity(cfg.device), objective_spec)
    return max(plan.peak()[0] for plan in plans if "policy" in plan.name)


def smaller_settings(cfg: Config) -> Iterator[tuple[str, Any]]:
    """Keys and values that may need less memory than the configured ones."""
    trainer, generator = cfg.trainer, cfg.generator
    if trainer.max_tokens_per_microbatch is not None:
        yield "trainer.max_tokens_per_microbatch", max(1, trainer.max_tokens_per_microbatch // 2)
    else:
        for name in ("micro_train_batch_size_per_gpu", "micro_forward_batch_size_per_gpu"):
            if (size := getattr(trainer, name) or 1) > 1:
                yield f"trainer.{name}", size // 2
    if not trainer.gradient_checkpointing:
        yield "trainer.gradient_checkpointing", True
    if trainer.strategy == "fsdp2":
        if trainer.policy.fsdp_config.reduce_once:
            yield "trainer.policy.fsdp_config.reduce_once", False
        if trainer.policy.fsdp_config.reshard_after_forward is False:
            yield "trainer.policy.fsdp_config.reshard_after_forward", True
        if not trainer.policy.fsdp_config.cpu_offload and cfg.device == "cuda":
            yield "trainer.policy.fsdp_config.cpu_offload", True
        yield "trainer.placement.policy_num_gpus_per_node", 2 * trainer.placement.policy_num_gpus_per_node
    if shares_gpu_memory(cfg) and generator.gpu_memory_utilization > 0.2:
        yield "generator.gpu_memory_utilization", round(generator.gpu_memory_utilization - 0.1, 2)
    if (length := generator.sampling_params.max_generate_length) > 1:
        yield "generator.sampling_params.max_generate_length", length // 2
