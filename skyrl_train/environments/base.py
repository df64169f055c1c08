"""The environment interface. An environment opens a conversation, answers the model's texts and rewards them.

Environments are plain synchronous Python without torch. The driver never calls an environment directly:
`environments/pool.py` runs environments in processes that it can kill.
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
"""Failure kind of an episode whose row is found to be unusable only when the episode starts."""
MAX_REWARD = 1e15
"""Maximum magnitude of a reward. Advantages use float32, in which the square of a much larger reward is infinite."""


class AttrDict(dict[str, Any]):
    """A mapping whose items can also be read as attributes, as in an OmegaConf node: `env_config.search_url`.

    Nested mappings are returned as AttrDict. Reading a missing attribute raises AttributeError, which lists the keys.
    """

    def __getattr__(self, name: str) -> Any:
        try:
            value = self[name]
        except KeyError:
            raise AttributeError(
                f"this environment's settings have no {name!r}; they have {sorted(self)}. "
                f"Set it with environment.skyrl_gym.own.ENV.{name}=VALUE, where ENV is the environment's name."
            ) from None
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
    """Values that JSON can represent. Numbers become metrics."""
    postprocessed_action: str | None = None
    """Accepted from SkyRL-Gym environments but ignored: training uses the tokens exactly as they were sampled."""
    tool_calls: list[ToolCallRecord] = field(default_factory=list)
    """Tool calls that were parsed from the model's text, for the saved rollouts. The model never sees this list."""


class BaseTextEnvStepOutput(TypedDict):
    """SkyRL-Gym's dict form of `StepOutput`. `step` may return either."""

    observations: list[Message]
    reward: float
    done: bool
    metadata: dict[str, Any]
    postprocessed_action: NotRequired[str | None]


class TextEnv:
    """The environment of one episode. Subclasses override `step`, and `init` or `close` if needed.

    Args:
        env_config: This environment's section of `environment.skyrl_gym`.
        extras: The other columns of the dataset row. A rule-based reward, for example, reads
            `extras["reward_spec"]["ground_truth"]`.
    """

    replayable: bool = True
    """True if an episode may be replayed in another process after its process was killed.

    A replay calls the constructor, `init` and `step` again with the recorded texts. Set this to False if a replay would
    repeat side effects. The episode then fails with the kind "environment_died"."""

    def __init__(self, env_config: Mapping[str, Any] | None = None, extras: Mapping[str, Any] | None = None):
        self.env_config = AttrDict(env_config or {})
        self.extras = dict(extras or {})

    @classmethod
    def check(cls, env_config: Mapping[str, Any]) -> None:
        """Check the settings and this machine. The default checks nothing.

        Called once before the engines start, if any row uses this environment.

        Raises:
            ConfigError: The settings are invalid, or this machine lacks something that they need.
        """

    @classmethod
    def parse_row(cls, extras: Mapping[str, Any]) -> Any:
        """Return the data that an episode needs from its row, such as the ground truth. The default returns None.

        The run calls this for every row before the engines start, to reject unusable rows, and discards the result.
        Constructors of the built-in environments call it again and keep the result; your own constructor may do the
        same.

        Args:
            extras: Columns of the row other than the prompt.

        Raises:
            ValueError: The row is unusable. The run stops with a DataError that names the row and this message.
        """

    @classmethod
    def check_rows(cls, rows: Iterable[tuple[str, Mapping[str, Any]]]) -> None:
        """Check that `parse_row` accepts every row.

        Args:
            rows: Pairs of a row's location, such as "file, row N", and its extras.

        Raises:
            DataError: `parse_row` raised an exception for a row. The message names the row's location.
        """
        for location, extras in rows:
            try:
                cls.parse_row(extras)
            except Exception as error:
                cause = error if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
                raise DataError(f"{location}: {cause}; correct the row or remove it.") from error

    def init(self, prompt: list[Message]) -> tuple[list[Message], dict[str, Any]]:
        """Return the messages that open the conversation, and metadata.

        The default returns `prompt`, which contains the row's messages, and no metadata.
        """
        return prompt, {}

    def step(self, action: str) -> StepOutput | BaseTextEnvStepOutput:
        """Answer and reward one text of the model. An exception raised here fails this episode only.

        Args:
            action: The model's text, including its reasoning and the reasoning markers. It begins with the opening
                marker ("<think>") if the prompt opened a reasoning block. `skyrl_train.final_answer` extracts the
                answer without the reasoning.

        Raises:
            NotImplementedError: The subclass does not define `step`.
        """
        raise NotImplementedError(
            f"{type(self).__name__} does not define step. Define step(action), which returns a StepOutput."
        )

    def close(self) -> None:
        """Release the episode's resources. Called once, even after a failure."""


