r"""Decides whether two mathematical answers are equal, with math-verify's parser and comparison for expressions.

math-verify alone ignores number bases, takes sets for tuples, takes all numbers below 1e-6 for 0, and does not read
unicode, percent signs or Markdown. So `math_text` and `math_forms` read the structure first, expressions are compared
by their values at random points, and math-verify's `verify` decides where that is impossible.
"""

from __future__ import annotations

import logging
import random
import re
from collections.abc import Iterable, Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Any

import sympy
from latex2sympy2_extended.latex2sympy2 import ConversionConfig, latex2sympy
from math_verify import verify
from sympy.core.evalf import PrecisionExhausted
from sympy.core.function import AppliedUndef

from skyrl_train.environments.graders.math_forms import (
    THOUSANDS,
    TRIGONOMETRIC,
    Based,
    Chain,
    Form,
    Group,
    Unreadable,
    Value,
    Words,
    key,
    read,
    readable,
)
from skyrl_train.environments.graders.math_text import normalise

DIGITS = 30
"""Decimal digits of the arithmetic that compares values."""
MAX_DIGITS = 500
"""Digits after which two values that agree count as equal."""
EXACT = sympy.Float("1e-18")
APPROXIMATE = sympy.Float("1.0001e-6")
"""Largest relative differences of two equal values, and of two of which one has decimals in an expression."""
SIGNIFICANT = 6
"""Least number of decimal places, or of significant digits, of a decimal that stands for a value it only rounds."""
DECIMAL = re.compile(r"([-+]*)\s*([0-9]+\.?[0-9]*|\.[0-9]+)")
FRACTION = re.compile(r"([-+]?)\s*\\frac\{([-+]?[0-9]+)\}\{([0-9]+)\}|([-+]?)([0-9]+)\s*/\s*([0-9]+)")


def equal(truth: str, answer: str) -> bool:
    """True if `answer` is as good as `truth`. False too if one of them cannot be read."""
    truth, answer = normalise(truth), normalise(answer)
    if _equal_read(truth, answer, True):
        return True
    ambiguous = THOUSANDS.fullmatch(truth) or THOUSANDS.fullmatch(answer)  # 100,200 is a number or a list
    return bool(ambiguous) and not answer.startswith("(") and _equal_read(truth, answer, False)


def check(truth: str) -> str | None:
    """Return why a ground truth cannot be read, or None if it can be."""
    try:
        form = read(normalise(truth))
    except Unreadable as error:
        return str(error)
    for latex in readable(form):
        if parsed(latex) is None:
            return f"{latex!r} is not an expression that math-verify can parse"
    return None


def _equal_read(truth: str, answer: str, thousands: bool) -> bool:
    try:
        return same(read(truth, thousands), read(answer, thousands))
    except Unreadable:
        return False


def same(truth: Form, answer: Form) -> bool:
    """True if the answer equals the truth."""
    if isinstance(truth, Chain) or isinstance(answer, Chain):
        return _same_chain(truth, answer)
    if isinstance(truth, Words) or isinstance(answer, Words):
        return _word(truth) == _word(answer) != ""
    if isinstance(truth, Group) or isinstance(answer, Group):
        return _same_group(truth, answer)
    if isinstance(truth, Based) or isinstance(answer, Based):
        return _same_base(truth, answer)
    assert isinstance(truth, Value) and isinstance(answer, Value)
    return _same_value(truth, answer)


def _word(form: Form) -> str:
    if isinstance(form, Words):
        return form.key
    if isinstance(form, Group) and form.kind in ("list", "set"):
        return "".join(sorted(map(_word, form.items)))
    return key(form.latex) if isinstance(form, Value) and form.latex.isalpha() else ""


def _same_base(truth: Form, answer: Form) -> bool:
    """Compare digits. A number without a base has the other's base in the answer, and base ten in the truth."""
    if isinstance(truth, Based) and isinstance(answer, Based):
        return truth == answer
    if isinstance(truth, Based):
        assert isinstance(answer, Value)
        return (answer.latex.replace(" ", "").lstrip("0") or "0") == truth.digits
    assert isinstance(truth, Value) and isinstance(answer, Based)
    return answer.base == 10 and _same_value(truth, Value(answer.digits))


