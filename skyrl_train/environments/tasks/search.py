"""Questions answered with the help of searches, in SkyRL-Gym's and Search-R1's format (arXiv:2503.09516)."""

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
"""SkyRL-Gym's default, used if neither the row nor the run sets a number."""
ANSWER = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)
QUERY = re.compile(r"<search>((?:(?!<search>).)*?)</search>", re.DOTALL)
ARTICLES = re.compile(r"\b(a|an|the)\b")
PUNCTUATION = str.maketrans("", "", string.punctuation)
HINT = "Write <search>a query</search> to search, or <answer>the answer</answer> to answer."


def normalize_answer(text: str) -> str:
    """Remove case, punctuation, articles and repeated spaces: "The  Eiffel Tower!" -> "eiffel tower".

    From a text that consists only of these ("A", "+"), only case and repeated spaces are removed.
    """
    plain = ARTICLES.sub(" ", text.lower().translate(PUNCTUATION)).split()
    return " ".join(plain or text.lower().split())


def extract_answer(text: str) -> str | None:
    """The normalised answer in `text`; None if there is none, or if there are several that differ."""
    found = {normalize_answer(match[1]) for match in ANSWER.finditer(final_answer(text))}
    return found.pop() if len(found) == 1 else None


def score(text: str, targets: Sequence[str]) -> float:
    """Return 1.0 if the single answer in `text` exactly matches one of `targets` after normalisation, else 0.0."""
    answer = extract_answer(text)
    return float(bool(answer) and answer in [normalize_answer(target) for target in targets])


def _information(text: str, *calls: ToolCallRecord) -> StepOutput:
    observation = {"role": "user", "content": f"\n<information>{text}</information>\n"}
    return StepOutput([observation], 0.0, done=False, tool_calls=[*calls])


def parse_targets(extras: Mapping[str, Any]) -> list[str]:
    """The targets of a row: reward_spec.ground_truth, as {"target": [...]} (SkyRL's data), a list or one text.

    Raises ValueError for anything else.
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
    return SearchTool(**{name: env_config[name] for name in SEARCH_TOOL_SETTINGS if name in env_config})


def check_search(env_config: Mapping[str, Any]) -> None:
    """Raise ConfigError for an invalid address, or for a corpus that does not exist or cannot be searched here."""
    tool = make_search_tool(env_config)
    if tool.corpus is not None:
        bm25.check(tool.corpus)


def to_observation(result: ToolResult) -> str:
    """The model's observation. A search that failed through no fault of the model fails the episode.

    Such an episode would teach nothing.
    """
    if result.error not in (None, "tool_error", "bad_arguments", "unknown_tool"):
        raise EnvironmentFailure("search_failed", result.text)
    return result.text


class SearchEnv(TextEnv):
    """`<search>query</search>` is answered with `<information>...</information>`; `<answer>...</answer>` ends it.

    Reward: 1 in the turn with the answer if it exactly matches one of the row's targets after normalisation (case,
    punctuation, articles and spaces do not count), else 0. Only the final answer of that turn is read
    (`reasoning.final_answer`): drafts in reasoning are neither answers nor queries. Several answers that differ are no
    answer. An episode whose turns run out without an answer is worth 0. The format does not affect the reward.

    Settings: `config.environment.SearchConfig`. An episode whose search fails (see `observation_of`) is
    masked, as "search_failed".
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
