"""Sizes that may differ between the layers of one model."""

from __future__ import annotations

from typing import Any


def get_layer_sizes(config: Any, name: str) -> list[int]:
    """Return the different values of an attribute over the layers of a model, in ascending order.

    Gemma 4 has heads of two sizes, and transformers raises an error if such an attribute of the model is read.

    Args:
        config: A text model's configuration.
        name: Name of the attribute, such as "head_dim".

    Returns:
        The values that are set and not 0; empty if the configuration has no such attribute.
    """
    is_mixed = getattr(config, "is_heterogeneous", False)
    layers = [config.per_layer_config[index] for index in range(config.num_hidden_layers)] if is_mixed else [config]
    values = {getattr(layer, name, None) for layer in layers}
    return sorted(value for value in values if value)
