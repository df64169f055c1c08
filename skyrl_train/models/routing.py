"""The routers of a mixture of experts: they compute in float32, count what they choose, and can be made to choose.

Legend: U tokens that go through the model, L layers with experts, k experts for each token, E experts of a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.utils.output_capturing import OutputRecorder

from skyrl_train.errors import ConfigError
from skyrl_train.models.ragged_attention import deterministic_index_select

_TOPK, _SIGMOID = (torch.topk, Tensor.topk), (torch.sigmoid, Tensor.sigmoid)


@dataclass(frozen=True)
class RouterLossInputs:
    """What an auxiliary loss needs to know of a batch: T tokens, of B sequences."""

    token_indices: Tensor
    """[T] the place of each token among those that go through the model: a prompt may be shared."""
    sequence_ids: Tensor
    """[T]"""
    weights: Tensor
    """[B] of each sequence's loss."""


class Routers:
    """The routers of one model, in the order of its layers; without experts there are none.

    Every forward counts and remembers. A backward pass that computes a layer again (gradient checkpointing) does
    neither, and gets the same choice. Raises ConfigError in a forward that asks more than that of a router whose code
    is not known here.
    """

    def __init__(self, model: PreTrainedModel):
        found = list(_routers(model))
        self.modules: list[Any] = [router for _, router in found]
        self._layers = [layer for layer, _ in found]
        self.record_routed_experts = False
        self.loss_inputs: RouterLossInputs | None = None
        """If set, an auxiliary loss joins the gradient of every backward pass."""
        self._routed_experts: list[Tensor] | None = None
        self._replayed_experts: Tensor | None = None
        self._running = False
        self._counts: dict[int, Tensor] | None = None
        """Layer -> [E], how many tokens chose each expert."""
        self._aux_loss: Tensor | None = None
        for layer, router in enumerate(self.modules):
            router.forward = self._routed(layer, router, router.forward)

    def check_routers_supported(
        self, model: PreTrainedModel, moe_routing_replay: str | None, router_aux_loss_coef: float
    ) -> None:
        """Raise ConfigError naming the key that needs routers, if `model` has none that are known here."""
        if (moe_routing_replay or router_aux_loss_coef) and not self.modules:
            key = "trainer.moe_routing_replay" if moe_routing_replay else "trainer.algorithm.router_aux_loss_coef"
            raise ConfigError(f"{key}: {type(model).__name__} has no routers that are known here.")

    @property
    def num_layers_and_top_k(self) -> tuple[int, int]:
        """(L, k)"""
        return len(self.modules), int(self.modules[0].top_k) if self.modules else 0

    @contextmanager
    def forward_pass(self, replayed_experts: Tensor | None = None) -> Iterator[None]:
        """Within it the model runs forward.

        given: int [U, L, k], the experts to choose, also in the backward pass that follows; where they are negative,
        and without them, routers choose. It may have rows for layers without experts, too.
        """
        if replayed_experts is not None and replayed_experts.shape[1] != len(self.modules):
            replayed_experts = replayed_experts[:, self._layers]
        self._replayed_experts, self._running = replayed_experts, True
        self._routed_experts = [] if self.record_routed_experts else None
        try:
            yield
        finally:
            self._running = False

    def routed_experts(self) -> Tensor:
        """[U, L, k] int16, of the last forward, with `keeps_choices`."""
        assert self._routed_experts is not None and len(self._routed_experts) == len(self.modules)
        return torch.stack([chosen.to(torch.int16) for chosen in self._routed_experts], 1)

    def reset_load_metrics(self) -> None:
        """Count what forwards choose from now on, and sum their auxiliary losses."""
        self._counts, self._aux_loss = {}, None

    def collect_load_metrics(self, sum_over_ranks: Callable[[Tensor], Tensor]) -> dict[str, float]:
        """How tokens were spread over experts since `start_counting`, which ends here; all ranks call it.

        router_load_max: tokens of the expert that got most, over the mean of its layer's; the mean over layers. 1 is
        even, E/k is always the same experts. unused_expert_fraction: the fraction of experts that received no token.
        router_aux_loss: the auxiliary loss, if there is one.
        """
        counts, loss = self._counts or {}, self._aux_loss
        self._counts = self._aux_loss = None
        if not counts:
            return {}
        sizes = [len(counts[layer]) for layer in sorted(counts)]
        of_layers = sum_over_ranks(torch.cat([counts[layer] for layer in sorted(counts)])).double().split(sizes)
        most = [float(of_layer.max() / of_layer.mean().clamp(min=1e-9)) for of_layer in of_layers]
        unused = [int((of_layer == 0).sum()) for of_layer in of_layers]
        found = {"router_load_max": sum(most) / len(most), "unused_expert_fraction": sum(unused) / sum(sizes)}
        return found if loss is None else found | {"router_aux_loss": float(sum_over_ranks(loss))}

    def _routed(self, layer: int, router: Any, compute: Callable[..., Any]) -> Callable[..., Any]:
        @torch.compiler.disable
        def forward(*args: Any, **kwargs: Any) -> Any:
            given = None if self._replayed_experts is None else self._replayed_experts[:, layer]
            with _Routing(router, given) as seen:
                output = compute(*args, **kwargs)
            if not _is_known(router, output, seen):
                if given is not None or self._routed_experts is not None or self.loss_inputs is not None:
                    raise ConfigError(
                        f"{type(router).__name__} chooses experts in a way that is not known here: set "
                        "trainer.moe_routing_replay to null and trainer.algorithm.router_aux_loss_coef to 0."
                    )
                return output
            logits, weights, indices = output
            if self.loss_inputs is not None:
                weights = self._with_loss(seen.affinities(logits), weights, indices, self.loss_inputs)
            if self._running:
                self._record(layer, logits.shape[-1], indices)
            # The products of experts stay in the dtype that they would have without this.
            return logits, weights.to(args[0].dtype) if seen.widened else weights, indices

        return forward

    def _record(self, layer: int, experts: int, indices: Tensor) -> None:
        if self._routed_experts is not None:
            self._routed_experts.append(indices)
        if self._counts is not None:
            if layer not in self._counts:
                self._counts[layer] = torch.zeros(experts, dtype=torch.int64, device=indices.device)
            chosen = indices.flatten().long()
            self._counts[layer].scatter_add_(0, chosen, torch.ones_like(chosen))

    def _with_loss(self, affinity: Tensor, weights: Tensor, indices: Tensor, loss_inputs: RouterLossInputs) -> Tensor:
        loss = router_aux_loss(affinity, indices, loss_inputs) / len(self.modules)
        if self._running and self._counts is not None:
            self._aux_loss = loss.detach() + (0.0 if self._aux_loss is None else self._aux_loss)
        joined: Tensor = _WithLoss.apply(weights, loss)
        return joined


