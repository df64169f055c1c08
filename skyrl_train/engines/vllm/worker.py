"""Code that runs inside vLLM's workers: how they take the weights, and the adapter, of a weight sync."""

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
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from skyrl_train.engines.step_loop import check_device, poll_device_error
from skyrl_train.engines.vllm.sampler import replace_sampler
from skyrl_train.errors import WeightSyncError
from skyrl_train.models.composite import get_composite
from skyrl_train.models.loading import load_meta_model, load_meta_model_as_served, to_checkpoint_tensors
from skyrl_train.models.lora import get_adaptable_linears, get_exported_names, peft_name
from skyrl_train.weight_sync.protocol import AdapterSpec
from skyrl_train.weight_sync.receiver import WeightReceiver, adapter_layout, reject_adapter

_RELOADS = "vllm.model_executor.model_loader.reload.layerwise"
"""vLLM's logger that warns at every sync of layers that got no weights."""
_BY_EXPERT = ("deepseek_v2", "deepseek_v3", "minimax_m2", "mixtral")
"""Models whose loaders know experts under the names of published checkpoints only: each separately."""
_GPT_OSS = "gpt_oss"
_FUSED = (".experts.gate_up_proj", ".experts.gate_up_proj_bias", ".experts.down_proj", ".experts.down_proj_bias")
_SINKS = ".sinks"


class WorkerExtension:
    """Methods that vLLM adds to each of its workers, called through collective_rpc."""

    def prepare(self: Any, name: str, slot: int, adapter_folder: str = "") -> None:
        """To be called once, before the first request. Raises ConfigError, see `replace_sampler`.

        `adapter_folder`: a folder of this engine's own, for adapters from weight syncs.
        """
        if self.parallel_config.nnodes > 1:
            Thread(target=_exit_with_parent, name="parent", daemon=True).start()
        replace_sampler(self.model_runner, name)
        head = getattr(self.model_runner.model, "logits_processor", None)
        if hasattr(head, "punica_wrapper"):
            _score_without_adapters(head)
            if self.device.type == "cpu":
                _skip_rows_without_adapter()
        config, max_rank = self.model_config, self.lora_config.max_lora_rank if self.lora_config else 0
        # vLLM changes transformers' class of a model that it serves with it: it asks for this configuration then.
        with set_current_vllm_config(self.vllm_config):
            adapter = SyncedAdapterWriter(
                adapter_folder, config.model, config.dtype, max_rank, writes=self.local_rank == 0
            )
            store = VLLMWeightStore(self.model_runner.model, config, adapter)
        self.engine_name = name
        self.weight_receiver = WeightReceiver(store, name, self.device, slot + self.rank, self.rank)

    def check_device(self: Any) -> None:
        """Raises the device's error if it does not compute any more."""
        check_device(self.device)

    def free_memory_bytes(self: Any) -> int:
        """Bytes that are free on this rank's accelerator."""
        return int(torch.cuda.mem_get_info(self.device)[0])

    def call_weight_receiver(self: Any, step: partial[None]) -> tuple[str | None, bool]:
        """Call a method of WeightReceiver; returns its error message (exceptions would lose their type) and `torn`.

        Raises the device's error if it does not compute any more.
        """
        receiver: WeightReceiver = self.weight_receiver
        try:
            step(receiver)
        except WeightSyncError as error:
            poll_device_error(self.device)  # a transfer also fails with what went wrong on the device before it
            return str(error), receiver.partially_loaded
        except Exception as error:  # of vLLM's loaders, of the device
            check_device(self.device)
            what = f"{step.func.__name__} failed: {type(error).__name__}"
            return f"engine {self.engine_name}: {what}: {error}", receiver.partially_loaded
        return None, receiver.partially_loaded

    def reload_folder(self: Any, folder: str) -> None:
        """Load a checkpoint that has every tensor; for vLLM's own server (http/native_servers.py).

        Raises WeightSyncError for a model whose weights cannot be loaded again.
        """
        if not hasattr(self, "folder_store"):
            self.folder_store = VLLMWeightStore(self.model_runner.model, self.model_config)
        store: VLLMWeightStore = self.folder_store
        store.layout()
        store.start()
        for file in sorted(Path(folder).glob("*.safetensors")):
            store.load(list(load_file(file, device=str(self.device)).items()))
        store.finish()


