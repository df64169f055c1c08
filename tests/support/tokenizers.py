"""Tiny tokenizers of the kinds that models have: byte-level, SentencePiece, and SentencePiece with byte fallback."""

from __future__ import annotations

import string
from collections.abc import Callable

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from skyrl_train.testing.tiny_models import byte_tokenizer

SPACE = "\u2581"
WORDS = ("the", "cat", "sat", "on", "a", "mat", "and", "ran", "papa")
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def sentencepiece_tokenizer(*, byte_fallback: bool = False, bos_and_eos: bool = False) -> PreTrainedTokenizerFast:
    """Return a tokenizer whose words begin with U+2581; decoding drops the space that a text would begin with.

    Args:
        byte_fallback: True for a token of every byte, for characters that have no token.
        bos_and_eos: True if it puts <s> before and </s> after texts.
    """
    words = [SPACE, *(SPACE + word for word in WORDS)]
    spellings = ["<unk>", "<s>", "</s>", *words, *string.ascii_lowercase, *(BYTES if byte_fallback else ())]
    vocabulary = {spelling: id for id, spelling in enumerate(spellings)}
    core = Tokenizer(
        models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", ignore_merges=True, byte_fallback=byte_fallback)
    )
    core.pre_tokenizer = pre_tokenizers.Metaspace()
    fallback = [decoders.ByteFallback()] if byte_fallback else []
    core.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), *fallback, decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    core.add_special_tokens(["<unk>", "<s>", "</s>"])
    if bos_and_eos:
        core.post_processor = TemplateProcessing("<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="</s>"
    )
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<s>' + m['role'] + ' ' + m['content'] + '</s>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<s>assistant ' }}{% endif %}"
    )
    return tokenizer


KINDS: dict[str, Callable[[], PreTrainedTokenizerFast]] = {
    "byte level": byte_tokenizer,
    "sentencepiece": sentencepiece_tokenizer,
    "byte fallback": lambda: sentencepiece_tokenizer(byte_fallback=True),
}
