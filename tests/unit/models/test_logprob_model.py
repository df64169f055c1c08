from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionMaskInterface, AutoConfig, AutoModelForCausalLM, PreTrainedModel, Qwen2ForCausalLM

from skyrl_train.data.batch import TrainBatch
from skyrl_train.errors import ConfigError
from skyrl_train.models import ragged_attention
from skyrl_train.models.logprob_model import CACHED_CHUNKS, LogprobModel, TokenLogprobs, chunk_bytes
from skyrl_train.models.padding_free import check_padding_free
from skyrl_train.testing.tiny_models import tiny_model
from tests.support.double_precision import double_precision
from tests.support.padded_reference import assert_same_tensors, grouped_batch, padded_scores, ragged_batch

KINDS = ("qwen2", "qwen3", "llama", "gemma", "mistral")
LENGTHS = (9, 4, 12, 9, 2, 7, 9)
TEMPERATURES = (1.0, 0.7, 1.0, 1.3, 1.0, 0.5, 2.0)
Gradients = dict[str, Tensor]


@pytest.fixture(autouse=True)
def _exact_double() -> Iterator[None]:
    with double_precision():
        yield


def make_batch() -> TrainBatch:
    return ragged_batch(LENGTHS, temperatures=TEMPERATURES)


def compute_logprobs(
    model: LogprobModel, batch: TrainBatch, compute_entropy: bool = False, share: bool = False
) -> TokenLogprobs:
    return model(model.lay_out(batch, batch.shared_prompt_lengths() if share else None), compute_entropy)


def double_model(kind: str = "qwen2", **options: Any) -> Any:
    return tiny_model(kind, dtype=torch.float64, **options).eval()


def reference_attention(kind: str) -> str:
    """Return an attention implementation of transformers that computes the model exactly.

    Fused ones support neither capped scores nor sinks.
    """
    return "eager" if kind in ("gemma2", "gpt_oss") else "sdpa"


def token_weights(batch: TrainBatch) -> Tensor:
    """Return a weight that follows the token wherever it is in a batch, like an advantage over a global denominator."""
    return torch.sin(batch.input_ids.double() + batch.position_ids)


def padded_gradients(model: PreTrainedModel, batch: TrainBatch, attention: str = "sdpa") -> Gradients:
    model.set_attn_implementation(attention)
    model.set_experts_implementation("eager")  # the default has no kernel for float64
    logprobs, entropy = padded_scores(model, batch)
    ((logprobs + 0.1 * entropy) * token_weights(batch)).sum().backward()
    gradients = get_gradients(model)
    model.zero_grad()
    return gradients


def get_gradients(module: nn.Module) -> Gradients:
    gradients = {}
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None, name
        gradients[name.removeprefix("model.") if isinstance(module, LogprobModel) else name] = parameter.grad.clone()
    return gradients


def ragged_gradients(model: LogprobModel, micro_batches: list[TrainBatch], share: bool = False) -> Gradients:
    model.zero_grad()
    for batch in micro_batches:
        logprobs, entropy = compute_logprobs(model, batch, compute_entropy=True, share=share)
        assert entropy is not None
        ((logprobs + 0.1 * entropy) * token_weights(batch)).sum().backward()
    return get_gradients(model)


@pytest.mark.parametrize("kind", [*KINDS, "gpt_oss", "deepseek_v3"])
def test_gradients_equal_padded_ones(kind: str) -> None:
    batch, model = make_batch(), double_model(kind)
    expected = padded_gradients(model, batch, reference_attention(kind))
    logprob_model = LogprobModel(model)
    for size in (1, 2, 5, len(batch)):
        assert_same_tensors(ragged_gradients(logprob_model, batch.split_micro_batches(max_sequences=size)), expected)
    shuffled = batch.select([3, 0, 6, 2, 5, 1, 4])
    assert_same_tensors(ragged_gradients(logprob_model, shuffled.split_micro_batches(max_sequences=2)), expected)
    assert_same_tensors(ragged_gradients(logprob_model, shuffled.split_micro_batches(token_budget=20)), expected)


