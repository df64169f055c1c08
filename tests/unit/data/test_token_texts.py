from __future__ import annotations

import pytest
from hypothesis import given, strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from skyrl_train.data.chat import decode_completion, decode_response, get_undecoded_tokens
from skyrl_train.data.token_texts import TokenAligner, get_vocabulary_texts, token_text
from skyrl_train.testing.tiny_models import byte_tokenizer
from tests.support.tokenizers import KINDS, sentencepiece_tokenizer


def test_of_a_tokenizer_that_works_on_bytes():
    tokenizer = byte_tokenizer()
    texts = get_vocabulary_texts(tokenizer)
    assert texts[:3] == ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    by_text = [texts[token] for token in tokenizer.encode("a é\n")]
    assert by_text == ["a", " ", "<0xC3>", "<0xA9>", "\n"]
    assert len({*texts}) == len(tokenizer) == len(texts)


@pytest.fixture
def pieces() -> PreTrainedTokenizerFast:
    """Return a tokenizer like SentencePiece's: spaces are marks, the first one is dropped, and bytes have names."""
    vocabulary = {"<unk>": 0, "▁a": 1, "a": 2, "▁cat": 3, "<0xE2>": 4, "▁": 5}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[("▁", "a")], unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


def test_vocabulary_texts_keep_spaces_and_bytes(pieces: PreTrainedTokenizerFast):
    assert pieces.decode([3]) == "cat"
    assert get_vocabulary_texts(pieces) == ["<unk>", " a", "a", " cat", "<0xE2>", " "]


def test_a_tokenizer_without_a_fast_backend(pieces: PreTrainedTokenizerFast):
    class Slow:
        def __len__(self) -> int:
            return len(pieces)

        encode, decode, batch_decode = pieces.encode, pieces.decode, pieces.batch_decode
        convert_ids_to_tokens = pieces.convert_ids_to_tokens

    assert get_vocabulary_texts(Slow()) == get_vocabulary_texts(pieces)


TOKENIZERS = {kind: make() for kind, make in KINDS.items()}
ALIGNERS = {kind: TokenAligner(tokenizer) for kind, tokenizer in TOKENIZERS.items()}


@pytest.mark.parametrize("kind", [*KINDS])
def test_a_single_token_reads_as_within_a_text(kind: str):
    tokenizer = TOKENIZERS[kind]
    texts = get_vocabulary_texts(tokenizer)
    assert [token_text(tokenizer, token) for token in range(0, len(tokenizer), 7)] == texts[::7]
    assert token_text(tokenizer, tokenizer.eos_token_id) == tokenizer.eos_token


@pytest.mark.parametrize("kind", [*KINDS])
@given(data=st.data())
def test_parts_joined_are_the_text_of_any_tokens(kind: str, data: st.DataObject):
    tokenizer = TOKENIZERS[kind]
    ids = data.draw(st.lists(st.integers(0, len(tokenizer) + 3), max_size=12))
    for text in (decode_response(tokenizer, ids), decode_completion(tokenizer, ids, [5])):
        parts = ALIGNERS[kind].align(text, ids, get_undecoded_tokens(tokenizer))
        assert len(parts) == len(ids)
        assert "".join(part.text for part in parts) == text
        if "\ufffd" not in text:
            assert b"".join(part.data for part in parts) == text.encode()
        for token, part in zip(ids, parts, strict=True):
            assert part.text == "" or token not in tokenizer.all_special_ids


@pytest.mark.parametrize("kind", ["byte level", "byte fallback"])
@given(text=st.text(max_size=12).map(lambda text: "a" + text))
def test_bytes_joined_are_those_of_the_text(kind: str, text: str):
    tokenizer = TOKENIZERS[kind]
    ids = tokenizer.encode(text, add_special_tokens=False)
    decoded = str(tokenizer.decode(ids))
    parts = ALIGNERS[kind].align(decoded, ids)
    assert "".join(part.text for part in parts) == decoded
    assert b"".join(part.data for part in parts) == decoded.encode()


def test_decoders_that_change_spaces_or_letters_are_followed():
    vocabulary = {"[UNK]": 0, "the": 1, "cat": 2, "##s": 3, ".": 4, "a": 5}
    core = Tokenizer(models.WordPiece(vocab=vocabulary, unk_token="[UNK]"))
    core.pre_tokenizer, core.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece(cleanup=True)
    core.normalizer = normalizers.Lowercase()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="[UNK]")
    ids = tokenizer.encode("The cats. The cat", add_special_tokens=False)
    aligner = TokenAligner(tokenizer)
    assert [part.text for part in aligner.align(str(tokenizer.decode(ids)), ids)] == [
        "the",
        " cat",
        "s",
        ".",
        " the",
        " cat",
    ]
    asked = [part.text for part in aligner.align("The cats. The cat", ids)]
    assert asked == ["The", " cat", "s", ".", " The", " cat"]


def test_token_missing_from_text_has_no_part():
    tokenizer = sentencepiece_tokenizer(bos_and_eos=True)
    parts = TokenAligner(tokenizer).align("the cat sat the", tokenizer.encode("the cat sat the"))
    assert [part.text for part in parts] == ["", "the", " cat", " sat", " the", ""]
