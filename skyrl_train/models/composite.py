"""Composite checkpoints, such as vision-language models, used as text models.

A composite contains a language model in addition to other towers. Here its language model becomes a separate model,
with the names of a text-only checkpoint ("model.layers.0..."). `CompositeModel` owns the mapping from these names to
those of the checkpoint. Weights are read, sent to engines and exported through it.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING as CAUSAL_LMS,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING as COMPOSITES,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GenerationMixin,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_outputs import MoeCausalLMOutputWithPast

from skyrl_train.errors import ConfigError
from skyrl_train.models.padding_free import (
    LastHiddenStateOutput,
    OperationRecorder,
    pass_windows_as_masks,
    set_base_model_prefix,
)

_ATTRIBUTE = "skyrl_composite"
_NOT_AS_TEXT = {
    "kosmos-2.5": "its positions do not start at 0",
    "paligemma": "it lets the tokens of a prompt see later ones",
}
"""`model_type` -> why a composite's language model alone would compute something else, though `_check_text` passes."""
_CHECK_LENGTH = 3
"""Number of tokens of the text with which a composite is checked."""
_COMPUTED_FROM_TOKENS = frozenset({"per_layer_inputs"})
"""Arguments of language models that these can also compute from the tokens: those of Gemma 3n and 4."""


