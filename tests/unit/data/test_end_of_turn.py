"""The token that ends an answer is read off the chat template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from skyrl_train.data.chat_templates import TEMPLATES
from skyrl_train.data.control_tokens import end_of_turn_name, end_of_turn_token
from skyrl_train.testing.tiny_models import byte_tokenizer

HARMONY = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ '<|start|>user<|message|>' + m.content + '<|end|>' }}"
    "{% else %}{{ '<|start|>assistant<|channel|>final<|message|>' + m.content }}"
    "{{ '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)
HARMONY_TOKENS = ("<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|return|>", "<|call|>")
MESSAGE = "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + END }}{% endfor %}"
HEADERS = ("<|user|>", "<|assistant|>")


def closing(end: str, after: str = "") -> str:
    """A template that writes `end` after each message, and `after` at the end of the conversation."""
    return MESSAGE.replace("END", repr(end)) + after


def tokenizer_of(template: str | None, added: Sequence[str] = (), eos: str = "<|endoftext|>") -> Any:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer().backend_tokenizer, eos_token=eos)
    tokenizer.add_tokens(list(added), special_tokens=True)
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize(
    ("template", "added", "end"),
    [
        pytest.param(TEMPLATES["chatml"], (), "<|im_end|>", id="line break after the token"),
        pytest.param(
            TEMPLATES["llama3"],
            ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>"),
            "<|eot_id|>",
            id="llama3",
        ),
        pytest.param(TEMPLATES["gemma"], ("<start_of_turn>", "<end_of_turn>"), "<end_of_turn>", id="gemma"),
        pytest.param(TEMPLATES["mistral"], ("[INST]", "[/INST]"), "<|endoftext|>", id="end of sequence"),
        pytest.param(HARMONY, HARMONY_TOKENS, "<|return|>", id="other token in the history"),
        pytest.param(
            closing("<|end|>", "{{ eos_token }}"), (*HEADERS, "<|end|>"), "<|end|>", id="end of sequence after the end"
        ),
        pytest.param(closing("<|shown|><|end|>"), (*HEADERS, "<|shown|>", "<|end|>"), "<|end|>", id="two tokens"),
        pytest.param(closing(" <|end|>"), (*HEADERS, "<|end|>"), "<|end|>", id="space before the token"),
        pytest.param(closing(""), HEADERS, "<|user|>", id="header of the next message"),
        pytest.param(closing("\n### "), HEADERS, None, id="text"),
        pytest.param("{% for m in messages %}{{ m.content }}{% endfor %}", (), None, id="nothing"),
        pytest.param("{{ raise_exception('no') }}", (), None, id="template that rejects conversations"),
        pytest.param(None, (), None, id="no template"),
    ],
)
def test_end_of_turn_is_the_closing_token(template: str | None, added: Sequence[str], end: str | None):
    tokenizer = tokenizer_of(template, added)
    token = end_of_turn_token(tokenizer)
    assert (None if token is None else tokenizer.convert_ids_to_tokens(token)) == end


def test_token_spelled_by_no_added_token_is_text():
    assert end_of_turn_token(tokenizer_of(closing("<|end|>"), HEADERS)) is None


def test_template_options_choose_the_closing_token():
    tokenizer = tokenizer_of(
        "{% for m in messages %}{{ m.content + ('<|im_end|>' if short else '<|end|>') }}{% endfor %}", ("<|end|>",)
    )
    assert end_of_turn_name(tokenizer) == "<|end|>"
    assert end_of_turn_name(tokenizer, {"short": True}) == "<|im_end|>"
    assert end_of_turn_name(tokenizer, {"chat_template": TEMPLATES["chatml"]}) == "<|im_end|>"


def test_name_falls_back_to_the_end_of_sequence():
    assert end_of_turn_name(tokenizer_of(None)) == "<|endoftext|>"
    assert end_of_turn_name(None) == ""
