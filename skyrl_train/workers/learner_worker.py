"""One rank of a policy, a critic or a frozen reference: a plain class, usually living in an actor."""

from __future__ import annotations

import gc
import os
import random
import socket
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from skyrl_train.cluster.actors import NODE_ADDRESS
from skyrl_train.config.schema import FSDPConfig, OptimizerConfig
from skyrl_train.data.batch import TrainBatch
from skyrl_train.metrics import Metrics
from skyrl_train.models.loading import POLICY_PATH, export_hf, load_causal_lm, load_tokenizer
from skyrl_train.models.token_scorer import TokenScorer
from skyrl_train.models.value_scorer import ValueScorer
from skyrl_train.registry import load_object
from skyrl_train.strategies.process_group import close_process_group, init_process_group
from skyrl_train.weight_sync.sender import WeightSender
from skyrl_train.weight_sync.wire import Bucket, Manifest


class Objective(Protocol):
    """Scored tokens to a loss whose gradient is summed over micro-batches and ranks.

    Takes the batch, its log-probs or values [T], entropies [T] where it wants them, the tokens of the whole mini-batch,
    and where metrics go.
    """

    @property
    def wants_entropy(self) -> bool: ...

    def __call__(
        self, batch: TrainBatch, scored: Tensor, entropy: Tensor | None, mini_batch_tokens: int, metrics: Metrics, /
    ) -> Tensor: ...


@dataclass(frozen=True)
class LearnerSpec:
    """All that a rank needs to build its part of one model."""

    model_path: str
    strategy: str
    """"module:Class" of a Strategy."""
    device: str
    dtype: str
    """Compute dtype, e.g. "float32" or "bfloat16"; trained weights are kept in float32 either way."""
    seed: int
    threads: int | None
    """CPU threads of this process; None leaves torch's own choice (on accelerators)."""
    fsdp: FSDPConfig
    optimizer: OptimizerConfig | None
    """None for a frozen model."""
    total_steps: int | None
    """Optimizer steps of the whole run, for the schedule."""
    objective: Objective | None
    gradient_checkpointing: bool
    gradient_checkpointing_use_reentrant: bool
    model_config_kwargs: Mapping[str, Any]
    rope_scaling: Mapping[str, Any] | None
    rope_theta: float | None
    rendezvous_s: float
    collective_s: float
    """Deadline of one collective: ranks may differ by as much as one of them writes a file longer."""
    wire_dtype: str
    bucket_bytes: int
    only_changed: bool = False
    """Weight syncs leave out tensors that are as they were."""
    model_key: str = POLICY_PATH
    """Where `model_path` was configured, for messages."""
    value_head: str | None = None
    """A critic's output layer: values are scored; None for a model that scores log-probs."""


@dataclass(frozen=True)
class MiniBatch:
    """One rank's share of one optimizer step."""

    micro_batches: list[TrainBatch]
    num_micro_batches: int
    """The same on every rank; a rank with fewer fills up with one-token, zero-weight ones."""
    tokens: int
    """That count in the whole mini-batch, all ranks together."""


