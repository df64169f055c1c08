"""SkyRL's import path of its prompt dataset."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from skyrl_train.data.chat import render_prompt
from skyrl_train.data.dataset import PromptDataset as Prompts, load_prompts
from skyrl_train.data.messages import get_chat_template_kwargs

__all__ = ["PromptDataset"]


def PromptDataset(
    datasets: str | Sequence[str], tokenizer: Any, max_prompt_length: int, num_workers: int = 8
) -> Prompts:
    """Load prompts as SkyRL's class of this name does.

    Rows without an env_class have an empty one here; the run fills in `environment.env_class`.

    Args:
        datasets: A file, a folder or a name on the hub, or several of them.
        tokenizer: The tokenizer whose chat template renders prompts, to measure their length.
        max_prompt_length: The longest prompt that is kept, in tokens.
        num_workers: Ignored; accepted for compatibility with SkyRL.

    Returns:
        The prompts that are not too long.

    Raises:
        DataError: A source or row cannot be read, the template rejects a prompt, or no prompt is short enough.
    """
    sources = [datasets] if isinstance(datasets, str) else list(datasets)
    return load_prompts(
        sources,
        lambda prompt: len(render_prompt(tokenizer, prompt.messages, get_chat_template_kwargs(prompt.env_extras, {}))),
        max_prompt_length,
        "",
    )
