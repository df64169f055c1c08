"""Environments that append text or tokens without turns."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Any, Self

import torch
from tensordict import NonTensorData, TensorDict, TensorDictBase

from skyrl_train.tensordict.envs.base import StepCounter, TensorDictEnv, keys_of
from skyrl_train.tensordict.envs.conversation import text_of, unpadded
from skyrl_train.tensordict.envs.gsm8k import GSM8KPrepareQuestion, GSM8KRewardParser
from skyrl_train.tensordict.envs.primer import DataLoadingPrimer, batches


class LLMEnv(TensorDictEnv):
    """An environment that appends the policy's responses to one string (or one row of ids), without turns.

    With `from_text`, an action is `action_key` "text_response", appended to `str_key` "text"; otherwise
    "tokens_response", appended to `token_key` "tokens", [L] per row. The "response" in the container that a policy
    wrapper writes there is accepted too. ChatEnv keeps turns; TorchRL has deprecated this class, so it warns here too.

    Args:
        assign_reward: Write a reward of 0 for every token, [L, 1] per row; with tokens only.
        assign_done: Write a flag per token that ends the episode, [L, 1] per row, under "token_done"; with tokens only.
        eos_token_id: A response that ends with it ends the episode.
    """

    def __init__(
        self,
        *,
        from_text: bool = True,
        str_key: str = "text",
        token_key: str = "tokens",
        action_key: str | None = None,
        reward_key: str = "reward",
        assign_reward: bool = False,
        assign_done: bool = False,
        eos_token_id: int | None = None,
        tokenizer: Any = None,
        batch_size: Sequence[int] | int | None = None,
        device: torch.device | str | None = None,
    ):
        warnings.warn("LLMEnv keeps no turns; use ChatEnv", DeprecationWarning, stacklevel=2)
        super().__init__(batch_size, device)
        if from_text and (assign_reward or assign_done):
            raise ValueError("assign_reward and assign_done need tokens: set from_text=False.")
        self.from_text = from_text
        self.key = str_key if from_text else token_key
        self.action_key = action_key or ("text_response" if from_text else "tokens_response")
        self.reward_key, self.assign_reward, self.assign_done = reward_key, assign_reward, assign_done
        self.eos_token_id, self.tokenizer = eos_token_id, tokenizer
        self._of_one_step.add(reward_key)

    @classmethod
    def from_dataloader(
        cls,
        dataloader: Iterable[Any],
        *,
        num_envs: int = 1,
        repeats: int | None = None,
        group_repeats: bool = True,
        **settings: Any,
    ) -> Self:
        """Make an environment in which every reset takes the next rows of a loader.

        Args:
            dataloader: Loader of mappings, lists of them, or batched mappings.
            num_envs: Number of rows of the environment, B.
            repeats: Number of consecutive times that each row is used; None for once.
            group_repeats: Accepted without effect: repeats are always consecutive.
            **settings: Other arguments of the constructor.
        """
        env = cls(batch_size=(num_envs,), **settings)
        primer = _KeepsText(dataloader, repeats=repeats, group_repeats=group_repeats)
        return env.append_transform(primer)

    def _reset_row(self, given: TensorDictBase) -> TensorDictBase:
        row = TensorDict({}, batch_size=[])
        if not self.from_text:
            if not isinstance(given.get(self.key, None), torch.Tensor):
                raise RuntimeError(f"LLMEnv.reset expects ids under {self.key!r}, got the keys {sorted(given.keys())}.")
            return row.set(self.key, given[self.key])
        text = text_of(given, self.key)
        text = text if text is not None else text_of(given, "query")
        if text is None:
            raise RuntimeError(
                f"LLMEnv.reset expects a string under {self.key!r}, got the keys {sorted(given.keys())}."
            )
        return row.set(self.key, NonTensorData(text))

    def _step_row(self, root: TensorDictBase) -> TensorDictBase:
        row = TensorDict({}, batch_size=[])
        if self.from_text:
            said, before = text_of(root, self.action_key), text_of(root, self.key)
            said = said if said is not None else self._written(root, "response")
            before = before if before is not None else self._written(root, "prompt")
            if said is None or before is None:
                raise ValueError(
                    f"LLMEnv.step found no string under {self.action_key!r} or {(self.key, 'response')}. Call the "
                    "policy before step."
                )
            return row.set(self.key, NonTensorData(before + said))
        ids, prompt = root.get(self.action_key, None), root.get(self.key)
        if not isinstance(prompt, torch.Tensor):
            prompt, ids = self._written(root, "prompt"), ids if ids is not None else self._written(root, "response")
        if ids is None or prompt is None:
            raise ValueError(
                f"LLMEnv.step found no token ids under {self.action_key!r} or {(self.key, 'response')}. Call the "
                "policy before step."
            )
        row.set(self.key, torch.cat([prompt, ids]))
        over = self.eos_token_id is not None and len(ids) > 0 and int(ids[-1]) == self.eos_token_id
        row.set("terminated", torch.tensor([over]))
        if self.assign_reward:
            row.set(self.reward_key, torch.zeros(len(ids), 1))
        if self.assign_done:
            row.set("token_done", torch.arange(1, len(ids) + 1).unsqueeze(-1).eq(len(ids)) & over)
        return row

    def _written(self, root: TensorDictBase, name: str) -> Any:
        """A field, without padding, of the container with which a policy replaced its input; or None."""
        found = None if root.get(self.key, None) is None else root[self.key].get(name, None)
        if isinstance(found, torch.Tensor):
            return unpadded(root, found, response=name == "response")
        return getattr(found, "data", found)


class _KeepsText(DataLoadingPrimer):
    """Keeps "text" under its name: in LLMEnv it is the text itself, not a question."""

    def _unbound(self, batch: Any) -> list[TensorDictBase]:
        rows = super()._unbound(batch)
        return [row.rename_key_("query", "text") if "text" not in keys_of(row) else row for row in rows]


def make_gsm8k_env(
    dataset: str | Sequence[Mapping[str, Any]] = "openai/gsm8k",
    num_envs: int = 1,
    repeats: int | None = None,
    batch_size_dl: int = 1,
    seed: int | None = None,
    group_repeats: bool = False,
    tokenizer: Any = None,
) -> LLMEnv:
    """Make an LLMEnv with GSM8K: the question in the base prompt under "text", the response under "text_response".

    An episode is one step, rewarded by `GSM8KRewardParser`.

    Args:
        dataset: Source of rows with "question" and "answer", as in `data.dataset.read_rows`, or the rows themselves.
        num_envs: Number of rows of the environment, B.
        repeats: Number of consecutive episodes with the same question; None for one.
        batch_size_dl: Number of rows that are read at a time.
        seed: Seed of the order of the rows; None for a random order.
        group_repeats: Accepted without effect: repeats are always consecutive.
        tokenizer: Tokenizer of the environment; None for text only.

    Raises:
        DataError: The dataset cannot be read.
        ValueError: `batch_size_dl` or `repeats` is invalid.
    """
    from skyrl_train.data.dataset import read_hub_dataset, read_rows

    if not isinstance(dataset, str):
        rows = list(dataset)
    elif dataset == "openai/gsm8k":
        rows = [row for _, row in read_hub_dataset(dataset, "train", "main")]
    else:
        rows = [row for _, row in read_rows(dataset)]
    texts = [{"text": row["question"], "answer": row["answer"]} for row in rows]
    loader = batches(texts, batch_size_dl, shuffle=True, seed=seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        settings: dict[str, Any] = {"repeats": repeats, "group_repeats": group_repeats, "tokenizer": tokenizer}
        env = LLMEnv.from_dataloader(loader, num_envs=num_envs, **settings)
    env.append_transform(GSM8KPrepareQuestion())
    env.append_transform(StepCounter(1))
    env.append_transform(GSM8KRewardParser(tokenizer=tokenizer))
    return env


class LLMHashingEnv(TensorDictEnv):
    """An environment that identifies token prefixes by their hash, for trees over a model's possible outputs.

    `reset` takes ids under `observation_key` [L], or a string under `text_key`; a step appends the id in "action" ([]
    or [1]). "hashing" (also written as "hash", its name in TorchRL's documentation) is int64 []: the hash of the
    sequence at reset, then of (previous hash, action), so that equal prefixes have equal hashes in every process.

    Args:
        vocab_size: By default the tokenizer's; TypeError without either.
        hashing_module: ids [L] -> int; by default blake2b of their bytes.
        text_output: Also keep the text under `text_key`; needs `tokenizer`.
    """

    def __init__(
        self,
        vocab_size: int | None = None,
        *,
        hashing_module: Callable[[torch.Tensor], int | torch.Tensor] | None = None,
        observation_key: str = "observation",
        text_output: bool = True,
        tokenizer: Any = None,
        text_key: str = "text",
        batch_size: Sequence[int] | int | None = None,
        device: torch.device | str | None = None,
    ):
        super().__init__(batch_size, device)
        if vocab_size is None and tokenizer is None:
            raise TypeError("LLMHashingEnv needs vocab_size or tokenizer. Pass one of them.")
        self.vocab_size = vocab_size if vocab_size is not None else len(tokenizer)
        self.hashing_module = hashing_module or _hashed
        self.observation_key, self.text_key = observation_key, text_key
        self.tokenizer, self.text_output = tokenizer, text_output and tokenizer is not None

    def make_tensordict(self, text: str | list[str]) -> TensorDictBase:
        """Reset the environment with one text, or with several, one per row; return the first observation."""
        batch = [] if isinstance(text, str) else [len(text)]
        return self.reset(TensorDict({self.text_key: text}, batch_size=batch))

    def _reset_row(self, given: TensorDictBase) -> TensorDictBase:
        ids, text = given.get(self.observation_key, None), text_of(given, self.text_key)
        if ids is None:
            if text is None or self.tokenizer is None:
                raise RuntimeError(
                    f"LLMHashingEnv.reset expects ids under {self.observation_key!r}, or text and tokenizer."
                )
            ids = torch.tensor(self.tokenizer.encode(text, add_special_tokens=False))
        return self._row(ids, self.hashing_module(ids))

    def _step_row(self, root: TensorDictBase) -> TensorDictBase:
        action = root["action"].reshape(1)
        if not 0 <= int(action) < self.vocab_size:
            raise ValueError(
                f"action {int(action)} is not in the vocabulary, whose ids are 0 to {self.vocab_size - 1}."
            )
        hashed = self.hashing_module(torch.cat([root["hashing"].reshape(1), action]))
        return self._row(torch.cat([root[self.observation_key], action]), hashed)

    def _row(self, ids: torch.Tensor, hashed: int | torch.Tensor) -> TensorDictBase:
        value = torch.as_tensor(hashed, dtype=torch.int64).reshape(())
        row = TensorDict({self.observation_key: ids, "hashing": value, "hash": value.clone()}, batch_size=[])
        if self.text_output:
            row.set(self.text_key, NonTensorData(self.tokenizer.decode(ids.tolist())))
        return row


def _hashed(ids: torch.Tensor) -> int:
    digest = blake2b(ids.to(torch.int64).numpy().tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
