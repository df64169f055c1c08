"""SFT sequences and masks under chat templates that rewrite earlier turns, and under append-only ones."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from skyrl_train.data.chat import render_conversation, render_prompt, render_sft_sequences
from skyrl_train.data.chat_templates import TEMPLATES
from skyrl_train.errors import DataError
from skyrl_train.testing.tiny_models import byte_tokenizer

DROPS = (
    "{% for m in messages %}{% set c = m.content %}{% if m.role == 'assistant' and not loop.last %}"
    "{% set c = c.split('</think>')[-1] %}{% endif %}{{ '<|im_start|>' + m.role + '\n' + c + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""A template that drops reasoning of earlier turns, like Qwen3's."""
OPENS = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content.split('</think>')[-1] }}"
    "{% for call in m.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)
"""A template that drops all reasoning and opens it in the header, like DeepSeek-R1's."""
NULL_CALLS = OPENS.replace(
    "m.content.split('</think>')[-1] }}", "(m.content.split('</think>')[-1] if m.content is not none else '') }}"
).replace("m.tool_calls or []", "(m.tool_calls if m.content is none else [])")
"""A template that writes calls only if the content is null."""


def with_template(template: str) -> PreTrainedTokenizerFast:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def make_messages(*said: tuple[str, str]) -> list[dict[str, Any]]:
    return [{"role": role, "content": content} for role, content in said]


def sequences(template: str, messages: list[dict[str, Any]], **options: Any) -> list[tuple[str, str]]:
    """(context, trained text) of every sequence."""
    tokenizer = with_template(template)
    found = []
    for ids, mask in render_sft_sequences(tokenizer, messages, options):
        first = mask.index(True)
        trained = [token for token, learns in zip(ids, mask, strict=True) if learns]
        found.append((str(tokenizer.decode(ids[:first])), str(tokenizer.decode(trained))))
    return found


QUESTION, ANSWER = ("user", "q"), ("assistant", "<think>t</think>a")


def test_dropped_reasoning_gives_one_sequence_per_answer():
    header = "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"
    again = "<|im_start|>user\nr<|im_end|>\n<|im_start|>assistant\n"
    found = sequences(DROPS, make_messages(QUESTION, ANSWER, ("user", "r"), ("assistant", "<think>u</think>b")))
    assert found == [
        (header, "<think>t</think>a<|im_end|>"),
        (f"{header}a<|im_end|>\n{again}", "<think>u</think>b<|im_end|>"),
    ]


def test_contexts_are_those_of_rollouts():
    tokenizer = with_template(DROPS)
    messages = make_messages(QUESTION, ANSWER, ("user", "r"), ("assistant", "b"))
    for (ids, mask), end in zip(render_sft_sequences(tokenizer, messages), (1, 3), strict=True):
        prompt = render_prompt(tokenizer, messages[:end])
        assert ids[: len(prompt)] == prompt and mask.index(True) == len(prompt)


@pytest.mark.parametrize(
    ("content", "trained"),
    [
        ("<think>t</think>a", "t</think>a<|im_end|>"),
        ("<think>\nt\n</think>\n\na", "t\n</think>\n\na<|im_end|>"),
        ("t</think>a", "t</think>a<|im_end|>"),
        ("a", "\n</think>\n\na<|im_end|>"),
    ],
)
def test_an_answer_follows_reasoning_that_its_header_opens(content: str, trained: str):
    ((context, text),) = sequences(OPENS, make_messages(QUESTION, ("assistant", content)))
    assert context == "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n<think>\n"
    assert text == trained


@pytest.mark.parametrize(
    ("content", "trained"),
    [("a", "\n</seed:think>\n\na<|im_end|>"), ("<seed:think>\nt</seed:think>a", "t</seed:think>a<|im_end|>")],
)
def test_headers_may_open_reasoning_with_any_marker(content: str, trained: str):
    template = OPENS.replace("think>", "seed:think>")
    ((context, text),) = sequences(template, make_messages(QUESTION, ("assistant", content)))
    assert context.endswith("assistant\n<seed:think>\n") and text == trained


def test_control_token_reasoning_is_closed():
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["[THINK]", "[/THINK]"]})
    tokenizer.chat_template = OPENS.replace("</think>", "[/THINK]").replace("<think>", "[THINK]")
    ((ids, mask),) = render_sft_sequences(tokenizer, make_messages(QUESTION, ("assistant", "a")))
    assert ids[mask.index(True) + 1] == tokenizer.convert_tokens_to_ids("[/THINK]")


def test_calls_after_reasoning_are_trained_on():
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    message = {"role": "assistant", "content": "<think>t</think>", "tool_calls": [call]}
    ((_, text),) = sequences(OPENS, [*make_messages(QUESTION), message])
    assert text == 't</think>{"name": "add", "arguments": {"a": 1}}<|im_end|>'


def test_calls_with_null_content_are_trained_on():
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    ((_, text),) = sequences(NULL_CALLS, [*make_messages(QUESTION), message])
    assert text == '\n</think>\n\n{"name": "add", "arguments": {"a": 1}}<|im_end|>'


def test_unwritten_reasoning_field_is_rejected():
    message = {"role": "assistant", "content": "a", "reasoning_content": "t"}
    with pytest.raises(DataError, match=r"messages\[1\]\.reasoning_content: .*Put it into content, as <think>"):
        sequences(OPENS, [*make_messages(QUESTION), message])
    with pytest.raises(DataError, match=r"messages\[1\]\.reasoning_content: the chat template does not write 't'"):
        sequences(DROPS, [*make_messages(QUESTION), message])


def test_rewriting_template_drops_messages_after_answer():
    messages = make_messages(QUESTION, ANSWER, ("user", "r"))
    assert len(sequences(DROPS, messages)) == 1
    with pytest.raises(DataError, match="end the conversation with the answer to train on"):
        render_conversation(with_template(DROPS), messages)


@pytest.mark.parametrize("name", sorted({*TEMPLATES} - {"qwen3_without_thinking"}))
def test_append_only_conversations_stay_one_sequence(name: str):
    tokenizer = with_template(TEMPLATES[name])
    messages = make_messages(("system", "s"), QUESTION, ANSWER, ("user", "r"), ("assistant", "b"), ("user", "end"))
    ((ids, mask),) = render_sft_sequences(tokenizer, messages)
    assert ids == tokenizer.apply_chat_template(messages, return_dict=False)
    trained = str(tokenizer.decode([token for token, learns in zip(ids, mask, strict=True) if learns]))
    assert trained.replace(" ", "").startswith("<think>t</think>a<")


def test_rewriting_template_renders_last_answer_only():
    tokenizer = with_template(DROPS)
    messages = make_messages(QUESTION, ANSWER, ("user", "r"), ("assistant", "<think>u</think>b"))
    assert render_conversation(tokenizer, messages) == render_sft_sequences(tokenizer, messages)[-1]
