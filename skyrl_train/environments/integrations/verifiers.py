"""Environments of the `verifiers` library: their datasets, their answers, and their rubrics' rewards.

No other module imports the library. An environment's own `rollout` runs here; when it asks its client for a completion,
it gets the text that the trainer sampled.
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
"""Columns of the library's rows, besides the prompt."""


class VerifiersEnv(TextEnv):
    """One episode. Its reward, given at the end, is the weighted sum of the rubric, whose parts are the metrics.

    Supports single-turn and multi-turn environments in which the model writes text. If an environment needs native tool
    calls of the API, or changes earlier messages, its episodes fail ("tools", "rewrites_history"). An error of the
    library fails the episode under its class name. If `generator.max_turns` ends an episode first, it is scored as is.
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
        """Return the row's input, without nulls."""
        row = extras.get("verifiers")
        if not isinstance(row, Mapping) or not isinstance(row.get("input"), str):
            raise ValueError('the row needs verifiers={"input": "{...}"}: see examples/verifiers')
        given = json.loads(row["input"])
        return {name: given[name] for name in COLUMNS if given.get(name) is not None}

    @classmethod
    def check(cls, env_config: Mapping[str, Any]) -> None:
        _library()
        _named(env_config)

    def init(self, prompt: list[Message]) -> tuple[list[Message], dict[str, Any]]:
        self._client = _client()
        self._shown: list[Message] = []
        messages = self._runner.run(self._begin({"example_id": 0, **self.input, "prompt": prompt}))
        if messages is None:
            raise EnvironmentFailure("no_turn", "the environment ended before the model's first turn")
        self._shown = messages
        return messages, {}

    def step(self, action: str) -> StepOutput:
        self.turns += 1
        messages = self._runner.run(self._answer(action))
        if messages is not None and self.turns == self.max_turns:
            messages = self._runner.run(self._answer(None))
        if messages is None:
            return self._runner.run(self._scored())
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
        """The model's next prompt, or None if the rollout is over."""
        asked = asyncio.ensure_future(self._client.prompts.get())
        await asyncio.wait({asked, self._rollout}, return_when=asyncio.FIRST_COMPLETED)
        if asked.done():
            return asked.result()
        asked.cancel()
        state = self._rollout.result()
        if state.get("error") is not None:
            raise EnvironmentFailure(type(state["error"]).__name__, str(state["error"]))
        return None

    async def _scored(self) -> StepOutput:
        state = self._rollout.result()
        await self._environment.rubric.score_rollout(state)
        return StepOutput([], state["reward"], done=True, metadata=dict(state.get("metrics") or {}))


def make_rows(env_config: Mapping[str, Any], split: str) -> Iterator[dict[str, Any]]:
    """The environment's own dataset as rows in SkyRL's format; `split` is "train" or "validation" (its evaluation set).

    Raises ConfigError if the environment cannot be loaded or has no such dataset.
    """
    environment = _environment(env_config)
    try:
        dataset = environment.get_dataset() if split == "train" else environment.get_eval_dataset()
    except ValueError as error:
        raise ConfigError(f"{SECTION}.env_id={env_config['env_id']!r}: no {split} dataset: {error}") from error
    for index, row in enumerate(dataset):
        given = {name: row[name] for name in COLUMNS if row.get(name) is not None}
        yield {
            "data_source": f"verifiers/{env_config['env_id']}",
            "prompt": [_plain(message) for message in row["prompt"]],
            "env_class": "verifiers",
            "verifiers": {"input": json.dumps(given, default=str)},
            "extra_info": {"split": split, "index": index},
        }


def _plain(message: Any) -> Message:
    """The role and content of a message of the library; a content of None becomes ""."""
    fields = message if isinstance(message, Mapping) else message.model_dump()
    return {"role": fields["role"], "content": fields.get("content") or ""}


def _named(env_config: Mapping[str, Any]) -> str:
    name = env_config.get("env_id")
    if not name:
        raise ConfigError(f"{SECTION}.env_id={name!r}: name an installed environment of the verifiers library.")
    return name


def _environment(env_config: Mapping[str, Any]) -> Any:
    return _loaded(_named(env_config), json.dumps(dict(env_config.get("env_args") or {})))


@cache
def _loaded(name: str, arguments: str) -> Any:
    """Load an environment once per process: environments hold no state of an episode."""
    try:
        environment = _library().load_environment(name, **json.loads(arguments))
    except (ValueError, TypeError, RuntimeError, AttributeError) as error:
        raise ConfigError(f"{SECTION}.env_id={name!r} does not load with env_args={arguments}: {error}") from error
    if environment.rubric.has_group_rewards:
        raise ConfigError(f"{SECTION}.env_id={name!r}: its rubric scores groups together; only single episodes can be.")
    return environment


def _client() -> Any:
    """A client of the library whose completions are taken from the queue `answers`; None ends the rollout."""
    vf: Any = _library()

    class Answers(vf.Client):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__(None)
            self.prompts: asyncio.Queue[list[Message]] = asyncio.Queue()
            self.answers: asyncio.Queue[str | None] = asyncio.Queue()

        async def get_response(self, prompt: Any, model: str, *args: Any, tools: Any = None, **kwargs: Any) -> Any:
            if tools:
                raise EnvironmentFailure("tools", "the environment wants tool calls of the API's own kind")
            self.prompts.put_nowait([_plain(message) for message in prompt])
            text = await self.answers.get()
            if text is None:
                raise vf.OverlongPromptError("generator.max_turns is reached")
            message = vf.types.ResponseMessage(content=text, finish_reason="stop", is_truncated=False)
            return vf.types.Response(id="0", created=int(time.time()), model=model, message=message)

    Answers.__abstractmethods__ = frozenset()  # they belong to a server's protocol; only `get_response` is called
    return Answers()


@cache
def _library() -> Any:
    try:
        import verifiers
        import verifiers.types

        _ = verifiers.load_environment  # gone in 0.2
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"environment 'verifiers' needs the library of that name, below 0.2 ({error}); "
            "install it: uv pip install 'verifiers>=0.1.14,<0.2'."
        ) from error
    return verifiers
