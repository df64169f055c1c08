"""One rank of a policy, a critic or a frozen reference: a plain class, usually run in an actor."""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from skyrl_train.algorithms.policy_objective import PolicyObjective
from skyrl_train.algorithms.sft import SFTObjective
from skyrl_train.algorithms.value_objective import ValueObjective
from skyrl_train.atomic_files import FileDigest
from skyrl_train.cluster.addresses import BIND_ADDRESS, LOOPBACK, NODE_ADDRESS, free_address
from skyrl_train.config.locations import strip_file_scheme
from skyrl_train.config.schema import DeepSpeedConfig, FSDPConfig, LoraConfig, OptimizerConfig
from skyrl_train.data.batch import TrainBatch
from skyrl_train.data.device_copy import copy_to_device
from skyrl_train.learner.base_model_record import LoraRecord, tensor_fingerprints
from skyrl_train.metrics import Metrics
from skyrl_train.models.activation_checkpointing import enable_checkpointing
from skyrl_train.models.compiled_layers import compile_layers
from skyrl_train.models.composite import get_checkpoint_config
from skyrl_train.models.expert_parallel import ExpertParallel
from skyrl_train.models.export import export_adapter, export_hf
from skyrl_train.models.loading import POLICY_PATH_KEY, load_tokenizer, open_causal_lm
from skyrl_train.models.logprob_model import LogprobModel
from skyrl_train.models.lora import LoraAdapters
from skyrl_train.models.model_inputs import ModelInputs
from skyrl_train.models.parallel_group import ParallelGroup
from skyrl_train.models.pretrained_weights import PretrainedWeights
from skyrl_train.models.ragged_model import RaggedModel
from skyrl_train.models.sequence_parallel import SequenceParallel
from skyrl_train.models.sharded_tensor import ShardedTensor
from skyrl_train.models.tensor_parallel import TensorParallel
from skyrl_train.models.value_model import ValueModel
from skyrl_train.registry import load_object
from skyrl_train.report.profiling import MemorySnapshotRecorder, Profiler, peak_memory
from skyrl_train.strategies.base import LearningRates
from skyrl_train.strategies.process_group import close_process_group, init_process_group, make_subgroups
from skyrl_train.weight_sync.protocol import AdapterSpec
from skyrl_train.weight_sync.sender import LoraModel, WeightSender, WeightSenderMixin

Objective = PolicyObjective | ValueObjective | SFTObjective
"""A function of a batch and its log-probs or values that returns the loss; gradients are summed over micro-batches and
ranks."""


