r"""Reads the structure of a mathematical answer: lists, sets, tuples, intervals, equations, units, number bases, words.

What is inside (a number, an expression) stays LaTeX; `math_equality` compares it. This module loads no other library.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TypeAlias

Form: TypeAlias = "Value | Words | Based | Group | Chain"

TOKEN = re.compile(r"\\[A-Za-z]+|\\.|[A-Za-z]+|.", re.DOTALL)
OPENING = {"(", "[", "{", r"\{", r"\langle", r"\lfloor", r"\lceil", r"\begin"}
CLOSING = {")", "]", "}", r"\}", r"\rangle", r"\rfloor", r"\rceil", r"\end"}
SEPARATORS = {",": ",", ";": ",", "or": "or", r"\lor": "or", r"\cup": "or", "and": "and", r"\land": "and"}
RELATIONS = {"=": "=", "<": "<", ">": ">", r"\le": "<=", r"\ge": ">=", r"\ne": "!=", r"\in": "in"}
FLIPPED = {"<": ">", "<=": ">=", ">": "<", ">=": "<="}

NAME = re.compile(
    r"(?:\\?[A-Za-z]+|\\text\{[^{}]*\}|\|[A-Z]{2}\|)(?:\s*\\?[A-Za-z]+\s*)?(?:_(?:\w|\{[^{}]*\}))?'*"
    r"(?:\((?:[^()=]|\([^()]*\))*\))?|\\(?:overline|vec|overrightarrow|hat)\s*\{[A-Za-z]+\}"
)
"""The left side of "x = 5", "f(x) = 5", "a_{10} = 5", "\\angle ABC = 5" or "\\text{Area} = 5"."""
SUM_OF_VALUES = re.compile(r"[A-Za-z]\([^()]*\)(?:\s*[-+]\s*[A-Za-z]\([^()]*\))+")
VARIABLE = re.compile(r"\\?[A-Za-z]+(?:_(?:\w|\{\w+\}))?")
BASED = re.compile(r"(-?)0*([0-9A-F]+(?:\.[0-9A-F]+)?)(?:_|_?BASE)([0-9]+|[A-Z]{3,5})")
"""A number and its base, without braces and spaces, in capitals."""
NUMERALS = ("TWO", "THREE", "FOUR", "FIVE", "SIX", "SEVEN", "EIGHT", "NINE", "TEN")
THOUSANDS = re.compile(r"(?<![0-9.,])[0-9]{1,3}(?:,[0-9]{3})+(?![0-9,])")
REPEATING = re.compile(r"(?<![0-9])([0-9]*)\.([0-9]*)(?:\\overline\s*\{?([0-9]+)\}?|\(([0-9]+)\))")
SCIENTIFIC = re.compile(r"(?<![A-Za-z0-9_])([0-9]+(?:\.[0-9]*)?|\.[0-9]+)[eE]([-+]?[0-9]+)(?![0-9A-Za-z])")
POWERS = {"thousand": 3, "million": 6, "billion": 9, "trillion": 12}
MIXED = re.compile(r"(-?)\s*([0-9]+)\s*(?:\\frac\{([0-9]+)\}\{([0-9]+)\}|\s([0-9]+)\s*/\s*([0-9]+))")
MATRIX = re.compile(r"\\begin\{([pbB]?)matrix\}(.*)\\end\{\1matrix\}", re.DOTALL)
BUILDER = re.compile(r"\s*(\\?[A-Za-z]+)(?:\s*\\in\s*\\mathbb\{R\})?\s*(?:\||:|\\mid)\s*(.+)")
DEGREES = re.compile(r"(.+?)\s*\^\{\\circ\}\s*[CF]?")
RATIO = re.compile(r"([0-9]+)\s*:\s*([0-9]+)(?:\s*:\s*([0-9]+))?")
TIME = re.compile(r"[0-9]{1,2}:[0-5][0-9](?::[0-5][0-9])?")
TRIGONOMETRIC = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![A-Za-z])")
CURRENCIES = {r"\$": "dollar", "$": "dollar", "€": "euro", "£": "pound"}
CURRENCY = re.compile(r"(?P<minus>-?)\s*(?P<sign>\\\$|\$|€|£)\s*(?P<amount>-?.+)")
PERCENT = re.compile(r"\s*(?:\\?%|(?:\\text\{)?\s*(?:percent|percentage|per cent|pct)\s*\}?)", re.IGNORECASE)
UNIT = re.compile(r"\s*(?:\\text\{\s*(?P<text>[^{}]*)\}|(?P<word>[A-Za-z][A-Za-z. /]*))\s*(?P<power>\^\s*\{?[0-9]\}?)?")
WORDS = re.compile(
    r"[A-Za-z][A-Za-z0-9 ,.:'/()!?&-]*|[0-9]{1,2}:[0-9]{2}(?: ?[ap]\.?m\.?)?|[0-9]+(?: ?: ?[0-9]+)+", re.IGNORECASE
)
PLAIN_WORD = re.compile(r"[A-Za-z]{4,}|yes|odd|not?", re.IGNORECASE)
UNITS = {
    "mm": "mm millimeter millimetre",
    "cm": "cm centimeter centimetre",
    "m": "m meter metre",
    "km": "km kilometer kilometre",
    "in": "in inch inches",
    "ft": "ft foot feet",
    "yd": "yd yard",
    "mi": "mi mile",
    "mg": "mg milligram",
    "g": "g gram",
    "kg": "kg kilogram",
    "lb": "lb pound",
    "oz": "oz ounce",
    "s": "s sec second",
    "min": "min minute",
    "h": "h hr hour",
    "day": "day",
    "week": "week",
    "month": "month",
    "year": "year yr",
    "ml": "ml mL milliliter millilitre",
    "l": "l L liter litre",
    "deg": "deg degree",
    "rad": "rad radian",
    "dollar": "dollar",
    "euro": "euro",
    "cent": "cent",
    "mph": "mph",
    "km/h": "km/h kmh kph",
    "m/s": "m/s",
}
"""Unit -> its spellings. Values in different ones of these are unequal; any other word after a value is ignored."""
SPELLINGS = {spelling: unit for unit, spellings in UNITS.items() for spelling in spellings.split()}


@dataclass(frozen=True)
class Value:
    """A number or an expression, and its unit."""

    latex: str
    unit: str | None = None
    """"percent", one of UNITS with its power ("cm^2"), or None for none and any other word."""


@dataclass(frozen=True)
class Words:
    """An answer in words, such as "ellipse", "Monday" or "4:30"."""

    key: str


@dataclass(frozen=True)
class Based:
    """A number written in a base other than by default."""

    digits: str
    base: int


@dataclass(frozen=True)
class Group:
    """Several values."""

    kind: str
    """"list" and "set" have no order; "tuple" (also an interval, with its brackets) and "matrix" (of rows) do."""
    items: tuple[Form, ...]
    brackets: str = ""
    """Of a tuple: "()", "[)", "(]" or "[]"."""
    name: str | None = None
    """The variable of an interval that was written as an inequality."""


@dataclass(frozen=True)
class Chain:
    """Sides with relations between them: x = 5, a < b, y = 2x + 1."""

    sides: tuple[str, ...]
    relations: tuple[str, ...]
    name: str | None = None
    """Of one equals sign, or several: the side that is a name, as in x = 5 and 5 = x."""
    value: Form | None = None
    """With a name: the other side, or the last one."""


class Unreadable(ValueError):
    """An answer that cannot be read: unbalanced brackets, or nothing at all."""


def read(text: str, thousands: bool = True) -> Form:
    """Return the structure of a normalised text (see `math_text.normalise`). Raises Unreadable.

    Args:
        thousands: Whether 1,234 is one number; otherwise it is a list of two.
    """
    text = _numbers(text, thousands)
    pieces = list(_split(text.removeprefix("=") if text.startswith("= ") else text, SEPARATORS))
    if not pieces:
        raise Unreadable("there is nothing to read")
    forms: list[Form] = []
    for piece, _ in pieces:
        for variant in _signs(piece):
            form = _element(variant)
            forms += form.items if isinstance(form, Group) and form.kind == "list" else [form]
    joined = {separator for _, separator in pieces[1:]}
    if len(forms) == 2 and joined <= {",", "and"} and joined and (both := _between(*forms)):
        return both
    return forms[0] if len(forms) == 1 else Group("list", tuple(forms))


def _numbers(text: str, thousands: bool) -> str:
    """Write thousands separators, repeating decimals and exponents of ten as plain LaTeX."""
    if thousands and not text.startswith(("(", "[", r"\{")):
        text = THOUSANDS.sub(lambda match: match[0].replace(",", ""), text)

    def repeating(match: re.Match[str]) -> str:
        whole, start, period = match[1] or "0", match[2], match[3] or match[4]
        scale = 10 ** len(start)
        above = int(whole + start + period) - int(whole + start)
        return rf"\frac{{{above}}}{{{scale * (10 ** len(period) - 1)}}}"

    for word, power in POWERS.items():
        text = re.sub(
            rf"(?<=[0-9])\s*(?:\\text\{{\s*{word}\s*\}}|{word}(?![A-Za-z]))", rf"\\times 10^{{{power}}}", text
        )
    text = REPEATING.sub(repeating, text)
    return SCIENTIFIC.sub(r"\1\\times 10^{\2}", text)


def _split(text: str, marks: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Split at those of `marks` that are in no brackets; yields each piece and the mark before it ("" at first)."""
    depth, start, before = 0, 0, ""
    for token in TOKEN.finditer(text):
        depth += (token[0] in OPENING) - (token[0] in CLOSING)
        if depth < 0:
            raise Unreadable(f"{token[0]!r} closes nothing")
        if depth == 0 and token[0] in marks:
            if text[start : token.start()].strip() or marks[token[0]] not in SEPARATORS.values():
                yield text[start : token.start()].strip(), before
                before = marks[token[0]]
            start = token.end()
    if depth:
        raise Unreadable("a bracket is not closed")
    if not text[start:].strip() and not before:
        raise Unreadable("there is nothing to read")
    if text[start:].strip() or before in RELATIONS.values():
        yield text[start:].strip(), before


