"""The environment interface: it opens a conversation, answers the model's texts, and rewards them.

Environments are plain synchronous Python without torch. The driver never calls one directly: `environments/pool.py`
runs them in processes it can kill.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NotRequired, TypedDict

from skyrl_train.data.messages import Message, ToolCallRecord, normalize_message
from skyrl_train.errors import DataError, EnvironmentFailure

BAD_ROW = "bad_row"
"""The kind of failure of an episode whose row turns out to be unusable only when it starts."""
MAX_REWARD = 1e15
"""Advantages are computed in float32, in which the square of a much larger reward is infinite."""


class AttrDict(dict[str, Any]):
    """A mapping that is also read by attribute, as environments read an OmegaConf node: `env_config.search_url`."""

    def __getattr__(self, name: str) -> Any:
        try:
            value = self[name]
        except KeyError:
            raise AttributeError(f"this environment's settings have no {name!r}; they have {sorted(self)}") from None
        return AttrDict(value) if isinstance(value, Mapping) else value


@dataclass(slots=True)
class StepOutput:
    """The result of one `step`."""

    observations: list[Message]
    """Messages to add to the conversation; empty when done."""
    reward: float
    """The reward of this turn; an episode's reward is the sum over its turns."""
    done: bool
    metadata: dict[str, Any] = field(default_factory=dict)
    """Anything that JSON can hold; numbers become metrics."""
    postprocessed_action: str | None = None
    """Accepted from SkyRL-Gym environments but not applied: tokens are trained on exactly as they were sampled."""
    tool_calls: list[ToolCallRecord] = field(default_factory=list)
    """The calls that were read from the model's text, for who reads rollouts; the model never sees this list."""


class BaseTextEnvStepOutput(TypedDict):
    """SkyRL-Gym's name and shape of `StepOutput`; `step` may return either."""

    observations: list[Message]
    reward: float
    done: bool
    metadata: dict[str, Any]
    postprocessed_action: NotRequired[str | None]


class TextEnv:
    """One episode. Subclasses override `step`, and `init` or `close` if they need to.

    `env_config` is this environment's section of `environment.skyrl_gym`. `extras` holds the other columns of the
    dataset row: a rule-based reward, for example, reads `extras["reward_spec"]["ground_truth"]`.
    """

    replayable: bool = True
    """Whether an episode whose process was killed may be rebuilt in another one, by calling the same constructor,
    `init`, and `step` with the same texts. Set it to False if that would repeat effects on the outside world: the
    episode then fails as "environment_died"."""

    def __init__(self, env_config: Mapping[str, Any] | None = None, extras: Mapping[str, Any] | None = None):
        self.env_config = AttrDict(env_config or {})
        self.extras = dict(extras or {})

    @classmethod
    def check(cls, env_config: Mapping[str, Any]) -> None:
        """Check the settings and this machine. Called once, before the engines start, if any row uses this environment.

        Raises ConfigError if the settings cannot work or if this machine lacks something that they need.
        """

    @classmethod
    def parse_row(cls, extras: Mapping[str, Any]) -> Any:
        """Return what an episode needs of its row, such as the ground truth; the default needs nothing.

        Called for every row before the engines start, and by the constructors of the built-in environments. Raises
        ValueError for a row that cannot be used.
        """

    @classmethod
    def check_rows(cls, rows: Iterable[tuple[str, Mapping[str, Any]]]) -> None:
        """Parse every row, given as its file and row and its extras. Raises DataError that names file and row."""
        for where, extras in rows:
            try:
                cls.parse_row(extras)
            except Exception as error:
                cause = error if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
                raise DataError(f"{where}: {cause}; correct the row or remove it.") from error

    def init(self, prompt: list[Message]) -> tuple[list[Message], dict[str, Any]]:
        """Return the messages that open the conversation, and metadata. The default returns the row's own messages."""
        return prompt, {}

    def step(self, action: str) -> StepOutput | BaseTextEnvStepOutput:
        """Answer the model's text. An exception raised here fails this episode only.

        The text includes the model's reasoning with its markers; `skyrl_train.final_answer` returns the answer in it.
        Where the prompt opened a block of reasoning, the text begins with that marker ("<think>").
        """
        raise NotImplementedError(f"{type(self).__name__} does not define step")

    def close(self) -> None:
        """Release the episode's resources. Called once, also after a failure."""


