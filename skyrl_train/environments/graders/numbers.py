"""The number that a field gives as its answer, by one rule for every environment whose answers are numbers.

The rule: the answer is the whole field. A number may have a sign, a currency and thousands separators, may stand in
parentheses, in a box or in the delimiters of mathematics or emphasis, and may end with a full stop. Beside anything
else ("42 or 41", "not 42", "42k", "42 million", "42²") it is no answer.
"""

from __future__ import annotations

import re
from fractions import Fraction

# ASCII digits only: \d also matches those of other scripts. No repeat can start inside another: searching is linear.
INTEGER = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)"
NUMBER = re.compile(rf"(?P<sign>[-\u2212]?)\\?[$€£]?(?P<minus>[-\u2212]?)(?P<digits>{INTEGER}(?:\.[0-9]*)?|\.[0-9]+)")
"""A number in running text."""
FULL_NUMBER = re.compile(
    rf"(?:(?P<sign>[-+\u2212]?)(?:\\?[$€£] ?)?|\\?[$€£] ?(?P<minus>[-+\u2212]))"
    rf"(?P<digits>{INTEGER}(?:\.[0-9]+)?|\.[0-9]+)(?: ?[€£])?"
)
"""A field that is a number."""
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
    """A match of NUMBER or WHOLE in canonical form: "$1,234.50" -> "1234.5", "-0.0" -> "0".

    It is a string, because a million digits compare in linear time but convert to int in quadratic time.
    """
    whole, _, fraction = match["digits"].replace(",", "").partition(".")
    value = (whole.lstrip("0") or "0") + (f".{fraction}" if (fraction := fraction.rstrip("0")) else "")
    negative = (match["sign"] in MINUS) != (match["minus"] in MINUS)
    return f"-{value}" if negative and value != "0" else value


def strip_enclosures(field: str) -> str:
    """A field without emphasis, one closing full stop, and the ENCLOSURES that hold all of it."""
    field = field.strip().strip(EMPHASIS).strip()
    if field.endswith(".") and not field.endswith(".."):
        field = field[:-1]
    for _ in range(MAX_NESTED_ENCLOSURES):
        field = field.strip().strip(EMPHASIS).strip()
        enclosure = next((one for one in ENCLOSURES if field.startswith(one[0]) and field.endswith(one[1])), None)
        if enclosure is None or len(field) < len(enclosure[0]) + len(enclosure[1]):
            break
        field = field[len(enclosure[0]) : -len(enclosure[1])]
    return field


def parse_number(field: str) -> str | None:
    """The number that a field is, in canonical form, or None if it is anything else or more than that."""
    match = FULL_NUMBER.fullmatch(strip_enclosures(field))
    return canonicalize(match) if match else None


def parse_fraction(field: str) -> Fraction | None:
    r"""The fraction that a field is ("1/2", "\frac{1}{2}"), or None if it is anything else or more than that."""
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
