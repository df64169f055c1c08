r"""Decides if two mathematical answers are equal. math-verify's parser parses the expressions in them.

math-verify alone ignores number bases and units, treats sets as tuples, and treats all numbers below 1e-6 as 0. So
`parse_answer` first splits an answer into the structure of a `ParsedAnswer`. Only its expressions go through the
parser, and their values at random points are compared. math-verify's `verify` decides if there are no values.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache
from itertools import product
from typing import Any

import sympy
from latex2sympy2_extended.latex2sympy2 import ConversionConfig, latex2sympy
from math_verify import verify
from sympy.core.evalf import PrecisionExhausted
from sympy.core.function import AppliedUndef

from skyrl_train.environments.graders.math_normalization import normalize_latex

DIGITS = 30
MAX_DIGITS = 500
"""Number of digits after which two constants that agree count as equal."""
SIGNIFICANT = 6
"""Minimum number of decimal places or significant digits of a decimal that is accepted as a rounded value."""

TOKEN = re.compile(r"\\[A-Za-z]+|\\.|[A-Za-z]+|.", re.DOTALL)
OPENING = {"(", "[", "{", r"\{", r"\langle", r"\lfloor", r"\lceil", r"\begin"}
CLOSING = {")", "]", "}", r"\}", r"\rangle", r"\rfloor", r"\rceil", r"\end"}
SEPARATORS = dict.fromkeys((",", ";", "or", "and", r"\lor", r"\land", r"\cup"), ",")
RELATIONS = {"=": "=", "<": "<", ">": ">", r"\le": "<=", r"\ge": ">=", r"\ne": "!=", r"\in": "in"}
FLIPPED = {"<": ">", "<=": ">=", ">": "<", ">=": "<="}
INFINITY = r"\infty"

NAME = re.compile(
    r"(?:\\?[A-Za-z]+|\\text\{[^{}]*\}|\|[A-Z]{2}\|)(?:\s*\\?[A-Za-z]+\s*)?(?:_(?:\w|\{[^{}]*\}))?'*"
    r"(?:\((?:[^()=]|\([^()]*\))*\))?|\\(?:overline|vec|overrightarrow|hat)\s*\{[A-Za-z]+\}"
)
"""Matches the left side of "x = 5", "f(x) = 5", "a_{10} = 5", "\\angle ABC = 5" or "\\text{Area} = 5"."""
SUM = re.compile(r"[A-Za-z](?:\([^()]*\))?(?:\s*[-+]\s*[A-Za-z](?:\([^()]*\))?)+")
"""Matches the left side of "m + n = 116" or "f(1) + f(2) = 5"."""
VARIABLE = re.compile(r"\\?[A-Za-z]+(?:_(?:\w|\{\w+\}))?")
BASED = re.compile(r"(-?)0*([0-9A-F]+(?:\.[0-9A-F]+)?)(?:_|_?BASE)([0-9]+|[A-Z]{3,5})")
"""Matches a number and its base, without braces and spaces, in capitals."""
NUMERALS = ("TWO", "THREE", "FOUR", "FIVE", "SIX", "SEVEN", "EIGHT", "NINE", "TEN")
DECIMAL = re.compile(r"([-+]*)\s*([0-9]+\.?[0-9]*|\.[0-9]+)")
PLAIN_NUMBER = re.compile(r"-?(?:[0-9.]+|\\frac\{-?[0-9]+\}\{[0-9]+\}|[0-9]+\s*/\s*[0-9]+)")
THOUSANDS = re.compile(r"(?<![0-9.,])[0-9]{1,3}(?:,[0-9]{3})+(?![0-9,])")
REPEATING = re.compile(r"(?<![0-9])([0-9]*)\.([0-9]*)(?:\\overline\s*\{?([0-9]+)\}?|\(([0-9]+)\))")
SCIENTIFIC = re.compile(r"(?<![A-Za-z0-9_])([0-9]+(?:\.[0-9]*)?|\.[0-9]+)[eE]([-+]?[0-9]+)(?![0-9A-Za-z])")
POWER = re.compile(r"(?<=[0-9])\s*(?:\\text\{\s*)?(thousand|million|billion|trillion)(?![A-Za-z])\s*\}?")
POWERS = {"thousand": 3, "million": 6, "billion": 9, "trillion": 12}
MIXED = re.compile(r"(-?)\s*([0-9]+)\s*(\\frac\{[0-9]+\}\{[0-9]+\}|\s[0-9]+\s*/\s*[0-9]+)")
BUILDER = re.compile(r"\s*\\?[A-Za-z]+(?:\s*\\in\s*\\mathbb\{R\})?\s*(?:\||:|\\mid)\s*(.+)")
REALS = re.compile(r"\\mathbb\{R\}|(?:\\text\{)?\s*all real(?:s| numbers)\s*\}?")
RATIO = re.compile(r"([0-9]+)\s*:\s*([0-9]+)(?:\s*:\s*([0-9]+))?")
TIME = re.compile(r"[0-9]{1,2}:[0-5][0-9](?::[0-5][0-9])?")
WORDS = re.compile(r"[A-Za-z][A-Za-z0-9 ,.:'/()!?&-]*|[0-9]{1,2}:[0-9]{2}(?:\s*[ap]\.?m\.?)?", re.IGNORECASE)
PLAIN_WORDS = re.compile(r"(?:[A-Za-z]{4,}|yes|odd|not?)(?![A-Za-z])[A-Za-z ,.'-]*(?: [0-9]+.*)?", re.IGNORECASE)
TRIGONOMETRIC = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![A-Za-z])")
CURRENCIES = {r"\$": "dollar", "$": "dollar", "€": "euro", "£": "pound"}
CURRENCY = re.compile(r"(-?)\s*(\\\$|\$|€|£)\s*(-?.+)|(.+?)\s*(\\\$|\$|€|£)")
DEGREES = re.compile(r"(.+?)\s*\^\{\\circ\}\s*[CF]?")
PERCENT = re.compile(r"(.+?)\s*(?:\\?%|(?:\\text\{)?\s*(?:percent|percentage|per cent|pct)\s*\}?)", re.IGNORECASE)
UNIT = re.compile(
    r"(?P<value>.*?[0-9)}! ])\s*(?:\\text\{(?P<text>[^{}0-9]*(?:\^?[23])?)\}|(?<=\s)(?P<word>[A-Za-z][A-Za-z. /]*)|"
    r"(?P<short>[A-Za-z]{2,}(?:/[a-z]+)?))\s*(?:\^\s*\{?(?P<power>[23])\}?)?"
)
UNITS = (
    "mm millimeter millimetre,cm centimeter centimetre,m meter metre,km kilometer kilometre,in inch inche,ft foot feet,"
    "yd yard,mi mile,mg milligram,g gram,kg kilogram,lb pound,oz ounce,s sec second,min minute,h hr hour,day,week,"
    "month,year yr,ml mL milliliter millilitre,l L liter litre,deg degree,rad radian,dollar,euro,cent,mph,"
    "km/h kmh kph,m/s"
)
"""Units and their spellings. Values in different units are unequal. Other words after a value are ignored."""
SPELLINGS = {spelling: group.split()[0] for group in UNITS.split(",") for spelling in group.split()}


class AnswerKind(StrEnum):
    """The kind of structure that an answer has."""

    VALUE = "value"
    WORDS = "words"
    BASED = "based"
    """A number and its base."""
    RELATION = "relation"
    LIST = "list"
    SET = "set"
    TUPLE = "tuple"
    """A tuple or an interval."""


@dataclass(frozen=True)
class ParsedAnswer:
    """The structure of an answer."""

    kind: AnswerKind
    text: str = ""
    """LaTeX of a value, comparison key of words, or digits of a number with a base."""
    qualifier: str = ""
    """Unit of a value, base of a number, sign of a relation, or brackets of a tuple."""
    items: tuple[ParsedAnswer, ...] = ()
    """Members of a list, set or tuple, or sides of a relation. The value is the last side if there is a name."""
    name: str = ""
    """Name of the variable, such as x in x = 5 or in an interval that was written as an inequality."""


class AnswerParseError(ValueError):
    """An answer that cannot be parsed because it is empty or has unbalanced brackets."""


def is_equal(truth: str, answer: str) -> bool:
    """True if an answer equals the ground truth. False if they differ or one of them cannot be parsed.

    Args:
        truth: The ground truth in LaTeX.
        answer: The model's answer in LaTeX.
    """
    truth, answer = normalize_latex(truth), normalize_latex(answer)
    ambiguous = THOUSANDS.fullmatch(truth) or THOUSANDS.fullmatch(answer)  # 100,200 is a number or a list
    try:
        return answers_match(parse_answer(truth), parse_answer(answer)) or (
            bool(ambiguous)
            and not answer.startswith("(")
            and answers_match(parse_answer(truth, False), parse_answer(answer, False))
        )
    except AnswerParseError:
        return False


def ground_truth_problem(truth: str) -> str | None:
    """Return why a ground truth in LaTeX cannot be parsed, or None if it can be."""
    try:
        latex = list(_expressions(parse_answer(normalize_latex(truth))))
    except AnswerParseError as error:
        return str(error)
    invalid = [text for text in latex if to_sympy(text) is None]
    return f"{invalid[0]!r} is not an expression that math-verify can parse" if invalid else None


def _expressions(form: ParsedAnswer) -> Iterator[str]:
    """Yield the LaTeX of all values, which math-verify must be able to parse."""
    if form.kind == AnswerKind.VALUE:
        yield form.text
    for item in form.items[1:] if form.kind == AnswerKind.RELATION and form.name else form.items:
        yield from _expressions(item)


# ------------------------------------------------------------------------------------------------------------ parsing


def parse_answer(text: str, has_thousands_separators: bool = True) -> ParsedAnswer:
    """Parse a normalized answer into its structure.

    Args:
        text: The normalized text; see `math_normalization.normalize_latex`.
        has_thousands_separators: True if 1,234 is one number. Otherwise it is a list of two numbers.

    Raises:
        AnswerParseError: The text is empty or has unbalanced brackets.
    """
    if has_thousands_separators and not text.startswith(("(", "[", r"\{")):
        text = THOUSANDS.sub(lambda match: match[0].replace(",", ""), text)
    text = POWER.sub(lambda match: rf"\\times 10^{{{POWERS[match[1]]}}}".replace("\\\\", "\\"), text)
    text = SCIENTIFIC.sub(r"\1\\times 10^{\2}", REPEATING.sub(_repeating, text))
    forms: list[ParsedAnswer] = []
    for piece, _ in _split(text.removeprefix("= "), SEPARATORS):
        for variant in _signs(piece) if piece else []:
            form = _element(variant)
            forms += form.items if form.kind == AnswerKind.LIST else [form]
    if not forms or not text.strip("{} "):
        raise AnswerParseError("the answer is empty")
    return forms[0] if len(forms) == 1 else ParsedAnswer(AnswerKind.LIST, items=tuple(forms))


def _repeating(match: re.Match[str]) -> str:
    integer, start, period = match[1] or "0", match[2], match[3] or match[4]
    above = int(integer + start + period) - int(integer + start)
    return rf"\frac{{{above}}}{{{10 ** len(start) * (10 ** len(period) - 1)}}}"


def _split(text: str, marks: dict[str, str]) -> list[tuple[str, str]]:
    """Split a text at those marks that are outside of brackets.

    Return each piece with the value of the mark before it, which is "" for the first piece.
    """
    depth, start, before = 0, 0, ""
    pieces = []
    for token in TOKEN.finditer(text):
        depth += (token[0] in OPENING) - (token[0] in CLOSING)
        if depth < 0:
            raise AnswerParseError(f"{token[0]!r} has no opening bracket")
        if depth == 0 and token[0] in marks:
            pieces.append((text[start : token.start()].strip(), before))
            before, start = marks[token[0]], token.end()
    if depth:
        raise AnswerParseError("a bracket is not closed")
    return [*pieces, (text[start:].strip(), before)]


def _signs(piece: str) -> list[str]:
    r"""Expand \pm and \mp into all choices of signs. Signs are chosen separately, or together if there is a \mp."""
    first, *rest = re.split(r"\\([pm][pm])(?![A-Za-z])", piece)
    marks, parts = rest[::2], rest[1::2]
    if not marks or len(marks) > 4:
        return [piece]
    choices = product((1, -1), repeat=len(marks)) if "mp" not in marks else [(1,) * len(marks), (-1,) * len(marks)]
    return [
        first
        + "".join(
            ("-+"[(sign > 0) == (mark == "pm")]) + part for sign, mark, part in zip(choice, marks, parts, strict=True)
        )
        for choice in choices
    ]


def _element(text: str) -> ParsedAnswer:
    """Parse one value, group or relation."""
    text = text.strip()
    if not text:
        raise AnswerParseError("a part of the answer is empty")
    if based := _based(text):
        return based
    if REALS.fullmatch(text):
        return ParsedAnswer(
            AnswerKind.TUPLE,
            qualifier="()",
            items=(ParsedAnswer(AnswerKind.VALUE, f"-{INFINITY}"), ParsedAnswer(AnswerKind.VALUE, INFINITY)),
        )
    if (ratio := RATIO.fullmatch(text)) and not TIME.fullmatch(text) and int(ratio[1]):
        parts = [
            ParsedAnswer(AnswerKind.VALUE, rf"\frac{{{number}}}{{{ratio[1]}}}") for number in ratio.groups() if number
        ]
        two = ParsedAnswer(AnswerKind.VALUE, rf"\frac{{{ratio[1]}}}{{{ratio[2]}}}")
        return ParsedAnswer(AnswerKind.TUPLE, qualifier=":", items=tuple(parts)) if ratio[3] else two
    sides = _split(text, RELATIONS)
    if len(sides) > 1:
        return _relation([side for side, _ in sides], [mark for _, mark in sides[1:]])
    return _group(text) or _words(text) or _value(text)


def _group(text: str) -> ParsedAnswer | None:
    """Parse a set, tuple or interval, or the content of brackets around the entire text. Return None for other text."""
    tokens = [token[0] for token in TOKEN.finditer(text)]
    first, last = tokens[0], tokens[-1]
    if first not in (r"\{", "(", "[", "{", r"\langle") or last not in (r"\}", ")", "]", "}", r"\rangle"):
        return None
    depth = 0
    for token in tokens[:-1]:
        depth += (token in OPENING) - (token in CLOSING)
        if depth == 0:
            return None
    inner = text[len(first) : -len(last)].strip()
    if first in (r"\{", "{"):
        if not inner:
            return ParsedAnswer(AnswerKind.VALUE, r"\emptyset")
        if (builder := BUILDER.fullmatch(inner)) or first == "{":
            return parse_answer(builder[1] if builder else inner)
    items = tuple(_element(piece) for piece, _ in _split(inner, SEPARATORS if first == r"\{" else {",": ",", ";": ","}))
    if first == r"\{":
        return ParsedAnswer(AnswerKind.SET, items=items) if len(items) > 1 else items[0]
    if len(items) == 1:
        return items[0] if first == "(" and last == ")" else None
    return ParsedAnswer(
        AnswerKind.TUPLE, qualifier=("[" if first == "[" else "(") + ("]" if last == "]" else ")"), items=items
    )


def _relation(sides: list[str], marks: list[str]) -> ParsedAnswer:
    names = [_name(side) for side in sides]
    if marks == ["in"] and names[0]:
        return _element(sides[1])
    if marks == ["!="] and any(names):
        end = _element(sides[1] if names[0] else sides[0])
        ends = (ParsedAnswer(AnswerKind.VALUE, f"-{INFINITY}"), end), (end, ParsedAnswer(AnswerKind.VALUE, INFINITY))
        return ParsedAnswer(
            AnswerKind.LIST,
            items=tuple(ParsedAnswer(AnswerKind.TUPLE, "", "()", items, names[0] or names[1]) for items in ends),
        )
    if set(marks) == {"="} and not names[0] and names[-1]:
        sides, names = sides[::-1], names[::-1]
    if set(marks) == {"="}:
        return ParsedAnswer(AnswerKind.RELATION, qualifier="=", items=tuple(map(_element, sides)), name=names[0])
    if marks[0] in (">", ">="):
        sides, marks = sides[::-1], [FLIPPED.get(mark, mark) for mark in marks[::-1]]
    return _interval(sides, marks) or ParsedAnswer(
        AnswerKind.RELATION, qualifier=" ".join(marks), items=tuple(map(_element, sides))
    )


def _name(side: str) -> str:
    """Return a side without spaces and braces if it is a name such as x, f(x), a_{10} or (x,y), and "" otherwise."""
    if side.startswith("(") and side.endswith(")") and "," in side:
        parts = [part.strip() for part in side[1:-1].split(",")]
        return ",".join(parts) if all(VARIABLE.fullmatch(part) for part in parts) else ""
    if not (NAME.fullmatch(side) or SUM.fullmatch(side)) or side in (r"\pi", "e", r"\emptyset", INFINITY):
        return ""
    return re.sub(r"\\text|[\s{}]", "", side)


def _interval(sides: list[str], marks: list[str]) -> ParsedAnswer | None:
    """Parse < and <= for a single variable as an interval, such as (5, \\infty) for 5 < x."""
    at = [at for at, side in enumerate(sides) if VARIABLE.fullmatch(side) and side not in (r"\pi", "e", INFINITY)]
    if not set(marks) <= {"<", "<="} or len(sides) > 3 or len(at) != 1 or (len(sides) == 3 and at != [1]):
        return None
    if len(sides) == 2 and re.search(r"(?<![\\A-Za-z])[a-df-z](?![A-Za-z])", sides[1 - at[0]]):
        return None  # y < 3 - 2x is a half-plane
    low = _element(sides[0]) if at[0] > 0 else ParsedAnswer(AnswerKind.VALUE, f"-{INFINITY}")
    high = _element(sides[-1]) if at[0] < len(sides) - 1 else ParsedAnswer(AnswerKind.VALUE, INFINITY)
    opening = "[" if at[0] > 0 and marks[0] == "<=" else "("
    closing = "]" if at[0] < len(sides) - 1 and marks[-1] == "<=" else ")"
    return ParsedAnswer(AnswerKind.TUPLE, qualifier=opening + closing, items=(low, high), name=sides[at[0]])


def _based(text: str) -> ParsedAnswer | None:
    r"""Parse a number with its base: 101_2, 101_{\text{two}}, 101 (base 2), FF_{16}."""
    match = BASED.fullmatch(re.sub(r"\\text|[{}() ]", "", text).upper())
    if match is None or not (match[3].isdigit() or match[3] in NUMERALS):
        return None
    digits, base = match[2], int(match[3]) if match[3].isdigit() else NUMERALS.index(match[3]) + 2
    if base < 2 or (base <= 10 and re.search("[A-F]", digits)):
        return None
    if digits.isalpha() and (len(digits) == 1 or base != 16):  # a_{12} is a member of a sequence
        return None
    return ParsedAnswer(AnswerKind.BASED, match[1] + digits, str(base))


def _words(text: str) -> ParsedAnswer | None:
    r"""Parse words, such as "ellipse" or "June 20", letters in \text{...}, or a time."""
    plain = re.sub(r"\\text\{([^{}]*)\}", r"\1", text).strip()
    wrapped = re.fullmatch(r"(?:\s*\\text\{[^{}]*\}\s*)+", text) or TIME.match(plain)
    if (choice := re.fullmatch(r"\(?([A-Z])\)?", plain)) and r"\text" in text:
        return ParsedAnswer(AnswerKind.WORDS, choice[1].lower())
    return ParsedAnswer(AnswerKind.WORDS, _key(plain)) if (WORDS if wrapped else PLAIN_WORDS).fullmatch(plain) else None


def _key(text: str) -> str:
    """Return the comparison key of words. It ignores case, spaces, punctuation except ":", and the order of a list."""
    parts = re.split(r"[,;&]|\band\b", text.casefold())
    return "".join(sorted(re.sub(r"[^a-z0-9:]", "", part) for part in parts))


def _value(text: str) -> ParsedAnswer:
    """Parse a value with its unit, percent sign or currency."""
    unit = ""
    if match := CURRENCY.fullmatch(text):
        text, unit = (match[4], CURRENCIES[match[5]]) if match[5] else (match[1] + match[3], CURRENCIES[match[2]])
    if (match := DEGREES.fullmatch(text)) and not TRIGONOMETRIC.search(text):
        text, unit = match[1], "deg"
    elif match := PERCENT.fullmatch(text):
        text, unit = match[1].strip(), "percent"
    elif match := UNIT.fullmatch(text):
        spelling = (match["text"] or match["word"] or match["short"] or "").strip().rstrip(".")
        known = _unit(spelling, match["power"] or "")
        written = match["text"] is not None or len(match["word"] or "") >= 4
        if (known and (len(spelling) > 1 or match["text"])) or (written and re.search("[0-9]", match["value"])):
            text, unit = match["value"].strip(), known or unit
    if match := MIXED.fullmatch(text):
        text = rf"{match[1]}({match[2]}+{match[3]})"
    return ParsedAnswer(AnswerKind.VALUE, text, unit)


def _unit(spelling: str, power: str) -> str:
    """Return the unit and its power, such as "cm^2", or "" if the unit is not in UNITS."""
    if match := re.fullmatch(r"(sq|cu)[a-z]*\.? +(.+)|(.+?)\^?([23])", spelling):
        power = match[4] or {"sq": "2", "cu": "3"}[match[1]]
        spelling = match[2] or match[3]
    units = [SPELLINGS.get(text) for text in (spelling, spelling.lower(), spelling.lower().removesuffix("s"))]
    unit = next(filter(None, units), None)
    return f"{unit}^{power}" if unit and power else unit or ""


# ---------------------------------------------------------------------------------------------------------- comparing


def answers_match(truth: ParsedAnswer, answer: ParsedAnswer) -> bool:
    """True if a parsed answer equals the parsed ground truth.

    The arguments are not interchangeable: 5 matches the ground truth x = 5, and a number without a base has the base of
    the ground truth.
    """
    kinds = {truth.kind, answer.kind}
    if AnswerKind.RELATION in kinds:
        return _same_relation(truth, answer)
    if AnswerKind.WORDS in kinds:
        return _word(truth) == _word(answer) != ""
    if truth.items or answer.items:
        return _same_group(truth, answer)
    if AnswerKind.BASED not in kinds:
        return _same_value(truth, answer)
    if truth.kind == AnswerKind.BASED:  # a number without a base has the base of the truth
        digits = answer.text.replace(" ", "").lstrip("0") or "0"
        return truth == answer or (answer.kind == AnswerKind.VALUE and digits == truth.text)
    return answer.qualifier == "10" and _same_value(truth, ParsedAnswer(AnswerKind.VALUE, answer.text))


def _word(form: ParsedAnswer) -> str:
    if form.kind in (AnswerKind.LIST, AnswerKind.SET):
        return "".join(sorted(map(_word, form.items)))
    return form.text if form.kind == AnswerKind.WORDS else _key(form.text) if form.text.isalpha() else ""


def _same_group(truth: ParsedAnswer, answer: ParsedAnswer) -> bool:
    names = [sorted(names) if (names := _distinct_names(form)) else [] for form in (truth, answer)]
    if all(names) and names[0] != names[1]:
        return False
    truth, answer = map(_point, (truth, answer))
    if not (truth.items and answer.items):
        group, value = (truth, answer) if truth.items else (answer, truth)
        matrix = to_sympy(value.text) if value.kind == AnswerKind.VALUE and group.qualifier == "()" else None
        if not isinstance(matrix, sympy.MatrixBase) or 1 not in matrix.shape or len(matrix) != len(group.items):
            return False
        entries = [to_sympy(item.text) if item.kind == AnswerKind.VALUE else None for item in group.items]
        return None not in entries and all(map(_equal, entries, matrix))
    kinds = {truth.kind, answer.kind}
    if AnswerKind.TUPLE not in kinds:  # {1, 1, 2} is {1, 2}, but the lists differ
        inside = all(any(answers_match(item, other) for other in answer.items) for item in truth.items)
        outside = all(any(answers_match(other, item) for other in truth.items) for item in answer.items)
        return inside and outside and (AnswerKind.SET in kinds or len(truth.items) == len(answer.items))
    if kinds == {AnswerKind.TUPLE}:
        agree = truth.qualifier == answer.qualifier and (not truth.name or not answer.name or truth.name == answer.name)
    else:
        agree = (
            AnswerKind.LIST in kinds
            and (truth.qualifier or answer.qualifier) == "()"
            and not (truth.name or answer.name)
        )
    return agree and len(truth.items) == len(answer.items) and all(map(answers_match, truth.items, answer.items))


def _distinct_names(form: ParsedAnswer) -> list[str]:
    names = [item.name if item.kind == AnswerKind.RELATION else "" for item in form.items]
    return names if form.kind == AnswerKind.LIST and all(names) and len(set(names)) == len(names) else []


def _point(form: ParsedAnswer) -> ParsedAnswer:
    """Convert x = 2, y = 3 to the point (2, 3). Return any other form unchanged."""
    if not _distinct_names(form):
        return form
    return ParsedAnswer(AnswerKind.TUPLE, qualifier="()", items=tuple(sorted(form.items, key=lambda item: item.name)))


def _same_relation(truth: ParsedAnswer, answer: ParsedAnswer) -> bool:
    if truth.kind != AnswerKind.RELATION:
        return _is_consistent_chain(answer) and answers_match(truth, answer.items[-1])
    if answer.kind != AnswerKind.RELATION:
        return bool(truth.name) and answers_match(truth.items[-1], answer)
    if (
        truth.name
        and truth.name == answer.name
        and _is_consistent_chain(answer)
        and answers_match(truth.items[-1], answer.items[-1])
    ):
        return True
    solved = truth.name and not re.fullmatch("[a-z]{2,}", truth.name) and _constant(truth.items[-1])  # not xy = 1
    if solved and "0" not in [item.text for item in answer.items]:
        return False  # x - 5 = 0 is accepted for x = 5, but an unsolved equation is not an answer
    return len(truth.items) == len(answer.items) == 2 and _proportional(truth, answer)


def _is_consistent_chain(chain: ParsedAnswer) -> bool:
    """True if no other side of an equation chain contradicts the last side, unlike in x = 41 = 42."""
    *others, last = chain.items
    if chain.qualifier != "=":
        return False
    if chain.name:
        return all(answers_match(last, other) for other in others[1:] if _constant(other))
    sides = [item.text for item in chain.items]  # in 1 + 41 = 42 it is unclear which side is the answer
    return all(answers_match(last, other) for other in others) and (
        not _constant(last) or all(map(PLAIN_NUMBER.fullmatch, sides))
    )


def _constant(form: ParsedAnswer) -> bool:
    if form.kind == AnswerKind.VALUE:
        expression = to_sympy(form.text)
        return expression is not None and not (expression.free_symbols or expression.atoms(AppliedUndef))
    return form.kind == AnswerKind.BASED or (bool(form.items) and all(map(_constant, form.items)))


def _proportional(truth: ParsedAnswer, answer: ParsedAnswer) -> bool:
    """True if two relations, with all terms on the left side, differ by a nonzero factor, which is positive for <."""
    sides = [[to_sympy(item.text) for item in form.items] for form in (truth, answer)]
    if truth.qualifier != answer.qualifier or not all(isinstance(side, sympy.Expr) for pair in sides for side in pair):
        return False
    differences = [left - right for left, right in sides]
    if truth.qualifier == "=":  # y = 1/x is xy = 1
        differences = [sympy.fraction(sympy.together(difference))[0] for difference in differences]
    point = next(_points(differences))
    values = [difference.subs(point) for difference in differences]
    if not all(value.is_number and value.is_finite and value != 0 for value in values):
        return False
    factor = values[0] / values[1]
    return (truth.qualifier == "=" or bool(factor > 0)) and _equal(differences[0], factor * differences[1])


def _same_value(truth: ParsedAnswer, answer: ParsedAnswer) -> bool:
    if truth.qualifier != answer.qualifier and "percent" in (truth.qualifier, answer.qualifier):
        hundredth = [
            replace(form, text=rf"\frac{{{form.text}}}{{100}}") if form.qualifier == "percent" else form
            for form in (truth, answer)
        ]
        is_sign_omitted = truth.qualifier == "percent" and _same_latex(truth.text, answer.text)  # 25 for 25% only
        return "" in (truth.qualifier, answer.qualifier) and (
            is_sign_omitted or _same_latex(*(form.text for form in hundredth))
        )
    return (not truth.qualifier or not answer.qualifier or truth.qualifier == answer.qualifier) and _same_latex(
        truth.text, answer.text
    )


def _same_latex(truth: str, answer: str) -> bool:
    if truth == answer:
        return bool(truth)
    values = to_sympy(truth), to_sympy(answer)
    if None in values:
        return False
    return _equal(*values) or _rounded([truth, answer], values)


def _rounded(texts: list[str], values: Any) -> bool:
    """True if the shorter decimal is the other number rounded or truncated, and has enough digits to be accepted."""
    decimals = [at for at in (0, 1) if DECIMAL.fullmatch(texts[at]) and "." in texts[at]]
    if not decimals or not all(value.is_number and value.is_real for value in values):
        return False
    at = min(decimals, key=lambda at: len(texts[at].partition(".")[2]))
    places = len(texts[at].partition(".")[2])
    significant = len(re.sub(r"[^0-9]", "", texts[at]).lstrip("0"))
    if significant < SIGNIFICANT - 2 or max(places, significant) < SIGNIFICANT:
        return False
    unit, excess = sympy.Rational(1, 10**places), abs(values[1 - at]) - abs(values[at])
    return (values[0] > 0) == (values[1] > 0) and bool(-unit / 2 <= excess) and bool(excess < unit)


@lru_cache(maxsize=4096)
def to_sympy(latex: str) -> Any:
    """Return the sympy expression of a LaTeX text, or None if it cannot be parsed.

    Decimals are exact, and i is the imaginary unit.
    """
    if match := DECIMAL.fullmatch(latex):
        return sympy.Rational(match[2]) * (-1) ** match[1].count("-")
    if re.search(r"[0-9]\s+[0-9]|[0-9]\.[0-9]*\.|\.\.|[0-9]\s*_", latex):
        return None
    text = re.sub(r"(?<![0-9.])\.(?=[0-9])", "0.", latex).replace(r"\%", r"/100")
    text = re.sub(r"([A-Za-z])'", r"\1_{p}", text)
    if TRIGONOMETRIC.search(text):
        text = re.sub(r"([0-9.]+|\([^()]*\))\s*\^\{\\circ\}", r"(\1\\pi/180)", text)
    text = re.sub(r"\{\}\^|\^\{\\circ\}", "", text)
    config = ConversionConfig(interpret_as_mixed_fractions=False, lowercase_symbols=False)
    try:
        return _exact(
            latex2sympy(text, is_real=True, convert_degrees=False, conversion_config=config, normalization_config=None)
        )
    except Exception:  # the parser and sympy raise many types of errors on a model's text
        return None


def _exact(expression: Any) -> Any:
    if isinstance(expression, sympy.MatrixExpr):
        expression = expression.doit()
    if isinstance(expression, sympy.MatrixBase):
        return sympy.ImmutableMatrix(*expression.shape, [_exact(entry) for entry in expression])
    symbols = expression.free_symbols
    changes = {number: sympy.Rational(str(number)) for number in expression.atoms(sympy.Float)}
    if not {str(symbol) for symbol in symbols} & {"j", "k"}:
        changes |= {symbol: sympy.I for symbol in symbols if str(symbol) in ("i", "\\imath")}
    return expression.xreplace(changes).doit() if changes else expression


def _equal(truth: Any, answer: Any) -> bool:
    """True if two expressions have equal values at random points.

    Complex values decide only if there are no real ones. math-verify decides if there are no values at all.
    """
    if isinstance(truth, sympy.MatrixBase) or isinstance(answer, sympy.MatrixBase):
        return type(truth) is type(answer) and truth.shape == answer.shape and all(map(_equal, truth, answer))
    if not isinstance(truth, sympy.Expr) or not isinstance(answer, sympy.Expr):
        return bool(verify(truth, answer, timeout_seconds=None))
    if truth == answer:
        return truth is not sympy.nan and truth is not sympy.zoo
    verdicts: dict[bool, list[bool]] = {True: [], False: []}
    for point in _points([truth, answer]):
        values = [_evaluated(expression, point) for expression in (truth, answer)]
        if None not in values:
            close = abs(values[0] - values[1]) <= sympy.Float("1e-18") * max(map(abs, values))
            real = bool(values[0].is_real and values[1].is_real)
            verdicts[real].append(bool(close) and _is_zero((truth - answer).subs(point)))
    decided = verdicts[True] or verdicts[False]
    if not decided and truth.free_symbols | answer.free_symbols:
        return bool(verify(truth, answer, timeout_seconds=None))
    return bool(decided) and all(decided)


def _points(expressions: list[Any]) -> Iterator[dict[Any, Any]]:
    """Yield six points with values for all symbols, two of them negative, or one empty point without symbols."""
    symbols = sorted(set().union(*(expression.free_symbols for expression in expressions)), key=str)
    rng = random.Random(0)
    for sign in (1, 1, 1, 1, -1, -1) if symbols else (1,):
        yield {symbol: sign * sympy.Rational(rng.randint(101, 397), 97) for symbol in symbols}


def _evaluated(expression: Any, point: dict[Any, Any]) -> Any:
    try:
        value = sympy.N(expression.subs(point), DIGITS)
    except (ArithmeticError, TypeError, ValueError, AttributeError):
        return None
    return value if value.is_number and value.is_finite and not value.has(AppliedUndef) else None


def _is_zero(constant: Any) -> bool:
    """True if the first MAX_DIGITS digits of a constant are 0, so that 2^{100} + 1 does not equal 2^{100}."""
    if constant.is_Rational:
        return bool(constant == 0)
    try:
        return bool(sympy.N(constant, 5, maxn=MAX_DIGITS, strict=True) == 0)
    except PrecisionExhausted:
        return True
