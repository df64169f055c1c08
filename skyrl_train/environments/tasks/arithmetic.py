"""Generated word problems in GSM8K's style with adjustable difficulty. The task needs no download.

    Mia has 7 shells. Mia finds 5 more. Mia gives away 3. How many shells does Mia have now?
    7 + 5 = 12
    12 - 3 = 9
    #### 9

The vocabulary is small and numbers are written in digits, so a tokenizer of words and digits needs fewer than 150
tokens for the entire task.
"""

from __future__ import annotations

import hashlib
import random
from typing import Any

from skyrl_train.environments.tasks.gsm8k import GSM8KEnv
from skyrl_train.errors import ConfigError

NAMES = ("Ana", "Ben", "Cleo", "Dan", "Eva", "Finn", "Mia", "Tom")
OBJECTS = ("apples", "beads", "books", "cards", "coins", "pens", "shells", "stamps")
SENTENCES = {
    "+": ("{name} finds {n} more.", "{name} buys {n} more.", "{name} gets {n} more."),
    "-": ("{name} gives away {n}.", "{name} loses {n}.", "{name} sells {n}."),
    "*": ("{name} multiplies them by {n}.",),
}
VALIDATION_ONE_IN = 10
"""One expression in this many is for validation."""


class ArithmeticEnv(GSM8KEnv):
    """An environment that scores like gsm8k; see `gsm8k.score`."""


def generate(count: int, operations: int, max_value: int, seed: int, split: str) -> list[dict[str, Any]]:
    """Generate different problems as rows in SkyRL's format. Equal arguments give equal rows.

    Args:
        count: Number of rows.
        operations: Number of steps (+, - or *) of each problem, 1 to 5.
        max_value: The largest number in a problem, at least 2. Running totals stay between 0 and 10 * max_value + 9, so
            with 9 every number has one digit and every total at most two.
        seed: Seed of the random generator.
        split: "train" or "validation". The splits are disjoint for all seeds, because a hash of the expression (the
            numbers and operations, without names and words) assigns each problem to a split.

    Returns:
        Rows whose `extra_info` has demonstrations in two styles: `answer` (steps, then "#### N") and `direct`
        ("#### N").

    Raises:
        ConfigError: An argument is out of range, or the arguments allow too few different problems.
    """
    for key, value, low, high in (
        ("operations", operations, 1, 5),
        ("max_value", max_value, 2, 10**6),
        ("count", count, 0, 10**7),
    ):
        if not low <= value <= high:
            raise ConfigError(f"arithmetic: {key}={value} must be from {low} to {high}.")
    if split not in ("train", "validation"):
        raise ConfigError(f"arithmetic: split={split!r} is not 'train' or 'validation'.")
    rng = random.Random(f"arithmetic {seed} {operations} {max_value} {split}")
    rows: dict[str, dict[str, Any]] = {}
    misses = 0
    while len(rows) < count:
        start, steps = _expression(rng, operations, max_value)
        expression = "".join([str(start), *(f"{sign}{n}" for sign, n in steps)])
        question = _question(rng, start, steps) if assign_split(expression) == split else None
        if question is None or question in rows:
            misses += 1
            if misses > 1000:
                raise ConfigError(
                    f"arithmetic: found only {len(rows)} different {split} problems of count={count} with "
                    f"operations={operations}, max_value={max_value}; reduce count, or raise one of the others."
                )
            continue
        misses = 0
        rows[question] = _row(question, expression, start, steps, split, len(rows))
    return list(rows.values())


def assign_split(expression: str) -> str:
    """Return "train" or "validation" for an expression such as "7+5-3", by a hash of its text.

    The result is the same in every process and Python version.
    """
    digest = hashlib.sha256(expression.encode()).digest()
    return "validation" if int.from_bytes(digest[:8], "big") % VALIDATION_ONE_IN == 0 else "train"


def apply_operation(sign: str, total: int, n: int) -> int:
    """Return `total` + `n`, `total` - `n` or `total` * `n`, as the sign "+", "-" or "*" says."""
    return {"+": total + n, "-": total - n, "*": total * n}[sign]


def _expression(rng: random.Random, operations: int, max_value: int) -> tuple[int, list[tuple[str, int]]]:
    """Draw a start value and steps whose totals stay in range. All signs that are possible are equally likely."""
    limit = 10 * max_value + 9
    total = start = rng.randint(1, max_value)
    steps: list[tuple[str, int]] = []
    for _ in range(operations):
        ranges = {  # inclusive; empty if the sign is impossible
            "+": (1, min(max_value, limit - total)),
            "-": (1, min(max_value, total)),
            "*": (2, min(max_value, limit // total) if total else 0),
        }
        sign = rng.choice([sign for sign, (low, high) in ranges.items() if low <= high])
        n = rng.randint(*ranges[sign])
        steps.append((sign, n))
        total = apply_operation(sign, total, n)
    return start, steps


def _question(rng: random.Random, start: int, steps: list[tuple[str, int]]) -> str:
    name, thing = rng.choice(NAMES), rng.choice(OBJECTS)
    sentences = [rng.choice(SENTENCES[sign]).format(name=name, n=n) for sign, n in steps]
    return " ".join([f"{name} has {start} {thing}.", *sentences, f"How many {thing} does {name} have now?"])


def _row(
    question: str, expression: str, start: int, steps: list[tuple[str, int]], split: str, index: int
) -> dict[str, Any]:
    total, lines = start, []
    for sign, n in steps:
        after = apply_operation(sign, total, n)
        lines.append(f"{total} {sign} {n} = {after}")
        total = after
    return {
        "data_source": "arithmetic",
        "prompt": [{"role": "user", "content": question}],
        "env_class": "arithmetic",
        "reward_spec": {"method": "rule", "ground_truth": str(total)},
        "extra_info": {
            "split": split,
            "index": index,
            "operations": len(steps),
            "expression": expression,
            "question": question,
            "answer": "\n".join([*lines, f"#### {total}"]),
            "direct": f"#### {total}",
        },
    }
