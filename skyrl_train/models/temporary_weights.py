"""Runs a model whose parameters are on the meta device, for checks, without the memory for all of its weights."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn


@contextmanager
def temporarily_materialized(ragged_model: Any) -> Iterator[None]:
    """Materialize the weights of a meta-device model layer by layer while the context is active.

    Inside the context the model can run forward: each decoder layer has its weights only while it runs. Tensors that
    the files hold in the model's dtype are used where the file is mapped. Embeddings and heads, which may be most of a
    model, stay in the file's dtype and compute in it.

    Args:
        ragged_model: A RaggedModel. Nothing happens if it has no `pretrained` weights, because its parameters then have
            values.
    """
    if ragged_model.pretrained is None:
        yield
        return
    dtype, layers = ragged_model.model.dtype, ragged_model.decoder_layers()
    embeddings = [module for module in ragged_model.modules() if isinstance(module, nn.Embedding)]
    layer_parameters = {id(parameter) for layer in layers for parameter in layer.parameters()}
    in_file_dtype = {
        id(parameter)
        for parameter in (
            *(embedding_module.weight for embedding_module in embeddings),
            *ragged_model.head_parameters(),
        )
    }
    with ExitStack() as model_stack, ExitStack() as layer_stack:

        def materialize_layer(layer: nn.Module, _args: Any, name: str) -> None:
            layer_stack.enter_context(_materialized(layer, ragged_model.read_pretrained, name))

        for embedding in embeddings:
            model_stack.callback(
                embedding.register_forward_hook(lambda _module, _args, output: output.to(dtype)).remove
            )
        for name, module in ragged_model.named_modules():
            if module in layers:
                hook = module.register_forward_pre_hook(
                    lambda layer, args, name=name: materialize_layer(layer, args, name)
                )
                model_stack.callback(hook.remove)
                model_stack.callback(
                    module.register_forward_hook(lambda _module, _args, _output: layer_stack.close()).remove
                )
        model_stack.enter_context(
            _materialized(ragged_model, ragged_model.read_pretrained, "", in_file_dtype, layer_parameters)
        )
        yield


@contextmanager
def _materialized(
    module: nn.Module,
    read: Callable[[str], Tensor],
    prefix: str,
    in_file_dtype: Collection[int] = (),
    excluded: Collection[int] = (),
) -> Iterator[None]:
    """Give the meta-device parameters of `module` the values of `read(name)` while the context is active."""
    pairs = []
    for name, parameter in list(module.named_parameters(prefix)):
        if parameter.is_meta and id(parameter) not in excluded:
            value = read(name) if id(parameter) in in_file_dtype else read(name).to(parameter.dtype)
            pairs.append((parameter, nn.Parameter(value, parameter.requires_grad)))
    for pair in pairs:
        torch.utils.swap_tensors(*pair)
    try:
        yield
    finally:
        for pair in pairs:
            torch.utils.swap_tensors(*pair)
