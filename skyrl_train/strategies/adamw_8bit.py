"""AdamW of bitsandbytes with moments of 8 bits per element, and their form in checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from skyrl_train.errors import ConfigError
from skyrl_train.strategies.checkpoint_shards import CheckpointReader, ParameterSlice

BLOCK_SIZE = 256
"""Number of consecutive elements of a rank's shard that bitsandbytes quantizes with the same scale."""
MIN_QUANTIZED_NUMEL = 4096
"""Number of elements below which a parameter keeps float32 moments, as in bitsandbytes."""
BLOCK_SCALES = ("absmax1", "absmax2")
"""Keys of the state that have one element per block."""
SHARED_STATE = ("qmap1", "qmap2")
"""Keys of the state that are one constant tensor for all parameters."""


def make_adamw_8bit(parameters: Iterable[nn.Parameter], **settings: Any) -> Any:
    """Return bitsandbytes' AdamW8bit, which quantizes the moments of all parameters.

    Args:
        parameters: Plain tensors that are not empty: the kernels get their addresses.
        settings: lr, betas and weight_decay.

    Raises:
        ConfigError: bitsandbytes is not installed.
    """
    try:
        from bitsandbytes.optim import AdamW8bit
    except ImportError as error:
        raise ConfigError(
            "optimizer_config.name='adamw_8bit' needs bitsandbytes, which is not installed. Run "
            "`pip install 'skyrl-train[bitsandbytes]'`, or set optimizer_config.name=adamw."
        ) from error
    return AdamW8bit(parameters, min_8bit_size=0, **settings)


def get_saved_state(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors of one parameter's state that a checkpoint contains; empty before the first step."""
    tensors = {key: state[key] for key in ("state1", "state2", *BLOCK_SCALES) if key in state}
    return {**tensors, "step": torch.tensor(float(state["step"]))} if state else {}


def load_state(
    optimizer: Any, parameter: nn.Parameter, reader: CheckpointReader, name: str, parameter_slice: ParameterSlice
) -> None:
    """Read the state of a parameter from a checkpoint.

    It is exact if blocks contain the same elements as before: with an equal number of ranks, and if rows have a
    multiple of 256 elements. Otherwise the moments are quantized again.

    Args:
        optimizer: The optimizer from `make_adamw_8bit`.
        parameter: This rank's shard of the parameter.
        reader: The checkpoint.
        name: The parameter's name in the checkpoint.
        parameter_slice: The elements of this rank's shard.
    """
    from bitsandbytes.functional import quantize_blockwise

    optimizer.state.pop(parameter, None)
    optimizer.init_state(optimizer.param_groups[0], parameter, 0, 0)
    state = optimizer.state[parameter]
    for moment in ("1", "2"):
        codes = reader.read_elements(f"state{moment}/{name}", parameter_slice)
        scales = reader.read_elements(f"absmax{moment}/{name}", parameter_slice, BLOCK_SIZE)
        block_scales = scales[::BLOCK_SIZE]
        if not torch.equal(block_scales.repeat_interleave(BLOCK_SIZE)[: len(scales)], scales):
            quantiles = state[f"qmap{moment}"].cpu()
            codes, quantized = quantize_blockwise(quantiles[codes.long()] * scales, quantiles, blocksize=BLOCK_SIZE)
            block_scales = quantized.absmax
        state[f"state{moment}"].copy_(codes.view(parameter.shape))
        state[f"absmax{moment}"].copy_(block_scales)
    state["step"] = int(reader.read_scalar(f"step/{name}"))
