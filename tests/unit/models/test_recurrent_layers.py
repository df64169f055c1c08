from __future__ import annotations

import gc
import sys
from functools import wraps
from importlib.metadata import distributions
from importlib.util import find_spec
from inspect import unwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.falcon_h1 import modeling_falcon_h1
from transformers.models.qwen3_5 import modeling_qwen3_5

from skyrl_train.config.schema import LoraConfig
from skyrl_train.data.batch import TrainBatch
from skyrl_train.errors import ConfigError
from skyrl_train.models import recurrent_layers
from skyrl_train.models.compiled_layers import compile_layers
from skyrl_train.models.logprob_model import LogprobModel
from skyrl_train.models.lora import LoraAdapters
from skyrl_train.models.padding_free import check_padding_free
from skyrl_train.models.parallel_group import make_meta_group
from skyrl_train.models.ragged_attention import PackedSequences, Segments
from skyrl_train.models.recurrent_kernels import has_kernels
from skyrl_train.models.recurrent_layers import get_recurrent_mixers, replace_recurrent_functions
from skyrl_train.models.sequence_parallel import SequenceParallel
from skyrl_train.models.shared_prompts import SharedPromptLayout
from skyrl_train.models.tensor_parallel import TensorParallel
from skyrl_train.testing.tiny_models import tiny_model
from tests.support.double_precision import double_precision
from tests.support.padded_reference import assert_same_tensors, grouped_batch, padded_scores
from tests.support.recurrences import mamba2_scan, reference_recurrences
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
    return model(model.lay_out(batch, batch.shared_prompt_lengths() if share else None)).logprobs


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


