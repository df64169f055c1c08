"""The ranks of all models behind one interface: scores of batches and updates on them."""

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
"""On one machine the driver knows by then that a rank died, after its peers did."""
RESPONSE_TIMEOUT_S = 30.0
"""For `Learner.answers`: a rank that lives and is not hung has left a call that failed by then."""


class WorkerGroup:
    """N workers behind one interface: every call goes to all of them, results come in rank order.

    A worker is any object whose methods are coroutines: a `cluster.actors.ActorProxy` or a `LocalWorker`.
    """

    def __init__(
        self, workers: Sequence[Any], parallel_size: int = 1, failure_detection_s: float = FAILURE_DETECTION_S
    ):
        """`parallel_size`: number of neighbouring ranks that form one parallel group and share every micro-batch.

        `death_known_s`: how much sooner its peers may know that a rank died than the driver does.
        """
        self._failure_detection_s = failure_detection_s
        self.workers = list(workers)
        self.parallel_size = parallel_size
        self.num_running_calls = 0
        """How many calls are under way. A rank takes one at a time, so others wait, however short they are."""

    def __len__(self) -> int:
        return len(self.workers)

    @property
    def data_parallel_size(self) -> int:
        """How many parts a batch is divided into: one per parallel group."""
        return len(self) // self.parallel_size

    async def call_all(self, method: str, *args: Any) -> list[Any]:
        """Make the same call on every rank."""
        return await self.call_sharded(method, [args] * len(self))

    async def call_sharded(self, method: str, args_per_dp_rank: Sequence[Sequence[Any] | StoredCall]) -> list[Any]:
        """Call `method` on every rank, with a part's own arguments on each of its ranks.

        Large arguments are stored beforehand, and read by all ranks of the part. The number of ranks is a multiple of
        the number of parts; a part goes to equally many neighbouring ranks. Raises the first failure without waiting
        for the other ranks; but if a rank has lost a peer, the death of that one.
        """
        neighbours, rest = divmod(len(self), len(args_per_dp_rank))
        assert rest == 0, f"{len(args_per_dp_rank)} parts for {len(self)} ranks"
        calls: list[asyncio.Future[Any]] = []
        self.num_running_calls += 1
        try:
            # Nothing else begins a call in between: all ranks take the calls of several callers in one order, or the
            # collectives of one would meet those of another.
            for rank, worker in enumerate(self.workers):
                args = args_per_dp_rank[rank // neighbours]
                if isinstance(args, StoredCall):
                    call = worker.call_with_refs(method, args.plan, args.values)
                else:
                    call = getattr(worker, method)(*args)
                calls.append(asyncio.ensure_future(call))
            return await asyncio.gather(*calls)
        except RuntimeError as error:
            is_of_a_collective = isinstance(error, dist.DistError) or "gloo" in str(error) or "NCCL" in str(error)
            if is_of_a_collective and (death := await self._death_among(calls)) is not None:
                raise death from error
            raise
        finally:
            self.num_running_calls -= 1
            for call in calls:
                call.cancel()

    def put(self, value: Any) -> Any:
        """Put a value where all ranks read it. It blocks: to be called in a thread."""
        return self.workers[0].put(value)

    async def _death_among(self, calls: Sequence[asyncio.Future[Any]]) -> WorkerDied | None:
        """The first death that is known of, in time."""
        left = set(calls)
        with suppress(TimeoutError):
            async with asyncio.timeout(self._failure_detection_s):
                while left:
                    done, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
                    for call in done:
                        failure = None if call.cancelled() else call.exception()
                        if isinstance(failure, WorkerDied):
                            return failure
        return None

    async def setup(self) -> int:
        """Connect the ranks to each other and load the model; returns its number of parameters."""
        address, port = await self.workers[0].address()
        return int((await self.call_all("setup", address, port))[0])


class LocalWorker:
    """A worker in this process with the coroutines of a remote one; for models on a single rank."""

    def __init__(self, worker: LearnerWorker):
        self.worker = worker

    def put(self, value: Any) -> Any:
        """See ActorProxy.put; here it is where it is read."""
        return value

    async def call_with_refs(self, method: str, plan: Any, refs: Sequence[Any]) -> Any:
        """See ActorProxy.call_with_refs."""
        return await asyncio.to_thread(lambda: getattr(self.worker, method)(*plan.build_arguments(*refs)))

    def __getattr__(self, method: str) -> Any:
        async def call(*args: Any) -> Any:
            return await asyncio.to_thread(getattr(self.worker, method), *args)

        return call


@dataclass(frozen=True)
class BatchSizes:
    """How a step's sequences are divided into optimizer steps and micro-batches."""

    policy_mini_batch_size: int
    """Prompts per optimizer step; the last optimizer step of a training step may have fewer."""
    critic_mini_batch_size: int = 1
    """The same for the critic's optimizer steps."""
    update_epochs_per_batch: int = 1
    micro_train_batch_size_per_gpu: int | None = 1
    """Sequences per micro-batch of one rank in updates; None if `max_tokens_per_microbatch` alone decides."""
    micro_forward_batch_size_per_gpu: int | None = 1
    """The same for passes without gradient."""
    max_tokens_per_microbatch: int | None = None
    """Tokens per micro-batch of one rank; if given, it decides alone."""
    attention_tokens: int = 6 * 1024
    """Length at which attention costs as much as the linear layers (about 6 hidden sizes); used to balance ranks."""
    share_prompt: bool | None = None
    """Whether a pass runs a prompt once for all of its samples; None: only if it is worth it."""


class Learner:
    """The worker groups of the policy, the frozen reference (with KL) and the critic (if advantages need values)."""

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
        """`reduction` weighs the tokens of a mini-batch (None: equally); `choose` selects tokens for losses that ask.

        `needs_old_logprobs`: whether anything reads the policy's log-probs from before the update. None: only the loss
        does, and it computes them itself if the update is a single optimizer step. `stacks_file`: written by `explain`.
        `moe_routing_replay`: see trainer.moe_routing_replay.
        """
        self.policy = policy
        self.reference = reference
        self.version = 0
        """How many steps made the weights that all ranks hold."""
        self._update_lock = asyncio.Lock()
        self._update_is_incomplete = False
        self.num_sequences_with_logprobs = 0
        """Of how many of a batch's first sequences an update of a single optimizer step keeps the log-probs that it
        begins with. Before one of several steps they are scored: `old_logprobs` of the batch."""
        self.update_logprobs: Tensor | None = None
        """[T] those of the last update's batch, 0 for other sequences; None if it kept none."""
        self.optimizer_progress: tuple[int, int] | None = None
        """Of the policy's optimizer steps under way: how many are taken, of how many."""
        self._sharded_batches: dict[tuple[int, int, bool], ShardedBatch] = {}
        """Of the batch that is learnt from: by number of parts and of prompts in a mini-batch, and whether routing is
        theirs."""
        self.critic = critic
        self.sizes = sizes
        self.reduction = reduction or partial(token_mean, max_seq_len=1)
        self.token_selector = token_selector
        self.moe_routing_replay = moe_routing_replay
        needs = token_selector is not None or moe_routing_replay == "old_policy"
        self.needs_old_logprobs = True if needs else needs_old_logprobs
        self.stacks_file = stacks_file

    async def setup(self) -> int:
        """Set up all ranks of all models; returns the policy's number of parameters."""
        return int((await asyncio.gather(*(group.setup() for group in self._groups)))[0])

    @property
    def trained(self) -> dict[str, WorkerGroup]:
        """The worker groups that a checkpoint contains, by role."""
        return {"policy": self.policy} | ({} if self.critic is None else {"critic": self.critic})

    @property
    def _groups(self) -> list[WorkerGroup]:
        return [*self.trained.values(), *([] if self.reference is None else [self.reference])]

    @property
    def workers(self) -> list[Any]:
        """The ranks of all models."""
        return [worker for group in self._groups for worker in group.workers]

    async def add_logprobs_and_values(self, batch: TrainBatch) -> TrainBatch:
        """Add what the update needs: old log-probs if anything reads them, the critic's values, reference log-probs."""
        scored = batch
        if self.moe_routing_replay == "rollout" and batch.routing is None and bool(batch.loss_mask.any()):
            raise ConfigError(
                "trainer.moe_routing_replay=rollout: no completion tells which experts its tokens went to: the model"
                " has none, or its engine does not keep them. Use old_policy, or null."
            )
        if self.moe_routing_replay == "old_policy":
            old_logprobs, routing = await self._token_results(
                self.policy, batch, "forward_with_routing", await self._shards(self.policy, batch)
            )
            scored = scored.with_tokens(old_logprobs=old_logprobs, routing=routing)
        else:
            needs_old_logprobs = self.needs_old_logprobs
            if needs_old_logprobs is None:  # a single optimizer step computes them itself
                mini_batches = (await self._shards(self.policy, batch)).mini_batches
                needs_old_logprobs = len(mini_batches) * self.sizes.update_epochs_per_batch > 1
            if needs_old_logprobs:
                scored = scored.with_tokens(old_logprobs=await self._compute_logprobs_or_values(self.policy, batch))
        if self.critic is not None:
            scored = scored.with_tokens(values=await self._compute_logprobs_or_values(self.critic, batch))
        return await self.add_reference_logprobs(scored)

    async def add_reference_logprobs(self, batch: TrainBatch) -> TrainBatch:
        """Add the reference's log-probs if there is a reference."""
        if self.reference is None:
            return batch
        return batch.with_tokens(ref_logprobs=await self._compute_logprobs_or_values(self.reference, batch))

    async def compute_logprobs_or_values(self, group: WorkerGroup, batch: TrainBatch) -> Tensor:
        """[T] log-probs (nats), or values of a critic, for tokens in the loss mask; 0 elsewhere.

        Of any batch: what ranks have of the one that is being learnt from stays as it is.
        """
        shards = await asyncio.to_thread(self._shard_batch, group, batch, [range(len(batch))])
        return (await self._token_results(group, batch, "forward", shards))[0]

    async def sequence_logprobs(self, token_ids: Sequence[Sequence[int]]) -> list[list[float]]:
        """Return the policy's log-probs (nats) of all tokens but the first of each sequence, at temperature 1."""
        rows = [SFTExample(list(ids), [False] + [True] * (len(ids) - 1)) for ids in token_ids]
        batch = collate_sft_examples(rows)
        values = (await self.compute_logprobs_or_values(self.policy, batch)).tolist()
        return [values[start + 1 : stop] for start, stop in pairwise(batch.offsets.tolist())]

    async def _compute_logprobs_or_values(self, group: WorkerGroup, batch: TrainBatch) -> Tensor:
        """The same, of the batch that is to be learnt from."""
        return (await self._token_results(group, batch, "forward", await self._shards(group, batch)))[0]

    async def _token_results(
        self,
        group: WorkerGroup,
        batch: TrainBatch,
        method: str,
        shards: ShardedBatch,
        only: ShardedMiniBatch | None = None,
    ) -> list[Tensor]:
        """What a method of the ranks says of each token: tensors [T, ...]. `only`: the batch is this mini-batch.

        Sequences without tokens to score have 0, or -1 in a tensor of integers.
        """
        limits = self._limits(self.sizes.micro_forward_batch_size_per_gpu)
        passes, arguments = await asyncio.to_thread(shards.forward_calls, group.put, limits, only)
        parts = await group.call_sharded(method, arguments)
        found = [part if isinstance(part, tuple) else (part,) for part in parts[:: group.parallel_size]]
        return await asyncio.to_thread(_scatter_tokens, batch, passes, found)

    async def _shards(self, group: WorkerGroup, batch: TrainBatch) -> ShardedBatch:
        """The batch as the ranks of a group have it: the same for all groups that divide it alike."""
        known = {key: one for key, one in self._sharded_batches.items() if one.has_tokens_of(batch)}
        routed = batch.routing is not None and group is self.policy
        groups = self.sizes.critic_mini_batch_size if group is self.critic else self.sizes.policy_mini_batch_size
        key = (group.data_parallel_size, groups, routed)
        if key not in known or (routed and not known[key].has_routing_of(batch)):
            mini_batches = await asyncio.to_thread(mini_batch_rows, batch, groups)
            known[key] = await asyncio.to_thread(self._shard_batch, group, batch, mini_batches)
        self._sharded_batches = known
        return known[key]

    def _shard_batch(
        self, group: WorkerGroup, batch: TrainBatch, mini_batches: Sequence[Sequence[int]]
    ) -> ShardedBatch:
        if group is not self.policy:
            batch = batch.with_tokens(routing=None)  # other models have other experts
        return ShardedBatch(
            batch, mini_batches, group.data_parallel_size, self._limits(self.sizes.micro_train_batch_size_per_gpu)
        )

    async def update(self, batch: TrainBatch) -> dict[str, float]:
        """Take all optimizer steps of a training step; returns metrics averaged exactly over tokens and ranks.

        Raises ConfigError if there is a critic but the advantage estimator returned no returns.
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
        """Inside, no optimizer step is taken: gives the version of the weights. Waits for the end of an `update`.

        Raises WeightSyncError if an update ended in its middle: what the ranks hold then is no version.
        """
        async with self._update_lock:
            if self._update_is_incomplete:
                raise WeightSyncError(
                    f"the trainer's weights are between version {self.version} and {self.version + 1}: an update of "
                    "theirs did not end. There is nothing that an engine could be given."
                )
            yield self.version

    async def _take_optimizer_steps(self, batch: TrainBatch) -> Metrics:
        metrics = Metrics()
        if self.critic is not None:
            await self._update_critic(self.critic, batch, metrics)
        shards = await self._shards(self.policy, batch)
        self._sharded_batches = {}  # each is let go of after its last step, and those of other models now
        steps = shards.mini_batches * self.sizes.update_epochs_per_batch
        metrics.count("policy/optimizer_steps", len(steps))
        self.update_logprobs = None
        tells = len(steps) == 1 and batch.old_logprobs is None
        if not steps:
            _log.warning("No token of this step's batch counts: nothing was learnt from it.")
        for index, one in enumerate(steps):
            self.optimizer_progress = index, len(steps)
            mini_batch = await asyncio.to_thread(_mini_batch, batch, one.rows, self.reduction)
            if self.token_selector is not None:
                mini_batch = await self._with_selected_tokens(
                    mini_batch, self.token_selector, shards, one, first=index == 0
                )
            wanted = {place for place, row in enumerate(one.rows) if tells and row < self.num_sequences_with_logprobs}
            told = await self._optimizer_step(
                self.policy, shards, one, mini_batch.select_update_inputs("policy"), metrics, wanted
            )
            if told is not None:
                self.update_logprobs = _scatter_tokens(batch, [[one.rows]], [[told]])[0]
            if index + len(shards.mini_batches) >= len(steps):
                one.stored = None
        return metrics

    async def _update_critic(self, critic: WorkerGroup, batch: TrainBatch, metrics: Metrics) -> None:
        """The critic's optimizer steps; tokens weigh equally in them, whatever `reduction` the policy's loss has."""
        assert batch.values is not None, "values are scored before the update"
        if batch.returns is None:
            raise ConfigError(
                "trainer.algorithm.advantage_estimator asks for values and gives no returns for the critic to learn: "
                "return TokenAdvantages(advantages, returns)."
            )
        explained = await asyncio.to_thread(explained_variance, batch.values, batch.returns, batch.loss_mask)
        if explained is not None:
            metrics.add("critic/explained_variance", explained)
        shards = await self._shards(critic, batch)
        for one in shards.mini_batches * self.sizes.update_epochs_per_batch:
            mini_batch = await asyncio.to_thread(_mini_batch, batch, one.rows, partial(token_mean, max_seq_len=1))
            await self._optimizer_step(critic, shards, one, mini_batch.select_update_inputs("critic"), metrics)

    async def _optimizer_step(
        self,
        group: WorkerGroup,
        shards: ShardedBatch,
        one: ShardedMiniBatch,
        mini_batch: TrainBatch,
        metrics: Metrics,
        logprob_rows: Collection[int] = (),
    ) -> Tensor | None:
        """Take one optimizer step of a model, on all of its ranks.

        Returns [T] the log-probs before it of the sequences `wanted`, 0 for others; None if none are.
        """
        states = await group.call_sharded(
            "update", await asyncio.to_thread(shards.update_calls, group.put, one, mini_batch, logprob_rows)
        )
        for state in states:
            metrics.merge(state)
        if not logprob_rows:
            return None
        chosen = [[[row for row in rows if row in logprob_rows] for rows in passes] for passes in one.micro_batches]
        return _scatter_tokens(mini_batch, chosen, [[state["logprobs"]] for state in states[:: group.parallel_size]])[0]

    async def _with_selected_tokens(
        self,
        mini_batch: TrainBatch,
        token_selector: TokenSelector,
        shards: ShardedBatch,
        one: ShardedMiniBatch,
        *,
        first: bool,
    ) -> TrainBatch:
        """Select the tokens that the loss treats specially, using the policy as it is before this optimizer step."""
        old, advantages = mini_batch.old_logprobs, mini_batch.token_advantages
        assert old is not None and advantages is not None, "a choice of tokens needs old log-probs"
        current = old if first else (await self._token_results(self.policy, mini_batch, "forward", shards, one))[0]
        chosen = await asyncio.to_thread(token_selector, current, old, advantages, mini_batch.loss_mask)
        return mini_batch.with_tokens(selected=chosen)

    def set_version(self, version: int) -> None:
        """Note that all ranks have loaded the weights of this version."""
        self.version, self._update_is_incomplete = version, False

    async def is_responsive(self, timeout_s: float) -> bool:
        """Whether every rank of the trained models lives, and answers within this time unless it has other calls.

        Those have deadlines of their own, and say by themselves if a rank is gone.
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
        """If a deadline passed, add to `error` which rank the others wait for; the stacks of all ranks go to a file."""
        ranks = [worker for worker in self.workers if isinstance(worker, ActorProxy)]
        if not isinstance(error, DeadlineExceeded) or error.explanation or self.stacks_file is None or not ranks:
            return
        try:
            error.explanation = await report_stall(ranks, self.stacks_file)
        except Exception:
            _log.warning("What held up the ranks could not be found out.", exc_info=True)

    async def offload(self) -> None:
        await self._call_all_groups("offload")

    async def onload(self) -> None:
        await self._call_all_groups("onload")

    async def onload_weights_only(self) -> None:
        """Have the policy's weights on the accelerator and nothing else: what a weight sync needs."""
        others = (group.call_all("offload") for group in self._groups if group is not self.policy)
        await asyncio.gather(self.policy.call_all("onload_parameters_only"), *others)

    @asynccontextmanager
    async def offloaded(self) -> AsyncIterator[None]:
        """Leave the accelerators to the engines inside: to score they wake caches as large as all that is free."""
        await self.offload()
        try:
            yield
        finally:
            await self.onload_weights_only()

    async def close(self) -> None:
        await self._call_all_groups("close")

    async def _call_all_groups(self, method: str) -> None:
        await asyncio.gather(*(group.call_all(method) for group in self._groups))

    def _limits(self, sequences: int | None) -> MicroBatchLimits:
        sizes = self.sizes
        return MicroBatchLimits(sequences, sizes.max_tokens_per_microbatch, sizes.attention_tokens, sizes.share_prompt)


def mini_batch_rows(batch: TrainBatch, num_groups: int) -> list[list[int]]:
    """The rows of every optimizer step of an epoch: all samples of `num_groups` prompts at a time.

    Mini-batches without a token in the loss mask are left out: their update would be weight decay alone.
    """
    groups = batch.group_ids.unique_consecutive()
    assert len(groups) == len(groups.unique()), "the samples of a prompt lie together, or they would be used twice"
    learns = batch.num_loss_tokens > 0
    chosen = []
    for ids in groups.split(num_groups):
        rows = torch.isin(batch.group_ids, ids)
        if bool((rows & learns).any()):
            chosen.append(rows.nonzero().flatten().tolist())
    return chosen


def _mini_batch(batch: TrainBatch, rows: Sequence[int], reduction: Callable[..., Tensor]) -> TrainBatch:
    return assign_loss_weights(batch.select(rows, copy=False), reduction)


def _scatter_tokens(
    batch: TrainBatch, shards: Sequence[Sequence[Sequence[int]]], parts: Sequence[Sequence[Tensor]]
) -> list[Tensor]:
    """What the parts say of the tokens of their rows, in the order of the batch's tokens."""
    results = [
        part.new_full((len(batch.input_ids), *part.shape[1:]), 0 if part.is_floating_point() else -1)
        for part in parts[0]
    ]
    offsets = batch.offsets.tolist()
    for passes, part in zip(shards, parts, strict=True):
        at = 0
        for row in (row for rows in passes for row in rows):
            start, stop = offsets[row], offsets[row + 1]
            for result, values in zip(results, part, strict=True):
                result[start:stop] = values[at : at + stop - start]
            at += stop - start
    return results


_STACKS_TIMEOUT_S = 30.0
"""A node may have to start a worker first."""
_UNKNOWN = ProcessStack(None, "unknown", "")


async def report_stall(ranks: Sequence[ActorProxy], file: Path) -> str:
    """Write the stacks of all ranks to `file`; returns which rank is waited for, and where the stacks are.

    It is a rank whose node does not answer, or that is stopped or gone; else one that is at work while others are in a
    collective. If no rank stands out, as all are in a collective or a kernel of an accelerator hangs, none is named.
    """
    found = await collect_stacks([rank.actor_id for rank in ranks], _STACKS_TIMEOUT_S)
    if not found:
        return ""
    by_name = {rank.name: found.get(rank.actor_id, _UNKNOWN) for rank in ranks}
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
        return ", ".join(f"{name} does not answer ({_state(stack)})" for name, stack in silent.items())
    busy = [name for name, stack in by_name.items() if stack.call_frames and not stack.is_in_collective]
    if not busy or not any(stack.is_in_collective for stack in by_name.values()):
        return ""
    return f"{' and '.join(busy)} had not come so far, while others waited in a collective"


def _state(stack: ProcessStack) -> str:
    if stack.status == "stopped":
        return f"its process is stopped: kill -CONT {stack.pid} lets it go on"
    return "nor does its node" if stack is _UNKNOWN else f"its process is {stack.status}"
