"""Tables of everything built in that a configuration chooses by name: name -> "module:object".

An object is imported when its name is first used. The registries of the packages that define these objects are built on
these tables, so each name is written once.
"""

from __future__ import annotations

from enum import StrEnum

ADVANTAGE_ESTIMATORS = {
    "grpo": "skyrl_train.algorithms.advantages:grpo",
    "dr_grpo": "skyrl_train.algorithms.advantages:dr_grpo",
    "rloo": "skyrl_train.algorithms.advantages:rloo",
    "reinforce++": "skyrl_train.algorithms.advantages:reinforce_pp",
    "reinforce++_baseline": "skyrl_train.algorithms.advantages:reinforce_pp_baseline",
    "gae": "skyrl_train.algorithms.advantages:gae",
    "maxrl": "skyrl_train.algorithms.advantages:maxrl",
    "opo": "skyrl_train.algorithms.advantages:opo",
    "distillation": "skyrl_train.algorithms.advantages:distillation",
}

POLICY_LOSSES = {
    "regular": "skyrl_train.algorithms.losses:clipped_surrogate",
    "dual_clip": "skyrl_train.algorithms.losses:dual_clip",
    "gspo": "skyrl_train.algorithms.losses:gspo",
    "gmpo": "skyrl_train.algorithms.losses:gmpo",
    "cispo": "skyrl_train.algorithms.losses:cispo",
    "sapo": "skyrl_train.algorithms.losses:sapo",
    "clip_cov": "skyrl_train.algorithms.losses:clip_cov",
    "kl_cov": "skyrl_train.algorithms.losses:kl_cov",
    "dppo_tv": "skyrl_train.algorithms.losses:dppo_tv",
    "dppo_kl": "skyrl_train.algorithms.losses:dppo_kl",
    "rollout_is": "skyrl_train.algorithms.losses:rollout_is",
    "importance_sampling": "skyrl_train.algorithms.losses:importance_sampling",
    "cross_entropy": "skyrl_train.algorithms.losses:cross_entropy",
}

KL_ESTIMATORS = {
    "k1": "skyrl_train.algorithms.kl:k1",
    "k2": "skyrl_train.algorithms.kl:k2",
    "k3": "skyrl_train.algorithms.kl:k3",
    "abs": "skyrl_train.algorithms.kl:abs_kl",
    "k1+": "skyrl_train.algorithms.kl:k1_plus",
    "k3+": "skyrl_train.algorithms.kl:k3_plus",
    "k3_ratio": "skyrl_train.algorithms.kl:k3_ratio",
}

REDUCTIONS = {
    "token_mean": "skyrl_train.algorithms.reductions:token_mean",
    "token_mean_legacy": "skyrl_train.algorithms.reductions:token_mean_legacy",
    "sequence_mean": "skyrl_train.algorithms.reductions:sequence_mean",
    "seq_mean_token_sum_norm": "skyrl_train.algorithms.reductions:seq_mean_token_sum_norm",
    "prompt_mean": "skyrl_train.algorithms.reductions:prompt_mean",
}

SFT_LOSSES = {
    "sft": "skyrl_train.algorithms.sft:sft",
    "minor_sft": "skyrl_train.algorithms.sft:minor_sft",
}

STRATEGIES = {
    "single": "skyrl_train.strategies.single:SingleStrategy",
    "fsdp2": "skyrl_train.strategies.fsdp2:FSDP2Strategy",
    "fsdp": "skyrl_train.strategies.fsdp2:FSDP2Strategy",
    "deepspeed": "skyrl_train.strategies.deepspeed:DeepSpeedStrategy",
    "megatron": "skyrl_train.strategies.fsdp2:FSDP2Strategy",
}

ENGINES = {
    "sglang": "skyrl_train.engines.sglang.engine:SGLangEngine",
    "transformers": "skyrl_train.engines.transformers.engine:TransformersEngine",
    "vllm": "skyrl_train.engines.vllm.engine:VLLMEngine",
}

WORKER_NODES = {"vllm": "skyrl_train.engines.vllm.engine:VLLMWorkerNode"}
"""Engines that can span several nodes -> the class that runs on every node except the first."""

