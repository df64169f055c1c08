"""Names of TorchRL that `skyrl_train.tensordict` does not offer, with the replacement of each."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import NoReturn

DOCS_PAGE = "docs/torchrl/from_torchrl.md#names-that-are-not-offered"

_NAMES_BY_ADVICE = {
    "the trainer has the environments `math` and `countdown`. On tensordicts use `DatasetChatEnv` with a `Transform` "
    'whose `_step` writes "reward"': "MATHEnv MATHRewardParser CountdownEnv CountdownRewardParser",
    "`EngineUpdater`, for every engine, or `vLLMUpdater`. Both verify what has arrived. "
    '`EngineUpdater(engines, route="checkpoint", folder=...)` goes through files, like a double '
    "buffer": "VLLMWeightSyncScheme SGLangWeightSyncScheme VLLMDoubleBuffer VLLMDoubleBufferSyncScheme",
    "`EngineUpdater` or `vLLMUpdater`, which contain these parts": "VLLMWeightSender VLLMWeightReceiver "
    "VLLMCollectiveTransport SGLangWeightSender SGLangCollectiveTransport VLLMDoubleBufferWeightSender "
    "VLLMDoubleBufferWeightReceiver VLLMDoubleBufferTransport",
    "remove the call: an updater reads names, dtypes and shapes from the weights that it is "
    "given": "get_model_metadata get_sglang_model_metadata",
    "the trainer has reward models (`trainer.reward.model.path`). On tensordicts use a `Transform` whose `_step` "
    'writes "reward"': "HFRewardModelWrapper",
    "iterate over a `ReplayBuffer`": "TorchRLBufferDataset",
    "`RayLLMCollector` runs environment and policy in a Ray actor; buffers and groups stay in your process, and every "
    "episode has its own sandbox": "RayDataLoadingPrimer RayMCAdvantage RayReplayBuffer",
    'Rows are mappings with the keys "prompt", "instruction_id_list" and "kwargs"': "IFEvalData",
    "`GRPOLossOutput`, which all of these losses return": "CISPOLossOutput DAPOLossOutput LLMLossOutput",
    "the trainer has on-policy distillation (`examples/on_policy_distillation`)": "DistillationLoss "
    "DistillationLossOutput",
    "`skyrl_train.algorithms.kl.k3`, on tokens without padding": "k3_kl_token_estimate",
    "`MCAdvantage(candidate_selector=...)` with a function of the returns and the group's size": "MCAdvantageSelector",
    "assign `loss.kl_to_ref_coeff`. The trainer has "
    "`trainer.algorithm.kl_ctrl`": "AdaptiveKLController ConstantKLController",
    "`DatasetChatEnv` reads rows of files and of the hub, and `DataLoadingPrimer` reads any "
    "loader": "PairwiseDataset PromptData RewardData PromptTensorDictTokenizer TensorDictTokenizer "
    "TokenizedDatasetLoader",
    "`LLMCollector`. A loader is repeated without end": "RolloutFromModel get_dataloader create_infinite_iterator",
    "`env.append_transform(...)`, which also accepts torchrl's `Compose`": "TransformedEnv Compose",
    "give one environment more rows: they share every call of the policy, and their tools run "
    "concurrently": "SerialEnv ParallelEnv AsyncEnvPool",
    "remove the spec: environments and transforms need none": "Composite Unbounded Bounded NonTensor TensorSpec",
    "`ReplayBuffer`, which keeps rows of any length in memory": "TensorDictReplayBuffer ListStorage LazyMemmapStorage",
}
REPLACEMENTS: Mapping[str, str] = {name: advice for advice, names in _NAMES_BY_ADVICE.items() for name in names.split()}
"""Names of TorchRL -> what to use instead. docs/torchrl/from_torchrl.md shows the same table."""


def raise_not_offered(module: str, name: str) -> NoReturn:
    """Raise the error for a name that a package does not have, with the replacement if there is one.

    The error is an AttributeError, so that `hasattr` is false. For `from package import name`, Python replaces an
    AttributeError by an ImportError without its text. That statement calls `__getattr__` from `_handle_fromlist` of
    importlib, and gets an ImportError with the replacement. No class can be both: their layouts conflict in CPython.

    Args:
        module: The name of the package.
        name: The missing name.

    Raises:
        ImportError: `name` has a replacement, and the caller is an import statement.
        AttributeError: In all other cases.
    """
    advice = REPLACEMENTS.get(name)
    if advice is None:
        raise AttributeError(f"module {module!r} has no attribute {name!r}", name=name)
    message = f"{module} has no {name!r}. Instead: {advice} ({DOCS_PAGE})."
    if sys._getframe(2).f_code.co_name == "_handle_fromlist":
        raise ImportError(message, name=module)
    raise AttributeError(message, name=name)
