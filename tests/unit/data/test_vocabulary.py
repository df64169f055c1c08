from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from skyrl_train.data.vocabulary import vocabulary_texts
from skyrl_train.testing.tiny_models import byte_tokenizer


def test_of_a_tokenizer_that_works_on_bytes():
    tokenizer = byte_tokenizer()
    texts = vocabulary_texts(tokenizer)
    assert texts[:3] == ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    by_text = [texts[token] for token in tokenizer.encode("a é\n")]
    assert by_text == ["a", " ", "<0xC3>", "<0xA9>", "\n"]
    assert len({*texts}) == len(tokenizer) == len(texts)


@pytest.fixture
def pieces() -> PreTrainedTokenizerFast:
    """As SentencePiece's: spaces are marks, of which the first is dropped, and bytes have names."""
    vocabulary = {"<unk>": 0, "▁a": 1, "a": 2, "▁cat": 3, "<0xE2>": 4, "▁": 5}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[("▁", "a")], unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


def test_a_space_before_a_word_is_kept_and_bytes_have_their_names(pieces: PreTrainedTokenizerFast):
    assert pieces.decode([3]) == "cat"
    assert vocabulary_texts(pieces) == ["<unk>", " a", "a", " cat", "<0xE2>", " "]


def test_a_tokenizer_without_a_fast_backend(pieces: PreTrainedTokenizerFast):
    class Slow:
        def __len__(self) -> int:
            return len(pieces)

        encode, decode, batch_decode = pieces.encode, pieces.decode, pieces.batch_decode
        convert_ids_to_tokens = pieces.convert_ids_to_tokens

    assert vocabulary_texts(Slow()) == vocabulary_texts(pieces)
