"""Parsing of numeric answers. Every environment whose answers are numbers uses these rules.

The answer is the entire field. A number may have a sign, a currency and thousands separators. It may be in parentheses,
in a box, or between math or emphasis delimiters, and it may end with a full stop. A field with anything else ("42 or
41", "not 42", "42k", "42 million", "42²") is not an answer.
"""

from __future__ import annotations

import re
from fractions import Fraction

# [0-9] because \d also matches digits of other scripts. No repeat can start inside another, so searching is linear.
INTEGER = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)"
NUMBER = re.compile(rf"(?P<sign>[-\u2212]?)\\?[$€£]?(?P<minus>[-\u2212]?)(?P<digits>{INTEGER}(?:\.[0-9]*)?|\.[0-9]+)")
"""Matches a number in running text."""
FULL_NUMBER = re.compile(
    rf"(?:(?P<sign>[-+\u2212]?)(?:\\?[$€£] ?)?|\\?[$€£] ?(?P<minus>[-+\u2212]))"
    rf"(?P<digits>{INTEGER}(?:\.[0-9]+)?|\.[0-9]+)(?: ?[€£])?"
)
"""Matches a field that is a number."""
FRACTION = re.compile(
    r"(?P<sign>[-+\u2212]?)(?:\\[dt]?frac\s*(?:\{\s*(?P<minus>[-\u2212]?)(?P<above>[0-9]{1,40})\s*\}\s*"
    r"\{\s*(?P<below>[0-9]{1,40})\s*\}|(?P<one>[0-9])(?P<other>[0-9]))"
    r"|(?P<over>[0-9]{1,40})\s*/\s*(?P<under>[0-9]{1,40}))"
)
COMMANDS = ("boxed", "fbox", "text", "mathbf", "textbf")
ENCLOSURES = (
    ("(", ")"),
    ("$$", "$$"),
    ("$", "$"),
    (r"\(", r"\)"),
    (r"\[", r"\]"),
    *((f"{slashes}{command}{{", "}") for command in COMMANDS for slashes in ("\\", "\\\\")),
)
EMPHASIS = "*_`"
MAX_NESTED_ENCLOSURES = 8
MINUS = ("-", "\u2212")


def canonicalize(match: re.Match[str]) -> str:
    """Return a match of NUMBER or FULL_NUMBER in canonical form: "1234.5" for "$1,234.50", and "0" for "-0.0".

    The result is a string, because a million digits take quadratic time to convert to int and linear time to compare.
    """
    integer, _, fraction = match["digits"].replace(",", "").partition(".")
    value = (integer.lstrip("0") or "0") + (f".{fraction}" if (fraction := fraction.rstrip("0")) else "")
    negative = (match["sign"] in MINUS) != (match["minus"] in MINUS)
    return f"-{value}" if negative and value != "0" else value


def strip_enclosures(field: str) -> str:
    """Return a field without emphasis marks, one final full stop, and up to MAX_NESTED_ENCLOSURES around all of it."""
    field = field.strip().strip(EMPHASIS).strip()
    if field.endswith(".") and not field.endswith(".."):
        field = field[:-1]
    for _ in range(MAX_NESTED_ENCLOSURES):
        field = field.strip().strip(EMPHASIS).strip()
        enclosure = next((pair for pair in ENCLOSURES if field.startswith(pair[0]) and field.endswith(pair[1])), None)
        if enclosure is None or len(field) < len(enclosure[0]) + len(enclosure[1]):
            break
        field = field[len(enclosure[0]) : -len(enclosure[1])]
    return field


def parse_number(field: str) -> str | None:
    """Return the number that a field consists of, in canonical form, or None if the field is not just a number."""
    match = FULL_NUMBER.fullmatch(strip_enclosures(field))
    return canonicalize(match) if match else None


def parse_fraction(field: str) -> Fraction | None:
    r"""Return the fraction that a text consists of, such as "1/2", "-3/4" or "\frac{1}{2}".

    The fraction may be enclosed, as numbers may be; see `strip_enclosures`. The result is None if the text has anything
    besides the fraction, if it is a number without a denominator, or if the denominator is 0.
    """
    match = FRACTION.fullmatch(strip_enclosures(field))
    if match is None:
        return None
    above, below = (
        int(match["above"] or match["one"] or match["over"]),
        int(match["below"] or match["other"] or match["under"]),
    )
    if below == 0:
        return None
    negative = (match["sign"] in MINUS) != (match["minus"] in MINUS)
    return Fraction(-above if negative else above, below)
