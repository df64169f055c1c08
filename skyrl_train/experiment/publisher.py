"""The weight syncs of a run, from its configuration and the capabilities of its engines."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

from skyrl_train.config.predicates import prefers_adapter_sync, resolve_weight_sync_route
from skyrl_train.config.schema import Config
from skyrl_train.data.chat import render_prompt
from skyrl_train.data.dataset import PromptDataset
from skyrl_train.data.messages import get_chat_template_kwargs
from skyrl_train.errors import ConfigError
from skyrl_train.experiment.placement import weight_folder
from skyrl_train.experiment.run_resources import RolloutResources
from skyrl_train.learner.learner import Learner
from skyrl_train.trainer.offload_manager import OffloadManager
from skyrl_train.trainer.publisher import WeightPublisher
from skyrl_train.weight_sync.sync import PROBE_TOLERANCE, Probe, WeightSync

log = logging.getLogger(__name__)
HALF_PRECISION_PROBE_TOLERANCE = 0.25
"""Largest accepted log-prob difference in nats. It is large because bfloat16 engines and trainers round differently in
every layer."""
HALF_PRECISION_MEAN_TOLERANCE = 0.1
"""Largest accepted mean difference in nats over the probe's tokens. See docs/concepts/weight_sync.md."""
PROBE_SEQUENCES = 4
PROBE_TOKENS = 64
"""Maximum tokens per sequence of the log-prob probe. The sequences are the beginnings of the first training prompts."""


def build_publisher(
    running: RolloutResources, tokenizer: Any, train_dataset: PromptDataset, offload_manager: OffloadManager
) -> WeightPublisher:
    """Return the publisher of weights that generator.weight_sync_* configure. It also restarts engines.

    Args:
        running: The started engines and learner.
        tokenizer: The policy's tokenizer.
        train_dataset: The training prompts, whose first ones become the probe's sequences.
        offload_manager: Moves engines and learner onto or off accelerators that they share.

    Raises:
        ConfigError: An engine cannot load adapters separately from the model, pause as configured, or share memory.
    """
    base, client = running.base, running.client
    cfg, learner = base.cfg, base.learner
    assert learner is not None
    weight_sync = WeightSync(
        learner.policy,
        lambda: client.engines,
        route=choose_route(cfg, client.engines, is_single_node=base.placement.is_single_node),
        folder=weight_folder(cfg),
        deadline_s=cfg.trainer.timeouts.weight_sync_s,
        probe=build_probe(cfg, learner, _probe_ids(cfg, tokenizer, train_dataset)),
        adapter_only=sends_adapter(cfg, client.engines),
        memory=offload_manager,
    )
    return WeightPublisher(
        learner,
        client,
        weight_sync,
        running.engine_launcher.restart,
        max_engine_restarts=cfg.generator.max_engine_restarts,
        pause_mode=pause_mode(cfg, client.engines),
        offload_manager=offload_manager,
    )


def choose_route(cfg: Config, engines: Sequence[Any], *, is_single_node: bool = True) -> str:
    """Return the route of weight syncs.

    This is generator.weight_sync_route. With `auto` it is "checkpoint" (files) if an engine does not support the route
    that would be chosen.

    Args:
        cfg: The configuration.
        engines: The engines of the run.
        is_single_node: True if policy and engines run on one node.

    Raises:
        ConfigError: The route "ipc" is configured on CPUs, but policy and engines run on several nodes.
    """
    if cfg.generator.weight_sync_route == "ipc" and cfg.device == "cpu" and not is_single_node:
        raise ConfigError(
            "generator.weight_sync_route=ipc: policy and engines run on several nodes, which cannot share memory. Use "
            "auto, broadcast or checkpoint."
        )
    route = resolve_weight_sync_route(cfg, is_single_node=is_single_node)
    if route != "broadcast" or cfg.generator.weight_sync_route != "auto":
        return route
    return route if all(route in engine.capabilities.weight_routes for engine in engines) else "checkpoint"


