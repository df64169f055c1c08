"""Low-rank adapters on the experts of a mixture, which transformers keeps in parameters of three dimensions.

W x of expert e becomes W x + s B (A x) with matrices A and B of its own: PEFT's `target_parameters`. The terms are
computed separately, because W + s B A would round away most of a small change in bfloat16.

Legend: T tokens, k experts for each token, S = T k, E experts, D hidden size, r rank.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import PreTrainedModel

from skyrl_train.models.ragged_attention import deterministic_index_select

_ALIGNMENT = 8
"""Kernels of grouped products read rows of 16 bytes, so ranks are padded to a multiple of this with zeros."""


def get_expert_parameters(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Return the parameters of experts that adapters may change: name -> the module that holds it, in its order.

    They belong to classes for which transformers supports several implementations of experts, so that their
    computation is known.
    """
    return {
        f"{path}.{name}": module
        for path, module in model.named_modules()
        if hasattr(module, "is_transposed") and hasattr(module, "has_gate") and hasattr(module, "num_experts")
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.ndim == 3 and name in (_input_projection(module), "down_proj")
    }


def find_fused_experts(model: PreTrainedModel) -> str | None:
    """Return the name of a parameter that holds several experts, of any class; None if there is none."""
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.ndim > 2 and not isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
                return f"{path}.{name}"
    return None


def adapter_names(parameter: str) -> tuple[str, str]:
    """Return the names of A [E, r, in] and B [E, out, r] of a parameter, next to it in the same module."""
    owner, dot, name = parameter.rpartition(".")
    return f"{owner}{dot}lora_A_{name}", f"{owner}{dot}lora_B_{name}"


def add_expert_adapters(experts: Any, parameter: str, rank: int, scaling: float, init_method: str) -> None:
    """Add an adapter to one parameter of a module of experts, and make the module compute with it.

    A is drawn from torch's generator as PEFT draws it, and B is 0.

    Args:
        experts: The module, which is changed.
        parameter: Name of the parameter in the module.
        rank: Rank of the adapter of each expert.
        scaling: The factor s.
        init_method: "kaiming" or "gaussian".
    """
    weight = getattr(experts, parameter)
    count, outputs, inputs = weight.mT.shape if experts.is_transposed else weight.shape
    lora_a, lora_b = torch.empty(count, rank, inputs), torch.zeros(count, outputs, rank)
    if init_method == "gaussian":
        nn.init.normal_(lora_a, std=1 / rank)
    else:
        nn.init.kaiming_uniform_(lora_a.view(-1, inputs), a=math.sqrt(5))
    for name, matrices in zip(adapter_names(parameter), (lora_a, lora_b), strict=True):
        device = matrices.device if weight.is_meta else weight.device
        experts.register_parameter(name, nn.Parameter(matrices.to(device, weight.dtype)))
    if "forward" not in vars(experts):
        experts.forward = partial(_forward, experts, experts.forward, scaling)


def to_factors(lora_a: Tensor, lora_b: Tensor, is_transposed: bool) -> tuple[Tensor, Tensor]:
    """Return two stacks of matrices whose products are the changes of the parameter, without the factor s.

    Args:
        lora_a: A [E, r, in].
        lora_b: B [E, out, r].
        is_transposed: True if the parameter is [E, in, out] instead of [E, out, in].
    """
    return (lora_a.mT, lora_b.mT) if is_transposed else (lora_b, lora_a)


def to_peft_a(lora_a: Tensor) -> Tensor:
    """Return A [E, r, in] as PEFT's files have it: [E r, in]."""
    return lora_a.flatten(0, 1)


def to_peft_b(lora_b: Tensor) -> Tensor:
    """Return B [E, out, r] as PEFT's files have it: [out, r E], with the experts of a rank next to each other."""
    return lora_b.permute(1, 2, 0).flatten(1)


def _input_projection(experts: Any) -> str:
    return "gate_up_proj" if experts.has_gate else "up_proj"


def _forward(
    experts: Any, compute: Any, scaling: float, hidden: Tensor, routed_experts: Tensor, routing_weights: Tensor
) -> Tensor:
    """Return the weighted sum of the routed experts' outputs [T, D].

    Args:
        experts: The module of the experts.
        compute: The module's own forward pass.
        scaling: The factor s.
        hidden: Hidden states [T, D].
        routed_experts: Expert ids [T, k].
        routing_weights: Weights [T, k].
    """
    if hidden.is_meta:  # a check of shapes and of the flow of tokens, which adapters do not change
        return compute(hidden, routed_experts, routing_weights)  # type: ignore[no-any-return]
    expert_ids, order = routed_experts.flatten().sort(stable=True)
    counts = expert_ids.new_zeros(experts.num_experts).scatter_add_(0, expert_ids, torch.ones_like(expert_ids))
    ends = counts.cumsum(0, dtype=torch.int32)
    states = deterministic_index_select(hidden, order // routed_experts.shape[1])
    states = _project(experts, _input_projection(experts), scaling, states, expert_ids, ends)
    states = experts._apply_gate(states) if experts.has_gate else experts.act_fn(states)
    outputs = _project(experts, "down_proj", scaling, states, expert_ids, ends)
    outputs = outputs * routing_weights.flatten()[order].unsqueeze(1)
    outputs = torch.empty_like(outputs).index_copy(0, order, outputs).unflatten(0, routed_experts.shape)
    return outputs.sum(1).to(hidden.dtype)


def _project(experts: Any, name: str, scaling: float, states: Tensor, expert_ids: Tensor, ends: Tensor) -> Tensor:
    """Return the products of one parameter with states [S, in], which are sorted by expert, as [S, out].

    Args:
        experts: The module of the experts.
        name: Name of the parameter.
        scaling: The factor s.
        states: The states of each expert's tokens [S, in].
        expert_ids: The expert of each state [S].
        ends: Index of the first state after those of each expert [E].
    """
    weight = getattr(experts, name)
    states = states.to(weight.dtype)
    products = _grouped_product(states, weight if experts.is_transposed else weight.mT, ends)
    if experts.has_bias:
        products = products + getattr(experts, f"{name}_bias")[expert_ids]
    lora_a, lora_b = (getattr(experts, matrix, None) for matrix in adapter_names(name))
    if lora_a is None or lora_b is None:
        return products
    missing = -lora_a.shape[1] % _ALIGNMENT
    lora_a, lora_b = pad(lora_a.to(weight.dtype), (0, 0, 0, missing)), pad(lora_b.to(weight.dtype), (0, missing))
    low = _grouped_product(_grouped_product(states, lora_a.mT, ends), lora_b.mT, ends)
    return torch.add(products, low, alpha=scaling)


def _grouped_product(states: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Return the product of each expert's states [S, in] with its matrix of `weights` [E, in, out] as [S, out]."""
    if weights.dtype == torch.float64:  # which the fast kernels do not support
        products: Tensor = torch.ops.transformers.grouped_mm_fallback(states, weights, ends)
        return products
    from transformers.integrations.moe import _grouped_mm  # earlier versions, without these experts, lack it

    return _grouped_mm(states, weights, ends)
