"""Composite checkpoints as text models: the learner and the engines compute for text what the composite computes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from skyrl_train.models.composite import get_composite
from skyrl_train.models.loading import load_causal_lm
from skyrl_train.models.logprob_model import LogprobModel
from tests.support.double_precision import double_precision
from tests.support.multimodal_models import KINDS, composite_model, save_composite
from tests.support.padded_reference import assert_same_tensors, grouped_batch, padded_scores

from .test_learner import Gradients, compute_loss, ragged_gradients

TRAINABLE = tuple(kind for kind in KINDS if kind != "qwen3_5")


@pytest.fixture(autouse=True)
def _exact_double() -> Iterator[None]:
    with double_precision():
        yield


def composite_gradients(kind: str, batch: object, names: dict[str, str]) -> Gradients:
    """Return gradients of the composite's padded forward pass, by the names of its text model."""
    model = composite_model(kind, dtype=torch.float64)
    compute_loss(*padded_scores(model, batch), batch).backward()  # type: ignore[arg-type]
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: gradients[outer] for name, outer in names.items() if outer in gradients}


@pytest.mark.parametrize("share", [False, True], ids=["padding-free", "shared prompts"])
@pytest.mark.parametrize("kind", TRAINABLE)
def test_gradient_equals_that_of_padded_composite(kind: str, share: bool, tmp_path: Path) -> None:
    batch = grouped_batch([(6, [4, 9, 4, 1]), (3, [2]), (11, [5, 5])])
    path = save_composite(tmp_path / "model", kind, dtype=torch.float64)
    model = load_causal_lm(path, dtype=torch.float64)
    model.set_experts_implementation("eager")
    composite = get_composite(model)
    assert composite is not None
    expected = composite_gradients(kind, batch, dict(composite.tensor_names))
    tolerance = 1e-6 if kind == "llama4" else 1e-9  # its rotary positions are complex numbers in single precision
    assert_same_tensors(ragged_gradients(LogprobModel(model), batch, share), expected, tolerance)
    assert len(expected) > 10
