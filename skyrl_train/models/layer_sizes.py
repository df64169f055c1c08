"""Sizes that the layers of one model may not have in common."""

from __future__ import annotations

from typing import Any


def get_layer_sizes(config: Any, name: str) -> list[int]:
    """Return the different values of an attribute of a text model's configuration, in ascending order.

    Gemma 4 has heads of two sizes, and transformers refuses to read such an attribute of the whole model. The list is
    empty if the configuration has none.
    """
    is_mixed = getattr(config, "is_heterogeneous", False)
    layers = [config.per_layer_config[index] for index in range(config.num_hidden_layers)] if is_mixed else [config]
    values = {getattr(layer, name, None) for layer in layers}
    return sorted(value for value in values if value)