@dataclass(frozen=True)
class LearnerSpec:
    """Everything that a rank needs to build its part of one model."""

    model_path: str
    """Folder, URI or hub name of the model."""
    strategy: str
    """"module:Class" of a Strategy."""
    device: str
    """"cuda" or "cpu"."""
    dtype: str
    """Compute dtype, such as "float32" or "bfloat16". Trained weights are stored in float32 in either case."""
    seed: int
    threads: int | None
    """CPU threads of this process; None for torch's default."""
    fsdp_config: FSDPConfig
    optimizer_config: OptimizerConfig | None
    """None for a frozen model."""
    total_steps: int | None
    """Optimizer steps of the whole run, for the schedule; None for a frozen model."""
    objective: Objective | None
    """None for a frozen model."""
    gradient_checkpointing: bool | str
    """See activation_checkpointing.enable_checkpointing."""
    gradient_checkpointing_use_reentrant: bool
    model_config_kwargs: Mapping[str, Any]
    rope_scaling: Mapping[str, Any] | None
    rope_theta: float | None
    rendezvous_s: float
    """Seconds that all ranks may take to connect to each other."""
    update_s: float
    """Timeout in seconds of one collective. It must allow for a rank that takes longer than others to write a file."""
    model_dtype: str
    """Dtype of the engines' weights, in which weight syncs send them."""
    weight_transfer_threshold_cuda_ipc_GB: float
    """Size in GiB of the buckets in which weights are sent."""
    weight_sync_only_changed: bool = False
    """True if weight syncs skip tensors that have not changed."""
    deepspeed_config: DeepSpeedConfig = field(default_factory=DeepSpeedConfig)
    model_config_key: str = POLICY_PATH_KEY
    """Configuration key of `model_path`, for messages."""
    value_head_prefix: str | None = None
    """Name of the critic's output layer, for a model that computes values; None for one that computes log-probs."""
    lora: LoraConfig | None = None
    """Settings of adapters. If set, only they (and a critic's output layer) are trained; None trains the full model."""
    sequence_parallel_size: int = 1
    """Number of neighboring ranks that divide the tokens of every micro-batch."""
    tensor_parallel_size: int = 1
    """Number of neighboring ranks that divide the features of every layer. At most one of the two sizes exceeds 1."""
    expert_parallel_size: int = 1
    """Number of neighboring ranks that divide the experts of every layer."""
    router_aux_loss_coef: float = 0.0
    """Coefficient of the load-balancing loss of routers."""
    moe_routing_replay: str | None = None
    """If set, tokens go to the experts in the batch's `routing`; None if routers choose."""
    use_torch_compile: bool = False
    """True to run the decoder layers through torch.compile."""
    max_skipped_updates: int = 5
    """Number of consecutive updates with a non-finite gradient after which NonFiniteUpdate is raised."""
    shares_accelerator: bool = False
    """True if other models of the learner use the same accelerator; this one then frees its cache for their passes."""
    memory_snapshot_folder: str | None = None
    """Folder for a record of the accelerator's allocations; None for no record."""

    @property
    def parallel_size(self) -> int:
        """Size of a parallel group: neighboring ranks that share every micro-batch."""
        return self.sequence_parallel_size * self.tensor_parallel_size

    def key_of_size(self, kind: str) -> str:
        """Return the configuration key of a parallel size, for messages; `kind` is for example "tensor"."""
        return self.model_config_key.removesuffix("model.path") + f"{kind}_parallel_size"


@dataclass(frozen=True)
class MiniBatch:
    """One rank's share of one optimizer step. All ranks of a parallel group have the same."""

    micro_batches: list[TrainBatch]
    num_micro_batches: int
    """Number of passes on every rank. A rank with fewer micro-batches adds fillers of one token with weight zero."""
    num_loss_tokens: int
    """Number of tokens in the loss of the whole mini-batch, over all ranks."""
    share_prompts: bool = False
    """True if equal prompts of adjacent sequences in a micro-batch are computed once."""
    logprob_indices: list[list[int]] | None = None
    """Indices of the sequences of each micro-batch whose log-probs the update returns; None to return none."""
    is_last: bool = True
    """False if this rank takes its next optimizer step before other models use the accelerator."""