def _signs(piece: str) -> list[str]:
    r"""The values of \pm and \mp: signs are chosen separately, or together if there is a \mp."""
    found = re.findall(r"\\[pm][pm](?![A-Za-z])", piece)
    if not found or len(found) > 4:
        return [piece]
    opposite = {"+": "-", "-": "+"}
    parts = re.split(r"\\[pm][pm](?![A-Za-z])", piece)
    together = r"\mp" in found
    choices = [(sign,) * len(found) for sign in "+-"] if together else product("+-", repeat=len(found))
    variants = []
    for choice in choices:
        signs = [sign if mark == r"\pm" else opposite[sign] for sign, mark in zip(choice, found, strict=True)]
        text = parts[0]
        for sign, part in zip(signs, parts[1:], strict=True):
            plus = sign == "+" and not re.search(r"[A-Za-z0-9)}\]]\s*$", text)
            text += ("" if plus else sign) + part.lstrip()
        variants.append(text)
    return variants


def _element(text: str) -> Form:
    """Read one value, group or relation."""
    text = text.strip()
    if based := _based(text):
        return based
    if re.fullmatch(r"\\mathbb\{R\}|(?:\\text\{)?\s*all real(?:s| numbers)\s*\}?", text):
        return Group("tuple", (Value(r"-\infty"), Value(r"\infty")), "()")
    if (ratio := RATIO.fullmatch(text)) and not TIME.fullmatch(text) and int(ratio[1]):
        first, *others = [Value(rf"\frac{{{number}}}{{{ratio[1]}}}") for number in ratio.groups() if number]
        return Group("tuple", (first, *others), ":") if ratio[3] else Value(rf"\frac{{{ratio[1]}}}{{{ratio[2]}}}")
    sides = list(_split(text, RELATIONS))
    if len(sides) > 1:
        return _chain([side for side, _ in sides], [relation for _, relation in sides[1:]])
    if (matrix := MATRIX.fullmatch(text)) and r"\begin" not in matrix[2]:
        rows = [row for row in re.split(r"\\\\", matrix[2]) if row.strip()]
        return Group("matrix", tuple(Group("row", tuple(_element(cell) for cell in row.split("&"))) for row in rows))
    group = _group(text)
    if group is not None:
        return group
    return words_of(text) or _value(text)


