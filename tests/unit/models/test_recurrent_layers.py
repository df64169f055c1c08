from __future__ import annotations

import sys
from functools import wraps
from inspect import unwrap
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.qwen3_5 import modeling_qwen3_5

from skyrl_train.config.schema import LoraConfig
from skyrl_train.data.batch import TrainBatch
from skyrl_train.errors import ConfigError
from skyrl_train.models.compiled_layers import compile_layers
from skyrl_train.models.logprob_model import LogprobModel
from skyrl_train.models.lora import LoraAdapters
from skyrl_train.models.padding_free import check_padding_free
from skyrl_train.models.parallel_group import make_meta_group
from skyrl_train.models.ragged_attention import PackedSequences, Segments
from skyrl_train.models.recurrent_layers import get_recurrent_mixers
from skyrl_train.models.sequence_parallel import SequenceParallel
from skyrl_train.models.shared_prompts import SharedPromptLayout
from skyrl_train.models.tensor_parallel import TensorParallel
from skyrl_train.testing.tiny_models import tiny_model
from tests.support.double_precision import double_precision
from tests.support.padded_reference import assert_same_tensors, grouped_batch, padded_scores
from tests.support.recurrences import reference_recurrences
from tests.support.tiny_families import tiny_family

KINDS = ("qwen3_5_text", "kimi_linear", "falcon_h1", "lfm2")
"""One family for each kind of recurrence."""
FAST_KINDS = [
    pytest.param(kind, marks=pytest.mark.on_demand if kind == "kimi_linear" else [])  # its scan is slow on CPUs
    for kind in KINDS
]
FAMILIES = (*KINDS, "qwen3_next", "qwen3_5_moe_text", "nemotron_h", "granitemoehybrid", "lfm2_moe")
GROUPS = [(5, [3, 66, 3]), (2, [4]), (9, [1, 1]), (1, [2, 6])]
"""Prompt and response lengths. One sequence is longer than a chunk of transformers' scans, 64 tokens."""
Gradients = dict[str, Tensor]


def make_model(kind: str, dtype: torch.dtype = torch.float64) -> Any:
    model: Any = tiny_family(kind, AutoModelForCausalLM)
    model.to(dtype)
    model.set_experts_implementation("eager")  # the default has no kernel for float64
    model.set_attn_implementation("eager")
    return model


def compute_logprobs(model: LogprobModel, batch: TrainBatch, share: bool = False) -> Tensor:
    shared = batch.shared_prompt_lengths() if share else None
    tensors = batch.input_ids, batch.position_ids, batch.offsets, batch.temperature, batch.loss_mask
    return model(*tensors, False, shared).logprobs


def logprobs_alone(model: PreTrainedModel, batch: TrainBatch) -> Tensor:
    """Return log-probs [T] of transformers' own forward for each sequence."""
    return torch.cat([padded_scores(model, batch.select([index]))[0] for index in range(len(batch))])


def loss_of(logprobs: Tensor, batch: TrainBatch) -> Tensor:
    return (logprobs * torch.sin(batch.input_ids.double() + batch.position_ids)).sum()


