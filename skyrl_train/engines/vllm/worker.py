"""Code that runs inside vLLM's workers: it loads the weights and the adapter of weight syncs."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from multiprocessing import parent_process
from pathlib import Path
from threading import Thread
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from vllm.config import set_current_vllm_config
from vllm.distributed import get_tensor_model_parallel_rank, get_world_group
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from skyrl_train.engines.step_loop import check_device, poll_device_error
from skyrl_train.engines.vllm.sampler import replace_sampler
from skyrl_train.engines.vllm.startup import RankPhase
from skyrl_train.errors import WeightSyncError
from skyrl_train.models.composite import get_composite
from skyrl_train.models.loading import load_meta_model, load_meta_model_as_served, to_checkpoint_tensors
from skyrl_train.models.lora import get_adaptable_linears, get_exported_names, peft_name
from skyrl_train.weight_sync.protocol import AdapterSpec
from skyrl_train.weight_sync.receiver import WeightReceiver, adapter_layout, reject_adapter

_RELOAD_LOGGER = "vllm.model_executor.model_loader.reload.layerwise"
"""vLLM's logger, which warns in every sync about layers without weights."""
_UNPACKED_DEVICES = frozenset({"cuda"})
"""Devices on which vLLM does not repack the parameters of unquantized linear layers. On CPUs it packs them."""
_CHECKPOINT_NAME_MODELS = ("deepseek_v2", "deepseek_v3", "granitemoehybrid", "lfm2_moe", "minimax_m2", "mixtral")
"""Model types whose loaders in vLLM only accept the names of published checkpoints, with each expert separate."""
_GPT_OSS = "gpt_oss"
_FUSED = (".experts.gate_up_proj", ".experts.gate_up_proj_bias", ".experts.down_proj", ".experts.down_proj_bias")
_SINKS = ".sinks"


class WorkerExtension:
    """Methods that vLLM adds to each of its workers. The engine calls them through `collective_rpc`."""

    def prepare(self: Any, name: str, slot: int, adapter_folder: str = "") -> None:
        """Replace the sampler and create the weight receiver. The engine calls this once, before its first request.

        If the engine runs on several nodes, this worker exits from now on when its parent process exits.

        Args:
            name: The engine's name, for error messages.
            slot: Placement slot of the engine's first rank.
            adapter_folder: A folder of this engine for adapters from weight syncs; empty without LoRA.

        Raises:
            ConfigError: vLLM's configuration conflicts with the sampler; see `replace_sampler`.
        """
        if self.parallel_config.nnodes > 1:
            Thread(target=_exit_with_parent, name="parent", daemon=True).start()
        if self.use_v2_model_runner:
            from skyrl_train.engines.vllm import sampler_v2  # It requires Triton.

            sampler_v2.replace_sampler(self.model_runner, name)
        else:
            replace_sampler(self.model_runner, name)
        head = getattr(self.model_runner.model, "logits_processor", None)
        if hasattr(head, "punica_wrapper"):
            _score_without_adapters(head)
            if self.device.type == "cpu":
                _skip_rows_without_adapter()
        config, max_rank = self.model_config, self.lora_config.max_lora_rank if self.lora_config else 0
        # vLLM patches the transformers class of a model that it runs through transformers, and the patched class reads
        # the current configuration.
        with set_current_vllm_config(self.vllm_config):
            adapter = SyncedAdapterWriter(
                adapter_folder, config.model, config.dtype, max_rank, writes=self.local_rank == 0
            )
            store = VLLMWeightStore(self.model_runner.model, config, adapter)
        self.engine_name = name
        file = share_memory_file(self.parallel_config.node_rank)
        self.weight_receiver = WeightReceiver(store, name, self.device, slot + self.rank, self.rank, file)

    def use_main_stream(self: Any) -> None:
        """Let the calling thread compute on the CUDA stream with which the V2 model runner started.

        Streams belong to threads, and an engine with one rank starts on another thread than the one that steps it. The
        runner's copies of sampled tokens wait for the stream of the start only.
        """
        if self.device.type == "cuda" and self.use_v2_model_runner:
            torch.cuda.set_stream(self.model_runner.main_stream)

    def get_startup_phases(self: Any) -> list[RankPhase]:
        """Return the times of this rank's start."""
        return list(self.startup_phases)

    def check_device(self: Any) -> None:
        """Raise the device's error if the device no longer computes."""
        check_device(self.device)

    def free_memory_bytes(self: Any) -> int:
        """Return the number of free bytes on this rank's accelerator."""
        return int(torch.cuda.mem_get_info(self.device)[0])

    def call_weight_receiver(self: Any, step: partial[None]) -> tuple[str | None, bool]:
        """Call a method of this rank's WeightReceiver.

        The error is returned as a message, because exceptions lose their type on their way to the engine.

        Args:
            step: A partial method of WeightReceiver that lacks only the receiver.

        Returns:
            The error message, or None on success; and True if the weights are partially loaded.

        Raises:
            Exception: The device's error, if the device no longer computes.
        """
        receiver: WeightReceiver = self.weight_receiver
        try:
            step(receiver)
        except WeightSyncError as error:
            poll_device_error(self.device)  # An earlier failure of the device may have caused the transfer's error.
            return str(error), receiver.partially_loaded
        except Exception as error:  # vLLM's loaders and the device raise many types.
            check_device(self.device)
            problem = f"{step.func.__name__} failed: {type(error).__name__}"
            return f"engine {self.engine_name}: {problem}: {error}", receiver.partially_loaded
        return None, receiver.partially_loaded

    def reload_folder(self: Any, folder: str) -> None:
        """Load a complete checkpoint into a running model. vLLM's own server uses this (http/native_servers.py).

        Args:
            folder: Folder with *.safetensors files that together contain every tensor.

        Raises:
            WeightSyncError: vLLM cannot load this model's weights a second time.
        """
        if not hasattr(self, "folder_store"):
            self.folder_store = VLLMWeightStore(self.model_runner.model, self.model_config)
        store: VLLMWeightStore = self.folder_store
        store.layout()
        store.start()
        for file in sorted(Path(folder).glob("*.safetensors")):
            store.load(list(load_file(file, device=str(self.device)).items()))
        store.finish()


