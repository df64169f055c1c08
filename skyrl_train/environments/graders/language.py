"""Which language a text is in: py3langid's model, which comes with the package and gives the same answer every time."""

from __future__ import annotations

from functools import cache
from typing import Any

from skyrl_train.errors import ConfigError

LANGUAGES: tuple[str, ...] = (
    *("af", "ar", "bg", "bn", "ca", "cs", "cy", "da", "de", "el", "en", "es", "et", "fa", "fi", "fr", "gu", "he"),
    *("hi", "hr", "hu", "id", "it", "ja", "kn", "ko", "lt", "lv", "mk", "ml", "mr", "ne", "nl", "no", "pa", "pl"),
    *("pt", "ro", "ru", "sk", "sl", "so", "sq", "sv", "sw", "ta", "te", "th", "tl", "tr", "uk", "ur", "vi", "zh"),
)
"""ISO 639-1 codes: those that the benchmark tells apart. With more of them, short texts are more often wrong."""
MAX_CHARACTERS = 20_000
"""Of a text that are looked at: half from its beginning, half from its end."""


def language_of(text: str) -> str | None:
    """One of LANGUAGES, or None for a text without letters. Capital letters make no difference."""
    if len(text) > MAX_CHARACTERS:
        half = MAX_CHARACTERS // 2
        text = f"{text[:half]}\n{text[-half:]}"
    if not any(map(str.isalpha, text)):
        return None
    return _identifier().classify(text.lower())[0]


@cache
def _identifier() -> Any:
    """Loaded at first use, in a second. Raises ConfigError where the package is not installed."""
    try:
        from py3langid.langid import MODEL_FILE, LanguageIdentifier
    except ImportError as error:
        raise ConfigError(
            "environment.env_class=ifeval needs py3langid to tell languages: pip install 'skyrl-train[ifeval]'."
        ) from error
    identifier = LanguageIdentifier.from_model_file(MODEL_FILE)  # its own: the package's is everybody's
    identifier.set_languages(LANGUAGES)
    return identifier