def take_gradients(model: nn.Module) -> Gradients:
    gradients = {
        name.removeprefix("model.") if isinstance(model, LogprobModel) else name: parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    model.zero_grad()
    return gradients


def packed_gradients(model: LogprobModel, batches: list[TrainBatch], share: bool = False) -> Gradients:
    for batch in batches:
        loss_of(compute_logprobs(model, batch, share), batch).backward()
    return take_gradients(model)


def reference_gradients(model: PreTrainedModel, batch: TrainBatch) -> tuple[Tensor, Gradients]:
    """Return log-probs and gradients of each sequence alone, with recurrences by their definitions."""
    with reference_recurrences(model):
        logprobs = logprobs_alone(model, batch)
        loss_of(logprobs, batch).backward()
    return logprobs.detach(), take_gradients(model)


@pytest.mark.parametrize("kind", FAMILIES)
def test_packed_gradients_equal_definition(kind: str) -> None:
    batch = grouped_batch(GROUPS)
    with double_precision():
        model = make_model(kind)
        expected, expected_gradients = reference_gradients(model, batch)
        packed = LogprobModel(model)
        for share in (False, True):
            logprobs = compute_logprobs(packed, batch, share)
            torch.testing.assert_close(logprobs, expected, rtol=0, atol=1e-9)
            loss_of(logprobs, batch).backward()
            assert_same_tensors(take_gradients(packed), expected_gradients, case=f"{share=}")


@pytest.mark.parametrize("kind", KINDS)
def test_micro_batches_do_not_change_gradients(kind: str) -> None:
    batch = grouped_batch(GROUPS)
    with double_precision():
        packed = LogprobModel(make_model(kind))
        expected = packed_gradients(packed, [batch])
        shuffled = batch.select([3, 0, 6, 2, 5, 1, 4, 7])
        for micro_batches, share in (
            (batch.split_micro_batches(max_sequences=1), False),
            (batch.split_micro_batches(max_sequences=3), True),
            (shuffled.split_micro_batches(token_budget=20), True),
        ):
            assert_same_tensors(packed_gradients(packed, micro_batches, share), expected)


@pytest.mark.parametrize("kind", FAMILIES)
def test_float32_equals_each_sequence_alone(kind: str) -> None:
    batch, model = grouped_batch(GROUPS), make_model(kind, torch.float32)
    with torch.no_grad():
        expected = logprobs_alone(model, batch)
        for share in (False, True):
            logprobs = compute_logprobs(LogprobModel(model), batch, share)
            torch.testing.assert_close(logprobs, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("kind", FAST_KINDS)
def test_checkpointed_layers_keep_their_sequences(kind: str, reentrant: bool) -> None:
    first, second = grouped_batch(GROUPS[:1]), grouped_batch(GROUPS[1:], seed=1)
    with double_precision():
        packed = LogprobModel(make_model(kind))
        expected = packed_gradients(packed, [first, second])
        packed.model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        packed.model.enable_input_require_grads()
        packed.train()
        losses = [loss_of(compute_logprobs(packed, batch, share=True), batch) for batch in (first, second)]
        for loss in losses:  # the first loss recomputes its layers after the forward pass of the second
            loss.backward()
        assert_same_tensors(take_gradients(packed), expected)


@pytest.mark.parametrize("kind", FAST_KINDS)
def test_adapters_get_exact_gradients(kind: str) -> None:
    batch = grouped_batch(GROUPS)
    with double_precision():
        model = make_model(kind)
        adapters = LoraAdapters(model, LoraConfig(rank=2, alpha=4, target_modules="all-linear"), "lora")
        mixers = {path for path, _ in model.named_modules() if path in get_recurrent_mixers(model)}
        assert mixers
        assert all(any(layer.startswith(mixer) for layer in adapters.layers) for mixer in mixers)
        model.double()
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                nn.init.normal_(parameter, std=0.1)
        _, expected = reference_gradients(model, batch)
        assert_same_tensors(packed_gradients(LogprobModel(model), [batch], share=True), expected)


@pytest.mark.parametrize(
    ("kind", "function"),
    [
        ("qwen3_5_text", "torch_chunk_gated_delta_rule"),
        ("qwen3_5_text", "causal_conv1d_fn"),
        ("kimi_linear", "chunk_kimi_delta_attention"),
        ("kimi_linear", "causal_conv1d_fn"),
        ("falcon_h1", "mamba2_chunk_scan"),
        ("falcon_h1", "causal_conv1d_fn"),
        ("lfm2", "causal_conv1d_fn"),
    ],
)
def test_leaking_state_is_detected(kind: str, function: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = make_model(kind, torch.float32), grouped_batch(GROUPS)
    packed = LogprobModel(model)
    mixer = next(iter(get_recurrent_mixers(model).values()))
    namespace = sys.modules[type(mixer.module).__module__]
    plain = getattr(namespace, function).__wrapped__

    def run_as_one_sequence(*args: Any, **kwargs: Any) -> Any:
        return plain(*args, **kwargs)

    run_as_one_sequence._is_exact = True  # type: ignore[attr-defined]
    with torch.no_grad():
        expected = compute_logprobs(packed, batch)
        monkeypatch.setattr(namespace, function, run_as_one_sequence)
        assert float((compute_logprobs(packed, batch) - expected).abs().max()) > 1e-3
    with pytest.raises(ConfigError, match="see each other"):
        LogprobModel(model)


class BatchedProducts(TorchDispatchMode):
    """A mode that records the dtypes of batched matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket is torch.ops.aten.bmm:
            self.dtypes.add(result.dtype)
        return result


@pytest.mark.parametrize("kind", ["qwen3_5_text", "kimi_linear", "granitemoehybrid"])
def test_scans_keep_float32_under_autocast(kind: str) -> None:
    packed = LogprobModel(tiny_model(kind, layers=1))  # without attention: only scans have batched products
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), BatchedProducts() as products:
        compute_logprobs(packed, grouped_batch(GROUPS))
    assert products.dtypes == {torch.float32}


def test_cpu_runs_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """With fla-core installed, transformers would run its Triton kernels on CPUs, too."""
    model, batch = make_model("qwen3_5_text", torch.float32), grouped_batch(GROUPS)
    namespace: Any = modeling_qwen3_5
    with torch.no_grad():
        expected = logprobs_alone(model, batch)
    for name in ("torch_chunk_gated_delta_rule", "causal_conv1d_fn"):

        @wraps(unwrap(getattr(namespace, name)))
        def kernel(*_: Any, **__: Any) -> None:
            raise RuntimeError("0 active drivers")

        monkeypatch.setattr(namespace, name, kernel)
    with pytest.raises(RuntimeError, match="active drivers"):
        logprobs_alone(model, batch)
    packed = LogprobModel(model)
    with torch.no_grad():
        torch.testing.assert_close(compute_logprobs(packed, batch), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["qwen3_next", "qwen3_5_moe_text", "kimi_linear"])
def test_routing_replay_is_exact(kind: str) -> None:
    batch = grouped_batch(GROUPS)
    with double_precision():
        packed = LogprobModel(make_model(kind))
        packed.routers.check_routers_supported(packed.model, "rollout", 0.1)
        packed.routers.record_routed_experts = True
        expected = packed_gradients(packed, [batch], share=True)
        routed = packed.routed_experts
        assert routed is not None
        shared = batch.shared_prompt_lengths()
        tensors = batch.input_ids, batch.position_ids, batch.offsets, batch.temperature, batch.loss_mask
        loss_of(packed(*tensors, False, shared, routed).logprobs, batch).backward()
        assert_same_tensors(take_gradients(packed), expected)
        other = (routed + 1) % packed.routers.modules[0].num_experts
        loss_of(packed(*tensors, False, shared, other).logprobs, batch).backward()
        replayed = packed.routed_experts
        assert replayed is not None
        assert torch.equal(replayed, other)


@pytest.mark.parametrize("group", [SequenceParallel, TensorParallel])
@pytest.mark.parametrize("kind", KINDS)
def test_parallel_groups_are_refused(kind: str, group: Any) -> None:
    ranks = make_meta_group(group, 2, "trainer.policy.parallel_size")
    with pytest.raises(ConfigError, match=r"recurrent state .* Set trainer.policy.parallel_size to 1"):
        LogprobModel(make_model(kind, torch.float32), parallel_group=ranks)


@pytest.mark.parametrize("kind", ["minimax", "jamba", "mamba2"])
def test_unknown_recurrences_are_refused(kind: str) -> None:
    with pytest.raises(ConfigError, match="layers of the types"):
        check_padding_free(tiny_family(kind, AutoModelForCausalLM))


@pytest.mark.parametrize("groups", [GROUPS, [(4, [0, 3, 0]), (3, [0, 0])], [(3, [4]), (3, [4])]])
def test_sequences_repeat_shared_prompts(groups: list[tuple[int, list[int]]]) -> None:
    batch = grouped_batch(groups)
    layout = SharedPromptLayout.from_offsets(batch.offsets, batch.shared_prompt_lengths())
    sequences = layout.segments.sequences
    row = batch.input_ids[layout.token_indices].unsqueeze(1).double()
    unpacked = sequences.unpack(row)
    assert torch.equal(sequences.pack(unpacked), row)
    tokens = [part.flatten().long().tolist() for part in unpacked.split(list(sequences.lengths))]
    own = [part.tolist() for part in batch.input_ids.split(batch.offsets.diff().tolist())]
    prompts = [ids[:length] for ids, length in zip(own, batch.prompt_lengths.tolist(), strict=True)]
    with_response = [ids for ids, prompt in zip(own, prompts, strict=True) if ids != prompt]
    without = {tuple(prompt) for prompt in prompts if not any(ids[: len(prompt)] == prompt for ids in with_response)}
    assert sorted(tokens) == sorted([*with_response, *map(list, without)])
    assert sequences.offsets.tolist() == [0, *torch.tensor(sequences.lengths).cumsum(0).tolist()]


def test_row_without_shared_prompts_is_unchanged() -> None:
    sequences = Segments.from_offsets(torch.tensor([0, 3, 3, 5])).sequences
    assert sequences.lengths == (3, 2)
    assert isinstance(sequences, PackedSequences)
    row = torch.randn(5, 2)
    assert sequences.pack(sequences.unpack(row)) is row


@pytest.mark.on_demand
@pytest.mark.parametrize("kind", KINDS)
def test_compiled_layers_are_exact(kind: str) -> None:
    batch, packed = grouped_batch(GROUPS), LogprobModel(make_model(kind, torch.float32))
    with torch.no_grad():
        expected = compute_logprobs(packed, batch)
        compile_layers(packed, "cpu")
        torch.testing.assert_close(compute_logprobs(packed, batch), expected, rtol=1e-4, atol=1e-4)
