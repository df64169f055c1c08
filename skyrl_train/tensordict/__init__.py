"""TorchRL's language-model parts over this project's engines: wrappers, environments, losses, collectors.

They are TorchRL's own classes and subclasses of them, so torchrl must be installed. Every name of
docs/torchrl/from_torchrl.md can be imported from here. Its module is loaded when it is first used.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from skyrl_train.lazy_imports import lazy_exports, names_for_type_checkers

if find_spec("torchrl") is None:
    raise ModuleNotFoundError(
        "skyrl_train.tensordict is built on torchrl, which is not installed. Install the extra: "
        "`uv run --extra torchrl ...` or `pip install 'torchrl>=0.14.0,<0.15'`.",
        name="torchrl",
    )

if TYPE_CHECKING:
    from torchrl.data.llm import (
        AdaptiveKLController as AdaptiveKLController,
        ConstantKLController as ConstantKLController,
        PairwiseDataset as PairwiseDataset,
        PromptData as PromptData,
        PromptTensorDictTokenizer as PromptTensorDictTokenizer,
        RewardData as RewardData,
        RolloutFromModel as RolloutFromModel,
        TensorDictTokenizer as TensorDictTokenizer,
        TokenizedDatasetLoader as TokenizedDatasetLoader,
        create_infinite_iterator as create_infinite_iterator,
        get_dataloader as get_dataloader,
    )
    from torchrl.envs import (
        StepCounter as StepCounter,
        Transform as Transform,
    )
    from torchrl.envs.llm import (
        IFEvalData as IFEvalData,
        IFEvalScoreData as IFEvalScoreData,
        LLMEnv as LLMEnv,
        as_nested_tensor as as_nested_tensor,
        as_padded_tensor as as_padded_tensor,
    )
    from torchrl.envs.llm.transforms import (
        AddThinkingPrompt as AddThinkingPrompt,
        ToolCall as ToolCall,
        ToolRegistry as ToolRegistry,
        ToolService as ToolService,
        XMLBlockParser as XMLBlockParser,
    )
    from torchrl.modules.llm.backends import RLSGLangEngine as RLSGLangEngine, RLvLLMEngine as RLvLLMEngine
    from torchrl.modules.llm.policies.common import LogProbDistribution as LogProbDistribution
    from torchrl.objectives.llm import LLMLossOutput as LLMLossOutput
    from torchrl.weight_update.llm import (
        SGLangCollectiveTransport as SGLangCollectiveTransport,
        VLLMCollectiveTransport as VLLMCollectiveTransport,
    )

    from skyrl_train.tensordict.buffer import (
        LazyStackStorage as LazyStackStorage,
        ReplayBuffer as ReplayBuffer,
        SamplerWithoutReplacement as SamplerWithoutReplacement,
    )
    from skyrl_train.tensordict.collectors.llm_collector import LLMCollector as LLMCollector
    from skyrl_train.tensordict.collectors.ray_collector import RayLLMCollector as RayLLMCollector
    from skyrl_train.tensordict.collectors.vllm_updater import (
        vLLMUpdater as vLLMUpdater,
        vLLMUpdaterV2 as vLLMUpdaterV2,
    )
    from skyrl_train.tensordict.collectors.weight_schemes import (
        SGLangWeightSender as SGLangWeightSender,
        SGLangWeightSyncScheme as SGLangWeightSyncScheme,
        VLLMDoubleBufferSyncScheme as VLLMDoubleBufferSyncScheme,
        VLLMDoubleBufferTransport as VLLMDoubleBufferTransport,
        VLLMDoubleBufferWeightReceiver as VLLMDoubleBufferWeightReceiver,
        VLLMDoubleBufferWeightSender as VLLMDoubleBufferWeightSender,
        VLLMWeightReceiver as VLLMWeightReceiver,
        VLLMWeightSender as VLLMWeightSender,
        VLLMWeightSyncScheme as VLLMWeightSyncScheme,
        get_model_metadata as get_model_metadata,
        get_sglang_model_metadata as get_sglang_model_metadata,
    )
    from skyrl_train.tensordict.collectors.weight_updaters import (
        EngineUpdater as EngineUpdater,
        WeightUpdaterBase as WeightUpdaterBase,
    )
    from skyrl_train.tensordict.containers import (
        ChatHistory as ChatHistory,
        LLMData as LLMData,
        LogProbs as LogProbs,
        Masks as Masks,
        Text as Text,
        Tokens as Tokens,
    )
    from skyrl_train.tensordict.envs.chat import ChatEnv as ChatEnv, DatasetChatEnv as DatasetChatEnv
    from skyrl_train.tensordict.envs.countdown import (
        CountdownEnv as CountdownEnv,
        CountdownRewardParser as CountdownRewardParser,
    )
    from skyrl_train.tensordict.envs.gsm8k import (
        GSM8KEnv as GSM8KEnv,
        GSM8KPrepareQuestion as GSM8KPrepareQuestion,
        GSM8KRewardParser as GSM8KRewardParser,
    )
    from skyrl_train.tensordict.envs.ifeval import IFEvalEnv as IFEvalEnv, IfEvalScorer as IfEvalScorer
    from skyrl_train.tensordict.envs.kl import (
        KLComputation as KLComputation,
        KLRewardTransform as KLRewardTransform,
        RetrieveKL as RetrieveKL,
        RetrieveLogProb as RetrieveLogProb,
    )
    from skyrl_train.tensordict.envs.llm_env import LLMHashingEnv as LLMHashingEnv, make_gsm8k_env as make_gsm8k_env
    from skyrl_train.tensordict.envs.math import MATHEnv as MATHEnv, MATHRewardParser as MATHRewardParser
    from skyrl_train.tensordict.envs.mlgym import MLGymWrapper as MLGymWrapper, make_mlgym as make_mlgym
    from skyrl_train.tensordict.envs.primer import (
        DataLoadingPrimer as DataLoadingPrimer,
        RayDataLoadingPrimer as RayDataLoadingPrimer,
    )
    from skyrl_train.tensordict.envs.text import (
        IncrementalTokenizer as IncrementalTokenizer,
        TemplateTransform as TemplateTransform,
        Tokenizer as Tokenizer,
    )
    from skyrl_train.tensordict.envs.tools import (
        BrowserTransform as BrowserTransform,
        ExecuteToolsInOrder as ExecuteToolsInOrder,
        JSONCallParser as JSONCallParser,
        MCPToolTransform as MCPToolTransform,
        NativeCallParser as NativeCallParser,
        PythonExecutorService as PythonExecutorService,
        PythonInterpreter as PythonInterpreter,
        SimpleToolTransform as SimpleToolTransform,
    )
    from skyrl_train.tensordict.envs.versions import PolicyVersion as PolicyVersion
    from skyrl_train.tensordict.history import (
        ContentBase as ContentBase,
        History as History,
        add_chat_template as add_chat_template,
    )
    from skyrl_train.tensordict.losses.distillation import (
        DistillationLoss as DistillationLoss,
        DistillationLossOutput as DistillationLossOutput,
        k3_kl_token_estimate as k3_kl_token_estimate,
    )
    from skyrl_train.tensordict.losses.grpo import (
        CISPO as CISPO,
        DAPO as DAPO,
        CISPOLoss as CISPOLoss,
        CISPOLossOutput as CISPOLossOutput,
        DAPOLossOutput as DAPOLossOutput,
        GRPOLoss as GRPOLoss,
        GRPOLossOutput as GRPOLossOutput,
    )
    from skyrl_train.tensordict.losses.mc_advantage import (
        MCAdvantage as MCAdvantage,
        MCAdvantageSelector as MCAdvantageSelector,
        RayMCAdvantage as RayMCAdvantage,
    )
    from skyrl_train.tensordict.losses.sft import SFTLoss as SFTLoss, SFTLossOutput as SFTLossOutput
    from skyrl_train.tensordict.losses.top_k import TopKRewardSelector as TopKRewardSelector
    from skyrl_train.tensordict.trl_interop import (
        HFRewardModelWrapper as HFRewardModelWrapper,
        TorchRLBufferDataset as TorchRLBufferDataset,
    )
    from skyrl_train.tensordict.wrappers.async_vllm import (
        AsyncVLLM as AsyncVLLM,
        make_async_vllm_engine as make_async_vllm_engine,
    )
    from skyrl_train.tensordict.wrappers.backends import (
        RemoteTransformersWrapper as RemoteTransformersWrapper,
        RemoteWrapper as RemoteWrapper,
        SGLangWrapper as SGLangWrapper,
        TransformersWrapper as TransformersWrapper,
        vLLMWrapper as vLLMWrapper,
    )
    from skyrl_train.tensordict.wrappers.base import LLMWrapperBase as LLMWrapperBase
    from skyrl_train.tensordict.wrappers.categorical import CategoricalSequential as CategoricalSequential
    from skyrl_train.tensordict.wrappers.dispatcher import Dispatcher as Dispatcher
    from skyrl_train.tensordict.wrappers.distributions import LLMMaskedCategorical as LLMMaskedCategorical
    from skyrl_train.tensordict.wrappers.sglang_server import AsyncSGLang as AsyncSGLang
    from skyrl_train.tensordict.wrappers.stateless_group import (
        stateless_init_process_group as stateless_init_process_group,
        stateless_init_process_group_async as stateless_init_process_group_async,
    )
    from skyrl_train.tensordict.wrappers.torchrl import ForTorchRL as ForTorchRL
    from skyrl_train.tensordict.wrappers.vllm_workers import (
        LLMOnDevice as LLMOnDevice,
        make_vllm_worker as make_vllm_worker,
        vLLMWorker as vLLMWorker,
    )

if not TYPE_CHECKING:  # otherwise mypy would accept every misspelled name
    __getattr__, __dir__, __all__ = lazy_exports(__name__, names_for_type_checkers(__file__))
