"""Composite checkpoints, such as vision-language models, used as text models.

A composite holds a language model beside other towers. Here its language model becomes a model of its own, with the
names that a text-only checkpoint has ("model.layers.0..."). `Composite` owns the mapping from these names to those of
the checkpoint: weights are read, sent to engines and exported through it.
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
"""Value of `model_type` -> what a composite's language model alone would do otherwise, though `_check_text` passes."""
_LENGTH = 3
"""Tokens of the text with which a composite is checked."""
_OF_TOKENS = frozenset({"per_layer_inputs"})
"""Arguments of language models that these compute of the tokens themselves, too: of Gemma 3n and 4."""


@dataclass(frozen=True)
class CompositeModel:
    """The composite that a text model is a part of."""

    model: PreTrainedModel
    """The whole composite, on the meta device."""
    body_path: str
    """Name of the language model, without its head, in the composite."""
    tensor_names: Mapping[str, str]
    """Name of each parameter and persistent buffer of the text model -> its name in the composite."""

    @property
    def config(self) -> PreTrainedConfig:
        """The configuration of the whole checkpoint."""
        return self.model.config

    def module_name(self, name: str) -> str:
        """Return the composite's name of a linear layer of the text model."""
        return self.tensor_names[f"{name}.weight"].removesuffix(".weight")

    def to_checkpoint_tensors(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return tensors of the text model under the names of checkpoints; other names are kept as they are."""
        inner = {self.tensor_names[name]: tensor for name, tensor in tensors.items() if name in self.tensor_names}
        others = {name: tensor for name, tensor in tensors.items() if name not in self.tensor_names}
        return revert_weight_conversion(self.model, inner) | others


def is_composite(config: PreTrainedConfig) -> bool:
    """True for the configuration of a checkpoint that has a language model beside other towers."""
    return type(config) in COMPOSITES and config.get_text_config() is not config


def get_composite_class_name(config: PreTrainedConfig) -> str | None:
    """Return the name of the class of a composite; None for the configuration of any other model."""
    if not is_composite(config):
        return None
    kind: Any = COMPOSITES[type(config)]
    return str(kind.__name__)


def get_auto_class(config: PreTrainedConfig) -> Any:
    """Return the Auto class with which transformers loads a checkpoint of a configuration as it is."""
    return AutoModelForImageTextToText if is_composite(config) else AutoModelForCausalLM


def get_multimodal_token_ids(config: PreTrainedConfig) -> Tensor:
    """Return the ids of a composite's tokens that stand for images and the like, which it reads in ways of its own."""
    named = config.to_dict().items()
    ids = [value for name, value in named if name.endswith(("_token_id", "_token_index")) and isinstance(value, int)]
    return torch.tensor(ids, dtype=torch.int64)


def to_composite_overrides(config: PreTrainedConfig, changed: Mapping[str, Any]) -> dict[str, Any]:
    """Return changes of a language model as changes of its composite's config.json."""
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
    """Return a composite on the meta device, whose configuration keeps the dtypes that the parts were saved in."""
    parts = {name: part for name in config.sub_configs if (part := getattr(config, name, None)) is not None}
    saved = {name: part.dtype for name, part in parts.items()}
    # It never computes attention, so the kernels that its configuration may name need not be installed.
    options: Any = {"dtype": dtype, "attn_implementation": "eager"}
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForImageTextToText.from_config(config, **options)
    for name, dtype_of_part in saved.items():
        getattr(model.config, name).dtype = dtype_of_part
    return model


def build_text_model(
    composite: PreTrainedModel, dtype: torch.dtype, attn_implementation: str | None = "eager"
) -> PreTrainedModel:
    """Return the language model of a composite, with its head, on the meta device.

    Args:
        composite: The composite, on the meta device.
        dtype: The dtype of its parameters.
        attention: The implementation of attention; None for the best one that the model supports.

    Raises:
        ConfigError: The composite does not compute for text what its language model alone computes.
    """
    if reason := _NOT_AS_TEXT.get(composite.config.model_type):
        raise _not_separable(composite, reason)
    config = copy.deepcopy(composite.config.get_text_config())
    config.name_or_path = composite.config.name_or_path
    try:
        head, embeddings = composite.get_output_embeddings(), composite.get_input_embeddings()
        tower: Any = type(composite.get_submodule(_body(composite)))
    except (AttributeError, NotImplementedError, StopIteration) as error:
        raise _not_separable(composite, "it has no embedding of tokens of its own") from error
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
    """Name of a tensor of the text model -> its name in the composite. Raises ConfigError if they do not correspond."""
    body, place = _body(model), _body(composite)
    tower = composite.get_submodule(place)
    if type(tower) is not type(model.get_submodule(body)):
        raise _not_separable(composite, f"its language model is a {type(tower).__name__}")
    prefixes = {
        f"{body}.": f"{place}.",
        f"{_path(model, model.get_output_embeddings())}.": f"{_path(composite, composite.get_output_embeddings())}.",
    }
    theirs = composite.state_dict()
    names = {}
    for name, tensor in model.state_dict().items():
        outer = next((outer + name[len(own) :] for own, outer in prefixes.items() if name.startswith(own)), None)
        if outer not in theirs or theirs[outer].shape != tensor.shape:
            raise _not_separable(composite, f"it has no tensor for {name}")
        names[name] = outer
    if more := [name for name in theirs if name.startswith(tuple(prefixes.values())) and name not in names.values()]:
        raise _not_separable(composite, f"its language model has also {more[0]}")
    return names


def _check_text(model: PreTrainedModel, composite: PreTrainedModel) -> None:
    """Check on the meta device that a composite passes text to its language model as it is, and has its logits.

    No layer runs: known outputs take the place of those of the language model's body and of the head.

    Raises:
        ConfigError: Names what the composite adds.
    """
    embeddings: list[Tensor] = []
    hook = composite.get_input_embeddings().register_forward_hook(lambda *seen: embeddings.append(seen[-1]))
    inputs = {name: torch.zeros(1, _LENGTH, dtype=torch.int64, device="meta") for name in ("input_ids", "position_ids")}
    try:
        with pass_windows_as_masks(composite):
            given, logits = _around_body(composite, inputs)
    finally:
        hook.remove()
    known = [*inputs.values(), *embeddings]
    for name, value in given.items():
        for tensor in tree_leaves(value):
            if isinstance(tensor, Tensor) and name not in _OF_TOKENS and not any(tensor is one for one in known):
                raise _not_separable(composite, f"it also gives {name} to its language model")
    _, alone = _around_body(model, inputs)
    if logits.is_meta or alone.is_meta or logits.shape != alone.shape:
        found = f"{tuple(logits.shape)} on {logits.device}, alone {tuple(alone.shape)} on {alone.device}"
        raise _not_separable(composite, f"its logits are not made of its head's outputs alone ({found})")
    if not torch.equal(logits, alone):
        gap = float((logits - alone).abs().max())
        raise _not_separable(composite, f"its logits are not those of its language model: they differ by {gap:.3g}")


def _around_body(model: PreTrainedModel, inputs: Mapping[str, Tensor]) -> tuple[dict[str, Any], Tensor]:
    """Return what a model on the meta device passes to its body, and its logits for known outputs of the head."""
    body, head = model.get_submodule(_body(model)), model.get_output_embeddings()
    given: dict[str, Any] = {}
    seen, between = OperationRecorder(), list[str]()
    outputs = torch.linspace(-100.0, 100.0, head.out_features, device="cpu").expand(1, _LENGTH, -1)

    def states(*arguments: Any, **options: Any) -> LastHiddenStateOutput:
        given.update(options, **{f"argument {index}": value for index, value in enumerate(arguments)})
        seen.changes.clear()
        return LastHiddenStateOutput(last_hidden_state=torch.zeros(1, _LENGTH, head.in_features, device="meta"))  # type: ignore[arg-type]

    hooks = (
        head.register_forward_pre_hook(lambda *_: between.extend(seen.changes)),
        head.register_forward_hook(lambda *_: outputs.clone()),
    )
    body.forward = states  # type: ignore[method-assign]
    try:
        with torch.no_grad(), seen:
            logits: Tensor = model(**inputs, use_cache=False).logits
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        reason = str(error).strip().split("\n")[0]
        raise _not_separable(
            model, f"it computes no logits of text alone ({type(error).__name__}: {reason})"
        ) from error
    finally:
        del body.forward
        for hook in hooks:
            hook.remove()
    if not given:
        raise _not_separable(model, "it does not run its language model for text")
    if between:
        raise _not_separable(model, f"it changes states before its head ({', '.join(between[:3])})")
    return given, logits


def _body(model: PreTrainedModel) -> str:
    """Return the name of the module that has the embedding of tokens."""
    return _path(model, model.get_input_embeddings()).rpartition(".")[0]


def _path(model: PreTrainedModel, wanted: nn.Module | None) -> str:
    return next(path for path, module in model.named_modules() if module is wanted)


def _not_separable(composite: PreTrainedModel, reason: str) -> ConfigError:
    return ConfigError(f"{type(composite).__name__} cannot be used as its language model alone: {reason}.")


@cache
def _causal_lm_of(body: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """Return a causal language model class for a text tower that transformers has only inside of a composite."""

    class TextTowerForCausalLM(_TextTower, body.__base__, GenerationMixin):  # type: ignore[misc, name-defined]
        tower = body

    TextTowerForCausalLM.__name__ = body.__name__.removesuffix("Model") + "ForCausalLM"
    # transformers looks into the source of a class's module to see if its attention can be replaced.
    TextTowerForCausalLM.__module__ = body.__module__
    return TextTowerForCausalLM


class _TextTower:
    """A text tower with its head: three-dimensional rotary positions follow from the plain ones of text."""

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
        """Return logits [B, L, V]. See the causal language models of transformers; labels are not supported."""
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        return MoeCausalLMOutputWithPast(
            logits=self.lm_head(outputs.last_hidden_state[:, kept, :]),
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )
