"""The model card of an export: README.md with metadata for the hub, made from what a run has written.

No sentence of it is a guess: what the run did not record is not said. Texts of the run's are shown as texts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

CURVE_FILE = "learning_curve.png"
_TAGS = {"rewards": ["reinforcement-learning"], "demonstrations": ["sft"], "": []}


@dataclass(frozen=True)
class Card:
    """What a card is made of: plain values, without secrets and folders of the machine."""

    run: str
    base: str
    base_is_on_hub: bool
    is_adapter: bool
    model_class: str
    """The Auto class of transformers that loads the model, or the base of an adapter."""
    lora: str
    """Rank and scale of adapters, in words; empty for a whole model."""
    dtype: str
    step: int
    trained_on: str
    """"rewards", "demonstrations", or empty if the run has not recorded what."""
    environment: str
    data: Mapping[str, Sequence[str]]
    """"training" and "evaluation" -> sources."""
    keys: Mapping[str, Any]
    """Keys of the configuration -> values."""
    rows: Sequence[Mapping[str, float]]
    """The lines of metrics.jsonl up to the step."""
    has_curve: bool
    checked: str
    """What was compared with the checkpoint, in words."""
    versions: Mapping[str, str]
    """Libraries that made the export."""


def model_card(card: Card) -> str:
    """The text of README.md."""
    sections = [
        f"# {text(card.run)}, step {card.step}",
        _what(card),
        "## Use\n\n" + _use(card),
        "## Training\n\n" + "\n\n".join(_training(card)),
        "## Evaluation\n\n" + _evaluation(card),
        "## Limits\n\n" + "\n".join(f"- {line}" for line in _limits(card)),
        "## Made with\n\n" + ", ".join(f"{name} {version}" for name, version in card.versions.items()) + ".",
    ]
    return f"---\n{_metadata(card)}---\n\n" + "\n\n".join(sections) + "\n"


def _metadata(card: Card) -> str:
    found: dict[str, Any] = {
        "library_name": "peft" if card.is_adapter else "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["skyrl-train", *_TAGS[card.trained_on], *(["lora"] if card.lora else [])],
    }
    if card.base_is_on_hub:
        found |= {"base_model": card.base, "base_model_relation": "adapter" if card.is_adapter else "finetune"}
    return yaml.safe_dump(found, sort_keys=False)


def _what(card: Card) -> str:
    base = text(card.base) + ("" if card.base_is_on_hub else " (its name where it was trained)")
    kind = f"LoRA adapters ({card.lora}) for" if card.is_adapter else "A model trained from"
    how = f" that learns from {card.trained_on}" if card.trained_on else ""
    where = f" in the environment {text(card.environment)}" if card.trained_on == "rewards" else ""
    return f"{kind} {base}: step {card.step} of a run{how}{where}. {card.checked}".rstrip()


def _use(card: Card) -> str:
    if card.is_adapter:
        base = repr(card.base) if card.base_is_on_hub else '"the base model"'
        lines = [
            "from peft import PeftModel",
            f"from transformers import {card.model_class}, AutoTokenizer",
            "",
            f'model = PeftModel.from_pretrained({card.model_class}.from_pretrained({base}), "this repository")',
        ]
    else:
        lines = [
            f"from transformers import {card.model_class}, AutoTokenizer",
            "",
            f'model = {card.model_class}.from_pretrained("this repository")',
        ]
    code = "\n".join([*lines, 'tokenizer = AutoTokenizer.from_pretrained("this repository")'])
    return f"```python\n{code}\n```"


def _training(card: Card) -> Iterator[str]:
    for use, sources in card.data.items():
        if sources:
            yield f"Data of {use}: {', '.join(text(source) for source in sources)}."
    if card.lora and not card.is_adapter:
        yield f"LoRA adapters ({card.lora}) were trained, and are merged into the weights."
    yield table(["key", "value"], [[text(name), text(value)] for name, value in card.keys.items()])
    if card.has_curve:
        yield f"![What was measured at every step]({CURVE_FILE})"


def _evaluation(card: Card) -> str:
    evaluated = [row for row in card.rows if any(name.startswith("eval/") for name in row)]
    if not evaluated:
        return "The run did not evaluate."
    chosen = list({row["step"]: row for row in (evaluated[0], evaluated[-1])}.values())
    names = sorted({name for row in chosen for name in row if name.startswith("eval/")})
    head = ["metric", *(f"step {row['step']:g}" for row in chosen)]
    rows = [[text(name), *(f"{row[name]:.4g}" if name in row else "" for row in chosen)] for name in names]
    return table(head, rows)


def _limits(card: Card) -> Iterator[str]:
    if card.trained_on == "rewards":
        yield "It has learnt what its reward pays for, which may be less than what was meant."
    yield "Nothing else was measured: not safety, not bias, not what it has forgotten of what the base model knew."
    last = next((row for row in reversed(card.rows) if "response/truncated_fraction" in row), None)
    if last is not None:
        yield (
            f"{last['response/truncated_fraction']:.0%} of the responses of step {last['step']:g} were cut off at "
            "the longest that training allows."
        )
    if card.dtype == "bfloat16" and not card.is_adapter:
        yield "Weights were trained in float32 and are rounded to bfloat16 here."
    yield "The licence and the limits of the base model apply."


_LONGEST = 200
_AS_CODE = re.compile(r"[\w.+/:=@,()\[\]{}'\" -]+", re.ASCII)
"""What is shown as code: nothing in it ends code or a table's cell, or is markup."""


def text(value: object) -> str:
    """A value as a text that Markdown renders as it is, whatever is in it; long ones are cut.

    Line breaks become spaces; characters that are not seen, or that turn a line around, become U+FFFD.
    """
    words = " ".join(str(value).split())
    shown = "".join(sign if sign.isprintable() else "\N{REPLACEMENT CHARACTER}" for sign in words)
    if len(shown) > _LONGEST:
        shown = f"{shown[:_LONGEST]}..."
    if _AS_CODE.fullmatch(shown):
        return f"`{shown}`"
    # A character reference is never part of Markdown's structure, and a sign of punctuation may be.
    return re.sub(r"[!-/:-@\[-`{-~]", lambda sign: f"&#{ord(sign[0])};", shown)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of cells that are Markdown already."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
