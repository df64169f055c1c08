"""The part of a session that an agent sees."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AgentSession:
    """The session of an agent: everything that a client of a chat API needs.

    Example:
        client = openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key)
    """

    base_url: str
    """Base URL for OpenAI's clients. Anthropic's clients need `anthropic_base_url`."""
    api_key: str
    model: str

    @property
    def anthropic_base_url(self) -> str:
        """Base URL for Anthropic's clients, which add /v1 themselves."""
        return self.base_url.removesuffix("/v1")
