"""Log-probs and entropies of given tokens under a causal language model, for the ragged batch.

Legend: T tokens of all sequences, B sequences, N target tokens, V vocabulary, L layers with experts, k experts for each
token. Target tokens are those whose log-probs are computed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from skyrl_train.errors import ConfigError
from skyrl_train.models.expert_parallel import ExpertParallel
from skyrl_train.models.logits import LogitTransform
from skyrl_train.models.model_inputs import ModelInputs
from skyrl_train.models.padding_free import (
    LastHiddenStateOutput,
    OperationRecorder,
    check_padding_free,
    is_meta_value_error,
    patch_model,
)
from skyrl_train.models.parallel_group import ParallelGroup
from skyrl_train.models.pretrained_weights import PretrainedWeights
from skyrl_train.models.ragged_model import (
    RaggedModel,
    get_lm_head,
    is_close,
    verify_and_shard,
)
from skyrl_train.models.sampled_logprobs import sampled_logprobs
from skyrl_train.models.temporary_weights import temporarily_materialized

MIN_CHUNK_BYTES = {"cpu": 1 << 26, "cuda": 1 << 28}
"""Minimum size of one chunk's float32 logits, in bytes, by device type.

On a CPU it is the size of a chunk: a hundred rows of a vocabulary of 150,000. For GPUs see `chunk_bytes`.
"""

CACHED_CHUNKS = {"cpu": 8, "cuda": 1}
"""Number of chunks whose probabilities are kept for backward instead of recomputed, by device type.

CPUs have more memory than arithmetic.
"""


def chunk_bytes(device: str, memory: int | None) -> int:
    """Return the size of one chunk's float32 logits in bytes.

    A chunk costs a pass over the weight's gradient, which is as large as thousands of rows of logits. On a GPU a chunk
    therefore has a 64th of the memory. It is rounded down to a power of two, so that GPUs of one model, whose memory
    differs a little, sum in the same order.

    Args:
        device: "cpu" or "cuda".
        memory: The device's memory in bytes; None if unknown.
    """
    minimum = MIN_CHUNK_BYTES[device]
    return minimum if device == "cpu" or not memory else max(minimum, 1 << ((memory // 64).bit_length() - 1))


class TokenLogprobs(NamedTuple):
    """Log-probs and entropies, both [T], and 0 for tokens outside the target mask."""

    logprobs: Tensor
    """Log-prob of each token given the tokens before it in its sequence, at the sequence's temperature; nats."""
    entropy: Tensor | None
    """Entropy of the distribution that each token was drawn from, nats; None unless requested."""


class LogprobModel(RaggedModel):
    """The root module that strategies shard: a causal language model that computes log-probs of target tokens.

    It computes hidden states of all tokens, and applies the LM head to the states before target tokens. The head runs
    inside this module's forward, where sharded weights are gathered, and in chunks. CACHED_CHUNKS of them are kept for
    backward, and the others are recomputed, so no tensor of shape (tokens, vocabulary) ever exists. The softmax is at
    least float32.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        chunk_bytes: int | None = None,
        parallel_group: ParallelGroup | None = None,
        pretrained: PretrainedWeights | None = None,
        expert_parallel: ExpertParallel | None = None,
    ):
        """Wrap a causal language model.

        Args:
            model: A causal language model; it is switched to attention without padding.
            chunk_bytes: Size of one chunk's float32 logits; None for the default of the device, see `chunk_bytes`.
            parallel_group: See RaggedModel.
            pretrained: See RaggedModel.
            expert_parallel: See RaggedModel.

        Raises:
            ConfigError: The model cannot run without padding or in its parallel groups, or its logits cannot be
                reproduced.
        """
        super().__init__(model, parallel_group, pretrained, expert_parallel)
        self.chunk_bytes = chunk_bytes
        self._logit_transform = get_logit_transform(model.config.get_text_config())
        _check_around_head(model)
        with temporarily_materialized(self):
            _check_head(self)
        verify_and_shard(self)

    def head_parameters(self) -> list[Tensor]:
        """Return the parameters that forward reads without running their module."""
        head = get_lm_head(self.model)
        return [head.weight, *([] if head.bias is None else [head.bias])]

    def forward(self, inputs: ModelInputs, compute_entropy: bool = False) -> TokenLogprobs:
        """Return log-probs and, if requested, entropies of the target tokens.

        Even if there are no target tokens, the result has a (zero) gradient for every parameter: sharded models need
        the same backward on every rank.

        Args:
            inputs: The result of `lay_out`, on the model's device; see `copy_to_device`.
            compute_entropy: Also return entropies.
        """
        hidden, targets = self.hidden_before_targets(inputs), inputs.targets
        head: Any = self.model.get_output_embeddings()
        logprobs, entropy = sampled_logprobs(
            hidden,
            head.weight,
            head.bias,
            targets.input_ids,
            targets.temperature,
            self._logit_transform,
            self._chunk_rows(hidden),
            compute_entropy,
            CACHED_CHUNKS[hidden.device.type],
        )
        logprobs = self.scatter_to_tokens(logprobs, inputs)
        return TokenLogprobs(logprobs, self.scatter_to_tokens(entropy, inputs) if compute_entropy else None)

    def _chunk_rows(self, hidden: Tensor) -> int:
        memory = torch.cuda.get_device_properties(hidden.device).total_memory if hidden.is_cuda else None
        size = self.chunk_bytes or chunk_bytes(hidden.device.type, memory)
        return max(1, size // (4 * self.model.config.get_text_config().vocab_size))

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits [..., V] for hidden states [..., hidden size], at least float32, with the architecture's
        transform.
        """
        return self._logit_transform(self.model.get_output_embeddings()(hidden))


