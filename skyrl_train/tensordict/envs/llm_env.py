"""Environments that append text or tokens without turns."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from hashlib import blake2b
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.envs import StepCounter, TransformedEnv
from torchrl.envs.llm import LLMEnv as LLMEnv, envs

from skyrl_train.tensordict.envs.chat import read_dataset
from skyrl_train.tensordict.envs.gsm8k import GSM8KPrepareQuestion, GSM8KRewardParser, Source
from skyrl_train.tensordict.envs.primer import Batches, DataLoadingPrimer


def make_gsm8k_env(
    dataset: Source = "openai/gsm8k",
    num_envs: int = 1,
    repeats: int | None = None,
    batch_size_dl: int = 1,
    seed: int | None = None,
    group_repeats: bool = False,
    tokenizer: Any = None,
) -> TransformedEnv:
    """Make an LLMEnv with GSM8K: the question in the base prompt under "text", the response under "text_response".

    An episode is one step. TorchRL has deprecated this function in favor of `GSM8KEnv`, which keeps turns.

    Args:
        dataset, num_envs, repeats, batch_size_dl, seed: As in `GSM8KEnv`.
        group_repeats: True multiplies the batch size by `repeats`.
        tokenizer: Tokenizer of the policy. Without one, the environment gives no reward, as in TorchRL.
    """
    hub = ("main", "train") if dataset == "openai/gsm8k" else (None, None)
    rows = [{"query": row["question"], "answer": row["answer"]} for row in read_dataset(dataset, *hub)]
    loader = Batches(rows, batch_size_dl, shuffle=True, seed=seed)
    primer = DataLoadingPrimer(loader, repeats=repeats, group_repeats=group_repeats, batch_size=(num_envs,))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # LLMEnv is deprecated, and would rather have eos_token_id
        base = LLMEnv(batch_size=primer.batch_size)
    env = TransformedEnv(base, GSM8KPrepareQuestion(["query"], ["text"])).append_transform(primer)
    env.append_transform(StepCounter(max_steps=1))
    if tokenizer is None:
        warnings.warn("No tokenizer specified - reward will not be assigned.", stacklevel=2)
        return env
    return env.append_transform(GSM8KRewardParser(tokenizer=tokenizer, in_keys=["text_response", "answer"]))


class LLMHashingEnv(envs.LLMHashingEnv):  # type: ignore[misc]
    """TorchRL's environment that identifies token prefixes by their hash, for trees over a model's possible outputs.

    Equal prefixes have equal hashes in every process. With TorchRL's default, they depend on PYTHONHASHSEED.

    Args:
        vocab_size: By default the tokenizer's; TypeError without either.
        hashing_module: Function from ids [B, L] to hashes [B]; by default blake2b of their bytes.
        **settings: Other arguments of TorchRL's class.
    """

    def __init__(
        self,
        vocab_size: int | None = None,
        *,
        hashing_module: Callable[[torch.Tensor], torch.Tensor] | None = None,
        **settings: Any,
    ):
        settings.setdefault("text_output", settings.get("tokenizer") is not None)
        super().__init__(vocab_size, hashing_module=hashing_module or _hashes, **settings)

    def make_tensordict(self, input: str | list[str]) -> TensorDictBase:
        """Reset the environment with one text, or with several, one per row; return the first observation."""
        ids = [self._tokenizer.encode(text) for text in ([input] if isinstance(input, str) else input)]
        return self.reset(TensorDict({self.observation_key: torch.tensor(ids)}, batch_size=[len(ids)]))


def _hashes(ids: torch.Tensor) -> torch.Tensor:
    digests = [blake2b(row.to(torch.int64).numpy().tobytes(), digest_size=8).digest() for row in ids.cpu()]
    return torch.tensor([int.from_bytes(digest, "little", signed=True) for digest in digests])
