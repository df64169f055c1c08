"""Separates a model's reasoning from its answer: the one definition of what is graded.

    final_answer("<think>41? No.</think>\n\n#### 42")     "#### 42"
    final_answer("<think>41? No, it is")                  "", because the reasoning never ends

Every built-in environment, tool parser and tensordict grader reads an answer through `final_answer`, so that reasoning
neither spoils a right answer nor earns a reward itself. The module needs no tokenizer and no torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The markers between which a family of models reasons."""

    open_marker: str
    close_marker: str
    models: str
    """Models that write these markers."""


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
    ReasoningFormat("<thinking>", "</thinking>", "models that a prompt asks for these tags"),
    ReasoningFormat("<reasoning>", "</reasoning>", "models that a prompt asks for these tags"),
)
ANSWER_WRAPPERS = (
    ("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    ("<|begin_of_solution|>", "<|end_of_solution|>"),
    ("<response>", "</response>"),
)
"""Markers that some models put around the answer after their reasoning: Command A Reasoning; Sky-T1; Granite 3.3.
Hunyuan's <answer> is not one of them, because environments ask for this tag themselves."""
HARMONY_CHANNEL, HARMONY_MESSAGE, HARMONY_START, HARMONY_END = "<|channel|>", "<|message|>", "<|start|>", "<|end|>"
"""gpt-oss (the harmony format) writes its reasoning and its answer as messages in channels: `<|channel|>analysis
<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...`, all of them special tokens."""
HARMONY_FINAL_CHANNEL = "final"

CLOSE_MARKERS = {entry.open_marker: entry.close_marker for entry in REASONING_FORMATS}
"""Opening marker -> closing marker."""
CLOSE_MARKER_PATTERN = re.compile("|".join(re.escape(entry.close_marker) for entry in REASONING_FORMATS))
"""Finds the end of a block of reasoning."""
_OPENING = "|".join(re.escape(entry.open_marker) for entry in REASONING_FORMATS)
MARKER_PATTERN = re.compile(
    "|".join(re.escape(marker) for entry in REASONING_FORMATS for marker in (entry.open_marker, entry.close_marker))
)
_HARMONY = re.compile(r"\s*+(?:<\|start\|>)?(?:assistant)?\s*+(?:to=\S+?\s*+)?<\|channel\|>")
"""The beginning of an answer of gpt-oss; "<|channel|>" in the middle of another model's answer means nothing."""
_CHANNEL_NAME = re.compile(r"\s*\w+")
_ENDS_MESSAGE = re.compile(r"<\|(?:end|return|call|start)\|>")
_OPENS_AT_END = re.compile(rf"(?:{_OPENING}|<\|channel\|>\w+<\|message\|>)\s*\Z")
_TOKENS = {marker for entry in REASONING_FORMATS for marker in (entry.open_marker, entry.close_marker)} | {"<|channel>"}
_TOKENS |= {marker for wrapper in ANSWER_WRAPPERS for marker in wrapper}
_HARMONY_TOKENS = {HARMONY_CHANNEL, HARMONY_MESSAGE, HARMONY_START, HARMONY_END, "<|constrain|>"}


def final_answer(text: str) -> str:
    """Return the answer in a model's turn: the text after its reasoning.

    That is the text after the last closed block of reasoning, or the message in gpt-oss's final channel. A closing
    marker without an opening one ends a block that the prompt opened. Text without any reasoning is all answer and is
    returned as it is.

    Returns:
        The answer, or "" if the last block of reasoning is never closed or if there is no final channel.

    Example:
        final_answer("<think>41? No.</think>\\n\\n#### 42")      # "#### 42"
    """
    if _HARMONY.match(text):
        return _final_message(text)
    markers = list(_markers(text))
    if not markers:
        return text
    _, begin, opened = markers[-1]
    return _unwrap_answer(text[begin:].lstrip()) if opened is None else ""


def reasoning_blocks(text: str) -> list[str]:
    """Return the contents of the closed blocks of reasoning in a model's turn, in order."""
    if _HARMONY.match(text):
        return [content for channel, content in _messages(text) if channel not in (None, HARMONY_FINAL_CHANNEL)]
    found, begin = [], 0
    for start, end, opened in _markers(text):
        if opened is None:
            found.append(text[begin:start].strip())
        begin = end
    return found


def find_unclosed_marker(text: str) -> str:
    """Return the marker of the block of reasoning or of gpt-oss's message that `text` leaves open; "" if none is."""
    if _HARMONY.match(text):
        header, complete, content = text.rpartition(HARMONY_CHANNEL)[2].partition(HARMONY_MESSAGE)
        return HARMONY_CHANNEL + header + HARMONY_MESSAGE if complete and not _ENDS_MESSAGE.search(content) else ""
    markers = list(_markers(text))
    return (markers[-1][2] or "") if markers else ""


def find_trailing_opening(prompt: str) -> str:
    """Return the end of `prompt` that opens reasoning for the model, white space included; "" if it opens none."""
    found = _OPENS_AT_END.search(prompt)
    return found[0] if found else ""


def reasoning_tokens(special: Iterable[str]) -> set[str]:
    """Return those of a tokenizer's special tokens that separate reasoning from answers.

    Decoding must keep these. "<|start|>" and "<|end|>" count only together with gpt-oss's channels: other models have
    tokens of these names that mark turns.
    """
    names = set(special)
    return names & (_TOKENS | _HARMONY_TOKENS if {HARMONY_CHANNEL, HARMONY_MESSAGE} <= names else _TOKENS)


def _markers(text: str) -> Iterator[tuple[int, int, str | None]]:
    """Yield (start, end, opening marker of the block that is open after it or None) for every marker that counts.

    Within a block, only its own closing marker counts. Outside of one, a marker between two backticks or quotation
    marks is part of the answer: "`<think>` opens reasoning".
    """
    opened: str | None = None
    for found in MARKER_PATTERN.finditer(text):
        if opened is None and _is_quoted(text, *found.span()):
            continue
        if opened is None:
            opened = found[0] if found[0] in CLOSE_MARKERS else None
        elif found[0] == CLOSE_MARKERS[opened]:
            opened = None
        else:
            continue
        yield found.start(), found.end(), opened


def _is_quoted(text: str, start: int, end: int) -> bool:
    return start > 0 and text[start - 1] in "`\"'" and text[end : end + 1] == text[start - 1]


def _unwrap_answer(answer: str) -> str:
    for opens, closes in ANSWER_WRAPPERS:
        if answer.startswith(opens):
            return answer.removeprefix(opens).rstrip().removesuffix(closes).strip()
    return answer


def _messages(text: str) -> Iterator[tuple[str | None, str]]:
    """Yield (channel, content) of gpt-oss's messages; the channel is None if the message has no content yet."""
    for message in text.split(HARMONY_CHANNEL)[1:]:
        header, complete, content = message.partition(HARMONY_MESSAGE)
        name = _CHANNEL_NAME.match(header)
        yield (name[0].strip() if complete and name else None), _ENDS_MESSAGE.split(content, maxsplit=1)[0]


def _final_message(text: str) -> str:
    *_, (channel, content) = _messages(text)
    return content if channel == HARMONY_FINAL_CHANNEL else ""
