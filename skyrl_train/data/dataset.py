"""Prompts to train and evaluate on, in SkyRL's row format.

    {"prompt": [{"role": "user", "content": "..."}], "env_class": "gsm8k", "data_source": "openai/gsm8k",
     "reward_spec": {"method": "rule", "ground_truth": "72"}, ...}

Policy: a prompt of more than `max_prompt_length` tokens is left out and counted; any other unusable row stops the run
with an error that names file and row.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from skyrl_train.data.messages import check_json, messages_of
from skyrl_train.data.rows import DatasetRow, read_rows
from skyrl_train.data.trajectory import Prompt
from skyrl_train.errors import DataError

MAX_CHARACTERS_PER_TOKEN = 256
"""No tokenizer has longer tokens, so a prompt with more characters than this allows is too long without encoding it."""


@dataclass(frozen=True)
class PromptDataset:
    """The prompts that were kept, in file order."""

    prompts: tuple[Prompt, ...]
    too_long: int
    """Number of rows left out because their prompt has too many tokens."""

    def __len__(self) -> int:
        return len(self.prompts)

    def __getitem__(self, index: int) -> Prompt:
        return self.prompts[index]

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the prompts that were kept, their extras and their order."""
        digest = hashlib.sha256()
        for prompt in self.prompts:
            row = [prompt.uid, prompt.messages, prompt.env_class, prompt.env_extras, prompt.data_source]
            digest.update(json.dumps(row, sort_keys=True, default=repr).encode() + b"\n")
        return digest.hexdigest()[:32]

    def check_fingerprint(self, stored: str) -> None:
        """Raise DataError unless `stored`, the fingerprint of the run to resume, is this dataset's."""
        if stored != self.fingerprint:
            raise DataError(
                f"the training data changed since the checkpoint (fingerprint {stored}, now {self.fingerprint}): its "
                "position in the data means nothing any more. Restore the files, the tokenizer and the prompt length "
                "limit, or start a new run from the exported model."
            )


def load_prompts(
    sources: Sequence[str],
    length: Callable[[Prompt], int],
    max_prompt_length: int,
    default_env_class: str,
    *,
    sample_s: float | None = None,
) -> PromptDataset:
    """Read `sources` (see `rows.read_rows`) one after the other.

    Args:
        length: Number of tokens of a prompt for the model; see `experiment.data.build_prompts`.
        max_prompt_length: In tokens; longer prompts are left out.
        default_env_class: The env_class of rows that have none.
        sample_s: Read only as far as the first prompt that is kept, for at most so many seconds: then the dataset may
            be empty. None reads everything.

    A prompt's uid is its row number over all sources, from 0, counting rows that are left out. Raises DataError for an
    unusable row, a source without rows, or if no prompt is short enough.
    """
    kept: list[Prompt] = []
    number, shortest = 0, None
    begun = time.monotonic()
    for source in sources:
        before = number
        for where, row in read_rows(source):
            prompt = _prompt(where, str(number), row, default_env_class)
            number += 1
            tokens = _length(where, prompt, length, max_prompt_length)
            shortest = tokens if shortest is None else min(shortest, tokens)
            if tokens <= max_prompt_length:
                kept.append(prompt)
            if sample_s is not None and (kept or time.monotonic() - begun > sample_s):
                return PromptDataset(tuple(kept), number - len(kept))
        if number == before:
            raise DataError(f"{source}: has no rows.")
    if not kept:
        raise DataError(
            f"{', '.join(sources) or 'no data files'}: none of {number} prompts has at most {max_prompt_length} tokens"
            f"{f' (the shortest has about {shortest})' if shortest else ''}; raise trainer.max_prompt_length."
        )
    return PromptDataset(tuple(kept), number - len(kept))


def _prompt(where: str, uid: str, row: DatasetRow, default_env_class: str) -> Prompt:
    if row.get("prompt") is None:
        raise DataError(
            f"{where}: no 'prompt' among its columns {sorted(row)}; it must be a list of messages, "
            '[{"role": "user", "content": "..."}].'
        )
    messages = messages_of(where, "prompt", row["prompt"])
    extras = {key: value for key, value in row.items() if key not in ("prompt", "env_class")}
    for column, value in extras.items():
        check_json(where, column, value)
    _check_answer(where, extras)
    max_turns_of(where, extras)
    env_class = row.get("env_class") or default_env_class
    if not isinstance(env_class, str):
        raise DataError(f"{where}: env_class is {env_class!r:.80}, not a name.")
    return Prompt(uid, messages, env_class, extras, str(row.get("data_source") or "unknown"), where)


def _check_answer(where: str, extras: dict[str, Any]) -> None:
    """A rule needs an answer to compare with: with null, all rewards would be 0."""
    if "reward_spec" not in extras:
        return
    spec = extras["reward_spec"]
    by_rule = isinstance(spec, dict) and spec.get("method", "rule") == "rule"
    if spec is None or (by_rule and spec.get("ground_truth") is None):
        raise DataError(f"{where}: reward_spec has no ground_truth; give every row an answer or remove the row.")


def max_turns_of(where: str, extras: Mapping[str, Any]) -> int | None:
    """A row's own bound on turns; None if it has none. Raises DataError if it is not a whole number of at least 1."""
    own = extras.get("max_turns")
    if own is None or (isinstance(own, float) and math.isnan(own)):  # how tables say that a row has none
        return None
    whole = (isinstance(own, int) and not isinstance(own, bool)) or (isinstance(own, float) and own.is_integer())
    if not whole or own < 1:
        raise DataError(f"{where}: max_turns={own!r:.80} must be a whole number of at least 1, or null.")
    return int(own)


def _length(where: str, prompt: Prompt, length: Callable[[Prompt], int], limit: int) -> int:
    characters = sum(len(message["content"]) for message in prompt.messages)
    if characters > limit * MAX_CHARACTERS_PER_TOKEN:
        return characters // MAX_CHARACTERS_PER_TOKEN
    try:
        return length(prompt)
    except DataError as error:
        raise DataError(f"{where}: column 'prompt': {error}") from error
