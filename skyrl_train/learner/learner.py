"""One interface to the ranks of all models: log-probs and values of batches, updates, and offloading."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from skyrl_train.aio import gather_all
from skyrl_train.algorithms.reductions import assign_loss_weights, token_mean
from skyrl_train.algorithms.value_objective import explained_variance
from skyrl_train.cluster.actors import ActorProxy
from skyrl_train.cluster.stack_dumps import ProcessStack, collect_stacks
from skyrl_train.data.batch import SFTExample, TrainBatch, collate_sft_examples
from skyrl_train.errors import ConfigError, DeadlineExceeded, SkyRLError, WeightSyncError, WorkerDied
from skyrl_train.learner.batch_sharding import MicroBatchLimits, ShardedBatch, ShardedMiniBatch, StoredCall
from skyrl_train.learner.worker import LearnerWorker
from skyrl_train.metrics import Metrics

_log = logging.getLogger(__name__)

TokenSelector = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(logprobs, old_logprobs, advantages, mask), all [T] -> [T] bool; see algorithms/token_selection.py."""
FAILURE_DETECTION_S = 5.0
"""Seconds after which the driver knows that a rank on the same node died, counted from when its peers know it."""
RESPONSE_TIMEOUT_S = 30.0
"""Timeout for `Learner.is_responsive`, in which a rank that does not hang leaves a call that failed."""