class LearnerWorker:
    """Rank `rank` of `world_size`. `address` on rank 0, then `setup` on all ranks at once, then the rest."""

    def __init__(self, spec: LearnerSpec, rank: int, world_size: int):
        self.spec = spec
        self.rank = rank
        self.world_size = world_size
        if spec.threads:
            torch.set_num_threads(spec.threads)

    def address(self) -> tuple[str, int]:
        """(host, free port) where the ranks meet."""
        with closing(socket.socket()) as probe:
            probe.bind(("", 0))
            return os.environ.get(NODE_ADDRESS, "127.0.0.1"), probe.getsockname()[1]

    def setup(self, address: str, port: int) -> int:
        """Join the other ranks, load and shard the model; returns its number of parameters."""
        spec = self.spec
        random.seed(spec.seed)
        torch.manual_seed(spec.seed)
        if spec.device == "cuda":
            torch.cuda.set_device(0)
        backend = "nccl" if spec.device == "cuda" else "gloo"
        init_process_group(self.rank, self.world_size, address, port, backend, spec.rendezvous_s, spec.collective_s)
        return self._build(spec.model_path)

    def reload(self, path: str) -> None:
        """Be the model in another Hugging Face folder: how a frozen reference follows the policy."""
        del self.scorer, self.strategy, self.sender
        gc.collect()  # a module is a cycle: without this both models are held at once
        self._build(path)

    def _build(self, path: str) -> int:
        """Load and shard; returns the number of parameters."""
        spec = self.spec
        model = load_causal_lm(
            path,
            dtype=torch.float32 if spec.optimizer else getattr(torch, spec.dtype),
            device="cpu",  # the strategy moves it, shard by shard
            model_config_kwargs=spec.model_config_kwargs,
            rope_scaling=spec.rope_scaling,
            rope_theta=spec.rope_theta,
            key=spec.model_key,
        )
        if spec.gradient_checkpointing and spec.optimizer:
            model.gradient_checkpointing_enable({"use_reentrant": spec.gradient_checkpointing_use_reentrant})
        self._hf_config = model.config
        scorer = TokenScorer(model) if spec.value_head is None else ValueScorer(model, spec.value_head)
        count = sum(parameter.numel() for parameter in scorer.parameters())
        self.strategy = load_object(spec.strategy)(
            optimizer=spec.optimizer,
            fsdp=spec.fsdp,
            device=spec.device,
            compute_dtype=getattr(torch, spec.dtype),
            rank=self.rank,
            world_size=self.world_size,
        )
        self.scorer = self.strategy.prepare(scorer, spec.total_steps)
        self.sender = WeightSender(
            self.strategy.full_parameters,
            wire_dtype=spec.wire_dtype,
            bucket_bytes=spec.bucket_bytes,
            rank=self.rank,
            only_changed=spec.only_changed,
        )
        return count

    def score(self, micro_batches: list[TrainBatch], num_micro_batches: int) -> Tensor:
        """[T] log-probs (nats) or values of the micro-batches' tokens in order, without gradient, on the CPU."""
        self.scorer.eval()
        parts = []
        with torch.no_grad():
            for batch, is_filler in self._fill(micro_batches, num_micro_batches):
                scored, _ = self._scored(batch, wants_entropy=False)
                if not is_filler:
                    parts.append(scored.float().cpu())
        return torch.cat(parts) if parts else torch.zeros(0)

    def update(self, mini_batch: MiniBatch) -> dict[str, Any]:
        """One optimizer step; returns `Metrics.state()` of this rank."""
        assert self.spec.objective is not None
        metrics = Metrics()
        self.scorer.train()
        count = mini_batch.num_micro_batches
        for index, (batch, is_filler) in enumerate(self._fill(mini_batch.micro_batches, count)):
            scored, entropy = self._scored(batch, self.spec.objective.wants_entropy)
            ignored = Metrics() if is_filler else metrics
            loss = self.spec.objective(batch, scored, entropy, mini_batch.tokens, ignored)
            self.strategy.backward(loss, last=index == count - 1)
        role = "policy" if self.spec.value_head is None else "critic"
        for name, value in self.strategy.step().items():
            metrics.add(f"{role}/{name}", value)
        if self.spec.device == "cuda":
            metrics.maximum("memory/learner_peak_gib", torch.cuda.max_memory_allocated() / 2**30)
        return metrics.state()

    def connect_weights(self, route: str, address: str, world_size: int, timeout_s: float) -> None:
        """Join the engines' transfer group; see weight_sync.publish for the order of these calls."""
        self.sender.connect(route, address, world_size, timeout_s, self.spec.device)

    def manifest(self, version: int, rehearsal: bool = False) -> Manifest:
        """What a sync of `version` will send."""
        return self.sender.manifest(version, rehearsal)

    def send_weights(self, index: int) -> Bucket | None:
        """Send one bucket of it."""
        return self.sender.send(index)

    def weights_delivered(self, version: int) -> None:
        """Every engine confirmed that version."""
        self.sender.delivered(version)

    def disconnect_weights(self) -> None:
        """Leave the transfer group after a failure."""
        self.sender.disconnect()

    def save(self, directory: str) -> None:
        """This rank's part of weights and optimizer. Nothing is random between updates: there is no more state."""
        self.strategy.save(Path(directory))

    def load(self, directory: str) -> None:
        self.strategy.load(Path(directory))

    def export(self, directory: str) -> None:
        """A Hugging Face folder with the full weights; all ranks call it, rank 0 writes."""
        tokenizer = load_tokenizer(self.spec.model_path)
        export_hf(self._hf_config, self.strategy.full_parameters(), tokenizer, Path(directory), write=self.rank == 0)

    def offload(self) -> int:
        return self.strategy.offload()

    def onload(self) -> None:
        self.strategy.onload()

    def close(self) -> None:
        self.sender.close()
        close_process_group()

    def _fill(self, micro_batches: list[TrainBatch], count: int) -> Iterator[tuple[TrainBatch, bool]]:
        """Exactly `count` micro-batches, on this rank's device: sharded models run every pass on all ranks together."""
        yield from ((batch.to(self.spec.device), False) for batch in micro_batches)
        for _ in range(count - len(micro_batches)):
            yield filler().to(self.spec.device), True

    def _scored(self, batch: TrainBatch, wants_entropy: bool) -> tuple[Tensor, Tensor | None]:
        return self.scorer(
            input_ids=batch.input_ids,
            position_ids=batch.position_ids,
            offsets=batch.offsets,
            temperature=batch.temperature,
            score_mask=batch.loss_mask,
            wants_entropy=wants_entropy,
        )


def filler() -> TrainBatch:
    """One token that nothing is learnt from, for a rank that has run out of sequences."""
    one = torch.zeros(1, dtype=torch.int64)
    return TrainBatch(
        input_ids=one,
        position_ids=one,
        loss_mask=torch.zeros(1, dtype=torch.bool),
        offsets=torch.tensor([0, 1]),
        prompt_lengths=one + 1,
        group_ids=one,
        rewards=torch.zeros(1),
        temperature=torch.ones(1),
        status=torch.zeros(1, dtype=torch.bool),
        min_versions=one,
        max_versions=one,
        rollout_logprobs=torch.zeros(1),
        old_logprobs=torch.zeros(1),
        ref_logprobs=torch.zeros(1),
        values=torch.zeros(1),
        advantages=torch.zeros(1),
        returns=torch.zeros(1),
        loss_weights=torch.zeros(1, dtype=torch.float64),
        selected=torch.zeros(1, dtype=torch.bool),
    )