@pytest.mark.parametrize("limit", [(0.0, float("inf")), (0.01, 0.7), None])
def test_bfloat16_time_steps_are_not_rounded(limit: tuple[float, float] | None) -> None:
    model = make_model("falcon_h1", torch.bfloat16)
    replace_recurrent_functions(model)
    heads, size = 2, 16
    x, steps, B, C = (torch.randn(1, 9, *shape).bfloat16() for shape in ((heads, size), (heads,), (1, 8), (1, 8)))
    A, D, bias = -torch.rand(heads), torch.ones(heads), torch.randn(heads).bfloat16()
    options: dict[str, Any] = {"D": D, "dt_bias": bias, "return_final_states": True}
    exact, exact_state = mamba2_scan(x.double(), steps, A, B, C, **options, dt_limit=limit or (0.0, float("inf")))
    output, last = modeling_falcon_h1.mamba2_chunk_scan(
        x, steps, A, B, C, **options, dt_limit=limit, chunk_size=4, dt_softplus=True
    )
    torch.testing.assert_close(output.double(), exact, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(last.double(), exact_state, rtol=1e-5, atol=1e-5)

    mixer = next(iter(get_recurrent_mixers(model).values()))
    state = torch.zeros(1, heads, size, 8)
    wide = [vector[:, None].expand(-1, size) for vector in (D, bias)]

    def decode(**_: Any) -> Tensor:
        for t in range(9):
            per_channel = steps[:, t, :, None].expand(-1, -1, size)
            matrix = A[:, None, None].expand(-1, size, 8)
            modeling_falcon_h1.mamba2_selective_state_update(
                state, x[:, t], per_channel, matrix, B[:, t], C[:, t], wide[0], dt_bias=wide[1], dt_softplus=True
            )
        return state

    mixer.module.time_step_limit, mixer.original_forward = limit, decode
    mixer.run_unpacked(x)
    torch.testing.assert_close(state.double(), exact_state, rtol=1e-5, atol=1e-5)


def test_null_time_step_limit_means_none() -> None:
    model, batch = make_model("granitemoehybrid", torch.float32), grouped_batch(GROUPS)
    packed = LogprobModel(model)
    with torch.no_grad():
        expected = compute_logprobs(packed, batch)
        for mixer in get_recurrent_mixers(model).values():
            assert tuple(mixer.module.time_step_limit) == (0.0, float("inf"))
            mixer.module.time_step_limit = None
        assert torch.equal(compute_logprobs(packed, batch), expected)


def live_segments() -> list[Segments]:
    gc.collect()
    return [value for value in gc.get_objects() if type(value) is Segments]  # isinstance reads __class__, and some warn


def test_segments_are_freed_after_backward() -> None:
    packed, batch = LogprobModel(make_model("lfm2", torch.float32)), grouped_batch(GROUPS)
    packed.model.gradient_checkpointing_enable({"use_reentrant": False})
    packed.train()
    before = {id(segments) for segments in live_segments()}
    loss_of(compute_logprobs(packed, batch, share=True), batch).backward()
    assert not [segments for segments in live_segments() if id(segments) not in before]


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

    run_as_one_sequence._is_replacement = True  # type: ignore[attr-defined]
    with torch.no_grad():
        expected = compute_logprobs(packed, batch)
        monkeypatch.setattr(namespace, function, run_as_one_sequence)
        assert float((compute_logprobs(packed, batch) - expected).abs().max()) > 1e-3
    with pytest.raises(ConfigError, match="see each other"):
        LogprobModel(model)


def test_state_lost_between_chunks_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    run_each = recurrent_layers._run_each

    def forget_after_64_tokens(function: Any, sequences: PackedSequences, *others: Any) -> Any:
        parts = [part for length in sequences.lengths for part in (min(length, 64), length - 64) if part > 0]
        return run_each(function, PackedSequences.from_lengths(parts, sequences.offsets.device), *others)

    monkeypatch.setattr(recurrent_layers, "_run_each", forget_after_64_tokens)
    with pytest.raises(ConfigError, match="computes other hidden states without padding"):
        LogprobModel(make_model("qwen3_5_text", torch.float32))


@pytest.mark.parametrize("kind", KINDS)
def test_body_must_pass_boundaries_to_mixers(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(kind, torch.float32)
    path, mixer = next(iter(get_recurrent_mixers(model).items()))
    layer = type(model.get_submodule(path.rpartition(".")[0]))
    plain_call = layer.__call__

    def call_without_boundaries(module: Any, *args: Any, **kwargs: Any) -> Any:
        if any(type(child) is type(mixer.module) for child in module.children()):
            kwargs.pop("ragged_segments", None)
        return plain_call(module, *args, **kwargs)

    monkeypatch.setattr(layer, "__call__", call_without_boundaries)
    with pytest.raises(ConfigError, match=f"{type(mixer.module).__name__}, so that these do not know where the seq"):
        check_padding_free(model)


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


@pytest.mark.parametrize("kind", ["qwen3_5_text", "kimi_linear", "granitemoehybrid"])
def test_packing_one_sequence_keeps_its_bits(kind: str) -> None:
    """Engines, which do not pack, and the learner compute the same chunks."""
    body: Any = LogprobModel(tiny_model(kind, layers=1)).model.base_model  # without attention
    ids = torch.arange(140).unsqueeze(0)
    with torch.no_grad():
        alone = body(input_ids=ids, position_ids=ids, use_cache=False)
        segments = Segments(torch.tensor([0, 140], dtype=torch.int32), (140,))
        packed = body(
            input_ids=ids, position_ids=ids, use_cache=False, ragged_segments=segments, sequence_parallel=None
        )
    assert torch.equal(packed.last_hidden_state, alone.last_hidden_state)


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


def test_other_package_named_fla_is_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    is_installed = any(found.name == "fla-core" for found in distributions())
    (tmp_path / "fla").mkdir()
    (tmp_path / "fla" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert find_spec("fla") is not None
    has_kernels.cache_clear()
    assert has_kernels() == is_installed


@pytest.mark.parametrize("kind", ["qwen3_next", "qwen3_5_moe_text", "granitemoehybrid", "kimi_linear"])
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
        loss_of(packed(packed.lay_out(batch, shared, routed)).logprobs, batch).backward()
        assert_same_tensors(take_gradients(packed), expected)
        other = (routed + 1) % packed.routers.modules[0].num_experts
        loss_of(packed(packed.lay_out(batch, shared, other)).logprobs, batch).backward()
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
    with pytest.raises(ConfigError, match=r"layers of the types .* would depend on other sequences"):
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
    assert sorted(tokens) == sorted(own)
    assert list(sequences.lengths) == sorted(sequences.lengths)
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