def _group(text: str) -> Form | None:
    """Read a set, tuple or interval, or what is in brackets around the whole text; None if there are none."""
    tokens = list(TOKEN.finditer(text))
    first, last = tokens[0][0], tokens[-1][0]
    if (
        len(tokens) < 2
        or first not in (r"\{", "(", "[", "{", r"\langle")
        or last not in (r"\}", ")", "]", "}", r"\rangle")
    ):
        return None
    depth = 0
    for token in tokens[:-1]:
        depth += (token[0] in OPENING) - (token[0] in CLOSING)
        if depth == 0:
            return None
    inner = text[len(first) : -len(last)].strip()
    if first in (r"\{", "{"):
        if builder := BUILDER.fullmatch(inner):
            return read(builder[2])
        if first == "{":
            return read(inner)
        items = [_element(piece) for piece, _ in _split(inner, SEPARATORS)] if inner else []
        return Group("set", tuple(items)) if items else Value(r"\emptyset")
    if not inner:
        return None
    items = [_element(piece) for piece, _ in _split(inner, {",": ",", ";": ","})]
    if len(items) == 1:
        return items[0] if first == "(" and last == ")" else None
    opening, closing = ("[" if first == "[" else "("), ("]" if last == "]" else ")")
    return Group("tuple", tuple(items), opening + closing)


