"""What the configuration says about weight syncs: who needs what, and what they leave behind."""

from __future__ import annotations

from skyrl_train.config.schema import Config


def shares_memory(cfg: Config) -> bool:
    """Whether engines and learner take turns on the same accelerators."""
    return cfg.device == "cuda" and cfg.trainer.placement.colocate_all and cfg.generator.run_engines_locally


def wants_adapter(cfg: Config) -> bool:
    """Whether engines that support it should get the policy's adapter separately instead of merged into the model.

    `auto`: only if merging into the engines' dtype would round most of the adapter away. In float32 it does not, and
    merged weights are served faster.
    """
    lora = cfg.trainer.policy.model.lora
    wanted = {"adapter": True, "merged": False, "auto": cfg.generator.model_dtype != "float32"}
    return lora.rank > 0 and wanted[lora.sync]


def replaces_weights(cfg: Config) -> bool:
    """Whether every sync replaces all that an engine holds as weights, so that it need not keep them until then.

    It does not where only changes are sent, nor does it replace adapters that an engine has a place for.
    """
    generator = cfg.generator
    partial = generator.weight_sync_only_changed or wants_adapter(cfg)
    return shares_memory(cfg) and not partial and "max_lora_rank" not in generator.engine_init_kwargs


def sleep_level(cfg: Config) -> int:
    """How deeply engines sleep until a sync: at 2 they give up their weights, of which vLLM would keep a copy at 1."""
    return 2 if replaces_weights(cfg) else 1