class WorkerGroup:
    """The workers of one model: sends each call to all of them and returns the results in rank order."""

    def __init__(
        self, workers: Sequence[Any], parallel_size: int = 1, failure_detection_s: float = FAILURE_DETECTION_S
    ):
        """Wrap workers, of which there is at least one.

        Args:
            workers: Objects whose methods are coroutines, in rank order: each is a `cluster.actors.ActorProxy` or a
                `LocalWorker`.
            parallel_size: Number of neighboring ranks that form a parallel group and share every micro-batch.
            failure_detection_s: Seconds to wait for the report of a rank's death after its peers raised an error.
        """
        self._failure_detection_s = failure_detection_s
        self.workers = list(workers)
        self.parallel_size = parallel_size
        self.num_running_calls = 0
        """Number of calls in progress. A rank executes one at a time, so even short calls wait for the others."""

    def __len__(self) -> int:
        return len(self.workers)

    @property
    def data_parallel_size(self) -> int:
        """Number of shards that a batch is divided into: one per parallel group."""
        return len(self) // self.parallel_size

    async def call_all(self, method: str, *args: Any) -> list[Any]:
        """Call `method` with the same arguments on every rank, and return the results in rank order.

        Raises as `call_sharded` does.
        """
        return await self.call_sharded(method, [args] * len(self))

    async def call_sharded(self, method: str, args_per_dp_rank: Sequence[Sequence[Any] | StoredCall]) -> list[Any]:
        """Call `method` on every rank, with separate arguments for each data-parallel rank.

        Args:
            method: The name of the method.
            args_per_dp_rank: The arguments of each data-parallel rank, or references to arguments that are stored.
                Their number divides the number of ranks; each entry goes to equally many neighboring ranks.

        Returns:
            The results in rank order.

        Raises:
            WorkerDied: A rank died, also if its peers raised an error of a collective first.
            Exception: The first error of a rank, without waiting for the other ranks.
        """
        ranks_per_shard, rest = divmod(len(self), len(args_per_dp_rank))
        assert rest == 0, f"{len(args_per_dp_rank)} shards for {len(self)} ranks"
        calls: list[asyncio.Future[Any]] = []
        self.num_running_calls += 1
        try:
            # There is no await in this loop, so all ranks receive the calls of several callers in the same order.
            # Otherwise the collectives of one call would meet those of another.
            for rank, worker in enumerate(self.workers):
                args = args_per_dp_rank[rank // ranks_per_shard]
                if isinstance(args, StoredCall):
                    call = worker.call_with_refs(method, args.plan, args.values)
                else:
                    call = getattr(worker, method)(*args)
                calls.append(asyncio.ensure_future(call))
            return await asyncio.gather(*calls)
        except RuntimeError as error:
            is_collective_error = isinstance(error, dist.DistError) or "gloo" in str(error) or "NCCL" in str(error)
            if is_collective_error and (death := await self._wait_for_death(calls)) is not None:
                raise death from error
            raise
        finally:
            self.num_running_calls -= 1
            for call in calls:
                call.cancel()

    def put(self, value: Any) -> Any:
        """Put a value into the object store for all ranks and return a reference to it. Blocks: call it in a thread."""
        return self.workers[0].put(value)

    async def _wait_for_death(self, calls: Sequence[asyncio.Future[Any]]) -> WorkerDied | None:
        """Return the first reported death of a rank; None if none is reported in time."""
        pending = set(calls)
        with suppress(TimeoutError):
            async with asyncio.timeout(self._failure_detection_s):
                while pending:
                    done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                    for call in done:
                        failure = None if call.cancelled() else call.exception()
                        if isinstance(failure, WorkerDied):
                            return failure
        return None

    async def setup(self) -> int:
        """Connect the ranks to each other and load the model on them. Return its number of parameters.

        Raises DeadlineExceeded if not all ranks connect in time, ConfigError if the model cannot be used.
        """
        address, port = await self.workers[0].address()
        return int((await self.call_all("setup", address, port))[0])


class LocalWorker:
    """A worker in this process with the interface of a remote one, for a model on a single rank.

    Every method of the worker is available as a coroutine that runs the method in a thread.
    """

    def __init__(self, worker: LearnerWorker):
        self.worker = worker

    def put(self, value: Any) -> Any:
        """Return the value itself, which serves as its own reference."""
        return value

    async def call_with_refs(self, method: str, plan: Any, refs: Sequence[Any]) -> Any:
        """Call a method of the worker in a thread, with the arguments that `plan` builds from `refs`.

        Args:
            method: The name of the method.
            plan: An object with `build_arguments`, such as an `UpdatePlan`.
            refs: The values that `put` returned.
        """
        return await asyncio.to_thread(lambda: getattr(self.worker, method)(*plan.build_arguments(*refs)))

    def __getattr__(self, method: str) -> Any:
        async def call(*args: Any) -> Any:
            return await asyncio.to_thread(getattr(self.worker, method), *args)

        return call


@dataclass(frozen=True)
class BatchSizes:
    """The sizes that divide a step's sequences into optimizer steps and micro-batches."""

    policy_mini_batch_size: int
    """Number of prompts per optimizer step of the policy; the last one of a training step may have fewer."""
    critic_mini_batch_size: int = 1
    """Number of prompts per optimizer step of the critic."""
    update_epochs_per_batch: int = 1
    """Number of passes over the batch in one training step."""
    micro_train_batch_size_per_gpu: int | None = 1
    """Sequences per micro-batch of a rank in updates; None if `max_tokens_per_microbatch` is set."""
    micro_forward_batch_size_per_gpu: int | None = 1
    """Sequences per micro-batch of a rank in passes without gradient; None if `max_tokens_per_microbatch` is set."""
    max_tokens_per_microbatch: int | None = None
    """Tokens per micro-batch of a rank. If set, the numbers of sequences are ignored."""
    attention_tokens: int = 6 * 1024
    """Length at which attention costs as much as the linear layers (about 6 hidden sizes); used to balance ranks."""
    share_prompt: bool | None = None
    """True if a micro-batch computes a prompt once for all of its samples; None to decide per batch."""


class Learner:
    """The worker groups of the policy, the reference (if KL is used) and the critic (if advantages need values)."""

    def __init__(
        self,
        policy: WorkerGroup,
        reference: WorkerGroup | None,
        sizes: BatchSizes,
        *,
        critic: WorkerGroup | None = None,
        reduction: Callable[..., Tensor] | None = None,
        token_selector: TokenSelector | None = None,
        needs_old_logprobs: bool | None = None,
        stacks_file: Path | None = None,
        moe_routing_replay: str | None = None,
    ):
        """Create a learner of workers that are set up later by `setup`.

        Args:
            policy: The workers of the policy.
            reference: The workers of the reference model; None if nothing reads its log-probs.
            sizes: The division of batches.
            critic: The workers of the critic; None if the advantages need no values.
            reduction: Computes the loss weights of a mini-batch's tokens; None weighs all tokens equally.
            token_selector: Selects tokens for losses that treat some tokens specially; None for other losses.
            needs_old_logprobs: True if anything reads the policy's log-probs from before the update. None if only the
                loss does: it computes them itself if the update is a single optimizer step.
            stacks_file: The file for `attach_stall_report`; None for no report.
            moe_routing_replay: The value of trainer.moe_routing_replay.
        """
        self.policy = policy
        self.reference = reference
        self.version = 0
        """Number of training steps that produced the weights on the ranks."""
        self._update_lock = asyncio.Lock()
        self._update_is_incomplete = False
        self.num_sequences_with_logprobs = 0
        """Number of leading sequences of a batch whose initial log-probs an update of one optimizer step returns, in
        `update_logprobs`. If the update has more optimizer steps, the batch has `old_logprobs` instead."""
        self.update_logprobs: Tensor | None = None
        """The log-probs [T] from before the last update, 0 for the other sequences; None if there are none."""
        self.optimizer_progress: tuple[int, int] | None = None
        """(finished, total) optimizer steps of the policy in the current update; None outside of updates."""
        self._sharded_batches: dict[tuple[int, int, bool], ShardedBatch] = {}
        """The batch of the current step, sharded; by data-parallel size, prompts per mini-batch, and whether the shards
        have routing."""
        self.critic = critic
        self.sizes = sizes
        self.reduction = reduction or partial(token_mean, max_seq_len=1)
        self.token_selector = token_selector
        self.moe_routing_replay = moe_routing_replay
        requires_old_logprobs = token_selector is not None or moe_routing_replay == "old_policy"
        self.needs_old_logprobs = True if requires_old_logprobs else needs_old_logprobs
        self.stacks_file = stacks_file

    async def setup(self) -> int:
        """Set up all ranks of all models and return the policy's parameter count. Raises as `WorkerGroup.setup`."""
        return int((await asyncio.gather(*(group.setup() for group in self._groups)))[0])

    @property
    def trained(self) -> dict[str, WorkerGroup]:
        """The worker groups of models that are trained, by role. A checkpoint contains these."""
        return {"policy": self.policy} | ({} if self.critic is None else {"critic": self.critic})

    @property
    def _groups(self) -> list[WorkerGroup]:
        return [*self.trained.values(), *([] if self.reference is None else [self.reference])]

    @property
    def workers(self) -> list[Any]:
        """The ranks of all models."""
        return [worker for group in self._groups for worker in group.workers]

    async def add_logprobs_and_values(self, batch: TrainBatch) -> TrainBatch:
        """Add the tensors that advantages and the update read, in passes without gradient.

        These are the old log-probs if anything reads them, the critic's values and the reference's log-probs.

        Returns:
            The batch with `old_logprobs`, `values` and `ref_logprobs` [T], as far as they are needed.

        Raises:
            ConfigError: trainer.moe_routing_replay=rollout, and the batch has no routing.
        """
        scored = batch
        if self.moe_routing_replay == "rollout" and batch.routing is None and bool(batch.loss_mask.any()):
            raise ConfigError(
                "trainer.moe_routing_replay=rollout: the completions do not contain the experts of their tokens, "
                "because the model has no experts or the engine does not record them. Use old_policy or null."
            )
        if self.moe_routing_replay == "old_policy":
            old_logprobs, routing = await self._token_results(
                self.policy, batch, "forward_with_routing", await self._shards(self.policy, batch)
            )
            scored = scored.with_tokens(old_logprobs=old_logprobs, routing=routing)
        else:
            needs_old_logprobs = self.needs_old_logprobs
            if needs_old_logprobs is None:  # the loss of a single optimizer step computes them itself
                mini_batches = (await self._shards(self.policy, batch)).mini_batches
                needs_old_logprobs = len(mini_batches) * self.sizes.update_epochs_per_batch > 1
            if needs_old_logprobs:
                scored = scored.with_tokens(old_logprobs=await self._compute_logprobs_or_values(self.policy, batch))
        if self.critic is not None:
            scored = scored.with_tokens(values=await self._compute_logprobs_or_values(self.critic, batch))
        return await self.add_reference_logprobs(scored)

    async def add_reference_logprobs(self, batch: TrainBatch) -> TrainBatch:
        """Return the batch with `ref_logprobs` [T] if there is a reference, otherwise the batch itself."""
        if self.reference is None:
            return batch
        return batch.with_tokens(ref_logprobs=await self._compute_logprobs_or_values(self.reference, batch))

    async def compute_logprobs_or_values(self, group: WorkerGroup, batch: TrainBatch) -> Tensor:
        """Compute log-probs or values of any batch, without replacing the stored batch of the current step.

        Args:
            group: The workers of the policy, the reference or the critic.
            batch: The batch.

        Returns:
            Log-probs in nats, or values of a critic, for tokens in the loss mask and 0 elsewhere, [T].
        """
        shards = await asyncio.to_thread(self._shard_batch, group, batch, [range(len(batch))])
        return (await self._token_results(group, batch, "forward", shards))[0]

    async def sequence_logprobs(self, token_ids: Sequence[Sequence[int]]) -> list[list[float]]:
        """Compute the policy's log-probs (nats) of tokens at temperature 1.

        Args:
            token_ids: Sequences of token ids, each with at least one token.

        Returns:
            For each sequence, the log-probs of all tokens except the first.
        """
        rows = [SFTExample(list(ids), [False] + [True] * (len(ids) - 1)) for ids in token_ids]
        batch = collate_sft_examples(rows)
        values = (await self.compute_logprobs_or_values(self.policy, batch)).tolist()
        return [values[start + 1 : stop] for start, stop in pairwise(batch.offsets.tolist())]

    async def _compute_logprobs_or_values(self, group: WorkerGroup, batch: TrainBatch) -> Tensor:
        """Compute log-probs or values [T] of the batch of the current step, and keep its shards for the update."""
        return (await self._token_results(group, batch, "forward", await self._shards(group, batch)))[0]

    async def _token_results(
        self,
        group: WorkerGroup,
        batch: TrainBatch,
        method: str,
        shards: ShardedBatch,
        only: ShardedMiniBatch | None = None,
    ) -> list[Tensor]:
        """Call a forward method on all ranks and return its results in the order of the batch's tokens.

        Args:
            group: The workers.
            batch: The batch, or the mini-batch `only`.
            method: A method of `LearnerWorker` with the arguments of `forward`.
            shards: The shards of the whole batch.
            only: Set if `batch` is this mini-batch and not the whole batch.

        Returns:
            One tensor [T, ...] per output of the method. Sequences that were not computed, because they have no tokens
            in the loss mask, have 0, or -1 in integer tensors.
        """
        limits = self._limits(self.sizes.micro_forward_batch_size_per_gpu)
        passes, calls = await asyncio.to_thread(shards.forward_calls, group.put, limits, only)
        results = (await group.call_sharded(method, calls))[:: group.parallel_size]
        outputs = [result if isinstance(result, tuple) else (result,) for result in results]
        return await asyncio.to_thread(_scatter_tokens, batch, passes, outputs)

    async def _shards(self, group: WorkerGroup, batch: TrainBatch) -> ShardedBatch:
        """Return the sharded batch for a group. Groups with the same division share it."""
        cached = {key: shards for key, shards in self._sharded_batches.items() if shards.has_tokens_of(batch)}
        has_routing = batch.routing is not None and group is self.policy
        mini_batch_size = (
            self.sizes.critic_mini_batch_size if group is self.critic else self.sizes.policy_mini_batch_size
        )
        key = (group.data_parallel_size, mini_batch_size, has_routing)
        if key not in cached or (has_routing and not cached[key].has_routing_of(batch)):
            mini_batches = await asyncio.to_thread(mini_batch_rows, batch, mini_batch_size)
            cached[key] = await asyncio.to_thread(self._shard_batch, group, batch, mini_batches)
        self._sharded_batches = cached
        return cached[key]

    def _shard_batch(
        self, group: WorkerGroup, batch: TrainBatch, mini_batches: Sequence[Sequence[int]]
    ) -> ShardedBatch:
        if group is not self.policy:
            batch = batch.with_tokens(routing=None)  # other models have other experts
        return ShardedBatch(
            batch, mini_batches, group.data_parallel_size, self._limits(self.sizes.micro_train_batch_size_per_gpu)
        )

    async def update(self, batch: TrainBatch) -> dict[str, float]:
        """Take all optimizer steps of a training step and increment `version`. Waits while `hold_version` is active.

        If the update does not end, the weights on the ranks are between two versions and cannot be synced.

        Args:
            batch: The batch with advantages and everything else that the objectives read.

        Returns:
            The metrics of the update, averaged exactly over tokens and ranks.

        Raises:
            ConfigError: There is a critic, but the advantage estimator returned no returns.
            NonFiniteUpdate: Too many consecutive updates were skipped because their gradient was not finite.
        """
        async with self._update_lock:
            self._update_is_incomplete = True
            try:
                metrics = await self._take_optimizer_steps(batch)
            finally:
                self.optimizer_progress = None
                self._sharded_batches = {}
            self._update_is_incomplete = False
            self.version += 1
        return metrics.flush()

    @asynccontextmanager
    async def hold_version(self) -> AsyncIterator[int]:
        """Keep the weights unchanged while the body runs, and yield their version. Waits for a running `update`.

        Raises WeightSyncError if the last update was interrupted, as the ranks then hold no complete version.
        """
        async with self._update_lock:
            if self._update_is_incomplete:
                raise WeightSyncError(
                    f"the trainer's weights are between version {self.version} and {self.version + 1} because an "
                    "update was interrupted. They cannot be sent to engines. Resume the run from its last checkpoint."
                )
            yield self.version

    async def _take_optimizer_steps(self, batch: TrainBatch) -> Metrics:
        metrics = Metrics()
        if self.critic is not None:
            await self._update_critic(self.critic, batch, metrics)
        shards = await self._shards(self.policy, batch)
        self._sharded_batches = {}  # frees the shards of other models now, and each mini-batch after its last step
        steps = shards.mini_batches * self.sizes.update_epochs_per_batch
        metrics.count("policy/optimizer_steps", len(steps))
        self.update_logprobs = None
        returns_logprobs = len(steps) == 1 and batch.old_logprobs is None
        if not steps:
            _log.warning("No token of this step's batch is in the loss: this step does not change the model.")
        for index, sharded in enumerate(steps):
            self.optimizer_progress = index, len(steps)
            mini_batch = await asyncio.to_thread(_mini_batch, batch, sharded.rows, self.reduction)
            if self.token_selector is not None:
                mini_batch = await self._with_selected_tokens(
                    mini_batch, self.token_selector, shards, sharded, first=index == 0
                )
            logprob_rows = {
                position
                for position, row in enumerate(sharded.rows)
                if returns_logprobs and row < self.num_sequences_with_logprobs
            }
            logprobs = await self._optimizer_step(
                self.policy,
                shards,
                sharded,
                mini_batch.select_update_inputs("policy"),
                metrics,
                logprob_rows,
                is_last=index + 1 == len(steps),
            )
            if logprobs is not None:
                self.update_logprobs = _scatter_tokens(batch, [[sharded.rows]], [[logprobs]])[0]
            if index + len(shards.mini_batches) >= len(steps):
                sharded.stored = None
        return metrics

    async def _update_critic(self, critic: WorkerGroup, batch: TrainBatch, metrics: Metrics) -> None:
        """Take the critic's optimizer steps. All tokens have equal weight, regardless of the policy's `reduction`."""
        assert batch.values is not None, "values are computed before the update"
        if batch.returns is None:
            raise ConfigError(
                "trainer.algorithm.advantage_estimator takes values but provides no returns to train the critic on. "
                "Return TokenAdvantages(advantages, returns) from it."
            )
        explained = await asyncio.to_thread(explained_variance, batch.values, batch.returns, batch.loss_mask)
        if explained is not None:
            metrics.add("critic/explained_variance", explained)
        shards = await self._shards(critic, batch)
        steps = shards.mini_batches * self.sizes.update_epochs_per_batch
        for index, sharded in enumerate(steps):
            mini_batch = await asyncio.to_thread(_mini_batch, batch, sharded.rows, partial(token_mean, max_seq_len=1))
            inputs, is_last = mini_batch.select_update_inputs("critic"), index + 1 == len(steps)
            await self._optimizer_step(critic, shards, sharded, inputs, metrics, is_last=is_last)

    async def _optimizer_step(
        self,
        group: WorkerGroup,
        shards: ShardedBatch,
        sharded: ShardedMiniBatch,
        mini_batch: TrainBatch,
        metrics: Metrics,
        logprob_rows: Collection[int] = (),
        *,
        is_last: bool,
    ) -> Tensor | None:
        """Take one optimizer step of a model on all of its ranks.

        Returns:
            The log-probs [T] from before the step for the rows `logprob_rows` of the mini-batch, 0 for the others; None
            if there are no such rows.
        """
        prepare = partial(shards.update_calls, group.put, sharded, mini_batch, logprob_rows, is_last=is_last)
        states = await group.call_sharded("update", await asyncio.to_thread(prepare))
        for state in states:
            metrics.merge(state)
        if not logprob_rows:
            return None
        rows = [[[row for row in rows if row in logprob_rows] for rows in passes] for passes in sharded.micro_batches]
        return _scatter_tokens(mini_batch, rows, [[state["logprobs"]] for state in states[:: group.parallel_size]])[0]

    async def _with_selected_tokens(
        self,
        mini_batch: TrainBatch,
        token_selector: TokenSelector,
        shards: ShardedBatch,
        sharded: ShardedMiniBatch,
        *,
        first: bool,
    ) -> TrainBatch:
        """Select the tokens that the loss treats specially, using the policy from before this optimizer step."""
        old, advantages = mini_batch.old_logprobs, mini_batch.token_advantages
        assert old is not None and advantages is not None, "token selection needs old log-probs"
        current = old if first else (await self._token_results(self.policy, mini_batch, "forward", shards, sharded))[0]
        selected = await asyncio.to_thread(token_selector, current, old, advantages, mini_batch.loss_mask)
        return mini_batch.with_tokens(selected=selected)

    def set_version(self, version: int) -> None:
        """Record that all ranks have loaded complete weights of this version."""
        self.version, self._update_is_incomplete = version, False

    async def is_responsive(self, timeout_s: float) -> bool:
        """True if every idle rank of the policy and the critic answers a ping within `timeout_s` seconds.

        Groups that are executing a call are not pinged: those calls have deadlines and raise if a rank dies.
        """
        try:
            async with asyncio.timeout(timeout_s):
                await gather_all(
                    group.call_all("ping") for group in self.trained.values() if not group.num_running_calls
                )
        except (SkyRLError, TimeoutError):
            return False
        return True

    async def attach_stall_report(self, error: BaseException) -> None:
        """Add to a DeadlineExceeded error which rank holds up the others, and write the stacks of all ranks to a file.

        Does nothing for other errors, if the error has an explanation already, or without `stacks_file`. Logs a warning
        if the report fails.
        """
        ranks = [worker for worker in self.workers if isinstance(worker, ActorProxy)]
        if not isinstance(error, DeadlineExceeded) or error.explanation or self.stacks_file is None or not ranks:
            return
        try:
            error.explanation = await report_stall(ranks, self.stacks_file)
        except Exception:
            _log.warning("The stacks of the ranks could not be collected to report what held them up.", exc_info=True)

    async def offload(self) -> None:
        """Move all models of all ranks to host memory."""
        await self._call_all_groups("offload")

    async def onload(self) -> None:
        """Move all models of all ranks to the accelerators."""
        await self._call_all_groups("onload")

    async def onload_weights_only(self) -> None:
        """Move the policy's weights to the accelerators and everything else off them, for a weight sync."""
        others = (group.call_all("offload") for group in self._groups if group is not self.policy)
        await asyncio.gather(self.policy.call_all("onload_parameters_only"), *others)

    async def free_transient_memory(self) -> None:
        """Free the accelerators' memory that all models hold only for their passes."""
        await self._call_all_groups("free_transient_memory")

    async def close(self) -> None:
        """Close all ranks: end their background threads and process groups."""
        await self._call_all_groups("close")

    async def _call_all_groups(self, method: str) -> None:
        await asyncio.gather(*(group.call_all(method) for group in self._groups))

    def _limits(self, sequences: int | None) -> MicroBatchLimits:
        sizes = self.sizes
        return MicroBatchLimits(sequences, sizes.max_tokens_per_microbatch, sizes.attention_tokens, sizes.share_prompt)


def mini_batch_rows(batch: TrainBatch, num_groups: int) -> list[list[int]]:
    """Return the rows of each optimizer step of an epoch, in batch order.

    Args:
        batch: The batch. The samples of a prompt are adjacent.
        num_groups: Number of prompts per optimizer step; a step has all samples of its prompts.

    Returns:
        Row indices [mini_batch][row]. Mini-batches without a token in the loss mask are left out, because their update
        would only apply weight decay.
    """
    groups = batch.group_ids.unique_consecutive()
    assert len(groups) == len(groups.unique()), "the samples of a prompt must be adjacent, or they would be used twice"
    has_loss_tokens = batch.num_loss_tokens > 0
    mini_batches = []
    for ids in groups.split(num_groups):
        rows = torch.isin(batch.group_ids, ids)
        if bool((rows & has_loss_tokens).any()):
            mini_batches.append(rows.nonzero().flatten().tolist())
    return mini_batches


def _mini_batch(batch: TrainBatch, rows: Sequence[int], reduction: Callable[..., Tensor]) -> TrainBatch:
    return assign_loss_weights(batch.select(rows, copy=False), reduction)


def _scatter_tokens(
    batch: TrainBatch, shards: Sequence[Sequence[Sequence[int]]], outputs: Sequence[Sequence[Tensor]]
) -> list[Tensor]:
    """Return token-level results of all shards in the order of the batch's tokens.

    Args:
        batch: The batch.
        shards: The rows of each shard and micro-batch: [shard][micro_batch][row].
        outputs: The output tensors of each shard, with the tokens of its rows in order: [shard][output], [t, ...].
    """
    results = [
        output.new_full((len(batch.input_ids), *output.shape[1:]), 0 if output.is_floating_point() else -1)
        for output in outputs[0]
    ]
    offsets = batch.offsets.tolist()
    for passes, shard_outputs in zip(shards, outputs, strict=True):
        position = 0
        for row in (row for rows in passes for row in rows):
            start, stop = offsets[row], offsets[row + 1]
            for result, values in zip(results, shard_outputs, strict=True):
                result[start:stop] = values[position : position + stop - start]
            position += stop - start
    return results


_STACKS_TIMEOUT_S = 30.0
"""Long enough for a node that has to start a worker first."""
_UNKNOWN = ProcessStack(None, "unknown", "")


async def report_stall(ranks: Sequence[ActorProxy], file: Path) -> str:
    """Write the stacks of all ranks to a file and describe which rank the others wait for.

    The report names ranks that do not respond, are stopped or are gone; otherwise ranks that compute while others are
    in a collective. It names none if all ranks are in a collective or an accelerator kernel hangs.

    Args:
        ranks: The ranks to inspect.
        file: The file to write. A warning is logged if that fails.

    Returns:
        The description with the path of the file; "" if no stacks could be collected.
    """
    stacks = await collect_stacks([rank.actor_id for rank in ranks], _STACKS_TIMEOUT_S)
    if not stacks:
        return ""
    by_name = {rank.name: stacks.get(rank.actor_id, _UNKNOWN) for rank in ranks}
    text = "\n\n".join(
        f"=== {name}: process {stack.pid}, {stack.status}\n{stack.text}" for name, stack in by_name.items()
    )
    try:
        file.write_text(text)
    except OSError as error:
        _log.warning("The stacks of the trainer's ranks could not be written to %s: %s.", file, error)
        return _describe_stalled_ranks(by_name)
    return f"{_describe_stalled_ranks(by_name)}; the stacks of all ranks are in {file}".removeprefix("; ")


def _describe_stalled_ranks(by_name: dict[str, ProcessStack]) -> str:
    silent = {name: stack for name, stack in by_name.items() if not stack.text}
    if silent:
        return ", ".join(f"{name} does not respond ({_state(stack)})" for name, stack in silent.items())
    busy = [name for name, stack in by_name.items() if stack.call_frames and not stack.is_in_collective]
    if not busy or not any(stack.is_in_collective for stack in by_name.values()):
        return ""
    return f"{' and '.join(busy)} had not reached the collective in which the other ranks waited"


def _state(stack: ProcessStack) -> str:
    if stack.status == "stopped":
        return (
            f"a signal such as SIGSTOP has stopped its process, {stack.pid}, as a debugger or a scheduler does; "
            "find out what sent it, then start the run again"
        )
    return "its node does not respond either" if stack is _UNKNOWN else f"its process is {stack.status}"
