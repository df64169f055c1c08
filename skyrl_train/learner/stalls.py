"""Finds the rank that does not answer: in a collective all others wait for it, and all of them pass their deadline."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from skyrl_train.cluster.actors import Remote
from skyrl_train.cluster.stacks import Stack, stacks

_log = logging.getLogger(__name__)
_WITHIN_S = 30.0
"""A node may have to start a worker first."""
_UNKNOWN = Stack(None, "unknown", "")


async def explain_stall(ranks: Sequence[Remote], file: Path) -> str:
    """Write the stacks of all ranks to `file`; returns which rank is waited for, and where the stacks are.

    It is a rank whose node does not answer, or that is stopped or gone; else one that is at work while others are in a
    collective. If no rank stands out, as all are in a collective or a kernel of an accelerator hangs, none is named.
    """
    found = await stacks([rank.id for rank in ranks], _WITHIN_S)
    if not found:
        return ""
    by_name = {rank.name: found.get(rank.id, _UNKNOWN) for rank in ranks}
    text = "\n\n".join(
        f"=== {name}: process {stack.pid}, {stack.status}\n{stack.text}" for name, stack in by_name.items()
    )
    try:
        file.write_text(text)
    except OSError as error:
        _log.warning("The stacks of the trainer's ranks could not be written to %s: %s.", file, error)
        return _blame(by_name)
    return f"{_blame(by_name)}; the stacks of all ranks are in {file}".removeprefix("; ")


def _blame(by_name: dict[str, Stack]) -> str:
    silent = {name: stack for name, stack in by_name.items() if not stack.text}
    if silent:
        return ", ".join(f"{name} does not answer ({_state(stack)})" for name, stack in silent.items())
    busy = [name for name, stack in by_name.items() if stack.called and not stack.in_collective]
    if not busy or not any(stack.in_collective for stack in by_name.values()):
        return ""
    return f"{' and '.join(busy)} had not come so far, while others waited in a collective"


def _state(stack: Stack) -> str:
    if stack.status == "stopped":
        return f"its process is stopped: kill -CONT {stack.pid} lets it go on"
    return "nor does its node" if stack is _UNKNOWN else f"its process is {stack.status}"
