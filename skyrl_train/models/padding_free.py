"""Decides if a model computes each sequence of a batch exactly when all of them share one row without padding.

The body runs once on the meta device, where tensors have shapes but no values, with our attention. Every operation
outside of attention must treat each token separately. So the check works for every class of transformers and every
size, and does not read weights.

Legend: T tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import MoeModelOutputWithPast

from skyrl_train.errors import ConfigError
from skyrl_train.models.ragged_attention import Segments, check_attention_arguments
from skyrl_train.models.recurrent_layers import RECURRENT_LAYER_TYPES, LayerSegments, get_recurrent_mixers
from skyrl_train.models.sliding_windows import disable_query_scaling, register_window_masks

_TRACED = "skyrl_traced"
"""Name, in transformers, of the attention that only checks its arguments."""
SUPPORTED_ATTENTION_TYPES = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
"""Types of attention layers that run without padding."""
_STATELESS_LAYER_TYPES = frozenset({"mlp", "moe"})
"""Types of layers that compute each token alone."""
_PRODUCTS = frozenset({"mm", "bmm", "addmm", "baddbmm", "mv", "dot"})
"""Operations whose last two tensors are multiplied as matrices."""
_ALONG_A_DIMENSION = frozenset(
    (
        *("cumsum", "cumprod", "cummax", "cummin", "logcumsumexp", "sort", "topk", "kthvalue", "_softmax"),
        *("_log_softmax", "flip", "roll", "gather", "index_select", "scatter", "scatter_add", "scatter_reduce"),
        *("index_add", "index_copy", "index_fill"),
    )
)
"""Operations that keep the number of tokens, but move or accumulate values along a dimension."""
_REDUCTIONS = frozenset(
    (
        *("sum", "mean", "amax", "amin", "max", "min", "prod", "var", "std", "var_mean", "any", "all", "argmax"),
        *("argmin", "logsumexp"),
    )
)
_SAME_VALUES = frozenset(
    (
        *("_to_copy", "_unsafe_view", "alias", "clone", "detach", "expand", "select", "slice", "squeeze", "t"),
        *("transpose", "unsqueeze", "view", "permute"),
    )
)
"""Operations that do not change values."""
_WITHOUT_VALUES = frozenset(
    (
        *("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "new_empty", "new_zeros"),
        *("new_ones", "new_full"),
    )
)
"""Operations that take only the shape of their input."""


def patch_model(model: PreTrainedModel) -> None:
    """Change what Llama 4 defines in a way that ragged batches cannot use.

    See `set_base_model_prefix` and `disable_query_scaling`. Other models are unchanged.
    """
    set_base_model_prefix(model)
    disable_query_scaling(model)


def set_base_model_prefix(model: PreTrainedModel) -> None:
    """Make `model.base_model` the body of a causal language model: Llama 4's class has the prefix of its composite."""
    if model.base_model is model and isinstance(getattr(model, "model", None), PreTrainedModel):
        model.base_model_prefix = "model"


def check_padding_free(model: PreTrainedModel) -> None:
    """Check that the states of a sequence depend on nothing but its tokens: not on its batch, its row or randomness.

    The weights are not read: they may be on any device, also on the meta device.

    Raises:
        ConfigError: Names the class, and the property that makes it unsupported.
    """
    config: Any = model.config.get_text_config()
    name = type(model).__name__
    if not model._can_set_attn_implementation():
        raise ConfigError(
            f"{name} does not use transformers' attention interface, so it cannot run without padding. Use another "
            "model."
        )
    if types := unsupported_layer_types(model):
        raise ConfigError(
            f"{name} has layers of the types {types}, in which a token would depend on other sequences of its packed "
            "row. Sequences are kept apart only in full, sliding-window and chunked attention, gated delta nets, Kimi "
            "delta attention, Mamba2 and short convolutions. Use another model."
        )
    if any(rope.get("rope_type") == "dynamic" for rope in get_rope_parameters(config)):
        raise ConfigError(
            f"{name} uses rope type 'dynamic', which depends on the longest sequence of a batch. "
            "Set trainer.rope_scaling to a static type such as 'yarn' or 'linear'."
        )
    dropouts: list[str] = [
        path for path, module in model.named_modules() if isinstance(module, nn.Dropout) and module.p > 0
    ]
    if getattr(config, "attention_dropout", None):
        dropouts.append("attention_dropout")
    if dropouts:
        raise ConfigError(
            f"{name} drops activations at random ({', '.join(dropouts[-3:])}), so log-probs would be noisy. "
            "Set its dropout keys to 0 in model_config_kwargs."
        )
    _trace(model)


