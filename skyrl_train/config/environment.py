"""Configuration section `environment`: environments, their workers and the sandbox."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from skyrl_train.config.choices import ENVIRONMENTS, TOOL_FORMATS, TOOLS
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
    """How the answer is extracted. `strict` takes the number after "####". `flexible` takes the last number of the
    response if there is no such number."""
    format_score: float = config_field(0.0, range=FRACTION)
    """Reward of an answer that is a single number, but the wrong one."""


@dataclass
class GSM8KMultiTurnConfig(Section):
    """Settings of the gsm8k_multi_turn environment."""

    format_score: float = config_field(0.2, range=FRACTION)
    """Total reward, over all turns, of wrong numbers in the right format."""


@dataclass
class MultiplyConfig(Section):
    """Settings of the multiply environment."""

    format_score: float = config_field(0.5, range=FRACTION)
    """Reward of a wrong boxed number in the last turn."""


@dataclass
class MathConfig(Section):
    """Settings of the math environment."""

    timeout: float = config_field(5.0, range=POSITIVE)
    """Time limit (seconds) for comparing an answer with the reference answer. A comparison that takes longer scores 0.
    It must be below `trainer.timeouts.environment_step_s`."""


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
    """`fraction` rewards the share of a prompt's instructions that the response follows. `all` rewards 1 if the
    response follows every instruction, otherwise 0."""
    loose: bool = False
    """Also count instructions that the response follows after its first line, its last line or its asterisks are
    removed."""


@dataclass
class LCBConfig(Section):
    """Settings of the lcb environment."""

    test_timeout_s: float = config_field(6.0, range=POSITIVE)
    """Time limit (seconds) of one test. It applies to wall-clock time and to CPU time. It must not be above
    `timeout_s`."""
    timeout_s: float = config_field(45.0, range=POSITIVE)
    """Time limit (seconds) of all tests of one answer together. Tests that have not run by then count as failed. It
    must be at least 10 s below `trainer.timeouts.environment_step_s`."""
    max_tests: int = config_field(20, range=AT_LEAST_ONE)
    """Maximum number of tests that are run for a row. The row's first tests are run."""


@dataclass
class JudgeConfig(Section):
    """Settings of the llm_as_a_judge environment."""

    model: str = "gpt-4o-mini"
    """Name of the judge model."""
    base_url: str | None = None
    """URL of the OpenAI-compatible server of the judge model. null is OpenAI's server. The API key is read from the
    environment variable OPENAI_API_KEY."""
    timeout: float = config_field(30.0, range=POSITIVE)
    """Time limit (seconds) for judging one answer, including all retries. It must be below
    `trainer.timeouts.environment_step_s`."""
    sampling: dict[str, Any] = config_field(factory=dict)
    """Sampling parameters that are sent with every request, for example `temperature`. The server uses its defaults for
    all others."""


@dataclass
class SearchConfig(Section):
    """Settings of the search environment."""

    log_requests: bool = False
    """Log every request."""
    search_url: str = "http://127.0.0.1:8000/retrieve"
    """URL of the search server, which uses SkyRL's protocol. It is not used if `corpus` is set."""
    topk: int = config_field(3, range=AT_LEAST_ONE)
    """Number of documents that are returned for each query."""
    timeout: float = config_field(30.0, range=POSITIVE)
    """Time limit (seconds) of one query, including all retries. It must be below
    `trainer.timeouts.environment_step_s`."""
    corpus: str | None = None
    """Documents that are searched with BM25 instead of a server: a .jsonl or .parquet file, or an index written by
    tools/bm25.py. null uses the server at `search_url`."""


@dataclass
class SearchCodeConfig(SearchConfig):
    """Settings of the searchcode environment: the settings of search, and a time limit of programs."""

    python_timeout: float = config_field(10.0, range=POSITIVE)
    """Time limit (seconds) of one program. It must be below `trainer.timeouts.environment_step_s`."""


@dataclass
class ReasoningGymConfig(Section):
    """Settings of the reasoning_gym environment."""

    tasks: list[str] | None = None
    """Names of the library's datasets that rows may use. null allows all datasets except those whose scorer runs the
    answer as code."""
    partial_credit: bool = True
    """Keep scores below 1 unchanged. false turns them into 0. Many of the library's scorers give partial credit to a
    longer text that contains the answer."""


@dataclass
class VerifiersConfig(Section):
    """Settings of the verifiers environment."""

    env_id: str | None = None
    """Name of an installed environment of the verifiers library."""
    env_args: dict[str, Any] = config_field(factory=dict)
    """Keyword arguments of the environment's `load_environment`."""