class BaseTextEnv(TextEnv):
    """SkyRL-Gym's base class, which is a TextEnv with a turn counter and tool groups."""

    def __init__(self, env_config: Mapping[str, Any] | None = None, extras: Mapping[str, Any] | None = None):
        super().__init__(env_config, extras)
        self.turns = 0
        self.max_turns = 1
        self.init_tool_groups([])

    def init_tool_groups(self, tool_groups: list[Any]) -> None:
        """Set the tool groups of this environment.

        Args:
            tool_groups: Objects with SkyRL-Gym's interface: `name`, `get_tool_to_group_mapping()` and
                `execute_tool(tool, *arguments)`.
        """
        self.tool_groups = tool_groups
        self.tool_to_toolgroup = {
            tool: name for group in tool_groups for tool, name in group.get_tool_to_group_mapping().items()
        }

    def _execute_tool(self, tool_group_name: str, tool_name: str, tool_input: Any) -> Any:
        for group in self.tool_groups:
            if group.name == tool_group_name:
                return group.execute_tool(tool_name, *tool_input)
        names = [group.name for group in self.tool_groups]
        raise ValueError(f"tool group {tool_group_name!r} is not one of {names}")


def validate_step_output(output: Any) -> StepOutput:
    """Validate the value that an environment's `step` returned, and convert it into a StepOutput.

    Args:
        output: A StepOutput or a mapping with its fields. The reward must be a single number from -MAX_REWARD to
            MAX_REWARD. Numpy and torch scalars count as numbers, and booleans count as 0 and 1.

    Raises:
        EnvironmentFailure: The reward is invalid (kind "bad_reward"), or any other part of the output is invalid
            (kind "bad_step_output").
    """
    if isinstance(output, StepOutput):
        fields = {name: getattr(output, name) for name in StepOutput.__slots__}
    elif isinstance(output, Mapping):
        fields = dict(output)
    else:
        raise EnvironmentFailure(
            "bad_step_output", f"step returned {type(output).__name__}, not a StepOutput or a dict"
        )
    reward = validate_reward(fields.get("reward"))
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
    """Return normalized copies of messages, in which content is plain text.

    Args:
        messages: A list or tuple of mappings {"role": str, "content": text, text parts or None}.

    Raises:
        EnvironmentFailure: The messages do not have this form (kind "bad_step_output").
    """
    if not isinstance(messages, list | tuple):
        raise EnvironmentFailure("bad_step_output", f"messages are {_describe_value(messages)}, not a list")
    for message in messages:
        is_message = isinstance(message, Mapping) and isinstance(message.get("role"), str) and "content" in message
        if not is_message or not isinstance(message["content"], str | list | None):
            raise EnvironmentFailure(
                "bad_step_output", f'{_describe_value(message)} is not {{"role": "...", "content": "..."}}'
            )
    try:
        return [normalize_message(dict(message), index) for index, message in enumerate(messages)]
    except DataError as error:
        raise EnvironmentFailure("bad_step_output", str(error)) from error


def _to_tool_call_records(calls: Any) -> list[ToolCallRecord]:
    """Return the tool calls that are well-formed enough to display.

    Accepts this package's form and OpenAI's. Malformed calls are dropped, because training does not read any of them.
    """
    records: list[ToolCallRecord] = []
    for call in calls if isinstance(calls, list | tuple) else ():
        inner = call.get("function", call) if isinstance(call, Mapping) else None
        if isinstance(inner, Mapping) and isinstance(name := inner.get("name"), str):
            arguments, error = inner.get("arguments", ""), inner.get("error")
            text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False, default=str)
            records.append({"name": name, "arguments": text, **({"error": error} if isinstance(error, str) else {})})
    return records


def validate_reward(reward: Any, name: str = "reward") -> float:
    """Return a reward as a float.

    Args:
        reward: A single number from -MAX_REWARD to MAX_REWARD. Numpy and torch scalars and booleans count as numbers.
        name: Name of the reward in the error message.

    Raises:
        EnvironmentFailure: The reward is invalid (kind "bad_reward").
    """
    try:
        number = _scalar(reward)
        value = float(number) if isinstance(number, int | float) else math.nan
    except (ValueError, TypeError, OverflowError, RuntimeError):
        value = math.nan
    if not abs(value) <= MAX_REWARD:  # also true for NaN
        raise EnvironmentFailure(
            "bad_reward", f"{name} is {_describe_value(reward)}, not a single number of at most {MAX_REWARD:g}"
        )
    return value


def _scalar(value: Any) -> Any:
    """Convert numpy and torch scalars to Python scalars."""
    return value.item() if hasattr(value, "item") else value


def _describe_value(value: Any) -> str:
    return f"{type(value).__name__} {value!r:.80}"
