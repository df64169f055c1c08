"""A chat template may trim, escape, repeat or move texts, but not drop them."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import pytest
from hypothesis import given, strategies as st
from transformers import PreTrainedTokenizerFast

from skyrl_train.data.chat import render_continuation, render_conversation, render_messages, render_prompt
from skyrl_train.data.chat_templates import TEMPLATES
from skyrl_train.data.reasoning import REASONING_FORMATS, ReasoningFormat
from skyrl_train.errors import DataError
from skyrl_train.testing.tiny_models import byte_tokenizer

OPEN = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
CALLING = (
    "{% if tools %}{{ '<|im_start|>system\n' }}{% for t in tools %}{{ t | tojson }}{% endfor %}{{ '<|im_end|>\n' }}"
    "{% endif %}{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + (m.content or '') }}"
    "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}" + OPEN
)
"""A template that writes calls and tools as JSON."""
AS_TEXT = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.content is none %}{% for c in m.tool_calls %}"
    "{{ c.function.name + ':' + c.function.arguments }}{% endfor %}{% else %}{{ m.content }}{% endif %}"
    "{{ '<|im_end|>\n' }}{% endfor %}" + OPEN
)
"""A template that writes calls only if the content is null, and arguments only if they are text."""
PARTS = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% for p in m.content %}{% if p.type == 'text' %}"
    "{{ p.text }}{% endif %}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}" + OPEN
)
"""A template that writes content only if it is a list of parts."""
THINKING = (
    "{% for m in messages %}{% set c = m.content %}{% set r = m.reasoning_content or '' %}"
    "{% if m.role == 'assistant' and '</think>' in c %}{% set r = c.split('</think>')[0].split('<think>')[-1] %}"
    "{% set c = c.split('</think>')[-1].lstrip('\n') %}{% endif %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' and loop.last %}{{ '<think>\n' + r.strip('\n') + '\n</think>\n\n' }}{% endif %}"
    "{{ c + '<|im_end|>\n' }}{% endfor %}" + OPEN
)
"""A template that writes the reasoning of the last turn, from its field or its content."""
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


def with_template(template: str) -> PreTrainedTokenizerFast:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def make_messages(*said: tuple[str, str]) -> list[dict[str, Any]]:
    return [{"role": role, "content": content} for role, content in said]


def template_with_content(content: str) -> str:
    """Return a template that writes an expression in place of each message's content."""
    return "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + " + content + "}}<|im_end|>{% endfor %}" + OPEN


