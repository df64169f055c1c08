"""Environments of the `verifiers` library: their datasets, their messages, and the rewards of their rubrics.

Only this module imports the library. The environment's own method `rollout` runs here. When it asks its client for a
completion, it gets the text that the trainer's engine sampled.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from skyrl_train.data.messages import Message
from skyrl_train.environments.base import StepOutput, TextEnv
from skyrl_train.errors import ConfigError, EnvironmentFailure

SECTION = "environment.skyrl_gym.verifiers"
COLUMNS = ("answer", "info", "task", "example_id")
"""Columns of the library's rows besides the prompt."""


class VerifiersEnv(TextEnv):
    """An environment of the library. The reward at the end of an episode is the weighted sum of its rubric.

    The parts of the rubric are the episode's metrics. Single-turn and multi-turn environments are supported if the
    model writes text. If the library's environment uses the API's native tool calls or changes earlier messages, the
    episode fails with EnvironmentFailure ("tools", "rewrites_history"). An error of the library fails the episode with
    the error's class name as the kind. If `generator.max_turns` ends an episode first, it is scored as it is.

    Args:
        env_config: The section `environment.skyrl_gym.verifiers`.
        extras: The other columns of the row.

    Raises:
        ValueError: The row's column `verifiers` is missing or has another form.
        ConfigError: The library or the environment cannot be loaded.
    """

    def __init__(self, env_config: Mapping[str, Any] | None = None, extras: Mapping[str, Any] | None = None):
        super().__init__(env_config, extras)
        self.input = self.parse_row(self.extras)
        self.max_turns = int(self.extras.get("max_turns") or 0)
        self.turns = 0
        self._environment = _environment(self.env_config)
        self._runner = asyncio.Runner()

    @classmethod
    def parse_row(cls, extras: Mapping[str, Any]) -> dict[str, Any]:
        """Return the environment's input from the row, without nulls.

        Raises:
            ValueError: The row's column `verifiers` is missing or has another form.
        """
        row = extras.get("verifiers")
        if not isinstance(row, Mapping) or not isinstance(row.get("input"), str):
            raise ValueError('The row needs a column verifiers={"input": "{...}"}: see examples/verifiers.')
        columns = json.loads(row["input"])
        return {name: columns[name] for name in COLUMNS if columns.get(name) is not None}

    @classmethod
    def check(cls, env_config: Mapping[str, Any]) -> None:
        _library()
        _environment_id(env_config)

    def init(self, prompt: list[Message]) -> tuple[list[Message], dict[str, Any]]:
        """Return the messages that the verifiers environment shows before the model's first turn, and no metadata.

        Raises:
            EnvironmentFailure: The environment ended before the first turn (kind "no_turn"), or raised an error.
        """
        self._client = _client()
        self._shown: list[Message] = []
        messages = self._runner.run(self._begin({"example_id": 0, **self.input, "prompt": prompt}))
        if messages is None:
            raise EnvironmentFailure("no_turn", "the environment ended before the model's first turn")
        self._shown = messages
        return messages, {}

    def step(self, action: str) -> StepOutput:
        """Pass the model's answer to the verifiers environment, and return its next messages, or at the end the score.

        Raises:
            EnvironmentFailure: The environment changed messages that it had already shown (kind "rewrites_history"), or
                raised an error.
        """
        self.turns += 1
        messages = self._runner.run(self._answer(action))
        if messages is not None and self.turns == self.max_turns:
            messages = self._runner.run(self._answer(None))
        if messages is None:
            return self._runner.run(self._score())
        known = [*self._shown, {"role": "assistant", "content": action}]
        if messages[: len(known)] != known:
            raise EnvironmentFailure("rewrites_history", "the environment changed messages that were already shown")
        self._shown = messages
        return StepOutput(messages[len(known) :], 0.0, done=False)

    def close(self) -> None:
        self._runner.close()

    async def _begin(self, row: dict[str, Any]) -> list[Message] | None:
        self._rollout = asyncio.ensure_future(self._environment.rollout(row, self._client, "policy", {}))
        return await self._next_prompt()

    async def _answer(self, text: str | None) -> list[Message] | None:
        self._client.answers.put_nowait(text)
        return await self._next_prompt()

    async def _next_prompt(self) -> list[Message] | None:
        """Return the model's next prompt, or None if the rollout is over."""
        prompt = asyncio.ensure_future(self._client.prompts.get())
        await asyncio.wait({prompt, self._rollout}, return_when=asyncio.FIRST_COMPLETED)
        if prompt.done():
            return prompt.result()
        prompt.cancel()
        state = self._rollout.result()
        if state.get("error") is not None:
            raise EnvironmentFailure(type(state["error"]).__name__, str(state["error"]))
        return None

    async def _score(self) -> StepOutput:
        state = self._rollout.result()
        await self._environment.rubric.score_rollout(state)
        return StepOutput([], state["reward"], done=True, metadata=dict(state.get("metrics") or {}))