def check_model_supported(model: PreTrainedModel, *, values: bool = False) -> None:
    """Raise ConfigError for a model that a LogprobModel or ValueModel rejects, as far as a meta-device model shows it.

    The model is patched in place (see `patch_model`).

    Args:
        model: A causal language model, on any device.
        values: Check for a ValueModel, which has its own head, instead of a LogprobModel.
    """
    patch_model(model)
    check_padding_free(model)
    get_lm_head(model)
    if not values:
        _check_around_head(model)


def get_logit_transform(config: Any) -> LogitTransform:
    """Return the transform that a model with this text configuration applies to the outputs of its head."""
    return LogitTransform(
        factor=getattr(config, "logit_scale", None) or 1.0 / getattr(config, "logits_scaling", 1.0),
        softcap=getattr(config, "final_logit_softcapping", None),
    )


def _check_around_head(model: PreTrainedModel) -> None:
    """Check on the meta device the operations directly before and after the head. Raises ConfigError.

    The head must get the last hidden states, and logits must be the `get_logit_transform` of its outputs. Known numbers
    take the place of these outputs.
    """
    head, recorder = get_lm_head(model), OperationRecorder()
    changes_before_head: list[str] = []
    outputs = torch.linspace(-100.0, 100.0, head.out_features).view(1, 1, -1)
    hooks = (
        head.register_forward_pre_hook(lambda *_: changes_before_head.extend(recorder.changes)),
        head.register_forward_hook(lambda *_: outputs.clone()),
    )
    hidden = torch.zeros(1, 1, head.in_features, device="meta", dtype=head.weight.dtype)
    try:
        with recorder:
            logits = _logits_after(model, hidden)
    except RuntimeError:
        return  # it reads values, which meta tensors do not have: the check with real weights decides
    finally:
        for hook in hooks:
            hook.remove()
    if changes_before_head:
        raise ConfigError(
            _unknown_logits(model, "last hidden states", f"before the head ({', '.join(changes_before_head[:3])})")
        )
    expected = get_logit_transform(model.config.get_text_config())(outputs)
    if logits.is_meta or logits.shape != expected.shape or not is_close(logits.float(), expected, torch.float32):
        raise ConfigError(_unknown_logits(model, "logits", "after the head"))


def _unknown_logits(model: PreTrainedModel, changed: str, where: str) -> str:
    return (
        f"{type(model).__name__} changes its {changed} {where} in an unsupported way (supported: "
        "final_logit_softcapping, logit_scale, logits_scaling). Its log-probs would be wrong. Use another model."
    )


def _logits_after(model: PreTrainedModel, hidden: Tensor) -> Tensor:
    """Return the model's own logits [1, n, V] for last hidden states [1, n, hidden size].

    The model's body is replaced by these states for the duration of the call, so it costs only rows of the head.

    Raises:
        ConfigError: The model computes its logits from more than these states.
        RuntimeError: The model reads values on the meta device.
    """
    body = model.base_model
    ids = torch.zeros(hidden.shape[:2], dtype=torch.int64, device=hidden.device)
    calls: list[None] = []

    def states(*_: Any, **__: Any) -> LastHiddenStateOutput:
        calls.append(None)
        return LastHiddenStateOutput(last_hidden_state=hidden)  # type: ignore[arg-type]

    body.forward = states
    reason = "it does not call this body"
    try:
        with torch.no_grad():
            logits: Tensor = model(input_ids=ids, use_cache=False).logits
    except (AttributeError, ConfigError, KeyError, RuntimeError, TypeError, ValueError) as error:
        if hidden.is_meta and is_meta_value_error(error):
            raise
        reason = f"{type(error).__name__}: {error}" if calls else reason
    else:
        if calls:
            return logits
    finally:
        del body.forward
    raise ConfigError(
        f"{type(model).__name__} does not compute its logits from the last hidden states of its backbone alone "
        f"({reason}). Log-probs cannot be computed. Use a model of another architecture."
    )


def _check_head(logprob_model: LogprobModel) -> None:
    """Compare `LogprobModel.logits` with the model's own logits for the same hidden states. Raises ConfigError.

    It costs only a few rows of the head.
    """
    model, head = logprob_model.model, get_lm_head(logprob_model.model)
    noise = torch.randn(1, 4, head.in_features, generator=torch.Generator().manual_seed(0))
    sizes = torch.tensor([0.1, 1.0, 10.0, 100.0]).view(1, 4, 1)
    hidden: Any = (noise * sizes).to(head.weight.device, head.weight.dtype)
    expected = _logits_after(model, hidden)
    with torch.no_grad():
        computed = logprob_model.logits(hidden)
    if expected.shape != computed.shape or not is_close(expected.to(computed.dtype), computed, head.weight.dtype):
        raise ConfigError(_unknown_logits(model, "logits", "after the head"))
