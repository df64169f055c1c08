"""Conversations as tensor classes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDictBase, lazy_stack

from skyrl_train.errors import ConfigError, DataError
from skyrl_train.tensordict.containers import ChatHistory, LLMData, Text
from skyrl_train.tensordict.history import ContentBase, History, add_chat_template, converted
from skyrl_train.testing.tiny_models import byte_tokenizer

TOKENIZER = byte_tokenizer()
CHAT = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": " yes\n", "is_complete": False},
    {"role": "tool", "content": "4", "tool_calls": [{"name": "f", "arguments": {"x": 1}}]},
]


def test_conversations_come_back_as_they_went_in():
    assert History.from_chats(CHAT).to_chats() == CHAT
    ragged = History.from_chats([CHAT, CHAT[:1]])
    assert ragged.ndim == 2
    assert ragged.to_chats() == [CHAT, CHAT[:1]]


def test_append_and_extend_add_turns():
    one, turn = History.from_chats(CHAT[:2]), History.from_chats(CHAT[:1])
    assert one.append(turn[0], inplace=False).to_chats() == [*CHAT[:2], CHAT[0]]
    assert len(one.to_chats()) == 2
    one.append(turn[0])
    assert one.extend(turn).to_chats() == [*CHAT[:2], CHAT[0], CHAT[0]]
    many = History.from_chats([CHAT[:1], CHAT[:2]])
    assert many.append(lazy_stack([turn[0], turn[0]])).to_chats() == [[CHAT[0]] * 2, [*CHAT[:2], CHAT[0]]]
    with pytest.raises(RuntimeError, match="dimensions"):
        one.append(turn)
    with pytest.raises(RuntimeError, match="dimensions"):
        one.extend(many)


@pytest.mark.defect("D16")
def test_the_mask_covers_what_the_assistant_wrote_and_the_end_of_its_turn():
    talk = [{"role": "user", "content": "<|im_end|>"}, {"role": "assistant", "content": "yes"}]
    rendered = History.from_chats(talk).apply_chat_template(
        tokenizer=TOKENIZER, add_generation_prompt=False, return_assistant_tokens_mask=True
    )
    assert TOKENIZER.decode(rendered["input_ids"][rendered["assistant_masks"].bool()]) == "yes<|im_end|>"
    assert int((rendered["input_ids"] == TOKENIZER.eos_token_id).sum()) == 2  # the spelt one is text


def test_templates_give_text_ids_and_padded_tensors():
    history = History.from_chats([CHAT[:1], [{"role": "user", "content": "hello"}]])
    texts = history.apply_chat_template(tokenizer=TOKENIZER)
    assert texts[0] == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    out = history.apply_chat_template(tokenizer=TOKENIZER, return_tensors="pt", padding=True, return_dict=True)
    pairs = zip(out["input_ids"], out["attention_mask"], strict=True)
    assert [TOKENIZER.decode(row[mask.bool()]) for row, mask in pairs] == texts
    assert out["attention_mask"][0].tolist()[:3] == [0, 0, 0]


@pytest.mark.defect("chat-template-returns-lists")
def test_ids_of_templates_are_tensors_and_dictionaries_are_tensordicts():
    one, both = History.from_chats(CHAT[:1]), History.from_chats([CHAT[:1], [{"role": "user", "content": "hello"}]])
    ids = one.apply_chat_template(tokenizer=TOKENIZER, tokenize=True)
    assert ids.shape == (1, len(ids[0])) and ids.dtype == torch.int64
    row = one.apply_chat_template(tokenizer=TOKENIZER, return_dict=True)
    assert isinstance(row, TensorDictBase) and torch.equal(row["input_ids"], ids[0])
    several = both.apply_chat_template(tokenizer=TOKENIZER, return_tensors="pt")
    assert [row.ndim for row in several] == [2, 2] and torch.equal(several[0], ids)
    masked = both.apply_chat_template(tokenizer=TOKENIZER, return_assistant_tokens_mask=True)
    assert masked.batch_size == (2,)
    assert torch.equal(masked[0]["input_ids"], ids[0])
    with pytest.raises(ConfigError, match="return_tensors"):
        one.apply_chat_template(tokenizer=TOKENIZER, return_tensors="np")


@pytest.mark.defect("D17")
def test_templates_are_never_guessed_from_a_path():
    plain = byte_tokenizer()
    plain.chat_template = "{% for m in messages %}{{ m['content'] }}!{% endfor %}"
    plain.name_or_path = "/models/llama/qwen"
    history = History.from_chats(CHAT[:1])
    assert history.apply_chat_template(tokenizer=plain) == "hi!"
    assert history.apply_chat_template(tokenizer=plain, chat_template_name="chatml").startswith("<|im_start|>")
    plain.chat_template = None
    with pytest.warns(UserWarning, match="ChatML"):
        assert history.apply_chat_template(tokenizer=plain).startswith("<|im_start|>user\nhi")


def test_keywords_of_added_templates_select_them():
    add_chat_template("whispering", "{% for m in messages %}({{ m['content'] }}){% endfor %}", None, ["Whisper-Model"])
    named = byte_tokenizer()
    named.name_or_path = "/models/whisper-model-1"
    history = History.from_chats(CHAT[:1])
    assert history.apply_chat_template(tokenizer=named) == "(hi)"
    assert history.apply_chat_template(tokenizer=named, chat_template_name="chatml").startswith("<|im_start|>")
    assert history.apply_chat_template(tokenizer=TOKENIZER).startswith("<|im_start|>")


def test_both_history_classes_append_and_render_each_other(torchrl: Any):
    theirs = torchrl.data.llm.History(role="user", content="hi")
    ours = History.from_chats([CHAT[0]]).append(theirs).extend(lazy_stack([theirs]))
    assert isinstance(ours, torchrl.data.llm.History) and ours.to_chats() == [CHAT[0]] * 3
    back = converted(ours, torchrl.data.llm.History)
    assert type(back) is torchrl.data.llm.History
    assert History.to_chats(back.append(ours[0])) == [CHAT[0]] * 4
    assert ours.to_chats() == [CHAT[0]] * 3
    for both in (History.from_chats([CHAT[:1], CHAT[:1]]), converted(History.from_chats([CHAT[:1]] * 2), History)):
        assert History.apply_chat_template(both, tokenizer=TOKENIZER)[1].endswith("assistant\n")


def test_nested_batches_render_in_their_shape():
    history = lazy_stack([History.from_chats([CHAT[:1], CHAT[:2]]), History.from_chats([CHAT[:2], CHAT[:1]])])
    texts = history.apply_chat_template(tokenizer=TOKENIZER, add_generation_prompt=False)
    assert texts[0] == texts[1][::-1] and len(texts[0]) == 2
    masked = history.apply_chat_template(tokenizer=TOKENIZER, return_assistant_tokens_mask=True)
    assert masked.batch_size == (2, 2)


TALK = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "yes\nor no"},
    {"role": "user", "content": "which?"},
    {"role": "assistant", "content": "yes"},
]


@pytest.mark.defect("D16")
@pytest.mark.parametrize("name", ["falcon", "deepseek", "dialogpt"])
def test_templates_without_control_tokens_are_parsed_back(name: str):
    chat = TALK if name == "dialogpt" else [{"role": "system", "content": "Be brief."}, *TALK]
    history = History.from_chats(chat)
    options: dict[str, Any] = {"tokenizer": TOKENIZER, "chat_template_name": name, "add_generation_prompt": False}
    text = history.apply_chat_template(**options)
    assert History.from_text(text, name, tokenizer=TOKENIZER).to_chats() == chat
    open_turn = History.from_text(text[:-2], name, tokenizer=TOKENIZER).to_chats()[-1]
    assert open_turn["is_complete"] is False and open_turn["content"].startswith("yes")
    found = history.apply_chat_template(return_assistant_tokens_mask=True, **options)
    answers = str(TOKENIZER.decode(found["input_ids"][found["assistant_masks"].bool()]))
    end = {"falcon": "\n\n"}.get(name, TOKENIZER.eos_token)
    assert answers.replace(" yes", "yes") == f"yes\nor no{end}yes{end}"


def test_dialogpt_rejects_turns_that_do_not_alternate():
    with pytest.raises(DataError, match="in turn"):
        History.from_chats([TALK[0], TALK[0]]).apply_chat_template(tokenizer=TOKENIZER, chat_template_name="dialogpt")


def test_templates_can_be_added_once():
    add_chat_template("shouting", "{% for m in messages %}{{ m['content'] }}!{% endfor %}", lambda text: [])
    assert History.from_chats(CHAT[:1]).apply_chat_template(tokenizer=TOKENIZER, chat_template_name="shouting") == "hi!"
    with pytest.raises(ConfigError, match="shouting"):
        add_chat_template("shouting", "other")
    with pytest.raises(RuntimeError, match="No turn"):
        History.from_text("x", chat_template_name="shouting")


@pytest.mark.defect("D16")
def test_a_rendered_text_is_read_with_its_blanks_and_its_open_turn():
    text = "<|im_start|>user\n hi <|im_end|>\n<|im_start|>assistant\nye"
    chat = [{"role": "user", "content": " hi "}, {"role": "assistant", "content": "ye", "is_complete": False}]
    assert History.from_text(text).to_chats() == chat
    assert History.from_text([text, text]).to_chats() == [chat, chat]
    with pytest.raises(ConfigError, match="parser"):
        History.from_text(text, chat_template_name="gemma")


@pytest.mark.defect("history-from-text-unknown-templates")
@pytest.mark.parametrize("name", ["chatml_format", "qwen", "llama", "llama3", "llama4"])
def test_what_a_named_template_renders_is_read_again(name: str):
    plain = [{"role": "system", "content": "Be brief."}, *CHAT[:1], {"role": "assistant", "content": "yes"}]
    history = History.from_chats(plain)
    text = history.apply_chat_template(tokenizer=TOKENIZER, chat_template_name=name, add_generation_prompt=False)
    for given in (name, None):
        assert History.from_text(text, chat_template_name=given).to_chats() == plain
    with pytest.raises(ConfigError, match="another template"):
        add_chat_template(name, "{{ messages }}")


def test_qwen_writes_its_own_system_message_where_there_is_none():
    opening = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
    asked = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    rendered: dict[str, Any] = {"tokenizer": TOKENIZER, "chat_template_name": "qwen", "add_generation_prompt": True}
    assert History.from_chats([{"role": "user", "content": "hi"}]).apply_chat_template(**rendered) == opening + asked
    own = History.from_chats([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}])
    assert own.apply_chat_template(**rendered) == opening.replace("You are a helpful assistant.", "Be brief.") + asked


@pytest.mark.defect("history-from-text-unknown-templates")
def test_turns_may_end_with_the_end_of_text_and_llamas_with_their_own_tokens():
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    ended = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nyes<|endoftext|>"
    assert History.from_text(ended).to_chats() == chat
    header = "<|header_start|>{}<|header_end|>\n\n"
    four = f"{header.format('user')}hi<|eot|>{header.format('assistant')}yes<|eot|>"
    assert History.from_text(four, chat_template_name="llama").to_chats() == chat
    assert History.from_text(four.removesuffix("<|eot|>")).to_chats()[1]["is_complete"] is False
    with pytest.raises(RuntimeError, match="No turn"):
        History.from_text("nothing")


@pytest.mark.defect("assistant-first-conversation-fails")
def test_a_conversation_that_begins_with_the_assistant_has_its_mask():
    history = History.from_chats([{"role": "assistant", "content": "hello"}, *CHAT[:1]])
    found = history.apply_chat_template(tokenizer=TOKENIZER, return_assistant_tokens_mask=True)
    assert TOKENIZER.decode(found["input_ids"][found["assistant_masks"].bool()]) == "hello<|im_end|>"


@pytest.mark.defect("D16")
def test_calls_of_tools_go_round_as_they_were_written():
    called = '<tool_call>\n{"name": "now"}\n</tool_call>'
    chat = [{"role": "system", "content": "Be brief."}, {"role": "assistant", "content": called}]
    history = History.from_chats(chat)
    text = history.apply_chat_template(tokenizer=TOKENIZER, chat_template_name="qwen", add_generation_prompt=False)
    assert History.from_text(text, chat_template_name="qwen").to_chats() == history.to_chats()
    unargued = {"role": "assistant", "content": "", "tool_calls": [{"name": "now"}]}
    with pytest.raises(DataError, match=r"messages\[0\].tool_calls\[0\].function.name: .* does not write 'now'"):
        History.from_chats([unargued]).apply_chat_template(tokenizer=TOKENIZER)


def test_text_parts_are_text_and_the_last_message_can_be_continued():
    chat = [{"role": "user", "content": [{"type": "text", "text": "2 "}, {"type": "text", "text": "+ 2?"}]}]
    history = History.from_chats([*chat, {"role": "assistant", "content": "The answer"}])
    assert history.content[0] == "2 + 2?"
    text = "<|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>assistant\nThe answer"
    options: dict[str, Any] = {"tokenizer": TOKENIZER, "continue_final_message": True, "add_generation_prompt": False}
    assert history.apply_chat_template(**options) == text
    ids = history.apply_chat_template(tokenize=True, return_dict=True, **options)["input_ids"]
    assert TOKENIZER.decode(ids.flatten()) == text
    with pytest.raises(ConfigError, match="continue_final_message=True"):
        history.apply_chat_template(tokenize=True, return_assistant_tokens_mask=True, return_dict=True, **options)


def test_containers_hold_their_fields():
    with pytest.warns(UserWarning, match="batch dimension"):
        chat: Any = ChatHistory(prompt=History.from_chats(CHAT[:2]), batch_size=(2,))
    assert chat.prompt.ndim == 2
    assert Text(prompt=["a", "b"], batch_size=(2,))[1].prompt == "b"
    assert LLMData(text="a").text == "a"
    assert ContentBase(type="text", text="a").text == "a"


def test_the_mask_stands_at_the_answers_tokens_where_text_would_be_cut_elsewhere():
    """With a token for two line breaks, a header and an answer that begins with one are other tokens as one text."""
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["\n\n"])
    history = History.from_chats([{"role": "user", "content": "a"}, {"role": "assistant", "content": "\nbcd"}])
    lengths = []
    for opens in (False, True):
        found = history.apply_chat_template(
            tokenizer=tokenizer, add_generation_prompt=opens, return_assistant_tokens_mask=True
        )
        assert tokenizer.decode(found["input_ids"][found["assistant_masks"].bool()]) == "\nbcd<|im_end|>"
        lengths.append(len(found["input_ids"]))
    assert tokenizer.decode(found["input_ids"][lengths[0] :]) == "<|im_start|>assistant\n"


def test_parts_of_a_message_are_its_text_or_what_templates_call_parts():
    text, image = ContentBase(type="text", text="hello"), ContentBase(type="image", url="a.png")
    for content, wanted in ((text, "hello"), ([text, text], "hellohello")):
        history = History.from_chats([{"role": "user", "content": content}])
        assert history.to_chats() == [{"role": "user", "content": wanted}]
        assert f"user\n{wanted}<|im_end|>" in history.apply_chat_template(tokenizer=TOKENIZER)
    history = History.from_chats([{"role": "user", "content": [text, image]}])
    parts = [{"type": "text", "text": "hello"}, {"type": "image", "url": "a.png"}]
    assert history.to_chats() == [{"role": "user", "content": parts}]


def test_turns_of_another_device_are_appended():
    one, turn = History.from_chats(CHAT[:2]), History.from_chats(CHAT[:1])
    assert one.to("cpu").append(turn[0], inplace=False).to_chats() == [*CHAT[:2], CHAT[0]]
    assert one.append(turn.to("cpu")[0], inplace=False).to_chats() == [*CHAT[:2], CHAT[0]]
