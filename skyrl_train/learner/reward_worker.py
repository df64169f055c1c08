"""A reward model: a frozen classifier that scores finished conversations, and one interface to its replicas.

Sequences go through the model's forward method one at a time, so there is no padding, and a score does not depend on
other conversations.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from skyrl_train.data.chat import render_messages
from skyrl_train.data.messages import Message
from skyrl_train.errors import (
    ConfigError,
    DataError,
    DeadlineExceeded,
    EnvironmentFailure,
    RewardModelLost,
    WorkerDied,
)
from skyrl_train.models.loading import REWARD_PATH_KEY, get_max_positions, load_reward_model, load_tokenizer

ScoreResult = float | EnvironmentFailure
"""The reward of a conversation, or the reason why it has none."""


class RewardWorker:
    """One complete replica of the reward model, usually run in an actor. Call `setup` before `score`."""

    def __init__(
        self, path: str, *, dtype: str, device: str, threads: int | None, model_config_kwargs: Mapping[str, Any]
    ):
        """Describe the model, which `setup` loads.

        Args:
            path: Folder or hub name of the model.
            dtype: Name of the torch dtype of weights and computations, for example "bfloat16".
            device: The torch device.
            threads: CPU threads of this process; None for torch's default.
            model_config_kwargs: Values that replace entries of the model's configuration.
        """
        self.path = path
        self.dtype = getattr(torch, dtype)
        self.device = device
        self.model_config_kwargs = model_config_kwargs
        if threads:
            torch.set_num_threads(threads)

    def setup(self) -> None:
        """Load the model and its tokenizer. Raises ConfigError if the model cannot score conversations."""
        self.tokenizer = load_tokenizer(self.path, key=REWARD_PATH_KEY)
        if self.tokenizer.chat_template is None:
            raise ConfigError(
                f"{REWARD_PATH_KEY}={self.path!r}: its tokenizer has no chat template to render conversations with. "
                "Add the template that the model was trained with to its folder as chat_template.jinja."
            )
        self.model = load_reward_model(
            self.path, dtype=self.dtype, device=self.device, model_config_kwargs=self.model_config_kwargs
        )
        self.max_tokens = get_max_positions(self.model)

    def score(self, conversations: Sequence[Sequence[Message]]) -> list[ScoreResult]:
        """Score conversations.

        Returns:
            The score of each conversation. In place of a score there is an EnvironmentFailure of the kind
            "reward_model_too_long" if the conversation exceeds the model's positions, "bad_reward" if the score is not
            finite, or "reward_model_template" if the chat template cannot render the messages.
        """
        return [self._score(messages) for messages in conversations]

    def _score(self, messages: Sequence[Message]) -> ScoreResult:
        try:
            ids = render_messages(self.tokenizer, messages)
        except DataError as error:
            return EnvironmentFailure("reward_model_template", str(error))
        if self.max_tokens is not None and len(ids) > self.max_tokens:
            return EnvironmentFailure("reward_model_too_long", f"{len(ids)} tokens, at most {self.max_tokens} allowed")
        row = torch.tensor([ids], device=self.device)  # [1, L]
        with torch.no_grad():
            score = float(self.model(input_ids=row, attention_mask=torch.ones_like(row)).logits.item())
        if not math.isfinite(score):
            return EnvironmentFailure("bad_reward", f"the reward model's score is {score}")
        return score


class RewardModel:
    """One interface to all replicas of the reward model: each call goes to the next free replica.

    A replica executes one call at a time. The time that a call waits for a free replica does not count towards its
    deadline; the deadlines of earlier calls limit it. Once a replica is lost, all later and waiting calls fail.
    """

    def __init__(self, replicas: Sequence[Any]):
        """Wrap replicas: objects whose methods are coroutines, such as a `cluster.actors.ActorProxy`."""
        self.replicas = list(replicas)
        self._free: asyncio.Queue[Any] = asyncio.Queue()
        for replica in self.replicas:
            self._free.put_nowait(replica)

    async def setup(self, deadline_s: float) -> None:
        """Load the models of all replicas.

        Args:
            deadline_s: Seconds that each replica may take.

        Raises:
            DeadlineExceeded: A replica, which the message names, took longer.
            ConfigError: The model cannot score conversations.
        """
        await asyncio.gather(*(replica.call_with_deadline(deadline_s, "setup") for replica in self.replicas))

    async def score(self, conversations: Sequence[Sequence[Message]]) -> list[ScoreResult]:
        """Score conversations on a free replica; see `RewardWorker.score`.

        If the caller is canceled, the replica still finishes the call before it takes another one.

        Raises:
            RewardModelLost: A replica, which the message names, died or exceeded its deadline.
        """
        replica = await self._free.get()
        if isinstance(replica, RewardModelLost):
            self._free.put_nowait(replica)  # for the next call
            raise RewardModelLost(str(replica)) from replica.__cause__
        call = asyncio.ensure_future(replica.score(conversations))
        call.add_done_callback(lambda done: self._release(replica, done))  # also if the caller is canceled
        try:
            return await asyncio.shield(call)  # type: ignore[no-any-return]
        except (WorkerDied, DeadlineExceeded) as error:
            raise RewardModelLost(str(error)) from error

    def _release(self, replica: Any, call: asyncio.Future[Any]) -> None:
        error = None if call.cancelled() else call.exception()
        if isinstance(error, WorkerDied | DeadlineExceeded):
            lost = RewardModelLost(str(error))
            lost.__cause__ = error  # shows that a process was lost, whichever call raises the error first
            self._free.put_nowait(lost)
        else:
            self._free.put_nowait(replica)