def _chain(sides: list[str], relations: list[str]) -> Form:
    names = [_name(side) for side in sides]
    if relations == ["in"] and names[0]:
        return read(sides[1])
    if relations == ["!="] and any(names):
        excluded = read(sides[1] if names[0] else sides[0])
        below, above = (Value(r"-\infty"), excluded), (excluded, Value(r"\infty"))
        return Group("list", tuple(Group("tuple", ends, "()", names[0] or names[1]) for ends in (below, above)))
    if set(relations) == {"="}:
        named, at = (names[0], -1) if names[0] else (names[-1], 0)
        return Chain(tuple(sides), tuple(relations), named, read(sides[at]) if named else None)
    interval = _interval(sides, relations)
    return interval or Chain(tuple(sides), tuple(relations))


def _name(side: str) -> str | None:
    """The side without spaces and braces if it is a name, such as x, f(x), a_{10} or (x,y)."""
    if side.startswith("(") and side.endswith(")") and "," in side:
        parts = [part.strip() for part in side[1:-1].split(",")]
        return ",".join(parts) if all(VARIABLE.fullmatch(part) for part in parts) else None
    if not (NAME.fullmatch(side) or SUM_OF_VALUES.fullmatch(side)) or side in (r"\pi", "e", r"\emptyset", r"\infty"):
        return None
    return re.sub(r"\\text|[\s{}]", "", side)


def _interval(sides: list[str], relations: list[str]) -> Group | None:
    """Read an inequality for one variable as an interval, or two: x > 5 as (5, \\infty)."""
    if relations[0] in (">", ">="):
        sides, relations = sides[::-1], [FLIPPED.get(relation, relation) for relation in relations[::-1]]
    if not set(relations) <= {"<", "<="} or len(sides) > 3:
        return None
    if len(sides) == 2 and (inside := re.fullmatch(r"\|\s*(\\?[A-Za-z]+)\s*\|", sides[0])):
        sides, relations = [f"-({sides[1]})", inside[1], sides[1]], relations * 2
    if len(sides) == 2 and (inside := re.fullmatch(r"\|\s*(\\?[A-Za-z]+)\s*\|", sides[1])):
        below = _interval([inside[1], f"-({sides[0]})"], relations)
        above = _interval([sides[0], inside[1]], relations)
        return Group("list", (below, above)) if below and above else None
    at = [index for index, side in enumerate(sides) if VARIABLE.fullmatch(side) and side not in (r"\pi", "e")]
    if len(sides) == 3:
        at = [1] if 1 in at else []
    if len(at) != 1:
        return None
    if len(sides) == 2 and re.search(r"(?<![\\A-Za-z])[a-df-z](?![A-Za-z])", sides[1 - at[0]]):
        return None  # y < 3 - 2x is a half-plane
    low: Form = _element(sides[0]) if at[0] > 0 else Value(r"-\infty")
    high: Form = _element(sides[-1]) if at[0] < len(sides) - 1 else Value(r"\infty")
    opening = "[" if at[0] > 0 and relations[0] == "<=" else "("
    closing = "]" if at[0] < len(sides) - 1 and relations[-1] == "<=" else ")"
    return Group("tuple", (low, high), opening + closing, sides[at[0]])


def _between(one: Form, other: Form) -> Group | None:
    """Combine "x > 1 and x < 5" to the interval between; None for anything else."""
    if not isinstance(one, Group) or not isinstance(other, Group) or not one.name or one.name != other.name:
        return None
    for low, high in ((one, other), (other, one)):
        if low.items[1] == Value(r"\infty") and high.items[0] == Value(r"-\infty"):
            return Group("tuple", (low.items[0], high.items[1]), low.brackets[0] + high.brackets[1], one.name)
    return None


