"""Composite checkpoints as text models: loading, names and exports."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from skyrl_train.models.loading import load_causal_lm
from tests.support.composites import KINDS, composite_model, save_composite


@pytest.mark.parametrize("kind", KINDS)
def test_text_model_computes_the_composites_logits(kind: str, tmp_path: Path) -> None:
    path = save_composite(tmp_path / "model", kind)
    model = load_causal_lm(path, dtype=torch.float32)
    ids = torch.arange(3, 43).view(2, 20)
    with torch.no_grad():
        wanted = composite_model(kind)(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
        got = model(input_ids=ids).logits
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-5)
    assert not any("vision" in name or "visual" in name for name in model.state_dict())
