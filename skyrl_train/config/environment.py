"""environment: what gives the rewards."""

from __future__ import annotations

from dataclasses import dataclass, field

from skyrl_train.config.section import Section


@dataclass
class Text2SQLConfig(Section):
    """Settings of the text2sql environment."""

    db_path: str = "/home/ray/default/sql_data"
    """Folder of the databases."""


@dataclass
class IFEvalConfig(Section):
    """Settings of the ifeval environment."""

    reward: str = "fraction"
    """fraction: the share of a prompt's instructions that are followed; all: 1 where every one is followed, else 0."""
    loose: bool = False
    """Also count what is followed after removing the first or last line, or all asterisks."""


@dataclass
class JudgeConfig(Section):
    """Settings of the llm_as_a_judge environment."""

    model: str = "gpt-4o-mini"
    """Model that judges."""
    base_url: str | None = None
    """Server of that model; null is the client's default."""


@dataclass
class SearchConfig(Section):
    """Settings of the search environment."""

    log_requests: bool = False
    """Log every request."""
    search_url: str = "http://127.0.0.1:8000/retrieve"
    """Server that searches."""
    topk: int = 3
    """Documents per query."""
    timeout: float = 30.0
    """Seconds per query."""


@dataclass
class SkyRLGymConfig(Section):
    """Settings of environments by name, and of the processes they run in."""

    max_env_workers: int = 32
    """Environment processes at most; never more than twice the machine's cores are started."""
    ifeval: IFEvalConfig = field(default_factory=IFEvalConfig)
    text2sql: Text2SQLConfig = field(default_factory=Text2SQLConfig)
    llm_as_a_judge: JudgeConfig = field(default_factory=JudgeConfig)
    search: SearchConfig = field(default_factory=SearchConfig)


@dataclass
class EnvironmentConfig(Section):
    """The environment of rows that do not name one themselves."""

    env_class: str = "gsm8k"
    """Registered name of the environment."""
    skyrl_gym: SkyRLGymConfig = field(default_factory=SkyRLGymConfig)
