"""The model card of an export: README.md with metadata for the model hub, made from the files of a run.

The card states only what the run recorded. Texts from the run are escaped, so that Markdown shows them as they are.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

CURVE_FILE = "learning_curve.png"
_FOLDER_PLACEHOLDER = "path/to/this/folder"
_TAGS = {"rewards": ["reinforcement-learning"], "demonstrations": ["sft"], "": []}


@dataclass(frozen=True)
class Card:
    """The contents of a model card: plain values, without secrets and without paths of the machine."""

    run: str
    repository: str
    """Name of the repository on the hub, OWNER/NAME; empty for a folder, whose place is private."""
    base: str
    base_is_on_hub: bool
    is_adapter: bool
    model_class: str
    """Auto class of transformers that loads the model or, for an adapter, its base model."""
    lora: str
    """Description of the adapters' rank and scale; empty if no adapters were trained."""
    dtype: str
    step: int
    trained_on: str
    """"rewards" or "demonstrations"; empty if the run did not record it."""
    environment: str
    data: Mapping[str, Sequence[str]]
    """"training" and "evaluation" -> data sources."""
    keys: Mapping[str, Any]
    """Configuration keys -> values."""
    rows: Sequence[Mapping[str, float]]
    """Lines of metrics.jsonl up to the step."""
    has_curve: bool
    """True if the export has the file CURVE_FILE."""
    checked: str
    """Sentence about what was compared with the checkpoint; may be empty."""
    versions: Mapping[str, str]
    """Libraries that made the export -> versions."""


def model_card(card: Card) -> str:
    """Return the text of README.md with its metadata block."""
    sections = [
        f"# {text(card.run)}, step {card.step}",
        _summary(card),
        "## Use\n\n" + _use(card),
        "## Training\n\n" + "\n\n".join(_training(card)),
        "## Evaluation\n\n" + _evaluation(card),
        "## Limits\n\n" + "\n".join(f"- {line}" for line in _limits(card)),
        "## Made with\n\n" + ", ".join(f"{name} {version}" for name, version in card.versions.items()) + ".",
    ]
    return f"---\n{_metadata(card)}---\n\n" + "\n\n".join(sections) + "\n"


def _metadata(card: Card) -> str:
    metadata: dict[str, Any] = {
        "library_name": "peft" if card.is_adapter else "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["skyrl-train", *_TAGS[card.trained_on], *(["lora"] if card.lora else [])],
    }
    if card.base_is_on_hub:
        metadata |= {"base_model": card.base, "base_model_relation": "adapter" if card.is_adapter else "finetune"}
    return yaml.safe_dump(metadata, sort_keys=False)


def _summary(card: Card) -> str:
    base = text(card.base) + ("" if card.base_is_on_hub else " (its name where it was trained)")
    kind = f"LoRA adapters ({card.lora}) for" if card.is_adapter else "A model trained from"
    training = f" that trains on {card.trained_on}" if card.trained_on else ""
    environment = f" in the environment {text(card.environment)}" if card.trained_on == "rewards" else ""
    return f"{kind} {base}: step {card.step} of a run{training}{environment}. {card.checked}".rstrip()


def _use(card: Card) -> str:
    source = f'"{card.repository or _FOLDER_PLACEHOLDER}"'
    if card.is_adapter:
        base = repr(card.base) if card.base_is_on_hub else '"the base model"'
        lines = [
            "from peft import PeftModel",
            f"from transformers import {card.model_class}, AutoTokenizer",
            "",
            f"model = PeftModel.from_pretrained({card.model_class}.from_pretrained({base}), {source})",
        ]
    else:
        lines = [
            f"from transformers import {card.model_class}, AutoTokenizer",
            "",
            f"model = {card.model_class}.from_pretrained({source})",
        ]
    code = "\n".join([*lines, f"tokenizer = AutoTokenizer.from_pretrained({source})"])
    return f"```python\n{code}\n```"


def _training(card: Card) -> Iterator[str]:
    for use, sources in card.data.items():
        if sources:
            yield f"{use.capitalize()} data: {', '.join(text(source) for source in sources)}."
    if card.lora and not card.is_adapter:
        yield f"LoRA adapters ({card.lora}) were trained and merged into the weights."
    yield table(["key", "value"], [[text(name), text(value)] for name, value in card.keys.items()])
    if card.has_curve:
        yield f"![Learning curve over training steps]({CURVE_FILE})"


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
        yield "The model was trained to maximize its reward, which may differ from the intended behavior."
    yield "Nothing else was measured: neither safety nor bias, nor which abilities of the base model were lost."
    last = next((row for row in reversed(card.rows) if "response/truncated_fraction" in row), None)
    if last is not None:
        yield (
            f"{last['response/truncated_fraction']:.0%} of the responses of step {last['step']:g} were truncated at "
            "the maximum length of training."
        )
    if card.dtype == "bfloat16" and not card.is_adapter:
        yield "The weights were trained in float32 and are rounded to bfloat16 here."
    yield "The license and the limits of the base model apply."


_MAX_CHARS = 200
_SAFE_AS_CODE = re.compile(r"[\w.+/:=@,()\[\]{}'\" -]+", re.ASCII)
"""Texts that are shown as code: they have no character that ends code or a table cell."""


def text(value: object) -> str:
    """Return Markdown that renders a value as literal text, truncated to 200 characters.

    Line breaks become spaces. Characters that are invisible or change the text direction become U+FFFD.
    """
    words = " ".join(str(value).split())
    printable = "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in words)
    if len(printable) > _MAX_CHARS:
        printable = f"{printable[:_MAX_CHARS]}..."
    if _SAFE_AS_CODE.fullmatch(printable):
        return f"`{printable}`"
    # Markdown never interprets a character reference, but it may interpret the punctuation itself.
    return re.sub(r"[!-/:-@\[-`{-~]", lambda match: f"&#{ord(match[0])};", printable)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table. Cells must be escaped Markdown already, with as many in each row as in `head`."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
