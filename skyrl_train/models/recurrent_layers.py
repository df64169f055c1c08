"""Layers with a recurrent state (gated delta nets, Mamba2, short convolutions, KDA): the supported kinds, in one table.

Each sequence of a packed row starts with an empty state. Transformers' mixer module runs once for the row, so that its
projections and norms see all tokens. Its convolution and its scan, which read earlier tokens, run for each sequence
alone. If sequences share a prompt, its tokens are repeated in front of each of them for the mixer only. Everything else
in the model still computes shared tokens once.

For an engine with a state per sequence:

- `get_recurrent_mixers(model)` lists the mixers. An engine supports a model if it supports the kinds of all of them,
  and `unsupported_layer_types` in padding_free.py is empty.
- `replace_recurrent_functions(model)` must have been called before a mixer runs. Otherwise transformers runs Triton
  kernels on CPUs as soon as `fla-core` is installed.
- `mixer.run_unpacked(hidden_states, cache)` runs transformers' own forward for sequences of equal length [n, L, D].
  `cache` is passed in the mixer's own parameter for it, and None starts with empty states that are not kept. A cache
  has `has_previous_state(index)`, `update_conv_state(values, index, conv_kernel_size=...)`,
  `update_recurrent_state(state, index)` and `layers[index].conv_states[0]`, `.recurrent_states[0]` and `.record_past`,
  as in transformers' `DynamicCache`. `mixer.index` is the mixer's index in it. One token per sequence with an earlier
  state is a decoding step, which updates `conv_states[0]` [n, channels, kernel] in place. Falcon-H1 and others update
  `recurrent_states[0]` in place too.
- `mixer.state_shapes` are the shapes of one sequence's states: of the convolution, and of the scan if there is one. The
  latter is float32 whatever the model's dtype.

Legend: T tokens of a row, D hidden size, n sequences of equal length L.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from skyrl_train.errors import ConfigError
from skyrl_train.models.ragged_attention import PackedSequences, Segments
from skyrl_train.models.recurrent_kernels import get_kernel

RECURRENT_LAYER_TYPES = frozenset({"linear_attention", "conv", "hybrid"})
"""Types, in configurations, of layers with a mixer of this table. Mixers of other classes have these types, too."""
_CONVOLUTION = "causal_conv1d_fn"
"""Transformers' function for convolutions over the last dimension of [n, channels, L], in all modeling modules."""
_FUSED_MAMBA2 = "mamba2_split_conv1d_scan_combined"
"""Transformers' function for Mamba2's convolution and scan in one kernel. It returns None where there is no kernel."""
_MAMBA2_SCAN = "mamba2_chunk_scan"
_MAMBA2_STEP = "mamba2_selective_state_update"
_TIME_STEP_POSITIONS = {_MAMBA2_SCAN: 1, _MAMBA2_STEP: 2}
"""Function of transformers -> position of the time steps among its arguments."""
_NO_TIME_STEP_LIMIT = (0.0, float("inf"))
_CHUNK_SIZES = {"torch_chunk_gated_delta_rule": 64, "chunk_kimi_delta_attention": 16, _MAMBA2_SCAN: 64}
"""Scan -> number of tokens that it computes at once, in the learner and in the transformers engine. It changes memory
and time on CPUs, and results only by rounding."""
_STEPS = (
    "causal_conv1d_update",
    "torch_recurrent_gated_delta_rule",
    "recurrent_kimi_delta_attention",
    _MAMBA2_STEP,
)
"""Transformers' functions for one token per sequence, which only engines call."""
_packed: ContextVar[PackedSequences | None] = ContextVar("packed", default=None)
"""The sequences of the row that a mixer is computing; None outside of a packed forward."""

_time_step_limit: ContextVar[tuple[float, float] | None] = ContextVar("time_step_limit", default=None)
"""Minimum and maximum of the time steps of the Mamba2 mixer that is running; None for no limits."""


