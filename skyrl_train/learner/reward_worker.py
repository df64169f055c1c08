"""A reward model: a frozen classifier that scores finished conversations, and one interface to its replicas.

Sequences go through the model's own forward one at a time: no padding, and no score depends on other conversations.
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

Score = float | EnvironmentFailure
"""The reward of a conversation, or the reason why it has none."""


class RewardWorker:
    """One complete replica: call `setup`, then `score`. A plain class, usually run in an actor."""

    def __init__(
        self, path: str, *, dtype: str, device: str, threads: int | None, model_config_kwargs: Mapping[str, Any]
    ):
        """`dtype`, e.g. "bfloat16"; `threads`: CPU threads, None for torch's default (on accelerators)."""
        self.path = path
        self.dtype = getattr(torch, dtype)
        self.device = device
        self.model_config_kwargs = model_config_kwargs
        if threads:
            torch.set_num_threads(threads)

    def setup(self) -> None:
        """Load model and tokenizer. Raises ConfigError if the model cannot score conversations."""
        self.tokenizer = load_tokenizer(self.path, key=REWARD_PATH_KEY)
        if self.tokenizer.chat_template is None:
            raise ConfigError(
                f"{REWARD_PATH_KEY}={self.path!r}: its tokenizer has no chat template, which turns a conversation into the "
                "model's tokens; put the one it was trained with into its folder as chat_template.jinja."
            )
        self.model = load_reward_model(
            self.path, dtype=self.dtype, device=self.device, model_config_kwargs=self.model_config_kwargs
        )
        self.max_tokens = get_max_positions(self.model)

    def score(self, conversations: Sequence[Sequence[Message]]) -> list[Score]:
        """The model's score of each conversation, or an EnvironmentFailure in its place.

        Kinds of failures: "reward_model_too_long"; "bad_reward" for a score that is not finite;
        "reward_model_template" for messages that the model's chat template refuses.
        """
        return [self._score(messages) for messages in conversations]

    def _score(self, messages: Sequence[Message]) -> Score:
        try:
            ids = render_messages(self.tokenizer, messages)
        except DataError as error:
            return EnvironmentFailure("reward_model_template", str(error))
        if self.max_tokens is not None and len(ids) > self.max_tokens:
            return EnvironmentFailure("reward_model_too_long", f"{len(ids)} tokens of at most {self.max_tokens}")
        row = torch.tensor([ids], device=self.device)  # [1, L]
        with torch.no_grad():
            score = float(self.model(input_ids=row, attention_mask=torch.ones_like(row)).logits.item())
        if not math.isfinite(score):
            return EnvironmentFailure("bad_reward", f"the reward model's score is {score}")
        return score


class RewardModel:
    """One interface to all replicas: a call goes to the first free replica, and each runs one call at a time.

    A replica is any object whose methods are coroutines, such as a `cluster.actors.ActorProxy`. Waiting for a free replica
    does not count towards the deadline of a call. Once a replica is lost, all calls that wait for one fail.

    consumes: conversations · produces: scores · waits for: a free replica, then its call · unblocked by: the deadline
    of the calls before, and of its own
    """

    def __init__(self, replicas: Sequence[Any]):
        self.replicas = list(replicas)
        self._free: asyncio.Queue[Any] = asyncio.Queue()
        for replica in self.replicas:
            self._free.put_nowait(replica)

    async def setup(self, deadline_s: float) -> None:
        """Load all replicas. Raises DeadlineExceeded naming a replica that takes longer than `deadline_s`."""
        await asyncio.gather(*(replica.call_with_deadline(deadline_s, "setup") for replica in self.replicas))

    async def score(self, conversations: Sequence[Sequence[Message]]) -> list[Score]:
        """See RewardWorker.score. Raises RewardModelLost naming the replica that died or did not answer."""
        replica = await self._free.get()
        if isinstance(replica, RewardModelLost):
            self._free.put_nowait(replica)  # for the next call
            raise RewardModelLost(str(replica)) from replica.__cause__
        call = asyncio.ensure_future(replica.score(conversations))
        # A cancelled caller does not wait; the replica still finishes the call, and is free only then.
        call.add_done_callback(lambda done: self._release(replica, done))
        try:
            return await asyncio.shield(call)  # type: ignore[no-any-return]
        except (WorkerDied, DeadlineExceeded) as error:
            raise RewardModelLost(str(error)) from error

    def _release(self, replica: Any, call: asyncio.Future[Any]) -> None:
        error = None if call.cancelled() else call.exception()
        if isinstance(error, WorkerDied | DeadlineExceeded):
            lost = RewardModelLost(str(error))
            lost.__cause__ = error  # by which a run knows that it has lost a process, whoever raises first
            self._free.put_nowait(lost)
        else:
            self._free.put_nowait(replica)
