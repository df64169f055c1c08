"""Separation of a model's reasoning from its answer.

    final_answer("<think>41? No.</think>\n\n#### 42")     "#### 42"
    final_answer("<think>41? No, it is")                  "", because the reasoning never ends

Every built-in environment, tool parser and tensordict grader reads an answer through `final_answer`. Reasoning
therefore neither invalidates a correct answer nor earns a reward. The module needs neither a tokenizer nor torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The pair of markers around the reasoning of a family of models."""

    open_marker: str
    close_marker: str
    models: str
    """Models that write these markers, for the documentation."""


REASONING_FORMATS = (
    ReasoningFormat("<think>", "</think>", "DeepSeek-R1, Qwen3, QwQ, GLM-4.5, Kimi K2, MiniMax-M2, Nemotron, OLMo 3"),
    ReasoningFormat("[THINK]", "[/THINK]", "Magistral and later reasoning models of Mistral; special tokens"),
    ReasoningFormat("<seed:think>", "</seed:think>", "Seed-OSS"),
    ReasoningFormat("<mm:think>", "</mm:think>", "MiniMax-M3"),
    ReasoningFormat("<thought>", "</thought>", "EXAONE Deep"),
    ReasoningFormat("◁think▷", "◁/think▷", "Kimi-VL Thinking"),
    ReasoningFormat("<|START_THINKING|>", "<|END_THINKING|>", "Command A Reasoning"),
    ReasoningFormat("<|inner_prefix|>", "<|inner_suffix|>", "Apertus; special tokens"),
    ReasoningFormat("<|channel>thought", "<channel|>", "Gemma 4; <|channel> and <channel|> are special tokens"),
    ReasoningFormat("<|begin_of_thought|>", "<|end_of_thought|>", "Sky-T1, OpenThinker"),
    ReasoningFormat("<thinking>", "</thinking>", "models whose prompt asks for these tags"),
    ReasoningFormat("<reasoning>", "</reasoning>", "models whose prompt asks for these tags"),
)
ANSWER_WRAPPERS = (
    ("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    ("<|begin_of_solution|>", "<|end_of_solution|>"),
    ("<response>", "</response>"),
)
"""Markers that some models put around the answer after their reasoning: Command A Reasoning, Sky-T1, Granite 3.3.
Hunyuan's <answer> is left out, because environments ask for this tag themselves."""
HARMONY_CHANNEL, HARMONY_MESSAGE, HARMONY_START, HARMONY_END = "<|channel|>", "<|message|>", "<|start|>", "<|end|>"
"""Special tokens of gpt-oss (the harmony format), which writes reasoning and answer as messages in channels:
`<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...`."""
HARMONY_FINAL_CHANNEL = "final"

CLOSE_MARKERS = {entry.open_marker: entry.close_marker for entry in REASONING_FORMATS}
"""Opening marker -> closing marker."""
CLOSE_MARKER_PATTERN = re.compile("|".join(re.escape(entry.close_marker) for entry in REASONING_FORMATS))
"""Pattern of the closing markers."""
_OPENING = "|".join(re.escape(entry.open_marker) for entry in REASONING_FORMATS)
MARKER_PATTERN = re.compile(
    "|".join(re.escape(marker) for entry in REASONING_FORMATS for marker in (entry.open_marker, entry.close_marker))
)
HARMONY_PATTERN = re.compile(r"\s*+(?:<\|start\|>)?(?:assistant)?\s*+(?:to=\S+?\s*+)?<\|channel\|>")
"""Beginning of a turn of gpt-oss. "<|channel|>" elsewhere in a text has no meaning."""
QUOTES = "`\"'"
_CHANNEL_NAME = re.compile(r"\s*\w+")
ENDS_MESSAGE = re.compile(r"<\|(?:end|return|call|start)\|>")
_OPENS_AT_END = re.compile(rf"(?:{_OPENING}|<\|channel\|>\w+<\|message\|>)\s*\Z")
_TOKENS = {marker for entry in REASONING_FORMATS for marker in (entry.open_marker, entry.close_marker)} | {"<|channel>"}
_TOKENS |= {marker for wrapper in ANSWER_WRAPPERS for marker in wrapper}
_HARMONY_TOKENS = {HARMONY_CHANNEL, HARMONY_MESSAGE, HARMONY_START, HARMONY_END, "<|constrain|>"}


def final_answer(text: str) -> str:
    """Return the answer in a model's turn: the text after its reasoning.

    That is the text after the last closed block of reasoning, or the message in gpt-oss's final channel. A closing
    marker without an opening marker ends a block that the prompt opened. Text without reasoning is returned unchanged.

    Returns:
        The answer, or "" if the last block of reasoning is not closed or if there is no final channel.

    Example:
        final_answer("<think>41? No.</think>\\n\\n#### 42")      # "#### 42"
    """
    if HARMONY_PATTERN.match(text):
        return _final_message(text)
    markers = list(_iter_markers(text))
    if not markers:
        return text
    _, begin, open_marker = markers[-1]
    return _unwrap_answer(text[begin:].lstrip()) if open_marker is None else ""


def reasoning_blocks(text: str) -> list[str]:
    """Return the contents of the closed blocks of reasoning in a model's turn, first to last."""
    if HARMONY_PATTERN.match(text):
        messages = _iter_harmony_messages(text)
        return [content for channel, content in messages if channel not in (None, HARMONY_FINAL_CHANNEL)]
    blocks, begin = [], 0
    for start, end, open_marker in _iter_markers(text):
        if open_marker is None:
            blocks.append(text[begin:start].strip())
        begin = end
    return blocks


def find_unclosed_marker(text: str) -> str:
    """Return the marker of the block of reasoning, or of the message of gpt-oss, that a text leaves open; else ""."""
    if HARMONY_PATTERN.match(text):
        header, separator, content = text.rpartition(HARMONY_CHANNEL)[2].partition(HARMONY_MESSAGE)
        is_open = separator and not ENDS_MESSAGE.search(content)
        return HARMONY_CHANNEL + header + HARMONY_MESSAGE if is_open else ""
    markers = list(_iter_markers(text))
    return (markers[-1][2] or "") if markers else ""


def find_trailing_opening(prompt: str) -> str:
    """Return the end of a prompt that opens reasoning for the model, including white space; "" if it opens none."""
    match = _OPENS_AT_END.search(prompt)
    return match[0] if match else ""


def reasoning_tokens(special: Iterable[str]) -> set[str]:
    """Return the special tokens that separate reasoning from answers, which decoding must keep.

    "<|start|>" and "<|end|>" are only included together with gpt-oss's channels, because other models mark turns with
    tokens of these names.

    Args:
        special: Texts of a tokenizer's special tokens.
    """
    names = set(special)
    return names & (_TOKENS | _HARMONY_TOKENS if {HARMONY_CHANNEL, HARMONY_MESSAGE} <= names else _TOKENS)


def _iter_markers(text: str) -> Iterator[tuple[int, int, str | None]]:
    """Yield (start, end, opening marker of the block that is open afterwards, or None) for each effective marker.

    Within a block, only its own closing marker is effective. Outside of a block, a marker between two backticks or
    quotation marks is part of the answer: "`<think>` opens reasoning".
    """
    open_marker: str | None = None
    for match in MARKER_PATTERN.finditer(text):
        if open_marker is None and is_quoted(text, *match.span()):
            continue
        if open_marker is None:
            open_marker = match[0] if match[0] in CLOSE_MARKERS else None
        elif match[0] == CLOSE_MARKERS[open_marker]:
            open_marker = None
        else:
            continue
        yield match.start(), match.end(), open_marker


def is_quoted(text: str, start: int, end: int) -> bool:
    """True if the marker between two positions stands between two backticks or quotation marks."""
    return start > 0 and text[start - 1] in QUOTES and text[end : end + 1] == text[start - 1]


def _unwrap_answer(answer: str) -> str:
    for open_marker, close_marker in ANSWER_WRAPPERS:
        if answer.startswith(open_marker):
            return answer.removeprefix(open_marker).rstrip().removesuffix(close_marker).strip()
    return answer


def _iter_harmony_messages(text: str) -> Iterator[tuple[str | None, str]]:
    """Yield (channel, content) of each message of gpt-oss. The channel is None if the message has no content yet."""
    for message in text.split(HARMONY_CHANNEL)[1:]:
        header, separator, content = message.partition(HARMONY_MESSAGE)
        name = _CHANNEL_NAME.match(header)
        yield (name[0].strip() if separator and name else None), ENDS_MESSAGE.split(content, maxsplit=1)[0]


def _final_message(text: str) -> str:
    *_, (channel, content) = _iter_harmony_messages(text)
    return content if channel == HARMONY_FINAL_CHANNEL else ""
