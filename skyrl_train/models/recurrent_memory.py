"""The memory of layers with a recurrent state, measured on the meta device, where tensors have shapes but no values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from skyrl_train.models.ragged_attention import PackedSequences
from skyrl_train.models.recurrent_kernels import KERNELS, replaced_kernels
from skyrl_train.models.recurrent_layers import RecurrentMixer, packed_row

_NUM_TOKENS = 256
"""Tokens of the measured forward pass: several chunks of a scan."""


def measure_saved_bytes(mixer: RecurrentMixer, hidden_size: int, dtype: torch.dtype, *, has_kernels: bool) -> int:
    """Return the bytes per token that a mixer saves for backward, without its parameters.

    Args:
        mixer: A mixer on the meta device.
        hidden_size: Size of its input.
        dtype: Dtype of the computation.
        has_kernels: True for the kernels of fla-core, False for PyTorch's functions.
    """
    module: nn.Module = mixer.module
    own_dtype = next(module.parameters()).dtype
    module.to(dtype)
    parameters = {parameter.untyped_storage()._cdata for parameter in module.parameters()}
    saved: dict[int, Any] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in parameters:
            saved[storage._cdata] = storage
        return tensor

    hidden = torch.empty(1, _NUM_TOKENS, hidden_size, dtype=dtype, device="meta", requires_grad=True)
    sequences = PackedSequences.from_lengths([_NUM_TOKENS], hidden.device)
    kernels = dict.fromkeys(KERNELS, _imitate_kernel) if has_kernels else {}
    with replaced_kernels(kernels), packed_row(sequences), saved_tensors_hooks(keep, lambda tensor: tensor):
        mixer.run_unpacked(hidden)
    module.to(own_dtype)
    return sum(storage.nbytes() for storage in saved.values()) // _NUM_TOKENS


def _imitate_kernel(*args: Any, **kwargs: Any) -> Any:
    """Save what a kernel of fla-core saves: its arguments, and two matrices of each chunk of 64 tokens for each head.

    Scans get queries (Mamba2: inputs), and after them the values of each head or the time steps.
    """
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    if args[0].ndim == 3:  # a convolution of [1, channels, T]
        return _SavedTensors.apply(args[0], *tensors)
    is_mamba2 = args[1].ndim == 3
    values = args[0] if is_mamba2 else args[2]
    chunk_matrices = values.new_empty(*values.shape[:3], 2 * 64)
    output = _SavedTensors.apply(values, *tensors, chunk_matrices)
    return output if is_mamba2 else (output, None)


class _SavedTensors(torch.autograd.Function):
    """A function that saves its arguments and returns a tensor like the first of them."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return torch.empty_like(tensors[0])
