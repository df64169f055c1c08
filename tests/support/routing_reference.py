"""The auxiliary loss of routers by its definition: sequence by sequence, through the unmodified model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from skyrl_train.data.batch import TrainBatch
from skyrl_train.models.routing import Routers


def explicit_router_aux_loss(model: Any, batch: TrainBatch, coef: float) -> Tensor:
    """DeepSeek-V3, arXiv:2412.19437, equation 17; the mean over layers, and over sequences by their scored tokens."""
    seen: list[tuple[Any, Tensor, Tensor]] = []

    def keep(router: Any, _args: Any, output: Any) -> None:
        indices_first = "Granite" in type(router).__name__
        seen.append((router, *(output[2::-2] if indices_first else output[::2])))

    hooks = [router.register_forward_hook(keep) for router in Routers(model).modules]
    total = torch.zeros((), dtype=torch.float64)
    for row in range(len(batch)):
        start, stop = batch.offsets[row : row + 2].tolist()
        seen.clear()
        model(input_ids=batch.input_ids[None, start:stop], use_cache=False)
        weight = coef * int(batch.loss_mask[start:stop].sum()) / int(batch.loss_mask.sum()) / len(seen)
        for router, logits, chosen in seen:
            scores = logits.sigmoid() if "Deepseek" in type(router).__name__ else logits.softmax(-1)
            means = (scores / scores.sum(-1, keepdim=True)).mean(0)
            counts = torch.bincount(chosen.flatten(), minlength=len(means)).double()
            total = total + weight * (counts * len(means) / chosen.numel() * means).sum()
    for hook in hooks:
        hook.remove()
    return total
