"""Log-probabilities and entropies of chosen tokens under a causal language model, from the ragged batch.

Legend: T tokens of all sequences, B sequences, N tokens that are scored, V vocabulary.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from skyrl_train.errors import ConfigError
from skyrl_train.models.expert_parallel import ExpertParallel
from skyrl_train.models.logits import LogitTransform
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
"""Size of one chunk's float32 logits: a hundred rows of a vocabulary of 150,000 on a CPU; on a GPU at least four times
that, see `chunk_bytes`.
"""

CACHED_CHUNKS = {"cpu": 8, "cuda": 1}
"""How many chunks' probabilities are kept for backward instead of recomputed: CPUs have more memory than arithmetic."""


def chunk_bytes(device: str, memory: int | None) -> int:
    """The size of a chunk on a kind of device with so many bytes of memory (None if unknown).

    A chunk costs a pass over the weight's gradient, which is as large as thousands of rows of logits, so on a GPU it is
    a 64th of the memory. That is rounded down to a power of two: GPUs of one kind, whose memory differs a little, add
    up in the same order.
    """
    least = MIN_CHUNK_BYTES[device]
    return least if device == "cpu" or not memory else max(least, 1 << ((memory // 64).bit_length() - 1))


class TokenLogprobs(NamedTuple):
    """Both are [T], and 0 for tokens that were not scored."""

    logprobs: Tensor
    """nats, of the token given the tokens before it in its sequence, at the sequence's temperature."""
    entropy: Tensor | None
    """nats, of the distribution that the token was drawn from; None unless requested."""


class LogprobModel(RaggedModel):
    """The root module that strategies shard: hidden states of all tokens, then the LM head on the rows to score.

    The head runs inside this module's forward, where sharded weights are gathered, and in chunks: KEPT_CHUNKS of them
    are kept for backward, the others are recomputed. So no tensor of shape (tokens, vocabulary) ever exists. Softmax is
    at least float32. Raises ConfigError for a model whose logits it cannot reproduce.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        chunk_bytes: int | None = None,
        parallel_group: ParallelGroup | None = None,
        pretrained: PretrainedWeights | None = None,
        expert_parallel: ExpertParallel | None = None,
    ):
        """`chunk_bytes`: None for the device's own, see the function. The others: see RaggedModel."""
        super().__init__(model, parallel_group, pretrained, expert_parallel)
        self.chunk_bytes = chunk_bytes
        self._logit_transform = get_logit_transform(model.config.get_text_config())
        _check_around_head(model)
        with temporarily_materialized(self):
            _check_head(self)
        verify_and_shard(self)

    def head_parameters(self) -> list[Tensor]:
        """Parameters that forward reads without running their module."""
        head = get_lm_head(self.model)
        return [head.weight, *([] if head.bias is None else [head.bias])]

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        offsets: Tensor,
        temperature: Tensor,
        target_mask: Tensor,
        compute_entropy: bool = False,
        shared_prompt_lengths: Tensor | None = None,
        replayed_experts: Tensor | None = None,
    ) -> TokenLogprobs:
        """input_ids, position_ids, score_mask [T], offsets [B+1], temperature [B] (0 counts as 1, as in engines).

        repeated [B]: how many first tokens a sequence has in common with the one before it; they are run once, which
        does not change values and gradients. routing [T, L, k]: see TrainBatch.
        score_mask is True for the tokens to score, never for a sequence's first.
        Even if it is all False, the result has a (zero) gradient for every parameter: sharded models need the same
        backward on every rank.
        """
        positions, hidden = self.hidden_before_targets(
            input_ids, position_ids, offsets, target_mask, shared_prompt_lengths, replayed_experts
        )
        sequence = torch.searchsorted(offsets, positions, right=True) - 1
        divisor = torch.where(temperature > 0, temperature, 1.0)[sequence]
        head: Any = self.model.get_output_embeddings()
        logprobs, entropy = sampled_logprobs(
            hidden,
            head.weight,
            head.bias,
            input_ids[positions],
            divisor,
            self._logit_transform,
            self._chunk_rows(hidden),
            compute_entropy,
            CACHED_CHUNKS[hidden.device.type],
        )
        logprobs = self.scatter_to_tokens(logprobs, positions, target_mask)
        return TokenLogprobs(
            logprobs, self.scatter_to_tokens(entropy, positions, target_mask) if compute_entropy else None
        )

    def _chunk_rows(self, hidden: Tensor) -> int:
        memory = torch.cuda.get_device_properties(hidden.device).total_memory if hidden.is_cuda else None
        size = self.chunk_bytes or chunk_bytes(hidden.device.type, memory)
        return max(1, size // (4 * self.model.config.get_text_config().vocab_size))

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., hidden size] -> [..., V] at least float32, with the architecture's own scaling and capping."""
        return self._logit_transform(self.model.get_output_embeddings()(hidden))


def check_model_supported(model: PreTrainedModel, *, values: bool = False) -> None:
    """Raise ConfigError for a model that a scorer refuses, as far as a model on the meta device shows it.

    Args:
        values: For a ValueScorer, which has a head of its own, and not for a TokenScorer.
    """
    patch_model(model)
    check_padding_free(model)
    get_lm_head(model)
    if not values:
        _check_around_head(model)


def get_logit_transform(config: Any) -> LogitTransform:
    """Return what a model with this configuration makes of the outputs of its head."""
    return LogitTransform(
        factor=getattr(config, "logit_scale", None) or 1.0 / getattr(config, "logits_scaling", 1.0),
        softcap=getattr(config, "final_logit_softcapping", None),
    )


def _check_around_head(model: PreTrainedModel) -> None:
    """Check on the meta device that the head gets the last hidden states, and that logits are `logit_shape` of its
    outputs, in whose place known numbers are put. Raises ConfigError.
    """
    head, seen = get_lm_head(model), OperationRecorder()
    before: list[str] = []
    outputs = torch.linspace(-100.0, 100.0, head.out_features).view(1, 1, -1)
    hooks = (
        head.register_forward_pre_hook(lambda *_: before.extend(seen.changes)),
        head.register_forward_hook(lambda *_: outputs.clone()),
    )
    hidden = torch.zeros(1, 1, head.in_features, device="meta", dtype=head.weight.dtype)
    try:
        with seen:
            logits = _logits_after(model, hidden)
    except RuntimeError:
        return  # it reads values, which there are none of on the meta device: the check with real weights decides
    finally:
        for hook in hooks:
            hook.remove()
    if before:
        raise ConfigError(_unknown_logits(model, "last hidden states", f"before the head ({', '.join(before[:3])})"))
    expected = get_logit_transform(model.config.get_text_config())(outputs)
    if logits.is_meta or logits.shape != expected.shape or not is_close(logits.float(), expected, torch.float32):
        raise ConfigError(_unknown_logits(model, "logits", "after the head"))


def _unknown_logits(model: PreTrainedModel, changed: str, where: str) -> str:
    return (
        f"{type(model).__name__} changes its {changed} {where} in a way that is not known here (known: "
        "final_logit_softcapping, logit_scale, logits_scaling); its log-probs would be wrong, so it is not trained."
    )


def _logits_after(model: PreTrainedModel, hidden: Tensor) -> Tensor:
    """Return the model's own logits [1, n, V] for last hidden states [1, n, hidden size].

    The model's body is replaced by these states for the duration of the call, so it costs only rows of the head.

    Raises:
        ConfigError: The model reads something else of its body.
        RuntimeError: On the meta device: the model reads values.
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
        f"{type(model).__name__} computes its logits from more than the last hidden states of its body ({reason}), "
        "so it is not trained; use a model of another architecture."
    )


def _check_head(logprob_model: LogprobModel) -> None:
    """Compare `logits` with those of the model's own forward for the same hidden states. Raises ConfigError.

    It costs only a few rows of the head.
    """
    model, head = logprob_model.model, get_lm_head(logprob_model.model)
    noise = torch.randn(1, 4, head.in_features, generator=torch.Generator().manual_seed(0))
    sizes = torch.tensor([0.1, 1.0, 10.0, 100.0]).view(1, 4, 1)
    hidden: Any = (noise * sizes).to(head.weight.device, head.weight.dtype)
    theirs = _logits_after(model, hidden)
    with torch.no_grad():
        ours = logprob_model.logits(hidden)
    if theirs.shape != ours.shape or not is_close(theirs.to(ours.dtype), ours, head.weight.dtype):
        raise ConfigError(_unknown_logits(model, "logits", "after the head"))
