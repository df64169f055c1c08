"""All ranks of a model seen as one learner: shards by cost, scatters, gathers, and owns every global denominator."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from skyrl_train.algorithms.reductions import Denominators
from skyrl_train.data.batch import TrainBatch, pack
from skyrl_train.metrics import Metrics
from skyrl_train.workers.learner_worker import LearnerWorker, MiniBatch


class WorkerGroup:
    """N workers seen as one: everything goes to all of them, answers come in rank order.

    A worker is anything whose methods are coroutines: a `cluster.actors.Remote`, or a `LocalWorker`.
    """

    def __init__(self, workers: Sequence[Any]):
        self.workers = list(workers)

    def __len__(self) -> int:
        return len(self.workers)

    async def all(self, method: str, *args: Any) -> list[Any]:
        """The same call on every rank."""
        return await self.scatter(method, [args] * len(self))

    async def scatter(self, method: str, args_of_rank: Sequence[Sequence[Any]]) -> list[Any]:
        """A call with arguments of its own on every rank; raises the first failure without waiting for the others."""
        calls = [
            asyncio.ensure_future(getattr(worker, method)(*args))
            for worker, args in zip(self.workers, args_of_rank, strict=True)
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
    update_epochs: int = 1
    micro_train_sequences: int | None = 1
    """Sequences a micro-batch of one rank, in training; None where tokens alone decide."""
    micro_forward_sequences: int | None = 1
    max_tokens: int | None = None
    """Tokens a micro-batch of one rank; decides alone where given."""
    attention_tokens: int = 6 * 1024
    """Length at which attention costs as much as the linear layers (about 6 hidden sizes): how ranks are balanced."""


class Learner:
    """The policy's worker group, and the frozen reference's where KL is on."""

    def __init__(
        self, policy: WorkerGroup, reference: WorkerGroup | None, sizes: BatchSizes, needs_old_logprobs: bool = False
    ):
        """`needs_old_logprobs`: not only the loss reads them (KL in the reward does), so they are always computed."""
        self.policy = policy
        self.reference = reference
        self.sizes = sizes
        self.needs_old_logprobs = needs_old_logprobs

    async def setup(self) -> int:
        """Start all ranks; returns the policy's number of parameters."""
        groups = [group for group in (self.policy, self.reference) if group is not None]
        return int((await asyncio.gather(*(group.setup() for group in groups)))[0])

    async def score(self, batch: TrainBatch) -> TrainBatch:
        """Adds what the update needs: old log-probs if it takes several optimizer steps, the reference's with KL."""
        scored = batch
        if self.needs_old_logprobs or len(self._mini_batch_rows(batch)) > 1:
            scored = scored.with_tokens(old_logprobs=await self.logprobs(self.policy, batch))
        if self.reference is not None:
            scored = scored.with_tokens(ref_logprobs=await self.logprobs(self.reference, batch))
        return scored

    async def logprobs(self, group: WorkerGroup, batch: TrainBatch) -> Tensor:
        """[T] log-probs (nats) of masked tokens under `group`'s model; 0 elsewhere."""
        shards = self._micro_batches(batch, len(group), self.sizes.micro_forward_sequences)
        count = max(len(rows) for rows in shards)
        parts = await group.scatter("score", [([batch.select(r) for r in rows], count) for rows in shards])
        result = torch.zeros(len(batch.input_ids))
        for rows, values in zip(shards, parts, strict=True):
            order = [row for micro in rows for row in micro]
            if order:
                result[_token_indices(batch, order)] = values
        return result

    async def update(self, batch: TrainBatch) -> dict[str, float]:
        """All optimizer steps of a training step; returns metrics averaged exactly over tokens and ranks."""
        of_rank: list[list[MiniBatch]] = [[] for _ in self.policy.workers]
        for rows in self._mini_batch_rows(batch):
            mini_batch = batch.select(rows)
            denominators = Denominators.of(mini_batch)
            shards = self._micro_batches(mini_batch, len(self.policy), self.sizes.micro_train_sequences)
            count = max(len(micro) for micro in shards)
            for rank, micro in enumerate(shards):
                of_rank[rank].append(MiniBatch([mini_batch.select(r) for r in micro], count, denominators))
        metrics = Metrics()
        for state in await self.policy.scatter("update", [(mini_batches,) for mini_batches in of_rank]):
            metrics.merge(state)
        return metrics.flush()

    async def offload(self) -> None:
        await self._everywhere("offload")

    async def onload(self) -> None:
        await self._everywhere("onload")

    async def close(self) -> None:
        await self._everywhere("close")

    async def _everywhere(self, method: str) -> None:
        groups = [group for group in (self.policy, self.reference) if group is not None]
        await asyncio.gather(*(group.all(method) for group in groups))

    def _mini_batch_rows(self, batch: TrainBatch) -> list[list[int]]:
        """Rows of every optimizer step: whole prompts, `mini_batch_groups` at a time, repeated for every epoch.

        A mini-batch without one token to learn from would be an update by weight decay alone: it is left out.
        """
        groups = batch.group_ids.unique_consecutive()
        learns = batch.per_sequence_sum(batch.loss_mask.long()) > 0
        chosen = []
        for ids in groups.split(self.sizes.mini_batch_groups):
            rows = torch.isin(batch.group_ids, ids)
            if bool((rows & learns).any()):
                chosen.append(rows.nonzero().flatten().tolist())
        return chosen * self.sizes.update_epochs

    def _micro_batches(self, batch: TrainBatch, ranks: int, sequences: int | None) -> list[list[list[int]]]:
        """[rank][micro-batch][row]: sequences with something to score, balanced over ranks by cost, longest first."""
        lengths = batch.lengths
        wanted = (batch.per_sequence_sum(batch.loss_mask.long()) > 0).nonzero().flatten()
        cost = lengths * (1 + lengths / self.sizes.attention_tokens)
        shards = batch.select(wanted).shard(ranks, cost[wanted])
        limit = None if self.sizes.max_tokens else sequences
        result = []
        for shard in shards:
            rows = sorted(wanted[shard].tolist(), key=lambda row: (-int(lengths[row]), row))
            bins = pack([int(lengths[row]) for row in rows], limit, self.sizes.max_tokens)
            result.append([[rows[position] for position in one] for one in bins])
        return result


def _token_indices(batch: TrainBatch, rows: Sequence[int]) -> Tensor:
    offsets = batch.offsets.tolist()
    return torch.cat([torch.arange(offsets[row], offsets[row + 1]) for row in rows])
