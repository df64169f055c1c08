"""Activation checkpointing: which activations of a decoder layer are kept for backward, and which are recomputed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from transformers import PreTrainedModel

SELECTIVE = "selective"
"""Value of trainer.gradient_checkpointing: keep the results of matrix products and of attention, recompute the rest."""
_KEPT_OPERATORS = (
    "aten::mm",
    "aten::addmm",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "torch_attn::_varlen_attn",
)
"""Operators whose results are kept. Batched products are missing because some compute the scores of all tokens."""
_GROUPED_PRODUCT = "aten::_grouped_mm"
"""Operator of fused experts. Its results are kept unless experts have biases, which transformers adds in place."""


def enable_checkpointing(model: PreTrainedModel, mode: bool | str, *, use_reentrant: bool) -> None:
    """Checkpoint the decoder layers of a model.

    Args:
        model: The model.
        mode: True keeps only the layers' inputs, SELECTIVE also the results of matrix products and of attention. False
            changes nothing.
        use_reentrant: Use PyTorch's older implementation, which SELECTIVE does not support.
    """
    if not mode:
        return
    options: dict[str, Any] = {"use_reentrant": use_reentrant}
    if mode == SELECTIVE:
        modules = [module for module in model.modules() if any(weight.ndim > 2 for weight in module.parameters(False))]
        has_biases = any(name.endswith("bias") for module in modules for name, _ in module.named_parameters())
        operators = _KEPT_OPERATORS if has_biases else (*_KEPT_OPERATORS, _GROUPED_PRODUCT)
        options["context_fn"] = partial(_selective_contexts, [op for name in operators for op in _overloads(name)])
    model.gradient_checkpointing_enable(options)


@dataclass
class _KeptOutputs:
    """Outputs of functions that PyTorch's operators do not show, in a layer's forward pass."""

    outputs: deque[Tensor] = field(default_factory=deque)
    is_recomputing: bool = False


_kept_outputs: ContextVar[_KeptOutputs | None] = ContextVar("kept_outputs", default=None)


def keep_output(function: Callable[[], Tensor]) -> Tensor:
    """Call a function, or return its output of the forward pass if a selectively checkpointed layer is recomputed.

    It also keeps what the function saves for backward. Only for functions that are not operators of PyTorch.
    """
    kept = _kept_outputs.get()
    if kept is None:
        return function()
    if kept.is_recomputing:
        return kept.outputs.popleft()
    with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):  # instead of the checkpoint's
        output = function()
    kept.outputs.append(output.detach().requires_grad_(output.requires_grad))
    return output


def _selective_contexts(operators: list[Any]) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return the contexts of a layer's forward pass and of its recomputation, which keep the operators' results."""
    contexts = create_selective_checkpoint_contexts(operators)
    outputs: deque[Tensor] = deque()
    forward, recomputation = (_KeptOutputs(outputs, is_recomputing) for is_recomputing in (False, True))
    return _with_kept_outputs(contexts[0], forward), _with_kept_outputs(contexts[1], recomputation)


@contextmanager
def _with_kept_outputs(context: AbstractContextManager[Any], kept: _KeptOutputs) -> Iterator[None]:
    token = _kept_outputs.set(kept)
    try:
        with context:
            yield
    finally:
        _kept_outputs.reset(token)


def _overloads(name: str) -> list[Any]:
    """Return the overloads of an operator that have no output argument; none if it is not registered."""
    namespace, _, operator = name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), operator, None)
    names = [] if packet is None else packet.overloads()
    return [getattr(packet, overload) for overload in names if "out" not in overload]