@dataclass(frozen=True)
class RecurrentKind:
    """A kind of mixer, with the functions of transformers that read several tokens."""

    name: str
    """Name for messages."""
    scan: str | None
    """Name of the function that scans [n, L, ...] in transformers' modeling modules; None for a convolution alone."""
    cache_parameter: str
    """Parameter of the mixer's forward that takes a cache."""
    state_shapes: Callable[[Any], tuple[tuple[int, ...], ...]]
    """Mixer module -> shapes of one sequence's states: of the convolution, and of the scan if there is one."""


def _conv_shape(conv: nn.Conv1d) -> tuple[int, int]:
    return conv.in_channels, conv.kernel_size[0]


GATED_DELTA_NET = RecurrentKind(
    "gated delta net",
    "torch_chunk_gated_delta_rule",
    "cache_params",
    lambda mixer: (_conv_shape(mixer.conv1d), (mixer.num_v_heads, mixer.head_k_dim, mixer.head_v_dim)),
)
KIMI_DELTA_ATTENTION = RecurrentKind(
    "Kimi delta attention",
    "chunk_kimi_delta_attention",
    "cache_params",
    lambda mixer: (_conv_shape(mixer.conv1d), (mixer.num_heads, mixer.head_dim, mixer.head_dim)),
)
MAMBA2 = RecurrentKind(
    "Mamba2",
    _MAMBA2_SCAN,
    "cache_params",
    lambda mixer: (_conv_shape(mixer.conv1d), (mixer.num_heads, mixer.head_dim, mixer.ssm_state_size)),
)
SHORT_CONVOLUTION = RecurrentKind(
    "short convolution", None, "past_key_values", lambda mixer: (_conv_shape(mixer.conv),)
)
MIXER_CLASSES = {
    "Qwen3NextGatedDeltaNet": GATED_DELTA_NET,
    "Qwen3_5GatedDeltaNet": GATED_DELTA_NET,
    "Qwen3_5MoeGatedDeltaNet": GATED_DELTA_NET,
    "KimiLinearDeltaAttention": KIMI_DELTA_ATTENTION,
    "FalconH1Mixer": MAMBA2,
    "GraniteMoeHybridMambaLayer": MAMBA2,
    "NemotronHMamba2Mixer": MAMBA2,
    "Lfm2ShortConv": SHORT_CONVOLUTION,
    "Lfm2MoeShortConv": SHORT_CONVOLUTION,
}
"""Class of transformers -> its kind: the table of supported mixers."""


class RecurrentMixer:
    """A mixer module of a model, and its kind."""

    def __init__(self, module: Any, kind: RecurrentKind):
        self.module = module
        self.kind = kind
        self.original_forward: Callable[..., Tensor] = module.forward
        """Transformers' own forward pass."""

    @property
    def index(self) -> int:
        """Index of the mixer's layer, which is its index in a cache of transformers."""
        return int(self.module.layer_idx)

    @property
    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of one sequence's states: of the convolution, and of the scan if there is one."""
        return self.kind.state_shapes(self.module)

    def run_unpacked(self, hidden_states: Tensor, cache: Any = None) -> Tensor:
        """Run transformers' own forward for sequences of equal length [n, L, D], without padding.

        Args:
            hidden_states: Inputs of the sequences.
            cache: A cache with the interface of transformers', see the module's docstring; None for empty states.
        """
        token = _time_step_limit.set(getattr(self.module, "time_step_limit", None))
        try:
            return self.original_forward(hidden_states=hidden_states, **{self.kind.cache_parameter: cache})
        finally:
            _time_step_limit.reset(token)


def check_without_parallelism(model: nn.Module, size_key: str) -> None:
    """Raise ConfigError if a model has layers with a recurrent state, for tensor and sequence parallelism.

    Args:
        model: The model.
        size_key: Configuration key of the number of ranks, which is more than 1.
    """
    if kinds := sorted({mixer.kind.name for mixer in get_recurrent_mixers(model).values()}):
        raise ConfigError(
            f"{type(model).__name__} has layers with a recurrent state ({', '.join(kinds)}), which need all heads and "
            f"all tokens of a sequence on one rank. Set {size_key} to 1."
        )


