"""The root of the configuration, and every section under one name."""

from __future__ import annotations

from dataclasses import dataclass, field

from skyrl_train.config.algorithm import (
    AlgorithmConfig,
    CISPOConfig,
    ClipCovConfig,
    DPPOConfig,
    DynamicSamplingConfig,
    KLCovConfig,
    KLCtrlConfig,
    OffPolicyCorrectionConfig,
    OverlongBufferConfig,
    SAPOConfig,
    SFTConfig,
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
    DeepSpeedConfig,
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
    RewardConfig,
    RewardModelConfig,
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
    "CurriculumConfig",
    "DPPOConfig",
    "DataConfig",
    "DeepSpeedConfig",
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
    "OverlongBufferConfig",
    "PlacementConfig",
    "PolicyConfig",
    "PolicyMegatronConfig",
    "RefConfig",
    "RefModelConfig",
    "RewardConfig",
    "RewardModelConfig",
    "SAPOConfig",
    "SFTConfig",
    "SamplingConfig",
    "SearchConfig",
    "SkyRLGymConfig",
    "Text2SQLConfig",
    "TimeoutsConfig",
    "TrainerConfig",
]


@dataclass
class CurriculumConfig(Section):
    """Leaving out prompts that are too hard or too easy for now, by the share of samples with a reward of 1 or more.

    A prompt whose last share lies outside the range is left out the next time its turn comes, and drawn again the time
    after. The whole range leaves nothing out; otherwise `trainer.epochs` only says how many steps there are.
    """

    min_pass_rate: float = 0.0
    """Prompts that passed less often are left out."""
    max_pass_rate: float = 1.0
    """Prompts that passed more often are left out."""


@dataclass
class DataConfig(Section):
    """What prompts are drawn from: parquet or jsonl files, or names of hub datasets."""

    train_data: list[str] = field(default_factory=lambda: ["${oc.env:HOME}/data/gsm8k/train.parquet"])
    """Training data."""
    val_data: list[str] = field(default_factory=lambda: ["${oc.env:HOME}/data/gsm8k/validation.parquet"])
    """Evaluation data."""
    curriculum: CurriculumConfig = field(default_factory=CurriculumConfig)


@dataclass
class Config(Section):
    """The whole configuration. Defaults and names are SkyRL's where SkyRL has the key."""

    data: DataConfig = field(default_factory=DataConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    generator: GeneratorConfig = field(default_factory=GeneratorConfig)
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    device: str = "auto"
    """`cpu`, `cuda`, or `auto`: CUDA where there is an accelerator, otherwise CPU with settings to match."""
