"""Linear layers of an engine on a CPU through oneDNN."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_FEWEST_PRODUCTS = 1 << 19
"""Rows x inputs x outputs. Below this oneDNN's fixed cost per call is more than its kernels save."""


class OneDnnLinear(nn.Linear):
    """float32 products through oneDNN, which uses the widest instructions of every CPU.

    The library behind `F.linear` does so on one vendor's CPUs only: elsewhere this is 2.3 times as fast (AVX-512,
    64-512 rows, width 192-1024). The operator reads the plain weight, so new weights need no repacking. It has no
    gradient.
    """

    def forward(self, input: Tensor) -> Tensor:
        if input.numel() * self.out_features < _FEWEST_PRODUCTS:
            return F.linear(input, self.weight, self.bias)
        linear: Any = torch.ops.mkldnn._linear_pointwise
        return linear(input, self.weight, self.bias, "none", [], "")  # type: ignore[no-any-return]


def use_onednn(model: nn.Module) -> None:
    """Switch the float32 linear layers of a model on the CPU, in place; parameters and their names stay."""
    if not torch.backends.mkldnn.is_available():
        return
    for module in model.modules():
        if type(module) is nn.Linear and module.weight.dtype == torch.float32 and module.weight.device.type == "cpu":
            module.__class__ = OneDnnLinear
