"""Compiled layers without compiled kernels: what is compiled, how often, and that results do not change."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor import config as inductor

from skyrl_train.data.batch import TrainBatch
from skyrl_train.errors import ConfigError
from skyrl_train.metrics import Metrics
from skyrl_train.models.compiled_layers import compile_layers
from skyrl_train.models.logprob_model import LogprobModel
from skyrl_train.testing.tiny_models import tiny_model
from tests.support.learner_specs import FULL_OBJECTIVE, policy_batch

# torch hides its compiler's warnings, but only after they were raised
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def default_compiler_settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Capture, differentiate and run graphs without generating kernels, which takes a minute."""
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)  # a vLLM engine in this process sets it
    torch.compiler.reset()
    torch.compiler.set_default_backend("aot_eager")
    counters.clear()
    yield
    torch.compiler.set_default_backend(None)
    torch.compiler.reset()


def make_model(kind: str, compiled: bool, layers: int = 2) -> LogprobModel:
    model = LogprobModel(tiny_model(kind, layers=layers))
    if compiled:
        compile_layers(model, "cpu")
    return model


def gradients(model: LogprobModel, batch: TrainBatch) -> dict[str, Tensor]:
    model.zero_grad()
    logprobs, entropy = model(
        batch.input_ids, batch.position_ids, batch.offsets, batch.temperature, batch.loss_mask, True
    )
    FULL_OBJECTIVE(batch, logprobs, entropy, int(batch.loss_mask.sum()), Metrics()).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("kind", ["qwen2", "qwen3_moe"])
def test_layers_share_graphs_and_keep_gradients(kind: str):
    eager, compiled = make_model(kind, compiled=False), make_model(kind, compiled=True)
    num_graphs = []
    for lengths in ((9, 4, 12, 9, 2, 7, 9, 5), (19, 4, 12, 2), (3, 4), (70, 17)):
        batch = policy_batch(lengths)
        expected, actual = gradients(eager, batch), gradients(compiled, batch)
        assert actual.keys() == expected.keys()
        for name, gradient in expected.items():
            assert (actual[name] - gradient).norm() <= 1e-5 * gradient.norm().clamp_min(1e-3), name
        num_graphs.append(counters["stats"]["unique_graphs"])
    assert num_graphs[0] > 1
    assert set(num_graphs) == {num_graphs[0]}


def test_missing_compiler_error_names_the_key():
    torch.compiler.set_default_backend(None)
    with inductor.patch({"cpp.cxx": (None, "no-such-compiler")}):
        with pytest.raises(
            ConfigError, match=r"use_torch_compile=true: .*no-such-compiler.* requires a C\+\+ compiler"
        ):
            make_model("qwen2", compiled=True)