def tool_call_message(name: str, arguments: Any, **fields: Any) -> dict[str, Any]:
    call = {"id": "abcdefghi", "type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call], **fields}


def render_to_text(template: str, messages: list[dict[str, Any]], **options: Any) -> str:
    tokenizer = with_template(template)
    return str(tokenizer.decode(render_prompt(tokenizer, messages, options)))


PART_TEMPLATES = {
    "parts": PARTS,
    "text only": template_with_content("(m.content if m.content is string else '')"),
    **TEMPLATES,
}


@pytest.mark.parametrize("name", PART_TEMPLATES)
def test_every_template_writes_text_parts(name: str):
    content = [{"type": "text", "text": "What is "}, {"type": "text", "text": "2 + 2?"}]
    text = render_to_text(PART_TEMPLATES[name], [{"role": "user", "content": content}])
    assert "What is 2 + 2?" in text and "type" not in text


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize(
    ("message", "field"),
    [
        (tool_call_message("add", {"a": 1}), r"tool_calls\[0\]\.function\.name"),
        ({"role": "assistant", "content": "4", "reasoning_content": "2 + 2"}, "reasoning_content"),
        ({"role": "assistant", "content": "4", "thinking": "2 + 2"}, "thinking"),
    ],
)
def test_fields_unknown_to_template_are_rejected(name: str, message: dict[str, Any], field: str):
    messages = [*make_messages(("user", "2 + 2?")), message, *make_messages(("user", "sure?"))]
    with pytest.raises(DataError, match=rf"messages\[1\]\.{field}: the chat template does not write"):
        render_to_text(TEMPLATES[name], messages)


@pytest.mark.parametrize("name", TEMPLATES)
def test_unwritten_tools_are_rejected(name: str):
    with pytest.raises(DataError, match=r"tools\[0\]\.function\.name: the chat template does not write the tool 'add'"):
        render_to_text(TEMPLATES[name], make_messages(("user", "2 + 2?")), tools=[TOOL])


@pytest.mark.parametrize(
    ("name", "role", "error"),
    [("gemma", "tool", True), ("mistral", "tool", True), ("mistral", "developer", True), ("chatml", "tool", False)],
)
def test_roles_that_a_template_writes_alike_are_refused(name: str, role: str, error: bool):
    messages = [*make_messages(("user", "2 + 2?"), ("assistant", "add")), {"role": role, "content": "4"}]
    if not error:
        assert f"{role}\n4" in render_to_text(TEMPLATES[name], messages)
        return
    for index, said in ((2, messages), (0, messages[2:])):
        with pytest.raises(DataError, match=rf"messages\[{index}\]\.role: .* role '{role}' like a message of another"):
            render_to_text(TEMPLATES[name], said)


def test_dropped_system_message_is_detected_despite_duplicate():
    template = "{% for m in messages if m.role != 'system' %}{{ m.role + ':' + m.content }}{% endfor %}"
    with pytest.raises(DataError, match=r"messages\[0\]\.content: .* does not write 'user' of this system message"):
        render_to_text(template, make_messages(("system", "user"), ("user", "say user")))


def test_messages_in_another_order_are_refused():
    template = "{% for m in messages | reverse %}{{ m.role + ':' + m.content }}{% endfor %}"
    with pytest.raises(DataError, match=r"messages\[1\]\.content"):
        render_to_text(template, make_messages(("user", "a"), ("assistant", "b"), ("user", "c")))


def test_a_template_may_move_the_system_message():
    last = "{% for m in messages %}{% if m.role != 'system' %}{{ '<|im_start|>' + m.role + '\n' }}"
    last += (
        "{% if loop.last %}{{ messages[0].content + '\n' }}{% endif %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
    )
    text = render_to_text(last, make_messages(("system", "be brief"), ("user", "a"), ("assistant", "b"), ("user", "c")))
    assert text.endswith("user\nbe brief\nc<|im_end|>")


@pytest.mark.parametrize(
    "content",
    [
        "m.content | trim",
        "m.content | tojson",
        "m.content | e",
        "m.content | trim | tojson",
        "m.content | indent(4)",
        "m.content ~ m.content",
        "(m.content if m.content | length != 20 else m.content | trim)",
    ],
)
@given(text=st.text(alphabet=st.sampled_from("ab \n\"'<>&\\é1/{}[]"), max_size=20))
def test_trimmed_and_escaped_texts_are_found(content: str, text: str):
    tokenizer = with_template(template_with_content(content))
    assert render_prompt(tokenizer, make_messages(("user", text), ("assistant", "ok"), ("user", text)))


@pytest.mark.parametrize("content", ["m.content[:12]", "m.content | replace('b', '')", "m.content | upper", "'x'"])
@pytest.mark.parametrize("text", ["ab ab ab ab ab ab", "x ab ab ab ab ab ab x"])
def test_shortened_and_changed_texts_are_refused(content: str, text: str):
    with pytest.raises(DataError, match=r"messages\[0\]\.content"):
        render_to_text(template_with_content(content), make_messages(("user", text)))


def test_template_dependent_text_is_checked_itself():
    template = template_with_content("(m.content if 'secret' not in m.content else 'hidden')")
    assert "public" in render_to_text(template, make_messages(("user", "public")))
    with pytest.raises(DataError, match="does not write 'a secret'"):
        render_to_text(template, make_messages(("user", "a secret")))


@pytest.mark.parametrize(
    ("condition", "text"),
    [
        ("m.content.startswith('/')", "/a"),
        ("m.content.endswith('!')", "a!"),
        ("m.content == 'a'", "a"),
        ("m.content | length < 3", "us"),
        ("m.content | length > 20", "a" * 21),
    ],
)
def test_texts_dropped_by_their_form_are_refused(condition: str, text: str):
    template = template_with_content(f"('' if {condition} else m.content)")
    assert "b c d" in render_to_text(template, make_messages(("user", "b c d")))
    with pytest.raises(DataError, match=rf"messages\[0\]\.content: the chat template does not write '{text}'"):
        render_to_text(template, make_messages(("user", text)))
    marks = template_with_content(f"(('*' if {condition} else '') + m.content)")
    assert f"*{text}" in render_to_text(marks, make_messages(("user", text), ("assistant", "a"), ("user", text)))


def test_templates_that_refuse_long_texts_are_checked():
    template = template_with_content("(m.content if m.content | length < 9 else raise_exception('too long'))")
    assert "a b" in render_to_text(template, make_messages(("user", "a b")))
    with pytest.raises(DataError, match="does not write 'a b'"):
        render_to_text(template.replace("m.content if", "'' if"), make_messages(("user", "a b")))


@pytest.mark.parametrize("content", ["", None])
def test_calls_and_tools_are_written(content: str | None):
    messages = [
        *make_messages(("user", "one plus one")),
        tool_call_message("add", {"a": 1, "unit": "apples <b>", "list": [2.5, None, {"deep": True}]}, content=content),
        {"role": "tool", "content": "2", "tool_call_id": "abcdefghi"},
    ]
    text = render_to_text(CALLING, messages, tools=[TOOL])
    assert '"name": "add"' in text and '"unit": "apples <b>"' in text and "None" not in text
    assert '"parameters"' in text


@pytest.mark.parametrize("text", ["1", "", "  "])
def test_template_may_write_own_call_role(text: str):
    tokenizer = with_template(
        "{% for m in messages %}{% if m.tool_calls %}"
        "{{ '<|im_start|>assistant\n' + m.tool_calls[0].function | tojson }}"
        "{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}" + OPEN
    )
    call = {"function": {"name": "add", "arguments": {"a": text}}}
    chat = [
        *make_messages(("user", "add")),
        {"role": "assistant", "content": "", "tool_calls": [call]},
        *make_messages(("tool", text)),
    ]
    assert '"name": "add"' in str(tokenizer.decode(render_prompt(tokenizer, chat)))


def test_rejected_last_turn_allows_dropping_reasoning():
    tokenizer = with_template(
        "{% if messages[-1].role == 'assistant' %}{{ raise_exception('ends with an answer') }}{% endif %}"
        + template_with_content("m.content")
    )
    chat = make_messages(("user", "one"), ("assistant", "first"), ("user", "two"))
    chat[1]["reasoning_content"] = "because"
    assert "first" in str(tokenizer.decode(render_prompt(tokenizer, chat)))


@pytest.mark.parametrize("calls", [[], None])
def test_messages_without_calls_have_no_such_key(calls: list[Any] | None):
    template = template_with_content("('calls' if 'tool_calls' in m else m.content)")
    message = {"role": "assistant", "content": "2", "tool_calls": calls}
    assert "assistant\n2<|im_end|>" in render_to_text(
        template, [*make_messages(("user", "?")), message, *make_messages(("user", "!"))]
    )


def test_arguments_that_a_template_drops_are_refused():
    template = CALLING.replace("c.function | tojson", "c.function.name")
    with pytest.raises(DataError, match=r"messages\[1\]\.tool_calls\[0\]\.function\.arguments: .* write 'a'"):
        render_to_text(template, [*make_messages(("user", "?")), tool_call_message("add", {"a": 1})])


def test_calls_use_format_of_template():
    messages = [*make_messages(("user", "?")), tool_call_message("add", '{"a": "é"}'), *make_messages(("tool", "2"))]
    assert 'assistant\nadd:{"a": "é"}<|im_end|>' in render_to_text(AS_TEXT, messages)
    assert '"arguments": {"a": "é"}' in render_to_text(CALLING, messages)


def test_many_ids_make_one_shape(monkeypatch: pytest.MonkeyPatch):
    template = CALLING.replace("c.function | tojson", "(c.id ~ c.function) | tojson")
    tokenizer, count = with_template(template), 0
    apply = tokenizer.apply_chat_template

    def counted(*args: Any, **options: Any) -> Any:
        nonlocal count
        count += 1
        return apply(*args, **options)

    monkeypatch.setattr(tokenizer, "apply_chat_template", counted)
    for number in range(20):
        before = count
        message = tool_call_message("add", {"a": number, "b": f"text {number}"})
        message["tool_calls"][0]["id"] = f"call_{number:020}"
        render_prompt(tokenizer, [*make_messages(("user", f"question {number}")), message])
    assert count - before == 1  # the prompt itself


def test_known_earlier_reasoning_may_be_dropped():
    thought = {"role": "assistant", "content": "b", "reasoning_content": "because"}
    text = render_to_text(THINKING, [*make_messages(("user", "a")), thought, *make_messages(("user", "c"))])
    assert "because" not in text and text.endswith("<|im_start|>assistant\n")
    inside = make_messages(("user", "a"), ("assistant", "<think>because</think>b"), ("user", "c"))
    assert "because" not in render_to_text(THINKING, inside)
    assert "because" in render_to_text(TEMPLATES["chatml"], inside)


@pytest.mark.parametrize("entry", REASONING_FORMATS, ids=lambda entry: entry.open_marker)
def test_reasoning_between_any_markers_may_be_dropped(entry: ReasoningFormat):
    template = THINKING.replace("</think>", entry.close_marker).replace("<think>", entry.open_marker)
    answer = f"{entry.open_marker}because{entry.close_marker}b"
    assert "because" not in render_to_text(template, make_messages(("user", "a"), ("assistant", answer), ("user", "c")))


def test_a_user_may_write_about_tags():
    text = "what does </think> mean, and <think>?"
    assert text in render_to_text(THINKING, make_messages(("user", text)))


@pytest.mark.parametrize("name", ["chatml", "llama3"])
def test_rewards_and_continuations_are_checked_too(name: str):
    template = TEMPLATES[name].replace("message['content']", "(message['content'] | replace('long', ''))")
    tokenizer = with_template(template)
    messages = make_messages(("user", "a"), ("assistant", "b"), ("user", "a long question"))
    for render in (render_messages, render_conversation, partial(render_continuation, assistant_indices=[1])):
        with pytest.raises(DataError, match=r"messages\[2\]\.content"):
            render(tokenizer, messages)


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_last_message_of_the_assistant_is_continued(name: str):
    tokenizer = with_template(TEMPLATES[name])
    messages = make_messages(("user", "2 + 2?"), ("assistant", "The answer is "))
    expected = tokenizer.apply_chat_template(messages, tokenize=False, continue_final_message=True)
    assert tokenizer.decode(render_prompt(tokenizer, messages)) == expected
    assert str(expected).rstrip().endswith("The answer is")
    begun_anew = str(tokenizer.decode(render_prompt(tokenizer, messages, continue_final_message=False)))
    assert begun_anew == tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


def test_reasoning_to_continue_must_be_written():
    drops = template_with_content("m.content.split('</think>')[-1]")
    with pytest.raises(DataError, match=r"messages\[1\]\.content: .* write 'hm'"):
        render_to_text(drops, make_messages(("user", "a"), ("assistant", "<think>hm</think>b")))
    assert render_to_text(drops, make_messages(("user", "a"), ("assistant", "<think>hm"))).endswith("<think>hm")


def test_rows_without_parts_render_unchanged():
    for template in TEMPLATES.values():
        tokenizer = with_template(template)
        messages = make_messages(("system", "be brief"), ("user", "a <b> & é"), ("assistant", "c"), ("user", "d"))
        expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert render_prompt(tokenizer, messages) == expected


def test_messages_name_fields_once():
    with pytest.raises(DataError) as error:
        render_to_text(TEMPLATES["chatml"], [*make_messages(("user", "?")), tool_call_message("add", {})])
    assert len(re.findall("tool_calls", str(error.value))) == 1