def _exit_with_parent() -> None:
    """vLLM ends what waits for a scheduler on this node once that is gone, but not what waits for one on another."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _score_without_adapters(head: Any) -> None:
    """Let the rows of scored prompts bypass the adapters of the head, which expect rows to sample from and would fail.

    This changes no result, as no adapter changes the head.
    """
    adapted = head._get_logits

    def logits(hidden: Tensor, lm_head: Any, *args: Any, **kwargs: Any) -> Tensor | None:
        if len(hidden) == len(head.punica_wrapper.sampler_indices):
            return adapted(hidden, lm_head, *args, **kwargs)  # type: ignore[no-any-return]
        return head.base_layer._get_logits(hidden, getattr(lm_head, "base_layer", lm_head), *args, **kwargs)  # type: ignore[no-any-return]

    head._get_logits = logits


def _skip_rows_without_adapter() -> None:
    """Fix vLLM's CPU operators: rows without an adapter have index -1, which they take as the last adapter."""
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


def _of_layers_with_weights(record: logging.LogRecord) -> bool:
    """Filters out warnings about rotary embeddings: they compute their tables and so get no weights."""
    layer = str(record.args[0]) if isinstance(record.args, tuple) and record.args else ""
    return not layer.endswith("RotaryEmbedding")


def _of_layers_untied(record: logging.LogRecord) -> bool:
    """Also filters out warnings about a tied head, whose weights are the embedding's."""
    return _of_layers_with_weights(record) and record.args != ("ParallelLMHead",)