def get_recurrent_mixers(model: nn.Module) -> dict[str, RecurrentMixer]:
    """Return path -> mixer, for the modules of a model that are in the table."""
    return {
        path: RecurrentMixer(module, MIXER_CLASSES[type(module).__name__])
        for path, module in model.named_modules()
        if type(module).__name__ in MIXER_CLASSES
    }


def replace_recurrent_functions(model: nn.Module) -> None:
    """Replace transformers' convolutions and scans, in the modeling modules of the model's mixers, by exact ones.

    On CPUs the replacements are transformers' PyTorch functions. While a packed row is computed (`pack_mixers`), they
    run each sequence alone.
    """
    for mixer in get_recurrent_mixers(model).values():
        namespace: Any = sys.modules[type(mixer.module).__module__]
        for name in (_CONVOLUTION, _FUSED_MAMBA2, mixer.kind.scan, *_STEPS):
            function = getattr(namespace, name or "", None)
            if function is not None and not hasattr(function, "_is_replacement"):
                setattr(namespace, str(name), _make_replacement(str(name), function))


def _make_replacement(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the replacement of a function of transformers that reads several tokens."""
    plain = inspect.unwrap(function)  # without the choice of kernels
    if name in _TIME_STEP_POSITIONS:
        plain = _widen_time_steps(plain, _TIME_STEP_POSITIONS[name])

    @wraps(plain)
    def replacement(values: Tensor, *args: Any, **kwargs: Any) -> Any:
        sequences = _packed.get()
        if name == _MAMBA2_STEP:
            args, kwargs = _limit_time_steps(args, kwargs)
        if name == _MAMBA2_SCAN and kwargs.get("dt_limit") is None:  # some configurations have null for no limits
            kwargs["dt_limit"] = _NO_TIME_STEP_LIMIT
        if sequences is None:
            # In float32, kernels would multiply in TF32.
            if values.is_cuda and values.dtype.itemsize == 2:
                return function(values, *args, **kwargs)
            return plain(values, *args, **kwargs | _chunk_size(name, [values.shape[1]]))
        if name == _FUSED_MAMBA2:
            return None  # the kernel of mamba-ssm does not know the boundaries of sequences
        if (kernel := get_kernel(name, values)) is not None:
            return kernel(values, *args, sequences=sequences, **kwargs)
        if name == _CONVOLUTION:
            return _run_each(plain, sequences, 2, (values, *args), kwargs)
        return _run_each(plain, sequences, 1, (values, *args), kwargs | _chunk_size(name, sequences.lengths))

    replacement._is_replacement = True  # type: ignore[attr-defined]
    return replacement


def _widen_time_steps(function: Callable[..., Any], position: int) -> Callable[..., Any]:
    """Return a PyTorch function of Mamba2 that computes time steps in float32, as kernels do, not in half precision."""

    @wraps(function)
    def with_wide_steps(*args: Any, **kwargs: Any) -> Any:
        return function(*args[:position], _to_float32(args[position]), *args[position + 1 :], **kwargs)

    return with_wide_steps


def _to_float32(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _chunk_size(name: str, lengths: Sequence[int]) -> dict[str, int]:
    """Return the chunk size of a scan over sequences of these lengths, as its argument; {} for other functions."""
    return {"chunk_size": min(_CHUNK_SIZES[name], max(lengths))} if name in _CHUNK_SIZES else {}


def _limit_time_steps(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a Mamba2 step, after the state, with the limits that its scan applies to time steps.

    Transformers passes no limits to a step, so decoding would differ from a forward pass over the whole sequence.
    """
    limit = _time_step_limit.get()
    if limit is None or tuple(limit) == _NO_TIME_STEP_LIMIT:
        return args, kwargs
    hidden_states, steps, *others = args
    steps = _to_float32(steps)
    steps = nn.functional.softplus(steps + kwargs["dt_bias"].to(steps.dtype)).clamp(*limit)
    return (hidden_states, steps, *others), kwargs | {"dt_bias": None, "dt_softplus": False}


def _run_each(
    function: Callable[..., Any],
    sequences: PackedSequences,
    dim: int,
    args: Sequence[Any],
    kwargs: dict[str, Any],
) -> Any:
    """Run a function for each sequence alone. Those of similar length are a batch with padding at the end.

    Args:
        function: A causal function. It returns a tensor like its first argument but for channels, or a tuple of it and
            None.
        sequences: The sequences of the row.
        dim: Dimension of the tokens, in the arguments [1, ...] that have one and in the result.
        args: Arguments.
        kwargs: Keyword arguments.
    """
    batches, num_tokens = sequences.batches, sum(sequences.lengths)

    def split(value: Any) -> Sequence[Any]:
        if not isinstance(value, Tensor) or value.ndim < 3 or value.shape[dim] != num_tokens:
            return [value] * len(batches)
        parts = value.movedim(dim, 1).squeeze(0).split([batch.num_tokens for batch in batches])
        return [batch.pad(part).movedim(1, dim) for batch, part in zip(batches, parts, strict=True)]

    args_of_batches = zip(*map(split, args), strict=True)
    kwargs_of_batches = {name: split(value) for name, value in kwargs.items()}
    rows, device = [], args[0].device.type
    # Autocast would narrow the float32 products of a scan. The meta device has none.
    with nullcontext() if device == "meta" else torch.autocast(device, enabled=False):
        for index, (batch, batch_args) in enumerate(zip(batches, args_of_batches, strict=True)):
            result = function(*batch_args, **{name: values[index] for name, values in kwargs_of_batches.items()})
            output: Tensor = result[0] if isinstance(result, tuple) else result
            rows.append(batch.unpad(output.movedim(dim, 1)))
    row = torch.cat(rows).unsqueeze(0).movedim(1, dim)
    return (row, None) if isinstance(result, tuple) else row


@contextmanager
def packed_row(sequences: PackedSequences) -> Iterator[None]:
    """Make mixers run each of `sequences`, which are their input [1, T, D], alone while the context is active."""
    token = _packed.set(sequences)
    try:
        yield
    finally:
        _packed.reset(token)


def pack_mixers(model: nn.Module) -> None:
    """Change the mixers of a model, in place, such that each sequence of a row [1, T, D] has a state of its own.

    The sequences are those of `ragged_segments`, which the model's body passes to its layers. A call without it runs
    transformers' own forward.
    """
    replace_recurrent_functions(model)
    for path, mixer in get_recurrent_mixers(model).items():
        if not hasattr(mixer.original_forward, "_is_packed"):  # else the model has been changed before
            _pack_mixer(model.get_submodule(path.rpartition(".")[0]), mixer)


class LayerSegments:
    """The `ragged_segments` of a layer's running forward pass.

    Some layers do not pass them on to their mixer. Recomputing a layer (gradient checkpointing) calls the hooks again.
    """

    def __init__(self, layer: nn.Module):
        """Register hooks at a layer."""
        self.current: Segments | None = None
        """None outside of a forward pass, or in one without segments."""
        self._hooks = [
            layer.register_forward_pre_hook(self._begin, with_kwargs=True),
            layer.register_forward_hook(self._end, always_call=True),
        ]

    def _begin(self, _layer: nn.Module, _args: Any, kwargs: dict[str, Any]) -> None:
        self.current = kwargs.get("ragged_segments")

    def _end(self, *_: Any) -> None:
        self.current = None

    def remove_hooks(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()


def _pack_mixer(layer: nn.Module, mixer: RecurrentMixer) -> None:
    segments = LayerSegments(layer)

    @torch.compiler.disable  # lists of lengths would recompile a graph for every micro-batch
    @wraps(mixer.original_forward)
    def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if segments.current is None:
            return mixer.original_forward(hidden_states, *args, **kwargs)
        sequences = segments.current.sequences
        rows = sequences.unpack(hidden_states.squeeze(0)).unsqueeze(0)
        with packed_row(sequences):
            mixed = mixer.original_forward(rows, *args, **kwargs)
        return sequences.pack(mixed.squeeze(0)).unsqueeze(0)

    forward._is_packed = True  # type: ignore[attr-defined]
    mixer.module.forward = forward
