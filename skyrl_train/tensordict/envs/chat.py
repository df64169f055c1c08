"""Conversations as environments: a plain one, and one whose questions come from a dataset."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from tensordict import NonTensorData, TensorDict, TensorDictBase

from skyrl_train.data.chat import render_prompt, render_text
from skyrl_train.data.dataset import read_hub_dataset, read_rows
from skyrl_train.data.messages import Message, continues_last_message
from skyrl_train.tensordict.containers import ChatHistory, Text, Tokens
from skyrl_train.tensordict.envs.base import TensorDictEnv
from skyrl_train.tensordict.envs.conversation import (
    INPUT_MODES,
    conversation,
    full_messages,
    history_of,
    is_continued,
    messages_of,
    part,
    question_of,
    text_of,
    unpadded,
)
from skyrl_train.tensordict.envs.primer import DataLoadingPrimer, batches
from skyrl_train.tensordict.envs.text import IncrementalTokenizer
from skyrl_train.tensordict.history import History, rendered_form

QUESTION_KEYS = ("query", "text")
OF_THE_CLASS: Any = object()
"""Default that stands for the class's SYSTEM_PROMPT; None means no system prompt."""


class ChatEnv(TensorDictEnv):
    """A conversation without a reward of its own: transforms add rewards, tools and an end.

    `reset` reads a question from `data_key` ("query"; "text" is also accepted, and stored under "query") and writes
    (input_mode, "prompt"). A question is a string, or a conversation that goes on: a History [turns], or messages. If
    its last message has the policy's role, the policy continues that message. An action is (input_mode, "full"), or
    "response" of the same container, or a string "text_response" ("tokens_response" in tokens mode). `step` appends it
    to form the next prompt.

    Modes "text" and "tokens" render the prompt with the tokenizer's chat template. Without a tokenizer, a text prompt
    consists of the messages' contents, separated by blank lines.

    Args:
        with_tokenizer: Also keep ("tokens", "prompt") with the history; see `IncrementalTokenizer`.
    """

    def __init__(
        self,
        *,
        input_mode: str = "history",
        batch_size: Sequence[int] | int | None = None,
        system_prompt: str | None = None,
        tokenizer: Any = None,
        template_kwargs: Mapping[str, Any] | None = None,
        system_role: str = "system",
        user_role: str = "user",
        policy_role: str = "assistant",
        data_key: str | None = None,
        device: torch.device | str | None = None,
        with_tokenizer: bool = False,
    ):
        if batch_size is not None and not isinstance(batch_size, int) and len(tuple(batch_size)) == 0:
            raise ValueError("batch_size=() is not supported. Use (1,) for one conversation.")
        super().__init__(batch_size, device)
        if input_mode not in INPUT_MODES:
            raise ValueError(f"input_mode={input_mode!r} is not one of {INPUT_MODES}.")
        if with_tokenizer and input_mode != "history":
            raise ValueError(f"with_tokenizer=True needs input_mode='history', got {input_mode!r}.")
        if tokenizer is None and (with_tokenizer or input_mode == "tokens"):
            needs = "with_tokenizer=True" if with_tokenizer else 'input_mode="tokens"'
            raise ValueError(f"{needs} needs a tokenizer. Pass tokenizer=.")
        self.input_mode = input_mode
        self.system_prompt = system_prompt
        self.tokenizer = tokenizer
        self.template_kwargs = dict(template_kwargs or {})
        self.system_role, self.user_role, self.policy_role = system_role, user_role, policy_role
        self.data_key = data_key or QUESTION_KEYS[0]
        self.kept_key = QUESTION_KEYS[0] if self.data_key == "text" else self.data_key
        """The key under which the question is kept: policies write a container under "text"."""
        if with_tokenizer:
            self.append_transform(IncrementalTokenizer(tokenizer, template_kwargs=template_kwargs))

    @classmethod
    def with_tokenizer(cls, tokenizer: Any, **settings: Any) -> Self:
        """Make an environment that also keeps the token ids of prompts, under ("tokens", "prompt").

        This equals `ChatEnv(tokenizer=tokenizer, with_tokenizer=True, ...)`.

        Args:
            tokenizer: Hugging Face tokenizer with a chat template.
            **settings: Other arguments of the constructor.

        Raises:
            ValueError: `input_mode` is not "history", or another argument is invalid.
        """
        return cls(tokenizer=tokenizer, with_tokenizer=True, **settings)

    @classmethod
    def from_dataloader(cls, dataloader: Iterable[Any], **settings: Any) -> DatasetChatEnv:
        """Make a DatasetChatEnv over a loader of rows, which is repeated endlessly.

        Args:
            dataloader: Loader of mappings, lists of them, or batched mappings.
            **settings: Arguments of `DatasetChatEnv.from_dataloader`, which also names the errors.
        """
        return DatasetChatEnv.from_dataloader(dataloader, **settings)

    def opening(self, question: str | Sequence[Message]) -> list[Message]:
        """Return the first messages of a conversation: the system prompt, if any, and the question.

        A last message of the policy's role is marked as incomplete, for the policy to continue it.
        """
        asked: list[Message] = (
            [{"role": self.user_role, "content": question}] if isinstance(question, str) else list(question)
        )
        if continues_last_message(asked, self.policy_role):
            asked[-1] = {**asked[-1], "is_complete": False}
        return asked if self.system_prompt is None else [self._system(), *asked]

    def _system(self) -> Message:
        return {"role": self.system_role, "content": self.system_prompt}

    def _reset_row(self, given: TensorDictBase) -> TensorDictBase:
        question = self._question(given)
        messages = self.opening(question)
        row = TensorDict({}, batch_size=[])
        for key in {self.kept_key, QUESTION_KEYS[0]}:  # grouping of episodes by question reads the second
            row.set(key, NonTensorData(question))
        return row.set(self.input_mode, self._prompt(messages))

    def _question(self, given: TensorDictBase) -> str | list[Message]:
        for key in dict.fromkeys((self.data_key, *QUESTION_KEYS)):
            question = question_of(given, key)
            if question is not None:
                return question
        raise RuntimeError(
            f"ChatEnv.reset expects a tensordict with a string, a History or messages under {self.data_key!r} (or "
            f"'text'), got the keys {sorted(map(str, given.keys()))}. If another key has the question, name it with "
            "data_key."
        )

    def _prompt(self, messages: list[Message]) -> Any:
        if self.input_mode == "history":
            return conversation(messages)
        if self.input_mode == "tokens":
            ids = torch.tensor(render_prompt(self.tokenizer, rendered_form(messages), self.template_kwargs))
            return Tokens(prompt=ids, padded=False, batch_size=[])
        if self.tokenizer is None:
            return Text(prompt="\n\n".join(str(message["content"]) for message in messages), batch_size=[])
        way = "continue" if is_continued(messages, self.policy_role) else "open"
        text = render_text(self.tokenizer, rendered_form(messages), self.template_kwargs, mode=way)
        return Text(prompt=text, batch_size=[])

    def _step_row(self, root: TensorDictBase) -> TensorDictBase:
        following = {"history": self._after_history, "text": self._after_text, "tokens": self._after_tokens}
        container = following[self.input_mode](root)
        if container is None:
            mode, old = self.input_mode, "tokens_response" if self.input_mode == "tokens" else "text_response"
            raise ValueError(
                f"ChatEnv.step found no action: a policy writes ({mode!r}, 'full'), ({mode!r}, 'response') or {old!r}; "
                f"got the keys {sorted(map(str, root.keys()))}."
            )
        return TensorDict({}, batch_size=[]).set(self.input_mode, container)

    def _after_history(self, root: TensorDictBase) -> ChatHistory | None:
        full = part(root, "history", "full")
        if full is None:
            messages = full_messages(root, self.policy_role)
            full = None if messages is None else history_of(messages)
            if full is not None:
                root["history"].full = full
        return None if full is None else ChatHistory(prompt=self._next_prompt(full), batch_size=[])

    def _next_prompt(self, full: History) -> History:
        """Return the conversation for the next answer, which does not go on with a truncated one."""
        last = full[-1]
        if last.is_complete:
            return full
        *before, answer = messages_of(full)
        return history_of([*before, {**answer, "is_complete": True}])

    def _after_text(self, root: TensorDictBase) -> Text | None:
        full = part(root, "text", "full")
        if not isinstance(full, str):
            response = part(root, "text", "response")
            response = response if isinstance(response, str) else text_of(root, "text_response")
            full = None if response is None else part(root, "text", "prompt") + response
        return None if full is None else Text(prompt=full, batch_size=[])

    def _after_tokens(self, root: TensorDictBase) -> Tokens | None:
        full = part(root, "tokens", "full")
        if full is not None:
            return Tokens(prompt=unpadded(root, full, response=False), padded=False, batch_size=[])
        response = part(root, "tokens", "response")
        response = response if response is not None else root.get("tokens_response", None)
        if response is None:
            return None
        return Tokens(prompt=torch.cat([root["tokens"].prompt, response]), padded=False, batch_size=[])


