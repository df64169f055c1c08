"""The final answer of a model's turn, and decoding that keeps the markers that it needs."""

from __future__ import annotations

import time
from typing import Any

import pytest
from tokenizers import AddedToken

from skyrl_train.data.chat import decode_response, get_reasoning_opening, message_content, render_prompt
from skyrl_train.data.reasoning import (
    REASONING_FORMATS,
    ReasoningFormat,
    final_answer,
    find_trailing_opening,
    find_unclosed_marker,
    reasoning_blocks,
)
from skyrl_train.testing.tiny_models import byte_tokenizer

HARMONY = ("<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|return|>", "<|constrain|>", "<|call|>")
ANALYSIS = "<|channel|>analysis<|message|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>"


def tokenizer_with(*special: str) -> Any:
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [AddedToken(token, special=True) for token in special]})
    return tokenizer


def decoded(tokenizer: Any, text: str) -> str:
    return decode_response(tokenizer, tokenizer.encode(text, add_special_tokens=False))


@pytest.mark.parametrize("form", REASONING_FORMATS, ids=lambda form: form.open_marker)
def test_answer_follows_the_last_closed_block(form: ReasoningFormat):
    opens, closes = form.open_marker, form.close_marker
    assert final_answer(f"{opens}\n41?{closes}\n\n42\n") == "42\n"
    assert final_answer(f"41?{closes}42") == "42"  # the prompt opened the block
    assert final_answer(f"{opens}41?{closes}42{opens}43?{closes}44") == "44"
    assert final_answer(f"{opens}41?") == final_answer(f"42{opens}41?") == final_answer(f"{opens}41?{closes}") == ""
    assert reasoning_blocks(f"{opens} 41? {closes}42") == ["41?"]
    assert find_unclosed_marker(f"{opens}41?") == opens and find_unclosed_marker(f"{opens}41?{closes}42") == ""
    assert (
        find_trailing_opening(f"assistant\n{opens}\n") == f"{opens}\n"
        and find_trailing_opening(f"{opens}\n{closes}\n") == ""
    )


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (" 42 ", " 42 "),
        ("", ""),
        ("<think>a</thinking>b", ""),
        ("<think>[/THINK] <think> a</think>b</think>c", "c"),
        (f"{ANALYSIS}41<|end|>{FINAL}42", "42"),
        (f"{ANALYSIS}41<|end|>{FINAL}42<|return|>", "42"),
        (f"{ANALYSIS}a<|end|><|start|>assistant<|channel|>commentary<|message|>b<|end|>{FINAL}42", "42"),
        (f"{FINAL} <|channel|>final <|constrain|>json<|message|>{{}}<|end|>", "{}"),
        (" to=functions.f<|channel|>commentary <|constrain|>json<|message|>{}<|call|>", ""),
        (f"{ANALYSIS}42", ""),
        (f"{ANALYSIS}41<|end|><|start|>assistant<|channel|>final", ""),
        (f"{FINAL}42<|end|><|start|>assistant{ANALYSIS}no", ""),
        ("gpt-oss writes <|channel|>.", "gpt-oss writes <|channel|>."),
        ("<|START_THINKING|>a<|END_THINKING|><|START_RESPONSE|>42<|END_RESPONSE|>", "42"),
        ("<think>a</think>\n<response>\n42\n</response>\n", "42"),
        ("<response>42</response>", "<response>42</response>"),
        ("<think>a</think>`<think>` opens reasoning.", "`<think>` opens reasoning."),
        ("<think>a</think>x = s.split('</think>')", "x = s.split('</think>')"),
        ('"<think>" opens reasoning.', '"<think>" opens reasoning.'),
        ('<think>in "quotes"</think>"42"', '"42"'),
        ("<think>`</think>`", "`"),
    ],
)
def test_answer_of_each_shape_of_text(text: str, answer: str):
    assert final_answer(text) == answer


def test_open_channel_is_named():
    assert find_unclosed_marker(f"{ANALYSIS}41") == ANALYSIS
    assert find_unclosed_marker(f"{ANALYSIS}41<|end|>{FINAL}4") == "<|channel|>final<|message|>"
    assert (
        find_unclosed_marker(f"{ANALYSIS}41<|end|>")
        == find_unclosed_marker(f"{ANALYSIS}41<|end|><|channel|>final")
        == ""
    )


def test_blocks_are_those_outside_the_final_channel():
    assert reasoning_blocks(f"{ANALYSIS}41<|end|>{FINAL}42") == ["41"]


def test_separating_takes_linear_time():
    began = time.process_time()
    for unit in ("<think>", "</think>", "<think></think>", "<|channel|>", "<|channel|>final<|message|>", " ", "<"):
        final_answer(unit * (10**6 // len(unit)))
    assert time.process_time() - began < 10


@pytest.mark.parametrize(
    ("special", "text", "kept"),
    [
        (("<think>", "</think>"), "<think>41</think>42<|im_end|>", "<think>41</think>42"),
        (("[THINK]", "[/THINK]"), "[THINK]41[/THINK]42<|im_end|>", "[THINK]41[/THINK]42"),
        (("<|channel>", "<channel|>"), "<|channel>thought\n41<channel|>42", "<|channel>thought\n41<channel|>42"),
        (HARMONY, f"{ANALYSIS}41<|end|>{FINAL}42<|return|>", f"{ANALYSIS}41<|end|>{FINAL}42"),
    ],
)
def test_decoding_keeps_special_reasoning_markers(special: tuple[str, ...], text: str, kept: str):
    tokenizer = tokenizer_with(*special)
    assert decoded(tokenizer, text) == kept
    assert final_answer(kept) == "42"
    assert decoded(tokenizer, "42<|im_end|>") == "42"


def test_foreign_end_of_turn_tokens_are_not_markers():
    assert decoded(tokenizer_with("<|start|>", "<|end|>"), "42<|end|>") == "42"


def test_decoding_drops_unknown_tokens_beside_markers():
    tokenizer = tokenizer_with("[THINK]", "[/THINK]")
    tokenizer.unk_token = "<|endoftext|>"
    assert decoded(tokenizer, "[THINK]a<|endoftext|>[/THINK]b") == "[THINK]a[/THINK]b"


@pytest.mark.parametrize("opening", ["<think>\n", "<|channel|>analysis<|message|>", "[THINK]"])
def test_prompt_that_opens_reasoning_is_recognised(opening: str):
    tokenizer = tokenizer_with("[THINK]", "[/THINK]")
    messages = [{"role": "user", "content": "Do you know <think>?"}]
    assert get_reasoning_opening(tokenizer, render_prompt(tokenizer, messages)) == ""
    tokenizer.chat_template += "{% if add_generation_prompt %}" + opening + "{% endif %}"
    assert get_reasoning_opening(tokenizer, render_prompt(tokenizer, messages)) == opening


def test_message_content_has_no_control_tokens():
    harmony = tokenizer_with(*HARMONY)
    assert message_content(harmony, f"{ANALYSIS}41<|end|>{FINAL}42") == "42"
    assert message_content(harmony, f"41<|end|>{FINAL}42", ANALYSIS) == "42"
    assert message_content(harmony, "41", ANALYSIS) == ""
    assert message_content(byte_tokenizer(), "41</think>42", "<think>\n") == "41</think>42"
    ids = harmony.encode(f"41<|end|>{FINAL}It is 42.<|return|>", add_special_tokens=False)
    assert message_content(harmony, decode_response(harmony, ids), ANALYSIS) == "It is 42."