@pytest.mark.parametrize(
    "kind",
    [
        *KINDS,
        "gemma3_text",
        "phi",
        "phi3",
        "granite",
        "cohere",
        "cohere2",
        "olmo2",
        "smollm3",
        "starcoder2",
        "gpt_neox",
    ],
)
def test_logprobs_and_entropies_equal_padded_ones(kind: str) -> None:
    batch, model = make_batch(), double_model(kind)
    model.set_attn_implementation("sdpa")
    with torch.no_grad():
        logprobs, entropy = padded_scores(model, batch)
        result = compute_logprobs(LogprobModel(model), batch, compute_entropy=True)
    torch.testing.assert_close(result.logprobs, logprobs, rtol=0, atol=1e-9)
    torch.testing.assert_close(result.entropy, entropy, rtol=0, atol=1e-9)


@pytest.mark.parametrize("kind", ["mistral", "gemma2", "gemma3_text", "qwen2", "gpt_oss", "qwen2_moe", "phimoe"])
def test_sliding_windows_and_softcaps_are_exact(kind: str) -> None:
    model = double_model(kind)
    changed: dict[str, Any] = {"sliding_window": 3}
    if kind.startswith("qwen2"):
        changed |= {"use_sliding_window": True, "max_window_layers": 0, "layer_types": ["sliding_attention"] * 2}
    config = type(model.config)(**{**model.config.to_dict(), **changed, "attention_dropout": 0.0})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()
    model.set_experts_implementation("eager")
    model.set_attn_implementation("eager")  # the only implementation of transformers that caps scores
    batch = make_batch()
    with torch.no_grad():
        logprobs, _ = padded_scores(model, batch)
        actual = compute_logprobs(LogprobModel(model), batch).logprobs
    torch.testing.assert_close(actual, logprobs, rtol=0, atol=1e-9)


def test_ignored_window_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        AttentionMaskInterface._global_mapping, ragged_attention.RAGGED_ATTENTION_NAME, lambda **_: None
    )
    config = tiny_model("qwen2_moe").config
    windowed: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 4096}
    windowed["layer_types"] = ["full_attention", "sliding_attention"]
    model = AutoModelForCausalLM.from_config(type(config)(**{**config.to_dict(), **windowed}))
    with pytest.raises(ConfigError, match="computes other hidden states without padding than with its own attention"):
        LogprobModel(model)
    assert model.config.sliding_window == model.model.layers[1].self_attn.sliding_window == 4096


@pytest.mark.parametrize("kind", ["phimoe", "mixtral"])
def test_updates_have_no_router_jitter(kind: str) -> None:
    model = tiny_model(kind)
    config = type(model.config)(**{**model.config.to_dict(), "router_jitter_noise": 0.3, "input_jitter_noise": 0.3})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()
    model.set_experts_implementation("eager")
    logprob_model, batch = LogprobModel(model), make_batch()
    evaluated = compute_logprobs(logprob_model, batch).logprobs
    logprob_model.train()
    for _ in range(2):
        torch.testing.assert_close(compute_logprobs(logprob_model, batch).logprobs, evaluated, rtol=0, atol=1e-9)


