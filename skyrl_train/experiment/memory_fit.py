"""Adapts a run to an accelerator's memory: what the configuration leaves open, and what to change if memory ran out.

Chosen are the size of micro-batches and FSDP2's gathers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

from skyrl_train.algorithms.registry import policy_losses
from skyrl_train.algorithms.skyrl_style import is_skyrl_style
from skyrl_train.config.keys import value_at, with_value_at
from skyrl_train.config.predicates import longest_sequence, shares_memory
from skyrl_train.config.problems import show
from skyrl_train.config.schema import Config
from skyrl_train.errors import ConfigError, OutOfMemory
from skyrl_train.experiment.algorithm import Learning, policy_learning
from skyrl_train.experiment.memory_plan import LEARNING, SECTIONS, capacity_of, memory_plan, model_ranks
from skyrl_train.messages import to_stderr

TOKENS = 1 << 14
"""Of a micro-batch, where there is room: enough for a GPU's matrix products to be limited by arithmetic."""
ROOM = 0.85
"""The part of an accelerator that a plan may fill; the rest is for the CUDA context, fragmentation, and estimates."""
_BUDGET = "trainer.max_tokens_per_microbatch"
NAMED = 3
"""How many settings are named."""
_SAYS_SO = ("can't allocate memory", "CUDA out of memory")


def announce_fit(cfg: Config, learning: Learning) -> Config:
    """`fit` to this machine's accelerators, with its notes on stderr.

    A model whose memory cannot be planned keeps its configuration, as its plan is only a forecast.
    """
    try:
        cfg, notes = fit(cfg, capacity_of(cfg.device), learning)
    except ConfigError:
        raise
    except Exception as error:
        why = f"not chosen, as there is no plan ({type(error).__name__}: {error})"
        notes = [f"{_BUDGET}={show(cfg.trainer.max_tokens_per_microbatch)}: {why}"]
    for note in notes:
        to_stderr(f"note: {note}")
    return cfg


def fit(cfg: Config, capacity: int | None, learning: Learning) -> tuple[Config, list[str]]:
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
        budget = show(cfg.trainer.max_tokens_per_microbatch)
        return cfg, [f"{_BUDGET}={budget}: nothing is chosen by memory, as nvidia-smi does not say how much there is."]
    changes: dict[str, Any] = {}
    for changes in _ways(cfg, capacity, learning):
        if _peak(_changed(cfg, changes), capacity, learning) <= ROOM * capacity:
            reason = f"the fastest that the plan fits into {ROOM:.0%} of {capacity / 2**30:.3g} GiB"
            break
    else:
        reason = f"needs least; no plan fits into {ROOM:.0%} of {capacity / 2**30:.3g} GiB"
    notes = [f"{key}={show(value_at(cfg, key))} -> {show(value)}: {reason}." for key, value in changes.items()]
    return _changed(cfg, changes), notes


def fits(cfg: Config) -> bool:
    """Whether the memory plan leaves room on this machine; true if there is no plan."""
    capacity = capacity_of(cfg.device)
    if capacity is None:
        return True
    try:
        plans = memory_plan(cfg, capacity, policy_learning(cfg))
    except Exception:  # free-form settings, as in memory_plan.announce
        return True
    peaks = [plan.peak()[0] for plan in plans]
    if cfg.device == "cuda":
        return max(peaks) <= ROOM * capacity
    return sum(plan.count * peak for plan, peak in zip(plans, peaks, strict=True)) <= ROOM * capacity  # all in one


def _ways(cfg: Config, capacity: int, learning: Learning) -> Iterator[dict[str, Any]]:
    """Keys and their values, fastest first; at least one."""
    kept, reduced = [], []
    for model in model_ranks(cfg, capacity, learning):
        section = f"trainer.{SECTIONS[model.role]}.fsdp_config"
        if model.fsdp is not None and model.fsdp.reshard_after_forward is None and model.shard == 1:
            kept.append(f"{section}.reshard_after_forward")
        if model.fsdp is not None and model.fsdp.reduce_once is None and model.role != "reference":
            reduced.append(f"{section}.reduce_once")
    keeps, reduces = (True, False) if kept else (False,), (True, False) if reduced else (False,)
    for tokens, keep, once in product(_budgets(cfg), keeps, reduces):
        changes: dict[str, Any] = {} if tokens is None else {_BUDGET: tokens}
        changes |= dict.fromkeys(kept if keep else (), False)
        yield changes | dict.fromkeys(reduced, once)


