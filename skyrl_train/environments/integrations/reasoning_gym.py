"""Tasks of the `reasoning_gym` library: its generators make the rows, its scorers score the answers.

No other module imports the library.
"""

from __future__ import annotations

import json
import logging
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from skyrl_train.data.reasoning import final_answer
from skyrl_train.environments.base import StepOutput, TextEnv
from skyrl_train.errors import ConfigError

log = logging.getLogger(__name__)

SECTION = "environment.skyrl_gym.reasoning_gym"
INSTRUCTION = "Think step by step, then give the final answer, and nothing else, between <answer> and </answer>."
ANSWER = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)  # stops at the next <answer>: linear time
MAX_ANSWER_CHARS = 20_000
"""Maximum characters; a longer answer scores 0."""

ARITHMETIC = re.compile(r"(?!.*\*\s*\*)[0-9+\-*/().\s]*", re.DOTALL)
LITERAL = re.compile(r"[^(*@%<{]*")
SAFE_ANSWERS_FOR_EVAL = {
    "binary_matrix": LITERAL,
    "countdown": ARITHMETIC,
    "n_queens": LITERAL,
    "puzzle24": ARITHMETIC,
    "spiral_matrix": LITERAL,
    "string_insertion": LITERAL,
}
"""Datasets whose scorer passes the answer to `eval` -> pattern of the answers that are safe there: numbers and signs
without powers, or literals without calls and multiplications. Any other answer scores 0."""
UNSUPPORTED_DATASETS = {
    "bitwise_arithmetic": "its scorer runs what the row says as code",
    "composite": "it is a mixture; name its datasets",
    "intermediate_integration": "its scorer runs answers as code",
    "number_sorting": "its scorer runs what the row says as code",
    "polynomial_multiplication": "its scorer runs answers as code",
    "simple_integration": "its scorer runs answers as code",
}


class ReasoningGymEnv(TextEnv):
    """One turn. The reward is the library's own score, 0 to 1, of the text between <answer> and </answer>.

    It is 0 without such a block in the final answer (`reasoning.final_answer`), or with several that differ. With
    `partial_credit=false`, every score below 1 becomes 0: many scorers give some credit to a text that contains the
    answer. If the scorer raises, the answer is worth 0 rather than masked as a failure. A row names a dataset of the
    library that `environment.skyrl_gym.reasoning_gym.tasks` allows, and contains the entry that the scorer needs.
    """

    def __init__(self, env_config: Mapping[str, Any] | None = None, extras: Mapping[str, Any] | None = None):
        super().__init__(env_config, extras)
        self.task, self.entry = self.parse_row(self.extras)
        if self.task not in allowed_datasets(self.env_config.get("tasks")):
            raise ValueError(f"the row's task {self.task!r:.80} is not one that {SECTION}.tasks allows")

    @classmethod
    def parse_row(cls, extras: Mapping[str, Any]) -> tuple[str, Any]:
        """Return the name of the row's dataset in the library, and its entry."""
        given = extras.get("reasoning_gym")
        if not isinstance(given, Mapping) or not isinstance(given.get("entry"), str):
            raise ValueError(
                'the row needs reasoning_gym={"task": "...", "entry": "{...}"}: see examples/reasoning_gym'
            )
        return str(given.get("task")), decode(json.loads(given["entry"]))

    @classmethod
    def check(cls, env_config: Mapping[str, Any]) -> None:
        allowed_datasets(env_config.get("tasks"))

    def step(self, action: str) -> StepOutput:
        answers = {text.strip() for text in ANSWER.findall(final_answer(action))}
        score = self._score(answers.pop()) if len(answers) == 1 else 0.0
        if score < 1 and not self.env_config.get("partial_credit", True):
            score = 0.0
        return StepOutput([], score, done=True, metadata={self.task: score})

    def _score(self, answer: str) -> float:
        harmless = SAFE_ANSWERS_FOR_EVAL.get(self.task)
        if len(answer) > MAX_ANSWER_CHARS or (harmless is not None and not harmless.fullmatch(answer)):
            return 0.0
        scorer = _scorer(self.task)
        try:
            return float(scorer.score_answer(answer, self.entry))
        except Exception as error:  # caused by the model's text: the row's own answer was scored when the row was made
            log.debug("%s cannot score %.200r: %r", self.task, answer, error)
            return 0.0


