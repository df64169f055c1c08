"""Instruction following (IFEval, arXiv:2311.07911): one turn, scored by the instructions that it follows."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from skyrl_train.data.messages import Message
from skyrl_train.data.reasoning import final_answer
from skyrl_train.environments.base import StepOutput, TextEnv
from skyrl_train.environments.graders.instructions import INSTRUCTIONS, parse_instruction_kwargs
from skyrl_train.environments.graders.language_detection import detect_language

REWARDS = ("fraction", "all")


@dataclass(frozen=True, slots=True)
class IFEvalScores:
    """Which instructions a response follows, in the prompt's order: strictly, and loosely (see `score`)."""

    strict: tuple[bool, ...]
    loose: tuple[bool, ...]

    def metrics(self) -> dict[str, float]:
        """Accuracies of this response. The benchmark's instruction level weights prompts by their instructions."""
        return {
            "prompt_level_strict_acc": float(all(self.strict)),
            "inst_level_strict_acc": sum(self.strict) / len(self.strict),
            "prompt_level_loose_acc": float(all(self.loose)),
            "inst_level_loose_acc": sum(self.loose) / len(self.loose),
        }


def score(
    instructions: Sequence[str], kwargs: Sequence[Mapping[str, Any] | None], prompt: str, text: str
) -> IFEvalScores:
    """Check a response against a prompt's instructions, given the benchmark's ids and keyword arguments (null: unset).

    Only the final answer is checked (`reasoning.final_answer`): instructions do not apply to reasoning.

    An instruction is followed loosely if the response follows it after removing the first line, the last line, both or
    neither, with or without all asterisks. A blank response follows nothing. Raises ValueError for instructions that
    are not in the benchmark.
    """
    if not instructions or len(instructions) != len(kwargs):
        raise ValueError(
            f"{len(instructions)} instructions with {len(kwargs)} kwargs: at least one, and as many of both"
        )
    checks = [
        (INSTRUCTIONS[id], parse_instruction_kwargs(id, given, prompt))
        for id, given in zip(instructions, kwargs, strict=True)
    ]
    text = final_answer(text)
    variants = [variant for variant in _loose_variants(text) if variant.strip()]
    strict = tuple(bool(text.strip()) and check(text, **arguments) for check, arguments in checks)
    loose = tuple(
        followed or any(check(variant, **arguments) for variant in variants)
        for followed, (check, arguments) in zip(strict, checks, strict=True)
    )
    return IFEvalScores(strict, loose)


def _loose_variants(text: str) -> list[str]:
    lines = text.split("\n")
    cut = ["\n".join(part).strip() for part in (lines[1:], lines[:-1], lines[1:-1])]
    return [*cut, *(variant.replace("*", "") for variant in (text, *cut))]


class IFEvalEnv(TextEnv):
    """One prompt, one response. The reward is the share of the prompt's instructions that the response follows.

    Settings: `reward`: "fraction", or "all" (1.0 for a response that follows every instruction, else 0.0); `loose`:
    whether to count instructions that are followed loosely (see `score`). Both kinds of accuracy are metrics in any
    case. An empty response follows nothing; a truncated one is scored as it is.

    The row's ground truth is google/IFEval's {"instruction_id_list": [...], "kwargs": [...]}, as JSON or as columns.
    """

    @classmethod
    def parse_row(cls, extras: Mapping[str, Any]) -> tuple[list[str], list[Any]]:
        """Return the instructions' ids and their keyword arguments."""
        instructions, kwargs = _ground_truth(extras)
        for id, given in zip(instructions, kwargs, strict=True):
            parse_instruction_kwargs(id, given, "the request")
        return instructions, kwargs

    @classmethod
    def check(cls, env_config: Mapping[str, Any]) -> None:
        detect_language("a")

    def __init__(self, env_config: Mapping[str, Any] | None = None, extras: Mapping[str, Any] | None = None):
        super().__init__(env_config, extras)
        self.reward = self.env_config.get("reward", "fraction")
        if self.reward not in REWARDS:
            raise ValueError(f"environment.skyrl_gym.ifeval.reward={self.reward!r} is not one of {', '.join(REWARDS)}")
        self.loose = bool(self.env_config.get("loose", False))
        self.instructions, self.kwargs = self.parse_row(self.extras)
        self.prompt = ""

    def init(self, prompt: list[Message]) -> tuple[list[Message], dict[str, Any]]:
        asked = [message["content"] for message in prompt if message["role"] == "user"]
        self.prompt = asked[-1] if asked and isinstance(asked[-1], str) else ""
        return prompt, {}

    def step(self, action: str) -> StepOutput:
        scores = score(self.instructions, self.kwargs, self.prompt, action)
        followed = scores.loose if self.loose else scores.strict
        reward = float(all(followed)) if self.reward == "all" else sum(followed) / len(followed)
        return StepOutput([], reward, done=True, metadata=scores.metrics())


def _ground_truth(extras: Mapping[str, Any]) -> tuple[list[str], list[Any]]:
    spec = extras.get("reward_spec")
    truth = spec.get("ground_truth") if isinstance(spec, Mapping) else None
    if isinstance(truth, str):
        with contextlib.suppress(ValueError):
            truth = json.loads(truth)
    known = truth if isinstance(truth, Mapping) else {}
    instructions, kwargs = known.get("instruction_id_list"), known.get("kwargs")
    if not isinstance(instructions, list) or not isinstance(kwargs, list) or not len(instructions) == len(kwargs) > 0:
        columns = '{"instruction_id_list": [...], "kwargs": [...]}, lists of one length'
        raise ValueError(f'the row needs reward_spec={{"ground_truth": ...}} with {columns}, got {truth!r:.80}')
    return instructions, kwargs