def share_memory_file(node_rank: int) -> int | None:
    """Return the descriptor of an empty file in memory that the engine's ranks on this node share. A collective.

    The kernel frees its memory with the last process that has it open.

    Args:
        node_rank: Index of this node among those of the engine.

    Returns:
        The descriptor; None if the engine has one rank, or if this process may not open the file.
    """
    group = get_world_group()
    if group.world_size == 1:
        return None
    file = os.memfd_create("weight-copies")
    files: list[tuple[int, int, int] | None] = [None] * group.world_size
    torch.distributed.all_gather_object(files, (node_rank, os.getpid(), file), group=group.cpu_group)
    _, owner, shared_file = next(entry for entry in files if entry is not None and entry[0] == node_rank)
    try:
        opened = os.open(f"/proc/{owner}/fd/{shared_file}", os.O_RDWR)
    except OSError:
        opened = None
    torch.distributed.barrier(group=group.cpu_group)  # before another rank closes its file
    os.close(file)
    return opened


def _exit_with_parent() -> None:
    # vLLM ends workers when the scheduler on their own node is gone, but not when a scheduler on another node is gone.
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _score_without_adapters(head: Any) -> None:
    """Patch the head so that scored prompts bypass its adapters, which fail for rows that are not sampled from.

    Results do not change, because adapters never change the head.
    """
    get_logits_with_adapters = head._get_logits

    def get_logits(hidden: Tensor, lm_head: Any, *args: Any, **kwargs: Any) -> Tensor | None:
        if len(hidden) == len(head.punica_wrapper.sampler_indices):
            return get_logits_with_adapters(hidden, lm_head, *args, **kwargs)  # type: ignore[no-any-return]
        return head.base_layer._get_logits(hidden, getattr(lm_head, "base_layer", lm_head), *args, **kwargs)  # type: ignore[no-any-return]

    head._get_logits = get_logits