def router_aux_loss(affinity: Tensor, indices: Tensor, loss_inputs: RouterLossInputs) -> Tensor:
    """sum_s w_s sum_i f_si P_si: w is a sequence's weight, f the share of its choices that fell on expert i, over the
    even share, P its mean affinity to i. 1 for a sequence that is spread evenly.

    DeepSeek-V3, arXiv:2412.19437, equation 17. By sequence, so it does not depend on micro-batches. affinity [U, E],
    indices [U, k].
    """
    count, experts = len(loss_inputs.weights), affinity.shape[1]
    chosen = torch.zeros_like(affinity).scatter_(1, indices, 1.0)
    counts, sums = (
        affinity.new_zeros(count, experts).index_add(
            0, loss_inputs.sequence_ids, deterministic_index_select(of_token, loss_inputs.token_indices)
        )
        for of_token in (chosen, affinity)
    )
    choices = counts.sum(1, keepdim=True).clamp(min=1)
    shares, means = counts * experts / choices, sums * indices.shape[1] / choices
    return ((shares * means).sum(1) * loss_inputs.weights).sum()


class _WithLoss(torch.autograd.Function):
    """Its first argument. The second is a loss, whose gradient begins where that of the first passes by: a layer that
    is sharded, or computed again, has its weights there."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(loss)
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        (loss,) = ctx.saved_tensors
        return gradient, torch.ones_like(loss)


class _Routing(TorchFunctionMode):
    """Within it one router computes its logits in float32, and takes given experts for the best ones.

    The router's own code makes weights of its choice, whatever the model: softmax before or after, sigmoids, groups.
    """

    def __init__(self, router: Any, replayed_experts: Tensor | None):
        super().__init__()
        self._best = router.num_experts, router.top_k
        self._replayed_experts = replayed_experts
        self.widened = self.replaced = self._sigmoid = False

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        if function is linear:
            self.widened = any(x is not None and x.dtype.itemsize < 4 for x in args)
            return function(*(x.float() if x is not None and x.dtype.itemsize < 4 else x for x in args), **options)
        if function in _TOPK and self._replayed_experts is not None:
            return self._topk(function, *args, **options)
        self._sigmoid |= function in _SIGMOID
        return function(*args, **options)

    def affinities(self, logits: Tensor) -> Tensor:
        """[U, E] that sum to 1 over experts: softmax, or what sigmoids are of their sum, if the router takes these."""
        if not self._sigmoid:
            return logits.softmax(-1)
        scores = logits.sigmoid()
        return scores / scores.sum(-1, keepdim=True)

    def _topk(self, function: Any, scores: Tensor, k: int, *args: Any, **options: Any) -> Any:
        own = function(scores, k, *args, **options)
        if scores.ndim != 2 or (scores.shape[1], k) != self._best:  # of groups of experts
            return own
        assert self._replayed_experts is not None
        self.replaced = True
        indices = torch.where(self._replayed_experts < 0, own.indices, self._replayed_experts.to(own.indices.dtype))
        return torch.return_types.topk((scores.gather(1, indices), indices))


def _is_known(router: Any, output: Any, seen: _Routing) -> bool:
    """Whether a router's output is (logits [U, E], weights [U, k], indices [U, k]), and what was given was chosen.

    DeepSeek-V2's takes weights of scores that are 0 outside of the groups that it would choose itself.
    """
    limited = getattr(router, "topk_method", None) == "group_limited_greedy"
    if limited or not isinstance(output, tuple) or len(output) != 3:
        return False
    indices = output[2]
    if indices.is_floating_point() or indices.ndim != 2 or indices.shape[1] != router.top_k:
        return False
    return seen.replaced or seen._replayed_experts is None


def _routers(model: PreTrainedModel) -> Iterator[tuple[int, nn.Module]]:
    """(number of the layer, its router), of a model whose routers transformers records by their logits."""
    recorders = getattr(model.base_model, "_can_record_outputs", None) or {}
    recorder = recorders.get("router_logits")
    if not isinstance(recorder, OutputRecorder) or recorder.index != 0:
        return
    for path, module in model.named_modules():
        known = isinstance(module, recorder.target_class)
        if known and isinstance(getattr(module, "top_k", None), int) and hasattr(module, "num_experts"):
            yield next(int(part) for part in path.split(".") if part.isdigit()), module