@dataclass(frozen=True)
class CompositeModel:
    """The composite that a text model is a part of."""

    model: PreTrainedModel
    """The full composite, on the meta device."""
    body_path: str
    """Path of the language model, without its head, in the composite."""
    tensor_names: Mapping[str, str]
    """Name of each parameter and persistent buffer of the text model -> its name in the composite."""

    @property
    def config(self) -> PreTrainedConfig:
        """The configuration of the full checkpoint."""
        return self.model.config

    def module_name(self, name: str) -> str:
        """Return the composite's name of a linear layer of the text model."""
        return self.tensor_names[f"{name}.weight"].removesuffix(".weight")

    def to_checkpoint_tensors(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return tensors of the text model with the names and shapes of checkpoints; tensors with other names are
        unchanged.
        """
        inner = {self.tensor_names[name]: tensor for name, tensor in tensors.items() if name in self.tensor_names}
        others = {name: tensor for name, tensor in tensors.items() if name not in self.tensor_names}
        return revert_weight_conversion(self.model, inner) | others


def is_composite(config: PreTrainedConfig) -> bool:
    """True for the configuration of a checkpoint with a language model and other towers."""
    return type(config) in COMPOSITES and config.get_text_config() is not config


def get_composite_class_name(config: PreTrainedConfig) -> str | None:
    """Return the name of the class of a composite; None for the configuration of any other model."""
    if not is_composite(config):
        return None
    kind: Any = COMPOSITES[type(config)]
    return str(kind.__name__)


def get_auto_class(config: PreTrainedConfig) -> Any:
    """Return the Auto class with which transformers loads the full checkpoint of a configuration."""
    return AutoModelForImageTextToText if is_composite(config) else AutoModelForCausalLM


def get_multimodal_token_ids(config: PreTrainedConfig) -> Tensor:
    """Return the ids of a composite's tokens that stand for images and the like, int64; it processes them specially."""
    named = config.to_dict().items()
    ids = [value for name, value in named if name.endswith(("_token_id", "_token_index")) and isinstance(value, int)]
    return torch.tensor(ids, dtype=torch.int64)


def to_composite_overrides(config: PreTrainedConfig, changed: Mapping[str, Any]) -> dict[str, Any]:
    """Convert changes of a language model's configuration to changes of its composite's config.json.

    Args:
        config: The composite's configuration.
        changed: New values of attributes of its language model's configuration.

    Returns:
        Nested overrides; {} for no changes. `tie_word_embeddings` is set in both configurations.
    """
    if not changed:
        return {}
    text = config.get_text_config()
    section = next(name for name in config.sub_configs if getattr(config, name, None) is text)
    tied = {name: value for name, value in changed.items() if name == "tie_word_embeddings"}
    return {section: dict(changed), **tied}


def get_composite(model: nn.Module) -> CompositeModel | None:
    """Return the composite that a text model was made from; None for any other model."""
    composite: CompositeModel | None = getattr(model, _ATTRIBUTE, None)
    return composite


def get_checkpoint_config(model: PreTrainedModel) -> PreTrainedConfig:
    """Return the configuration of the checkpoint that a model belongs to: that of its composite, if it has one."""
    composite = get_composite(model)
    return model.config if composite is None else composite.config


def build_meta_composite(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Return a composite on the meta device.

    Its configuration keeps the dtypes in which the parts were saved. `config` is shared with the model.

    Args:
        config: The composite's configuration.
        dtype: Dtype of the parameters.
    """
    sections = {name: section for name in config.sub_configs if (section := getattr(config, name, None)) is not None}
    saved_dtypes = {name: section.dtype for name, section in sections.items()}
    # Eager, so that kernels that the configuration may name need not be installed; attention never runs.
    options: Any = {"dtype": dtype, "attn_implementation": "eager"}
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForImageTextToText.from_config(config, **options)
    for name, part_dtype in saved_dtypes.items():
        getattr(model.config, name).dtype = part_dtype
    return model


def build_text_model(
    composite: PreTrainedModel, dtype: torch.dtype, attn_implementation: str | None = "eager"
) -> PreTrainedModel:
    """Return the language model of a composite (a multimodal model), with its head, on the meta device.

    Args:
        composite: The composite, on the meta device.
        dtype: The dtype of the parameters.
        attn_implementation: The attention implementation; None for the best one that the model supports.

    Raises:
        ConfigError: The composite has no separate language model, or that model would give other results for text.
    """
    if reason := _NOT_AS_TEXT.get(composite.config.model_type):
        raise _not_separable(composite, reason)
    config = copy.deepcopy(composite.config.get_text_config())
    config.name_or_path = composite.config.name_or_path
    try:
        head, embeddings = composite.get_output_embeddings(), composite.get_input_embeddings()
        tower: Any = type(composite.get_submodule(_body(composite)))
    except (AttributeError, NotImplementedError, StopIteration) as error:
        raise _not_separable(composite, "it has no token embedding of its own") from error
    if head is None:
        raise _not_separable(composite, "it has no language-model head")
    config.tie_word_embeddings = head.weight is embeddings.weight
    kind: Any = CAUSAL_LMS[type(config)] if type(config) in CAUSAL_LMS else _causal_lm_of(tower)
    with torch.device("meta"):
        model: Any = kind._from_config(config, dtype=dtype, attn_implementation=attn_implementation)
    set_base_model_prefix(model)
    names = _names(model, composite)
    _check_text(model, composite)
    setattr(model, _ATTRIBUTE, CompositeModel(composite, _body(composite), names))
    return model  # type: ignore[no-any-return]


def _names(model: PreTrainedModel, composite: PreTrainedModel) -> dict[str, str]:
    """Return the name of each tensor of the text model -> its name in the composite.

    Raises ConfigError if the tensors do not correspond.
    """
    body, body_path = _body(model), _body(composite)
    tower = composite.get_submodule(body_path)
    if type(tower) is not type(model.get_submodule(body)):
        raise _not_separable(composite, f"its language model has another class, {type(tower).__name__}")
    prefixes = {
        f"{body}.": f"{body_path}.",
        f"{_path(model, model.get_output_embeddings())}.": f"{_path(composite, composite.get_output_embeddings())}.",
    }
    composite_tensors = composite.state_dict()
    names = {}
    for name, tensor in model.state_dict().items():
        outer = next((outer + name[len(own) :] for own, outer in prefixes.items() if name.startswith(own)), None)
        if outer not in composite_tensors or composite_tensors[outer].shape != tensor.shape:
            raise _not_separable(composite, f"it has no tensor for {name}")
        names[name] = outer
    if extra := [
        name for name in composite_tensors if name.startswith(tuple(prefixes.values())) and name not in names.values()
    ]:
        raise _not_separable(composite, f"its language model also has the tensor {extra[0]}")
    return names


def _check_text(model: PreTrainedModel, composite: PreTrainedModel) -> None:
    """Check on the meta device that a composite passes text to its language model unchanged, and returns its logits.

    No layer runs: known outputs take the place of those of the language model's body and of the head.

    Raises:
        ConfigError: Names what the composite adds.
    """
    embeddings: list[Tensor] = []
    hook = composite.get_input_embeddings().register_forward_hook(
        lambda *hook_arguments: embeddings.append(hook_arguments[-1])
    )
    inputs = {
        name: torch.zeros(1, _CHECK_LENGTH, dtype=torch.int64, device="meta") for name in ("input_ids", "position_ids")
    }
    try:
        with pass_windows_as_masks(composite):
            arguments, logits = _around_body(composite, inputs)
    finally:
        hook.remove()
    known = [*inputs.values(), *embeddings]
    for name, value in arguments.items():
        for tensor in tree_leaves(value):
            if (
                isinstance(tensor, Tensor)
                and name not in _COMPUTED_FROM_TOKENS
                and not any(tensor is known_input for known_input in known)
            ):
                raise _not_separable(composite, f"it also passes {name} to its language model")
    _, text_logits = _around_body(model, inputs)
    if logits.is_meta or text_logits.is_meta or logits.shape != text_logits.shape:
        difference = (
            f"{tuple(logits.shape)} on {logits.device}, but {tuple(text_logits.shape)} on {text_logits.device} alone"
        )
        raise _not_separable(composite, f"its logits depend on more than its head's outputs ({difference})")
    if not torch.equal(logits, text_logits):
        max_difference = float((logits - text_logits).abs().max())
        raise _not_separable(
            composite, f"its logits are not those of its language model: they differ by {max_difference:.3g}"
        )


def _around_body(model: PreTrainedModel, inputs: Mapping[str, Tensor]) -> tuple[dict[str, Any], Tensor]:
    """Return what a model on the meta device passes to its body, and its logits for known outputs of the head."""
    body, head = model.get_submodule(_body(model)), model.get_output_embeddings()
    body_arguments: dict[str, Any] = {}
    recorder, changes_before_head = OperationRecorder(), list[str]()
    outputs = torch.linspace(-100.0, 100.0, head.out_features, device="cpu").expand(1, _CHECK_LENGTH, -1)

    def states(*arguments: Any, **options: Any) -> LastHiddenStateOutput:
        body_arguments.update(options, **{f"argument {index}": value for index, value in enumerate(arguments)})
        recorder.changes.clear()
        return LastHiddenStateOutput(last_hidden_state=torch.zeros(1, _CHECK_LENGTH, head.in_features, device="meta"))  # type: ignore[arg-type]

    hooks = (
        head.register_forward_pre_hook(lambda *_: changes_before_head.extend(recorder.changes)),
        head.register_forward_hook(lambda *_: outputs.clone()),
    )
    body.forward = states  # type: ignore[method-assign]
    try:
        with torch.no_grad(), recorder:
            logits: Tensor = model(**inputs, use_cache=False).logits
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        reason = str(error).strip().split("\n")[0]
        raise _not_separable(
            model, f"it computes no logits from text alone ({type(error).__name__}: {reason})"
        ) from error
    finally:
        del body.forward
        for hook in hooks:
            hook.remove()
    if not body_arguments:
        raise _not_separable(model, "it does not run its language model for text")
    if changes_before_head:
        raise _not_separable(model, f"it changes states before its head ({', '.join(changes_before_head[:3])})")
    return body_arguments, logits


def _body(model: PreTrainedModel) -> str:
    """Return the path of the module that has the token embedding."""
    return _path(model, model.get_input_embeddings()).rpartition(".")[0]


def _path(model: PreTrainedModel, submodule: nn.Module | None) -> str:
    return next(path for path, module in model.named_modules() if module is submodule)


def _not_separable(composite: PreTrainedModel, reason: str) -> ConfigError:
    return ConfigError(
        f"{type(composite).__name__} cannot be used as a text model: {reason}. Use a text-only checkpoint, or another "
        "model."
    )


@cache
def _causal_lm_of(body: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """Return a causal language model class for a text tower that transformers has only as a part of a composite."""

    class TextTowerForCausalLM(_TextTower, body.__base__, GenerationMixin):  # type: ignore[misc, name-defined]
        tower = body

    TextTowerForCausalLM.__name__ = body.__name__.removesuffix("Model") + "ForCausalLM"
    # transformers reads the source of a class's module to decide if its attention can be replaced.
    TextTowerForCausalLM.__module__ = body.__module__
    return TextTowerForCausalLM


class _TextTower:
    """A text tower with its head: three-dimensional rotary positions follow from the one-dimensional ones of text."""

    base_model_prefix = "model"
    _tied_weights_keys: ClassVar = {"lm_head.weight": "model.embed_tokens.weight"}
    _tp_plan: ClassVar = {"lm_head": "colwise_gather_output"}
    tower: type[PreTrainedModel]

    def __init__(self, config: Any):
        super().__init__(config)  # type: ignore[call-arg]
        self.model = self.tower(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()  # type: ignore[attr-defined]

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> MoeCausalLMOutputWithPast:
        """Return logits [B, L, V], as transformers' causal language models do; labels are not supported."""
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        positions = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        return MoeCausalLMOutputWithPast(
            logits=self.lm_head(outputs.last_hidden_state[:, positions, :]),
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )
