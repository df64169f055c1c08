"""Conversations with sampled answers: their ids are kept, whatever the template does to calls and results."""

from __future__ import annotations

from typing import Any

import pytest

from skyrl_train.data.chat import RenderedPrefix, render_prompt, render_sft_sequences
from skyrl_train.data.sampled_history import RenderedHistory, SampledAnswer, render_sampled_history
from skyrl_train.data.token_arrays import to_token_array
from skyrl_train.testing.tiny_models import byte_tokenizer
from tests.support.family_templates import FAMILIES, TOOL, tool_tokenizer
from tests.support.tool_templates import FAMILIES as OTHER_FAMILIES

CALLS = {
    "qwen": '<tool_call>\n{"name":"add", "arguments":{"a":1}}\n</tool_call><|im_end|>',
    "llama": '{"name":"add", "parameters":{"a":1}}<|eot_id|>',
    "mistral": '[TOOL_CALLS] [{"name":"add", "arguments":{"a":1}}]</s>',
    "deepseek": '<|calls_begin|><|call_begin|>function<|sep|>add\n{"a":1}<|call_end|><|calls_end|><|end_of_sentence|>',
    "harmony": "<|channel|>analysis<|message|>hm<|end|><|start|>assistant to=functions.add<|channel|>commentary json"
    '<|message|>{"a":1}<|call|>',
}
"""A sampled call of each family, which is spelled differently from what the template writes."""
RESULTS = {
    "qwen": "\n<|im_start|>user\n<tool_response>\n3\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
    "llama": "<|start_header_id|>ipython<|end_header_id|>\n\n3<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "mistral": '[TOOL_RESULTS] {"content": 3, "call_id": "abcdefghi"}[/TOOL_RESULTS]',
    "deepseek": "<|outputs_begin|><|output_begin|>3<|output_end|><|outputs_end|>",
    "harmony": "<|start|>functions.add to=assistant<|channel|>commentary<|message|>3<|end|><|start|>assistant",
}
"""The tokens between a call and the next answer."""
ANSWERS = {
    "qwen": "<think>\nwell\n</think>\n\nthree<|im_end|>",
    "llama": "three<|eot_id|>",
    "mistral": " three</s>",
    "deepseek": "three<|end_of_sentence|>",
    "harmony": "<|channel|>final<|message|>three<|return|>",
}
USER: dict[str, Any] = {"role": "user", "content": "1 + 2?"}
CALL: dict[str, Any] = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "abcdefghi", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}],
}
RESULT: dict[str, Any] = {"role": "tool", "tool_call_id": "abcdefghi", "content": "3"}
OPTIONS = {"tools": [TOOL]}


class Conversation:
    """A conversation whose answers are sampled texts, as ids."""

    def __init__(self, family: str, *messages: dict[str, Any]):
        self.tokenizer, self.messages = tool_tokenizer(family), list(messages)
        self.answers: dict[int, SampledAnswer] = {}
        self.prefix = RenderedPrefix()
        self.ids = render_prompt(self.tokenizer, self.messages, OPTIONS, prefix=self.prefix)

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def sample(self, message: dict[str, Any], text: str) -> None:
        ids = self.encode(text)
        self.answers[len(self.messages)] = SampledAnswer(to_token_array(ids))
        self.messages.append(message)
        self.ids += ids

    def append(self, *messages: dict[str, Any]) -> RenderedHistory:
        """Append messages, and the tokens that the model reads before its next answer."""
        continued = (len(self.messages) - 1, self.prefix)
        self.messages += messages
        history = render_sampled_history(self.tokenizer, self.messages, self.answers, OPTIONS, continued=continued)
        self.ids = [*self.ids, *history.ids] if history.continues else history.ids
        self.prefix = history.prefix
        return history

    def render_all(self) -> RenderedHistory:
        return render_sampled_history(self.tokenizer, self.messages, self.answers, OPTIONS)


@pytest.mark.parametrize("family", FAMILIES)
def test_tool_results_follow_sampled_calls(family: str):
    chat = Conversation(family, USER)
    chat.sample(CALL, CALLS[family])
    prompt_and_call = list(chat.ids)
    history = chat.append(RESULT)
    assert history.continues and chat.tokenizer.decode(history.ids) == RESULTS[family]
    assert chat.ids == chat.render_all().ids == prompt_and_call + chat.encode(RESULTS[family])


@pytest.mark.parametrize("family", FAMILIES)
def test_long_conversations_equal_complete_renderings(family: str):
    chat = Conversation(family, USER)
    for number in range(2):
        chat.sample(CALL, CALLS[family])
        assert chat.append(RESULT).continues
        chat.sample({"role": "assistant", "content": "three"}, ANSWERS[family])
        history = chat.append({"role": "user", "content": "and 2 + 3?"})
        assert history.continues is (family != "harmony"), f"turn {number}"
        assert chat.ids == chat.render_all().ids
        assert chat.render_all().reused == set(chat.answers)


def test_replaced_end_token_is_not_sampled_twice():
    chat = Conversation("harmony", USER)
    chat.sample({"role": "assistant", "content": "three"}, ANSWERS["harmony"])
    chat.append({"role": "user", "content": "sure?"})
    text = chat.tokenizer.decode(chat.ids)
    assert "<|channel|>final<|message|>three<|end|><|start|>user<|message|>sure?" in text and "<|return|>" not in text


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "harmony"])  # one call per answer
def test_parallel_calls_are_followed_by_results(family: str):
    chat = Conversation(family, USER)
    first, second = CALL["tool_calls"][0], {**CALL["tool_calls"][0], "id": "ihgfedcba"}
    sampled = CALLS[family] if family != "llama" else CALLS[family].replace("<|eot_id|>", "; ") + CALLS[family]
    chat.sample({**CALL, "tool_calls": [first, second]}, sampled)
    history = chat.append(RESULT, {**RESULT, "tool_call_id": "ihgfedcba", "content": "4"})
    text = str(chat.tokenizer.decode(history.ids))
    assert history.continues and "3" in text and "4" in text and "add\n" not in text