class BaseTextEnv(TextEnv):
    """SkyRL-Gym's base class: a TextEnv with turn counters and tool groups."""

    def __init__(self, env_config: Mapping[str, Any] | None = None, extras: Mapping[str, Any] | None = None):
        super().__init__(env_config, extras)
        self.turns = 0
        self.max_turns = 1
        self.init_tool_groups([])

    def init_tool_groups(self, tool_groups: list[Any]) -> None:
        """Set the tool groups, each with SkyRL-Gym's interface.

        That is `name`, `get_tool_to_group_mapping()` and `execute_tool(tool, *arguments)`.
        """
        self.tool_groups = tool_groups
        self.tool_to_toolgroup = {
            tool: name for group in tool_groups for tool, name in group.get_tool_to_group_mapping().items()
        }

    def _execute_tool(self, tool_group_name: str, tool_name: str, tool_input: Any) -> Any:
        for group in self.tool_groups:
            if group.name == tool_group_name:
                return group.execute_tool(tool_name, *tool_input)
        known = [group.name for group in self.tool_groups]
        raise ValueError(f"tool group {tool_group_name!r} is not one of {known}")


def validate_step_output(output: Any) -> StepOutput:
    """Convert the value that an environment's `step` returned into a StepOutput.

    The reward must be one number from -MAX_REWARD to MAX_REWARD; numpy and torch scalars count as numbers, booleans as
    0 and 1. Raises EnvironmentFailure "bad_reward" or "bad_step_output".
    """
    if isinstance(output, StepOutput):
        fields = {name: getattr(output, name) for name in StepOutput.__slots__}
    elif isinstance(output, Mapping):
        fields = dict(output)
    else:
        raise EnvironmentFailure(
            "bad_step_output", f"step returned {type(output).__name__}, not a StepOutput or a dict"
        )
    reward = _validate_reward(fields.get("reward"))
    missing = [name for name in ("observations", "done") if fields.get(name) is None]
    if missing:
        raise EnvironmentFailure("bad_step_output", f"step returned no {' and no '.join(missing)}")
    done = _scalar(fields["done"])
    if not isinstance(done, int):
        raise EnvironmentFailure("bad_step_output", f"done is {_describe_value(done)}, not a bool")
    metadata = fields.get("metadata") or {}
    if not isinstance(metadata, Mapping):
        raise EnvironmentFailure("bad_step_output", f"metadata is {_describe_value(metadata)}, not a dict")
    action = fields.get("postprocessed_action")
    if not isinstance(action, str | None):
        raise EnvironmentFailure("bad_step_output", f"postprocessed_action is {_describe_value(action)}, not a string")
    observations, calls = validate_messages(fields["observations"]), _to_tool_call_records(fields.get("tool_calls"))
    return StepOutput(observations, reward, bool(done), dict(metadata), action, calls)


def validate_messages(messages: Any) -> list[Message]:
    """Return messages with content as text, of a list of {"role": str, "content": text or text parts}.

    Raises EnvironmentFailure("bad_step_output").
    """
    if not isinstance(messages, list | tuple):
        raise EnvironmentFailure("bad_step_output", f"messages are {_describe_value(messages)}, not a list")
    for message in messages:
        named = isinstance(message, Mapping) and isinstance(message.get("role"), str) and "content" in message
        if not named or not isinstance(message["content"], str | list | None):
            raise EnvironmentFailure(
                "bad_step_output", f'{_describe_value(message)} is not {{"role": "...", "content": "..."}}'
            )
    try:
        return [normalize_message(dict(message), index) for index, message in enumerate(messages)]
    except DataError as error:
        raise EnvironmentFailure("bad_step_output", str(error)) from error


def _to_tool_call_records(calls: Any) -> list[ToolCallRecord]:
    """Those of them that people can be shown, also in OpenAI's form: nothing that is learnt depends on them."""
    found = []
    for one in calls if isinstance(calls, list | tuple) else ():
        inner = one.get("function", one) if isinstance(one, Mapping) else None
        if isinstance(inner, Mapping) and isinstance(name := inner.get("name"), str):
            arguments, error = inner.get("arguments", ""), inner.get("error")
            text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False, default=str)
            found.append({"name": name, "arguments": text} | ({"error": error} if isinstance(error, str) else {}))
    return found


def _validate_reward(reward: Any) -> float:
    try:
        number = _scalar(reward)
        value = float(number) if isinstance(number, int | float) else math.nan
    except (ValueError, TypeError, OverflowError, RuntimeError):
        value = math.nan
    if not abs(value) <= MAX_REWARD:  # NaN is not
        raise EnvironmentFailure(
            "bad_reward", f"reward is {_describe_value(reward)}, not one number of at most {MAX_REWARD:g}"
        )
    return value


def _scalar(value: Any) -> Any:
    """Convert numpy and torch scalars to Python's."""
    return value.item() if hasattr(value, "item") else value


def _describe_value(value: Any) -> str:
    return f"{type(value).__name__} {value!r:.80}"
