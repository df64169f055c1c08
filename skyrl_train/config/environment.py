"""environment: what gives the rewards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from skyrl_train.config.choices import ENVIRONMENTS, TOOLS
from skyrl_train.config.section import (
    AT_LEAST_ONE,
    FRACTION,
    NON_NEGATIVE,
    POSITIVE,
    OpenSection,
    Range,
    Section,
    config_field,
)


@dataclass
class GSM8KConfig(Section):
    """Settings of the gsm8k environment."""

    method: str = config_field("strict", choices=("strict", "flexible"))
    """How the answer is found. strict: it is the number after "####". flexible: without such a number, it is the last
    number of the text."""
    format_score: float = config_field(0.0, range=FRACTION)
    """Reward of an answer that is a single wrong number."""


@dataclass
class GSM8KMultiTurnConfig(Section):
    """Settings of the gsm8k_multi_turn environment."""

    format_score: float = config_field(0.2, range=FRACTION)
    """Reward of wrong numbers in the right format, for all turns together."""


@dataclass
class MultiplyConfig(Section):
    """Settings of the multiply environment."""

    format_score: float = config_field(0.5, range=FRACTION)
    """Reward of a wrong number in a box, in the last turn."""


@dataclass
class MathConfig(Section):
    """Settings of the math environment."""

    timeout: float = config_field(5.0, range=POSITIVE)
    """Time limit (seconds) for comparing an answer with the right one; a comparison that takes longer scores 0."""


@dataclass
class CountdownConfig(Section):
    """Settings of the countdown environment."""

    format_score: float = config_field(0.1, range=FRACTION)
    """Reward of an expression that is not a solution."""


@dataclass
class Text2SQLConfig(Section):
    """Settings of the text2sql environment."""

    db_path: str = "/home/ray/default/sql_data"
    """Folder of the databases."""


@dataclass
class IFEvalConfig(Section):
    """Settings of the ifeval environment."""

    reward: str = config_field("fraction", choices=("fraction", "all"))
    """fraction: the share of a prompt's instructions that the response follows. all: 1 if it follows every one of them,
    otherwise 0."""
    loose: bool = False
    """Also count instructions that the response follows once its first or last line or its asterisks are removed."""


@dataclass
class LCBConfig(Section):
    """Settings of the lcb environment."""

    test_timeout_s: float = config_field(6.0, range=POSITIVE)
    """Time limit (seconds) of one test; it applies to wall-clock time and to processor time."""
    timeout_s: float = config_field(45.0, range=POSITIVE)
    """Time limit (seconds) of all tests of one answer together; tests that have not run by then count as failed."""
    max_tests: int = config_field(20, range=AT_LEAST_ONE)
    """Maximum number of tests that are run for a row: its first ones."""


@dataclass
class JudgeConfig(Section):
    """Settings of the llm_as_a_judge environment."""

    model: str = "gpt-4o-mini"
    """The model that judges."""
    base_url: str | None = None
    """OpenAI-compatible server of that model; null is OpenAI's. The API key is read from OPENAI_API_KEY."""
    timeout: float = config_field(30.0, range=POSITIVE)
    """Time limit (seconds) for judging one answer, all retries included. It must be below
    trainer.timeouts.environment_step_s."""
    sampling: dict[str, Any] = config_field(factory=dict)
    """Parameters that are sent with every request, for example temperature; the server decides about all others."""


@dataclass
class SearchConfig(Section):
    """Settings of the search environment."""

    log_requests: bool = False
    """Log every request."""
    search_url: str = "http://127.0.0.1:8000/retrieve"
    """The search server, which speaks SkyRL's protocol. It is not used if `corpus` is set."""
    topk: int = config_field(3, range=AT_LEAST_ONE)
    """Documents per query."""
    timeout: float = config_field(30.0, range=POSITIVE)
    """Time limit (seconds) of one query, all retries included. It must be below trainer.timeouts.environment_step_s."""
    corpus: str | None = None
    """Documents to search with BM25 instead of asking a server: a .jsonl or .parquet file, or an index that
    tools/bm25.py wrote."""


@dataclass
class SearchCodeConfig(SearchConfig):
    """Settings of the searchcode environment: those of search, and the time limit of its programs."""

    python_timeout: float = config_field(10.0, range=POSITIVE)
    """Time limit (seconds) of one program. It must be below trainer.timeouts.environment_step_s."""


@dataclass
class ReasoningGymConfig(Section):
    """Settings of the reasoning_gym environment."""

    tasks: list[str] | None = None
    """Names of the library's datasets that rows may use. null allows all of them except those whose scorer runs the
    answer as code."""
    partial_credit: bool = True
    """Give scores below 1 as they are; false turns them into 0. Many scorers of the library give some credit to an
    answer that stands among others."""


@dataclass
class VerifiersConfig(Section):
    """Settings of the verifiers environment."""

    env_id: str | None = None
    """Name of an installed environment of the verifiers library."""
    env_args: dict[str, Any] = config_field(factory=dict)
    """Arguments of its `load_environment`."""


@dataclass
class OpenEnvConfig(Section):
    """Settings of the openenv environment."""

    base_url: str | None = None
    """The server: an http(s) address with `POST /reset` and `POST /step` below it, or the address of OpenEnv's
    sessions, ws(s)://.../ws."""
    token_variable: str | None = None
    """Environment variable that holds the token; it is sent as `Authorization: Bearer`."""
    action_key: str | None = "message"
    """The model's text is sent as `{"action": {action_key: text}}`; null sends `{"action": text}`."""
    observation_key: str | None = None
    """The part of the observation that the model is shown; null shows all of it, as JSON unless it is text."""
    timeout: float = config_field(30.0, range=POSITIVE)
    """Time limit (seconds) of one request."""
    max_response_bytes: int = config_field(1_048_576, range=AT_LEAST_ONE)
    """A response of the server that is longer than this fails the episode."""


