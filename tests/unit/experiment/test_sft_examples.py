from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from skyrl_train.config.hydra import load_preset
from skyrl_train.data.chat_templates import QWEN3_WITHOUT_THINKING
from skyrl_train.errors import DataError
from skyrl_train.experiment.data import build_prompts, build_sft_examples
from skyrl_train.testing.tiny_models import byte_tokenizer


@pytest.mark.defect("assistant-first-conversation-fails")
def test_leading_assistant_answer_is_trained_on(tmp_path: Path):
    messages = [("assistant", "hello"), ("user", "hi"), ("assistant", "yes")]
    rows = tmp_path / "chats.jsonl"
    rows.write_text(json.dumps({"messages": [{"role": role, "content": text} for role, text in messages]}) + "\n")
    (found,), _ = build_sft_examples(load_preset([f"data.train_data=['{rows}']"]), byte_tokenizer())
    trained = [token for token, is_trained in zip(found.input_ids, found.loss_mask, strict=True) if is_trained]
    assert byte_tokenizer().decode(trained) == "hello<|im_end|>yes<|im_end|>"


@pytest.mark.defect("demonstration-error-lacks-row")
@pytest.mark.parametrize(
    ("messages", "error"),
    [
        ([{"role": "user", "content": "a \ud800"}, {"role": "assistant", "content": "b"}], "half a surrogate pair"),
        (["hi"], "'hi' is not a message"),
        ([{"role": "assistant", "content": 3}], "is not a message"),
        ([{"role": "user", "content": None}], "the content of a user message is null"),
        ([{"role": "nobody", "content": "a"}], "the chat template rejects these messages: who is nobody"),
        ([{"role": "user", "content": "a"}], "its messages hold no answer"),
        ([], "messages is .*not a list of messages"),
        ("hi", "messages is 'hi', not a list of messages"),
        (None, "no 'messages' among its columns"),
    ],
)
def test_invalid_demonstration_names_row(tmp_path: Path, messages: Any, error: str):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m['role'] == 'nobody' %}{{ raise_exception('who is nobody') }}{% endif %}"
        "{% endfor %}" + tokenizer.chat_template
    )
    rows = tmp_path / "chats.jsonl"
    rows.write_text(f"{json.dumps({'messages': [{'role': 'assistant', 'content': 'yes'}]})}\n" + "\n")
    with rows.open("a") as file:
        file.write(json.dumps({"messages": messages}) + "\n")
    with pytest.raises(DataError, match=rf"chats\.jsonl, line 3: .*{error}"):
        build_sft_examples(load_preset([f"data.train_data=['{rows}']"]), tokenizer)


CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "required": ["a"]}}}]
CALLING = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}{{ '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def write_rows(path: Path, rows: list[dict[str, Any]]) -> str:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"data.train_data=['{path}']"


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_tool_calls_are_trained_on(tmp_path: Path, suffix: str):
    other = {"type": "function", "function": {"name": "sub", "arguments": {"b": "x"}}}
    rows = [
        {
            "tools": TOOLS,
            "messages": [
                {"role": "user", "content": "one plus one"},
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "content": "2"},
                {"role": "assistant", "content": "two"},
            ],
        }
        for call in (CALL, other)
    ]
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = CALLING
    (found, _), _ = build_sft_examples(load_preset([write_rows(tmp_path / f"rows{suffix}", rows)]), tokenizer)
    trained = [token for token, is_trained in zip(found.input_ids, found.loss_mask, strict=True) if is_trained]
    text = str(tokenizer.decode(trained)).replace(
        '"arguments": {"a": 1}, "name": "add"', '"name": "add", "arguments": {"a": 1}'
    )
    assert text == '{"name": "add", "arguments": {"a": 1}}<|im_end|>two<|im_end|>'
    assert "parameters" in tokenizer.decode(found.input_ids)


def test_dropped_tool_calls_name_row(tmp_path: Path):
    answer = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    rows = [{"messages": [{"role": "user", "content": "?"}, answer]}]
    with pytest.raises(DataError, match=r"rows\.jsonl, line 1: messages\[1\]\.tool_calls\[0\]\.function\.name"):
        build_sft_examples(load_preset([write_rows(tmp_path / "rows.jsonl", rows)]), byte_tokenizer())


def test_answers_become_rows_where_history_is_rewritten(tmp_path: Path):
    turns = [("user", "q"), ("assistant", "<think>t</think>a"), ("user", "r"), ("assistant", "b")]
    rows = [{"messages": [{"role": role, "content": text} for role, text in turns]}]
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = QWEN3_WITHOUT_THINKING
    found, _ = build_sft_examples(load_preset([write_rows(tmp_path / "rows.jsonl", rows)]), tokenizer)
    assert len(found) == 2


def test_prompts_with_tools_and_parts_are_loaded(tmp_path: Path):
    rows = [{"prompt": [{"role": "user", "content": [{"type": "text", "text": "one?"}]}], "tools": TOOLS}]
    cfg = load_preset([write_rows(tmp_path / "rows.jsonl", rows), "environment.env_class=chat"])
    tokenizer = byte_tokenizer()
    with pytest.raises(DataError, match=r"rows\.jsonl, line 1: column 'prompt': tools\[0\]\.function\.name"):
        build_prompts(cfg, tokenizer, cfg.data.train_data, "data.train_data")
    tokenizer.chat_template = CALLING
    (prompt,) = build_prompts(cfg, tokenizer, cfg.data.train_data, "data.train_data").prompts
    assert prompt.messages == [{"role": "user", "content": "one?"}]
