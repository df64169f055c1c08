r"""Normalizes the text of a mathematical answer to one LaTeX spelling.

It converts Unicode characters, Markdown, decorations and plain-text mathematics. It loads no other library, so every
process can use it.
"""

from __future__ import annotations

import re
import unicodedata

COMMANDS = (
    "sqrt sqrt[3] infty le le ge ge ne approx equiv pm mp times times div cdot cdot cdot cdot cup cap in "
    "lor emptyset mathbb{R} angle to Rightarrow setminus langle rangle lfloor rfloor lceil rceil"
)
SIGNS: dict[str, str | int | None] = {
    sign: f"\\{command} " for sign, command in zip("√∛∞≤⩽≥⩾≠≈≡±∓×✕÷⋅·∙•∪∩∈∨∅ℝ∠→⇒∖⟨⟩⌊⌋⌈⌉", COMMANDS.split(), strict=True)
}
"""LaTeX of each character. Greek letters are converted by their names in unicodedata."""
SIGNS |= dict.fromkeys("−–—‐‑", "-") | dict.fromkeys("′’", "'") | dict.fromkeys("°º˚", r"^{\circ}")
SPELLINGS = {
    spelling: replacement
    for replacement, spellings in {
        r"\frac": "dfrac tfrac cfrac",
        r"\emptyset": "varnothing O",
        r"\le": "leq leqslant leqq",
        r"\ge": "geq geqslant geqq",
        r"\ne": "neq",
        r"\lor": "vee or",
        r"\log": "lg",
        r"\phi": "varphi",
        r"\infty": "infin",
        r"\overline": "bar",
        r"\mathbb{R}": "R Reals reals",
        r"^{\circ}": "degree",
        r"\{": "lbrace",
        r"\}": "rbrace",
        "<": "lt",
        ">": "gt",
        "|": "lvert rvert vert",
        "": "underline",
        " ": "left right big bigl bigr Big Bigl Bigr bigg biggl biggr limits nolimits displaystyle textstyle quad "
        "qquad",
    }.items()
    for spelling in spellings.split()
}
"""Replacement of each command, whose name is written without its backslash."""
EMPHASIS = re.compile(r"(?<![\w)}\]*])(\*{1,3}|__?)(?=\S)([^*_]+|[^*]+?)(?<=\S)\1(?![\w({\[*])")
ENCLOSURES = ((r"\(", r"\)"), (r"\[", r"\]"), ("$$", "$$"))
BOX = re.compile(r"\\{1,2}(?:boxed|fbox)\s*\{")
TEXT = re.compile(
    r"\\(?:text(?:rm|bf|it|normal|sf|tt)?|math(?:rm|bf|it|sf)|[mh]box|operatorname\*?|boldsymbol|bm)\s*"
    r"\{((?:[^{}]|\{[^{}]*\})*)\}"
)
QUANTITY = re.compile(r"\s*(?:-?[0-9][0-9.,]*\s*[A-Za-z ./]*|or|and|[^A-Za-z]*)\s*")
"""Words with the same meaning in \\text{...} and outside."""
FUNCTIONS = "arcsin|arccos|arctan|sinh|cosh|tanh|sin|cos|tan|cot|sec|csc|log|ln|exp|gcd|lcm|pi|theta|alpha|beta|lambda"
PLAIN = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"(?<=[0-9])(?:\\[,;:! ]|~|\{,\}|\{,\\!\}|,\\!)(?=[0-9]{3}(?![0-9]))", ""),  # 10\,000
        (r"(?<!\\)\\[,;:!> ]|~|\s", " "),
        (r"\\(?:left|right)\s*\.", " "),
        (r"\{\s*\\(?:rm|bf|it)\s+([^{}]*)\}", r"\\text{\1}"),
        (r"(?<![0-9])([0-9]*\.[0-9]*?)([0-9]{1,6}?)\2{2,}(?:\.\.\.|\\[lc]?dots)(?![0-9A-Za-z.])", r"\1\\overline{\2}"),
        (r"\\dot\{?([0-9])\}?(?:([0-9]*)\\dot\{?([0-9])\}?)?", r"\\overline{\1\2\3}"),
        (rf"(?<![\\A-Za-z])({FUNCTIONS})(?![A-Za-z])", r"\\\1 "),
        (r"(?<![\\A-Za-z])(?:[Ii]nfinity|infty|inf|oo)(?![A-Za-z])", r"\\infty "),
        (r"<=|=<", r"\\le "),
        (r">=|=>", r"\\ge "),
        (r"!=", r"\\ne "),
        (r"\+/?-", r"\\pm "),
        (r"(?<=[0-9A-Za-z)}])\*\*(?=[0-9A-Za-z({-])", "^"),
        (r"\^\s*(-?[0-9]+|-[A-Za-z])", r"^{\1}"),
        (r"\\log\s*_\s*([0-9A-Za-z])", r"\\log_{\1}"),
        (r"\^\s*\{?\s*\\circ\s*\}?", r"^{\\circ}"),
        (r"\\(frac|binom)\s*([0-9]|(?<=\s)[A-Za-z]|\\pi(?![A-Za-z]))\s*(?=[0-9A-Za-z{\\])", r"\\\1{\2}"),
        (r"\\(frac|binom)\s*(\{[^{}]*\})\s*([0-9A-Za-z]|\\pi(?![A-Za-z]))", r"\\\1\2{\3}"),
        (r"(?<![\\A-Za-z])sqrt(?=\s*[({])", r"\\sqrt"),
        (r"\\sqrt\s*(\[[^][]*\])?\s*(\d|[A-Za-z]|\\[A-Za-z]+)", r"\\sqrt\1{\2}"),
    )
]
ROOT = re.compile(r"\\sqrt(?:\[[^][]*\])?\s*(?=\()")