@dataclass
class OpenEnvConfig(Section):
    """Settings of the openenv environment."""

    base_url: str | None = None
    """URL of the server: an http(s) URL below which it serves `POST /reset` and `POST /step`, or the URL of OpenEnv's
    WebSocket sessions, ws(s)://.../ws."""
    token_variable: str | None = None
    """Name of the environment variable that holds the token, which is sent as `Authorization: Bearer`. null sends no
    token."""
    action_key: str | None = "message"
    """Key of the model's text in an action, `{"action": {action_key: text}}`. null sends `{"action": text}`."""
    observation_key: str | None = None
    """Key of the part of the observation that is returned to the model. null returns the complete observation: text
    unchanged, everything else as JSON."""
    timeout: float = config_field(30.0, range=POSITIVE)
    """Time limit (seconds) of one request. It must be below `trainer.timeouts.environment_step_s`."""
    max_response_bytes: int = config_field(1_048_576, range=AT_LEAST_ONE)
    """Maximum size (bytes) of a response of the server. A larger response fails the episode."""


@dataclass
class ToolUseConfig(Section):
    """Settings of the tool_use environment."""

    tools: list[str] = config_field(factory=lambda: ["python"], choices=TOOLS, allows_plugins=True)
    """Names of the tools that the model may call."""
    tool_settings: dict[str, Any] = config_field(factory=dict)
    """Settings of each tool, by the tool's name. A setting that is left out keeps the tool's default."""
    style: str = config_field("xml", choices=("xml", "json", "native"))
    """Format of tool calls. `native` is the tokenizer's own format."""
    dialect: str = config_field("hermes", choices=TOOL_FORMATS)
    """Format in which the model writes tool calls with `style=native`. `hermes` is also that of Qwen 2.5 and Qwen 3.
    `hermes`, `llama` and `mistral` are told apart by the calls. Only these can be described (`describe_tools`)."""
    describe_tools: bool = True
    """Describe the tools and how to call them in the system message. Set it to false if the chat template describes
    the tools of the rows (column `tools`)."""
    observation_role: str = config_field("user", choices=("user", "tool"))
    """Role of the messages that hold the results of tool calls."""
    tools_required: bool = False
    """Accept a correct answer only after at least one tool call that succeeded."""


@dataclass
class MiniSWEConfig(Section):
    """Settings of the mini_swe environment. Templates are Jinja templates; null uses the environment's own template."""

    command_timeout_s: float = config_field(30.0, range=POSITIVE)
    """Time limit (seconds) of one command. The sum of this limit, `grading_timeout_s` and 10 s must not be above
    `trainer.timeouts.environment_step_s`."""
    test_timeout_s: float = config_field(10.0, range=POSITIVE)
    """Time limit (seconds) of each test of a submitted repository. It must not be above `grading_timeout_s`."""
    grading_timeout_s: float = config_field(20.0, range=POSITIVE)
    """Time limit (seconds) of all tests of a submitted repository together. Tests that have not run by then count as
    failed."""
    max_output: int = config_field(10_000, range=Range(1_000, 200_000))
    """Maximum number of bytes of a command's output that are returned to the model: half of them from its beginning,
    half from its end."""
    system_template: str | None = None
    """Template of the system message."""
    instance_template: str | None = None
    """Template of the first message. Its variable `task` is the row's prompt."""
    action_observation_template: str | None = None
    """Template of the response to a command. Its variables are `output.returncode` and `output.output`."""
    format_error_template: str | None = None
    """Template of the response to a turn that does not contain exactly one command. Its variable `actions` is the list
    of the turn's commands."""
    traj_dir: str | None = None
    """Folder for one JSON file per episode with its commands and its reward. The reward in the file is null if the
    episode was closed before it was graded. null writes no files."""


@dataclass
class AgentSandboxConfig(Section):
    """Sandbox in which the commands of the agent environment run."""

    kind: str = "bubblewrap"
    """`bubblewrap` isolates a command from this machine and its networks, `docker` runs it in a container of `image`,
    and `none` runs it as the current user on this machine. "module:Class" is your own class of the protocol
    `AgentSandbox`."""
    i_know_this_runs_model_code_on_this_machine: bool = False
    """Confirmation that `kind=none` requires."""
    image: str | None = None
    """Container image with `kind=docker`. "{row.image}" takes the image from the row's column `image`."""
    run_args: list[str] = config_field(factory=list)
    """Arguments of `docker run` with `kind=docker`, for example limits such as `--memory=4g`."""
    paths: list[str] = config_field(factory=list)
    """Folders and files of this machine that are visible with `kind=bubblewrap`, read-only and in addition to /usr, for
    example a virtual environment."""
    settings: dict[str, Any] = config_field(factory=dict)
    """Keyword arguments of your own class. Texts may have the placeholders of `command`."""


