"""The 25 verifiable instructions of IFEval (arXiv:2311.07911, table 3), with a check for each published id.

A check takes the response and the instruction's arguments, which have the names in the dataset google/IFEval. It
returns True if the response follows the instruction. Every check takes time linear in the length of the response: it
uses `str` methods, and patterns in which no repeat can start inside another. Words of a row are compared as text and
never used as patterns.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from skyrl_train.environments.fenced_blocks import find_fenced_blocks
from skyrl_train.environments.graders.language_detection import LANGUAGES, detect_language

ANSWERS = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
RELATIONS = ("less than", "at least")
WORD = re.compile(r"\w+")
COMPOUND_WORD = re.compile(r"\w+(?:[-'’.]\w+)*")
"""Matches a word. Hyphenated and contracted words are single words."""
SECTION_NUMBER = re.compile(r"\s?\d")
HIGHLIGHT = re.compile(r"\*[^\n*]*\*")
DOUBLE_HIGHLIGHT = re.compile(r"\*\*[^\n*]*\*\*")
SENTENCE_END = re.compile(r"(?<![.!?…])[.!?…]++[\"'”’»)\]*_]*+(?=\s|$)|[。！？।॥۔؟]+")
TITLES = frozenset({"mr", "mrs", "ms", "dr", "prof", "rev", "gen", "hon", "sr", "jr", "st", "vs", "e.g", "i.e", "cf"})
LIST_NUMBER = re.compile(r"(?:\A|\n)[ \t]*[(#*_]*\d{1,3}\Z")
PUNCTUATION = re.compile(r"[.,?!'\"]")


def compare_count(number: int, relation: str, threshold: int) -> bool:
    """True if a count satisfies a relation.

    Args:
        number: The count.
        relation: "less than" or "at least".
        threshold: Number with which the count is compared.
    """
    return number < threshold if relation == "less than" else number >= threshold


def count_sentences(text: str) -> int:
    """Return the number of sentences in a text.

    A sentence ends at . ! ? or … before white space, or at a full stop of another script. A full stop after a title, an
    initial or the number of a list item does not end a sentence. Sentences without words do not count.
    """
    count, start = 0, 0
    for end in SENTENCE_END.finditer(text):
        before = text[max(start, end.start() - 20) : end.start()]
        if end[0][0] == "." and end[0][1:2] != "." and _is_abbreviated(before):
            continue
        count += WORD.search(text, start, end.start()) is not None
        start = end.end()
    return count + (WORD.search(text, start) is not None)


def _is_abbreviated(before: str) -> bool:
    words = before.split()
    word = words[-1].lstrip("\"'“‘([*_") if words else ""
    is_initial = len(word) == 1 and word.isupper() and word != "I"
    return word.lower() in TITLES or is_initial or LIST_NUMBER.search(before) is not None


def existence(text: str, *, keywords: list[str]) -> bool:
    """True if every keyword occurs, ignoring case and even within a word."""
    lower = text.lower()
    return all(keyword.lower() in lower for keyword in keywords)


def frequency(text: str, *, keyword: str, frequency: int, relation: str) -> bool:
    """True if the number of occurrences of a keyword, ignoring case and even within words, satisfies a relation.

    Args:
        text: The response.
        keyword: The keyword.
        frequency: Number with which the count is compared.
        relation: "less than" or "at least".
    """
    return compare_count(text.lower().count(keyword.strip().lower()), relation, frequency)


def forbidden(text: str, *, forbidden_words: list[str]) -> bool:
    """True if none of the words occurs as an entire word, ignoring case."""
    lower = text.lower()
    return not any(_has_word(lower, word.lower()) for word in forbidden_words)


def _has_word(text: str, word: str) -> bool:
    r"""True if the pattern r"\bword\b" would match."""
    at = text.find(word)
    while at >= 0:
        end = at + len(word)
        if _is_boundary(text, at) and _is_boundary(text, end):
            return True
        at = text.find(word, at + 1)
    return False


def _is_boundary(text: str, at: int) -> bool:
    before, after = text[at - 1 : at] if at else "", text[at : at + 1]
    return bool(WORD.match(before)) != bool(WORD.match(after))


def letter_frequency(text: str, *, letter: str, let_frequency: int, let_relation: str) -> bool:
    """True if the number of occurrences of a character, in either case, satisfies a relation.

    Args:
        text: The response.
        letter: The character.
        let_frequency: Number with which the count is compared.
        let_relation: "less than" or "at least".
    """
    return compare_count(text.lower().count(letter.lower()), let_relation, let_frequency)


def response_language(text: str, *, language: str) -> bool:
    """True if `language`, an ISO 639-1 code, is the most likely language of the response as a whole.

    False for a text without letters. Raises ConfigError if py3langid is not installed.
    """
    return detect_language(text) == language


def number_sentences(text: str, *, num_sentences: int, relation: str) -> bool:
    """True if the number of sentences satisfies a relation; see `count_sentences`.

    Args:
        text: The response.
        num_sentences: Number with which the count is compared.
        relation: "less than" or "at least".
    """
    return compare_count(count_sentences(text), relation, num_sentences)


def number_paragraphs(text: str, *, num_paragraphs: int) -> bool:
    """True if *** divides the response into exactly `num_paragraphs` paragraphs.

    A divider may begin or end the response, but it may not follow another divider directly.
    """
    paragraphs = text.split("***")
    blank = [not paragraph.strip() for paragraph in paragraphs]
    if any(blank[1:-1]):
        return False
    return len(paragraphs) - sum(blank) == num_paragraphs


def number_words(text: str, *, num_words: int, relation: str) -> bool:
    """True if the number of words satisfies a relation. Words are runs of letters, digits and underscores.

    Args:
        text: The response.
        num_words: Number with which the count is compared.
        relation: "less than" or "at least".
    """
    return compare_count(sum(1 for _ in WORD.finditer(text)), relation, num_words)


def nth_paragraph_first_word(text: str, *, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    """True if the response has exactly `num_paragraphs` paragraphs, and one of them begins with a word.

    Args:
        text: The response. Blank lines divide it into paragraphs.
        num_paragraphs: Required number of paragraphs.
        nth_paragraph: Number of the paragraph, from 1.
        first_word: The word. Its case is ignored.
    """
    paragraphs = [paragraph for paragraph in text.split("\n\n") if paragraph.strip()]
    if len(paragraphs) != num_paragraphs or not 1 <= nth_paragraph <= len(paragraphs):
        return False
    word = paragraphs[nth_paragraph - 1].split(maxsplit=1)[0].lstrip("'\"")
    return PUNCTUATION.split(word, maxsplit=1)[0].lower() == first_word.lower()


def number_placeholders(text: str, *, num_placeholders: int) -> bool:
    """True if there are at least `num_placeholders` [placeholders], each within a line."""
    count = 0
    for line in text.split("\n"):
        at = line.find("[")
        while at >= 0 and (end := line.find("]", at)) >= 0:
            count += 1
            at = line.find("[", end)
    return count >= num_placeholders


def postscript(text: str, *, postscript_marker: str) -> bool:
    """True if the marker occurs, ignoring case. P.S. and P.P.S may have spaces between their letters."""
    spaced = {"P.S.": r"p\.\s?s\.", "P.P.S": r"p\.\s?p\.\s?s"}.get(postscript_marker.strip())
    return bool(re.search(spaced or re.escape(postscript_marker.strip().lower()), text.lower()))


def number_bullet_lists(text: str, *, num_bullets: int) -> bool:
    """True if exactly `num_bullets` lines begin with * (not **) or -."""
    lines = (line.lstrip() for line in text.split("\n"))
    return (
        sum(line.startswith("-") or (line[:1] == "*" and line[1:2] not in ("", "*")) for line in lines) == num_bullets
    )


def constrained_response(text: str) -> bool:
    """True if one of the three answers of the benchmark occurs."""
    return any(answer in text for answer in ANSWERS)


def number_highlighted_sections(text: str, *, num_highlights: int) -> bool:
    """True if there are at least `num_highlights` *highlights* or **highlights**, each within a line and not blank."""
    matches = [*HIGHLIGHT.finditer(text), *DOUBLE_HIGHLIGHT.finditer(text)]
    return sum(bool(match[0].strip("*").strip()) for match in matches) >= num_highlights


def multiple_sections(text: str, *, section_spliter: str, num_sections: int) -> bool:
    """True if the response has enough sections.

    Args:
        text: The response.
        section_spliter: Word that begins a section, in its exact case and followed by a number.
        num_sections: Minimum number of sections.
    """
    count, at, word = 0, 0, section_spliter.strip()
    while (at := text.find(word, at)) >= 0:
        at += len(word)
        count += SECTION_NUMBER.match(text, at) is not None
    return count >= num_sections


def json_format(text: str) -> bool:
    """True if the entire response is JSON, or a single fenced block that contains JSON."""
    body = text.strip()
    blocks = find_fenced_blocks(body)
    if blocks and blocks[0].start == 0 and blocks[0].end == len(body) and blocks[0].language in ("", "json"):
        body = blocks[0].body
    elif body.startswith("```"):  # on one line, as the benchmark accepts it
        body = body[7:] if body[3:7].lower() == "json" else body[3:]
    body = body.removesuffix("```").strip()
    try:
        json.loads(body, parse_int=str)  # long integers take quadratic time to convert
    except (ValueError, RecursionError):
        return False
    return True


def title(text: str) -> bool:
    """True if a line contains a <<title>> that is not blank."""
    for line in text.split("\n"):
        start, end = line.find("<<"), line.rfind(">>")
        if 0 <= start < end - 2 and line[start:end].strip("<>").strip():
            return True
    return False


def two_responses(text: str) -> bool:
    """True if ****** divides the text into two different responses. It may also begin or end the text."""
    parts = [part.strip() for part in text.split("******")]
    responses = [part for part in parts if part]
    return all(parts[1:-1]) and len(responses) == 2 and responses[0] != responses[1]


def repeat_prompt(text: str, *, prompt_to_repeat: str) -> bool:
    """True if the response begins with the request, ignoring case."""
    return text.strip().lower().startswith(prompt_to_repeat.strip().lower())


def end_checker(text: str, *, end_phrase: str) -> bool:
    """True if the response ends with `end_phrase`. Letter case and quotation marks around the response are ignored."""
    return text.strip().strip('"').lower().endswith(end_phrase.strip().lower())


def quotation(text: str) -> bool:
    """True if double quotation marks enclose the entire response."""
    body = text.strip()
    return len(body) > 1 and body.startswith('"') and body.endswith('"')


def capital_word_frequency(text: str, *, capital_frequency: int, capital_relation: str) -> bool:
    """True if the number of words in capitals satisfies a relation. "I" and hyphenated words count as one each.

    Args:
        text: The response.
        capital_frequency: Number with which the count is compared.
        capital_relation: "less than" or "at least".
    """
    count = sum(word[0].isupper() for word in COMPOUND_WORD.finditer(text))
    return compare_count(count, capital_relation, capital_frequency)


def english_capital(text: str) -> bool:
    """True if the response is in English and in capital letters only.

    Raises ConfigError if py3langid is not installed.
    """
    return text.isupper() and detect_language(text) == "en"


def english_lowercase(text: str) -> bool:
    """True if the response is in English and in lower-case letters only.

    Raises ConfigError if py3langid is not installed.
    """
    return text.islower() and detect_language(text) == "en"


def no_comma(text: str) -> bool:
    """True if the response contains no comma."""
    return "," not in text


INSTRUCTIONS: Mapping[str, Callable[..., bool]] = {
    "keywords:existence": existence,
    "keywords:frequency": frequency,
    "keywords:forbidden_words": forbidden,
    "keywords:letter_frequency": letter_frequency,
    "language:response_language": response_language,
    "length_constraints:number_sentences": number_sentences,
    "length_constraints:number_paragraphs": number_paragraphs,
    "length_constraints:number_words": number_words,
    "length_constraints:nth_paragraph_first_word": nth_paragraph_first_word,
    "detectable_content:number_placeholders": number_placeholders,
    "detectable_content:postscript": postscript,
    "detectable_format:number_bullet_lists": number_bullet_lists,
    "detectable_format:constrained_response": constrained_response,
    "detectable_format:number_highlighted_sections": number_highlighted_sections,
    "detectable_format:multiple_sections": multiple_sections,
    "detectable_format:json_format": json_format,
    "detectable_format:title": title,
    "combination:two_responses": two_responses,
    "combination:repeat_prompt": repeat_prompt,
    "startend:end_checker": end_checker,
    "startend:quotation": quotation,
    "change_case:capital_word_frequency": capital_word_frequency,
    "change_case:english_capital": english_capital,
    "change_case:english_lowercase": english_lowercase,
    "punctuation:no_comma": no_comma,
}


def parse_instruction_kwargs(id: str, kwargs: Mapping[str, Any] | None, prompt: str) -> dict[str, Any]:
    """Return the keyword arguments of an instruction's check.

    Args:
        id: Published id of the instruction.
        kwargs: Keyword arguments in the row. Arguments of other instructions may be present and are ignored. None
            counts as {}, and arguments that are None as absent.
        prompt: The request, which is the default of `prompt_to_repeat`.

    Raises:
        ValueError: The instruction is unknown, or one of its arguments is missing or invalid. The message names them.
    """
    if id not in INSTRUCTIONS:
        raise ValueError(f"instruction {id!r:.80} is not one of {', '.join(INSTRUCTIONS)}")
    values = {"prompt_to_repeat": prompt} | {name: value for name, value in (kwargs or {}).items() if value is not None}
    arguments = {}
    for name, parameter in inspect.signature(INSTRUCTIONS[id]).parameters.items():
        if parameter.kind is parameter.KEYWORD_ONLY:
            kind, convert = _KINDS[name] if name in _KINDS else _KINDS[str(parameter.annotation)]
            arguments[name] = value = convert(values.get(name))
            if value is None:
                raise ValueError(f"{id}: {name}={values.get(name)!r:.80} is not {kind}")
    return arguments


def _count(value: Any) -> int | None:
    """Return a count, or None if the value is none. Floats with an integer value come from tables with nulls."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return int(value) if is_number and 0 <= value < 2**31 and value == int(value) else None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value.strip() else None


def _texts(value: Any) -> list[str] | None:
    is_list = isinstance(value, list | tuple) and len(value) > 0
    return list(value) if is_list and all(_text(item) for item in value) else None


def _relation(value: Any) -> str | None:
    return value if value in RELATIONS else None


def _letter(value: Any) -> str | None:
    return value.strip() if isinstance(value, str) and len(value.strip()) == 1 else None


def _language(value: Any) -> str | None:
    code = value.split("-")[0].lower() if isinstance(value, str) else None
    return code if code in LANGUAGES else None


_RELATION = ("'less than' or 'at least'", _relation)
_KINDS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "int": ("an integer of at least 0", _count),
    "str": ("a text", _text),
    "list[str]": ("a list of texts", _texts),
    **dict.fromkeys(("relation", "let_relation", "capital_relation"), _RELATION),
    "letter": ("one character", _letter),
    "language": (f"one of {', '.join(LANGUAGES)}", _language),
}
