r"""Normalises the text of a mathematical answer to one LaTeX spelling: unicode, Markdown, decorations, plain-text math.

It loads no other library, so that every process can use it.
"""

from __future__ import annotations

import itertools
import re
import unicodedata

GREEK = [
    "alpha",
    "beta",
    "gamma",
    "delta",
    "epsilon",
    "zeta",
    "eta",
    "theta",
    "iota",
    "kappa",
    "lambda",
    "mu",
    "nu",
    "xi",
    "omicron",
    "pi",
    "rho",
    "varsigma",
    "sigma",
    "tau",
    "upsilon",
    "phi",
    "chi",
    "psi",
    "omega",
]
SIGNS = {
    **{chr(0x3B1 + index): rf"\{name} " for index, name in enumerate(GREEK)},
    **dict.fromkeys("−–—‐‑", "-"),
    **dict.fromkeys("⋅·∙•", r"\cdot "),
    **dict.fromkeys("×✕", r"\times "),
    "√": r"\sqrt ",
    **dict.fromkeys("′’", "'"),
    "ϕ": r"\phi ",
    "Γ": r"\Gamma ",
    "Δ": r"\Delta ",
    "Θ": r"\Theta ",
    "Π": r"\Pi ",
    "Σ": r"\Sigma ",
    "Φ": r"\Phi ",
    "Ω": r"\Omega ",
    "÷": r"\div ",
    "∛": r"\sqrt[3] ",
    "∞": r"\infty ",
    "≤": r"\le ",
    "⩽": r"\le ",
    "≥": r"\ge ",
    "⩾": r"\ge ",
    "≠": r"\ne ",
    "≈": r"\approx ",
    "≡": r"\equiv ",
    "±": r"\pm ",
    "∓": r"\mp ",
    **dict.fromkeys("°º˚", r"^{\circ}"),
    "∪": r"\cup ",
    "∩": r"\cap ",
    "∈": r"\in ",
    "∨": r"\lor ",
    "∅": r"\emptyset ",
    "ℝ": r"\mathbb{R}",
    "∠": r"\angle ",
    "→": r"\to ",
    "⇒": r"\Rightarrow ",
    "∖": r"\setminus ",
    "⁄": "/",
    "…": r"\ldots ",
    "⟨": r"\langle ",
    "⟩": r"\rangle ",
    "⌊": r"\lfloor ",
    "⌋": r"\rfloor ",
    "⌈": r"\lceil ",
    "⌉": r"\rceil ",
}
"""Characters and the LaTeX for them."""
VULGAR = re.compile(r"[¼-¾⅐-⅞]")

