"""environment: what gives the rewards."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from skyrl_train.config.section import OpenSection, Section


@dataclass
class GSM8KConfig(Section):
    """Settings of the gsm8k environment."""

    method: str = "strict"
    """strict: the number after "####"; flexible: where there is none, the last number of the text."""
    format_score: float = 0.0
    """Reward of a single wrong number."""


@dataclass
class GSM8KMultiTurnConfig(Section):
    """Settings of the gsm8k_multi_turn environment."""

    format_score: float = 0.2
    """Reward of wrong numbers in the right form, over all turns together."""


@dataclass
class MultiplyConfig(Section):
    """Settings of the multiply environment."""

    format_score: float = 0.5
    """Reward of a wrong number in a box, in the last turn."""


@dataclass
class MathConfig(Section):
    """Settings of the math environment."""

    timeout: float = 5.0
    """Seconds to compare an answer with the right one; one that takes longer scores 0."""


@dataclass
class CountdownConfig(Section):
    """Settings of the countdown environment."""

    format_score: float = 0.1
    """Reward of an expression that is not a solution."""


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
class LCBConfig(Section):
    """Settings of the lcb environment."""

    test_timeout_s: float = 6.0
    """Seconds of one test, of wall and of processor time."""
    timeout_s: float = 45.0
    """Seconds of all tests of one answer; those that have not run by then have failed."""
    max_tests: int = 20
    """Tests of a row that are run: its first ones."""


@dataclass
class JudgeConfig(Section):
    """Settings of the llm_as_a_judge environment."""

    model: str = "gpt-4o-mini"
    """Model that judges."""
    base_url: str | None = None
    """OpenAI-compatible server of that model; null is OpenAI's. The key is read from OPENAI_API_KEY."""
    timeout: float = 30.0
    """Seconds per answer judged, with all retries; below trainer.timeouts.environment_step_s."""
    sampling: dict[str, Any] = field(default_factory=dict)
    """Sent with every request, for example temperature; what is not here is the server's default."""


@dataclass
class SearchConfig(Section):
    """Settings of the search environment."""

    log_requests: bool = False
    """Log every request."""
    search_url: str = "http://127.0.0.1:8000/retrieve"
    """Server that searches, by SkyRL's protocol; not asked with a corpus."""
    topk: int = 3
    """Documents per query."""
    timeout: float = 30.0
    """Seconds per query, with all retries; below trainer.timeouts.environment_step_s."""
    corpus: str | None = None
    """Searched by BM25 instead: a .jsonl or .parquet file, or an index that tools/bm25.py wrote."""


@dataclass
class SearchCodeConfig(SearchConfig):
    """Settings of the searchcode environment: those of search, and of its programs."""

    python_timeout: float = 10.0
    """Seconds per program; below trainer.timeouts.environment_step_s."""


@dataclass
class ReasoningGymConfig(Section):
    """Settings of the reasoning_gym environment."""

    tasks: list[str] | None = None
    """Names of the library's datasets that rows may ask for; null: all of them, but those whose scorer runs the answer
    as code."""
    partial_credit: bool = True
    """false: a score below 1 counts 0. Many of the library's scorers give some credit for an answer among others."""


@dataclass
class VerifiersConfig(Section):
    """Settings of the verifiers environment."""

    env_id: str | None = None
    """Name of an installed environment of the verifiers library."""
    env_args: dict[str, Any] = field(default_factory=dict)
    """Arguments of its `load_environment`."""


@dataclass
class OpenEnvConfig(Section):
    """Settings of the openenv environment."""

    base_url: str | None = None
    """Server: http(s) with `POST /reset` and `POST /step` below it, or the address of OpenEnv's sessions, ws(s)://.../ws."""
    token_variable: str | None = None
    """Environment variable with the token that is sent as `Authorization: Bearer`."""
    action_key: str | None = "message"
    """The model's text is sent as `{"action": {action_key: text}}`; null sends `{"action": text}`."""
    observation_key: str | None = None
    """Of the observation, the part that the model is shown; null is a text, or all of it as JSON."""
    timeout: float = 30.0
    """Seconds that one request may take."""
    max_response_bytes: int = 1_048_576
    """A longer answer of the server fails the episode."""


@dataclass
class ToolUseConfig(Section):
    """Settings of the tool_use environment."""

    tools: list[str] = field(default_factory=lambda: ["python"])
    """Names of the tools that the model may call."""
    tool_settings: dict[str, Any] = field(default_factory=dict)
    """Tool -> what it is made with, where that is not its defaults."""
    style: str = "xml"
    """How calls are written: xml, json or native (the tokenizer's own format)."""
    dialect: str = "hermes"
    """With style=native, how the prompt says it: hermes (also Qwen), llama or mistral."""
    describe_tools: bool = True
    """Say in the system message which tools there are and how to call them."""
    observation_role: str = "user"
    """Role of the messages that carry results: user or tool."""
    tools_required: bool = False
    """A right answer counts only after a call that worked."""


@dataclass
class SandboxConfig(Section):
    """Where programs run that a model wrote."""

    kind: str = "bubblewrap"
    """bubblewrap, or unsafe_local: as this user, on this machine, boxed in by nothing."""
    i_know_this_runs_model_code_on_this_machine: bool = False
    """Must be true for unsafe_local."""


@dataclass
class SkyRLGymConfig(Section):
    """Settings of environments by name, and of the processes they run in."""

    max_env_workers: int = 32
    """Environment processes at most; never more than twice the machine's cores are started, and never none."""
    gsm8k: GSM8KConfig = field(default_factory=GSM8KConfig)
    gsm8k_multi_turn: GSM8KMultiTurnConfig = field(default_factory=GSM8KMultiTurnConfig)
    multiply: MultiplyConfig = field(default_factory=MultiplyConfig)
    math: MathConfig = field(default_factory=MathConfig)
    countdown: CountdownConfig = field(default_factory=CountdownConfig)
    ifeval: IFEvalConfig = field(default_factory=IFEvalConfig)
    lcb: LCBConfig = field(default_factory=LCBConfig)
    text2sql: Text2SQLConfig = field(default_factory=Text2SQLConfig)
    llm_as_a_judge: JudgeConfig = field(default_factory=JudgeConfig)
    search: SearchConfig = field(default_factory=SearchConfig)
    reasoning_gym: ReasoningGymConfig = field(default_factory=ReasoningGymConfig)
    verifiers: VerifiersConfig = field(default_factory=VerifiersConfig)
    openenv: OpenEnvConfig = field(default_factory=OpenEnvConfig)
    own: dict[str, Any] = field(default_factory=dict)
    """Settings of your own environments, by name: `own: {my_env: {difficulty: 3}}` is my_env's `env_config`."""
    searchcode: SearchCodeConfig = field(default_factory=SearchCodeConfig)
    tool_use: ToolUseConfig = field(default_factory=ToolUseConfig)
    sandbox: SandboxConfig = field(default_factory=SandboxConfig)


@dataclass
class EnvironmentConfig(OpenSection):
    """The environment of rows that do not name one themselves."""

    env_class: str = "gsm8k"
    """Registered name of the environment."""
    skyrl_gym: SkyRLGymConfig = field(default_factory=SkyRLGymConfig)
    own: dict[str, Any] = field(default_factory=dict)
    """Keys of your own, for your own code: `+environment.my_key=3` is here, and `cfg.environment.my_key` there."""
