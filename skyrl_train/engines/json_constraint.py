"""Constraints that let a response only be JSON of a schema, for engines that sample with `token_sampler`.

They need llguidance, which vLLM and SGLang bring along.
"""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from skyrl_train.errors import UnsupportedParameter

MISSING = "it needs llguidance, which is not installed (`pip install llguidance`)."
"""Reason of an engine that could apply a schema if llguidance was installed."""


def is_available() -> bool:
    """True if llguidance is installed."""
    return importlib.util.find_spec("llguidance") is not None


class JsonGrammars:
    """The grammars of schemas for one model. It may be used by several threads."""

    def __init__(self, engine: str, tokenizer: Any, vocab_size: int, stop_tokens: Iterable[int]):
        """Create grammars without reading the tokenizer, which takes up to a second at the first schema.

        Args:
            engine: Name of the engine, for error messages.
            tokenizer: The model's tokenizer.
            vocab_size: Number of logits of the model.
            stop_tokens: Tokens that end a response, and which are allowed once the JSON is complete.
        """
        self._engine = engine
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._stop_tokens = sorted(token for token in stop_tokens if token < vocab_size)
        self._vocabulary: Any = None
        self._lock = threading.Lock()

    def check(self, schema: str) -> None:
        """Check a schema.

        Raises:
            UnsupportedParameter: The schema is invalid, uses a keyword that is not supported, or the tokenizer has no
                fast implementation.
        """
        from llguidance import LLMatcher

        try:
            problem = LLMatcher.validate_grammar(_grammar(schema), self._get_vocabulary())
        except ValueError as error:
            problem = str(error)
        if problem:
            raise UnsupportedParameter(
                f"Engine {self._engine!r} does not support this json_schema: {problem}. Change the schema or leave it "
                "out."
            )

    def start(self, schema: str) -> JsonConstraint:
        """Return the constraint of a new response, for a schema that passed `check`."""
        from llguidance import LLMatcher

        return JsonConstraint(LLMatcher(self._get_vocabulary(), _grammar(schema)), self._vocab_size)

    def _get_vocabulary(self) -> Any:
        from llguidance.hf import from_tokenizer

        with self._lock:
            if self._vocabulary is None:
                size = max(self._vocab_size, len(self._tokenizer))
                self._vocabulary = from_tokenizer(self._tokenizer, n_vocab=size, eos_token=self._stop_tokens)
            return self._vocabulary


def _grammar(schema: str) -> str:
    from llguidance import LLMatcher

    return str(LLMatcher.grammar_from_json_schema(schema))


class JsonConstraint:
    """The state of one response: which tokens may come next."""

    def __init__(self, matcher: Any, vocab_size: int):
        self._matcher = matcher
        self._vocab_size = vocab_size

    def forbidden(self) -> Tensor:
        """Return the tokens that must not come next, bool [V] on the CPU. At least one token is allowed."""
        allowed = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        return torch.from_numpy(np.unpackbits(allowed, bitorder="little")[: self._vocab_size] == 0)

    def accept(self, token: int) -> None:
        """Append a token to the response."""
        self._matcher.consume_token(token)
