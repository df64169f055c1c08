"""The root of the configuration, and every section under one name."""

from __future__ import annotations

from dataclasses import dataclass, field

from skyrl_train.config.algorithm import (
    AlgorithmConfig,
    CISPOConfig,
    ClipCovConfig,
    DynamicSamplingConfig,
    KLCovConfig,
    KLCtrlConfig,
    OffPolicyCorrectionConfig,
    SAPOConfig,
)
from skyrl_train.config.environment import (
    EnvironmentConfig,
    JudgeConfig,
    SearchConfig,
    SkyRLGymConfig,
    Text2SQLConfig,
)
from skyrl_train.config.generator import ChatTemplateConfig, EvalSamplingConfig, GeneratorConfig, SamplingConfig
from skyrl_train.config.model import (
    CriticConfig,
    CriticModelConfig,
    FSDPConfig,
    LoraConfig,
    MegatronConfig,
    MegatronDDPConfig,
    MegatronLoraConfig,
    MegatronProfilerConfig,
    ModelConfig,
    OptimizerConfig,
    PolicyConfig,
    PolicyMegatronConfig,
    RefConfig,
    RefModelConfig,
)
from skyrl_train.config.section import Section
from skyrl_train.config.trainer import FullyAsyncConfig, PlacementConfig, TimeoutsConfig, TrainerConfig

__all__ = [
    "AlgorithmConfig",
    "CISPOConfig",
    "ChatTemplateConfig",
    "ClipCovConfig",
    "Config",
    "CriticConfig",
    "CriticModelConfig",
    "DataConfig",
    "DynamicSamplingConfig",
    "EnvironmentConfig",
    "EvalSamplingConfig",
    "FSDPConfig",
    "FullyAsyncConfig",
    "GeneratorConfig",
    "JudgeConfig",
    "KLCovConfig",
    "KLCtrlConfig",
    "LoraConfig",
    "MegatronConfig",
    "MegatronDDPConfig",
    "MegatronLoraConfig",
    "MegatronProfilerConfig",
    "ModelConfig",
    "OffPolicyCorrectionConfig",
    "OptimizerConfig",
    "PlacementConfig",
    "PolicyConfig",
    "PolicyMegatronConfig",
    "RefConfig",
    "RefModelConfig",
    "SAPOConfig",
    "SamplingConfig",
    "SearchConfig",
    "SkyRLGymConfig",
    "Text2SQLConfig",
    "TimeoutsConfig",
    "TrainerConfig",
]


@dataclass
class DataConfig(Section):
    """What prompts are drawn from: parquet or jsonl files, or names of hub datasets."""

    train_data: list[str] = field(default_factory=lambda: ["${oc.env:HOME}/data/gsm8k/train.parquet"])
    """Training data."""
    val_data: list[str] = field(default_factory=lambda: ["${oc.env:HOME}/data/gsm8k/validation.parquet"])
    """Evaluation data."""


@dataclass
class Config(Section):
    """The whole configuration. Defaults and names are SkyRL's where SkyRL has the key."""

    data: DataConfig = field(default_factory=DataConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    generator: GeneratorConfig = field(default_factory=GeneratorConfig)
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    device: str = "auto"
    """`cpu`, `cuda`, or `auto`: CUDA where there is an accelerator, otherwise CPU with settings to match."""
