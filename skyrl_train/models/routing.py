"""Routers of a mixture of experts: they compute in float32, count and record their choices, and can replay others.

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
    """The inputs of the router auxiliary loss that come from the batch, of T tokens in B sequences."""

    token_indices: Tensor
    """[T]: the index of each token among those that go through the model, which may share prompts."""
    sequence_ids: Tensor
    """[T]: the sequence of each token."""
    weights: Tensor
    """[B]: the weight of each sequence's loss."""


class Routers:
    """The routers of one model, in the order of its layers; empty for a model without experts.

    Every forward pass counts and records the routed experts. A backward pass that recomputes a layer (gradient
    checkpointing) does neither, and replays the same experts. A forward pass raises ConfigError if it must record or
    replay experts or compute a loss, and the code of a router is not supported.
    """

    def __init__(self, model: PreTrainedModel):
        routers = list(_routers(model))
        self.modules: list[Any] = [router for _, router in routers]
        self._layers = [layer for layer, _ in routers]
        self.record_routed_experts = False
        self.loss_inputs: RouterLossInputs | None = None
        """If set, an auxiliary loss is added to the gradient of every backward pass."""
        self._routed_experts: list[Tensor] | None = None
        self._replayed_experts: Tensor | None = None
        self._running = False
        self._counts: dict[int, Tensor] | None = None
        """Layer -> [E], the number of tokens routed to each expert; None while metrics are off."""
        self._aux_loss: Tensor | None = None
        for layer, router in enumerate(self.modules):
            router.forward = self._routed(layer, router, router.forward)

    def check_routers_supported(
        self, model: PreTrainedModel, moe_routing_replay: str | None, router_aux_loss_coef: float
    ) -> None:
        """Raise ConfigError if a setting needs routers and the model has none that are supported.

        Args:
            model: The model, for its class name in the message.
            moe_routing_replay: The value of trainer.moe_routing_replay; None is off.
            router_aux_loss_coef: The value of trainer.algorithm.router_aux_loss_coef; 0 is off.
        """
        if (moe_routing_replay or router_aux_loss_coef) and not self.modules:
            key = "trainer.moe_routing_replay" if moe_routing_replay else "trainer.algorithm.router_aux_loss_coef"
            value = moe_routing_replay or router_aux_loss_coef
            raise ConfigError(
                f"{key}={value!r}: {type(model).__name__} has no routers whose code is supported. Set it to "
                f"{'null' if moe_routing_replay else '0'}, or use another model."
            )

    @property
    def num_layers_and_top_k(self) -> tuple[int, int]:
        """The number of layers with experts, L, and of experts for each token, k; k is 0 without experts."""
        return len(self.modules), int(self.modules[0].top_k) if self.modules else 0

    def select_layers(self, experts: Tensor) -> Tensor:
        """Return expert ids [T, L, k] of the layers with experts, from ids that may also have other layers."""
        return experts if experts.shape[1] == len(self.modules) else experts[:, self._layers]

    @contextmanager
    def forward_pass(self, replayed_experts: Tensor | None = None) -> Iterator[None]:
        """Run the model's forward pass inside this context.

        Args:
            replayed_experts: Expert ids [tokens, layers, k] to use instead of the router's choices, also in the
                backward pass that follows. Where they are negative, or if they are None, the routers choose.
        """
        self._replayed_experts, self._running = replayed_experts, True
        self._routed_experts = [] if self.record_routed_experts else None
        try:
            yield
        finally:
            self._running = False

    def routed_experts(self) -> Tensor:
        """Return the experts of the last forward pass [tokens, layers, k] int16. Requires `record_routed_experts`."""
        assert self._routed_experts is not None and len(self._routed_experts) == len(self.modules)
        return torch.stack([indices.to(torch.int16) for indices in self._routed_experts], 1)

    def reset_load_metrics(self) -> None:
        """Start to count routed tokens and to sum auxiliary losses, from 0."""
        self._counts, self._aux_loss = {}, None

    def collect_load_metrics(self, sum_over_ranks: Callable[[Tensor], Tensor]) -> dict[str, float]:
        """Return the load metrics collected since `reset_load_metrics`, and stop collecting.

        This is a collective: every rank must call it.

        Args:
            sum_over_ranks: Sums a tensor over all ranks.

        Returns:
            {} if nothing was collected, else:
            router_load_max: Tokens of the busiest expert divided by its layer's mean, averaged over layers. 1 is an
                even load. If all tokens choose the same experts, it is the number of experts divided by the number of
                experts per token.
            unused_expert_fraction: Fraction of the experts of all layers that received no token.
            router_aux_loss: Auxiliary loss, if one is configured.
        """
        counts, loss = self._counts or {}, self._aux_loss
        self._counts = self._aux_loss = None
        if not counts:
            return {}
        sizes = [len(counts[layer]) for layer in sorted(counts)]
        counts_of_layers = sum_over_ranks(torch.cat([counts[layer] for layer in sorted(counts)])).double().split(sizes)
        max_loads = torch.stack([layer.max() / layer.mean().clamp(min=1e-9) for layer in counts_of_layers]).tolist()
        unused = torch.stack([(layer == 0).sum() for layer in counts_of_layers]).tolist()
        unused_expert_fraction = sum(unused) / sum(sizes)
        max_load = sum(max_loads) / len(max_loads)
        load_metrics = {"router_load_max": max_load, "unused_expert_fraction": unused_expert_fraction}
        return load_metrics if loss is None else load_metrics | {"router_aux_loss": float(sum_over_ranks(loss))}

    def _routed(self, layer: int, router: Any, compute: Callable[..., Any]) -> Callable[..., Any]:
        @torch.compiler.disable
        def forward(*args: Any, **kwargs: Any) -> Any:
            replayed = None if self._replayed_experts is None else self._replayed_experts[:, layer]
            with _Routing(router, replayed) as routing:
                output = compute(*args, **kwargs)
            routed = _by_logits(output)
            if routed is None or not _is_supported(router, routed[2], routing):
                if replayed is not None or self._routed_experts is not None or self.loss_inputs is not None:
                    raise ConfigError(
                        f"{type(router).__name__} chooses experts in a way that is not supported. Set "
                        "trainer.moe_routing_replay to null and trainer.algorithm.router_aux_loss_coef to 0."
                    )
                return output
            logits, weights, indices = routed
            if self.loss_inputs is not None:
                weights = self._with_loss(routing.affinities(logits), weights, indices, self.loss_inputs)
            if self._running:
                self._record(layer, logits.shape[-1], indices)
            if routing.widened:  # the experts' matrix products keep the dtype that they have without a float32 router
                weights = weights.to(args[0].dtype)
            return (logits, weights, indices) if output[0] is logits else (indices, weights, logits)

        return forward

    def _record(self, layer: int, experts: int, indices: Tensor) -> None:
        if self._routed_experts is not None:
            self._routed_experts.append(indices)
        if self._counts is not None:
            if layer not in self._counts:
                self._counts[layer] = torch.zeros(experts, dtype=torch.int64, device=indices.device)
            flat_indices = indices.flatten().long()
            self._counts[layer].scatter_add_(0, flat_indices, torch.ones_like(flat_indices))

    def _with_loss(self, affinity: Tensor, weights: Tensor, indices: Tensor, loss_inputs: RouterLossInputs) -> Tensor:
        loss = router_aux_loss(affinity, indices, loss_inputs) / len(self.modules)
        if self._running and self._counts is not None:
            self._aux_loss = loss.detach() + (0.0 if self._aux_loss is None else self._aux_loss)
        weights_with_loss: Tensor = _WithLoss.apply(weights, loss)
        return weights_with_loss