def test_changed_messages_keep_sampled_ids():
    chat = Conversation("qwen", USER)
    chat.sample(CALL, CALLS["qwen"])
    chat.append(RESULT)
    chat.sample({"role": "assistant", "content": "three"}, ANSWERS["qwen"])
    chat.messages[0] = {"role": "user", "content": "2 + 1?"}
    chat.messages.append({"role": "user", "content": "sure?"})
    history = chat.render_all()
    text = str(chat.tokenizer.decode(history.ids))
    assert not history.continues and text.startswith("<|im_start|>system") and "2 + 1?" in text
    assert CALLS["qwen"] in text and ANSWERS["qwen"] in text and history.reused == {1, 3}


def test_truncated_call_ends_its_turn():
    chat = Conversation("qwen", USER)
    chat.sample(CALL, CALLS["qwen"].removesuffix("<|im_end|>") + "\n<tool_call>\n{")
    history = chat.append(RESULT)
    assert chat.tokenizer.decode(history.ids) == "<|im_end|>" + RESULTS["qwen"]


def test_templates_without_calls_get_results():
    chat = Conversation("qwen", USER)
    chat.tokenizer.chat_template = byte_tokenizer().chat_template
    chat.prefix, chat.ids = RenderedPrefix(), render_prompt(chat.tokenizer, chat.messages)
    chat.sample(CALL, CALLS["qwen"])
    chat.messages.append(RESULT)
    continued = (1, chat.prefix)
    history = render_sampled_history(chat.tokenizer, chat.messages, chat.answers, continued=continued)
    assert history.continues
    assert chat.tokenizer.decode(history.ids) == "\n<|im_start|>tool\n3<|im_end|>\n<|im_start|>assistant\n"


def test_answer_that_template_drops_is_rendered_as_text():
    chat = Conversation("qwen", USER)
    chat.tokenizer.chat_template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + (m.content if m.content | length < 25 or m.role == 'user' "
        "else 'ok') + '<|im_end|>' }}{% endfor %}"
    )
    chat.sample({"role": "assistant", "content": "ok"}, "ok<|im_end|>")
    chat.messages.append({"role": "user", "content": "no"})
    chat.messages[0] = {"role": "user", "content": "hi"}
    history = render_sampled_history(chat.tokenizer, chat.messages, chat.answers)
    assert history.reused == set() and "ok<|im_end|><|im_start|>userno" in chat.tokenizer.decode(history.ids)


@pytest.mark.parametrize("name", OTHER_FAMILIES)
def test_template_spellings_equal_the_template(name: str):
    """An answer that is spelled as the template writes it gives the tokens of the template."""
    family = OTHER_FAMILIES[name]
    tokenizer = family.tokenizer()
    messages = [USER, {**CALL, "content": "Let me see." if family.has_content else ""}, RESULT]
    prefix = RenderedPrefix()
    prompt = render_prompt(tokenizer, messages[:1], OPTIONS, prefix=prefix)
    ((ids, mask),) = render_sft_sequences(tokenizer, messages[:2], OPTIONS)
    answer = [token for token, is_answer in zip(ids, mask, strict=True) if is_answer]
    answers = {1: SampledAnswer(to_token_array(answer))}
    history = render_sampled_history(tokenizer, messages, answers, OPTIONS, continued=(1, prefix))
    assert history.continues
    assert tokenizer.decode([*prompt, *answer, *history.ids]) == tokenizer.decode(
        render_prompt(tokenizer, messages, OPTIONS)
    )


HEADERS = {
    "history drops the opening": ("<think>\n", "", "well\n</think>\n\n"),
    "history drops an empty block": ("<think>\n\n</think>\n\n", "", ""),
    "history has a closing": ("<think>", "</think>", "well</think>"),
    "history closes the opening": ("<think>\n", "<think>\n\n</think>\n\n", "well\n</think>\n\n"),
    "history adds an empty block": ("", "\n<think></think>\n", "\n<think>well</think>\n"),
}
"""(end of a new answer's header, the text in its place in history, reasoning that is sampled), as R1, Qwen 3 without
thinking, DeepSeek V3.1, Nemotron and GLM have them."""


@pytest.mark.parametrize("name", HEADERS)
@pytest.mark.parametrize("is_special", [True, False])
def test_history_keeps_openings_of_reasoning(name: str, is_special: bool):
    opening, replaced, reasoning = HEADERS[name]
    chat = Conversation("qwen", USER)
    if is_special:
        chat.tokenizer.add_special_tokens({"additional_special_tokens": ["<think>", "</think>"]})
    template = chat.tokenizer.chat_template.replace(" and loop.last %}{{ '<think>\n\n</think>\n\n", "%}{{ '" + replaced)
    chat.tokenizer.chat_template = template.replace("<|im_start|>assistant\n", "<|im_start|>assistant\n" + opening)
    chat.prefix = RenderedPrefix()
    chat.ids = render_prompt(chat.tokenizer, chat.messages, OPTIONS, prefix=chat.prefix)
    for message, text in ((CALL, CALLS["qwen"]), ({"role": "assistant", "content": "three"}, ANSWERS["llama"])):
        chat.sample(message, reasoning + text.replace("<|eot_id|>", "<|im_end|>"))
        expected = str(chat.tokenizer.decode(chat.ids)) + RESULTS["qwen"] + opening
        assert chat.append(RESULT).continues
        assert chat.tokenizer.decode(chat.ids) == expected
        assert chat.ids == chat.render_all().ids
