"""A reward model: a frozen classifier that scores finished conversations, and its replicas seen as one.

One sequence at a time goes through the model's own forward: no padding, and no score depends on what else is scored.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from skyrl_train.data.chat import render_messages
from skyrl_train.data.trajectory import Message
from skyrl_train.errors import (
    ConfigError,
    DataError,
    DeadlineExceeded,
    EnvironmentFailure,
    RewardModelLost,
    WorkerDied,
)
from skyrl_train.models.loading import REWARD_PATH, load_reward_model, load_tokenizer, max_positions

Score = float | EnvironmentFailure
"""What a conversation is worth, or why it has no score."""


class RewardWorker:
    """One whole replica: `setup`, then `score`. A plain class, usually living in an actor."""

    def __init__(
        self, path: str, *, dtype: str, device: str, threads: int | None, model_config_kwargs: Mapping[str, Any]
    ):
        """`dtype` as in "bfloat16"; `threads` of the CPU, None leaves torch's own choice (on accelerators)."""
        self.path = path
        self.dtype = getattr(torch, dtype)
        self.device = device
        self.model_config_kwargs = model_config_kwargs
        if threads:
            torch.set_num_threads(threads)

    def setup(self) -> None:
        """Load model and tokenizer. Raises ConfigError for what cannot score conversations."""
        self.tokenizer = load_tokenizer(self.path, key=REWARD_PATH)
        if self.tokenizer.chat_template is None:
            raise ConfigError(
                f"{REWARD_PATH}={self.path!r}: its tokenizer has no chat template, which turns a conversation into the "
                "model's tokens; put the one it was trained with into its folder as chat_template.jinja."
            )
        self.model = load_reward_model(
            self.path, dtype=self.dtype, device=self.device, model_config_kwargs=self.model_config_kwargs
        )
        self.max_tokens = max_positions(self.model)

    def score(self, conversations: Sequence[Sequence[Message]]) -> list[Score]:
        """The model's output for each conversation.

        Failures: "reward_model_too_long", "bad_reward" for a score that is not finite, "reward_model_template" for
        messages that the model's chat template refuses.
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
    """Replicas seen as one: a call goes to the first that is free, which has one call at a time.

    A replica is anything whose methods are coroutines, such as a `cluster.actors.Remote`. The wait for a free one is no
    part of its call, so the call's deadline is for the scoring alone. Once a replica is lost nobody waits any longer.

    consumes: conversations · produces: scores · waits for: a free replica, then its call · unblocked by: the deadline
    of the calls before, and of its own
    """

    def __init__(self, replicas: Sequence[Any]):
        self.replicas = list(replicas)
        self._free: asyncio.Queue[Any] = asyncio.Queue()
        for replica in self.replicas:
            self._free.put_nowait(replica)

    async def setup(self, deadline_s: float) -> None:
        """Load all replicas. Raises DeadlineExceeded naming one that takes longer."""
        await asyncio.gather(*(replica.call_within(deadline_s, "setup") for replica in self.replicas))

    async def score(self, conversations: Sequence[Sequence[Message]]) -> list[Score]:
        """See RewardWorker.score. Raises RewardModelLost naming the replica that died or did not answer."""
        replica = await self._free.get()
        if isinstance(replica, RewardModelLost):
            self._free.put_nowait(replica)  # for who comes next
            raise RewardModelLost(str(replica))
        call = asyncio.ensure_future(replica.score(conversations))
        # Who is cancelled does not wait; the replica computes on, and is free only after it.
        call.add_done_callback(lambda done: self._release(replica, done))
        try:
            return await asyncio.shield(call)  # type: ignore[no-any-return]
        except (WorkerDied, DeadlineExceeded) as error:
            raise RewardModelLost(str(error)) from error

    def _release(self, replica: Any, call: asyncio.Future[Any]) -> None:
        error = None if call.cancelled() else call.exception()
        lost = isinstance(error, WorkerDied | DeadlineExceeded)
        self._free.put_nowait(RewardModelLost(str(error)) if lost else replica)