EMPHASIS = re.compile(r"(?<![\w)}\]*])(\*{1,3}|__?)(?=\S)([^*_]+|[^*]+?)(?<=\S)\1(?![\w({\[*])")
SPACED = re.compile(r"(?<=[0-9])(?:\\[,;:! ]|~|\{,\}|\{,\\!\}|,\\!)(?=[0-9]{3}(?![0-9]))")
QUANTITY = re.compile(r"\s*-?[0-9][0-9.,]*\s*[A-Za-z ./]*")
CHOICES = re.compile(r"\s*(?:\(?[A-Z]\)?\s*(?:,|and|, and)\s*)+\(?[A-Z]\)?\s*")
PREFIX = re.compile(r"^(?:the\s+)?(?:final\s+)?answer(?:\s+is|\s*:)\s*:?\s*(?=\S)", re.IGNORECASE)
RECURRING = re.compile(r"(?<![0-9])([0-9]*\.[0-9]*?)([0-9]{1,6}?)\2{2,}(?:\.\.\.|\\[lc]?dots)(?![0-9A-Za-z.])")
DOTTED = re.compile(r"\\dot\{?([0-9])\}?(?:([0-9]*)\\dot\{?([0-9])\}?)?")
"""The periods of repeating decimals: 0.333..., and 0.1\\dot{6} or 0.\\dot{1}4285\\dot{7}."""
SPACES = re.compile(r"(?<!\\)\\[,;:!> ]|~|\s")
SIZES = re.compile(r"\\(?:left|right|[bB]igg?[lrm]?|limits|nolimits|displaystyle|textstyle|qquad|quad)(?![A-Za-z])\.?")
COLOR = re.compile(r"\\(?:text)?color\{\w+\}")
TEXT = re.compile(
    r"\\(?:text(?:rm|bf|it|normal|sf|tt)?|mathrm|mathbf|mathit|mathsf|mbox|hbox|operatorname\*?|boldsymbol|bm)\s*\{((?:[^{}]|\{[^{}]*\})*)\}"
)
OLD_TEXT = re.compile(r"\{\s*\\(?:rm|bf|it)\s+([^{}]*)\}")
SYNONYMS = {
    r"\\[dtc]frac": r"\\frac",
    r"\\(?:varnothing|O)": r"\\emptyset",
    r"\\(?:leq|leqslant|leqq)": r"\\le",
    r"\\(?:geq|geqslant|geqq)": r"\\ge",
    r"\\lt": "<",
    r"\\gt": ">",
    r"\\neq": r"\\ne",
    r"\\(?:lvert|rvert|vert)": "|",
    r"\\(?:lbrace)": r"\\{",
    r"\\(?:rbrace)": r"\\}",
    r"\\(?:lbrack)": "[",
    r"\\(?:rbrack)": "]",
    r"\\(?:lparen)": "(",
    r"\\(?:rparen)": ")",
    r"\\(?:vee|lor|or)": r"\\lor",
    r"\\ast": "*",
    r"\\(?:colon)": ":",
    r"\\(?:R|Reals|reals)": r"\\mathbb{R}",
    r"\\degree": r"^{\\circ}",
    r"\\(?:bar)": r"\\overline",
    r"\\(?:infin)": r"\\infty",
    r"\\varphi": r"\\phi",
    r"\\underline": "",
    r"\\lg": r"\\log",
}
WORDS = re.compile("|".join(f"(?P<s{index}>{name})(?![A-Za-z])" for index, name in enumerate(SYNONYMS)))
REPLACEMENTS = [value.replace("\\\\", "\\") for value in SYNONYMS.values()]
FUNCTIONS = r"arcsin|arccos|arctan|sinh|cosh|tanh|sin|cos|tan|cot|sec|csc|log|ln|exp|gcd|lcm|(?:max|min)(?=\s*[({\\])"
PLAIN = [
    (re.compile(rf"(?<![\\A-Za-z])({FUNCTIONS})(?![A-Za-z])"), r"\\\1 "),
    (re.compile(r"(?<![\\A-Za-z])(?:pi)(?![A-Za-z])"), r"\\pi "),
    (re.compile(r"(?<![\\A-Za-z])(theta|alpha|beta|gamma|lambda|omega|phi)(?![A-Za-z])"), r"\\\1 "),
    (re.compile(r"(?<![\\A-Za-z])(?:infinity|infty|inf|oo)(?![A-Za-z])", re.IGNORECASE), r"\\infty "),
    (re.compile(r"<=|=<"), r"\\le "),
    (re.compile(r">=|=>"), r"\\ge "),
    (re.compile(r"!="), r"\\ne "),
    (re.compile(r"\+/-|\+-"), r"\\pm "),
    (re.compile(r"(?<=[0-9A-Za-z)}])\*\*(?=[0-9A-Za-z({-])"), "^"),
    (re.compile(r"\^\s*(-?[0-9]+|-[A-Za-z])"), r"^{\1}"),
    (re.compile(r"\\log\s*_\s*([0-9A-Za-z])"), r"\\log_{\1}"),
    (re.compile(r"\^\s*\{?\s*\\circ\s*\}?"), r"^{\\circ}"),
]
ROOT = re.compile(r"(?<![\\A-Za-z])sqrt(?=\s*[({])|\\sqrt")
ENCLOSURES = ((r"\(", r"\)"), (r"\[", r"\]"), ("$$", "$$"))
BOX = re.compile(r"\\{1,2}(?:boxed|fbox)\s*\{")


