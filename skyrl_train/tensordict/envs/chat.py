"""Conversations as environments: a plain one, and one whose questions come from a dataset."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from tensordict import NonTensorData, TensorDict, TensorDictBase, lazy_stack
from torchrl.data import Bounded, Composite, NonTensor
from torchrl.envs import Compose, StepCounter, Transform, TransformedEnv
from torchrl.envs.llm import chat as torchrl_chat

from skyrl_train.data.chat import render_prompt, render_text
from skyrl_train.data.dataset import read_hub_dataset, read_rows
from skyrl_train.data.messages import Message, continues_last_message
from skyrl_train.tensordict.containers import ChatHistory, Text, Tokens
from skyrl_train.tensordict.envs.conversation import (
    full_messages,
    history_of,
    is_continued,
    messages_of,
    part,
    question_of,
    text_of,
    unpadded,
)
from skyrl_train.tensordict.envs.primer import Batches, DataLoadingPrimer, RayDataLoadingPrimer
from skyrl_train.tensordict.history import History, rendered_form
from skyrl_train.tensordict.wrappers.inputs import MODES

QUESTION_KEYS = ("query", "text")


class _ChatEnvMeta(type(torchrl_chat.ChatEnv)):  # type: ignore[misc]
    """The metaclass that wraps an environment made with `with_tokenizer=True`."""

    def __call__(cls, *args: Any, with_tokenizer: bool = False, **settings: Any) -> Any:
        env = super().__call__(*args, **settings)
        if not with_tokenizer:
            return env
        if env.input_mode != "history":
            raise ValueError(f"with_tokenizer=True needs input_mode='history', got {env.input_mode!r}.")
        return TransformedEnv(env, _incremental_tokenizer(env))


def _incremental_tokenizer(env: ChatEnv) -> Transform:
    from skyrl_train.tensordict.envs.text import IncrementalTokenizer

    if env.tokenizer is None:
        raise ValueError("with_tokenizer=True needs a tokenizer. Pass tokenizer=.")
    return IncrementalTokenizer(env.tokenizer, template_kwargs=env.template_kwargs)


class ChatEnv(torchrl_chat.ChatEnv, metaclass=_ChatEnvMeta):  # type: ignore[misc]
    """TorchRL's conversation without a reward of its own: transforms add rewards, tools and an end.

    `reset` reads a question from `data_key` ("query"; also "text") and writes (input_mode, "prompt"). A question is a
    string, or a conversation that goes on: a History [turns], or messages. If its last message has the policy's role,
    the policy continues that message. An action is (input_mode, "full"), or "response" of the same container, or a
    string "text_response" ("tokens_response" in tokens mode). `step` appends it to form the next prompt.

    A conversation ends if a wrapper's response has no tokens, because the prompt left the model no room.

    Modes "text" and "tokens" render the prompt with the tokenizer's own chat template. Without a tokenizer, a text
    prompt consists of the messages' contents, separated by blank lines. Unlike TorchRL's, the specs describe the data,
    so that `check_env_specs` passes, and rows of different lengths need no padding.

    Args:
        with_tokenizer: Also keep ("tokens", "prompt") with the history; see `IncrementalTokenizer`. The result is a
            TransformedEnv.
    """

    def __init__(
        self,
        *,
        input_mode: str = "history",
        batch_size: Sequence[int] | int | None = None,
        tokenizer: Any = None,
        template_kwargs: Mapping[str, Any] | None = None,
        **settings: Any,
    ):
        if input_mode not in MODES:
            raise ValueError(f"input_mode={input_mode!r} is not one of {MODES}.")
        if tokenizer is None and input_mode == "tokens":
            raise ValueError('input_mode="tokens" needs a tokenizer. Pass tokenizer=.')
        variables = dict(template_kwargs or {})
        super().__init__(
            input_mode=input_mode, batch_size=batch_size, tokenizer=tokenizer, template_kwargs=variables, **settings
        )

    @classmethod
    def from_dataloader(cls, dataloader: Iterable[Any], **settings: Any) -> DatasetChatEnv:
        """Make a DatasetChatEnv over a loader of rows; see `DatasetChatEnv.from_dataloader`."""
        return DatasetChatEnv.from_dataloader(dataloader, **settings)

    def opening(self, question: str | Sequence[Message]) -> list[Message]:
        """Return the first messages of a conversation: the system prompt, if any, and the question.

        A last message of the policy's role is marked as incomplete, for the policy to continue it.
        """
        question = [{"role": self.user_role, "content": question}] if isinstance(question, str) else question
        asked: list[Message] = list(question)
        if continues_last_message(asked, self.policy_role):
            asked[-1] = {**asked[-1], "is_complete": False}
        return [{"role": self.system_role, "content": self.system_prompt}, *asked] if self.system_prompt else asked

    # ----------------------------------------------------------------------------------------- TorchRL's methods

    def _make_specs(self) -> None:
        settings: dict[str, Any] = {"shape": self.batch_size, "device": self.device}
        self.full_observation_spec = Composite({self.input_mode: self._spec_of("prompt")}, **settings)
        self.full_action_spec = Composite({self.input_mode: self._spec_of("full")}, **settings)
        self.full_state_spec = Composite({self.data_key: NonTensor(example_data="a string", **settings)}, **settings)

    def _spec_of(self, field: str) -> Composite:
        size, ragged = self.batch_size, (*self.batch_size, -1)
        if self.input_mode == "text":
            fields, kind = {field: NonTensor(size, example_data="a string")}, Text
        elif self.input_mode == "tokens":
            ids = Bounded(0, len(self.tokenizer) - 1, ragged, dtype=torch.int64)
            fields, kind = {field: ids, "padded": NonTensor(size, example_data=False)}, Tokens
        else:
            message = history_of([{"role": self.policy_role, "content": "a string"}])[0].to_dict()
            turns = {key: NonTensor(ragged, example_data=message[key]) for key in ("role", "content", "is_complete")}
            fields, kind = {field: Composite(turns, shape=ragged, data_cls=History)}, ChatHistory
        return Composite(fields, shape=size, data_cls=kind, step_mdp_static=True).to(self.device)

    def _reset(self, tensordict: TensorDictBase | None = None, **_: Any) -> TensorDictBase:
        if tensordict is None:
            tensordict = TensorDict({}, self.batch_size)
        return self._by_row(self._reset_row, tensordict.exclude("_reset", "next"))

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        return self._by_row(self._step_row, tensordict)

    def _by_row(
        self, function: Callable[[TensorDictBase], TensorDictBase], tensordict: TensorDictBase
    ) -> TensorDictBase:
        if not tensordict.ndim:
            row = function(tensordict)
            return row.copy().clear_device_() if self.device is None else row.to(self.device)
        return lazy_stack([self._by_row(function, part) for part in tensordict.unbind(0)])

    # --------------------------------------------------------------------------------------------------- a row

    def _reset_row(self, given: TensorDictBase) -> TensorDictBase:
        """Return the first observation of one episode, batch []."""
        key = next((key for key in (self.data_key, *QUESTION_KEYS) if question_of(given, key) is not None), None)
        question = None if key is None else question_of(given, key)
        if question is None:
            raise RuntimeError(
                f"{type(self).__name__}.reset expects a tensordict with a string, a History or messages under "
                f"{self.data_key!r} (or 'text'), got the keys {sorted(map(str, given.keys()))}. If another key has the "
                "question, name it with data_key."
            )
        row = given.exclude("text")  # policies write a container there
        if key == "text":
            row.set(QUESTION_KEYS[0], NonTensorData(question))
        return row.set(self.input_mode, self._container(self._prompt(self.opening(question))))

    def _container(self, prompt: Any) -> Any:
        if self.input_mode == "tokens":
            return Tokens(prompt=prompt, padded=False, batch_size=[])
        return (Text if self.input_mode == "text" else ChatHistory)(prompt=prompt, batch_size=[])

    def _prompt(self, messages: list[Message]) -> Any:
        if self.input_mode == "history":
            return history_of(messages)
        if self.input_mode == "tokens":
            return torch.tensor(render_prompt(self.tokenizer, rendered_form(messages), self.template_kwargs))
        if self.tokenizer is None:
            return "\n\n".join(str(message["content"]) for message in messages)
        way = "continue" if is_continued(messages, self.policy_role) else "open"
        return render_text(self.tokenizer, rendered_form(messages), self.template_kwargs, mode=way)

    def _step_row(self, root: TensorDictBase) -> TensorDictBase:
        """Return the next observation of one episode, batch []."""
        prompt = self._following(root)
        if prompt is None:
            mode, old = self.input_mode, "tokens_response" if self.input_mode == "tokens" else "text_response"
            raise ValueError(
                f"ChatEnv.step found no action: a policy writes ({mode!r}, 'full'), ({mode!r}, 'response') or {old!r}; "
                f"got the keys {sorted(map(str, root.keys()))}."
            )
        sampled = part(root, "tokens", "response")
        no_room = sampled is not None and not unpadded(root, sampled, response=True).numel()  # see LLMWrapperBase
        ended = {"done": torch.tensor([no_room]), "terminated": torch.tensor([False])}  # it is truncated
        following = TensorDict(ended, batch_size=[])
        return following.set(self.input_mode, self._container(prompt))

    def _following(self, root: TensorDictBase) -> Any:
        """Return the prompt that follows the action of one episode, or None without an action."""
        full, response = part(root, self.input_mode, "full"), part(root, self.input_mode, "response")
        if self.input_mode == "history":
            if full is None and (messages := full_messages(root, self.policy_role)) is not None:
                full = root["history"].full = history_of(messages)  # transforms read it there
            if full is None or full[-1].is_complete:
                return full
            *before, answer = messages_of(full)  # the next answer does not go on with a truncated one
            return history_of([*before, {**answer, "is_complete": True}])
        if self.input_mode == "text":
            if isinstance(full, str):
                return full
            response = response if isinstance(response, str) else text_of(root, "text_response")
            return None if response is None else part(root, "text", "prompt") + response
        if full is not None:
            return unpadded(root, full, response=False)
        response = response if response is not None else root.get("tokens_response", None)
        return None if response is None else torch.cat([root["tokens"].prompt, torch.as_tensor(response)])


class DatasetChatEnv(torchrl_chat.DatasetChatEnv):  # type: ignore[misc]
    """TorchRL's ChatEnv in which every reset takes the next row of a dataset, endlessly.

    Args:
        dataset: Rows (mappings), or a source for `dataset.read_rows`: a .parquet, .json or .jsonl file, a folder, a
            name on the hub. A column "text" is the question, unless there is "query" or `data_key` names another. The
            question is also under "query".
        shuffle: Use a new order in every pass over the rows, reproducible with `seed`.
        name, split: Configuration and split of a dataset on the hub.
        num_envs: Number of rows of the batch.
        repeats: Number of consecutive times that each row is used: the group size of GRPO.
        batch_size_dl: Number of rows drawn at a time; `collate_fn` gets a list of them and returns the rows to use.
        group_repeats: Accepted without effect: repeats are always consecutive.
        apply_template: Accepted without effect, as in TorchRL.
        system_prompt: By default the class's SYSTEM_PROMPT; "" for none.
        ray_backend: Read the rows in a Ray actor named `dataloader_actor_name`, which environments share.
        **chat: Other arguments of ChatEnv: roles and `with_tokenizer`.
    """

    def __init__(
        self,
        *,
        dataset: str | Iterable[Mapping[str, Any]] | Rows,
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
        primers: Composite | None = None,
        system_prompt: str | None = None,
        ray_backend: bool = False,
        dataloader_actor_name: str | None = None,
        with_tokenizer: bool = False,
        **chat: Any,
    ):
        if num_envs < 1:
            raise ValueError(f"num_envs={num_envs} must be at least 1.")
        if dataloader_actor_name is not None and not ray_backend:
            raise ValueError("dataloader_actor_name names a Ray actor. Set ray_backend=True, or leave it out.")
        source = functools.partial(
            self._dataloader_factory, dataset, name, split, seed, batch_size_dl, shuffle, collate_fn
        )
        kind = functools.partial(RayDataLoadingPrimer, actor_name=dataloader_actor_name) if ray_backend else None
        both: dict[str, Any] = {"batch_size": (num_envs,), "device": device}
        primer = (kind or DataLoadingPrimer)(
            dataloader_factory=source, question_key=data_key, repeats=repeats, primers=primers, **both
        )
        env = ChatEnv(
            input_mode=input_mode,
            tokenizer=tokenizer,
            template_kwargs=template_kwargs,
            data_key=data_key if data_key in set(primer.primers.keys()) else None,
            system_prompt=self.SYSTEM_PROMPT if system_prompt is None else system_prompt,
            **both,
            **chat,
        )
        TransformedEnv.__init__(self, env, Compose(primer))
        if with_tokenizer:
            self.append_transform(_incremental_tokenizer(env))

    @staticmethod
    def _dataloader_factory(
        dataset: Any, name: Any, split: Any, seed: int | None, batch_size_dl: int, shuffle: bool, collate_fn: Any
    ) -> Iterable[Any]:
        if isinstance(dataset, Rows):
            return dataset.batches
        seed = int(torch.randint(2**62, ())) if seed is None else seed
        rows = read_dataset(dataset, name, split)
        return Batches(rows, batch_size_dl, shuffle=shuffle, seed=seed, collate_fn=collate_fn)

    @classmethod
    def from_dataloader(
        cls,
        dataloader: Iterable[Any],
        *,
        num_envs: int | None = None,
        batch_size: Sequence[int] | int | None = None,
        **settings: Any,
    ) -> Self:
        """Make an environment over a loader of rows, which is repeated endlessly.

        Args:
            dataloader: Loader of mappings, lists of them, or batched mappings.
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
        read = {"dataset", "name", "split", "shuffle", "seed", "batch_size_dl", "collate_fn"}
        if of_rows := sorted(read & set(settings)):
            raise TypeError(
                f"{cls.__name__}.from_dataloader does not take {of_rows}, because the loader determines how rows are "
                "read. Leave them out."
            )
        return cls(dataset=Rows(dataloader), num_envs=num_envs or 1, **settings)