class LearnerWorker(WeightSenderMixin):
    """One rank of a model. Call `address` on rank 0, then `setup` on all ranks concurrently, before anything else.

    Most methods are collective: all ranks must call them, in the same order.
    """

    def __init__(self, spec: LearnerSpec, rank: int, world_size: int):
        """Prepare this process; `setup` loads the model.

        Args:
            spec: The description of the model.
            rank: The rank of this process, from 0.
            world_size: The number of ranks.
        """
        self.spec = spec
        self.rank = rank
        self.world_size = world_size
        self.parallel_group: ParallelGroup | None = None
        self.expert_parallel: ExpertParallel | None = None
        self.memory_recorder: MemorySnapshotRecorder | None = None
        self._profiler = Profiler(spec.device)
        self._writer = ThreadPoolExecutor(1, "checkpoint")
        self._writing: Future[dict[str, FileDigest]] | None = None
        """The last save, until `poll_save` has returned its result."""
        if spec.threads:
            torch.set_num_threads(spec.threads)
        if spec.device == "cpu":
            _use_deterministic_sums()

    def address(self, other_machines: bool = False) -> tuple[str, int]:
        """Return (host, free port) for a rendezvous at this process.

        Args:
            other_machines: True if hosts that the run did not start on must reach the address, too.
        """
        variable = NODE_ADDRESS if other_machines else BIND_ADDRESS
        return free_address(os.environ.get(variable, LOOPBACK))

    def setup(self, address: str, port: int) -> int:
        """Connect to the other ranks, load and shard the model, and return its number of parameters.

        Args:
            address: The host of rank 0, from `address`.
            port: The port of rank 0, from `address`.

        Raises:
            DeadlineExceeded: Not all ranks connected within `rendezvous_s`.
            ConfigError: The model cannot be used.
        """
        spec = self.spec
        random.seed(spec.seed)
        torch.manual_seed(spec.seed)
        if spec.device == "cuda":
            torch.cuda.set_device(0)
        if spec.memory_snapshot_folder is not None:
            file = Path(spec.memory_snapshot_folder) / f"policy_rank_{self.rank}.pickle"
            self.memory_recorder = MemorySnapshotRecorder(file, torch.cuda.memory)
        backend = "nccl" if spec.device == "cuda" else "gloo"
        init_process_group(self.rank, self.world_size, address, port, backend, spec.rendezvous_s, spec.update_s)
        if spec.parallel_size > 1:
            name, kind = ("tensor", TensorParallel) if spec.tensor_parallel_size > 1 else ("sequence", SequenceParallel)
            self.parallel_group = kind(make_subgroups(spec.parallel_size, spec.update_s), spec.key_of_size(name))
        if spec.expert_parallel_size > 1:
            group = make_subgroups(spec.expert_parallel_size, spec.update_s)
            self.expert_parallel = ExpertParallel(group, spec.key_of_size("expert"))
        return self.build(spec.model_path)

    def reload(self, path: str) -> None:
        """Replace the model by the model in the Hugging Face folder `path`. A reference follows the policy this way.

        Raises:
            ConfigError: The model in the folder cannot be loaded.
        """
        del self.module, self.strategy, self.sender
        gc.collect()  # a module is a reference cycle: without this both models would be in memory at once
        self.build(path)

    def build(self, path: str) -> int:
        """Load this rank's part of a model and return the number of parameters of the full model.

        `setup` calls it once the ranks are connected.

        Args:
            path: Folder, URI or hub name of the model.

        Raises:
            ConfigError: The model cannot be used.
        """
        spec = self.spec
        model, saved = open_causal_lm(
            path,
            dtype=torch.float32 if spec.optimizer_config and not spec.lora else getattr(torch, spec.dtype),
            model_config_kwargs=spec.model_config_kwargs,
            rope_scaling=spec.rope_scaling,
            rope_theta=spec.rope_theta,
            key=spec.model_config_key,
        )
        if spec.gradient_checkpointing and spec.optimizer_config:
            use_reentrant = spec.gradient_checkpointing_use_reentrant
            enable_checkpointing(model, spec.gradient_checkpointing, use_reentrant=use_reentrant)
            if spec.lora and use_reentrant:
                model.enable_input_require_grads()  # or layers would run without gradients
        self._hf_config = get_checkpoint_config(model)
        if spec.optimizer_config:
            self._fingerprints = tensor_fingerprints(model, saved, self.rank, self.world_size)
        self.adapters = None
        if spec.lora:
            torch.manual_seed(spec.seed)
            self.adapters = LoraAdapters(model, spec.lora, spec.model_config_key.removesuffix("path") + "lora")
        ragged_model = self._wrap_model(model, saved)
        self.routers = ragged_model.routers
        self.routers.check_routers_supported(model, spec.moe_routing_replay, spec.router_aux_loss_coef)
        for parameter in ragged_model.parameters():
            if spec.lora and parameter.requires_grad:
                parameter.data = parameter.data.to(torch.promote_types(parameter.dtype, torch.float32))
        shards = ragged_model.parameter_shards
        count = sum(
            parameter.numel() * (shard.size if (shard := shards.get(ragged_model.hf_name(name))) else 1)
            for name, parameter in ragged_model.named_parameters()
        )
        if spec.use_torch_compile:
            compile_layers(ragged_model, spec.device)
        self.strategy = load_object(spec.strategy)(
            optimizer_config=spec.optimizer_config,
            fsdp_config=spec.fsdp_config,
            deepspeed_config=spec.deepspeed_config,
            device=spec.device,
            compute_dtype=getattr(torch, spec.dtype),
            rank=self.rank,
            world_size=self.world_size,
        )
        self.strategy.max_skipped_updates = spec.max_skipped_updates
        self.module = self.strategy.prepare(ragged_model, spec.total_steps)
        ragged_model.pretrained = None  # closes its files
        self.sender = WeightSender(
            self.sharded_parameters,
            wire_dtype=spec.model_dtype,
            bucket_bytes=int(spec.weight_transfer_threshold_cuda_ipc_GB * 2**30),
            rank=self.rank,
            weight_sync_only_changed=spec.weight_sync_only_changed,
            lora_model=self._adapted_model(),
            num_optimizer_steps=lambda: self.strategy.num_updates,
            device=spec.device,
            world_size=self.world_size,
            all_reduce_sum=self._sum_over_ranks,
        )
        return count

    def _adapted_model(self) -> LoraModel | None:
        """Return the adapters for engines that serve them separately; None if there are none, or some on experts."""
        adapters, spec = self.adapters, self.spec.lora
        if adapters is None or spec is None or adapters.experts:
            return None
        adapter = AdapterSpec(spec.rank, adapters.scaling, tuple(adapters.layers))
        return LoraModel(adapter, lambda trained: adapters.iter_unmerged(self.strategy.sharded_parameters(trained)))

    def _wrap_model(self, model: PreTrainedModel, pretrained: PretrainedWeights) -> RaggedModel:
        if self.spec.value_head_prefix is None:
            return LogprobModel(model, None, self.parallel_group, pretrained, self.expert_parallel)
        return ValueModel(model, self.spec.value_head_prefix, self.parallel_group, pretrained, self.expert_parallel)

    def sharded_parameters(self, adapters: dict[str, Tensor] | None = None) -> Iterator[tuple[str, ShardedTensor]]:
        """Yield (Hugging Face name, this rank's part) of every parameter, with adapters merged.

        Iterating is collective: all ranks must do it.

        Args:
            adapters: A dictionary that receives the unmerged adapters while iterating; None to leave them out.
        """
        parameters = self.strategy.sharded_parameters()
        return parameters if self.adapters is None else self.adapters.iter_merged(parameters, adapters)

    def full_parameters(self, adapters: dict[str, Tensor] | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield (Hugging Face name, complete tensor) of every parameter, with adapters merged.

        Iterating is collective: all ranks must do it.

        Args:
            adapters: A dictionary that receives the unmerged adapters while iterating; None to leave them out.
        """
        for name, parameter in self.sharded_parameters(adapters):
            yield name, parameter.full_tensor()

    def _sum_over_ranks(self, values: Tensor) -> Tensor:
        if self.world_size > 1:
            dist.all_reduce(values)
        return values

    def forward(self, micro_batches: list[TrainBatch], num_micro_batches: int, share_prompts: bool = False) -> Tensor:
        """Compute log-probs or values without gradient. Collective for sharded models.

        Args:
            micro_batches: The micro-batches of this rank.
            num_micro_batches: Number of passes on every rank; a rank with fewer micro-batches adds fillers.
            share_prompts: True to compute equal prompts of adjacent sequences once.

        Returns:
            Log-probs in nats, or values, of all tokens of the micro-batches in order: float32 on the CPU, [T].
        """
        return self._forward(micro_batches, num_micro_batches, share_prompts)[0]

    def forward_with_routing(
        self, micro_batches: list[TrainBatch], num_micro_batches: int, share_prompts: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Compute log-probs like `forward`, and also return the experts that the routers chose.

        Args:
            micro_batches: The micro-batches of this rank.
            num_micro_batches: Number of passes on every rank; a rank with fewer micro-batches adds fillers.
            share_prompts: True to compute the shared prompt of adjacent sequences only once.

        Returns:
            The log-probs [T], and expert ids as int16 on the CPU [T, L, k]; see `TrainBatch.routing`.
        """
        self.routers.record_routed_experts = True
        try:
            return self._forward(micro_batches, num_micro_batches, share_prompts)
        finally:
            self.routers.record_routed_experts = False

    def _forward(
        self, micro_batches: list[TrainBatch], num_micro_batches: int, share_prompts: bool
    ) -> tuple[Tensor, Tensor]:
        self.module.eval()
        parts, choices = [torch.zeros(0)], [torch.zeros(0, *self.routers.num_layers_and_top_k, dtype=torch.int16)]
        with torch.no_grad():
            for _, inputs, is_filler in self._micro_batches_on_device(micro_batches, num_micro_batches, share_prompts):
                scored, _ = self.module(inputs)
                if not is_filler:
                    parts.append(scored.float())
                    if self.module.routed_experts is not None:
                        choices.append(self.module.routed_experts.cpu())
        scores = torch.cat([part.cpu() for part in parts])  # waits for the device, which is past the last pass
        self._free_transient_memory()
        return scores, torch.cat(choices)

    def update(self, mini_batch: MiniBatch) -> dict[str, Any]:
        """Take one optimizer step. Collective.

        Args:
            mini_batch: This rank's share of the mini-batch.

        Returns:
            The metrics of this rank as `Metrics.to_dict`. If `logprob_indices` is set, `logprobs` has the concatenated
            log-probs of these sequences from before the step, [t]. In a parallel group only the first rank reports the
            metrics of the loss, because all of its ranks compute the same.

        Raises:
            NonFiniteUpdate: `max_skipped_updates` consecutive updates had a non-finite gradient.
        """
        try:
            return self._update(mini_batch)
        finally:  # also records an update that ran out of memory
            if self.memory_recorder is not None:
                self.memory_recorder.write()

    def _update(self, mini_batch: MiniBatch) -> dict[str, Any]:
        assert self.spec.objective is not None
        metrics = Metrics()
        self.module.train()
        self.routers.reset_load_metrics()
        self.module.router_aux_loss_weight = self.spec.router_aux_loss_coef / max(1, mini_batch.num_loss_tokens)
        count = mini_batch.num_micro_batches
        passes = self._micro_batches_on_device(mini_batch.micro_batches, count, mini_batch.share_prompts)
        logprob_indices, logprob_parts = mini_batch.logprob_indices, [torch.zeros(0)]
        is_duplicate = self.rank % self.spec.parallel_size > 0
        try:
            for index, (batch, inputs, is_filler) in enumerate(passes):
                scored, entropy = self.module(inputs, self.spec.objective.needs_entropy)
                if logprob_indices is not None and not is_filler:
                    offsets = mini_batch.micro_batches[index].offsets.tolist()  # on the CPU, so no synchronization
                    logprob_parts += [scored.detach()[offsets[i] : offsets[i + 1]] for i in logprob_indices[index]]
                loss_metrics = Metrics() if is_filler or is_duplicate else metrics
                loss = self.spec.objective(batch, scored, entropy, mini_batch.num_loss_tokens, loss_metrics)
                self.strategy.backward(loss, is_last_micro_batch=index == count - 1)
        finally:  # passes without gradient do not use the load-balancing loss
            self.module.router_aux_loss_weight, self.routers.loss_inputs = 0.0, None
        role = "policy" if self.spec.value_head_prefix is None else "critic"
        for name, value in self.strategy.step().items():
            metrics.add(f"{role}/{name}", value)
        for name, value in self.routers.collect_load_metrics(self._sum_over_ranks).items():
            metrics.add(f"{role}/{name}", value)
        for name, gib in peak_memory(self.spec.device).items():
            metrics.update_max(f"memory/learner_{name}", gib)
        result: dict[str, Any] = metrics.to_dict()
        if logprob_indices is not None:
            result["logprobs"] = torch.cat([part.float().cpu() for part in logprob_parts])
        if mini_batch.is_last:
            self._free_transient_memory()
        return result

    def _free_transient_memory(self) -> None:
        if self.spec.shares_accelerator:
            self.strategy.free_transient_memory()

    def save(self, folder: str, in_background: bool = False) -> None:
        """Save this rank's part of weights and optimizer. There is no other state, as updates are not random.

        Args:
            folder: The existing folder to write to.
            in_background: True to return once the state is copied to host memory. A thread then writes the copy, and
                `poll_save` returns the result or raises the error.

        Raises:
            OSError: The disk is full or fails, unless `in_background` is True.
        """
        shard = self.strategy.get_checkpoint_shard(copy=in_background)
        self._writing = self._writer.submit(shard.write, Path(folder))
        if not in_background:
            self._writing.result()

    def poll_save(self) -> dict[str, FileDigest] | None:
        """Return the digests of the files of the last `save` by name; None while they are being written.

        Raises the error of the save, such as OSError. Must not be called again after a result before the next `save`.
        """
        assert self._writing is not None, "nothing was saved since the last call"
        if not self._writing.done():
            return None
        writing, self._writing = self._writing, None
        return writing.result()

    def wait_for_discarded_save(self) -> None:
        """Wait for the end of a save whose result is ignored, because another rank could not write its part."""
        if self._writing is not None:
            wait([self._writing])
            self._writing = None

    def base_model_fingerprints(self) -> tuple[dict[str, str], LoraRecord | None]:
        """Return this rank's share of `tensor_fingerprints`, and the record of the adapters or None.

        The model must be trained, not frozen.
        """
        lora = None if self.adapters is None or self.spec.lora is None else LoraRecord.of(self.spec.lora, self.adapters)
        return self._fingerprints, lora

    def load(self, folder: str) -> LearningRates | None:
        """Load this rank's part of a checkpoint: parameters and, for a trained model, the optimizer's state.

        Args:
            folder: Folder that `save` has written, also with another number of ranks.

        Returns:
            The learning rates of the next update; None for a frozen model, and for a checkpoint without a recorded one.

        Raises:
            CheckpointError: The checkpoint is incomplete or corrupt, from another model, or without optimizer state.
        """
        return self.strategy.load(Path(folder))

    def export(self, folder: str, chat_template: str | None = None) -> None:
        """Write a Hugging Face folder with the full weights, and its subfolder `adapter` with the adapters, if any.

        All ranks must call it; rank 0 writes.

        Args:
            folder: The folder to write.
            chat_template: The chat template of the training; None for the tokenizer's own.

        Raises:
            OSError: The disk is full or fails. All ranks remain usable.
        """
        adapters: dict[str, Tensor] = {}
        tensors = chain(self.full_parameters(adapters), self.module.persistent_buffers())
        try:
            if self.rank == 0:
                self._write(tensors, adapters, Path(folder), chat_template)
        finally:
            for _ in tensors:  # collective: every rank must iterate to the end, also if rank 0 failed to write
                pass

    def _write(
        self, tensors: Iterator[tuple[str, Tensor]], adapters: dict[str, Tensor], folder: Path, template: str | None
    ) -> None:
        """Write the export. Iterating over `tensors` fills `adapters`."""
        base = self.spec.model_path
        tokenizer = load_tokenizer(base, chat_template=template)
        export_hf(self._hf_config, tensors, tokenizer, folder, base=base)
        if self.adapters is not None:
            # For a URI this is the URI, not the local copy of the model.
            self.adapters.config.base_model_name_or_path = strip_file_scheme(base)
            export_adapter(self.adapters, adapters, tokenizer, folder / "adapter", base=base)

    def ping(self) -> None:
        """Do nothing, to show that this rank responds."""

    def start_profile(self) -> None:
        """Start to profile the following calls."""
        self._profiler.start()

    def stop_profile(self, file: str) -> str:
        """Stop profiling and write the profile to `file`. Return a table of the slowest operations as text."""
        self._profiler.stop()
        return self._profiler.write(file)

    def free_transient_memory(self) -> None:
        """Free gathered weights and the allocator's cached memory."""
        self.strategy.free_transient_memory()

    def offload(self) -> int:
        """Move parameters, gradients and optimizer state to host memory. Return the number of bytes freed."""
        return self.strategy.offload()

    def onload(self) -> None:
        """Move parameters, gradients and optimizer state back to the device."""
        self.strategy.onload()

    def onload_parameters_only(self) -> None:
        """Move the parameters to the device and everything else to host memory, for a weight sync."""
        self.strategy.onload_parameters_only()

    def close(self) -> None:
        """Wait for a running save, and leave the process groups of the ranks and of the engines."""
        self._writer.shutdown()
        self.sender.close()
        close_process_group()

    def _micro_batches_on_device(
        self, micro_batches: list[TrainBatch], count: int, share_prompts: bool
    ) -> Iterator[tuple[TrainBatch, ModelInputs, bool]]:
        """Yield exactly `count` micro-batches, because all ranks of a sharded model must run equally many passes.

        A micro-batch is laid out on the host, and copied by a stream of its own, while a GPU still computes the one
        before it.

        Yields:
            A micro-batch on this rank's device, without routing; the model's inputs; and True if it is a filler.
        """
        for index in range(count):
            is_filler = index >= len(micro_batches)
            batch = filler_batch() if is_filler else micro_batches[index]
            shared = batch.shared_prompt_lengths() if share_prompts and not is_filler else None
            inputs = self.module.lay_out(batch, shared, batch.routing if self.spec.moe_routing_replay else None)
            yield *copy_to_device((batch.with_tokens(routing=None), inputs), self.spec.device), is_filler


def _use_deterministic_sums() -> None:
    """Make sums deterministic in this process.

    Otherwise threads sum the gradient of x[index] in any order, for example that of a router's choice of experts, and a
    resumed run would not be bitwise identical.
    """
    torch.use_deterministic_algorithms(True, warn_only=True)
    settings: Any = torch.utils.deterministic
    settings.fill_uninitialized_memory = False  # filling would write every new tensor once more


def filler_batch() -> TrainBatch:
    """Return a batch of one token with weight zero, for a rank that has no sequences left."""
    zero = torch.zeros(1, dtype=torch.int64)
    return TrainBatch(
        input_ids=zero,
        loss_mask=torch.zeros(1, dtype=torch.bool),
        offsets=torch.tensor([0, 1]),
        prompt_lengths=zero + 1,
        group_ids=zero,
        rewards=torch.zeros(1),
        temperature=torch.ones(1),
        status=torch.zeros(1, dtype=torch.bool),
        min_versions=zero,
        max_versions=zero,
        rollout_logprobs=torch.zeros(1),
        old_logprobs=torch.zeros(1),
        ref_logprobs=torch.zeros(1),
        values=torch.zeros(1),
        advantages=torch.zeros(1),
        returns=torch.zeros(1),
        loss_weights=torch.zeros(1, dtype=torch.float64),
        selected=torch.zeros(1, dtype=torch.bool),
    )
