"""torch.compile for a model's decoder layers, one region per layer: layers of one kind share their compiled code."""

from __future__ import annotations

from typing import Any

import torch
from torch._dynamo import config as dynamo

from skyrl_train.errors import ConfigError
from skyrl_train.models.ragged_model import RaggedModel

COMPILE_KEY = "trainer.policy.use_torch_compile"
MAX_RECOMPILATIONS = 32
"""Maximum number of compiled variants of a region; beyond it, the region runs uncompiled.

Variants differ in whether there is a gradient, in one or many tokens, and in the kind of attention.
"""


def compile_layers(model: RaggedModel, device: str) -> None:
    """Compile the forward passes of the decoder layers, for any number of tokens.

    Modules and names of parameters are unchanged. Only `forward` is compiled: gathering of sharded weights, gradient
    checkpointing and other hooks of a layer's call run outside of it. Attention (see ragged_attention) and fused
    experts are excluded.

    Args:
        model: The model whose layers are compiled in place.
        device: The device type, "cpu" or "cuda".

    Raises:
        ConfigError: torch.compile does not work on the device.
    """
    _try_compiler(device)
    # torch 2.11 has no argument of torch.compile for it.
    dynamo.recompile_limit = max(dynamo.recompile_limit, MAX_RECOMPILATIONS)
    for layer in model.decoder_layers():
        compiled: Any = layer
        for module in compiled.modules():
            if any(parameter.ndim > 2 for parameter in module.parameters(recurse=False)):
                # Fused experts: the number of tokens of each expert is only known at run time.
                module.forward = torch.compiler.disable(module.forward)
        compiled.forward = torch.compile(compiled.forward, dynamic=True)


def _try_compiler(device: str) -> None:
    """Compile an addition, so that a missing compiler is found before ranks wait for each other. Raises ConfigError."""
    numbers = torch.zeros(2, device=device)
    try:
        torch.compile(_add_one, dynamic=True)(numbers)
    except RuntimeError as error:
        requirement = "a C++ compiler (g++)" if device == "cpu" else "Triton and a C compiler"
        reason = str(error).strip().split("\n")[0]
        raise ConfigError(
            f"{COMPILE_KEY}=true: torch.compile does not work on this machine ({type(error).__name__}: {reason}). It "
            f"requires {requirement}. Install it, or set {COMPILE_KEY}=false."
        ) from error


def _add_one(numbers: torch.Tensor) -> torch.Tensor:
    return numbers + 1
