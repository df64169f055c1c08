"""Language identification with the model of py3langid, which is deterministic and included in that package."""

from __future__ import annotations

from functools import cache
from typing import Any

from skyrl_train.errors import ConfigError

LANGUAGES: tuple[str, ...] = (
    *("af", "ar", "bg", "bn", "ca", "cs", "cy", "da", "de", "el", "en", "es", "et", "fa", "fi", "fr", "gu", "he"),
    *("hi", "hr", "hu", "id", "it", "ja", "kn", "ko", "lt", "lv", "mk", "ml", "mr", "ne", "nl", "no", "pa", "pl"),
    *("pt", "ro", "ru", "sk", "sl", "so", "sq", "sv", "sw", "ta", "te", "th", "tl", "tr", "uk", "ur", "vi", "zh"),
)
"""ISO 639-1 codes of the benchmark's languages. With more of them, short texts would be misidentified more often."""
MAX_CHARACTERS = 20_000
"""Maximum characters of a text that are examined: half from its beginning and half from its end."""


def detect_language(text: str) -> str | None:
    """Return the most likely language of a text, one of LANGUAGES, or None if the text has no letters.

    Case is ignored. Raises ConfigError if py3langid is not installed.
    """
    if len(text) > MAX_CHARACTERS:
        half = MAX_CHARACTERS // 2
        text = f"{text[:half]}\n{text[-half:]}"
    if not any(map(str.isalpha, text)):
        return None
    return _identifier().classify(text.lower())[0]


@cache
def _identifier() -> Any:
    """Load the model on first use, which takes a second."""
    try:
        from py3langid.langid import MODEL_FILE, LanguageIdentifier
    except ImportError as error:
        raise ConfigError(
            "environment.env_class=ifeval needs py3langid to detect languages: pip install 'skyrl-train[ifeval]'."
        ) from error
    identifier = LanguageIdentifier.from_model_file(
        MODEL_FILE
    )  # not the package's shared instance, whose languages other code may use
    identifier.set_languages(LANGUAGES)
    return identifier