def make_rows(env_config: Mapping[str, Any], split: str) -> Iterator[dict[str, Any]]:
    """Yield the dataset of a `verifiers` environment as rows in SkyRL's format.

    Args:
        env_config: Mapping with `env_id` and, optionally, `env_args` of the environment.
        split: "train" for its training dataset, or "validation" for its evaluation dataset.

    Raises:
        ConfigError: The environment cannot be loaded or has no such dataset.
    """
    environment = _environment(env_config)
    try:
        dataset = environment.get_dataset() if split == "train" else environment.get_eval_dataset()
    except ValueError as error:
        raise ConfigError(f"{SECTION}.env_id={env_config['env_id']!r} has no {split} dataset: {error}") from error
    for index, row in enumerate(dataset):
        columns = {name: row[name] for name in COLUMNS if row.get(name) is not None}
        yield {
            "data_source": f"verifiers/{env_config['env_id']}",
            "prompt": [_to_message(message) for message in row["prompt"]],
            "env_class": "verifiers",
            "verifiers": {"input": json.dumps(columns, default=str)},
            "extra_info": {"split": split, "index": index},
        }


def _to_message(message: Any) -> Message:
    """Return the role and content of a message of the library; a content of None becomes ""."""
    fields = message if isinstance(message, Mapping) else message.model_dump()
    return {"role": fields["role"], "content": fields.get("content") or ""}


def _environment_id(env_config: Mapping[str, Any]) -> str:
    name = env_config.get("env_id")
    if not name:
        raise ConfigError(
            f"{SECTION}.env_id={name!r} is not set; set it to an installed environment of the verifiers library."
        )
    return name


def _environment(env_config: Mapping[str, Any]) -> Any:
    return _load_environment(_environment_id(env_config), json.dumps(dict(env_config.get("env_args") or {})))


@cache
def _load_environment(name: str, arguments: str) -> Any:
    """Load an environment once per process, which is safe because environments hold no state of an episode."""
    try:
        environment = _library().load_environment(name, **json.loads(arguments))
    except (ValueError, TypeError, RuntimeError, AttributeError) as error:
        raise ConfigError(f"{SECTION}.env_id={name!r} cannot be loaded with env_args={arguments}: {error}") from error
    if environment.rubric.has_group_rewards:
        raise ConfigError(
            f"{SECTION}.env_id={name!r} has a rubric that scores groups of rollouts together; choose an environment "
            "whose rubric scores every episode separately."
        )
    return environment


def _client() -> Any:
    """Return a client of the library that takes its completions from the queue `answers`; None ends the rollout."""
    vf: Any = _library()

    class Answers(vf.Client):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__(None)
            self.prompts: asyncio.Queue[list[Message]] = asyncio.Queue()
            self.answers: asyncio.Queue[str | None] = asyncio.Queue()

        async def get_response(self, prompt: Any, model: str, *args: Any, tools: Any = None, **kwargs: Any) -> Any:
            if tools:
                raise EnvironmentFailure(
                    "tools", "the environment uses native tool calls of the API, which are not supported"
                )
            self.prompts.put_nowait([_to_message(message) for message in prompt])
            text = await self.answers.get()
            if text is None:
                raise vf.OverlongPromptError("generator.max_turns is reached")
            message = vf.types.ResponseMessage(content=text, finish_reason="stop", is_truncated=False)
            return vf.types.Response(id="0", created=int(time.time()), model=model, message=message)

    # The abstract methods belong to a server's protocol; only `get_response` is called.
    Answers.__abstractmethods__ = frozenset()
    return Answers()


@cache
def _library() -> Any:
    try:
        import verifiers
        import verifiers.types

        _ = verifiers.load_environment  # 0.2 removed it
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"The environment 'verifiers' needs the library of the same name, below version 0.2 ({error}); "
            "install it: uv pip install 'verifiers>=0.1.14,<0.2'."
        ) from error
    return verifiers
