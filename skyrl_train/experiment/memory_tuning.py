"""Adapts a run to an accelerator's memory: micro-batch sizes and FSDP2 gathers that the configuration leaves open.

Also suggests settings to change after a process ran out of memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import product
from typing import Any

from skyrl_train.algorithms.registry import policy_losses
from skyrl_train.algorithms.skyrl_adapters import has_skyrl_signature
from skyrl_train.config.keys import get_value, replace_value
from skyrl_train.config.predicates import OffloadMode, max_sequence_length, offload_mode, shares_gpu_memory
from skyrl_train.config.problems import format_value
from skyrl_train.config.schema import Config
from skyrl_train.errors import ConfigError, EnginesLost, OutOfMemory
from skyrl_train.experiment.algorithm import ObjectiveSpec, build_policy_objective_spec
from skyrl_train.experiment.memory_plan import (
    CONFIG_SECTIONS,
    LEARNER_PHASES,
    PHASES,
    CacheLimit,
    Phase,
    engine_cache_limit,
    memory_capacity,
    memory_plan,
    model_ranks,
)
from skyrl_train.models.activation_checkpointing import SELECTIVE
from skyrl_train.terminal import print_stderr

MAX_MICRO_BATCH_TOKENS = 1 << 14
"""Largest micro-batch in tokens that is chosen: enough for arithmetic to limit a GPU's matrix products."""
MAX_MEMORY_FRACTION = 0.85
"""Fraction of an accelerator that a plan may fill. The rest is for the CUDA context, fragmentation and estimation
errors."""
_TOKEN_BUDGET_KEY = "trainer.max_tokens_per_microbatch"
_CHECKPOINTING_KEY = "trainer.gradient_checkpointing"
CHECKPOINTING_MODES = (False, SELECTIVE, True)
"""Values of trainer.gradient_checkpointing, the fastest first."""
MIN_EFFICIENT_TOKENS = 1 << 12
"""Micro-batches are only made smaller than this if recomputing all activations does not suffice."""
_OFFLOAD_KEY = "trainer.placement.colocate_offload"
MAX_SUGGESTIONS = 3
"""Number of settings that an out-of-memory error suggests."""
_OOM_MESSAGES = ("can't allocate memory", "CUDA out of memory", "CUDA Error: out of memory")
"""Texts of errors of torch, and of vLLM when an engine wakes up."""
_PHASES_OF_CALLS = {
    "forward": (Phase.SCORING,),
    "forward_with_routing": (Phase.SCORING,),
    "update": (Phase.UPDATING,),
}
"""A call of a trainer's rank -> the phases of the plan in which it runs. Other calls can be in any phase."""


def tune_and_report(cfg: Config, objective_spec: ObjectiveSpec) -> Config:
    """Call `tune_to_memory` for this machine's accelerators and print its notes to stderr.

    Returns the configuration unchanged if no memory plan can be made, because the plan is only a forecast.

    Raises:
        ConfigError: A model cannot be loaded.
    """
    try:
        cfg, notes = tune_to_memory(cfg, memory_capacity(cfg.device), objective_spec)
    except ConfigError:
        raise
    except Exception as error:
        reason = f"not tuned, because there is no memory plan ({type(error).__name__}: {error})"
        notes = [f"{_TOKEN_BUDGET_KEY}={format_value(cfg.trainer.max_tokens_per_microbatch)}: {reason}"]
    for note in notes:
        print_stderr(f"note: {note}")
    return cfg


