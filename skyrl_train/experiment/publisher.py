"""The weight syncs of a run: what its configuration and its engines decide about them."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

from skyrl_train.config.predicates import prefers_adapter_sync, resolve_weight_sync_route, shares_gpu_memory
from skyrl_train.config.schema import Config
from skyrl_train.data.chat import render_prompt
from skyrl_train.data.dataset import PromptDataset
from skyrl_train.data.messages import get_chat_template_kwargs
from skyrl_train.errors import ConfigError
from skyrl_train.experiment.placement import weight_folder
from skyrl_train.experiment.run_resources import RolloutResources
from skyrl_train.learner.learner import Learner
from skyrl_train.trainer.publisher import WeightPublisher
from skyrl_train.weight_sync.sync import PROBE_TOLERANCE, Probe, WeightSync

log = logging.getLogger(__name__)
HALF_PRECISION_PROBE_TOLERANCE = 0.25
"""In nats; it is this large because bfloat16 engines and trainers round differently in every layer."""
HALF_PRECISION_MEAN_TOLERANCE = 0.1
"""In nats, of the mean over the probe's tokens: docs/engines.md has what was measured."""
PROBE_SEQUENCES = 4
PROBE_TOKENS = 64
"""Tokens per sequence of the log-prob probe, whose sequences are the beginnings of the first training prompts."""


def build_publisher(running: RolloutResources, tokenizer: Any, train_dataset: PromptDataset) -> WeightPublisher:
    """Return the weight syncs that generator.weight_sync_* configure, with the restarts of engines.

    Raises:
        ConfigError: An engine cannot take adapters apart from the model, pause as configured, or share memory.
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
    )
    return WeightPublisher(
        learner,
        client,
        weight_sync,
        running.engine_launcher.restart,
        max_engine_restarts=cfg.generator.max_engine_restarts,
        pause_mode=pause_mode(cfg, client.engines),
        engines_colocated=base.placement.engines_colocated,
        shares_accelerator=shares_gpu_memory(cfg),
    )


def choose_route(cfg: Config, engines: Sequence[Any], *, is_single_node: bool = True) -> str:
    """`weight_route`, or "checkpoint" (files) if that is chosen by itself and an engine does not support it.

    Raises ConfigError for shared memory that is configured, on a CPU, and policy and engines on several nodes.
    """
    if cfg.generator.weight_sync_route == "ipc" and cfg.device == "cpu" and not is_single_node:
        raise ConfigError(
            "generator.weight_sync_route=ipc: policy and engines are on several nodes, which share no memory; use "
            "auto, broadcast or checkpoint."
        )
    route = resolve_weight_sync_route(cfg, is_single_node=is_single_node)
    if route != "broadcast" or cfg.generator.weight_sync_route != "auto":
        return route
    return route if all(route in one.capabilities.weight_routes for one in engines) else "checkpoint"


def sends_adapter(cfg: Config, engines: Sequence[Any]) -> bool:
    """Whether engines get adapters instead of merged weights.

    Raises ConfigError if that is required (lora.sync=adapter) and an engine cannot take them.
    """
    lora = cfg.trainer.policy.model.lora
    if not prefers_adapter_sync(cfg):
        return False
    unable = [one.capabilities for one in engines if one.capabilities.synced_adapter_rank < lora.rank]
    if unable and lora.sync == "adapter":
        most = unable[0].synced_adapter_rank
        can = f"takes ranks up to {most}" if most else unable[0].refusals.get("adapter", "takes none").rstrip(".")
        raise ConfigError(
            f"trainer.policy.model.lora.sync=adapter: engine {unable[0].name!r} cannot take an adapter of rank "
            f"{lora.rank} apart from its model: {can}. Set trainer.policy.model.lora.sync=merged."
        )
    return not unable


PAUSE_MODES = {"keep": "keep", "recompute": "retract", "abort": "abort"}
"""trainer.fully_async.on_sync -> how engines pause."""


def pause_mode(cfg: Config, engines: Sequence[Any]) -> str | None:
    """How requests under way are paused for a sync; None without fully_async, where there are none.

    Raises ConfigError if an engine cannot do that.
    """
    if not cfg.trainer.fully_async.enabled:
        return None
    chosen = cfg.trainer.fully_async.on_sync
    for one in engines:
        able = one.capabilities.pause_modes
        if PAUSE_MODES[chosen] not in able:
            can = ", ".join(name for name, mode in PAUSE_MODES.items() if mode in able) or "none of them"
            raise ConfigError(
                f"trainer.fully_async.on_sync={chosen}: engine {one.capabilities.name!r} cannot pause in this way; it "
                f"can: {can}."
            )
        if chosen == "abort" and not one.capabilities.seeds:
            log.warning(
                f"trainer.fully_async.on_sync=abort: engine {one.capabilities.name!r} takes no seeds, so that what a "
                "sync ends is another answer when it begins anew, and long ones become rarer. Set recompute, which "
                "keeps what there is."
            )
    return PAUSE_MODES[chosen]


def _probe_ids(cfg: Config, tokenizer: Any, train_dataset: PromptDataset) -> list[list[int]]:
    """Return the beginnings of the first training prompts as token ids."""
    kwargs, prompts = cfg.generator.chat_template_kwargs, train_dataset.prompts[:PROBE_SEQUENCES]
    rendered = (
        render_prompt(tokenizer, one.messages, get_chat_template_kwargs(one.env_extras, kwargs)) for one in prompts
    )
    return [ids[:PROBE_TOKENS] for ids in rendered]


def build_probe(cfg: Config, learner: Learner, probe_ids: Sequence[Sequence[int]]) -> Probe | None:
    """Return the probe of every sync if it is configured, else that of the first sync in half precision.

    In float32 nothing but a configured probe compares log-probs: None.
    """
    check, half = cfg.generator.weight_sync_check, cfg.trainer.bf16 or cfg.generator.model_dtype != "float32"
    token_ids = [ids for ids in probe_ids if len(ids) > 1]
    if not token_ids or (check != "probe" and (check == "off" or not half)):
        return None
    largest = HALF_PRECISION_PROBE_TOLERANCE if half else PROBE_TOLERANCE
    return Probe(
        token_ids=token_ids,
        compute_trainer_logprobs=learner.sequence_logprobs,
        tolerance=largest if check == "probe" else math.inf,
        mean_tolerance=HALF_PRECISION_MEAN_TOLERANCE if half else math.inf,
        every_sync=check == "probe",
        self_test=check == "probe",
        offload_trainer=learner.offloaded if shares_gpu_memory(cfg) else nullcontext,
    )
