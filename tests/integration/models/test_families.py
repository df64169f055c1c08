"""Every language model of transformers is trained exactly, or rejected before its weights are read."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL_LMS,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as COMPOSITES,
)

from skyrl_train.data.batch import TrainBatch
from skyrl_train.errors import ConfigError
from skyrl_train.models.loading import check_causal_lm, list_checkpoint_names, load_causal_lm, to_checkpoint_tensors
from skyrl_train.models.logprob_model import LogprobModel, check_model_supported
from tests.support.padded_reference import padded_scores, ragged_batch
from tests.support.tiny_families import tiny_family

from .families import EXACT, EXACT_WITH_IMAGES, NOT_BUILT, NOT_BUILT_WITH_IMAGES, TYPES

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # GPT-BigCode
LENGTHS = (9, 23, 14)
FIRST_WORD = 8
"""Smaller ids are special tokens of the tiny models, which some composites replace."""


def get_config_error(check: Callable[[], object]) -> str | None:
    try:
        check()
    except ConfigError as error:
        return str(error)
    return None


def make_batch() -> TrainBatch:
    batch = ragged_batch(LENGTHS)
    return batch.with_tokens(input_ids=batch.input_ids.clamp(min=FIRST_WORD))


@torch.no_grad()
def separate_logprobs(model: PreTrainedModel, batch: TrainBatch) -> Tensor:
    model.set_attn_implementation("eager")
    return torch.cat([padded_scores(model, sequence)[0] for sequence in batch.split_micro_batches(max_sequences=1)])


@torch.no_grad()
def ragged_logprobs(model: LogprobModel, batch: TrainBatch) -> Tensor:
    return model(model.lay_out(batch)).logprobs  # type: ignore[no-any-return]


def check_family(model: PreTrainedModel, is_exact: bool) -> None:
    """Check that log-probs of a ragged batch equal those of separate sequences, or that the model is rejected.

    The error must be the same with and without weights.
    """
    meta_model: PreTrainedModel = copy.deepcopy(model).to("meta")  # type: ignore[arg-type]
    reason = get_config_error(lambda: check_model_supported(meta_model))
    assert (reason is None) == is_exact, reason
    if reason is not None:
        assert type(model).__name__ in reason
        assert get_config_error(lambda: LogprobModel(model)) == reason
        return
    batch = make_batch()
    expected = separate_logprobs(model, batch)
    torch.testing.assert_close(ragged_logprobs(LogprobModel(model), batch), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", sorted(CAUSAL_LMS.keys() - NOT_BUILT.keys()))
def test_family_is_exact_or_rejected(kind: str):
    check_family(tiny_family(kind, AutoModelForCausalLM), kind in EXACT)


def check_language_model(composite: PreTrainedModel, is_exact: bool, folder: Path) -> None:
    """Check that log-probs from the language model of a checkpoint equal those of the full composite."""
    composite.save_pretrained(folder)
    reason = get_config_error(lambda: check_model_supported(check_causal_lm(str(folder))))
    assert (reason is None) == is_exact, reason
    if reason is not None:
        assert get_config_error(lambda: LogprobModel(load_causal_lm(str(folder), dtype=torch.float32))) is not None
        return
    model = load_causal_lm(str(folder), dtype=torch.float32)
    named = to_checkpoint_tensors(model, dict(model.named_parameters()))
    assert named.keys() <= list_checkpoint_names(str(folder))
    batch = make_batch()
    expected = separate_logprobs(composite, batch)
    torch.testing.assert_close(ragged_logprobs(LogprobModel(model), batch), expected, rtol=0, atol=1e-4)


@pytest.mark.on_demand
@pytest.mark.parametrize("kind", sorted(COMPOSITES.keys() - NOT_BUILT_WITH_IMAGES.keys()))
def test_text_of_composite_is_exact_or_rejected(kind: str, tmp_path: Path):
    check_language_model(tiny_family(kind, AutoModelForImageTextToText), kind in EXACT_WITH_IMAGES, tmp_path)


def test_families_are_those_of_transformers():
    assert len(CAUSAL_LMS) == TYPES
    assert CAUSAL_LMS.keys() >= EXACT | NOT_BUILT.keys()
    assert COMPOSITES.keys() >= EXACT_WITH_IMAGES | NOT_BUILT_WITH_IMAGES.keys()
    assert not EXACT & NOT_BUILT.keys()
    assert not EXACT_WITH_IMAGES & NOT_BUILT_WITH_IMAGES.keys()