def tune_to_memory(cfg: Config, capacity: int | None, objective_spec: ObjectiveSpec) -> tuple[Config, list[str]]:
    """Choose the fastest of the settings left open that fit into an accelerator's memory according to the memory plan.

    The update stays mathematically the same. To save memory, this first gives up reducing gradients once per update,
    then keeping gathered layers for backward (which models that are not sharded do), then it makes micro-batches
    smaller, but not below MIN_EFFICIENT_TOKENS, then it recomputes activations, and last it makes micro-batches still
    smaller. It chooses the first candidate whose scoring and updating need at most MAX_MEMORY_FRACTION of `capacity`.
    If none fits, it chooses the last one, which needs the least. It sets `max_tokens_per_microbatch` if no micro-batch
    size is configured, and `gradient_checkpointing`, `reduce_once` and `reshard_after_forward` where they are null. On
    CPUs it only sets `gradient_checkpointing`, without a note.

    If colocated engines and models then have to free all memory for each other, it gives up keeping activations and
    large micro-batches first, because moving models takes longer: see `OffloadMode`.

    Args:
        cfg: The configuration.
        capacity: Bytes of the accelerator; None if unknown, which leaves the configuration unchanged.
        objective_spec: The loss, which decides which models the run has.

    Returns:
        The configuration, and a note for every changed key.
    """
    if cfg.device != "cuda":
        return _choose_checkpointing_on_cpu(cfg, capacity, objective_spec), []
    if capacity is None:
        budget = format_value(cfg.trainer.max_tokens_per_microbatch)
        notes = [
            f"{_TOKEN_BUDGET_KEY}={budget}: not tuned, because nvidia-smi does not report how much memory there is."
        ]
        if _chooses_offload(cfg):
            notes.append(f"{_OFFLOAD_KEY}=null means all, because it is not known how much memory there is.")
        return cfg, notes
    changes, reason, offload_reason = _choose_changes(cfg, capacity, objective_spec)
    notes = [
        f"{key}={format_value(get_value(cfg, key))} -> {format_value(value)}: "
        f"{offload_reason if key == _OFFLOAD_KEY else reason}."
        for key, value in changes.items()
    ]
    return _changed(cfg, changes), notes


def _choose_changes(cfg: Config, capacity: int, objective_spec: ObjectiveSpec) -> tuple[dict[str, Any], str, str]:
    """Return the changes, the reason for them, and the reason for that of colocate_offload."""
    bound = f"{MAX_MEMORY_FRACTION:.0%} of {capacity / 2**30:.3g} GiB"
    reason = f"the fastest that fits into {bound} by the plan"
    reasons = {
        OffloadMode.NONE: f"engine and trainer fit together into {bound} by the plan, so nothing moves",
        OffloadMode.KV_CACHE: f"all but the engine's KV cache fits together into {bound} by the plan",
        OffloadMode.ALL: f"more does not fit together into {bound} by the plan",
    }
    candidates = list(_candidate_changes(cfg, capacity, objective_spec))
    largest = candidates[0].get(_TOKEN_BUDGET_KEY, 0)
    chooses_offload = _chooses_offload(cfg)
    for mode in reasons if chooses_offload else (offload_mode(cfg),):
        own = {_OFFLOAD_KEY: mode.value} if chooses_offload else {}
        for changes in candidates:
            # Recomputing all activations and very small micro-batches cost more than moving models.
            is_small = changes.get(_TOKEN_BUDGET_KEY, largest) < min(largest, _min_efficient_tokens(cfg))
            is_slow = changes.get(_CHECKPOINTING_KEY) is True or is_small
            if own and mode is not OffloadMode.ALL and is_slow:
                continue
            phases = LEARNER_PHASES if mode is OffloadMode.ALL or not own else PHASES
            if _peak(_changed(cfg, changes | own), capacity, objective_spec, phases) <= MAX_MEMORY_FRACTION * capacity:
                return changes | own, reason, reasons[mode]
    own = {_OFFLOAD_KEY: OffloadMode.ALL.value} if chooses_offload else {}
    return candidates[-1] | own, f"needs the least; no plan fits into {bound}", reasons[OffloadMode.ALL]


def _chooses_offload(cfg: Config) -> bool:
    """True if the memory plan decides what engines and models free for each other."""
    return shares_gpu_memory(cfg) and cfg.trainer.placement.colocate_offload is None


def plan_engine_cache(cfg: Config) -> CacheLimit | None:
    """Call `engine_cache_limit` for this machine's accelerators. Return None if no memory plan can be made."""
    try:
        return engine_cache_limit(cfg, memory_capacity(cfg.device))
    except Exception:  # the plan does not understand all free-form settings: see print_memory_plan
        return None