def unsupported_layer_types(model: PreTrainedModel) -> list[str]:
    """Return the layer types of a model that are neither attention nor a mixer of recurrent_layers.py, sorted."""
    types = set(getattr(model.config.get_text_config(), "layer_types", None) or ())
    supported = SUPPORTED_ATTENTION_TYPES | _STATELESS_LAYER_TYPES
    return sorted(types - (supported | RECURRENT_LAYER_TYPES if get_recurrent_mixers(model) else supported))


def count_attention_layers(config: Any) -> int:
    """Return the number of layers with attention, from a text model's configuration. Falcon-H1's have both kinds."""
    types = getattr(config, "layer_types", None)
    if types is None:
        return int(config.num_hidden_layers)
    return sum(name in SUPPORTED_ATTENTION_TYPES or name == "hybrid" for name in types)


def count_mlp_layers(config: Any) -> int:
    """Return the number of layers with an MLP or experts. In Nemotron-H these are layers of their own."""
    types = getattr(config, "layer_types", None) or ()
    return sum(name in _STATELESS_LAYER_TYPES for name in types) or int(config.num_hidden_layers)


def is_meta_value_error(error: Exception) -> bool:
    """True if a model failed because it read values of a tensor on the meta device, which has none."""
    return isinstance(error, RuntimeError) and (isinstance(error, NotImplementedError) or "meta" in str(error).lower())


def get_rope_parameters(config: Any) -> list[dict[str, Any]]:
    """Return the sets of rope parameters of a text configuration: one, or one for each type of layer."""
    parameters: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    return [value for value in parameters.values() if isinstance(value, dict)] or [parameters]


def get_vllm_max_length(config: Any) -> int:
    """Return vLLM's maximum length of a sequence in tokens, unless its `max_model_len` is set.

    With linear and dynamic RoPE scaling it is a multiple of the positions, which include the factor in Gemma 3 only.

    Args:
        config: A text model's configuration.
    """
    positions = int(getattr(config, "max_position_embeddings", None) or 1 << 20)
    scaled = [rope for rope in get_rope_parameters(config) if rope.get("rope_type") in ("linear", "dynamic")]
    if not scaled or config.model_type.startswith("gemma3"):
        return positions
    return int(positions * max(rope.get("factor") or 1.0 for rope in scaled))


def _trace(model: PreTrainedModel) -> None:
    """Run the body on the meta device. Raises ConfigError if anything except attention lets tokens see others."""
    body: Any = model.base_model
    tokens = _pick_token_count(model)
    flow = _TokenFlow(tokens, type(model).__name__)
    ids = torch.zeros(1, tokens, dtype=torch.int64, device="meta")
    with _attention(model, flow), _unchanged(model), _mixers(model, flow), torch.no_grad(), flow.modules(), flow:
        try:
            output = body(
                input_ids=ids,
                position_ids=ids.clone(),
                use_cache=False,
                ragged_segments=Segments(torch.tensor([0, tokens]), (tokens,)),
                sequence_parallel=None,
            )
            hidden = output.last_hidden_state
        except ConfigError:
            raise
        except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
            if is_meta_value_error(error):
                return  # the operations depend on values, as in JetMoE's experts: the check with real weights decides
            reason = str(error).strip().split("\n")[0]
            raise ConfigError(
                f"{flow.owner} computes no last hidden states from token ids and position ids alone "
                f"({type(error).__name__}: {reason}), so it cannot run without padding."
            ) from error
        flow.check_not_mixed(hidden)


def _pick_token_count(model: PreTrainedModel) -> int:
    """Return a prime that divides no size of the model: a dimension of that size, or a multiple, contains tokens."""
    sizes = {size for tensor in (*model.parameters(), *model.buffers()) for size in tensor.shape}
    for section in (model.config, model.config.get_text_config()):
        sizes |= {abs(value) for value in section.to_dict().values() if type(value) is int and value}
    primes = (number for number in range(101, 1 << 20, 2) if all(number % d for d in range(3, 1 + int(number**0.5), 2)))
    return next(prime for prime in primes if all(size % prime for size in sizes))


class MetaDispatchMode(TorchDispatchMode):
    """A mode in which meta tensors can be combined with real ones, of which only the shapes are used.

    A number that Python reads from a tensor is 0, and a selection by values is empty.
    """

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        tensors = [leaf for leaf in tree_iter((args, kwargs)) if isinstance(leaf, Tensor)]
        meta_tensors = [tensor for tensor in tensors if tensor.is_meta]
        name = operation_name(function)
        if meta_tensors and name == "_local_scalar_dense":
            return torch.zeros((), dtype=tensors[0].dtype).item()
        if meta_tensors and name == "nonzero":
            return torch.empty(0, tensors[0].ndim, dtype=torch.int64, device="meta")
        if meta_tensors and len(meta_tensors) < len(tensors):
            args, kwargs = tree_map(_shape_of, (args, dict(kwargs or {})))
        return function(*args, **(kwargs or {}))