def normalise(text: str) -> str:
    r"""Return `text` in one spelling of LaTeX, without Markdown, delimiters of mathematics, sizes and layout.

    Letters of \text{...} keep their wrapper, as \text{...}; a single letter in \mathrm or \mathbf loses it.
    """
    text = text.replace("`", "").strip()
    for _ in range(2):
        text = EMPHASIS.sub(r"\2", text)
    text = _outside(text)
    text = _characters(text)
    if r"\begin" not in text:
        text = re.sub(r"\\\\(?=[A-Za-z]{2})", r"\\", text)  # \\frac, from models trained on JSON
    text = re.sub(r"^~\s*(?=[0-9])", r"\\approx ", text)
    text = PREFIX.sub("", RECURRING.sub(r"\1\\overline{\2}", text), count=1)
    text = DOTTED.sub(r"\\overline{\1\2\3}", text)
    text = SPACED.sub("", text)
    text = SPACES.sub(" ", SIZES.sub(" ", COLOR.sub("", text)))
    text = WORDS.sub(lambda match: REPLACEMENTS[int((match.lastgroup or "s0")[1:])], text)
    text = OLD_TEXT.sub(r"\\text{\1}", text)
    text = TEXT.sub(_text, text)
    for pattern, replacement in PLAIN:
        text = pattern.sub(replacement, text)
    text = _arguments(text)
    return re.sub(r"\s+", " ", text).strip()


def _outside(text: str) -> str:
    """Remove the delimiters and the box around the whole text, and one full stop after it."""
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


def _raised(character: str) -> str:
    """Return ^ for a superscript such as ², _ for a subscript, and nothing for other characters."""
    decomposed = "" if character in SIGNS else unicodedata.decomposition(character)
    return "^" if decomposed.startswith("<super>") else "_" if decomposed.startswith("<sub>") else ""


def _characters(text: str) -> str:
    """Replace characters beyond ASCII by LaTeX, where there is one."""
    if text.isascii():
        return text

    def vulgar(match: re.Match[str]) -> str:
        above, _, below = unicodedata.normalize("NFKC", match[0]).partition("\u2044")
        return rf"\frac{{{above}}}{{{below}}}"

    pieces = []
    for kind, characters in itertools.groupby(VULGAR.sub(vulgar, text), _raised):
        piece = "".join(characters)
        pieces.append(f"{kind}{{{unicodedata.normalize('NFKC', piece)}}}" if kind else piece)
    text = re.sub(r"√\s*(\d+|[A-Za-z])", r"\\sqrt{\1}", "".join(pieces))
    return unicodedata.normalize("NFKC", "".join(SIGNS.get(character, character) for character in text))


def _text(match: re.Match[str]) -> str:
    inner = match[1]
    if len(inner.strip()) == 1 and inner.strip().isalpha():
        return inner.strip()
    if inner.strip() in ("or", "and"):
        return f" {inner.strip()} "
    if power := re.fullmatch(r"(.*[A-Za-z])\s*\^\s*\{?(-?[0-9])\}?", inner):
        return rf"\text{{{power[1]}}}^{{{power[2]}}}"
    if CHOICES.fullmatch(inner) or QUANTITY.fullmatch(inner) or not re.search("[A-Za-z]", inner):
        return f" {inner} "
    return rf"\text{{{inner}}}"


def _arguments(text: str) -> str:
    r"""Write the arguments of \frac, \binom and \sqrt in braces: \frac12, \sqrt2, sqrt(2), √(2)."""
    text = re.sub(r"\\(frac|binom)\s*([0-9]|(?<=\s)[A-Za-z]|\\pi(?![A-Za-z]))\s*(?=[0-9A-Za-z{\\])", r"\\\1{\2}", text)
    text = re.sub(r"\\(frac|binom)\s*(\{[^{}]*\})\s*([0-9A-Za-z]|\\pi(?![A-Za-z]))", r"\\\1\2{\3}", text)
    at = 0
    while match := ROOT.search(text, at):
        rest = text[match.end() :].lstrip()
        at = match.start() + len("\\sqrt")
        index = ""
        if rest.startswith("[") and "]" in rest:
            index, rest = rest[: rest.index("]") + 1], rest[rest.index("]") + 1 :].lstrip()
        end = closing_at(rest, 0) if rest.startswith(("(", "{")) else -1
        if end > 0:
            rest = f"{{{rest[1:end]}}}{rest[end + 1 :]}"
        elif argument := re.match(r"\d|[A-Za-z]|\\[A-Za-z]+", rest):
            rest = f"{{{argument[0]}}}{rest[argument.end() :]}"
        text = f"{text[: match.start()]}\\sqrt{index}{rest}"
    return text


def closing_at(text: str, start: int) -> int:
    """The position of the bracket that closes the one at `start`, or -1. Any bracket closes any other."""
    depth = 0
    for at in range(start, len(text)):
        depth += (text[at] in "([{") - (text[at] in ")]}")
        if depth == 0:
            return at
    return -1