def fits_in_memory(cfg: Config) -> bool:
    """True if the memory plan fits this machine; also if there is no plan or the capacity is unknown."""
    capacity = memory_capacity(cfg.device)
    if capacity is None:
        return True
    try:
        return _fits(cfg, capacity, build_policy_objective_spec(cfg))
    except Exception:  # the plan does not understand all free-form settings: see print_memory_plan
        return True


def _fits(cfg: Config, capacity: int, objective_spec: ObjectiveSpec) -> bool:
    plans = memory_plan(cfg, capacity, objective_spec)
    peaks = [plan.peak()[0] for plan in plans]
    if cfg.device == "cuda":
        return max(peaks) <= MAX_MEMORY_FRACTION * capacity
    total = sum(plan.count * peak for plan, peak in zip(plans, peaks, strict=True))  # all slots share the host's memory
    return total <= MAX_MEMORY_FRACTION * capacity


def _choose_checkpointing_on_cpu(cfg: Config, capacity: int | None, objective_spec: ObjectiveSpec) -> Config:
    if cfg.trainer.gradient_checkpointing is not None:
        return cfg
    for mode in _checkpointing_modes(cfg):
        changed = replace_value(cfg, _CHECKPOINTING_KEY, mode)
        if capacity is not None and _fits(changed, capacity, objective_spec):
            return changed
    return replace_value(cfg, _CHECKPOINTING_KEY, True)


def _checkpointing_modes(cfg: Config) -> list[bool | str]:
    """Return the values of gradient_checkpointing that a run can have, the fastest first."""
    is_reentrant = cfg.trainer.gradient_checkpointing_use_reentrant
    return [mode for mode in CHECKPOINTING_MODES if mode != SELECTIVE or not is_reentrant]


def _candidate_changes(cfg: Config, capacity: int, objective_spec: ObjectiveSpec) -> Iterator[dict[str, Any]]:
    """Yield keys with their values, fastest first; at least one candidate."""
    reshard_keys, reduce_keys = [], []
    for model in model_ranks(cfg, capacity, objective_spec):
        section = f"trainer.{CONFIG_SECTIONS[model.role]}.fsdp_config"
        if model.fsdp is not None and model.fsdp.reshard_after_forward is None and model.num_shards == 1:
            reshard_keys.append(f"{section}.reshard_after_forward")
        if model.fsdp is not None and model.fsdp.reduce_once is None and model.role != "reference":
            reduce_keys.append(f"{section}.reduce_once")
    reshard_choices = (True, False) if reshard_keys else (False,)
    reduce_choices = (True, False) if reduce_keys else (False,)
    for (mode, tokens), keep_gathered, once in product(_modes_and_budgets(cfg), reshard_choices, reduce_choices):
        changes: dict[str, Any] = {} if tokens is None else {_TOKEN_BUDGET_KEY: tokens}
        changes |= {} if mode is None else {_CHECKPOINTING_KEY: mode}
        changes |= dict.fromkeys(reshard_keys if keep_gathered else (), False)
        yield changes | dict.fromkeys(reduce_keys, once)


def _modes_and_budgets(cfg: Config) -> Iterator[tuple[bool | str | None, int | None]]:
    """Yield values of gradient_checkpointing, None if it is configured, with token budgets; the fastest first."""
    budgets = _token_budgets(cfg)
    if cfg.trainer.gradient_checkpointing is not None:
        yield from ((None, tokens) for tokens in budgets)
        return
    efficient = [tokens for tokens in budgets if tokens is None or tokens >= _min_efficient_tokens(cfg)] or budgets[:1]
    for mode in _checkpointing_modes(cfg):
        yield from ((mode, tokens) for tokens in (budgets if mode is True else efficient))


def _min_efficient_tokens(cfg: Config) -> int:
    return MIN_EFFICIENT_TOKENS * _sequence_parallel_size(cfg)


