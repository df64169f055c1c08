"""Post-training of language models with reinforcement learning.

All names that your own programs need are imported from here. They are loaded on first use:

    import skyrl_train as sk

    cfg = sk.load_config({"trainer.policy.model.path": "Qwen/Qwen2.5-0.5B-Instruct", "trainer.max_steps": 20})
    sk.train(cfg)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from skyrl_train.lazy_imports import lazy_exports, names_for_type_checkers

if TYPE_CHECKING:
    from skyrl_train import register as register  # type: ignore[attr-defined]
    from skyrl_train.agents.agent_session import AgentSession as AgentSession
    from skyrl_train.agents.commands import CommandResult as CommandResult
    from skyrl_train.agents.sandboxes import AgentSandbox as AgentSandbox
    from skyrl_train.api import (
        TrainingResult as TrainingResult,
        check as check,
        engine as engine,
        load_config as load_config,
        read_rollouts as read_rollouts,
        session as session,
        train as train,
    )
    from skyrl_train.config.schema import Config as Config
    from skyrl_train.data.dataset import PromptDataset as PromptDataset
    from skyrl_train.data.messages import Prompt as Prompt
    from skyrl_train.data.reasoning import final_answer as final_answer
    from skyrl_train.data.trajectory import Trajectory as Trajectory, TrajectoryGroup as TrajectoryGroup
    from skyrl_train.engines.base import (
        Completion as Completion,
        InferenceEngine as InferenceEngine,
        SampleRequest as SampleRequest,
        SamplingParams as SamplingParams,
    )
    from skyrl_train.environments.base import BaseTextEnv as BaseTextEnv, StepOutput as StepOutput, TextEnv as TextEnv
    from skyrl_train.environments.tools.base import Tool as Tool, ToolBox as ToolBox, ToolError as ToolError
    from skyrl_train.environments.tools.parsers import parse_calls as parse_calls
    from skyrl_train.environments.tools.registry import make_tool as make_tool
    from skyrl_train.errors import (
        CheckpointError as CheckpointError,
        ConfigError as ConfigError,
        DeadlineExceeded as DeadlineExceeded,
        EngineError as EngineError,
        EnvironmentFailure as EnvironmentFailure,
        RolloutsFailed as RolloutsFailed,
        SkyRLError as SkyRLError,
        WeightSyncError as WeightSyncError,
    )
    from skyrl_train.experiment.base import (
        Experiment as Experiment,
        Session as Session,
        run_experiment as run_experiment,
    )
    from skyrl_train.report.protocol import Tracker as Tracker, TrackerSetup as TrackerSetup

__version__ = "0.1.0"

if not TYPE_CHECKING:  # otherwise mypy would accept every misspelled name
    __getattr__, __dir__, __all__ = lazy_exports(__name__, names_for_type_checkers(__file__))