class TaskEnv(DatasetChatEnv):
    """A base of DatasetChatEnvs with a task's dataset and reward.

    Args:
        compute_reward: False for no reward.
        max_steps: Number of turns of an episode; 0 for no limit.
        **settings: Arguments of DatasetChatEnv; the default of `dataset` is the task's on the hub.
    """

    HUB: Mapping[str, str] = {}
    DATA_KEY: str | None = None
    REWARD: Callable[[Any], Transform]

    def __init__(self, *, compute_reward: bool = True, max_steps: int = 1, **settings: Any):
        name = self.HUB.get("dataset")
        hub = self.HUB if settings.get("dataset", name) == name else {}
        super().__init__(**{"data_key": self.DATA_KEY, **hub, **settings})
        if max_steps:
            self.append_transform(StepCounter(max_steps=max_steps))
        if compute_reward:
            self.append_transform(self.REWARD(settings.get("tokenizer")))


@dataclass(frozen=True)
class Rows:
    """A dataset whose batches come from a loader."""

    batches: Iterable[Any]


def read_dataset(
    dataset: str | Iterable[Mapping[str, Any]], name: str | None = None, split: str | None = None
) -> list[Mapping[str, Any]]:
    """Return the rows of a dataset: rows, a file, a folder, or a name on the hub with configuration and split.

    Raises:
        DataError: The dataset cannot be read.
        ValueError: It has no rows.
    """
    if not isinstance(dataset, str):
        rows = list(dataset)
    elif (name is not None or split is not None) and not dataset.endswith((".parquet", ".json", ".jsonl")):
        rows = [row for _, row in read_hub_dataset(dataset, split or "train", name)]
    else:
        rows = [row for _, row in read_rows(dataset)]
    if not rows:
        raise ValueError(f"dataset={dataset!r:.80} has no rows. Give at least one row.")
    return rows
