"""A model on the meta device computes for a moment, to be checked, without the memory that it would need as a whole."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn


@contextmanager
def temporarily_materialized(ragged_model: Any) -> Iterator[None]:
    """Within it a RaggedModel whose parameters are on the meta device computes: a layer has them while it runs.

    Tensors that are saved in the model's dtype are used where the file is mapped, and so are all embeddings and heads,
    which may be most of a model: they compute in the file's dtype.
    """
    if ragged_model.pretrained is None:
        yield
        return
    dtype, layers = ragged_model.model.dtype, ragged_model.decoder_layers()
    embeddings = [module for module in ragged_model.modules() if isinstance(module, nn.Embedding)]
    of_layers = {id(parameter) for layer in layers for parameter in layer.parameters()}
    as_saved = {id(parameter) for parameter in (*(one.weight for one in embeddings), *ragged_model.head_parameters())}
    with ExitStack() as whole, ExitStack() as of_layer:

        def begin(layer: nn.Module, _args: Any, name: str) -> None:
            of_layer.enter_context(_materialized(layer, ragged_model.read_pretrained, name))

        for embedding in embeddings:
            whole.callback(embedding.register_forward_hook(lambda _module, _args, output: output.to(dtype)).remove)
        for name, module in ragged_model.named_modules():
            if module in layers:
                hook = module.register_forward_pre_hook(lambda layer, args, name=name: begin(layer, args, name))
                whole.callback(hook.remove)
                whole.callback(module.register_forward_hook(lambda _module, _args, _output: of_layer.close()).remove)
        whole.enter_context(_materialized(ragged_model, ragged_model.read_pretrained, "", as_saved, of_layers))
        yield


@contextmanager
def _materialized(
    module: nn.Module,
    read: Callable[[str], Tensor],
    prefix: str,
    as_saved: Collection[int] = (),
    without: Collection[int] = (),
) -> Iterator[None]:
    """Within it those parameters of `module` that are on the meta device have the values of `read(name)`."""
    pairs = []
    for name, parameter in list(module.named_parameters(prefix)):
        if parameter.is_meta and id(parameter) not in without:
            value = read(name) if id(parameter) in as_saved else read(name).to(parameter.dtype)
            pairs.append((parameter, nn.Parameter(value, parameter.requires_grad)))
    for pair in pairs:
        torch.utils.swap_tensors(*pair)
    try:
        yield
    finally:
        for pair in pairs:
            torch.utils.swap_tensors(*pair)
