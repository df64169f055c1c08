"""The states of recurrent layers in the transformers engine: gated delta nets, Mamba2, short convolutions.

The state of a sequence does not grow with its length. Transformers' modules read and update the states of all rows of
a batch in a cache, stacked along the first dimension. A prompt's states are copied for each of its samples.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedConfig

from skyrl_train.models.recurrent_layers import RecurrentMixer

_STATES = ("conv_states", "recurrent_states")
"""Attributes of the layers of a cache with a dict of tensors [N, ...]; entries that a layer does not use are None."""

Mix = Callable[[Tensor, Cache | None, slice], Tensor]
"""Runs a recurrent layer on N sequences of t tokens.

The arguments are the hidden states [N, t, H], the states (None for empty states that are not kept), and the slice of
these tokens among all tokens of the forward pass. The result is the output [N, t, H].
"""


class RecurrentPlan(Protocol):
    """A strategy that runs the recurrent layers of one forward pass."""

    def mix(self, mix: Mix, hidden_states: Tensor) -> Tensor:
        """Run one layer on the hidden states of all tokens with `mix`, and return its output in the same shape."""


class StateRow(NamedTuple):
    """The states of one sequence."""

    states: RecurrentStates
    row: int


class RecurrentStates:
    """The states of all recurrent layers of N sequences, stacked along the first dimension."""

    def __init__(self, cache: Cache, count: int):
        """Wrap the cache that holds the states of `count` sequences."""
        self.cache: Any = cache
        self.count = count

    @classmethod
    def empty(cls, config: PreTrainedConfig, count: int) -> RecurrentStates:
        """Return states without tensors, which the layers of a model create in their first forward pass."""
        return cls(DynamicCache(config=config), count)


def gather_states(rows: Sequence[StateRow], freed: RecurrentStates | None = None) -> RecurrentStates:
    """Return a copy of the states of some sequences, stacked in the order of `rows`.

    Args:
        rows: The sequences.
        freed: States whose memory is freed, layer by layer, once they have been copied.
    """
    by_source: dict[int, tuple[RecurrentStates, list[int], list[int]]] = {}
    for target, (states, row) in enumerate(rows):
        _, sources, targets = by_source.setdefault(id(states), (states, [], []))
        sources.append(row)
        targets.append(target)
    parts = list(by_source.values())

    def gather(layers: Sequence[Any], name: str, index: int) -> Tensor | None:
        tensors = [getattr(layer, name)[index] for layer in layers]
        if tensors[0] is None:
            return None
        gathered: Tensor = tensors[0].new_empty(len(rows), *tensors[0].shape[1:])
        for tensor, (_, sources, targets) in zip(tensors, parts, strict=True):
            source, target = (torch.tensor(indices, device=tensor.device) for indices in (sources, targets))
            gathered.index_copy_(0, target, tensor.index_select(0, source))
        return gathered

    cache = copy.copy(parts[0][0].cache)
    cache.layers = []
    for layers in zip(*(states.cache.layers for states, _, _ in parts), strict=True):
        layer = copy.copy(layers[0])
        for name in _STATES:
            if hasattr(layer, name):
                setattr(layer, name, {index: gather(layers, name, index) for index in getattr(layer, name)})
        cache.layers.append(layer)
        for source, (states, _, _) in zip(layers, parts, strict=True):
            for name in _STATES if states is freed else ():
                getattr(source, name, {}).clear()
    return RecurrentStates(cache, len(rows))


def run_with_plan(mixer: RecurrentMixer, on_tokens: Callable[[slice], AbstractContextManager[None]]) -> None:
    """Replace the forward of a mixer's module, in place, by one in which the plan of the forward pass runs the mixer.

    Args:
        mixer: A mixer of a model. The model passes the plan to it as cache.
        on_tokens: Returns a context in which the mixer runs on a slice of the forward pass's tokens.
    """

    def mix(hidden_states: Tensor, cache: Cache | None, tokens: slice) -> Tensor:
        with on_tokens(tokens):
            return mixer.run_unpacked(hidden_states, cache)

    def forward(hidden_states: Tensor, **others: Any) -> Tensor:
        plan: RecurrentPlan = others[mixer.kind.cache_parameter]
        return plan.mix(mix, hidden_states)

    mixer.module.forward = forward