class DatasetChatEnv(ChatEnv):
    """A ChatEnv in which every reset takes the next row of a dataset, endlessly.

    Args:
        dataset: Rows (mappings), or a source for `dataset.read_rows`: a .parquet, .json or .jsonl file, a folder, a
            name on the hub. A column "text" is the question, unless there is "query" or `data_key` names another.
        shuffle: Use a new order in every pass over the rows, reproducible with `seed`.
        name, split: Configuration and split of a dataset on the hub.
        num_envs: Number of rows of the batch.
        repeats: Number of consecutive times that each row is used: the group size of GRPO.
        batch_size_dl: Number of rows drawn at a time; `collate_fn` gets a list of them and returns the rows to use.
        group_repeats: Accepted without effect: repeats are always consecutive.
        apply_template: Accepted without effect, as in TorchRL.
        system_prompt: By default the class's SYSTEM_PROMPT.
    """

    SYSTEM_PROMPT: str | None = None

    def __init__(
        self,
        *,
        dataset: str | Sequence[Mapping[str, Any]] | Iterable[Mapping[str, Any]] | _Loader,
        shuffle: bool = True,
        name: str | None = None,
        split: str | None = None,
        num_envs: int = 1,
        repeats: int | None = None,
        batch_size_dl: int = 1,
        seed: int | None = None,
        group_repeats: bool = False,
        tokenizer: Any = None,
        device: torch.device | str | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        apply_template: bool = False,
        collate_fn: Callable[[list[Mapping[str, Any]]], Any] | None = None,
        input_mode: str = "history",
        data_key: str | None = None,
        primers: Any = None,
        system_prompt: str | None = OF_THE_CLASS,
        system_role: str = "system",
        user_role: str = "user",
        policy_role: str = "assistant",
        with_tokenizer: bool = False,
        ray_backend: bool = False,
        dataloader_actor_name: str | None = None,
    ):
        if ray_backend or dataloader_actor_name is not None:
            raise ValueError(
                "ray_backend and dataloader_actor_name are not supported: every environment reads its own rows. Leave "
                "them out."
            )
        super().__init__(
            batch_size=(num_envs,),
            tokenizer=tokenizer,
            device=device,
            template_kwargs=template_kwargs,
            input_mode=input_mode,
            data_key=data_key,
            system_prompt=self.SYSTEM_PROMPT if system_prompt is OF_THE_CLASS else system_prompt,
            system_role=system_role,
            user_role=user_role,
            policy_role=policy_role,
            with_tokenizer=with_tokenizer,
        )
        if isinstance(dataset, _Loader):
            loader = dataset.batches
        else:
            rows = _rows(dataset, name, split)
            loader = batches(rows, batch_size_dl, shuffle=shuffle, seed=seed, collate_fn=collate_fn)
        self.primer = DataLoadingPrimer(loader, repeats=repeats)
        self.append_transform(self.primer)

    @classmethod
    def from_dataloader(
        cls,
        dataloader: Iterable[Any],
        *,
        tokenizer: Any = None,
        repeats: int | None = None,
        num_envs: int | None = None,
        batch_size: Sequence[int] | int | None = None,
        **settings: Any,
    ) -> Self:
        """Make an environment over a loader of rows, which is repeated endlessly.

        Args:
            dataloader: Loader of mappings, lists of them, or batched mappings.
            tokenizer: Tokenizer of the environment; None for text without one.
            repeats: Number of consecutive episodes with the same row; None for one.
            num_envs: Number of rows of the environment, B; None for 1 or that of `batch_size`.
            batch_size: TorchRL's name for it: an integer or one dimension.
            **settings: Other arguments of the constructor, except those that determine how rows are read.

        Raises:
            ValueError: Both `num_envs` and `batch_size` are given, or `batch_size` has more than one dimension.
            TypeError: A setting determines how rows are read.
        """
        if num_envs is not None and batch_size is not None:
            raise ValueError(f"num_envs={num_envs}, batch_size={batch_size}: give only one of them.")
        if batch_size is not None:
            size = torch.Size([batch_size] if isinstance(batch_size, int) else batch_size)
            if len(size) != 1:
                raise ValueError(f"batch_size={tuple(size)} must have one dimension, e.g. (1,).")
            num_envs = size[0]
        if of_rows := sorted(
            {"dataset", "name", "split", "shuffle", "seed", "batch_size_dl", "collate_fn"} & set(settings)
        ):
            raise TypeError(
                f"{cls.__name__}.from_dataloader does not take {of_rows}, because the loader determines how rows are "
                "read. Leave them out."
            )
        given: dict[str, Any] = {"tokenizer": tokenizer, "repeats": repeats, "num_envs": num_envs or 1, **settings}
        return cls(dataset=_Loader(dataloader), **given)

    def reset_dataloader(self) -> None:
        """Start again with the first row of the dataset; pending repeats are dropped."""
        self.primer.reset_dataloader()


@dataclass(frozen=True)
class _Loader:
    """Represents a dataset whose batches are made by a loader."""

    batches: Iterable[Any]


def _rows(dataset: Any, name: str | None, split: str | None) -> list[Mapping[str, Any]]:
    if not isinstance(dataset, str):
        rows = list(dataset)
    elif name is not None or (split is not None and not dataset.endswith((".parquet", ".json", ".jsonl"))):
        rows = [row for _, row in read_hub_dataset(dataset, split or "train", name)]
    else:
        rows = [row for _, row in read_rows(dataset)]
    if not rows:
        raise ValueError(f"dataset={dataset!r:.80} has no rows. Give at least one row.")
    return rows
