"""The countdown game (TinyZero's task): combine given numbers with + - * / into a target value, in a single turn."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

from skyrl_train.data.reasoning import final_answer
from skyrl_train.environments.base import StepOutput, TextEnv

MAX_EXPRESSION_CHARS = 200
"""Maximum characters of an expression. This also bounds its numbers, nesting and products."""
ANSWER = re.compile(r"<answer>([^<]*)</answer>")
ALLOWED = re.compile(r"[0-9+\-*/() ]+")
SIGNS = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-"})
OPERATIONS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


class CountdownEnv(TextEnv):
    """An environment that rewards an arithmetic expression that uses each given number once and equals the target.

    Such an expression gets 1, and any other expression gets `format_score` (0.1 by default). The expression is the
    content of <answer>...</answer> in the final answer (`reasoning.final_answer`), without an "= target" at its end. A
    response gets 0 if it has no answer, if its answers differ, or if the answer contains anything other than numbers,
    + - * / and parentheses. The expression is evaluated in exact fractions, without eval. One that divides by zero has
    no value. The row's `reward_spec.ground_truth` has the form {"target": 24, "numbers": [3, 3, 8, 8]}.
    """

    @classmethod
    def parse_row(cls, extras: Mapping[str, Any]) -> tuple[int, list[int]]:
        """Return the target and the sorted numbers, from `reward_spec["ground_truth"]`.

        Raises:
            ValueError: The ground truth lacks one of them, or has values that are not integers.
        """
        spec = extras.get("reward_spec")
        truth = spec.get("ground_truth") if isinstance(spec, Mapping) else None
        known = truth if isinstance(truth, Mapping) else {}
        target, numbers = known.get("target"), known.get("numbers")
        if not isinstance(numbers, list) or not numbers or not all(map(_is_integer, [target, *numbers])):
            raise ValueError(
                'the row needs reward_spec.ground_truth={"target": .., "numbers": [..]}, all integers, '
                f"got {truth!r:.80}"
            )
        return int(known["target"]), sorted(map(int, numbers))

    def __init__(self, env_config: Mapping[str, Any] | None = None, extras: Mapping[str, Any] | None = None):
        super().__init__(env_config, extras)
        self.target, self.numbers = self.parse_row(self.extras)
        self.format_score = float(self.env_config.get("format_score", 0.1))

    def step(self, action: str) -> StepOutput:
        expression = self._expression(action)
        parsed = evaluate_expression(expression) if expression is not None else None
        if parsed is None:
            return StepOutput([], 0.0, done=True, metadata={"acc": 0.0, "no_answer": 1.0})
        value, numbers = parsed
        right = value == self.target and sorted(numbers) == self.numbers
        metadata = {"acc": float(right), "no_answer": 0.0}
        return StepOutput([], 1.0 if right else self.format_score, done=True, metadata=metadata)

    def _expression(self, action: str) -> str | None:
        answers = {answer.strip() for answer in ANSWER.findall(final_answer(action))}
        if len(answers) != 1:
            return None
        left, equals, right = answers.pop().partition("=")
        return left if not equals or right.strip() == str(self.target) else None


def _is_integer(value: Any) -> bool:
    """True for integers and for floats with an integer value, which integers become in tables with nulls."""
    return isinstance(value, int | float) and not isinstance(value, bool) and float(value).is_integer()


def evaluate_expression(expression: str) -> tuple[Fraction | None, list[int]] | None:
    """Evaluate an expression that consists of integers, + - * / and parentheses.

    Returns:
        The exact value and the numbers in the expression, in order. The value is None if the expression divides by
        zero. The result is None if the text is not such an expression or has more than MAX_EXPRESSION_CHARS.
    """
    expression = expression.translate(SIGNS).strip()
    if len(expression) > MAX_EXPRESSION_CHARS or not ALLOWED.fullmatch(expression):
        return None
    numbers: list[int] = []

    def value(node: ast.expr) -> Fraction:
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            numbers.append(node.value)
            return Fraction(node.value)
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
            return OPERATIONS[type(node.op)](value(node.left), value(node.right))
        raise SyntaxError("not an arithmetic expression")

    try:
        return value(ast.parse(expression, mode="eval").body), numbers
    except ZeroDivisionError:
        return None, numbers
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return None