def router_aux_loss(affinity: Tensor, indices: Tensor, loss_inputs: RouterLossInputs) -> Tensor:
    """Return the router auxiliary loss of one layer, a scalar.

        loss = sum_s w_s sum_i f_si P_si

    w is the weight of sequence s. f is the fraction of the sequence's choices that fell on expert i, times the number
    of experts. P is the sequence's mean affinity to expert i. The inner sum is 1 for a sequence that is spread evenly.
    This is DeepSeek-V3's sequence-wise loss (arXiv:2412.19437, eq. 17), which does not depend on micro-batches.

    Args:
        affinity: Affinities [tokens, experts] of the tokens that go through the model to the experts, with gradient.
            Each row sums to 1.
        indices: Experts [tokens, experts per token] that the router chose.
        loss_inputs: Sequence of each token, and the weights of the sequences, which include the coefficient.
    """
    count, experts = len(loss_inputs.weights), affinity.shape[1]
    is_routed = torch.zeros_like(affinity).scatter_(1, indices, 1.0)
    counts, sums = (
        affinity.new_zeros(count, experts).index_add(
            0, loss_inputs.sequence_ids, deterministic_index_select(per_token, loss_inputs.token_indices)
        )
        for per_token in (is_routed, affinity)
    )
    num_choices = counts.sum(1, keepdim=True).clamp(min=1)
    fractions, means = counts * experts / num_choices, sums * indices.shape[1] / num_choices
    return ((fractions * means).sum(1) * loss_inputs.weights).sum()


