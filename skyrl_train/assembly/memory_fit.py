"""Chooses what the configuration leaves open, the size of micro-batches and FSDP2's gathers, from a GPU's memory."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

from skyrl_train.algorithms.registry import policy_losses
from skyrl_train.algorithms.skyrl_style import is_skyrl_style
from skyrl_train.assembly.algorithm import Learning, policy_learning
from skyrl_train.assembly.capacity import capacity_of
from skyrl_train.assembly.memory_plan import LEARNING, longest_sequence, memory_plan, model_ranks
from skyrl_train.config.keys import value_at, with_value_at
from skyrl_train.config.problems import show
from skyrl_train.config.schema import Config
from skyrl_train.errors import ConfigError
from skyrl_train.messages import to_stderr

TOKENS = 1 << 14
"""Of a micro-batch, where there is room: enough for a GPU's matrix products to be limited by arithmetic."""
ROOM = 0.85
"""The part of an accelerator that a plan may fill; the rest is for the CUDA context, fragmentation, and estimates."""
_BUDGET = "trainer.max_tokens_per_microbatch"
_SECTIONS = {"policy": "policy", "reference": "ref", "critic": "critic"}
"""Role -> its section of trainer.*"""


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
    colocated, dedicated = model_ranks(cfg, capacity, learning)
    kept, reduced = [], []
    for model in (*colocated, *dedicated):
        section = f"trainer.{_SECTIONS[model.role]}.fsdp_config"
        if model.fsdp_config is not None and model.fsdp_config.reshard_after_forward is None and model.shard == 1:
            kept.append(f"{section}.reshard_after_forward")
        if model.fsdp_config is not None and model.fsdp_config.reduce_once is None and model.update is not None:
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
    longest, sections = longest_sequence(cfg), (trainer.policy, trainer.ref, trainer.critic)
    budgets = [TOKENS * max(section.sequence_parallel_size for section in sections)]  # which a group of ranks shares
    while budgets[-1] // 2 > longest:
        budgets.append(budgets[-1] // 2)
    return [*budgets, longest] if longest < budgets[-1] else [*budgets]


def _peak(cfg: Config, capacity: int, learning: Learning) -> int:
    """Bytes of the fullest accelerator while the learner's models compute there."""
    plans = memory_plan(cfg, capacity, learning)
    return max(plan.total(phase) for plan in plans for phase in LEARNING if not _SECTIONS.keys().isdisjoint(plan.roles))


def _changed(cfg: Config, changes: dict[str, Any]) -> Config:
    for key, value in changes.items():
        cfg = with_value_at(cfg, key, value)
    return cfg
