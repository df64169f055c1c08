"""Single-turn instruction following (IFEval, arXiv:2311.07911). The score counts the instructions that are followed."""

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
    """The instructions that a response follows, in the prompt's order."""

    strict: tuple[bool, ...]
    """True for each instruction that the response itself follows."""
    loose: tuple[bool, ...]
    """True for each instruction that the response or one of its variants follows; see `score`."""

    def metrics(self) -> dict[str, float]:
        """Return the accuracies of this response under the benchmark's names.

        The benchmark weights instruction-level accuracies by each prompt's number of instructions.

        Returns:
            prompt_level_strict_acc and prompt_level_loose_acc: 1.0 if all instructions are followed, else 0.0;
            inst_level_strict_acc and inst_level_loose_acc: the fraction of instructions that are followed.
        """
        return {
            "prompt_level_strict_acc": float(all(self.strict)),
            "inst_level_strict_acc": sum(self.strict) / len(self.strict),
            "prompt_level_loose_acc": float(all(self.loose)),
            "inst_level_loose_acc": sum(self.loose) / len(self.loose),
        }


def score(
    instructions: Sequence[str], kwargs: Sequence[Mapping[str, Any] | None], prompt: str, text: str
) -> IFEvalScores:
    """Check which instructions of a prompt a response follows.

    Only the final answer is checked (`reasoning.final_answer`), because instructions do not apply to reasoning. An
    instruction is followed loosely if a variant of the answer follows it: without the first line, the last line, both
    or neither, and with or without asterisks. A blank answer follows no instruction.

    Args:
        instructions: The benchmark's ids of the instructions.
        kwargs: Keyword arguments of each instruction. Those that are None are unset.
        prompt: The request, which some instructions require to be repeated.
        text: The model's response, including reasoning.

    Raises:
        ValueError: There are no instructions, the two sequences differ in length, or an instruction or its arguments
            are not in the benchmark.
    """
    if not instructions or len(instructions) != len(kwargs):
        raise ValueError(
            f"{len(instructions)} instructions with {len(kwargs)} kwargs: there must be at least one instruction, and "
            "one entry of kwargs for each"
        )
    checks = [
        (INSTRUCTIONS[id], parse_instruction_kwargs(id, arguments, prompt))
        for id, arguments in zip(instructions, kwargs, strict=True)
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
    shortened = ["\n".join(part).strip() for part in (lines[1:], lines[:-1], lines[1:-1])]
    return [*shortened, *(variant.replace("*", "") for variant in (text, *shortened))]


class IFEvalEnv(TextEnv):
    """A single-turn environment that rewards a response for the instructions that it follows.

    The setting `reward` is "fraction" (the fraction of the prompt's instructions that the response follows) or "all"
    (1.0 if it follows every instruction, else 0.0). The setting `loose` is true to count instructions that are followed
    loosely (see `score`). The metrics always include both kinds of accuracy. An empty response follows no instruction,
    and a truncated one is scored as it is.

    The row's ground truth has the form of google/IFEval, {"instruction_id_list": [...], "kwargs": [...]}, as JSON text
    or as columns.
    """

    @classmethod
    def parse_row(cls, extras: Mapping[str, Any]) -> tuple[list[str], list[Any]]:
        """Return the ids of the row's instructions and their keyword arguments, one entry for each instruction.

        Raises:
            ValueError: The ground truth is missing or malformed, or an instruction is unknown.
        """
        instructions, kwargs = _ground_truth(extras)
        for id, arguments in zip(instructions, kwargs, strict=True):
            parse_instruction_kwargs(id, arguments, "the request")
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
        requests = [message["content"] for message in prompt if message["role"] == "user"]
        self.prompt = requests[-1] if requests and isinstance(requests[-1], str) else ""
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
        columns = '{"instruction_id_list": [...], "kwargs": [...]}, lists of equal length'
        raise ValueError(f'the row needs reward_spec={{"ground_truth": ...}} with {columns}, got {truth!r:.80}')
    return instructions, kwargs