@dataclass
class AgentConfig(Section):
    """Settings of the agent environment, whose episodes are runs of a program that calls a chat API."""

    command: list[str] | None = None
    """Program and arguments of an agent. `{base_url}`, `{model}`, `{prompt}`, `{uid}` and `{row.COLUMN}` are replaced
    with the values of an episode. Exactly one of `command` and `run` is set."""
    run: str | None = None
    """Coroutine `async def run(session, row)` of an agent: the name that `@register.agent` gave it, or
    "module:function"."""
    python: str | None = None
    """Python interpreter in which `run` is called, for example that of a virtual environment with the agent's packages.
    null is the interpreter of this package."""
    env: dict[str, Any] = config_field(factory=dict)
    """Environment variables of `command`, with the same placeholders. The variables that the SDKs of OpenAI and
    Anthropic read for a base URL and a key are set unless they are in here."""
    timeout_s: float = config_field(600.0, range=POSITIVE)
    """Time limit (seconds) of one run of the agent. After it all of its processes are killed, and its episode has no
    score."""
    grader: list[str] | None = None
    """Command that computes the reward in the agent's working folder, with the same placeholders. The reward is the
    number in its last line of output, also as `{"reward": number}`. Without it, exit code 0 is 1 and exit code 1 is 0.
    Other exit codes are always failures."""
    grader_timeout_s: float = config_field(60.0, range=POSITIVE)
    """Time limit (seconds) of the grader."""
    reward: str | None = None
    """Registered reward function or single-turn environment that scores the agent's final message."""
    max_calls: int = config_field(100, range=AT_LEAST_ONE)
    """Maximum number of calls of the model in one episode. An episode with more calls has no score."""
    max_tokens: int | None = config_field(None, range=AT_LEAST_ONE)
    """Maximum number of tokens that the model samples in one episode. An episode with more tokens has no score. null is
    no limit."""
    max_output_bytes: int = config_field(65_536, range=Range(1_024, 64 * 2**20))
    """Maximum number of bytes of stdout and of stderr that are read from a command: the last ones. The output is not
    saved; the detail of a failure quotes the last 2,000 characters."""
    max_concurrent_commands: int = config_field(64, range=AT_LEAST_ONE)
    """Maximum number of agents that run at the same time as commands, each with its processes. Coroutines share a few
    processes and are not limited."""
    host: str = "127.0.0.1"
    """Address at which the server of the sessions listens. Agents on other machines need one that they can reach."""
    port: int = config_field(0, range=Range(0, 65_535))
    """Port of the server of the sessions. 0 is any free port."""
    public_url: str | None = None
    """URL under which agents reach the server of the sessions, such as that of a tunnel. null is its own address."""
    sandbox: AgentSandboxConfig = config_field(factory=AgentSandboxConfig)


@dataclass
class SandboxConfig(Section):
    """Sandbox in which programs that a model wrote are run."""

    kind: str = config_field("bubblewrap", choices=("bubblewrap", "unsafe_local"))
    """`bubblewrap` isolates programs. `unsafe_local` runs them as the current user on this machine without any
    isolation."""
    i_know_this_runs_model_code_on_this_machine: bool = False
    """Confirmation that `kind=unsafe_local` requires."""


@dataclass
class SkyRLGymConfig(Section):
    """Settings of each environment, by its name, and of the processes that environments run in."""

    max_env_workers: int = config_field(32, range=NON_NEGATIVE, aliases="generator.max_env_workers")
    """Maximum number of environment processes. With `environment.hosts` it applies to each host separately. At least
    one process is started, and at most two per CPU core of the machine."""
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
    """Settings of your own environments, by name. `own: {my_env: {difficulty: 3}}` is the `env_config` of `my_env`."""
    mini_swe: MiniSWEConfig = config_field(factory=MiniSWEConfig)
    searchcode: SearchCodeConfig = config_field(factory=SearchCodeConfig)
    tool_use: ToolUseConfig = config_field(factory=ToolUseConfig)
    agent: AgentConfig = config_field(factory=AgentConfig)
    sandbox: SandboxConfig = config_field(factory=SandboxConfig)


@dataclass
class EnvironmentConfig(OpenSection):
    """The default environment and the processes in which environments run."""

    env_class: str = config_field("gsm8k", choices=ENVIRONMENTS, allows_plugins=True)
    """Registered name of the environment of rows that do not name one in their column `env_class`."""
    hosts: int = config_field(0, range=NON_NEGATIVE, value_aliases={"driver": 0})
    """Number of Ray actors ("hosts") that run the environment processes, spread over the nodes of the cluster. With 0
    the processes run on the driver's node, as children of the driver."""
    host_cpus: float = config_field(1.0, range=POSITIVE)
    """Number of CPUs that each host reserves. A host runs at most two processes per reserved CPU, and at most
    `skyrl_gym.max_env_workers`."""
    host_resources: dict[str, float] = config_field(factory=dict)
    """Custom Ray resources that each host reserves in addition, by name, for example `{environments: 1}`. Hosts then
    run only on nodes that were started with these resources."""
    skyrl_gym: SkyRLGymConfig = config_field(factory=SkyRLGymConfig)
    own: dict[str, Any] = config_field(factory=dict)
    """Keys for your own code. `+environment.my_key=3` is stored here and read as `cfg.environment.my_key`."""
