"""Warnings about keys that have no effect, SkyRL's ignored keys among them, and about numbers hardly any run has."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from skyrl_train.config.keys import Key, all_keys, leaves, value_at
from skyrl_train.config.problems import show
from skyrl_train.config.schema import Config

_MEGATRON = "Only Megatron reads it; here trainer.policy.fsdp_config and tensor_parallel_size divide models."
_OFFLOAD = "The whole trainer leaves the accelerator while engines generate, with trainer.placement.colocate_all=true."
_LOGPROBS = "The log-prob of every sampled token is always returned."

_TYPED_ESCAPE = re.compile(r"\\([nrt])")

IGNORED = {
    "trainer.policy.model.lora.lora_sync_path": "Engines get them, merged or not, by generator.weight_sync_route.",
    "trainer.policy.optimizer_config.offload_after_step": _OFFLOAD,
    "trainer.critic.optimizer_config.offload_after_step": _OFFLOAD,
    "trainer.policy.megatron_config": _MEGATRON,
    "trainer.ref.megatron_config": _MEGATRON,
    "trainer.log_path": "A run's logs and metrics are in its folder, trainer.ckpt_path.",
    "trainer.use_sample_packing": "Batches are always packed without padding.",
    "trainer.flash_attn": (
        "Attention without padding uses FlashAttention-3 where it is installed, else PyTorch's own kernels: flash "
        "attention wherever they have it."
    ),
    "generator.async_engine": "Engines always run asynchronously.",
    "generator.vllm_v1_disable_multiproc": "vLLM's scheduler always runs in the engine's own process.",
    "generator.fully_sharded_loras": "Say it to vLLM: generator.engine_init_kwargs.fully_sharded_loras.",
    "generator.enable_ray_prometheus_stats": "Engines' metrics are logged with the run's, under engines/.",
    "generator.override_existing_update_group": "A server leaves its weight group when a trainer connects.",
    "generator.external_proxy_url": "Requests go to the servers of external_server_urls, without a router.",
    "generator.sampling_params.logprobs": _LOGPROBS,
    "generator.eval_sampling_params.logprobs": _LOGPROBS,
}
"""SkyRL's keys and sections that are accepted and never have an effect -> what does it instead."""


def warnings(config: Config, defaults: Config) -> Iterator[str]:
    """Yield a line for each key that differs from its default if nothing reads it or if its number is unusual."""
    for name, key in leaves().items():
        value = value_at(config, name)
        if value in (_default(config, defaults, name), key.facts.skyrl_default):
            continue
        if advice := _why_not_read(config, name):
            yield f"{name}={show(value)} has no effect here. {advice}"
        elif (usual := key.facts.usual) is not None and value != 0 and value not in usual:
            yield f"{name}={show(value)} is unusual. Most runs use {usual.low:g} to {usual.high:g}; check the number."


def stop_warnings(config: Config) -> Iterator[str]:
    """Yield a line for each stop string with a typed escape, such as a backslash and an n, which no shell converts."""
    for name in ("sampling_params", "eval_sampling_params"):
        for text in getattr(config.generator, name).stop or []:
            if found := _TYPED_ESCAPE.search(text):
                yield (
                    f"generator.{name}.stop={show(text)}: it holds a backslash and the letter {found[1]}, which stay "
                    f"what they are. For a control character quote it as $'generator.{name}.stop=[\"\\{found[1]}\"]'."
                )


def evaluation_warnings(config: Config) -> Iterator[str]:
    """Yield a line for each setting with which an evaluation does not measure what it seems to measure."""
    generator, sampling = config.generator, config.generator.eval_sampling_params
    if not config.data.val_data:
        return
    samples = generator.eval_n_samples_per_prompt
    if samples > 1 and sampling.temperature == 0:
        yield (
            f"generator.eval_n_samples_per_prompt={samples} with generator.eval_sampling_params.temperature=0.0: all "
            "samples of a prompt are equal. Set it to 1, or the temperature above 0."
        )
    training, evaluation = generator.sampling_params.stop or [], sampling.stop or []
    if missing := [text for text in training if text not in evaluation]:
        yield (
            f"generator.eval_sampling_params.stop={show(sampling.stop)} lacks {show(missing)} of "
            "generator.sampling_params.stop: evaluation does not end turns where training does. Add them."
        )


def _why_not_read(config: Config, name: str) -> str | None:
    """The advice of the first reason for which a key has no effect; None if it has one.

    The section that the key is in is asked first, since it knows what the key belongs to; then the key itself, and then
    the sections around it, the outermost last.
    """
    around = list(_sections(name))
    for key in (*around[:1], leaves()[name], *around[1:]):
        if advice := IGNORED.get(key.name):
            return advice
        for need in key.facts.needs:
            if not need.holds(config):
                return need.advice
    return None


def _sections(name: str) -> Iterator[Key]:
    """The sections that a key is in, from the inside."""
    while name := name.rpartition(".")[0]:
        yield all_keys()[name]


def _default(config: Config, defaults: Config, name: str) -> Any:
    """What the key is when nobody sets it: if it follows another key, what that one is."""
    followed = str(leaves()[name].default).removeprefix("${").removesuffix("}")
    return value_at(config, followed) if followed in leaves() else value_at(defaults, name)