# ----------------------------------------------------------------------------------------------- lists, sets, tuples


def _same_group(truth: Form, answer: Form) -> bool:
    if isinstance(truth, Group) and isinstance(answer, Group):
        return _same_groups(truth, answer)
    group, other = (truth, answer) if isinstance(truth, Group) else (answer, truth)
    assert isinstance(group, Group)
    if group.kind == "matrix" and isinstance(other, Value):
        left, right = (_latex(truth), _latex(answer))
        return left is not None and right is not None and _same_latex(left, right)
    return group.kind == "set" and len(group.items) == 1 and same(*_in_order(truth, group.items[0], other, answer))


def _in_order(truth: Form, item: Form, other: Form, answer: Form) -> tuple[Form, Form]:
    return (item, other) if isinstance(truth, Group) else (other, item)


def _same_groups(truth: Group, answer: Group) -> bool:
    if names := _distinct_names(truth.items):
        given = _distinct_names(answer.items)
        if given:
            values = dict(zip(given, answer.items, strict=True))
            return set(names) == set(given) and all(
                same(item, values[name]) for name, item in zip(names, truth.items, strict=True)
            )
        return answer.kind != "set" and _same_items(truth.items, answer.items)
    kinds = {truth.kind, answer.kind}
    if "tuple" in kinds and (names := _distinct_names(answer.items)):  # x = 2, y = 3 as the point (2, 3)
        ordered = [item for _, item in sorted(zip(names, answer.items, strict=True), key=lambda pair: pair[0])]
        return truth.brackets == "()" and _same_items(truth.items, ordered)
    if kinds == {"tuple"}:
        named = truth.name and answer.name and truth.name != answer.name
        return not named and truth.brackets == answer.brackets and _same_items(truth.items, answer.items)
    if kinds == {"tuple", "list"}:
        brackets = truth.brackets or answer.brackets
        return brackets == "()" and not (truth.name or answer.name) and _same_items(truth.items, answer.items)
    if kinds == {"tuple", "matrix"}:
        if _vector(truth) and _vector(answer) and "()" in (truth.brackets, answer.brackets):
            return _same_items(_vector(truth), _vector(answer))
        return all(map(_cells, (truth, answer))) and _same_items(_cells(truth), _cells(answer))
    if kinds <= {"list", "set"}:
        return _same_unordered(truth, answer)
    return kinds in ({"matrix"}, {"row"}) and _same_items(truth.items, answer.items)


def _vector(group: Group) -> Sequence[Form]:
    """The entries of a tuple, or of a matrix of one row or one column; none of any other."""
    if group.kind == "tuple":
        return group.items
    rows = [row.items for row in group.items if isinstance(row, Group)]
    if len(rows) == 1:
        return rows[0]
    return [row[0] for row in rows] if all(len(row) == 1 for row in rows) else []


def _cells(group: Group) -> list[Form]:
    """The entries of a matrix, also as [[1, 2], [3, 4]], row by row, each with its row's length; none of a vector."""
    rows = [row.items for row in group.items if isinstance(row, Group) and (row.kind == "row" or row.brackets == "[]")]
    whole = len(rows) == len(group.items) and group.brackets in ("", "[]")
    return [cell for row in rows for cell in (Value(str(len(row))), *row)] if whole else []


def _same_items(truth: Sequence[Form], answer: Sequence[Form]) -> bool:
    return len(truth) == len(answer) > 0 and all(same(*pair) for pair in zip(truth, answer, strict=True))


def _same_unordered(truth: Group, answer: Group) -> bool:
    left, right = (
        [*group.items] if group.kind == "list" else _without_repeats(group.items) for group in (truth, answer)
    )
    if len(left) != len(right):
        return False
    for item in left:
        index = next((at for at, other in enumerate(right) if same(item, other)), None)
        if index is None:
            return False
        right.pop(index)
    return True