def _skip_rows_without_adapter() -> None:
    """Fix vLLM's CPU operators for rows without an adapter: they read the index -1 as the last adapter."""
    from vllm.lora.ops.torch_ops import lora_ops
    from vllm.lora.punica_wrapper import punica_cpu

    shrink = lora_ops.bgmv_shrink
    if shrink.__module__ != lora_ops.__name__:
        return

    def bgmv_shrink(inputs: Tensor, weights: Tensor, output: Tensor, adapters: Tensor, scaling: float = 1.0) -> None:
        shrink(inputs, weights, output, adapters, scaling)
        output[adapters < 0] = 0.0

    for module in (lora_ops, punica_cpu):
        module.bgmv_shrink = bgmv_shrink  # type: ignore[attr-defined]


def _is_not_rotary(record: logging.LogRecord) -> bool:
    """True unless the warning is about a rotary embedding, which computes its tables and has no weights."""
    layer = str(record.args[0]) if isinstance(record.args, tuple) and record.args else ""
    return not layer.endswith("RotaryEmbedding")


def _is_not_rotary_or_head(record: logging.LogRecord) -> bool:
    """True unless the warning is about a rotary embedding or about a tied head, whose weights are the embedding's."""
    return _is_not_rotary(record) and record.args != ("ParallelLMHead",)


