"""Tasks of the `reasoning_gym` library: its generators create the rows, and its scorers score the answers.

Only this module imports the library.
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
# A match stops at the next <answer>, which keeps the search linear in the length of the text.
ANSWER = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)
MAX_ANSWER_CHARS = 20_000
"""Maximum characters of an answer; a longer answer scores 0."""

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
"""Datasets whose scorer passes the answer to `eval`, with the pattern of the answers that are safe there: numbers and
operators without powers, or literals without calls and multiplications. Any other answer scores 0."""
UNSUPPORTED_DATASETS = {
    "bitwise_arithmetic": "its scorer runs what the row says as code",
    "composite": "it is a mixture; name its datasets",
    "intermediate_integration": "its scorer runs answers as code",
    "number_sorting": "its scorer runs what the row says as code",
    "polynomial_multiplication": "its scorer runs answers as code",
    "simple_integration": "its scorer runs answers as code",
}


class ReasoningGymEnv(TextEnv):
    """An environment with one turn, whose reward is the library's score of the text between <answer> and </answer>.

    The score is between 0 and 1. It is 0 if the final answer (`reasoning.final_answer`) has no such block, or several
    that differ. With `partial_credit=false`, every score below 1 becomes 0, because many scorers give some credit to a
    text that contains the answer. If the scorer raises, the reward is 0; the rollout does not count as failed.

    Args:
        env_config: The section `environment.skyrl_gym.reasoning_gym`.
        extras: The other columns of the row. `reasoning_gym` names a dataset of the library, and contains the entry
            that the scorer needs.

    Raises:
        ValueError: The row lacks this column, or the configuration does not allow its dataset.
        ConfigError: The library is not installed, or the configuration allows a dataset that cannot be used.
    """

    def __init__(self, env_config: Mapping[str, Any] | None = None, extras: Mapping[str, Any] | None = None):
        super().__init__(env_config, extras)
        self.task, self.entry = self.parse_row(self.extras)
        if self.task not in allowed_datasets(self.env_config.get("tasks")):
            raise ValueError(
                f"The row's task {self.task!r:.80} is not one that {SECTION}.tasks allows; "
                "allow it there or leave the row out."
            )

    @classmethod
    def parse_row(cls, extras: Mapping[str, Any]) -> tuple[str, Any]:
        """Return the name of the row's dataset in the library, and its decoded entry.

        Raises:
            ValueError: The row's column `reasoning_gym` is missing or has another form.
        """
        column = extras.get("reasoning_gym")
        if not isinstance(column, Mapping) or not isinstance(column.get("entry"), str):
            raise ValueError(
                'The row needs a column reasoning_gym={"task": "...", "entry": "{...}"}: see examples/reasoning_gym.'
            )
        return str(column.get("task")), decode(json.loads(column["entry"]))

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
        safe_pattern = SAFE_ANSWERS_FOR_EVAL.get(self.task)
        if len(answer) > MAX_ANSWER_CHARS or (safe_pattern is not None and not safe_pattern.fullmatch(answer)):
            return 0.0
        scorer = _scorer(self.task)
        try:
            return float(scorer.score_answer(answer, self.entry))
        except Exception as error:  # the model's text caused it: `make_rows` scored the row's own answer
            log.debug("%s cannot score %.200r: %r", self.task, answer, error)
            return 0.0


def allowed_datasets(tasks: Sequence[str] | None) -> frozenset[str]:
    """Return the datasets that rows may name.

    Args:
        tasks: The value of `environment.skyrl_gym.reasoning_gym.tasks`; None allows all supported datasets.

    Raises:
        ConfigError: A dataset does not exist or is not supported, or the library is not installed.
    """
    known = _library().factory.DATASETS.keys()
    for task in tasks or ():
        if task in UNSUPPORTED_DATASETS:
            raise ConfigError(f"{SECTION}.tasks: {task!r} cannot be used: {UNSUPPORTED_DATASETS[task]}.")
        if task not in known:
            raise ConfigError(f"{SECTION}.tasks: {task!r} is not a dataset of reasoning_gym; known: {sorted(known)}.")
    return frozenset(known - UNSUPPORTED_DATASETS.keys() if tasks is None else tasks)


def make_rows(task: str, count: int, seed: int, settings: Mapping[str, Any] | None = None) -> Iterator[dict[str, Any]]:
    """Generate rows in SkyRL's format. Equal arguments and library versions give equal rows.

    Args:
        task: Name of a dataset of the library.
        count: Number of rows.
        seed: Seed of the library's generator.
        settings: Settings of the library's dataset, e.g. {"max_terms": 3} for chain_sum; None for the library's
            defaults.

    Raises:
        ConfigError: The dataset is unknown or not supported, the library rejects the settings, or an entry gets
            another score after it was saved in a row.
    """
    allowed_datasets([task])
    try:
        dataset = _library().create_dataset(task, seed=seed, size=count, **(settings or {}))
    except (AssertionError, TypeError, ValueError) as error:
        raise ConfigError(
            f"reasoning_gym: {task} does not accept the settings {dict(settings or {})}: {error}"
        ) from error
    for index in range(count):
        entry = dataset[index]
        text = json.dumps(encode(entry))
        answer = entry["answer"]
        expected_score = 0.0 if answer is None else dataset.score_answer(answer, entry)
        if answer is not None and _scorer(task).score_answer(answer, decode(json.loads(text))) != expected_score:
            raise ConfigError(
                f"reasoning_gym: an entry of {task} gets another score after saving it in a row; leave {task} out."
            )
        yield {
            "data_source": f"reasoning_gym/{task}",
            "prompt": [{"role": "user", "content": f"{entry['question']}\n\n{INSTRUCTION}"}],
            "env_class": "reasoning_gym",
            "reward_spec": {"method": "reasoning_gym", "ground_truth": answer},
            "reasoning_gym": {"task": task, "entry": text},
            "extra_info": {"index": index, "seed": seed},
        }


def encode(value: Any) -> Any:
    """Return a value that JSON can represent and `decode` restores.

    Tuples and mappings with keys of other types than str are preserved; arrays become lists; values of other types
    become text.
    """
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
    """Return the value that `encode` encoded."""
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
    """Import the library, which takes several seconds because it loads all of its generators."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # compiling its dependencies emits syntax warnings
            import reasoning_gym
            import reasoning_gym.factory
    except ImportError as error:
        raise ConfigError(
            f"The environment 'reasoning_gym' needs the library of the same name ({error}); "
            "install it: uv sync --extra reasoning_gym."
        ) from error
    return reasoning_gym
