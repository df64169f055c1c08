"""The reference has all error classes and their messages; the keys there and in the guide exist."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from skyrl_train import errors
from skyrl_train.config.keys import all_keys
from skyrl_train.storage.uris import CREDENTIALS_ADVICE

REPOSITORY = Path(__file__).resolve().parents[2]
REFERENCE = REPOSITORY / "docs" / "reference"
PAGE = "\n".join((REFERENCE / name).read_text() for name in ("configuration_errors.md", "error_messages.md"))
GUIDE = (REPOSITORY / "docs" / "guides" / "troubleshooting.md").read_text()
SECTIONS = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))
ROW = re.compile(r"^\| (`.*?`(?:, `.*?`)*) \| ", re.MULTILINE)
GAP = "…"
OTHERS = ("SkyRLError", "ToolError")
"""Classes whose messages do not end a run."""
BY_FORM = {"ConfigError", "DataError", "DeadlineExceeded", "EngineError", "EnvironmentFailure", "WeightSyncError"}
"""Classes with hundreds of messages, of which only the frequent ones have a row."""


@cache
def raised() -> dict[str, list[str]]:
    """Return the messages of each class as templates of the source, with a gap for each value."""
    messages_by_class: dict[str, list[str]] = {}
    for path in (REPOSITORY / "skyrl_train").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and node.args and isinstance(node.func, ast.Name | ast.Attribute):
                name = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
                messages_by_class.setdefault(name, []).append("".join(template(node.args[0])))
    return messages_by_class


def template(node: ast.expr) -> Iterator[str]:
    """Yield the text of an expression, with a gap for values that are only known at run time."""
    if isinstance(node, ast.Constant):
        yield str(node.value)
    elif isinstance(node, ast.JoinedStr):
        for part in node.values:
            yield from template(part)
    elif isinstance(node, ast.Call) and node.args:  # redact(f"...")
        yield from template(node.args[0])
    else:
        yield GAP


def messages(title: str) -> list[str]:
    """Return the messages that the rows of a class quote."""
    rows = ROW.findall(SECTIONS[title])
    return [text for row in rows for text in re.findall(r"`(.*?)`", row) if GAP in text or " " in text]


def fits(quoted: str, text: str) -> bool:
    """Return True if all parts of a quoted message occur in a text, in this order."""
    parts = [re.escape(part.strip()) for part in quoted.split(GAP) if part.strip(" .,;:()=")]
    return bool(parts) and re.search(".*?".join(parts), text, re.DOTALL) is not None


def test_every_class_of_error_has_a_section():
    classes = {name for name, _ in inspect.getmembers(errors, inspect.isclass)}
    assert classes - set(SECTIONS) == set()
    assert set(SECTIONS) - classes == set(OTHERS) - {"SkyRLError"}


def test_every_message_has_a_row():
    missing = []
    for title in sorted(set(SECTIONS) - BY_FORM - set(OTHERS)):
        texts = [text for text in raised().get(title, []) if re.search(r"\w{4}", text)]
        missing += [f"{title}: {text}" for text in texts if not any(fits(quoted, text) for quoted in messages(title))]
    assert not missing, "\n".join(missing)


def test_quoted_messages_are_in_the_source():
    by_variable = {"WorkerDied": raised()["_death_error"], "StorageError": [f". {CREDENTIALS_ADVICE}"]}
    missing = []
    for title in sorted(set(SECTIONS) - {"RunInterrupted", "OutOfMemory", "ConfigError"}):
        texts = raised().get(title, []) + by_variable.get(title, [])
        missing += [f"{title}: {quoted}" for quoted in messages(title) if not any(fits(quoted, text) for text in texts)]
    assert not missing, "\n".join(missing)


def test_keys_on_the_page_exist():
    for page in (PAGE, GUIDE):
        named = set(re.findall(r"`((?:trainer|generator|environment|data)(?:\.\w+)+)(?:=[^`]*)?`", page))
        assert named and named - set(all_keys()) == set()
        assignments = [
            text.split("=")[0]
            for block in re.findall(r"^```bash\n(.*?)^```", page, re.M | re.S)
            for text in re.findall(r"\b(?:trainer|generator|environment|data)\.[\w.]+=", block)
        ]
        assert set(assignments) - set(all_keys()) == set()