def _shape_of(leaf: Any) -> Any:
    return torch.empty_like(leaf, device="meta") if isinstance(leaf, Tensor) and not leaf.is_meta else leaf


def operation_name(function: Any) -> str:
    """Return the name of an operation without its overload, and without the suffix of in-place variants."""
    name: str = function._schema.name.split("::")[-1]
    return name if name.endswith("__") else name.removesuffix("_")


class LastHiddenStateOutput(MoeModelOutputWithPast):
    """The output of a body of any architecture: every attribute except the last hidden state is None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class OperationRecorder(MetaDispatchMode):
    """A mode that records which operations change values."""

    def __init__(self) -> None:
        super().__init__()
        self.changes: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = operation_name(function)
        if name not in _SAME_VALUES and any(isinstance(argument, Tensor) for argument in args):
            self.changes.append(name)
        return super().__torch_dispatch__(function, types, args, kwargs)


class _TokenFlow(MetaDispatchMode):
    """A mode that tracks tensors that depend on several tokens, or on the index of a token in its row."""

    def __init__(self, tokens: int, model: str):
        super().__init__()
        self.tokens = tokens
        self.owner = model
        self._stack: list[str] = [model]
        self._mixed: dict[int, tuple[Tensor, str]] = {}
        """id -> (the tensor, which keeps the id in use; the reason why its tokens are mixed)."""
        self._storages: dict[int, tuple[Any, str]] = {}
        """The same for storages that were written to."""

    @contextmanager
    def modules(self) -> Iterator[None]:
        """Keep track of the classes of running modules, to name them in messages."""

        thread = get_ident()  # an engine may run its modules in other threads

        def begin(module: nn.Module, _: Any) -> None:
            if get_ident() == thread:
                self._stack.append(type(module).__name__)

        def end(*_: Any) -> None:
            if get_ident() == thread:
                self._stack.pop()

        hooks = [register_module_forward_pre_hook(begin), register_module_forward_hook(end, always_call=True)]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def check_not_mixed(self, *tensors: Tensor) -> None:
        """Raise ConfigError if one of `tensors` has values that depend on several tokens."""
        for tensor in tensors:
            if (reason := self._reason(tensor)) is not None:
                raise ConfigError(f"{self.owner} cannot run without padding: {reason}. Use another model.")

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        inputs = [leaf for leaf in tree_iter((args, kwargs)) if isinstance(leaf, Tensor)]
        result = super().__torch_dispatch__(function, types, args, kwargs)
        outputs = [leaf for leaf in tree_iter(result) if isinstance(leaf, Tensor)]
        name = operation_name(function)
        if name in _WITHOUT_VALUES:
            return result
        reason = next((input_reason for tensor in inputs if (input_reason := self._reason(tensor)) is not None), None)
        if reason is None and self._counts_tokens(name, outputs):
            reason = f"{self._stack[-1]} numbers the tokens of a row itself instead of using position_ids"
        if reason is None and self._mixes(function, name, args, kwargs or {}, inputs, outputs):
            reason = f"{self._stack[-1]} combines different tokens outside of attention, with {name.strip('_')}"
        if reason is not None:
            for tensor in outputs:
                self._mixed[id(tensor)] = tensor, reason
            if function._schema.is_mutable:
                storage = inputs[0].untyped_storage()
                self._storages[storage._cdata] = storage, reason
        return result

    def _reason(self, tensor: Tensor) -> str | None:
        entry = self._mixed.get(id(tensor)) or self._storages.get(tensor.untyped_storage()._cdata)
        return None if entry is None else entry[1]

    def _dimensions(self, tensor: Tensor) -> list[int]:
        """Return the dimensions of a tensor that contain tokens."""
        return [dimension for dimension, size in enumerate(tensor.shape) if size and size % self.tokens == 0]

    def _counts_tokens(self, name: str, outputs: list[Tensor]) -> bool:
        return name == "arange" and any(self._dimensions(tensor) for tensor in outputs)

    def _mixes(
        self,
        function: Any,
        name: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        inputs: list[Tensor],
        outputs: list[Tensor],
    ) -> bool:
        """True if an output combines values of several tokens, or moves a token's value to another token."""
        if not any(self._dimensions(tensor) for tensor in inputs):
            return False
        if any(tensor.numel() and len(self._dimensions(tensor)) != 1 for tensor in outputs):
            return True
        first = inputs[0]
        if name == "convolution":
            return any(inputs[1].shape[dimension] > 1 for dimension in self._dimensions(first) if dimension > 1)
        if name in _PRODUCTS:
            return first.ndim > 0 and inputs[-2].ndim - 1 in self._dimensions(inputs[-2])
        if name == "index" or name.startswith("index_put"):
            return any(index is not None and dim in self._dimensions(first) for dim, index in enumerate(args[1]))
        if name in _ALONG_A_DIMENSION or name in _REDUCTIONS:
            arguments = dict(
                zip((argument.name for argument in function._schema.arguments), args, strict=False), **kwargs
            )
            dims = arguments.get("dim", arguments.get("dims"))
            dims = range(first.ndim) if dims in (None, []) else dims if isinstance(dims, list) else [dims]
            return any(dimension % first.ndim in self._dimensions(first) for dimension in dims)
        return False


