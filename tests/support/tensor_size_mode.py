from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LargestTensor(TorchDispatchMode):
    """A mode that records the number of elements of the largest tensor created inside."""

    max_elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        tensors = [one for one in tree_leaves(made) if isinstance(one, torch.Tensor)]
        self.max_elements = max([self.max_elements, *(one.numel() for one in tensors)])
        return made
