"""Linear layers with oneDNN compute the same as torch's, with their current weights."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from skyrl_train.engines.transformers.model_runner import OneDnnLinear, use_onednn


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 7, 300])
@pytest.mark.parametrize("outputs", [3, 640, 3000])
def test_onednn_layers_match_linear_with_current_weights(rows: int, outputs: int, bias: bool):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(257, outputs, bias=bias))
    names = list(model.state_dict())
    use_onednn(model)
    assert type(model[0]) is OneDnnLinear
    assert list(model.state_dict()) == names
    with torch.inference_mode():
        for _ in range(2):
            inputs = torch.randn(1, rows, 257)
            expected = nn.functional.linear(inputs, *model[0].parameters())
            torch.testing.assert_close(model(inputs), expected, atol=1e-4, rtol=1e-5)
            for parameter in model.parameters():
                parameter.copy_(torch.randn_like(parameter))


def test_other_layers_and_dtypes_are_unchanged():
    class Special(nn.Linear):
        pass

    model = nn.Sequential(Special(4, 4), nn.Linear(4, 4, dtype=torch.bfloat16), nn.Embedding(4, 4))
    kinds = [type(module) for module in model]
    use_onednn(model)
    assert [type(module) for module in model] == kinds
