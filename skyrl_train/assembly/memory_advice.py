"""What to change when memory ran out: the settings that lower the memory plan most."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from skyrl_train.assembly.algorithm import Learning, policy_learning
from skyrl_train.assembly.capacity import capacity_of
from skyrl_train.assembly.memory_fit import fit
from skyrl_train.assembly.memory_plan import memory_plan
from skyrl_train.config.keys import with_value_at
from skyrl_train.config.schema import Config
from skyrl_train.errors import OutOfMemory

NAMED = 3
"""How many settings are named."""
_SAYS_SO = ("can't allocate memory", "CUDA out of memory")


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
        peak = _peak(cfg, learns)
    except Exception as error:  # free-form settings, or a model that cannot be read any more
        return f"Lower the tokens of a micro-batch; there is no memory plan ({type(error).__name__})."
    saved: dict[str, int] = {}
    for key, value in _candidates(cfg):
        saved[f"{key}={str(value).lower()}"] = peak - _peak(with_value_at(cfg, key, value), learns)
    best = sorted(((size, text) for text, size in saved.items() if size > 0), reverse=True)[:NAMED]
    each = ", ".join(f"{text} saves about {size / 2**30:.3g} GiB" for size, text in best)
    planned = f"The plan of a slot of the policy is {peak / 2**30:.3g} GiB"
    if not best:
        return f"{planned}, which no setting lowers: take more ranks or a smaller model."
    return f"{planned}: {each}."


def _peak(cfg: Config, learning: Learning) -> int:
    plans = memory_plan(cfg, capacity_of(cfg.device), learning)
    return max(plan.peak()[0] for plan in plans if "policy" in plan.name)


def _candidates(cfg: Config) -> Iterator[tuple[str, Any]]:
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
    if cfg.device == "cuda" and trainer.placement.colocate_all and generator.gpu_memory_utilization > 0.2:
        yield "generator.gpu_memory_utilization", round(generator.gpu_memory_utilization - 0.1, 2)
    if (length := generator.sampling_params.max_generate_length) > 1:
        yield "generator.sampling_params.max_generate_length", length // 2
