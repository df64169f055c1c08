"""The JSON objects with which pages show sessions: the calls of a program to a chat API, as agents/records.py has them.

A record comes from a file that may be damaged or malicious. Whatever it holds, the result has the documented names and
types, and its references lead to earlier calls and to tokens of the rollout.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any


def session_view(record: Any, trained: Sequence[bool], advantages: Sequence[float | None]) -> dict[str, Any] | None:
    """Return the calls and the statistics of a session for a page; None if the record is not one of a session.

    Args:
        record: The parsed record.
        trained: True for each response token [L] that is in the loss.
        advantages: Advantages of the response tokens [L]; empty if they are not known.

    Returns:
        `statistics`: counters by name; `calls`: in the order of the program, each with `parent` and `previous` (indices
        of earlier calls, or None), `messages`, `content`, `reasoning`, `tool_calls`, `errors`, `start` and `stop`
        (response tokens that it sampled), `stop_reason`, `prompt_tokens`, `retokenized_messages`, `trained_tokens`
        (number of its tokens in the loss) and `advantage` ([smallest, largest] of these tokens, or None).
    """
    if not isinstance(record, dict):
        return None
    statistics = record.get("statistics")
    calls: list[dict[str, Any]] = []
    num_left = len(trained)  # spans of calls are disjoint, so a damaged file cannot make them take more time
    for number, call in enumerate(objects_in(record.get("calls"))):
        stop = min(_count(call.get("stop")), len(trained))
        start = max(min(_count(call.get("start")), stop), stop - num_left)
        num_left -= stop - start
        calls.append(_call(number, call, start, stop) | _loss(trained[start:stop], advantages[start:stop]))
    return {
        "statistics": {name: _count(value) for name, value in statistics.items()}
        if isinstance(statistics, dict)
        else {},
        "calls": calls,
    }


def objects_in(value: Any) -> list[dict[str, Any]]:
    """Return the objects in a list, such as messages; [] for any other value that a file may hold."""
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _call(number: int, call: dict[str, Any], start: int, stop: int) -> dict[str, Any]:
    answer = call.get("answer")
    answer = answer if isinstance(answer, dict) else {}
    errors = answer.get("errors")
    return {
        "parent": _earlier(call.get("parent"), number),
        "previous": _earlier(call.get("previous"), number),
        "messages": objects_in(call.get("messages")),
        "content": _text(answer.get("content")),
        "reasoning": _text(answer.get("reasoning")),
        "tool_calls": objects_in(answer.get("tool_calls")),
        "errors": [_text(error) for error in errors] if isinstance(errors, list) else [],
        "start": start,
        "stop": stop,
        "stop_reason": _text(call.get("stop_reason")),
        "prompt_tokens": _count(call.get("prompt_tokens")),
        "retokenized_messages": _count(call.get("retokenized_messages")),
    }


def _loss(trained: Sequence[bool], advantages: Sequence[float | None]) -> dict[str, Any]:
    values = [
        value
        for value, is_trained in zip(advantages, trained, strict=False)
        if is_trained and value is not None and math.isfinite(value)
    ]
    return {"trained_tokens": sum(trained), "advantage": [min(values), max(values)] if values else None}


def _earlier(value: Any, number: int) -> int | None:
    """Return the index of a call before call `number`; None for any other value, which might form a cycle."""
    return value if type(value) is int and 0 <= value < number else None


def _count(value: Any) -> int:
    return value if type(value) is int and 0 <= value < 2**53 else 0


def _text(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value)
