"""Answers in conversations of ChatEnv, also of TorchRL's own."""

from __future__ import annotations

from typing import Any

from tensordict import TensorDictBase, lazy_stack

from skyrl_train.tensordict.envs.conversation import messages_of


def answered(root: TensorDictBase, *texts: str) -> TensorDictBase:
    """Set ("history", "full") of every row: its prompt, followed by the assistant's text."""
    history: Any = root["history"]
    prompts = [row["history"].prompt for row in root.unbind(0)]
    turns = [type(prompt)(role="assistant", content=text) for prompt, text in zip(prompts, texts, strict=True)]
    history.full = lazy_stack(
        [lazy_stack([*prompt.unbind(0), turn]) for prompt, turn in zip(prompts, turns, strict=True)]
    )
    root.set("history", history)
    return root


def chats(root: TensorDictBase) -> list[list[dict[str, Any]]]:
    """Return the messages of every row's prompt."""
    return [messages_of(row["history"].prompt) for row in root.unbind(0)]  # type: ignore[misc]
