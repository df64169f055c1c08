"""All ranks of a model seen as one learner: shards by cost, scatters, gathers, and owns every global denominator."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from skyrl_train.algorithms.reductions import token_mean, weigh
from skyrl_train.algorithms.value_objective import explained_variance
from skyrl_train.data.batch import TrainBatch
from skyrl_train.errors import ConfigError
from skyrl_train.learner.micro_batches import PassLimits, micro_batches, shares_prompts
from skyrl_train.learner.worker import LearnerWorker, MiniBatch
from skyrl_train.metrics import Metrics

_log = logging.getLogger(__name__)

Choose = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(logprobs, old_logprobs, advantages, mask), all [T] -> [T] bool; see algorithms/selections.py."""


class WorkerGroup:
    """N workers seen as one: everything goes to all of them, answers come in rank order.

    A worker is anything whose methods are coroutines: a `cluster.actors.Remote`, or a `LocalWorker`.
    """

    def __init__(self, workers: Sequence[Any], together: int = 1):
        """`together`: neighbours that run every micro-batch together."""
        self.workers = list(workers)
        self.together = together

    def __len__(self) -> int:
        return len(self.workers)

    @property
    def num_parts(self) -> int:
        """Into how many parts a batch is divided."""
        return len(self) // self.together

    async def all(self, method: str, *args: Any) -> list[Any]:
        """The same call on every rank."""
        return await self.scatter(method, [args] * len(self))

    async def scatter(self, method: str, args_of_part: Sequence[Sequence[Any]]) -> list[Any]:
        """A call with arguments of its own for every part, each on as many neighbours: one or more.

        Raises the first failure without waiting for the others.
        """
        neighbours, rest = divmod(len(self), len(args_of_part))
        assert rest == 0, f"{len(args_of_part)} parts for {len(self)} ranks"
        calls = [
            asyncio.ensure_future(getattr(worker, method)(*args_of_part[rank // neighbours]))
            for rank, worker in enumerate(self.workers)
        ]
        try:
            return await asyncio.gather(*calls)
        finally:
            for call in calls:
                call.cancel()

    async def setup(self) -> int:
        """Let the ranks meet and load; returns the number of parameters."""
        address, port = await self.workers[0].address()
        return int((await self.all("setup", address, port))[0])


class LocalWorker:
    """A worker in this process: the same coroutines as a remote one. For one rank."""

    def __init__(self, worker: LearnerWorker):
        self.worker = worker

    def __getattr__(self, method: str) -> Any:
        async def call(*args: Any) -> Any:
            return await asyncio.to_thread(getattr(self.worker, method), *args)

        return call


@dataclass(frozen=True)
class BatchSizes:
    """How a step's sequences become optimizer steps and micro-batches."""

    mini_batch_groups: int
    """Prompts an optimizer step; the last one of a step may be smaller."""
    critic_mini_batch_groups: int = 1
    """The same of the critic's."""
    update_epochs: int = 1
    micro_train_sequences: int | None = 1
    """Sequences a micro-batch of one rank, in training; None where tokens alone decide."""
    micro_forward_sequences: int | None = 1
    max_tokens: int | None = None
    """Tokens a micro-batch of one rank; decides alone where given."""
    attention_tokens: int = 6 * 1024
    """Length at which attention costs as much as the linear layers (about 6 hidden sizes): how ranks are balanced."""
    share_prompt: bool | None = None
    """Whether a prompt goes through the model once for all of its samples in a pass; None: where it is worth it."""


class Learner:
    """The policy's worker group, the frozen reference's where KL is on, the critic's where advantages need values."""

    def __init__(
        self,
        policy: WorkerGroup,
        reference: WorkerGroup | None,
        sizes: BatchSizes,
        *,
        critic: WorkerGroup | None = None,
        reduction: Callable[..., Tensor] | None = None,
        choose: Choose | None = None,
        needs_old_logprobs: bool | None = None,
    ):
        """`reduction` gives tokens their weights in a mini-batch (None: all the same); `choose` is the choice of tokens
        that the loss asks for. `needs_old_logprobs`: whether anything reads the policy's log-probs from before the
        update; None: only the loss does, which has them itself where the update is one optimizer step.
        """
        self.policy = policy
        self.reference = reference
        self.critic = critic
        self.sizes = sizes
        self.reduction = reduction or partial(token_mean, max_seq_len=1)
        self.choose = choose
        self.needs_old_logprobs = True if choose is not None else needs_old_logprobs

    async def setup(self) -> int:
        """Start all ranks; returns the policy's number of parameters."""
        return int((await asyncio.gather(*(group.setup() for group in self._groups)))[0])

    @property
    def trained(self) -> dict[str, WorkerGroup]:
        """What a checkpoint holds, by role."""
        return {"policy": self.policy} | ({} if self.critic is None else {"critic": self.critic})

    @property
    def _groups(self) -> list[WorkerGroup]:
        return [*self.trained.values(), *([] if self.reference is None else [self.reference])]

    async def score(self, batch: TrainBatch) -> TrainBatch:
        """Adds what the update needs: old log-probs where they are read, the reference's with KL, a critic's values."""
        scored = batch
        needs_old = self.needs_old_logprobs
        if len(self._mini_batch_rows(batch)) > 1 if needs_old is None else needs_old:
            scored = scored.with_tokens(old_logprobs=await self.token_scores(self.policy, batch))
        if self.critic is not None:
            scored = scored.with_tokens(values=await self.token_scores(self.critic, batch))
        return await self.with_reference(scored)

    async def with_reference(self, batch: TrainBatch) -> TrainBatch:
        """Adds the reference's log-probs where there is a reference."""
        if self.reference is None:
            return batch
        return batch.with_tokens(ref_logprobs=await self.token_scores(self.reference, batch))

    async def token_scores(self, group: WorkerGroup, batch: TrainBatch) -> Tensor:
        """[T] what `group`'s model says of masked tokens, log-probs (nats) or a critic's values; 0 elsewhere."""
        limits = self._limits(self.sizes.micro_forward_sequences)
        share = shares_prompts(batch, limits)
        shards = micro_batches(batch, group.num_parts, limits, share)
        count = max(len(rows) for rows in shards)
        parts = await group.scatter("score", [([batch.select(r) for r in rows], count, share) for rows in shards])
        result = torch.zeros(len(batch.input_ids))
        for rows, values in zip(shards, parts[:: group.together], strict=True):
            order = [row for micro in rows for row in micro]
            if order:
                result[_token_indices(batch, order)] = values
        return result

    async def update(self, batch: TrainBatch) -> dict[str, float]:
        """All optimizer steps of a training step; returns metrics averaged exactly over tokens and ranks."""
        metrics = Metrics()
        if self.critic is not None:
            await self._update_critic(self.critic, batch, metrics)
        mini_batches = self._mini_batch_rows(batch)
        metrics.count("policy/optimizer_steps", len(mini_batches))
        if not mini_batches:
            _log.warning("No token of this step's batch counts: nothing was learnt from it.")
        for index, rows in enumerate(mini_batches):
            mini_batch = weigh(batch.select(rows), self.reduction)
            if self.choose is not None:
                mini_batch = await self._selected(mini_batch, self.choose, first=index == 0)
            await self._step(self.policy, mini_batch, metrics)
        return metrics.flush()

    async def _update_critic(self, critic: WorkerGroup, batch: TrainBatch, metrics: Metrics) -> None:
        """Every token weighs the same in it, whatever `reduction` the policy's loss has."""
        assert batch.values is not None, "values are scored before the update"
        if batch.returns is None:
            raise ConfigError(
                "trainer.algorithm.advantage_estimator asks for values and gives no returns for the critic to learn: "
                "return TokenAdvantages(advantages, returns)."
            )
        explained = explained_variance(batch.values, batch.returns, batch.loss_mask)
        if explained is not None:
            metrics.add("critic/explained_variance", explained)
        for rows in self._mini_batch_rows(batch, self.sizes.critic_mini_batch_groups):
            mini_batch = weigh(batch.select(rows), partial(token_mean, max_seq_len=1))
            await self._step(critic, mini_batch, metrics)

    async def _step(self, group: WorkerGroup, mini_batch: TrainBatch, metrics: Metrics) -> None:
        """One optimizer step of a model on all of its ranks."""
        tokens = int(mini_batch.loss_mask.sum())
        limits = self._limits(self.sizes.micro_train_sequences)
        share = shares_prompts(mini_batch, limits)
        shards = micro_batches(mini_batch, group.num_parts, limits, share)
        count = max(len(micro) for micro in shards)
        parts = [(MiniBatch([mini_batch.select(rows) for rows in micro], count, tokens, share),) for micro in shards]
        for state in await group.scatter("update", parts):
            metrics.merge(state)

    async def _selected(self, mini_batch: TrainBatch, choose: Choose, *, first: bool) -> TrainBatch:
        """With the tokens that the loss treats apart, chosen under the policy as it is before this optimizer step."""
        old = mini_batch.old_logprobs
        assert old is not None and mini_batch.advantages is not None, "a choice of tokens needs old log-probs"
        current = old if first else await self.token_scores(self.policy, mini_batch)
        return mini_batch.with_tokens(selected=choose(current, old, mini_batch.advantages, mini_batch.loss_mask))

    async def offload(self) -> None:
        await self._everywhere("offload")

    async def onload(self) -> None:
        await self._everywhere("onload")

    async def close(self) -> None:
        await self._everywhere("close")

    async def _everywhere(self, method: str) -> None:
        await asyncio.gather(*(group.all(method) for group in self._groups))

    def _mini_batch_rows(self, batch: TrainBatch, num_groups: int | None = None) -> list[list[int]]:
        """Rows of every optimizer step: whole prompts, `num_groups` (the policy's) at a time, repeated for every epoch.

        A mini-batch without one token to learn from would be an update by weight decay alone: it is left out.
        """
        groups = batch.group_ids.unique_consecutive()
        assert len(groups) == len(groups.unique()), "the samples of a prompt lie together, or they would be used twice"
        learns = batch.per_sequence_sum(batch.loss_mask.long()) > 0
        chosen = []
        for ids in groups.split(num_groups or self.sizes.mini_batch_groups):
            rows = torch.isin(batch.group_ids, ids)
            if bool((rows & learns).any()):
                chosen.append(rows.nonzero().flatten().tolist())
        return chosen * self.sizes.update_epochs

    def _limits(self, sequences: int | None) -> PassLimits:
        sizes = self.sizes
        return PassLimits(sequences, sizes.max_tokens, sizes.attention_tokens, sizes.share_prompt)


def _token_indices(batch: TrainBatch, rows: Sequence[int]) -> Tensor:
    offsets = batch.offsets.tolist()
    return torch.cat([torch.arange(offsets[row], offsets[row + 1]) for row in rows])
