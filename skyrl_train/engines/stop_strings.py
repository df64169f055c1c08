"""Stop strings, including those that span several tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_REPLACEMENT = "\ufffd"


class StopStrings:
    """Finds out whether the newest token completed one of `stops`.

    Decoding a row at every step would cost more than a small model's forward. So this decodes only for tokens whose own
    text contains the last character of a stop string, or that are parts of characters.
    """

    def __init__(self, tokenizer: Any, stops: tuple[str, ...]):
        self._tokenizer = tokenizer
        self._stops = stops
        # A token is at least one byte of a character, which has at most four; plus a margin for tokens without text.
        self.tail = 4 * max(len(stop) for stop in stops) + 4
        # Decoders add and drop blanks between tokens: a final blank of a stop string may come from any token.
        self._last = None if any(stop[-1].isspace() for stop in stops) else {stop[-1] for stop in stops}
        self._may_end: dict[int, bool] = {}

    def completed_by(self, token: int) -> bool:
        """Whether a stop string may end with this token: cheap, and without false negatives."""
        known = self._may_end.get(token)
        if known is None:
            text = self._decode([token])
            known = self._last is None or not text or _REPLACEMENT in text or any(c in self._last for c in text)
            self._may_end[token] = known
        return known

    def find(self, token_ids: Sequence[int]) -> str | None:
        """The stop string completed by the last of `token_ids` (if several: the one that ends first), else None."""
        if not self.completed_by(token_ids[-1]):
            return None
        tail = list(token_ids[-self.tail :])
        text, before = self._decode(tail), self._decode(tail[:-1]).rstrip(_REPLACEMENT)
        ends = []
        for order, stop in enumerate(self._stops):
            at = text.find(stop, max(0, len(before) - len(stop) + 1))
            if at >= 0:
                ends.append((at + len(stop), order, stop))
        return min(ends)[2] if ends else None

    def _decode(self, token_ids: list[int]) -> str:
        if not token_ids:
            return ""
        return self._tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
