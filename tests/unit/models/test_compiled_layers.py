"""Compiled layers without compiled kernels: what is compiled, how often, and that results do not change."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch._dynamo import config as dynamo
from torch._dynamo.utils import counters
from torch._inductor import config as inductor

from skyrl_train.config.schema import LoraConfig
from skyrl_train.data.batch import TrainBatch
from skyrl_train.errors import ConfigError
from skyrl_train.metrics import Metrics
from skyrl_train.models.activation_checkpointing import SELECTIVE, enable_checkpointing
from skyrl_train.models.compiled_layers import MAX_RECOMPILATIONS, compile_layers
from skyrl_train.models.logprob_model import LogprobModel
from skyrl_train.models.lora import LoraAdapters
from skyrl_train.testing.tiny_models import tiny_model
from tests.support.learner_specs import FULL_OBJECTIVE, with_targets
from tests.support.padded_reference import grouped_batch
from tests.support.tiny_adapters import fill_adapters

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


def make_model(
    kind: str, compiled: bool, layers: int = 2, checkpointing: bool | str = False, adapts: bool = False
) -> LogprobModel:
    causal_lm = tiny_model(kind, layers=layers)
    enable_checkpointing(causal_lm, checkpointing, use_reentrant=False)
    if adapts:
        LoraAdapters(causal_lm, LoraConfig(rank=4), "trainer.policy.model.lora")
        with torch.no_grad():
            fill_adapters(causal_lm)
    model = LogprobModel(causal_lm).train()
    if compiled:
        compile_layers(model, "cpu")
    return model


def gradients(model: LogprobModel, batch: TrainBatch, share_prompts: bool = False) -> dict[str, Tensor]:
    model.zero_grad()
    inputs = model.lay_out(batch, batch.shared_prompt_lengths() if share_prompts else None)
    logprobs, entropy = model(inputs, True)
    FULL_OBJECTIVE(batch, logprobs, entropy, int(batch.loss_mask.sum()), Metrics()).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize(
    ("kind", "checkpointing", "adapts", "share_prompts"),
    [
        ("qwen2", False, False, False),
        ("qwen2", SELECTIVE, True, True),
        pytest.param("qwen2", True, True, True, marks=pytest.mark.on_demand),
        ("qwen3_moe", False, False, False),
        pytest.param("qwen3_moe", SELECTIVE, True, True, marks=pytest.mark.on_demand),
    ],
)
def test_layers_share_graphs_and_keep_gradients(
    kind: str, checkpointing: bool | str, adapts: bool, share_prompts: bool
):
    eager, compiled = (make_model(kind, is_compiled, 2, checkpointing, adapts) for is_compiled in (False, True))
    num_graphs = []
    for groups in (
        [(7, [5, 9, 3]), (4, [6, 6]), (5, [4])],
        [(19, [4, 12, 2]), (3, [10])],
        [(3, [4, 5])],
        [(70, [17, 30])],
    ):
        batch = with_targets(grouped_batch(groups))
        expected, actual = (gradients(model, batch, share_prompts) for model in (eager, compiled))
        assert actual.keys() == expected.keys()
        for name, gradient in expected.items():
            assert (actual[name] - gradient).norm() <= 1e-5 * gradient.norm().clamp_min(1e-3), name
        num_graphs.append(counters["stats"]["unique_graphs"])
    assert num_graphs[0] > 1
    assert set(num_graphs) == {num_graphs[0]}


def test_variants_may_exceed_the_default_limit() -> None:
    with dynamo.patch(recompile_limit=8):  # torch's default
        make_model("qwen2", compiled=True)
        assert dynamo.recompile_limit == MAX_RECOMPILATIONS


def test_missing_compiler_error_names_the_key():
    torch.compiler.set_default_backend(None)
    with inductor.patch({"cpp.cxx": (None, "no-such-compiler")}):
        with pytest.raises(
            ConfigError, match=r"use_torch_compile=true: .*no-such-compiler.* requires a C\+\+ compiler"
        ):
            make_model("qwen2", compiled=True)