class _WithLoss(torch.autograd.Function):
    """An identity function that adds the gradient of a loss.

    It returns its first argument. The second is a loss, whose gradient starts when the gradient of the first passes. A
    layer that is sharded or recomputed has its weights at that time.
    """

    @staticmethod
    def forward(ctx: Any, values: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(loss)
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        (loss,) = ctx.saved_tensors
        return gradient, torch.ones_like(loss)


class _Routing(TorchFunctionMode):
    """A mode in which one router computes its logits in float32 and takes the replayed experts for the best ones.

    The router's own code computes the weights from the choice, so this works for any model: softmax before or after the
    choice, sigmoids, groups.
    """

    def __init__(self, router: Any, replayed_experts: Tensor | None):
        super().__init__()
        self._topk_of_experts = router.num_experts, router.top_k
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
        """Return affinities [U, E] that sum to 1 over experts: softmax, or normalized sigmoids if the router uses
        sigmoids.
        """
        if not self._sigmoid:
            return logits.softmax(-1)
        scores = logits.sigmoid()
        return scores / scores.sum(-1, keepdim=True)

    def _topk(self, function: Any, scores: Tensor, k: int, *args: Any, **options: Any) -> Any:
        best = function(scores, k, *args, **options)
        if scores.ndim != 2 or (scores.shape[1], k) != self._topk_of_experts:  # a top-k of groups of experts
            return best
        assert self._replayed_experts is not None
        self.replaced = True
        indices = torch.where(self._replayed_experts < 0, best.indices, self._replayed_experts.to(best.indices.dtype))
        return torch.return_types.topk((scores.gather(1, indices), indices))


def _by_logits(output: Any) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return a router's output as (logits [U, E], weights [U, k], indices [U, k]); None if it is something else.

    Granite's and Aria's routers return the indices first.
    """
    if not isinstance(output, tuple) or len(output) != 3:
        return None
    logits, weights, indices = output if output[0].is_floating_point() else output[::-1]
    return logits, weights, indices


def _is_supported(router: Any, indices: Tensor, routing: _Routing) -> bool:
    """True if a router returned indices [U, k] and used the replayed experts, if any.

    DeepSeek-V2's group-limited router is excluded: it sets the scores outside of its own groups to 0 before it computes
    the weights.
    """
    if getattr(router, "topk_method", None) == "group_limited_greedy":
        return False
    if indices.is_floating_point() or indices.ndim != 2 or indices.shape[1] != router.top_k:
        return False
    return routing.replaced or routing._replayed_experts is None


def _routers(model: PreTrainedModel) -> Iterator[tuple[int, nn.Module]]:
    """Yield (number of the layer, its router), for models whose router logits transformers can record."""
    recorders = getattr(model.base_model, "_can_record_outputs", None) or {}
    recorder = recorders.get("router_logits")
    if not isinstance(recorder, OutputRecorder) or recorder.index not in (0, 2):  # see `_by_logits`
        return
    for path, module in model.named_modules():
        is_router = isinstance(module, recorder.target_class)
        if is_router and isinstance(getattr(module, "top_k", None), int) and hasattr(module, "num_experts"):
            yield next(int(component) for component in path.split(".") if component.isdigit()), module
