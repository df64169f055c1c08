"""SkyRL's dataset, by its name."""

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
    """The prompts of files, folders or names on the hub; rows without an env_class get the configuration's."""
    sources = [datasets] if isinstance(datasets, str) else list(datasets)
    return load_prompts(
        sources,
        lambda prompt: len(render_prompt(tokenizer, prompt.messages, get_chat_template_kwargs(prompt.env_extras, {}))),
        max_prompt_length,
        "",
    )