def _budgets(cfg: Config) -> list[int | None]:
    """Halved down to the longest sequence, which has to fit in any case. None: micro-batches are as configured."""
    trainer = cfg.trainer
    configured = (
        trainer.max_tokens_per_microbatch,
        trainer.micro_train_batch_size_per_gpu,
        trainer.micro_forward_batch_size_per_gpu,
    )
    # The mean over a micro-batch that SkyRL's losses take depends on which sequences share one.
    alone = is_skyrl_style(policy_losses.get(trainer.algorithm.policy_loss_type))
    if alone or any(size is not None for size in configured):
        return [None]
    longest, sections = longest_sequence(cfg.generator), (trainer.policy, trainer.ref, trainer.critic)
    budgets = [TOKENS * max(section.sequence_parallel_size for section in sections)]  # which a group of ranks shares
    while budgets[-1] // 2 > longest:
        budgets.append(budgets[-1] // 2)
    return [*budgets, longest] if longest < budgets[-1] else [*budgets]


def _peak(cfg: Config, capacity: int, learning: Learning) -> int:
    """Bytes of the fullest accelerator while the learner's models compute there."""
    plans = memory_plan(cfg, capacity, learning)
    return max(plan.total(phase) for plan in plans for phase in LEARNING if not SECTIONS.keys().isdisjoint(plan.roles))


def _changed(cfg: Config, changes: dict[str, Any]) -> Config:
    for key, value in changes.items():
        cfg = with_value_at(cfg, key, value)
    return cfg


# -- out of memory


def out_of_memory(
    error: Exception, cfg: Config, learning: Callable[[Config], Learning] = policy_learning
) -> OutOfMemory | None:
    """What to raise if an exception of torch's says that there is no memory left, on an accelerator or a CPU."""
    says_so = isinstance(error, RuntimeError) and any(text in str(error) for text in _SAYS_SO)
    if not says_so and type(error).__name__ != "OutOfMemoryError":
        return None
    where = getattr(error, "raised_in", "")
    first = next(iter(str(error).splitlines()), "")
    return OutOfMemory(f"{where + ': ' if where else ''}{first} {advice(cfg, learning)}")


def advice(cfg: Config, learning: Callable[[Config], Learning] = policy_learning) -> str:
    """The settings that lower the peak of the policy's slots most, with what the plan says that each would save."""
    try:
        learns = learning(cfg)
        cfg, _ = fit(cfg, capacity_of(cfg.device), learns)  # as the run was
        peak = _policy_peak(cfg, learns)
    except Exception as error:  # free-form settings, or a model that cannot be read any more
        return f"Lower the tokens of a micro-batch; there is no memory plan ({type(error).__name__})."
    saved: dict[str, int] = {}
    for key, value in smaller_settings(cfg):
        saved[f"{key}={str(value).lower()}"] = peak - _policy_peak(with_value_at(cfg, key, value), learns)
    best = sorted(((size, text) for text, size in saved.items() if size > 0), reverse=True)[:NAMED]
    each = ", ".join(f"{text} saves about {size / 2**30:.3g} GiB" for size, text in best)
    planned = f"The plan of a slot of the policy is {peak / 2**30:.3g} GiB"
    if not best:
        return f"{planned}, which no setting lowers: take more ranks or a smaller model."
    return f"{planned}: {each}."


def _policy_peak(cfg: Config, learning: Learning) -> int:
    plans = memory_plan(cfg, capacity_of(cfg.device), learning)
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
    if shares_memory(cfg) and generator.gpu_memory_utilization > 0.2:
        yield "generator.gpu_memory_utilization", round(generator.gpu_memory_utilization - 0.1, 2)
    if (length := generator.sampling_params.max_generate_length) > 1:
        yield "generator.sampling_params.max_generate_length", length // 2