@contextmanager
def _attention(model: PreTrainedModel, flow: _TokenFlow) -> Iterator[None]:
    """Replace the attention of `model` by one that checks its arguments while the context is active; tokens may see
    others.
    """

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
    ) -> tuple[Tensor, None]:
        try:
            check_attention_arguments(module, attention_mask, **options)
        except ConfigError as error:
            raise ConfigError(f"{flow.owner} cannot run without padding: {error}") from error
        flow.check_not_mixed(query, key, value)
        heads, tokens = query.shape[1:3]
        return value.new_empty(1, tokens, heads, value.shape[-1]), None

    AttentionInterface.register(_TRACED, attend)
    with pass_windows_as_masks(model):
        yield


@contextmanager
def _mixers(model: PreTrainedModel, flow: _TokenFlow) -> Iterator[None]:
    """Replace mixers with a recurrent state, while the context is active, by functions that check their arguments.

    `_unchanged` restores the mixers.
    """
    layers: list[LayerSegments] = []

    def replace(path: str, module: nn.Module) -> None:
        layer = LayerSegments(model.get_submodule(path.rpartition(".")[0]))
        layers.append(layer)

        def mix(hidden_states: Tensor, *_: Any, attention_mask: Any = None, **__: Any) -> Tensor:
            name = type(module).__name__
            if attention_mask is not None:
                raise ConfigError(f"{flow.owner} passes a mask to its {name}. Use another model class.")
            if layer.current is None:
                raise ConfigError(
                    f"{flow.owner} does not pass keyword arguments to the layers with {name}, so that these do not "
                    "know where the sequences of a packed row begin. Use another model class."
                )
            flow.check_not_mixed(hidden_states)
            return hidden_states.new_empty(hidden_states.shape)

        module.forward = mix

    for path, mixer in get_recurrent_mixers(model).items():
        replace(path, mixer.module)
    try:
        yield
    finally:
        for layer in layers:
            layer.remove_hooks()


@contextmanager
def pass_windows_as_masks(model: PreTrainedModel) -> Iterator[None]:
    """Make `model` pass windows instead of masks to its attention while the context is active.

    See sliding_windows.py. For any other kind of mask, it passes an empty tensor. The configurations of the model are
    restored at the end.
    """
    register_window_masks(_TRACED)
    configs = _configs(model)
    before = [(config, config._attn_implementation, config._experts_implementation) for config in configs]
    for config in configs:
        config._attn_implementation_internal = _TRACED
        # Eager is a loop over the experts that have tokens. It is empty on the meta device.
        config._experts_implementation_internal = "eager"
    try:
        yield
    finally:
        for config, attention, experts in before:
            config._attn_implementation_internal = attention
            config._experts_implementation_internal = experts


def _configs(model: PreTrainedModel) -> list[PreTrainedConfig]:
    """Return the configurations of a model and its parts, each once."""
    queue: list[Any] = [model.config, *(module.config for module in model.modules() if hasattr(module, "config"))]
    configs: dict[int, PreTrainedConfig] = {}
    while queue:
        config = queue.pop()
        if isinstance(config, PreTrainedConfig) and id(config) not in configs:
            configs[id(config)] = config
            queue += [getattr(config, name, None) for name in config.sub_configs]
    return list(configs.values())


@contextmanager
def _unchanged(model: PreTrainedModel) -> Iterator[None]:
    """Undo, at the end of the context, changes that modules make to their attributes and buffers.

    For example, some models update the frequencies of a rope in forward.
    """
    saved_state = [(module, dict(vars(module)), dict(module._buffers)) for module in model.modules()]
    try:
        yield
    finally:
        for module, attributes, buffers in saved_state:
            vars(module).clear()
            vars(module).update(attributes)
            module._buffers.clear()
            module._buffers.update(buffers)