def _without_repeats(items: Iterable[Form]) -> list[Form]:
    kept: list[Form] = []
    for item in items:
        if not any(same(item, other) for other in kept):
            kept.append(item)
    return kept


def _distinct_names(items: Sequence[Form]) -> list[str] | None:
    names = [item.name if isinstance(item, Chain) else None for item in items]
    return [str(name) for name in names] if None not in names and len(set(names)) == len(names) > 1 else None


# --------------------------------------------------------------------------------------------- equations, inequalities


def _same_chain(truth: Form, answer: Form) -> bool:
    if not isinstance(truth, Chain):
        assert isinstance(answer, Chain)
        return _value_of_chain(truth, answer)
    if not isinstance(answer, Chain):
        return truth.relations == ("=",) and truth.value is not None and same(truth.value, answer)
    if truth.name and truth.name == answer.name and truth.relations[0] == answer.relations[0]:
        assert truth.value is not None and answer.value is not None
        if _sides_agree(answer) and same(truth.value, answer.value):
            return True
    if truth.relations[0] != answer.relations[0] and truth.relations[0] not in "<=>=":
        return False
    product = re.fullmatch("[a-z]{2,}", truth.name or "")  # x y = 1
    solved = truth.value is not None and not product and not _has_variables(truth.value)
    if solved and ("0" not in answer.sides or not _has_variables(read(answer.sides[0] or answer.sides[-1]))):
        return False  # x - 5 = 0 is x = 5; an equation that is still to solve is no answer
    return len(truth.relations) == len(answer.relations) == 1 and _proportional(truth, answer)


def _value_of_chain(truth: Form, answer: Chain) -> bool:
    """Compare a truth without a relation with an answer of the form name = value, or of several equal sides."""
    if set(answer.relations) != {"="} or not _sides_agree(answer):
        return False
    constant = not any(map(_has_variables, map(read, answer.sides)))
    if constant and not answer.name and None in map(_number, answer.sides):
        return False  # 1/2 = 0.5 is one value, 1 + 41 = 42 leaves open which side is the answer
    try:
        last = answer.value if answer.value is not None else read(answer.sides[-1])
    except Unreadable:
        return False
    return same(truth, last)


def _sides_agree(chain: Chain) -> bool:
    """True unless a side is a constant other than the last one, as in x = 41 = 42."""
    values = [read(side) for side in chain.sides if side]
    last = chain.value if chain.value is not None else values[-1]
    constants = [value for value in values if not _has_variables(value)]
    return len(values) == len(chain.sides) and all(value == last or same(value, last) for value in constants)


def _has_variables(form: Form) -> bool:
    if isinstance(form, Value):
        expression = parsed(form.latex)
        return expression is None or bool(expression.free_symbols or expression.atoms(AppliedUndef))
    return not isinstance(form, Based) and not (isinstance(form, Group) and not any(map(_has_variables, form.items)))


def _proportional(truth: Chain, answer: Chain) -> bool:
    """True if both relations, with everything on the left side, differ by a factor other than 0 (positive, for <)."""
    differences = []
    for chain in (truth, answer):
        left, right = (parsed(side) for side in chain.sides)
        if left is None or right is None:
            return False
        flipped = chain.relations[0].startswith(">")
        difference = right - left if flipped else left - right
        if chain.relations == ("=",):  # y = 1/x is xy = 1
            difference = sympy.fraction(sympy.together(difference))[0]
        differences.append(difference)
    kinds = [chain.relations[0].replace(">", "<") for chain in (truth, answer)]
    if kinds[0] != kinds[1]:
        return False
    ratios = []
    for _, (first, second) in _at_points(*differences):
        if first is None or second is None or abs(second) < EXACT:
            continue
        ratios.append(first / second)
    if len(ratios) < 3 or abs(ratios[0]) < EXACT or (kinds[0] != "=" and sympy.re(ratios[0]) < 0):
        return False
    return all(abs(ratio - ratios[0]) <= EXACT * abs(ratios[0]) for ratio in ratios)


# ---------------------------------------------------------------------------------------------- numbers, expressions