def normalize_latex(text: str) -> str:
    r"""Return a mathematical text in one spelling of LaTeX, without Markdown, math delimiters, sizes and layout.

    Words in \text{...}, \mathrm{...} and similar commands become \text{...}. Single letters and quantities such as
    \text{5 cm} lose the command.
    """
    text = text.replace("`", "").strip()
    for _ in range(2):
        text = EMPHASIS.sub(r"\2", text)
    text = _outside(text)
    if not text.isascii():
        text = _characters(text)
    if r"\begin" not in text:
        text = re.sub(r"\\\\(?=[A-Za-z]{2})", r"\\", text)  # \\frac, from models trained on JSON
    text = re.sub(r"^~\s*(?=[0-9])", r"\\approx ", text)
    text = re.sub(r"^(?:the\s+)?(?:final\s+)?answer(?:\s+is|\s*:)\s*:?\s*(?=\S)", "", text, flags=re.IGNORECASE)
    for pattern, replacement in PLAIN[:3]:
        text = pattern.sub(replacement, text)
    text = re.sub(r"\\([A-Za-z]+)", lambda match: SPELLINGS.get(match[1], match[0]), text)
    text = TEXT.sub(_text, text)
    for pattern, replacement in PLAIN[3:]:
        text = pattern.sub(replacement, text)
    at = 0
    while match := ROOT.search(text, at):  # sqrt(2)
        at, end = match.end(), closing_at(text, match.end())
        if end > 0:
            text = f"{text[:at]}{{{text[at + 1 : end]}}}{text[end + 1 :]}"
    return re.sub(r"\s+", " ", text).strip()


def _outside(text: str) -> str:
    """Remove the math delimiters and the box around the entire text, and one full stop after it."""
    for _ in range(4):
        before = text
        text = text.strip()
        if text.endswith(".") and not text.endswith("..") and not text.endswith(r"\right."):
            text = text[:-1].rstrip()
        for opening, closing in ENCLOSURES:
            if text.startswith(opening) and text.endswith(closing) and len(text) >= len(opening) + len(closing):
                inner = text[len(opening) : -len(closing)]
                text = text if opening in inner else inner
        box = BOX.match(text)
        if box and closing_at(text, box.end() - 1) == len(text) - 1:
            text = text[box.end() : -1]
        if len(re.findall(r"(?<!\\)\$", text)) % 2 == 0:
            text = re.sub(r"(?<!\\)\$", " ", text)
        if text == before:
            break
    return text.strip()


def _characters(text: str) -> str:
    """Replace non-ASCII characters that have a LaTeX equivalent."""
    text = re.sub(r"√\s*(\d+|[A-Za-z])", r"\\sqrt{\1}", text)
    text = re.sub(r"[¼-¾⅐-⅞]", r" \g<0>", text)  # 3½ is 3 1/2
    text = re.sub(r"[⁰¹²³⁴-⁾ⁿⁱ]+", lambda match: f"^{{{unicodedata.normalize('NFKC', match[0])}}}", text)
    text = re.sub(r"[₀-₎ₐ-ₜ]+", lambda match: f"_{{{unicodedata.normalize('NFKC', match[0])}}}", text)
    text = unicodedata.normalize("NFKC", text.translate(str.maketrans(SIGNS)))
    text = text.replace("\u2212", "-").replace("\u2044", "/")
    return re.sub("[Α-Ωα-ω]", _greek, text)


def _greek(match: re.Match[str]) -> str:
    *_, size, _, name = unicodedata.name(match[0]).replace("LAMDA", "LAMBDA").replace("FINAL ", "VAR").split()
    return f"\\{name.lower() if size == 'SMALL' else name.capitalize()} "


def _text(match: re.Match[str]) -> str:
    inner = match[1]
    if len(inner.strip()) == 1 and inner.strip().isalpha():
        return inner.strip()
    return f" {inner} " if QUANTITY.fullmatch(inner) else rf"\text{{{inner}}}"


def closing_at(text: str, start: int) -> int:
    """Return the index of the bracket that closes the one at index `start`, or -1 if none does.

    The kinds of brackets are not distinguished: any closing bracket closes any opening bracket.
    """
    depth = 0
    for at in range(start, len(text)):
        depth += (text[at] in "([{") - (text[at] in ")]}")
        if depth == 0:
            return at
    return -1