@pytest.mark.parametrize("kind", [*KINDS, "gemma2", "gemma3_text", "qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_shared_prompts_keep_the_padded_gradient(kind: str) -> None:
    batch = grouped_batch([(6, [4, 9, 4, 1]), (3, [2]), (11, [5, 5])])
    model = double_model(kind)
    expected = padded_gradients(model, batch, reference_attention(kind))
    logprob_model = LogprobModel(model)
    for size in (1, 3, len(batch)):
        assert_same_tensors(
            ragged_gradients(logprob_model, batch.split_micro_batches(max_sequences=size), share=True), expected
        )


def test_shared_prompts_run_once() -> None:
    batch, model = grouped_batch([(6, [4, 9, 4]), (3, [2])]), LogprobModel(double_model())
    lengths: list[int] = []
    model.model.model.layers[0].mlp.register_forward_hook(lambda module, inputs, _: lengths.append(inputs[0].shape[1]))
    compute_logprobs(model, batch)
    compute_logprobs(model, batch, share=True)
    assert lengths == [40, 40 - 2 * 6]


def test_autocast_gives_attention_one_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fused kernels require equal dtypes; rotary embeddings would leave queries and keys in float32."""
    model, dtypes = LogprobModel(tiny_model("qwen3")), []

    def record(query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any) -> Tensor:
        dtypes.append({query.dtype, key.dtype, value.dtype})
        return attend(query, key, value, *args, **options)

    attend = ragged_attention.ragged_attention
    monkeypatch.setattr(ragged_attention, "ragged_attention", record)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        compute_logprobs(model, make_batch())
    assert dtypes == [{torch.bfloat16}] * 2


def test_mixture_of_experts_logprobs_equal_padded_ones() -> None:
    batch, model = make_batch(), tiny_model("qwen3_moe").eval()
    model.set_attn_implementation("sdpa")
    with torch.no_grad():
        logprobs, _ = padded_scores(model, batch)
        torch.testing.assert_close(
            compute_logprobs(LogprobModel(model), batch).logprobs, logprobs, rtol=1e-4, atol=1e-4
        )


def test_chunk_size_does_not_change_gradients() -> None:
    batch, model = make_batch(), double_model()
    expected = ragged_gradients(LogprobModel(model), [batch])
    model_with_small_chunks = LogprobModel(model, chunk_bytes=3 * 4 * model.config.vocab_size)
    assert_same_tensors(ragged_gradients(model_with_small_chunks, [batch]), expected)


@pytest.mark.parametrize("cached_chunks", [0, 2])
def test_backward_recomputes_uncached_chunks(cached_chunks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CACHED_CHUNKS, "cpu", cached_chunks)
    batch, model = make_batch(), double_model()
    vocabulary = model.config.vocab_size
    logprob_model = LogprobModel(model, chunk_bytes=3 * 4 * vocabulary)
    saved_shapes: list[tuple[int, ...]] = []

    def record(tensor: Tensor) -> Tensor:
        saved_shapes.append(tuple(tensor.shape))
        return tensor

    with (
        LogitsRecorder(vocabulary) as forward_products,
        torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor),
    ):
        logprobs, entropy = compute_logprobs(logprob_model, batch, compute_entropy=True)
    assert entropy is not None
    assert saved_shapes
    cached = [shape for shape in saved_shapes if len(shape) > 1 and shape[-1] == vocabulary and shape[0] != vocabulary]
    assert cached == [(3, vocabulary)] * cached_chunks
    rows = int(batch.loss_mask.sum())
    assert sum(forward_products.rows) == rows  # the head runs only on target tokens
    with LogitsRecorder(vocabulary) as backward_products:
        (logprobs + entropy).sum().backward()
    assert sum(backward_products.rows) == rows - 3 * cached_chunks
    assert max(forward_products.rows + backward_products.rows) == 3


def test_chunk_size_depends_on_gpu_memory() -> None:
    h100 = (81559 << 20, 85_017_624_576)  # physical memory, and the memory available to programs
    assert {chunk_bytes("cuda", memory) for memory in h100} == {1 << 30}
    sizes = [chunk_bytes("cuda", memory << 30) for memory in (8, 24, 40, 141)]
    assert sizes == [1 << 28, 1 << 28, 1 << 29, 1 << 31]
    assert chunk_bytes("cuda", None) == 1 << 28
    assert chunk_bytes("cpu", 1 << 40) == chunk_bytes("cpu", None) == 1 << 26


class LogitsRecorder(TorchDispatchMode):
    """A mode that records the number of rows of every matrix product that is as wide as the vocabulary."""

    def __init__(self, vocabulary: int):
        super().__init__()
        self._vocabulary = vocabulary
        self.rows: list[int] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if "mm" in function.__name__ and result.shape[-1] == self._vocabulary:
            self.rows.append(result.shape[0])
        return result


def test_model_runs_without_padding() -> None:
    batch, model = make_batch(), double_model()
    logprob_model = LogprobModel(model)
    sizes: list[int] = []
    model.model.layers[0].mlp.register_forward_hook(lambda module, inputs, output: sizes.append(inputs[0].numel()))
    compute_logprobs(logprob_model, batch)
    assert sizes == [len(batch.input_ids) * model.config.hidden_size]


def test_temperature_zero_counts_as_one() -> None:
    batch, model = ragged_batch([5, 6], temperatures=[0.0, 0.0]), LogprobModel(double_model())
    at_one = ragged_batch([5, 6], temperatures=[1.0, 1.0])
    torch.testing.assert_close(
        compute_logprobs(model, batch).logprobs, compute_logprobs(model, at_one).logprobs, rtol=0, atol=0
    )


def test_batch_without_targets_has_zero_gradients() -> None:
    model = LogprobModel(double_model(tied=False))
    batch = ragged_batch([1]).with_tokens(loss_mask=torch.zeros(1, dtype=torch.bool))
    logprobs, entropy = compute_logprobs(model, batch, compute_entropy=True)
    assert logprobs.tolist() == [0.0]
    assert entropy is not None
    (logprobs.sum() + entropy.sum()).backward()
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradient_checkpointing_keeps_the_gradient(use_reentrant: bool) -> None:
    batch, model = make_batch(), double_model()
    expected = ragged_gradients(LogprobModel(model), [batch])
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    runs: list[int] = []
    model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: runs.append(1))
    logprob_model = LogprobModel(model).train()
    runs.clear()
    assert_same_tensors(ragged_gradients(logprob_model, [batch]), expected, tolerance=1e-12)
    assert len(runs) == 2  # once in forward and once in backward


def test_bfloat16_model_has_a_float32_softmax() -> None:
    batch, model = make_batch(), tiny_model(dtype=torch.bfloat16)
    logprobs, _ = compute_logprobs(LogprobModel(model), batch)
    assert logprobs.dtype == torch.float32
    exact, _ = compute_logprobs(LogprobModel(tiny_model()), batch)
    assert float((logprobs - exact).detach().abs().max()) < 0.5


def test_parameters_have_checkpoint_names() -> None:
    model = tiny_model()
    names = [name for name, _ in model.named_parameters()]
    logprob_model = LogprobModel(model)
    assert [logprob_model.hf_name(name) for name, _ in logprob_model.named_parameters()] == names
    assert len(logprob_model.decoder_layers()) == model.config.num_hidden_layers


def test_first_token_cannot_be_a_target() -> None:
    batch = ragged_batch([3, 3])
    with pytest.raises(AssertionError, match="first token"):
        compute_logprobs(LogprobModel(double_model()), batch.with_tokens(loss_mask=batch.position_ids == 0))


class SquaredLogits(Qwen2ForCausalLM):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.logits = output.logits.square()
        return output


def leaky_model(shift: Callable[[Tensor], Tensor]) -> PreTrainedModel:
    """Return a model that adds to every hidden state that of the previous token, of whichever sequence."""
    model = tiny_model()
    model.model.layers[0].mlp.register_forward_hook(lambda module, inputs, output: output + shift(output))
    return model


class ScaledStates(Qwen2ForCausalLM):
    """A model that scales its last hidden states before the head, as MiniCPM3 does."""

    def __init__(self, config: Any):
        super().__init__(config)
        self.lm_head.register_forward_pre_hook(lambda module, inputs: (inputs[0] / 2.0,))


def model_that_counts_tokens() -> PreTrainedModel:
    """Return a model whose first layer adds the index of each token in its row."""
    model = tiny_model()
    model.model.layers[0].mlp.register_forward_hook(
        lambda module, inputs, output: output + torch.arange(output.shape[1], device=output.device)[:, None]
    )
    return model


def model_with_dropout() -> PreTrainedModel:
    model = tiny_model()
    model.config.attention_dropout = 0.1
    return model


def model_with_rope(kind: str) -> PreTrainedModel:
    config = tiny_model().config
    config.rope_parameters = {**config.rope_parameters, "rope_type": kind, "factor": 2.0}
    return Qwen2ForCausalLM(config)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SquaredLogits(tiny_model().config), "changes its logits after the head"),
        (lambda: ScaledStates(tiny_model().config), r"changes its last hidden states before the head \(div\)"),
        (
            lambda: leaky_model(lambda states: states.roll(1, dims=1)),
            "DecoderLayer combines different tokens .* with roll",
        ),
        (lambda: leaky_model(lambda states: states.cumsum(1)), "DecoderLayer combines different tokens .* with cumsum"),
        (lambda: leaky_model(lambda states: states[:, :1]), "DecoderLayer combines different tokens .* with slice"),
        (lambda: leaky_model(lambda states: states.mean(1, keepdim=True)), "combines different tokens .* with mean"),
        # Values decide which operations run, so only the check with real weights finds it.
        (lambda: leaky_model(lambda states: torch.tensor(states.tolist()).roll(1, dims=1)), "see each other"),
        (model_that_counts_tokens, "Qwen2DecoderLayer numbers the tokens of a row itself"),
        (model_with_dropout, "drops activations at random"),
        (lambda: model_with_rope("dynamic"), "rope type 'dynamic'"),
        (lambda: tiny_model("bloom"), "attention interface"),
        (lambda: tiny_model("opt"), "it does not call this body"),
        (lambda: tiny_model("minimax"), r"layers of the types \['linear_attention'\]"),
    ],
)
def test_unsupported_model_is_rejected(make: Callable[[], PreTrainedModel], message: str) -> None:
    model = make()
    with pytest.raises(ConfigError, match=message):
        LogprobModel(model)


@pytest.mark.parametrize("kind", ["qwen3_moe", "qwen3_5_text"])
def test_check_does_not_change_the_model(kind: str) -> None:
    model = tiny_model(kind)
    modules = [
        (name, module, dict(module._forward_hooks), dict(vars(module))) for name, module in model.named_modules()
    ]
    attention, experts = model.config._attn_implementation, model.config._experts_implementation
    check_padding_free(model)
    assert (model.config._attn_implementation, model.config._experts_implementation) == (attention, experts)
    for name, module, hooks, attributes in modules:
        assert vars(module) == attributes, name
        assert module._forward_hooks == hooks, name
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def test_sequences_beyond_learned_positions_are_rejected() -> None:
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = AutoConfig.for_model("gpt2", n_embd=32, n_layer=1, n_head=2, vocab_size=320, n_positions=10, **no_dropout)
    model = LogprobModel(AutoModelForCausalLM.from_config(config))
    compute_logprobs(model, ragged_batch([10, 3]))
    with pytest.raises(ConfigError, match="11 tokens, but this model has embeddings of 10 positions"):
        compute_logprobs(model, ragged_batch([11, 3]))


def test_longrope_is_rejected_beyond_its_original_length() -> None:
    config = tiny_model("llama").config
    factors = [1.0] * (config.head_dim // 2)
    config.rope_parameters = {
        **{"rope_theta": 1e4, "rope_type": "longrope", "short_factor": factors, "long_factor": factors},
        **{"original_max_position_embeddings": 8, "factor": 2.0},
    }
    model = LogprobModel(type(tiny_model("llama"))(config))
    compute_logprobs(model, ragged_batch([8, 3]))
    with pytest.raises(ConfigError, match="9 tokens"):
        compute_logprobs(model, ragged_batch([9, 3]))
