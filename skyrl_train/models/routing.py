"""The routers of a mixture of experts: they compute in float32, count what they choose, and can be made to choose.

Legend: U tokens that go through the model, L layers with experts, k experts for each token, E experts of a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.utils.output_capturing import OutputRecorder


class Routers:
    """The routers of one model, in the order of its layers; without experts there are none.

    Every forward counts and remembers. A backward pass that computes a layer again (gradient checkpointing) does
    neither, and gets the same choice.
    """

    def __init__(self, model: PreTrainedModel):
        self.modules: list[Any] = list(_routers(model))
        self.counts: Tensor | None = None
        """[L, E] how many tokens chose each expert, since `start_counting`."""
        self.keeps_choices = False
        self._chosen: list[Tensor] | None = None
        self._given: Tensor | None = None
        self._running = False
        for layer, router in enumerate(self.modules):
            router.forward = self._routed(layer, router.forward)

    @property
    def num_experts(self) -> int:
        """E; 0 without experts."""
        return int(self.modules[0].num_experts) if self.modules else 0

    @property
    def shape(self) -> tuple[int, int]:
        """(L, k)"""
        return len(self.modules), int(self.modules[0].top_k) if self.modules else 0

    def start_counting(self, device: torch.device) -> None:
        """Forget what was counted."""
        if self.modules:
            self.counts = torch.zeros(len(self.modules), self.num_experts, dtype=torch.int64, device=device)

    @contextmanager
    def running(self, given: Tensor | None = None) -> Iterator[None]:
        """Within it the model runs forward.

        given: int [U, L, k], the experts to choose, also in the backward pass that follows; where they are negative,
        and without them, routers choose.
        """
        self._given, self._running = given, True
        self._chosen = [] if self.keeps_choices else None
        try:
            yield
        finally:
            self._running = False

    def choices(self) -> Tensor:
        """[U, L, k] int16, of the last forward, with `keeps_choices`."""
        assert self._chosen is not None and len(self._chosen) == len(self.modules)
        return torch.stack([chosen.to(torch.int16) for chosen in self._chosen], 1)

    def _routed(self, layer: int, compute: Callable[..., Any]) -> Callable[..., Any]:
        @torch.compiler.disable
        def forward(*args: Any, **kwargs: Any) -> Any:
            router = self.modules[layer]
            given = None if self._given is None else self._given[:, layer]
            with _Routing(router, given):
                output = compute(*args, **kwargs)  # logits [U, E], weights and indices of the chosen experts [U, k]
            if self._running:
                if self._chosen is not None:
                    self._chosen.append(output[2])
                if self.counts is not None:
                    self.counts[layer] += torch.bincount(output[2].flatten(), minlength=router.num_experts)
            return output

        return forward


def load_metrics(counts: Tensor) -> Mapping[str, float]:
    """How evenly the tokens of an update were spread over experts; counts [L, E] of all ranks.

    router_load_max: of the expert that got most, in times the mean of its layer's; the mean over layers. 1 is even, E/k
    is always the same experts. router_unused: the share of experts that got no token.
    """
    shares = counts.double() / counts.double().mean(1, keepdim=True).clamp(min=1e-9)
    return {"router_load_max": float(shares.amax(1).mean()), "router_unused": float((counts == 0).double().mean())}


class _Routing(TorchFunctionMode):
    """Within it one router computes its logits in float32, and takes given experts for the best ones.

    The router's own code makes weights of its choice, whatever the model: softmax before or after, sigmoids, groups.
    """

    def __init__(self, router: Any, given: Tensor | None):
        super().__init__()
        self._best = router.num_experts, router.top_k
        self._given = given

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        if function is linear:
            return function(*(x.float() if x is not None and x.dtype.itemsize < 4 else x for x in args), **options)
        if function in (torch.topk, Tensor.topk) and self._given is not None:
            return self._topk(function, *args, **options)
        return function(*args, **options)

    def _topk(self, function: Any, scores: Tensor, k: int, *args: Any, **options: Any) -> Any:
        own = function(scores, k, *args, **options)
        if scores.ndim != 2 or (scores.shape[1], k) != self._best:  # of groups of experts
            return own
        assert self._given is not None
        indices = torch.where(self._given < 0, own.indices, self._given.to(own.indices.dtype))
        return torch.return_types.topk((scores.gather(1, indices), indices))


def _routers(model: PreTrainedModel) -> Iterator[nn.Module]:
    recorders = getattr(model.base_model, "_can_record_outputs", None) or {}
    recorder = recorders.get("router_logits")
    if isinstance(recorder, OutputRecorder):
        for module in model.modules():
            if (
                isinstance(module, recorder.target_class)
                and hasattr(module, "top_k")
                and hasattr(module, "num_experts")
            ):
                yield module
