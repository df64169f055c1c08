"""Trajectories of sessions, and the JSON-like record of a session's calls for rollout files and the viewer.

A record is {"calls": [...], "statistics": {...}}, with the counters of `SessionStatistics`. Each call has

- "parent": index of the call whose tokens it continues, or null
- "previous": index of the call whose messages and answer its conversation begins with, or null
- "messages": the messages after those and the answer of `previous`
- "answer": {"content", "reasoning", "tool_calls": [{"id", "name", "arguments"}], "errors": [reasons]}
- "sequence", "start", "stop": the sequence of the trajectory and the response tokens that the call sampled
- "stop_reason": stop or length
- "prompt_tokens": number of tokens that the model read
- "retokenized_messages": messages of the assistant that were tokenized from their text for this call
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from skyrl_train.agents.call_tree import Call, CallTree
from skyrl_train.data.chat import get_message_text
from skyrl_train.data.messages import Prompt, ToolCallRecord
from skyrl_train.data.token_arrays import Span, Tokens
from skyrl_train.data.tool_formats import ModelAnswer
from skyrl_train.data.trajectory import Trajectory
from skyrl_train.environments.tools.base import tool_call_record
from skyrl_train.rollouts.conversation import TrajectoryBuilder


def build_trajectory(
    tree: CallTree,
    prompt: Prompt,
    sample: int,
    temperature: float,
    *,
    statistics: dict[str, Any],
    decode: Callable[[Tokens], str],
) -> Trajectory:
    """Return the calls of a session as one episode. It has no tokens if there are no calls.

    Args:
        tree: The calls.
        prompt: The prompt.
        sample: Index of the trajectory in its group.
        temperature: Sampling temperature; 0 becomes 1, at which engines compute log-probs of greedy samples.
        statistics: Counters for the record.
        decode: Returns the text of an answer's tokens, for `Trajectory.text`.
    """
    item = Trajectory.empty(prompt, sample, temperature or 1.0)
    item.session = {"calls": [], "statistics": statistics}
    if not tree.calls:
        return item
    builder = TrajectoryBuilder(item)
    places: dict[int, tuple[int, Span]] = {}
    """Sequence and span of each call, by its id()."""
    for calls in tree.sequences():
        for index, call in enumerate(calls):
            if index > 0:
                builder.append_prompt(call.prompt_ids)
            elif places:
                builder.restart(_read_prompt(call))
            else:
                builder.start_episode(_read_prompt(call))
            builder.append_sample(call.completion)
            builder.update_last_turn(tool_calls=tuple(_tool_call_records(call.answer)))
            turn = item.turns[-1]
            places[id(call)] = len(item.restarts), (turn.start, turn.stop)
    ordered = sorted(tree.calls, key=lambda call: call.order)
    numbers = {id(call): number for number, call in enumerate(ordered)}
    item.session["calls"] = [_record(call, numbers, *places[id(call)]) for call in ordered]
    last = ordered[-1]
    item.messages = last.conversation()
    item.text = _response_text(last, decode)
    return item


def _response_text(last: Call, decode: Callable[[Tokens], str]) -> str:
    """Return the decoded response, or the conversation from its first to its last response if there are several."""
    first, *later = last.history()
    texts = [decode(first.completion.token_ids)]
    if not later:
        return texts[0]
    texts[0] = f"assistant: {texts[0]}"
    for call in later:
        texts += [f"{message['role']}: {get_message_text(message)}" for message in call.messages]
        texts.append(f"assistant: {decode(call.completion.token_ids)}")
    return "\n".join(texts)


def _read_prompt(call: Call) -> Any:
    parent = call.parent
    return call.prompt_ids if parent is None else np.concatenate((parent.read_tokens(), call.prompt_ids))


def _record(call: Call, numbers: dict[int, int], sequence: int, span: Span) -> dict[str, Any]:
    answer = call.answer
    return {
        "parent": None if call.parent is None else numbers[id(call.parent)],
        "previous": None if call.previous is None else numbers[id(call.previous)],
        "messages": call.messages,
        "answer": {
            "content": answer.content,
            "reasoning": answer.reasoning,
            "tool_calls": [
                {"id": each.id, "name": each.name, "arguments": each.arguments} for each in answer.tool_calls
            ],
            "errors": [error.reason for error in answer.errors],
        },
        "sequence": sequence,
        "start": span[0],
        "stop": span[1],
        "stop_reason": str(call.completion.stop_reason),
        "prompt_tokens": sum(len(each.prompt_ids) + len(each.completion.token_ids) for each in call.path())
        - len(call.completion.token_ids),
        "retokenized_messages": call.num_retokenized,
    }


def _tool_call_records(answer: ModelAnswer) -> list[ToolCallRecord]:
    calls = [tool_call_record(call.name, call.arguments) for call in answer.tool_calls]
    return calls + [tool_call_record("", error.raw, "unreadable") for error in answer.errors]