def allowed_datasets(tasks: Sequence[str] | None) -> frozenset[str]:
    """The datasets that rows may name. Raises ConfigError for one that the library lacks or that is refused."""
    known = _library().factory.DATASETS.keys()
    for task in tasks or ():
        if task in UNSUPPORTED_DATASETS:
            raise ConfigError(f"{SECTION}.tasks: {task!r} cannot be used: {UNSUPPORTED_DATASETS[task]}.")
        if task not in known:
            raise ConfigError(f"{SECTION}.tasks: {task!r} is not a dataset of reasoning_gym; known: {sorted(known)}.")
    return frozenset(known - UNSUPPORTED_DATASETS.keys() if tasks is None else tasks)


def make_rows(task: str, count: int, seed: int, settings: Mapping[str, Any] | None = None) -> Iterator[dict[str, Any]]:
    """Generate `count` rows in SkyRL's format; equal arguments (and library versions) give equal rows.

    Args:
        settings: Settings of the library's dataset, e.g. {"max_terms": 3} for chain_sum.

    Raises ConfigError for arguments that the library rejects, or for an entry that a row cannot hold.
    """
    allowed_datasets([task])
    try:
        dataset = _library().create_dataset(task, seed=seed, size=count, **(settings or {}))
    except (AssertionError, TypeError, ValueError) as error:
        raise ConfigError(f"reasoning_gym: {task} does not take {dict(settings or {})}: {error}") from error
    for index in range(count):
        entry = dataset[index]
        text = json.dumps(encode(entry))
        answer = entry["answer"]
        own = 0.0 if answer is None else dataset.score_answer(answer, entry)
        if answer is not None and _scorer(task).score_answer(answer, decode(json.loads(text))) != own:
            raise ConfigError(f"reasoning_gym: an entry of {task} scores otherwise out of a row; leave {task} out.")
        yield {
            "data_source": f"reasoning_gym/{task}",
            "prompt": [{"role": "user", "content": f"{entry['question']}\n\n{INSTRUCTION}"}],
            "env_class": "reasoning_gym",
            "reward_spec": {"method": "reasoning_gym", "ground_truth": answer},
            "reasoning_gym": {"task": task, "entry": text},
            "extra_info": {"index": index, "seed": seed},
        }


def encode(value: Any) -> Any:
    """Encode as JSON, preserving tuples and non-string keys; values of other types become text."""
    if isinstance(value, tuple):
        return {"__tuple__": [encode(item) for item in value]}
    if isinstance(value, list):
        return [encode(item) for item in value]
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value):
            return {key: encode(item) for key, item in value.items()}
        return {"__pairs__": [[encode(key), encode(item)] for key, item in value.items()]}
    if hasattr(value, "tolist"):
        return encode(value.tolist())
    return value if isinstance(value, str | int | float | None) else str(value)


def decode(value: Any) -> Any:
    """The inverse of `encode`."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"__tuple__"}:
        return tuple(decode(item) for item in value["__tuple__"])
    if value.keys() == {"__pairs__"}:
        return {decode(key): decode(item) for key, item in value["__pairs__"]}
    return {key: decode(item) for key, item in value.items()}


@cache
def _scorer(task: str) -> Any:
    return _library().create_dataset(task, seed=0, size=1)


@cache
def _library() -> Any:
    """Import the library, which takes some seconds: it loads all of its hundred generators."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # compiling its dependencies emits syntax warnings
            import reasoning_gym
            import reasoning_gym.factory
    except ImportError as error:
        raise ConfigError(
            f"environment 'reasoning_gym' needs the library of that name ({error}); "
            "install it: uv sync --extra reasoning_gym."
        ) from error
    return reasoning_gym
