"""The root of the configuration, and every section under one name."""

from __future__ import annotations

from dataclasses import dataclass

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
from skyrl_train.config.fields import key
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
    PolicyLoraConfig,
    PolicyMegatronConfig,
    RefConfig,
    RefDeepSpeedConfig,
    RefModelConfig,
    RewardConfig,
    RewardModelConfig,
)
from skyrl_train.config.ranges import FRACTION
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
    "PolicyLoraConfig",
    "PolicyMegatronConfig",
    "RefConfig",
    "RefDeepSpeedConfig",
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
    """Leave out prompts that are too hard or too easy for now.

    The pass rate of a prompt is the share of its samples with a reward of 1 or more. A prompt whose last pass rate lies
    outside the range is left out the next time its turn comes, and drawn again the time after. The range from 0 to 1
    leaves nothing out; with any other, `trainer.epochs` only determines the number of steps.
    """

    min_pass_rate: float = key(0.0, range=FRACTION)
    """Prompts with a lower pass rate are left out."""
    max_pass_rate: float = key(1.0, range=FRACTION)
    """Prompts with a higher pass rate are left out."""


@dataclass
class DataConfig(Section):
    """Where prompts are drawn from: parquet or jsonl files, folders, or names of hub datasets. Files and folders may be
    at addresses, s3://bucket/file or file:///file: see docs/storage.md."""

    train_data: list[str] = key(factory=lambda: ["${oc.env:HOME}/data/gsm8k/train.parquet"])
    """Training data."""
    val_data: list[str] = key(factory=lambda: ["${oc.env:HOME}/data/gsm8k/validation.parquet"])
    """Evaluation data."""
    curriculum: CurriculumConfig = key(factory=CurriculumConfig)


@dataclass
class Config(Section):
    """The whole configuration. Names and defaults are SkyRL's for every key that SkyRL has."""

    data: DataConfig = key(factory=DataConfig)
    trainer: TrainerConfig = key(factory=TrainerConfig)
    generator: GeneratorConfig = key(factory=GeneratorConfig)
    environment: EnvironmentConfig = key(factory=EnvironmentConfig)
    device: str = key("auto", choices=("auto", "cpu", "cuda"))
    """`cpu`, `cuda`, or `auto`: CUDA if there is an accelerator, otherwise CPU with settings to match."""
