"""torch.compile for a model's layers, region by region: layers of one kind share their compiled code."""

from __future__ import annotations

from typing import Any

import torch

from skyrl_train.errors import ConfigError
from skyrl_train.models.ragged_model import RaggedModel

COMPILE_KEY = "trainer.policy.use_torch_compile"
MAX_RECOMPILATIONS = 32
"""Compiled variants of a region before it runs uncompiled: with or without gradient, of one or many tokens, for each
kind of attention."""


def compile_layers(model: RaggedModel, device: str) -> None:
    """Compile the decoder layers, for any number of tokens; modules and names of parameters stay as they are.

    Only `forward` is compiled: gathering of sharded weights, gradient checkpointing and other hooks of a layer's call
    run outside of it. Attention (see ragged_attention) and fused experts are excluded. Raises ConfigError if
    torch.compile does not work on the device.
    """
    _try_compiler(device)
    compiler: Any = torch.compile  # its annotations leave recompile_limit out
    for layer in model.decoder_layers():
        compiled: Any = layer
        for module in compiled.modules():
            if any(parameter.ndim > 2 for parameter in module.parameters(recurse=False)):
                # Experts: the number of tokens of each is only known at run time.
                module.forward = torch.compiler.disable(module.forward)
        compiled.forward = compiler(compiled.forward, dynamic=True, recompile_limit=MAX_RECOMPILATIONS)


def _try_compiler(device: str) -> None:
    """Compile an addition, so that a missing compiler is noticed before ranks wait for each other."""
    numbers = torch.zeros(2, device=device)
    try:
        torch.compile(_next, dynamic=True)(numbers)
    except RuntimeError as error:
        needed = "a C++ compiler (g++)" if device == "cpu" else "Triton and a C compiler"
        reason = str(error).strip().split("\n")[0]
        raise ConfigError(
            f"{COMPILE_KEY}=true: torch.compile does not work here ({type(error).__name__}: {reason}). It needs {needed}; "
            "install that, or set it to false."
        ) from error


def _next(numbers: torch.Tensor) -> torch.Tensor:
    return numbers + 1