ENGINES_IN_CHILD_PROCESSES = frozenset({ENGINES["vllm"]})
"""Engines whose steps run Python code for milliseconds, which Ray's calls in the same process would interrupt. SGLang
starts such a process itself."""

ENVIRONMENTS = {
    "agent": "skyrl_train.environments.tasks.agent:AgentEnv",
    "aime": "skyrl_train.environments.tasks.aime:AIMEEnv",
    "arithmetic": "skyrl_train.environments.tasks.arithmetic:ArithmeticEnv",
    "chat": "skyrl_train.environments.tasks.chat:ChatEnv",
    "countdown": "skyrl_train.environments.tasks.countdown:CountdownEnv",
    "gsm8k": "skyrl_train.environments.tasks.gsm8k:GSM8KEnv",
    "gsm8k_multi_turn": "skyrl_train.environments.tasks.gsm8k_multi_turn:GSM8KMultiTurnEnv",
    "ifeval": "skyrl_train.environments.tasks.ifeval:IFEvalEnv",
    "lcb": "skyrl_train.environments.tasks.lcb:LCBEnv",
    "text2sql": "skyrl_train.environments.tasks.text2sql:Text2SQLEnv",
    "tool_use": "skyrl_train.environments.tasks.tool_use:ToolUseEnv",
    "llm_as_a_judge": "skyrl_train.environments.tasks.judge:LLMJudgeEnv",
    "math": "skyrl_train.environments.tasks.math:MathEnv",
    "mini_swe": "skyrl_train.environments.tasks.mini_swe:MiniSWEEnv",
    "multiply": "skyrl_train.environments.tasks.multiply:MultiplyEnv",
    "searchcode": "skyrl_train.environments.tasks.searchcode:SearchCodeEnv",
    "search": "skyrl_train.environments.tasks.search:SearchEnv",
    "openenv": "skyrl_train.environments.integrations.openenv:OpenEnvEnv",
    "reasoning_gym": "skyrl_train.environments.integrations.reasoning_gym:ReasoningGymEnv",
    "verifiers": "skyrl_train.environments.integrations.verifiers:VerifiersEnv",
}

TOOLS: dict[str, str] = {
    "browser": "skyrl_train.environments.tools.browser:BrowserTool",
    "fetch": "skyrl_train.environments.tools.fetch:FetchTool",
    "mcp": "skyrl_train.environments.tools.mcp:McpTool",
    "python": "skyrl_train.environments.tools.python:PythonTool",
    "search": "skyrl_train.environments.tools.search:SearchTool",
    "sql": "skyrl_train.environments.tools.sql:SQLTool",
}
"""Tools that the tool_use environment can offer to a model."""

TOOL_FORMATS = (
    *("hermes", "qwen3_coder", "glm", "llama", "mistral", "mistral_args", "deepseek_v3", "deepseek_v31", "harmony"),
    *("gemma4", "functiongemma", "lfm2"),
)
"""Names of the formats in which models write tool calls. `data.tool_formats.TOOL_FORMATS` holds the formats."""

CHAT_TEMPLATES = ("chatml", "gemma", "llama3", "mistral", "qwen3_with_thinking", "qwen3_without_thinking")
"""Names of the built-in chat templates. `data.chat_templates.TEMPLATES` holds their texts."""

TRACKERS = {
    "console": "skyrl_train.report.console:ConsoleTracker",
    "mlflow": "skyrl_train.report.mlflow:MlflowTracker",
    "tensorboard": "skyrl_train.report.tensorboard:TensorboardTracker",
    "trackio": "skyrl_train.report.trackio:TrackioTracker",
    "wandb": "skyrl_train.report.wandb:WandbTracker",
}
"""Trackers that a run reports to in addition to its JSONL files. The console and the JSONL files are always on."""


class OptimizerName(StrEnum):
    """An optimizer; a run's optimizer may leave some parameters to AdamW."""

    ADAMW = "adamw"
    MUON = "muon"
    ADAMW_8BIT = "adamw_8bit"


SCHEDULES = (
    "constant",
    "constant_with_warmup",
    "cosine",
    "cosine_with_restarts",
    "inverse_sqrt",
    "linear",
    "polynomial",
)
"""Learning-rate schedules of transformers that need only the numbers of warm-up steps and of total steps."""
