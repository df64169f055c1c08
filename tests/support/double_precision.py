"""A context that stops Hugging Face models from downcasting norms and softmax of float64 models to float32."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


@contextmanager
def double_precision() -> Iterator[None]:
    """Keep a float64 tensor in float64 where a model asks for float32, so that comparisons can be tight.

    This replaces methods of Tensor instead of using a torch-function mode, because modes are off during backward, where
    checkpointed layers run again.
    """
    places: tuple[tuple[Any, str], ...] = (
        (Tensor, "float"),
        (Tensor, "to"),
        (Tensor, "type"),
        (nn.functional, "softmax"),
    )
    originals = [getattr(owner, name) for owner, name in places]
    for (owner, name), original in zip(places, originals, strict=True):
        setattr(owner, name, _widened(original))
    try:
        yield
    finally:
        for (owner, name), original in zip(places, originals, strict=True):
            setattr(owner, name, original)


def _widened(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def call(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if tensor.dtype == torch.float64:
            if original.__name__ == "float":
                return tensor
            args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
            if kwargs.get("dtype") is torch.float32:
                kwargs["dtype"] = torch.float64
        return original(tensor, *args, **kwargs)

    return call