class VLLMWeightStore:
    """A WeightStore for a model of vLLM, which fuses, shards and repacks tensors layer by layer.

    Models whose parameters vLLM uses as it loaded them are loaded in place. All others are reloaded layer by layer,
    which copies each tensor twice.
    """

    def __init__(self, model: Any, config: Any, adapter: SyncedAdapterWriter | None = None):
        """Create a store for the model of one rank, and filter vLLM's misleading warnings about reloads.

        Args:
            model: vLLM's model.
            config: vLLM's ModelConfig.
            adapter: Writer of adapters from weight syncs; None if syncs bring none.
        """
        self._model = model
        self._config = config
        meta_model = load_meta_model_as_served(config.model, config.dtype)
        self._layout = dict(meta_model.named_parameters(remove_duplicate=False))
        self._renamer = WeightRenamer(model, meta_model)
        self._adapter = adapter
        self._experts = list(_packed_experts(model))
        tied = getattr(config.hf_text_config, "tie_word_embeddings", False)
        logging.getLogger(_RELOAD_LOGGER).addFilter(_is_not_rotary if not tied else _is_not_rotary_or_head)
        self._loads_in_place = computes_with_loaded_parameters(model, config)
        self.loads_separately = self._loads_in_place  # never with LoRA: the folder of an adapter needs all its tensors
        self._is_reloading = False
        """True if layers accept weights: from the first `load` to `finish`, or after a failed sync."""

    def layout(self, adapter: AdapterSpec | None = None) -> Mapping[str, Tensor]:
        """Return the tensors that a sync must send, by Hugging Face name.

        Args:
            adapter: Adapter of the sync, whose tensors are included; None for a sync without an adapter.

        Raises:
            WeightSyncError: vLLM cannot load the model's experts a second time, or cannot serve `adapter`.
        """
        adapter_layout = self._adapter.layout(adapter) if self._adapter is not None else {}
        for experts in self._experts:
            size, padded = experts.moe_config.intermediate_size_per_partition, experts.w2_weight.shape[-1]
            if padded != size:
                raise WeightSyncError(
                    f"vLLM on CPUs pads the experts of this model from {size} to {padded} columns per rank and cannot "
                    "load weights into them again. Serve it on GPUs, or set generator.backend to another engine."
                )
        return {**self._layout, **adapter_layout}

    def start(self) -> None:
        """End the reload of a failed sync, whose tensors would otherwise count as part of the next one."""
        if self._is_reloading:
            finalize_layerwise_reload(self._model, self._config)
            self._is_reloading = False

    def load(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        """Load the tensors of one bucket. Tensors of the adapter are stored for `finish`."""
        if self._adapter is not None:
            tensors = self._adapter.take(tensors)
        if not tensors:
            return
        if self._loads_in_place:
            with torch.no_grad():
                self._model.load_weights(self._renamer.rename(tensors))
            return
        if not self._is_reloading:
            initialize_layerwise_reload(self._model)
            self._is_reloading = True
        # vLLM holds these tensors until their layer is complete, perhaps in a later bucket, so they must be copies.
        self._model.load_weights((name, tensor.clone()) for name, tensor in self._renamer.rename(tensors))

    def finish(self) -> None:
        """Write the adapter's folder and let vLLM repack the layers that were loaded."""
        if self._adapter is not None:
            self._adapter.finish()
        if not self._is_reloading:
            return
        finalize_layerwise_reload(self._model, self._config)
        self._is_reloading = False
        self._renamer.finish()
        # A tied head on a CPU multiplies by a packed copy of the embedding, which a reload does not update.
        for module in self._model.modules():
            if isinstance(module, VocabParallelEmbedding) and hasattr(module, "cpu_linear"):
                dispatch_cpu_unquantized_gemm(module, remove_weight=False)
            _update_convolution(module)
        for experts in self._experts:  # vLLM itself packs them only after its first load.
            experts.quant_method.moe_kernel.fused_experts.process_weights_after_loading(experts)

    def loaded_tensor(self, name: str) -> None:
        """Return None: vLLM fuses and packs tensors, so the loaded tensor does not exist as such."""
        return None


def computes_with_loaded_parameters(model: Any, config: Any) -> bool:
    """True if vLLM computes with a model's parameters as it loaded them, without repacking them or deriving others.

    Args:
        model: vLLM's model.
        config: vLLM's ModelConfig.
    """
    if config.quantization is not None or config.use_mla or config.is_hybrid:
        return False
    if any(parameter.device.type not in _UNPACKED_DEVICES for parameter in model.parameters()):
        return False
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if method is not None and type(method) not in (UnquantizedLinearMethod, UnquantizedEmbeddingMethod):
            return False
        if isinstance(module, RoutedExperts) or hasattr(module, "base_layer") or hasattr(module, "sinks"):
            return False
    return True


@torch.no_grad()
def _update_convolution(mixer: Any) -> None:
    """Copy the convolution of a Mamba2 layer, after a reload, to where the layer reads it.

    In bfloat16 on CPUs vLLM packs the weights of the convolution after the first load. The layer still reads a view of
    the unpacked ones, which a reload does not update.
    """
    weights = getattr(getattr(mixer, "conv1d", None), "_cpu_unpacked_conv_weight", None)
    if weights is not None and hasattr(mixer, "conv_weights"):
        mixer.conv_weights.copy_(weights)


def _packed_experts(model: Any) -> Iterator[Any]:
    """Yield the mixture-of-experts layers whose weights vLLM stores in the layout of its CPU kernels."""
    for module in model.modules():
        kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
        if isinstance(module, RoutedExperts) and kernel is not None and module.w2_weight.device.type == "cpu":
            yield module


class SyncedAdapterWriter:
    """A writer that saves the adapter of a weight sync to a folder, because vLLM loads adapters only from folders.

    Each rank collects the adapter's tensors. The first rank of each node writes the folder, which all ranks of the node
    load afterwards.
    """

    def __init__(self, folder: str, model: str, dtype: torch.dtype, max_rank: int, writes: bool):
        """Create a writer.

        Args:
            folder: The folder to write to.
            model: Folder or hub name of the base model.
            dtype: Data type of the adapter's tensors in a sync.
            max_rank: Largest LoRA rank that the engine accepts; 0 if it serves no adapters.
            writes: True for the rank that writes the folder.
        """
        self._folder = Path(folder)
        self._model = model
        self._dtype = dtype
        self._max_rank = max_rank
        self._writes = writes
        self._spec: AdapterSpec | None = None
        self._tensors: dict[str, Tensor] = {}

    @cached_property
    def _meta_model(self) -> PreTrainedModel:
        return load_meta_model(self._model, self._dtype)

    @cached_property
    def _linears(self) -> dict[str, nn.Linear]:
        return get_adaptable_linears(self._meta_model)

    def layout(self, spec: AdapterSpec | None) -> Mapping[str, Tensor]:
        """Start a sync with this adapter.

        Args:
            spec: The sync's adapter; None for a sync without one.

        Returns:
            The adapter's tensors by name, on the meta device; empty without an adapter.

        Raises:
            WeightSyncError: The engine serves no adapters, the rank is above `max_rank`, or the model lacks a layer
                that the adapter changes.
        """
        self._spec, self._tensors = spec, {}
        if spec is None:
            return {}
        if not self._max_rank:
            reject_adapter(spec)
        if spec.rank > self._max_rank:
            raise WeightSyncError(
                f"an adapter of rank {spec.rank} is above max_lora_rank={self._max_rank} of this engine: raise "
                "max_lora_rank in generator.engine_init_kwargs, or set trainer.policy.model.lora.sync=merged."
            )
        return adapter_layout(spec, self._linears)

    def take(self, tensors: Sequence[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
        """Store copies of the adapter's tensors in host memory; return the tensors that are not the adapter's."""
        if self._spec is None:
            return list(tensors)
        adapter_names = set(adapter_layout(self._spec, self._linears))
        self._tensors |= {name: tensor.cpu().clone() for name, tensor in tensors if name in adapter_names}
        return [(name, tensor) for name, tensor in tensors if name not in adapter_names]

    def finish(self) -> None:
        """Write the adapter's folder in peft's format, if the sync has an adapter and this rank writes.

        Raises:
            OSError: The folder cannot be written.
        """
        if self._spec is None or not self._writes:
            return
        names = get_exported_names(self._meta_model)
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "r": self._spec.rank,
            "lora_alpha": self._spec.scaling * self._spec.rank,
            "target_modules": [names[layer] for layer in self._spec.layers],
            "bias": "none",
        }
        self._folder.mkdir(parents=True, exist_ok=True)
        (self._folder / "adapter_config.json").write_text(json.dumps(config))
        tensors = {peft_name(name, names): tensor.contiguous() for name, tensor in self._tensors.items()}
        save_file(tensors, self._folder / "adapter_model.safetensors")


class WeightRenamer:
    """A converter from transformers' tensor names to names that vLLM's model loads during a reload.

    During a layerwise reload vLLM's parameters are on the meta device, and only tensors that pass through a
    `weight_loader` arrive. Tensors that a model's own code copies into a parameter are silently lost, so `finish`
    copies these after the reload.
    """

    def __init__(self, served: Any, model: PreTrainedModel):
        """Create a converter.

        Args:
            served: vLLM's model.
            model: The transformers model on the meta device, whose parameter names the tensors of a sync have.
        """
        self._served = served
        self._model = model
        self._model_type: str = model.config.model_type
        self._sinks: dict[str, Tensor] = {}

    def rename(self, tensors: Sequence[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]:
        """Return tensors under names that vLLM loads. Those without a `weight_loader` are stored for `finish`."""
        if self._model_type in _CHECKPOINT_NAME_MODELS or get_composite(self._model) is not None:
            return to_checkpoint_tensors(self._model, dict(tensors)).items()
        return self._rename_gpt_oss(tensors) if self._model_type == _GPT_OSS else tensors

    def _rename_gpt_oss(self, tensors: Sequence[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in tensors:
            if name.endswith(_SINKS):
                self._sinks[name.replace(".self_attn.", ".attn.")] = tensor.clone()
            elif name.endswith(_FUSED):
                layer, _, parameter = name.rpartition(".")
                yield from ((f"{layer}.{expert}.{parameter}", weights) for expert, weights in enumerate(tensor))
            else:
                yield name, tensor

    @torch.no_grad()
    def finish(self) -> None:
        """Copy this rank's attention sinks, which have no `weight_loader`, into the model after a reload."""
        for name, sinks in self._sinks.items():
            attention = self._served.get_submodule(name.removesuffix(_SINKS))
            rank, count = get_tensor_model_parallel_rank(), len(attention.sinks)
            # The kernel reads either the parameter itself or a copy of it in another dtype.
            for target in {id(tensor): tensor for tensor in (attention.sinks, attention.attn.impl.sinks)}.values():
                target.copy_(sinks[rank * count : (rank + 1) * count])
        self._sinks.clear()