def _based(text: str) -> Based | None:
    r"""Read a number with its base: 101_2, 101_{\text{two}}, 101 (base 2), FF_{16}."""
    match = BASED.fullmatch(re.sub(r"\\text|[{}() ]", "", text).upper())
    if match is None or not (match[3].isdigit() or match[3] in NUMERALS):
        return None
    sign, digits, base = match[1], match[2], int(match[3]) if match[3].isdigit() else NUMERALS.index(match[3]) + 2
    if base < 2 or (base <= 10 and re.search("[A-F]", digits)):
        return None
    if digits.isalpha() and (len(digits) == 1 or base != 16):  # a_{12} is a member of a sequence
        return None
    return Based(sign + digits, base)


def words_of(text: str) -> Words | None:
    r"""Read words: letters in \text{...}, a plain word of four letters or more, a time, a ratio."""
    plain = re.sub(r"\\text\{([^{}]*)\}", r"\1", text).strip()
    choice = re.fullmatch(r"\(?([A-Z])\)?", plain)
    if r"\text" in text and choice:
        return Words(choice[1].lower())
    if not WORDS.fullmatch(plain):
        return None
    wrapped = re.fullmatch(r"(?:\s*\\text\{[^{}]*\}\s*)+", text) is not None
    first = re.match(r"[A-Za-z]+", plain)
    if (
        not wrapped
        and first
        and not (PLAIN_WORD.fullmatch(first[0]) and re.fullmatch(r"[A-Za-z ,.'-]+(?: [0-9]+.*)?", plain))
    ):
        return None
    return Words(key(plain))


def key(text: str) -> str:
    """Return `text` for a comparison of words: no case, spaces, order of a list, and punctuation other than ":"."""
    parts = re.split(r"[,;&]|\band\b", text.casefold())
    return "".join(sorted(re.sub(r"[^a-z0-9:]", "", part) for part in parts))


def _value(text: str) -> Value:
    """Read a value with its unit, percent sign or currency."""
    unit = None
    if currency := CURRENCY.fullmatch(text):
        text, unit = currency["minus"] + currency["amount"], CURRENCIES[currency["sign"]]
    if mixed := MIXED.fullmatch(text):
        text = rf"{mixed[1]}({mixed[2]}+\frac{{{mixed[3] or mixed[5]}}}{{{mixed[4] or mixed[6]}}})"
    value, found = _without_unit(text)
    return Value(value, found or unit)


def _without_unit(text: str) -> tuple[str, str | None]:
    """Return the value without the unit after it, and the unit if it is known."""
    if (degrees := DEGREES.fullmatch(text)) and not TRIGONOMETRIC.search(text):
        return degrees[1], "deg"
    for at in range(1, len(text)):
        rest = text[at:]
        if not re.match(r"[\s%A-Za-z€£\\]", rest) or not (
            rest.startswith(r"\text") or text[at - 1] in "0123456789)}! "
        ):
            continue
        if PERCENT.fullmatch(rest):
            return text[:at].strip(), "percent"
        if rest.strip() in CURRENCIES:
            return text[:at].strip(), CURRENCIES[rest.strip()]
        unit = UNIT.fullmatch(rest)
        if not unit:
            continue
        spelling = (unit["text"] if unit["text"] is not None else unit["word"]).strip().rstrip(".")
        known = _unit(spelling, unit["power"])
        written = unit["word"] is None or re.match(r"[A-Za-z]{4,}", spelling)
        if (known and (len(spelling) > 1 or unit["word"] is None)) or (written and re.search("[0-9]", text[:at])):
            return text[:at].strip(), known
    return text, None


def _unit(spelling: str, power: str | None) -> str | None:
    spelling = spelling.strip()
    exponent = re.sub(r"\D", "", power or "")
    for words, value in ((("square ", "sq ", "sq. "), "2"), (("cubic ", "cu ", "cu. "), "3")):
        for word in words:
            if spelling.startswith(word):
                spelling, exponent = spelling.removeprefix(word).strip(), value
    unit = (
        SPELLINGS.get(spelling) or SPELLINGS.get(spelling.lower()) or SPELLINGS.get(spelling.lower().removesuffix("s"))
    )
    return f"{unit}^{exponent}" if unit and exponent else unit


def readable(form: Form) -> Sequence[str]:
    """The expressions in `form` that must be mathematics."""
    match form:
        case Value(latex=latex):
            return [latex]
        case Group(items=items):
            return [latex for item in items for latex in readable(item)]
        case Chain(sides=sides, value=None):
            return list(sides)
        case Chain(value=value) if value is not None:
            return readable(value)
    return []
