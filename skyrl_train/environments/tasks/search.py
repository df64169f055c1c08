"""Questions that the model answers with the help of searches (Search-R1, arXiv:2503.09516), as in SkyRL-Gym."""

from __future__ import annotations

import re
import string
from collections.abc import Mapping, Sequence
from typing import Any

from skyrl_train.data.messages import ToolCallRecord
from skyrl_train.data.reasoning import final_answer
from skyrl_train.environments.base import StepOutput, TextEnv
from skyrl_train.environments.tools import bm25
from skyrl_train.environments.tools.base import ToolBox, ToolResult, tool_call_record
from skyrl_train.environments.tools.search import SearchTool
from skyrl_train.errors import EnvironmentFailure

SEARCH_TOOL_SETTINGS = ("search_url", "topk", "timeout", "log_requests", "corpus")
DEFAULT_MAX_TURNS = 2
"""SkyRL-Gym's default, which is used if neither the row nor the run sets a number."""
ANSWER = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)
QUERY = re.compile(r"<search>((?:(?!<search>).)*?)</search>", re.DOTALL)
ARTICLES = re.compile(r"\b(a|an|the)\b")
PUNCTUATION = str.maketrans("", "", string.punctuation)
HINT = "Write <search>a query</search> to search, or <answer>the answer</answer> to answer."


def normalize_answer(text: str) -> str:
    """Return text in lower case without punctuation, articles and repeated spaces.

    "The  Eiffel Tower!" becomes "eiffel tower". If nothing else would be left, as for "A" or "+", punctuation and
    articles are kept.
    """
    plain = ARTICLES.sub(" ", text.lower().translate(PUNCTUATION)).split()
    return " ".join(plain or text.lower().split())


def extract_answer(text: str) -> str | None:
    """Return the normalized <answer> in a response, or None if there is no answer or if answers differ."""
    answers = {normalize_answer(match[1]) for match in ANSWER.finditer(final_answer(text))}
    return answers.pop() if len(answers) == 1 else None


def score(text: str, targets: Sequence[str]) -> float:
    """Return 1.0 if the answer in `text` equals one of `targets` after normalization, else 0.0."""
    answer = extract_answer(text)
    return float(bool(answer) and answer in [normalize_answer(target) for target in targets])


def _information(text: str, *calls: ToolCallRecord) -> StepOutput:
    observation = {"role": "user", "content": f"\n<information>{text}</information>\n"}
    return StepOutput([observation], 0.0, done=False, tool_calls=[*calls])


def parse_targets(extras: Mapping[str, Any]) -> list[str]:
    """Return the accepted answers of a row from its reward_spec.ground_truth.

    Args:
        extras: Columns of the row. The ground truth is {"target": [...]} as in SkyRL's data, a list, or one string.

    Raises:
        ValueError: The ground truth has another form, has no targets, or has a blank one.
    """
    reward_spec = extras.get("reward_spec")
    truth = reward_spec.get("ground_truth") if isinstance(reward_spec, Mapping) else None
    truth = truth.get("target") if isinstance(truth, Mapping) else truth
    targets = [truth] if isinstance(truth, str) else truth
    if (
        not isinstance(targets, list)
        or not targets
        or not all(isinstance(item, str) and item.strip() for item in targets)
    ):
        raise ValueError(
            'the row needs reward_spec={"method": "rule", "ground_truth": {"target": ["<answer>", ...]}}, strings that '
            f"are not empty, got {truth!r:.80}"
        )
    return targets


def make_search_tool(env_config: Mapping[str, Any]) -> SearchTool:
    """Return a search tool with those settings of an environment that concern searches."""
    return SearchTool(**{name: env_config[name] for name in SEARCH_TOOL_SETTINGS if name in env_config})


def check_search(env_config: Mapping[str, Any]) -> None:
    """Check the search settings of an environment.

    Raises:
        ConfigError: The URL of the search server is invalid, or the corpus does not exist or cannot be searched here.
    """
    tool = make_search_tool(env_config)
    if tool.corpus is not None:
        bm25.check(tool.corpus)


def to_observation(result: ToolResult) -> str:
    """Return the text of a search result that the model observes.

    Raises:
        EnvironmentFailure: The search failed through no fault of the model (kind "search_failed"). Training on such an
            episode would be useless.
    """
    if result.error not in (None, "tool_error", "bad_arguments", "unknown_tool"):
        raise EnvironmentFailure("search_failed", result.text)
    return result.text


class SearchEnv(TextEnv):
    """An environment in which the model may search before it answers.

    The environment answers `<search>query</search>` with `<information>...</information>`. `<answer>...</answer>` ends
    the episode. The reward is 1 if the answer equals one of the row's targets after normalization (case, punctuation,
    articles and spaces are ignored), else 0. Only the final answer of a turn is read (`reasoning.final_answer`), so
    drafts in reasoning are neither answers nor queries. Answers that differ get 0, and so does an episode that runs out
    of turns without an answer. The format does not affect the reward.

    The settings are those of `config.environment.SearchConfig`. An episode whose search fails (see `to_observation`) is
    masked with the kind "search_failed".
    """

    parse_row = staticmethod(parse_targets)

    def __init__(self, env_config: Mapping[str, Any] | None = None, extras: Mapping[str, Any] | None = None):
        super().__init__(env_config, extras)
        self.targets = self.parse_row(self.extras)
        self.max_turns = int(self.extras.get("max_turns") or DEFAULT_MAX_TURNS)
        self.turns = self.searches = 0
        self.toolbox = ToolBox([make_search_tool(self.env_config)])

    @classmethod
    def check(cls, env_config: Mapping[str, Any]) -> None:
        check_search(env_config)

    def step(self, action: str) -> StepOutput:
        self.turns += 1
        action = final_answer(action)
        answered = ANSWER.search(action) is not None
        if answered or self.turns >= self.max_turns:
            counts = {"searches": self.searches, "answered": answered}
            return StepOutput([], score(action, self.targets), done=True, metadata=counts)
        queries = QUERY.findall(action)
        if not queries:
            return _information(HINT)
        self.searches += 1
        arguments = {"query": queries[-1]}
        result = self.toolbox.call("search", arguments)
        return _information(to_observation(result), tool_call_record("search", arguments, result.error))

    def close(self) -> None:
        self.toolbox.close()