def sends_adapter(cfg: Config, engines: Sequence[Any]) -> bool:
    """True if engines receive the LoRA adapter instead of merged weights.

    Raises:
        ConfigError: lora.sync=adapter requires it, but an engine cannot load an adapter of that rank.
    """
    lora = cfg.trainer.policy.model.lora
    if not prefers_adapter_sync(cfg):
        return False
    unable = [engine.capabilities for engine in engines if engine.capabilities.synced_adapter_rank < lora.rank]
    if unable and lora.sync == "adapter":
        max_rank = unable[0].synced_adapter_rank
        reason = (
            f"it supports ranks up to {max_rank}"
            if max_rank
            else unable[0].refusals.get("adapter", "it supports none").rstrip(".")
        )
        raise ConfigError(
            f"trainer.policy.model.lora.sync=adapter: engine {unable[0].name!r} cannot load an adapter of rank "
            f"{lora.rank} separately from its model: {reason}. Set trainer.policy.model.lora.sync=merged."
        )
    return not unable


PAUSE_MODES = {"keep": "keep", "recompute": "retract", "abort": "abort"}
"""trainer.fully_async.on_sync -> the pause mode of engines."""


def pause_mode(cfg: Config, engines: Sequence[Any]) -> str | None:
    """Return how engines pause running requests for a sync; None in synchronous training, where there are none.

    Logs a warning if aborted requests restart with other samples because an engine does not support seeds.

    Raises:
        ConfigError: An engine does not support the mode of trainer.fully_async.on_sync.
    """
    if not cfg.trainer.fully_async.enabled:
        return None
    on_sync = cfg.trainer.fully_async.on_sync
    for engine in engines:
        supported = engine.capabilities.pause_modes
        if PAUSE_MODES[on_sync] not in supported:
            choices = ", ".join(name for name, mode in PAUSE_MODES.items() if mode in supported) or "none"
            raise ConfigError(
                f"trainer.fully_async.on_sync={on_sync}: engine {engine.capabilities.name!r} cannot pause in this way. "
                f"It supports: {choices}."
            )
        if on_sync == "abort" and not engine.capabilities.seeds:
            log.warning(
                f"trainer.fully_async.on_sync=abort: engine {engine.capabilities.name!r} does not support seeds. A "
                "request that a sync aborts is sampled again with another result, so long answers become rarer. Set "
                "trainer.fully_async.on_sync=recompute, which keeps the tokens sampled so far."
            )
    return PAUSE_MODES[on_sync]


def _probe_ids(cfg: Config, tokenizer: Any, train_dataset: PromptDataset) -> list[list[int]]:
    """Return the beginnings of the first training prompts as token ids."""
    kwargs, prompts = cfg.generator.chat_template_kwargs, train_dataset.prompts[:PROBE_SEQUENCES]
    rendered = (
        render_prompt(tokenizer, prompt.messages, get_chat_template_kwargs(prompt.env_extras, kwargs))
        for prompt in prompts
    )
    return [ids[:PROBE_TOKENS] for ids in rendered]


def build_probe(cfg: Config, learner: Learner, probe_ids: Sequence[Sequence[int]]) -> Probe | None:
    """Return the log-prob probe of weight syncs; None if log-probs are not compared.

    The probe runs after every sync with generator.weight_sync_check=probe. Otherwise, unless the check is off, it runs
    once after the first sync in half precision, without a limit for single tokens.

    Args:
        cfg: The configuration.
        learner: Computes the trainer's log-probs.
        probe_ids: Token ids of the sequences; those of a single token are ignored.
    """
    check, half = cfg.generator.weight_sync_check, cfg.trainer.bf16 or cfg.generator.model_dtype != "float32"
    token_ids = [ids for ids in probe_ids if len(ids) > 1]
    if not token_ids or (check != "probe" and (check == "off" or not half)):
        return None
    tolerance = HALF_PRECISION_PROBE_TOLERANCE if half else PROBE_TOLERANCE
    return Probe(
        token_ids=token_ids,
        compute_trainer_logprobs=learner.sequence_logprobs,
        tolerance=tolerance if check == "probe" else math.inf,
        mean_tolerance=HALF_PRECISION_MEAN_TOLERANCE if half else math.inf,
        every_sync=check == "probe",
        self_test=check == "probe",
    )
