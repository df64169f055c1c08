"""vLLM's back end of JSON schemas, with all tokens that end a response. Imports vLLM: see engine.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llguidance.hf import from_tokenizer
from vllm.utils.mistral import is_mistral_tokenizer
from vllm.v1.structured_output.backend_guidance import GuidanceBackend

from skyrl_train.errors import UnsupportedParameter


def create_grammar_backend(
    engine: str, config: Any, tokenizer: Any, vocab_size: int, stop_tokens: Sequence[int]
) -> Any:
    """Return a back end that allows every stop token after complete JSON. vLLM's own allows one.

    Args:
        engine: Name of the engine, for error messages.
        config: vLLM's VllmConfig.
        tokenizer: The model's tokenizer in vLLM.
        vocab_size: Number of logits of the model.
        stop_tokens: Tokens that end a response.

    Raises:
        UnsupportedParameter: The tokenizer has no fast implementation.
    """
    if not GuidanceBackend.is_tokenizer_supported(tokenizer):
        raise UnsupportedParameter(f"Engine {engine!r} does not support json_schema: its tokenizer is not a fast one.")
    if is_mistral_tokenizer(tokenizer):
        return GuidanceBackend(config, tokenizer, vocab_size)

    class Backend(GuidanceBackend):
        @staticmethod
        def _build_ll_tokenizer(tokenizer: Any, vocab_size: int) -> Any:
            return from_tokenizer(tokenizer, n_vocab=max(vocab_size, len(tokenizer)), eos_token=list(stop_tokens))

    return Backend(config, tokenizer, vocab_size)