@dataclass
class ToolUseConfig(Section):
    """Settings of the tool_use environment."""

    tools: list[str] = config_field(factory=lambda: ["python"], choices=TOOLS, plugins=True)
    """Names of the tools that the model may call."""
    tool_settings: dict[str, Any] = config_field(factory=dict)
    """Settings of each tool by its name; what is not given keeps the tool's default."""
    style: str = config_field("xml", choices=("xml", "json", "native"))
    """Format of calls: xml, json, or native (the tokenizer's own format)."""
    dialect: str = config_field("hermes", choices=("hermes", "llama", "mistral"))
    """How the prompt describes calls with style=native: hermes (also for Qwen), llama or mistral."""
    describe_tools: bool = True
    """Describe the tools and how to call them in the system message."""
    observation_role: str = config_field("user", choices=("user", "tool"))
    """Role of the messages that carry results: user or tool."""
    tools_required: bool = False
    """A right answer counts only after a tool call that succeeded."""


@dataclass
class MiniSWEConfig(Section):
    """Settings of the mini_swe environment. Templates are Jinja; null is the environment's own."""

    command_timeout_s: float = config_field(30.0, range=POSITIVE)
    """Seconds of a command. With grading_timeout_s and 10 s around both, it must fit into
    trainer.timeouts.environment_step_s."""
    test_timeout_s: float = config_field(10.0, range=POSITIVE)
    """Seconds of each test of a submitted repository."""
    grading_timeout_s: float = config_field(20.0, range=POSITIVE)
    """Seconds of all tests of a submitted repository; those that have not run by then have failed."""
    max_output: int = config_field(10_000, range=Range(1_000, 200_000))
    """Bytes of a command's output that are shown: the first and the last half of them."""
    system_template: str | None = None
    """The system message."""
    instance_template: str | None = None
    """The first message: `task` is the row's prompt."""
    action_observation_template: str | None = None
    """What is answered to a command: `output.returncode`, `output.output`."""
    format_error_template: str | None = None
    """What is answered to another number of commands than one: `actions` are those that there were."""
    traj_dir: str | None = None
    """A folder that gets a JSON file with the commands of every episode, and its reward, which is null if it was cut;
    null keeps none."""


@dataclass
class SandboxConfig(Section):
    """Where programs run that a model wrote."""

    kind: str = config_field("bubblewrap", choices=("bubblewrap", "unsafe_local"))
    """bubblewrap isolates programs; unsafe_local runs them as the current user, on this machine, without any
    isolation."""
    i_know_this_runs_model_code_on_this_machine: bool = False
    """Must be true for unsafe_local."""


@dataclass
class SkyRLGymConfig(Section):
    """Settings of environments by name, and of the processes they run in."""

    max_env_workers: int = config_field(32, range=NON_NEGATIVE, aliases="generator.max_env_workers")
    """Maximum number of environment processes, in each of `environment.hosts` if there are any. At least one is
    started, and at most two per core of the machine."""
    gsm8k: GSM8KConfig = config_field(factory=GSM8KConfig)
    gsm8k_multi_turn: GSM8KMultiTurnConfig = config_field(factory=GSM8KMultiTurnConfig)
    multiply: MultiplyConfig = config_field(factory=MultiplyConfig)
    math: MathConfig = config_field(factory=MathConfig)
    countdown: CountdownConfig = config_field(factory=CountdownConfig)
    ifeval: IFEvalConfig = config_field(factory=IFEvalConfig)
    lcb: LCBConfig = config_field(factory=LCBConfig)
    text2sql: Text2SQLConfig = config_field(factory=Text2SQLConfig)
    llm_as_a_judge: JudgeConfig = config_field(factory=JudgeConfig)
    search: SearchConfig = config_field(factory=SearchConfig)
    reasoning_gym: ReasoningGymConfig = config_field(factory=ReasoningGymConfig)
    verifiers: VerifiersConfig = config_field(factory=VerifiersConfig)
    openenv: OpenEnvConfig = config_field(factory=OpenEnvConfig)
    own: dict[str, Any] = config_field(factory=dict)
    """Settings of your own environments, by name: `own: {my_env: {difficulty: 3}}` is my_env's `env_config`."""
    mini_swe: MiniSWEConfig = config_field(factory=MiniSWEConfig)
    searchcode: SearchCodeConfig = config_field(factory=SearchCodeConfig)
    tool_use: ToolUseConfig = config_field(factory=ToolUseConfig)
    sandbox: SandboxConfig = config_field(factory=SandboxConfig)


@dataclass
class EnvironmentConfig(OpenSection):
    """The environment of rows that do not name one themselves."""

    env_class: str = config_field("gsm8k", choices=ENVIRONMENTS, plugins=True)
    """Registered name of the environment."""
    hosts: int = config_field(0, range=NON_NEGATIVE, spellings={"driver": 0})
    """How many actors on nodes of the Ray cluster have the environments' processes, spread over the nodes. 0: the
    processes run beside the driver."""
    host_cpus: float = config_field(1.0, range=POSITIVE)
    """CPUs that each of these hosts reserves. It has at most two processes for each of them, and at most
    `skyrl_gym.max_env_workers`."""
    host_resources: dict[str, float] = config_field(factory=dict)
    """What else each of them reserves: Ray's custom resources by name, `{environments: 1}`, which keep hosts to the
    nodes that were started with them."""
    skyrl_gym: SkyRLGymConfig = config_field(factory=SkyRLGymConfig)
    own: dict[str, Any] = config_field(factory=dict)
    """Keys for your own code: `+environment.my_key=3` is stored here, and read as `cfg.environment.my_key`."""