class VLLMWeightStore:
    """A WeightStore whose tensors vLLM fuses, shards and repacks, layer by layer."""

    def __init__(self, model: Any, config: Any, adapter: SyncedAdapterWriter | None = None):
        self._model = model
        self._config = config
        described = load_meta_model_as_served(config.model, config.dtype)
        self._layout = dict(described.named_parameters(remove_duplicate=False))
        self._reloading = WeightRenamer(model, described)
        self._adapter = adapter
        self._experts = list(_packed_experts(model))
        tied = getattr(config.hf_text_config, "tie_word_embeddings", False)
        logging.getLogger(_RELOADS).addFilter(_of_layers_with_weights if not tied else _of_layers_untied)
        self._open = False
        """Whether layers are open for weights: from the first load to `finish`, or since a sync that failed."""

    def layout(self, adapter: AdapterSpec | None = None) -> Mapping[str, Tensor]:
        """See WeightStore. Raises WeightSyncError for experts that vLLM cannot load a second time."""
        adapter_layout = self._adapter.layout(adapter) if self._adapter is not None else {}
        for experts in self._experts:
            size, held = experts.moe_config.intermediate_size_per_partition, experts.w2_weight.shape[-1]
            if held != size:
                raise WeightSyncError(
                    f"vLLM on CPUs pads the experts of this model from {size} to {held} columns a rank and cannot load "
                    "weights into them again. Serve it on GPUs or by another engine (generator.backend)."
                )
        return {**self._layout, **adapter_layout}

    def start(self) -> None:
        if self._open:  # after a failed sync: its layers would otherwise count its tensors as part of this one
            finalize_layerwise_reload(self._model, self._config)
            self._open = False

    def load(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        if self._adapter is not None:
            tensors = self._adapter.take(tensors)
        if not tensors:
            return
        if not self._open:
            initialize_layerwise_reload(self._model)
            self._open = True
        # vLLM keeps these tensors until their layer is complete, maybe in a later bucket: so they must be copies.
        self._model.load_weights((name, tensor.clone()) for name, tensor in self._reloading.named(tensors))

    def finish(self) -> None:
        if self._adapter is not None:
            self._adapter.finish()
        if not self._open:
            return
        finalize_layerwise_reload(self._model, self._config)
        self._open = False
        self._reloading.finish()
        # A tied head on a CPU multiplies by a packed copy of the embedding, which a reload leaves as it was.
        for module in self._model.modules():
            if isinstance(module, VocabParallelEmbedding) and hasattr(module, "cpu_linear"):
                dispatch_cpu_unquantized_gemm(module, remove_weight=False)
        for experts in self._experts:  # vLLM packs them after its first load only
            experts.quant_method.moe_kernel.fused_experts.process_weights_after_loading(experts)

    def loaded_tensor(self, name: str) -> None:
        """None: tensors are fused and packed, so they do not exist as such."""
        return None


def _packed_experts(model: Any) -> Iterator[Any]:
    """Mixture-of-experts layers whose weights vLLM keeps in the layout of its kernels for CPUs."""
    for module in model.modules():
        kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
        if isinstance(module, RoutedExperts) and kernel is not None and module.w2_weight.device.type == "cpu":
            yield module


class SyncedAdapterWriter:
    """Passes an adapter from weight syncs on to vLLM, which reads adapters only from folders.

    Each rank has a copy of the adapter's tensors. The first of a node writes the folder, which all load afterwards.
    """

    def __init__(self, folder: str, model: str, dtype: torch.dtype, max_rank: int, writes: bool):
        self._folder = Path(folder)
        self._model = model
        self._dtype = dtype
        self._max_rank = max_rank
        self._writes = writes
        self._spec: AdapterSpec | None = None
        self._tensors: dict[str, Tensor] = {}

    @cached_property
    def _described(self) -> PreTrainedModel:
        return load_meta_model(self._model, self._dtype)

    @cached_property
    def _linears(self) -> dict[str, nn.Linear]:
        return get_adaptable_linears(self._described)

    def layout(self, spec: AdapterSpec | None) -> Mapping[str, Tensor]:
        """Begin a sync with this adapter; returns name -> tensor of its layout. Raises WeightSyncError."""
        self._spec, self._tensors = spec, {}
        if spec is None:
            return {}
        if not self._max_rank:
            reject_adapter(spec)
        if spec.rank > self._max_rank:
            raise WeightSyncError(
                f"an adapter of rank {spec.rank} is above max_lora_rank={self._max_rank} of this engine: raise it in "
                "generator.engine_init_kwargs, or set trainer.policy.model.lora.sync=merged."
            )
        return adapter_layout(spec, self._linears)

    def take(self, tensors: Sequence[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
        """Keep copies of the adapter's tensors; returns the other tensors."""
        if self._spec is None:
            return list(tensors)
        ours = set(adapter_layout(self._spec, self._linears))
        self._tensors |= {name: tensor.cpu().clone() for name, tensor in tensors if name in ours}
        return [(name, tensor) for name, tensor in tensors if name not in ours]

    def finish(self) -> None:
        """Write the adapter's folder in peft's format. Raises OSError."""
        if self._spec is None or not self._writes:
            return
        names = get_exported_names(self._described)
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
        named = {peft_name(name, names): tensor.contiguous() for name, tensor in self._tensors.items()}
        save_file(named, self._folder / "adapter_model.safetensors")


class WeightRenamer:
    """Renames the tensors of one model's syncs, and copies what does not pass through a `weight_loader` itself.

    Between `initialize_layerwise_reload` and its end vLLM's parameters are on the meta device, and only tensors that
    pass through a `weight_loader` arrive; what a model's own code copies into a parameter is lost without a word.
    """

    def __init__(self, served: Any, model: PreTrainedModel):
        """`served`: vLLM's model. `model`: transformers' on the meta device, whose names tensors have."""
        self._served = served
        self._model = model
        self._kind: str = model.config.model_type
        self._sinks: dict[str, Tensor] = {}

    def named(self, tensors: Sequence[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]:
        """The tensors under names that pass through a `weight_loader`; the others are kept for `finish`."""
        if self._kind in _BY_EXPERT or get_composite(self._model) is not None:
            return to_checkpoint_tensors(self._model, dict(tensors)).items()
        return self._of_gpt_oss(tensors) if self._kind == _GPT_OSS else tensors

    def _of_gpt_oss(self, tensors: Sequence[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in tensors:
            if name.endswith(_SINKS):
                self._sinks[name.replace(".self_attn.", ".attn.")] = tensor.clone()
            elif name.endswith(_FUSED):
                layer, _, own = name.rpartition(".")
                yield from ((f"{layer}.{expert}.{own}", weights) for expert, weights in enumerate(tensor))
            else:
                yield name, tensor

    @torch.no_grad()
    def finish(self) -> None:
        """Copy what has no `weight_loader`: this rank's sinks of attention, which its kernel reads in place or cast."""
        for name, sinks in self._sinks.items():
            attention = self._served.get_submodule(name.removesuffix(_SINKS))
            rank, count = get_tensor_model_parallel_rank(), len(attention.sinks)
            for held in {id(one): one for one in (attention.sinks, attention.attn.impl.sinks)}.values():
                held.copy_(sinks[rank * count : (rank + 1) * count])
        self._sinks.clear()
