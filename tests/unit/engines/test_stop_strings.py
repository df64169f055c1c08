"""StopStrings finds stop strings in the text wherever tokens begin and end."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, strategies as st

from skyrl_train.engines.token_sampler import StopStrings
from skyrl_train.testing.tiny_models import byte_tokenizer

TOKENIZER: Any = byte_tokenizer()


def _first_stop(text: str, stops: tuple[str, ...]) -> tuple[int, str] | None:
    """Sample `text` byte by byte and return the number of tokens and the stop string at the first stop."""
    finder = StopStrings(TOKENIZER, stops)
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    for count in range(1, len(ids) + 1):
        if result := finder.find(ids[:count]):
            return count, result
    return None


@pytest.mark.parametrize(
    ("text", "stops", "expected"),
    [
        ("an answer</answer> and more", ("</answer>",), "</answer>"),
        ("abab", ("bab", "ab"), "ab"),
        ("one\n\ntwo", ("\n\n",), "\n\n"),
        ("wait for it .", (" .",), " ."),
        ("tab\tspace end ", ("end ",), "end "),
        ("naïve 終わり", ("終わり",), "終わり"),
        ("so <|im_end|>", ("<|im_end|>",), "<|im_end|>"),
    ],
)
def test_stop_string_is_found_at_last_token(text, stops, expected):
    stopped = _first_stop(text, stops)
    assert stopped is not None
    count, result = stopped
    assert result == expected
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    assert TOKENIZER.decode(ids[:count]).endswith(expected)
    assert not any(stop in TOKENIZER.decode(ids[: count - 1]) for stop in stops)


def test_earlier_occurrence_is_not_found_again():
    finder = StopStrings(TOKENIZER, ("ab",))
    ids = TOKENIZER.encode("abb", add_special_tokens=False)
    assert finder.find(ids[:2]) == "ab"
    assert finder.find(ids) is None


@given(
    st.text(alphabet="ab<>é終", max_size=30), st.lists(st.text(alphabet="ab<>é終", min_size=1, max_size=4), min_size=1)
)
def test_only_texts_with_stop_string_stop(text, stops):
    result = _first_stop(text, tuple(stops))
    assert (result is not None) == any(stop in text for stop in stops)
    if result is not None:
        stop_ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
        assert result[0] == len(text[: min(stop_ends)].encode())