def _sequence_parallel_size(cfg: Config) -> int:
    """Return the largest number of ranks that share a micro-batch's tokens."""
    trainer = cfg.trainer
    return max(section.sequence_parallel_size for section in (trainer.policy, trainer.ref, trainer.critic))


def _token_budgets(cfg: Config) -> list[int | None]:
    """Return token budgets, halved down to the longest sequence, which must fit in any case.

    [None] if a micro-batch size is configured or the loss depends on it.
    """
    trainer = cfg.trainer
    configured = (
        trainer.max_tokens_per_microbatch,
        trainer.micro_train_batch_size_per_gpu,
        trainer.micro_forward_batch_size_per_gpu,
    )
    # SkyRL's losses average over a micro-batch, so they depend on which sequences share one.
    depends_on_size = has_skyrl_signature(policy_losses.get(trainer.algorithm.policy_loss_type))
    if depends_on_size or any(size is not None for size in configured):
        return [None]
    max_length = max_sequence_length(cfg.generator)
    budgets = [MAX_MICRO_BATCH_TOKENS * _sequence_parallel_size(cfg)]
    while budgets[-1] // 2 > max_length:
        budgets.append(budgets[-1] // 2)
    return [*budgets, max_length] if max_length < budgets[-1] else [*budgets]


def _peak(cfg: Config, capacity: int, objective_spec: ObjectiveSpec, phases: Sequence[Phase]) -> int:
    """Return the bytes of the fullest accelerator of the learner's models in these phases."""
    plans = memory_plan(cfg, capacity, objective_spec)
    return max(
        plan.total(phase) for plan in plans for phase in phases if not CONFIG_SECTIONS.keys().isdisjoint(plan.roles)
    )


def _changed(cfg: Config, changes: dict[str, Any]) -> Config:
    for key, value in changes.items():
        cfg = replace_value(cfg, key, value)
    return cfg


# -- out of memory


def as_out_of_memory(
    error: Exception, cfg: Config, build_objective_spec: Callable[[Config], ObjectiveSpec] = build_policy_objective_spec
) -> OutOfMemory | None:
    """Convert an out-of-memory error to OutOfMemory with suggested settings; return None for any other error.

    Args:
        error: The error, possibly of another process.
        cfg: The configuration of the run.
        build_objective_spec: Function that decides which models the learner needs, for the suggestions.
    """
    has_oom_message = any(text in str(error) for text in _OOM_MESSAGES)
    first = next(iter(str(error).splitlines()), "")
    if isinstance(error, EnginesLost) and has_oom_message and shares_gpu_memory(cfg):
        return OutOfMemory(f"{first} {_engine_advice(cfg, build_objective_spec)}")
    if not (has_oom_message and isinstance(error, RuntimeError)) and type(error).__name__ != "OutOfMemoryError":
        return None
    where = getattr(error, "raised_in", "")
    advice = memory_saving_advice(cfg, build_objective_spec, _PHASES_OF_CALLS.get(where.rpartition(".")[2], PHASES))
    return OutOfMemory(f"{where + ': ' if where else ''}{first} {advice}")


def _engine_advice(cfg: Config, build_objective_spec: Callable[[Config], ObjectiveSpec]) -> str:
    """Return settings that leave colocated engines more memory, or let them need less."""
    with suppress(Exception):  # without a plan nothing was tuned
        cfg = _tuned(cfg, build_objective_spec(cfg))
    mode = offload_mode(cfg)
    more = "" if mode is OffloadMode.ALL else f"{_OFFLOAD_KEY}={OffloadMode.ALL} (it is {mode}) or "
    return (
        "The engines share GPUs with the trainer's models. "
        f"Set {more}a lower generator.gpu_memory_utilization (it is {cfg.generator.gpu_memory_utilization})."
    )


def memory_saving_advice(
    cfg: Config,
    build_objective_spec: Callable[[Config], ObjectiveSpec] = build_policy_objective_spec,
    phases: Sequence[Phase] = PHASES,
) -> str:
    """Return the settings that lower the policy's peak most, with the bytes that each saves according to the plan.

    Args:
        cfg: The configuration of the run.
        build_objective_spec: Function that decides which models the learner needs.
        phases: The phases that can have run out of memory. Only their peak counts.
    """
    try:
        objective_spec = build_objective_spec(cfg)
        cfg = _tuned(cfg, objective_spec)
        peak = _policy_peak(cfg, objective_spec, phases)
    except Exception as error:  # free-form settings, or a model that can no longer be read
        return f"Lower the tokens of a micro-batch; there is no memory plan ({type(error).__name__})."
    saved: dict[str, int] = {}
    for key, value in smaller_settings(cfg):
        smaller = replace_value(cfg, key, value)
        saved[f"{key}={str(value).lower()}"] = peak - _policy_peak(smaller, objective_spec, phases)
    saving = ((text.startswith(_OFFLOAD_KEY), size, text) for text, size in saved.items() if size > 0)
    best = [(size, text) for _, size, text in sorted(saving, reverse=True)[:MAX_SUGGESTIONS]]
    each = ", ".join(f"{text} saves about {size / 2**30:.3g} GiB" for size, text in best)
    planned = f"By the memory plan a rank of the policy needs {peak / 2**30:.3g} GiB"
    if not best:
        return f"{planned}, which no setting lowers: use more ranks or a smaller model."
    return f"{planned}: {each}."


def _tuned(cfg: Config, objective_spec: ObjectiveSpec) -> Config:
    """Return the configuration as it was tuned for the run."""
    return tune_to_memory(cfg, memory_capacity(cfg.device), objective_spec)[0]


def _policy_peak(cfg: Config, objective_spec: ObjectiveSpec, phases: Sequence[Phase]) -> int:
    plans = memory_plan(cfg, memory_capacity(cfg.device), objective_spec)
    return max(plan.total(phase) for plan in plans if "policy" in plan.name for phase in phases)


def smaller_settings(cfg: Config) -> Iterator[tuple[str, Any]]:
    """Yield keys and values that may need less memory than the configured ones."""
    trainer, generator = cfg.trainer, cfg.generator
    if trainer.max_tokens_per_microbatch is not None:
        yield "trainer.max_tokens_per_microbatch", max(1, trainer.max_tokens_per_microbatch // 2)
    else:
        for name in ("micro_train_batch_size_per_gpu", "micro_forward_batch_size_per_gpu"):
            if (size := getattr(trainer, name) or 1) > 1:
                yield f"trainer.{name}", size // 2
    if trainer.gradient_checkpointing is False:
        yield _CHECKPOINTING_KEY, _checkpointing_modes(cfg)[1]
    elif trainer.gradient_checkpointing == SELECTIVE:
        yield _CHECKPOINTING_KEY, True
    if trainer.strategy == "fsdp2":
        if trainer.policy.fsdp_config.reduce_once:
            yield "trainer.policy.fsdp_config.reduce_once", False
        if trainer.policy.fsdp_config.reshard_after_forward is False:
            yield "trainer.policy.fsdp_config.reshard_after_forward", True
        if not trainer.policy.fsdp_config.cpu_offload and cfg.device == "cuda":
            yield "trainer.policy.fsdp_config.cpu_offload", True
        yield "trainer.placement.policy_num_gpus_per_node", 2 * trainer.placement.policy_num_gpus_per_node
    if shares_gpu_memory(cfg) and offload_mode(cfg) is not OffloadMode.ALL:
        yield _OFFLOAD_KEY, OffloadMode.ALL.value
    if shares_gpu_memory(cfg) and generator.gpu_memory_utilization > 0.2:
        yield "generator.gpu_memory_utilization", round(generator.gpu_memory_utilization - 0.1, 2)
    if shares_gpu_memory(cfg) and generator.max_num_seqs > 1:
        yield "generator.max_num_seqs", generator.max_num_seqs // 2
    if (length := generator.sampling_params.max_generate_length) > 1:
        yield "generator.sampling_params.max_generate_length", length // 2
