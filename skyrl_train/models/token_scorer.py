"""Log-probabilities and entropies of chosen tokens under a causal language model, from the ragged batch.

Legend: T tokens of all sequences, B sequences, N tokens that are scored, V vocabulary.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_outputs import MoeModelOutputWithPast

from skyrl_train.errors import ConfigError
from skyrl_train.models.ragged_model import RaggedModel, check_and_divide, close, linear_head
from skyrl_train.models.rank_group import RankGroup
from skyrl_train.models.sampled_logprobs import LogitShape, sampled_logprobs

CHUNK_BYTES = {"cpu": 1 << 26, "cuda": 1 << 28}
"""Size of one chunk's float32 logits: a hundred rows of a vocabulary of 150,000 on a CPU, and enough of them on a GPU
that reading the weight is not what takes the time.
"""

KEPT_CHUNKS = {"cpu": 8, "cuda": 1}
"""How many chunks' probabilities backward finds instead of making them again: a CPU has more memory than arithmetic."""


class Scores(NamedTuple):
    """Both [T], 0 where a token was not scored."""

    logprobs: Tensor
    """nats, of the token given what precedes it in its sequence, at the sequence's temperature."""
    entropy: Tensor | None
    """nats, of the distribution that the token was drawn from; None unless asked for."""


class TokenScorer(RaggedModel):
    """The root that strategies shard: hidden states of all tokens, then the LM head on the rows that are needed.

    The head runs inside this module's forward, where sharded weights are gathered, in chunks, of which backward finds
    KEPT_CHUNKS and makes the others again: no tensor of shape (tokens, vocabulary) ever exists. Softmax is at least
    float32. Raises ConfigError for a model whose logits it cannot reproduce.
    """

    def __init__(self, model: PreTrainedModel, chunk_bytes: int | None = None, together: RankGroup | None = None):
        """chunk_bytes: CHUNK_BYTES of the device, if None."""
        super().__init__(model, together)
        self.chunk_bytes = chunk_bytes
        config = model.config
        self._shape = LogitShape(
            factor=getattr(config, "logit_scale", None) or 1.0 / getattr(config, "logits_scaling", 1.0),
            softcap=getattr(config, "final_logit_softcapping", None),
        )
        _check_head(self)
        check_and_divide(self)

    def head_parameters(self) -> list[Tensor]:
        """What forward reads of a module without running that."""
        head = linear_head(self.model)
        return [head.weight, *([] if head.bias is None else [head.bias])]

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        offsets: Tensor,
        temperature: Tensor,
        score_mask: Tensor,
        wants_entropy: bool = False,
        repeated: Tensor | None = None,
    ) -> Scores:
        """input_ids, position_ids, score_mask [T], offsets [B+1], temperature [B] (0 counts as 1, as engines score it).

        repeated [B]: how many first tokens a sequence has in common with the one before it; they go through the model
        once, and values and gradients are the same. score_mask is True on tokens to score and never on a sequence's
        first. With an all-False mask the result still has a (zero) gradient for every parameter: sharded models need
        the same backward on every rank.
        """
        positions, hidden = self.before_scored(input_ids, position_ids, offsets, score_mask, repeated)
        sequence = torch.searchsorted(offsets, positions, right=True) - 1
        divisor = torch.where(temperature > 0, temperature, 1.0)[sequence]
        head: Any = self.model.get_output_embeddings()
        logprobs, entropy = sampled_logprobs(
            hidden,
            head.weight,
            head.bias,
            input_ids[positions],
            divisor,
            self._shape,
            self._rows(hidden),
            wants_entropy,
            KEPT_CHUNKS[hidden.device.type],
        )
        logprobs = self.spread(logprobs, positions, score_mask)
        return Scores(logprobs, self.spread(entropy, positions, score_mask) if wants_entropy else None)

    def _rows(self, hidden: Tensor) -> int:
        size = self.chunk_bytes or CHUNK_BYTES[hidden.device.type]
        return max(1, size // (4 * self.model.config.vocab_size))

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., hidden size] -> [..., V] at least float32, with the architecture's own scaling and capping."""
        return self._shape(self.model.get_output_embeddings()(hidden))


def _check_head(scorer: TokenScorer) -> None:
    """Compare `logits` with what the model's own forward makes of the same hidden states; refuse where they differ.

    Costs a few rows of the head: the body of the model is replaced by the given states for the time of the call.
    """
    model, head = scorer.model, linear_head(scorer.model)
    body = model.base_model
    noise = torch.randn(1, 4, head.in_features, generator=torch.Generator().manual_seed(0))
    sizes = torch.tensor([0.1, 1.0, 10.0, 100.0]).view(1, 4, 1)
    hidden: Any = (noise * sizes).to(head.weight.device, head.weight.dtype)
    ids = torch.zeros(1, 4, dtype=torch.int64, device=hidden.device)
    body.forward = lambda *_, **__: MoeModelOutputWithPast(last_hidden_state=hidden)
    try:
        with torch.no_grad():
            theirs = model(input_ids=ids, use_cache=False).logits
            ours = scorer.logits(hidden)
    finally:
        del body.forward
    if theirs.shape != ours.shape or not close(theirs.to(ours.dtype), ours, head.weight.dtype):
        raise ConfigError(
            f"{type(model).__name__} changes its logits after the head in a way that is not known here (known: "
            "final_logit_softcapping, logit_scale, logits_scaling); its log-probs would be wrong, so it is not trained."
        )
