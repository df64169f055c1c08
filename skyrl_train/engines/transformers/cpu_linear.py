"""Linear layers that use oneDNN, for an engine on a CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_FEWEST_PRODUCTS = 1 << 19
"""Rows x inputs x outputs. For smaller products oneDNN's fixed cost per call exceeds what its kernels save."""


class OneDnnLinear(nn.Linear):
    """float32 products with oneDNN, which uses the widest instructions of every CPU.

    The library behind `F.linear` uses them only on one vendor's CPUs; on others this is 2.3 times as fast (AVX-512,
    64-512 rows, width 192-1024). The operator reads the plain weight, so new weights need no repacking. It has no
    gradient.
    """

    def forward(self, input: Tensor) -> Tensor:
        if input.numel() * self.out_features < _FEWEST_PRODUCTS:
            return F.linear(input, self.weight, self.bias)
        linear: Any = torch.ops.mkldnn._linear_pointwise
        return linear(input, self.weight, self.bias, "none", [], "")  # type: ignore[no-any-return]


def use_onednn(model: nn.Module) -> None:
    """Make the float32 linear layers of a model on the CPU OneDnnLinear, in place; parameters and names stay."""
    if not torch.backends.mkldnn.is_available():
        return
    for module in model.modules():
        if type(module) is nn.Linear and module.weight.dtype == torch.float32 and module.weight.device.type == "cpu":
            module.__class__ = OneDnnLinear