def _same_value(truth: Value, answer: Value) -> bool:
    if "percent" in (truth.unit, answer.unit) and truth.unit != answer.unit:
        plain, percent = (answer, truth) if truth.unit == "percent" else (truth, answer)
        left_out = truth.unit == "percent" and _same_latex(percent.latex, plain.latex)  # 25 for 25%, not the reverse
        return plain.unit is None and (left_out or _same_latex(rf"\frac{{{percent.latex}}}{{100}}", plain.latex))
    if truth.unit and answer.unit and truth.unit != answer.unit:
        return False
    return _same_latex(truth.latex, answer.latex)


def _same_latex(truth: str, answer: str) -> bool:
    if truth == answer:
        return bool(truth)
    numbers = _number(truth), _number(answer)
    if numbers[0] is not None and numbers[1] is not None:
        return numbers[0] == numbers[1] or _rounded(truth, answer, *numbers)
    expressions = parsed(truth), parsed(answer)
    if expressions[0] is None or expressions[1] is None:
        return False
    return _same_expression(*expressions, approximate="." in truth or "." in answer, texts=(truth, answer))


def _number(latex: str) -> Fraction | None:
    """The exact value of a decimal or a fraction of whole numbers; None for anything else."""
    if match := DECIMAL.fullmatch(latex):
        return Fraction(match[2]) * (-1) ** match[1].count("-")
    if match := FRACTION.fullmatch(latex):
        sign, above, below = (match[1], match[2], match[3]) if match[2] else (match[4], match[5], match[6])
        return None if int(below) == 0 else Fraction(int(above), int(below)) * (-1 if sign == "-" else 1)
    return None


def _rounded(truth: str, answer: str, left: Any, right: Any) -> bool:
    """True if the shorter decimal of the two is the other number rounded or cut, and has enough digits for that."""
    decimals = [
        (len(match[2].partition(".")[2]), text, value)
        for text, value in ((truth, left), (answer, right))
        if (match := DECIMAL.fullmatch(text)) and "." in match[2]
    ]
    if not decimals:
        return False
    places, text, value = min(decimals, key=lambda decimal: decimal[0])
    significant = len(re.sub(r"[^0-9]", "", text).lstrip("0"))
    if significant < 4 or (places < SIGNIFICANT and significant < SIGNIFICANT):
        return False
    other = right if value is left else left
    unit = Fraction(1, 10**places) if isinstance(other, Fraction) else sympy.Rational(1, 10**places)
    difference = abs(other) - abs(value)
    return (other > 0) == (value > 0) and bool(-unit / 2 <= difference < unit)


@lru_cache(maxsize=4096)
def parsed(latex: str) -> Any:
    """The sympy expression that `latex` is, with exact decimals and i as the imaginary unit; None if it is none."""
    if re.search(r"[0-9]\s+[0-9]|[0-9]\.[0-9]*\.|\.\.|[0-9]\s*_", latex):
        return None
    text = re.sub(r"(?<![0-9.])\.(?=[0-9])", "0.", latex).replace(r"\%", r"/100")
    if TRIGONOMETRIC.search(text):
        text = re.sub(r"([0-9.]+|\([^()]*\))\s*\^\{\\circ\}", r"(\1\\pi/180)", text)
    text = re.sub(r"\{\}\^|\^\{\\circ\}", "", text)
    try:
        expression = latex2sympy(
            text,
            is_real=True,
            convert_degrees=False,
            conversion_config=ConversionConfig(interpret_as_mixed_fractions=False, lowercase_symbols=False),
            normalization_config=None,
        )
        return _plain(expression)
    except Exception:  # the grammar and sympy raise errors of many kinds for what a model writes
        return None


def _plain(expression: Any) -> Any:
    if isinstance(expression, sympy.MatrixExpr):
        expression = expression.doit()
    if isinstance(expression, sympy.MatrixBase):
        return sympy.ImmutableMatrix(*expression.shape, [_plain(entry) for entry in expression])
    symbols = expression.free_symbols
    names = {str(symbol) for symbol in symbols}
    changes = {number: sympy.Rational(str(number)) for number in expression.atoms(sympy.Float)}
    if not names & {"j", "k"}:
        changes |= {symbol: sympy.I for symbol in symbols if str(symbol) in ("i", "\\imath")}
    return expression.xreplace(changes).doit() if changes else expression


