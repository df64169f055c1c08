"""Questions that are answered after searching, in SkyRL-Gym's and Search-R1's format (arXiv:2503.09516)."""

from __future__ import annotations

import re
import string
from collections.abc import Mapping, Sequence
from typing import Any

from skyrl_train.environments.base import StepOutput, TextEnv
from skyrl_train.environments.tools import bm25
from skyrl_train.environments.tools.base import ToolBox, ToolResult
from skyrl_train.environments.tools.search import SearchTool
from skyrl_train.errors import EnvironmentFailure

SETTINGS = ("search_url", "topk", "timeout", "log_requests", "corpus")
DEFAULT_MAX_TURNS = 2
"""SkyRL-Gym's, where neither the row nor the run says."""
ANSWER = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)
QUERY = re.compile(r"<search>((?:(?!<search>).)*?)</search>", re.DOTALL)
ARTICLES = re.compile(r"\b(a|an|the)\b")
PUNCTUATION = str.maketrans("", "", string.punctuation)
HINT = "Write <search>a query</search> to search, or <answer>the answer</answer> to answer."


def normalised(text: str) -> str:
    """An answer without case, punctuation, articles and runs of spaces: "The  Eiffel Tower!" -> "eiffel tower".

    What is nothing else ("A", "+") is only without case and runs of spaces.
    """
    plain = ARTICLES.sub(" ", text.lower().translate(PUNCTUATION)).split()
    return " ".join(plain or text.lower().split())


def without_thinking(text: str) -> str:
    """What follows the last "</think>": drafts before it are neither answers nor queries."""
    return text.rpartition("</think>")[2]


def answer_of(text: str) -> str | None:
    """The normalised answer in `text`; None where there is none, and where there are several that differ."""
    found = {normalised(match[1]) for match in ANSWER.finditer(without_thinking(text))}
    return found.pop() if len(found) == 1 else None


def score(text: str, targets: Sequence[str]) -> float:
    """1.0 where the one answer in `text` is one of `targets`, by exact match after normalisation; else 0.0."""
    answer = answer_of(text)
    return float(bool(answer) and answer in [normalised(target) for target in targets])


def targets_of(extras: Mapping[str, Any]) -> list[str]:
    """reward_spec.ground_truth as SkyRL's data has it, {"target": [...]}, or one text or a list. Raises ValueError."""
    reward_spec = extras.get("reward_spec")
    truth = reward_spec.get("ground_truth") if isinstance(reward_spec, Mapping) else None
    truth = truth.get("target") if isinstance(truth, Mapping) else truth
    targets = [truth] if isinstance(truth, str) else truth
    if not isinstance(targets, list) or not targets or not all(isinstance(item, str) for item in targets):
        raise ValueError('the row needs reward_spec={"method": "rule", "ground_truth": {"target": ["<answer>", ...]}}')
    return targets


def search_tool(env_config: Mapping[str, Any]) -> SearchTool:
    return SearchTool(**{name: env_config[name] for name in SETTINGS if name in env_config})


def check_search(env_config: Mapping[str, Any]) -> None:
    """Raises ConfigError for an address that is none, and for a corpus that is not there or cannot be searched here."""
    tool = search_tool(env_config)
    if tool.corpus is not None:
        bm25.check(tool.corpus)


def told(result: ToolResult) -> str:
    """What the model is told. A search that failed without its doing fails the episode: it would teach nothing."""
    if result.error not in (None, "tool_error", "bad_arguments", "unknown_tool"):
        raise EnvironmentFailure("search_failed", result.text)
    return result.text


class SearchEnv(TextEnv):
    """`<search>query</search>` is answered with `<information>...</information>`; `<answer>...</answer>` is the end.

    Reward: 1 in the turn with the answer where it matches one of the row's targets exactly after normalisation (case,
    punctuation, articles and spaces do not count), else 0. Only the model's own text of that turn is read, from the
    last "</think>" on. Several answers that differ are no answer. An episode whose turns run out without an answer is
    worth 0. Nothing is given or taken for the format.

    Settings: `config.environment.SearchConfig`. An episode whose search fails (see `told`) is masked, "search_failed".
    """

    def __init__(self, env_config: Mapping[str, Any] | None = None, extras: Mapping[str, Any] | None = None):
        super().__init__(env_config, extras)
        self.targets = targets_of(self.extras)
        self.max_turns = int(self.extras.get("max_turns") or DEFAULT_MAX_TURNS)
        self.turns = self.searches = 0
        self.box = ToolBox([search_tool(self.env_config)])

    @classmethod
    def check(cls, env_config: Mapping[str, Any]) -> None:
        check_search(env_config)

    def step(self, action: str) -> StepOutput:
        self.turns += 1
        action = without_thinking(action)
        answered = ANSWER.search(action) is not None
        if answered or self.turns >= self.max_turns:
            counts = {"searches": self.searches, "answered": answered}
            return StepOutput([], score(action, self.targets), done=True, metadata=counts)
        queries = QUERY.findall(action)
        information = self._search(queries[-1]) if queries else HINT
        return StepOutput(
            [{"role": "user", "content": f"\n<information>{information}</information>\n"}], 0.0, done=False
        )

    def _search(self, query: str) -> str:
        self.searches += 1
        return told(self.box.call("search", {"query": query}))

    def close(self) -> None:
        self.box.close()