def _same_expression(truth: Any, answer: Any, approximate: bool, texts: tuple[str, str]) -> bool:
    if isinstance(truth, sympy.MatrixBase) and isinstance(answer, sympy.MatrixBase):
        return truth.shape == answer.shape and all(
            _same_expression(*pair, approximate=approximate, texts=texts) for pair in zip(truth, answer, strict=True)
        )
    if isinstance(truth, sympy.MatrixBase) or isinstance(answer, sympy.MatrixBase):
        return False
    if not isinstance(truth, sympy.Expr) or not isinstance(answer, sympy.Expr):
        return _verified(truth, answer)
    if truth == answer:
        return truth is not sympy.nan and truth is not sympy.zoo
    if any(map(DECIMAL.fullmatch, texts)) and not (truth.free_symbols or answer.free_symbols):
        return bool(_compared(truth, answer, EXACT)) or _rounded(*texts, truth, answer)
    verdict = _compared(truth, answer, APPROXIMATE if approximate else EXACT)
    return _verified(truth, answer) if verdict is None else verdict


def _compared(truth: Any, answer: Any, tolerance: Any) -> bool | None:
    """Compare values at random points; None if there are no values, or only complex ones that differ."""
    real = complex_ = found = 0
    for values, (first, second) in _at_points(truth, answer):
        if first is None or second is None:
            continue
        found += 1
        close = abs(first - second) <= tolerance * max(abs(first), abs(second))
        if close and tolerance == EXACT:
            close = _is_zero((truth - answer).subs(values), 2 * DIGITS if values else MAX_DIGITS)
        if first.is_real and second.is_real:
            real += 1
            if not close:
                return False
        else:
            complex_ += not close
    if real or not complex_:
        return bool(found)
    return None if truth.free_symbols or answer.free_symbols else False


def _is_zero(constant: Any, max_digits: int) -> bool:
    """True if the constant has no digit other than 0 among the first `max_digits`: 2^{100} + 1 is not 2^{100}."""
    if constant.is_Rational:
        return bool(constant == 0)
    try:
        return bool(sympy.N(constant, 5, maxn=max_digits, strict=True) == 0)
    except PrecisionExhausted:
        return True


def _at_points(*expressions: Any) -> list[tuple[dict[Any, Any], list[Any]]]:
    """Some points and the values of the expressions there; None for one without a value."""
    symbols = sorted(set().union(*(expression.free_symbols for expression in expressions)), key=str)
    chosen = random.Random(0)
    found = []
    for point in range(6 if symbols else 1):
        sign = -1 if point >= 4 else 1
        values = {symbol: sign * sympy.Rational(chosen.randint(101, 397), 97) for symbol in symbols}
        found.append((values, [_evaluated(expression, values) for expression in expressions]))
    return found


def _evaluated(expression: Any, values: dict[Any, Any]) -> Any:
    try:
        value = sympy.N(expression.subs(values), DIGITS)
    except (ArithmeticError, TypeError, ValueError, AttributeError):
        return None
    return value if value.is_number and value.is_finite and not value.has(AppliedUndef) else None


def _verified(truth: Any, answer: Any) -> bool:
    logging.disable(logging.CRITICAL)
    return bool(verify(truth, answer, timeout_seconds=None))


def _latex(form: Form) -> str | None:
    """The LaTeX of a matrix or a value."""
    if isinstance(form, Value):
        return form.latex
    if not isinstance(form, Group) or form.kind != "matrix":
        return None
    rows = [[_latex(cell) for cell in row.items] for row in form.items if isinstance(row, Group)]
    if any(cell is None for row in rows for cell in row):
        return None
    return r"\begin{pmatrix}" + r"\\".join("&".join(map(str, row)) for row in rows) + r"\end{pmatrix}"
